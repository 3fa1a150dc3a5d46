// triad report on a folder of runs and on several; what it shows of samples and evaluations; a page that is watched.
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "io/folder_lock.h"
#include "io/json_config.h"
#include "tests/support/checked_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/report_page.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kMarkup = "</script><script>alert(1)</script>";

// A folder that looks like a run's, with the heartbeats of a few steps and the last one's message.
void make_run(const std::string& out, const std::string& config, const std::string& last, double loss = 3) {
  fs::create_directories(out);
  write_text(out + "/config.json", config);
  std::string lines;
  for (int step = 1; step <= 40; ++step)
    lines += Json({{"ts", 100 + step},
                   {"step", step},
                   {"msg", "step_end"},
                   {"loss", loss + 9.0 / step / step},
                   {"lr", 1e-3},
                   {"grad_norm", 1.5},
                   {"tokens_per_s", 1000 + step},
                   {"step_ms", 10}})
                 .dump() +
             "\n";
  write_text(out + "/heartbeat_rank0.jsonl",
             lines + Json({{"ts", 141}, {"step", 40}, {"msg", last}, {"why", "<i>because"}}).dump() + "\n");
}

// The table's cell of a run in a column, as text.
std::string cell(const std::string& page, const std::string& run, const std::string& column) {
  const size_t row = page.find(run + "</"), at = page.find("<td data-name=\"" + column + "\"", row);
  if (row == std::string::npos || at == std::string::npos || at > page.find("</tr>", row)) return "absent";
  const size_t begin = page.find('>', at) + 1;
  return page.substr(begin, page.find("</td>", begin) - begin);
}

}  // namespace

TEST_CASE("report: rate, norm and throughput have every step that has a heartbeat", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  run_ok(train_on(out, "cpu", "--set log.every=20 --set train.eval_every=20"));
  const Json run = data_of(report(out)).at(0), beats = heartbeats(out, 0, "step_end");
  for (const char* line : {"loss", "lr", "grad_norm", "tokens_per_s"}) {
    INFO(line);
    REQUIRE(run["training"][line].size() == 20);
    for (size_t i = 0; i < 20; ++i) CHECK(run["training"][line][i] == Json({i + 1.0, beats[i][line].get<double>()}));
  }
  CHECK(run["training"]["mfu"].size() == 1);
  CHECK(run["validation"].size() == 1);
}

TEST_CASE("report: a folder of runs becomes a table, in which broken runs have a row", "[report]") {
  const TemporaryFolder folder;
  make_run(folder.file("runs/a"), R"({"train": {"lr": 0.001, "steps": 40}, "model": {"dim": 64}})", "done");
  make_run(folder.file("runs/sweep/b"), R"({"train": {"lr": 0.002, "steps": 40}, "model": {"dim": 64}})", "failed", 4);
  make_run(folder.file("runs/<b>c"), R"({"train": {"lr": 0.002, "steps": 80}, "log": {"every": 5}})", "stopped");
  fs::create_directory(folder.file("runs/no_run"));
  write_text(folder.file("runs/no_run/config.json"), "{}");  // weights of another program, say
  make_run(folder.file("runs/broken"), "{\"train\": ", "done");
  write_text(folder.file("runs/a/report.html"), "");
  const std::string page = report(folder.file("runs"));
  CHECK(fs::exists(folder.file("runs/report.html")));
  CHECK(data_of(page).size() == 3);
  CHECK(has(page, "<a href=\"a/report.html\">a</a>"));
  CHECK(cell(page, "a", "state") == "complete");
  CHECK(cell(page, "b", "state") == "failed: &lt;i&gt;because");
  CHECK(has(page, "data-name=\"state\" class=\"warn\">failed"));
  CHECK(cell(page, "&lt;b&gt;c", "state") == "stopped: &lt;i&gt;because");
  CHECK(cell(page, "a", "steps") == "40 of 40");
  CHECK(cell(page, "a", "last loss") == "3.0056");
  CHECK(cell(page, "a", "tokens/s at the end") == "1,040");
  CHECK(cell(page, "b", "train.lr") == "0.002");
  CHECK(cell(page, "a", "model.dim") == "64");
  CHECK(cell(page, "&lt;b&gt;c", "model.dim") == "–");
  CHECK(cell(page, "a", "log.every") == "absent");  // what a run prints does not matter in the table
  CHECK(has(page, "<td>log.every</td>"));
  CHECK(has(page, "<td>0.002</td><td>&lt;b&gt;c, b</td>"));
  CHECK(has(page, ">broken</th><td data-name=\"state\" class=\"warn\""));
  CHECK_FALSE(has(page, "no_run"));
  // What charts of many runs do not show is left out.
  CHECK(data_of(page).at(0)["ranks"].empty());

  refused("report " + folder.file("runs/no_run/.."), 0, {"report.html"});
  fs::create_directory(folder.file("empty"));
  refused("report " + folder.file("empty"), 1, {"empty holds no run: neither it nor a folder in it"});
  make_run(folder.file("all_broken/x"), "{", "done");
  refused("report " + folder.file("all_broken"), 1, {"x/config.json"});
  CHECK_FALSE(fs::exists(folder.file("all_broken/report.html")));

  // Runs that are named one by one have all charts.
  const std::string three = report(folder.file("runs/a") + " --vs " + folder.file("runs/sweep/b") + " --vs '" +
                                   folder.file("runs/<b>c") + "'");
  CHECK(fs::exists(folder.file("runs/a/report_vs_b_and_1.html")));
  CHECK(data_of(three).size() == 3);
  CHECK_FALSE(data_of(three).at(0)["ranks"].empty());
  CHECK(cell(three, "b", "train.lr") == "0.002");
}

TEST_CASE("report: samples and results of `triad eval` are on the page, escaped", "[report][eval]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.txt"), std::string(4000, 'a') + kMarkup);
  const std::string out = folder.file("run"), keys = "--set data.kind=text --set 'data.paths=[\"" +
                                                     folder.file("a.txt") +
                                                     "\"]' --set train.eval_every=10 --set 'log.samples=[\"" + kMarkup +
                                                     "\"]' --set log.sample_tokens=4 --set train.save_every=10 ";
  run_ok(train_on(out, "cpu", keys));
  const std::string eval = "eval --device cpu --data " + folder.file("a.txt") + " --checkpoint ";
  run_ok(eval + out);
  run_ok(eval + out + "/checkpoints/step_10");
  const std::string page = report(out);
  const Json run = data_of(page).at(0);
  REQUIRE(run["samples"].size() == 2);
  CHECK(run["samples"][1]["step"] == 20);
  CHECK(run["samples"][1]["samples"][0]["prompt"] == kMarkup);
  REQUIRE(run["evaluations"].size() == 2);
  CHECK(run["evaluations"][0]["step"] == 20);
  CHECK(run["evaluations"][1]["step"] == 10);
  CHECK(run["evaluations"][0]["bits_per_byte"].is_number());
  CHECK_FALSE(has(page, "<script>alert"));
  CHECK(has(page, "triad eval</h3>"));
  CHECK(run["bits_per_byte"].size() == 2);
  CHECK(has(page, "<span>bits per byte</span>"));
  // A resume removes what belongs to later steps, and another program's file is left alone.
  run_ok(train_on(out, "cpu", keys + "--overwrite --resume " + out + "/checkpoints/step_10"));
  CHECK(lines(out + "/eval.jsonl").size() == 1);
  write_text(out + "/eval.jsonl", "mine\n");
  const std::string warned = run_ok(eval + out);
  CHECK(has(warned, "warning: the evaluation is not kept for the report"));
  CHECK(read_text(out + "/eval.jsonl") == "mine\n");
  const Outcome damaged = run_program("report " + out);
  CHECK(damaged.exit_code == 0);
  CHECK(has(damaged.output, "eval.jsonl line 1 is left out: \"mine\" is no object with time, data, loss"));
  // Weights without a run have no such file.
  run_ok("init " + kTiny + " --out " + folder.file("init"));
  run_ok(eval + folder.file("init"));
  CHECK_FALSE(fs::exists(folder.file("init/eval.jsonl")));
}

TEST_CASE("report: a run that fails records why, and its report begins with that", "[report][train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const Outcome failed =
      run_program(train_on(out, "cpu", "--set train.lr=1e30 --set train.on_nonfinite=stop --set train.warmup_steps=0"));
  INFO(failed.output);
  CHECK(failed.exit_code == 1);
  const std::vector<Json> ends = heartbeats(out, 0, "failed");
  REQUIRE(ends.size() == 1);
  const std::string why = ends[0]["why"];
  CHECK(has(why, "are not both finite"));
  CHECK(has(failed.output, why));
  const std::string page = report(out);
  CHECK(has(page, "<p class=\"failed\" role=\"alert\"><b>failed</b>: " + why + "</p>"));
  CHECK(page.find("role=\"alert\"") < page.find("class=\"tiles\""));
}

TEST_CASE("report: events are sorted by time", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  fs::create_directory(out);
  write_text(out + "/config.json", "{}");
  // A resume at step 10 comes after the failure at step 20.
  write_text(out + "/heartbeat_rank0.jsonl", R"({"ts": 1, "step": 0, "msg": "boot"})"
                                             "\n"
                                             R"({"ts": 5, "step": 20, "msg": "anomaly"})"
                                             "\n"
                                             R"({"ts": 9, "step": 10, "msg": "boot"})"
                                             "\n");
  write_text(out + "/heartbeat_rank1.jsonl", R"({"ts": 7, "step": 3, "msg": "slow"})"
                                             "\n");
  std::vector<std::string> kinds;
  const Json run = data_of(report(out)).at(0);
  for (const Json& event : run["events"]) kinds.push_back(event["kind"]);
  CHECK(kinds == std::vector<std::string>{"boot", "anomaly", "slow", "boot"});
}

TEST_CASE("report: a watched page is written until the run ends, or a signal comes", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), page = out + "/report.html";
  make_run(out, R"({"train": {"steps": 80}})", "boot");
  // Without a process that trains there is one page.
  CHECK(has(run_ok("report --watch " + out), "no run trains any more"));
  CHECK(data_of(read_text(page), "page")["refresh_s"] == 0);
  for (const bool signal : {false, true}) {
    INFO(signal);
    fs::remove(page);
    const std::string line = R"({"ts": 142, "step": 41, "msg": "step_end", "loss": 2})"
                             "\n";
    make_run(out, R"({"train": {"steps": 80}})", "boot");
    BackgroundProgram holder("", "exec flock -F " + out + " sleep 300; ");
    for (int tries = 0; tries < 18000 && lock_holder(out).empty(); ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    BackgroundProgram watch("report --watch --every 1 " + out);
    wait_for_file(page);
    CHECK(data_of(read_text(page), "page")["refresh_s"] == 1);
    std::ofstream(out + "/heartbeat_rank0.jsonl", std::ios::app) << line;
    wait_for_text(page, "[41.0,2.0]");
    if (signal)
      watch.send(SIGINT);
    else
      std::ofstream(out + "/heartbeat_rank0.jsonl", std::ios::app) << R"({"ts": 143, "step": 41, "msg": "done"})"
                                                                      "\n";
    CHECK(watch.wait() == 0);
    CHECK(has(read_text(watch.output_file()), signal ? "stopped watching" : "no run trains any more"));
    CHECK(data_of(read_text(page), "page")["refresh_s"] == 0);
    holder.send(SIGKILL);
    holder.wait();
  }
}

TEST_CASE("report: a browser draws the table of many runs, and saves charts", "[report]") {
  if (!require_browser()) return;
  const TemporaryFolder folder;
  for (int i = 0; i < 12; ++i)
    make_run(folder.file(fmt::format("runs/r{:02}", i)),
             fmt::format(R"({{"train": {{"lr": {}, "steps": 40}}}})", i + 1), i == 3 ? "failed" : "done",
             3 + 0.1 * ((i * 5) % 12));
  const std::string page = report(folder.file("runs"));
  const std::string dom = drawn(folder, page, R"(
    const texts = [];
    document.querySelectorAll("table.runs thead button").forEach(b => { if (b.textContent === "last loss") b.click(); });
    const rows = [...document.querySelectorAll("table.runs tbody tr")];
    texts.push("order " + rows.map(r => r.dataset.run).join(" "));
    const boxes = document.querySelectorAll("table.runs input");
    const paths = () => document.querySelectorAll(".chart svg.plot path").length;
    const before = paths();
    boxes[0].click();
    texts.push("hidden " + (paths() < before));
    texts.push("sparklines " + document.querySelectorAll("td.spark svg path").length);
    const names = [];
    URL.createObjectURL = blob => { blob.text().then(t => names.push(blob.type + " " + t.split("\n")[0])); return "#"; };
    [...document.querySelectorAll(".save button")].filter(b => b.textContent === "CSV").slice(0, 1).forEach(b => b.click());
    setTimeout(() => { const p = document.createElement("p"); p.textContent = texts.concat(names).join(" | "); document.querySelector("main").prepend(p); }, 200);)");
  CHECK(has(dom, "order 0 5 10 3 8 1 6 11 4 9 2 7"));
  CHECK(has(dom, "hidden true"));
  CHECK(has(dom, "sparklines 12"));
  CHECK(has(dom, "text/csv step,r01,r02"));
  CHECK(has(dom, "Training loss"));
  CHECK_FALSE(has(dom, "<section class=\"card\" style=\"grid-column: span 5"));
  for (const char* once : {"Samples</h2>", "Gates</h2>", "Time</h2>"}) CHECK_FALSE(has(dom, once));
}

TEST_CASE("report: in a browser, axes have about five ticks and leave out a first spike", "[report]") {
  if (!require_browser()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  make_run(out, R"({"train": {"steps": 40}})", "done");
  const std::string dom = drawn(folder, report(out), R"(
    const found = [];
    const ranges = [[0, 1], [0, 1234], [3.1, 3.3], [-7, 7], [1, 40], [99, 101], [0, 1e6]];
    for (const [low, high] of ranges) found.push(ticks(low, high).length, wholeTicks(low, 1000 * high, 5).length);
    for (const [low, high] of [[0.1, 9], [1e-4, 1], [3, 3.2], [1e-9, 1e9], [0.5, 20]]) found.push(logTicks(low, high).length);
    for (const [low, high] of [[0, 50], [0, 400], [0, 5000], [0, 86400], [0, 1e6]]) found.push(timeTicks(low, high, 5).length);
    const p = document.createElement("p");
    p.textContent = "ticks " + found.every(n => n >= 4 && n <= 7) + " " + found.join(" ");
    document.querySelector("main").prepend(p);
    const links = [...document.querySelectorAll("#contents a")];
    const q = document.createElement("p");
    q.textContent = "links " + (links.length > 1 && links.every(a => document.querySelector(a.getAttribute("href"))));
    document.querySelector("main").prepend(q);)");
  INFO(dom.substr(0, 2000));
  CHECK(has(dom, "ticks true"));
  CHECK(has(dom, "links true"));
  CHECK(has(dom, "↑ 12 at the beginning"));
  const std::string all = drawn(folder, report(out), "document.querySelector('input[name=whole]').click();");
  CHECK_FALSE(has(all, "at the beginning"));
}
