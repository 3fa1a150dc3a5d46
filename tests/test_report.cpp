// The report: what it says of runs, of two beside each other, and of folders that are no run's. The page's own script
// is run in a real browser where there is one.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "io/json_config.h"
#include "tests/program.h"
#include "tests/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kTiny = TRIAD_SOURCE_DIR "/configs/tiny.json";

std::string train(const std::string& out, const std::string& more = "") {
  const Outcome outcome =
      run_program("train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + out + " " + more);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return out;
}

std::string report(const std::string& args) {
  const Outcome outcome = run_program("report " + args);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return read_text(outcome.output.substr(0, outcome.output.find('\n')));
}

// The JSON in the page's element of that id.
Json data_of(const std::string& page, const std::string& id = "data") {
  const std::string begin = "<script type=\"application/json\" id=\"" + id + "\">";
  const size_t at = page.find(begin);
  REQUIRE(at != std::string::npos);
  const size_t from = at + begin.size();
  return Json::parse(page.substr(from, page.find("</script>", from) - from));
}

// What a run with gates, selection, memory snapshots and trouble leaves: 2 layers, 1,000 steps.
void add_files(const std::string& out) {
  std::ostringstream gates, selection, heartbeats;
  gates << "step,layer,entropy_mean,entropy_min,max_mean,max_max,collapse_frac,cmp,sel,win\n";
  selection << "step,layer,k_mean,k_max,rows,pct_at_max\n";
  for (int step = 1; step <= 1000; ++step)
    for (int layer = 0; layer < 2; ++layer) {
      gates << step << "," << layer << "," << step * 0.001 << ",0,0.5,1,0,0.2,0.3,0.5\n";
      selection << step << "," << layer << ",752.5,1024,96,0.6\n";
    }
  write_text(out + "/gates.csv", gates.str());
  write_text(out + "/k_stats.csv", selection.str());
  write_text(out + "/mem_boot.json", R"({"triad": {"category_bytes": {"params": 1048576}}})");
  write_text(out + "/mem_step20.json", R"({"triad": {"category_bytes": {"params": 1048576, "activations": 3145728}}})");
  write_text(
      out + "/heartbeat_rank1.jsonl",
      R"({"schema":1,"ts":1,"iso":"now","pid":2,"rank":1,"step":7,"msg":"step_end","step_ms":5.5,"gpu_used_mib":10.5})"
      "\n"
      R"({"schema":1,"ts":1,"iso":"now","pid":2,"rank":1,"step":8,"msg":"hung","at":"<b>in matmul</b>"})"
      "\n");
  write_text(out + "/stackdump_rank1_5.txt", "");
}

}  // namespace

TEST_CASE("report: a run on one page, which needs nothing else", "[report]") {
  const TemporaryFolder folder;
  const std::string out =
      train(folder.file("run"), "--set train.eval_every=10 --set 'data.paths=[\"</script><script>alert(1)\"]'");
  add_files(out);
  const std::string page = report(out);
  CHECK(page.starts_with("<!doctype html>"));
  for (const char* outside : {"src=", "href=", "https:", "@import", "url("}) CHECK_FALSE(has(page, outside));
  CHECK_FALSE(has(page, "<script>alert"));
  CHECK(has(page, "&lt;/script&gt;&lt;script&gt;alert(1)"));
  CHECK_FALSE(has(page, "<b>in matmul</b>"));
  CHECK(has(page, "&lt;b&gt;in matmul"));
  for (const char* word : {"train.steps", "cpu_threads", "stackdump_rank1_5.txt", "prefers-color-scheme: dark"})
    CHECK(has(page, word));

  const Json run = data_of(page).at(0);
  CHECK(run["training"]["loss"].size() == 20);
  CHECK(run["training"]["loss"][4][0] == 5);
  CHECK(run["training"]["mfu"][0][1].is_null());  // empty on the CPU
  CHECK(run["validation"].size() == 2);
  CHECK(run["ranks"].size() == 2);
  CHECK(run["ranks"][0]["lines"]["step_ms"].size() == 20);
  CHECK(run["ranks"][1]["means"]["step_ms"] == 5.5);
  const Json& heat = run["gates"]["entropy_mean"];
  CHECK(heat["layers"].size() == 2);
  CHECK(heat["steps"].size() == 240);  // of 1,000: columns are means
  CHECK(heat["steps"][0] == 1);
  CHECK(heat["values"][1].size() == 240);
  CHECK(heat["values"][1][0].get<double>() == Approx(0.003));  // of steps 1 to 5
  CHECK(heat["values"][1][239].get<double>() == Approx(0.9985));
  CHECK(run["selection"]["k_mean"]["values"][0][7] == 752.5);
  CHECK(run["memory"][0]["label"] == "boot");
  CHECK(run["memory"][0]["categories"] == Json({{"params", 1}}));
  CHECK(run["memory"].back()["step"] == 20);
  CHECK(run["memory"].back()["categories"]["activations"] == 3);
  bool hung = false;
  for (const Json& event : run["events"]) hung = hung || (event["kind"] == "hung" && event["rank"] == 1);
  CHECK(hung);
}

TEST_CASE("report: two runs, what differs and where their losses part", "[report]") {
  const TemporaryFolder folder;
  const std::string a = train(folder.file("a")), same = train(folder.file("same")),
                    b = train(folder.file("b"), "--set train.lr=2e-3 --set train.steps=15");
  const std::string page = report(a + " --vs " + b + " --out " + folder.file("vs.html"));
  CHECK_FALSE(fs::exists(a + "/report.html"));
  CHECK(data_of(page).size() == 2);
  CHECK(data_of(page, "parting")["first"] == 2);  // the first loss is of the same weights
  CHECK(has(page, "The losses part at step 2"));
  CHECK(has(page, "15 steps are common to both."));
  const size_t differs = page.find("What differs"), next = page.find("id=\"charts\"");
  const std::string table = page.substr(differs, next - differs);
  CHECK(has(table, "<td>train.lr</td><td>0.001</td><td>0.002</td>"));
  CHECK(has(table, "<td>train.steps</td><td>20</td><td>15</td>"));
  CHECK_FALSE(has(table, "train.seq_len"));
  const std::string alike = report(a + " --vs " + same);
  CHECK(has(alike, "The losses are the same at all 20 steps"));
  CHECK(data_of(alike, "parting")["first"].is_null());
}

TEST_CASE("report: a run that was resumed is drawn once, and a run without heartbeats compares with one that has them",
          "[report]") {
  const TemporaryFolder folder;
  const std::string out = train(folder.file("run"), "--set train.save_every=10");
  train(folder.file("run"), "--overwrite --resume " + out + "/checkpoints/step_10");  // steps 11 to 20 a second time
  Json run = data_of(report(out)).at(0);
  for (const char* line : {"step_ms", "compute_ms", "host_mib"}) {
    const Json& points = run["ranks"][0]["lines"][line];
    REQUIRE(points.size() == 20);
    for (int64_t i = 0; i < 20; ++i) CHECK(points[static_cast<size_t>(i)][0] == i + 1);
  }
  const std::string bare = train(folder.file("bare"), "--set train.save_every=10 --set log.heartbeat_every=0");
  for (const std::string& pair : {out + " --vs " + bare, bare + " --vs " + out}) {
    const std::string page = report(pair);
    CHECK(has(page, "The losses are the same at all 20 steps"));
    CHECK(data_of(page, "parting")["first"].is_null());
  }
  const std::string other = train(folder.file("other"), "--set train.lr=2e-3");
  CHECK(data_of(report(bare + " --vs " + other), "parting")["first"] == 2);
}

TEST_CASE("report: long runs are thinned, spikes stay", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  fs::create_directory(out);
  write_text(out + "/config.json", "{}");
  std::ostringstream rows;
  rows << "step,loss,lr,tokens_per_s,grad_norm,step_ms,mfu\n";
  for (int step = 1; step <= 100000; ++step) rows << step << "," << (step == 77777 ? 99 : 2) << ",1,1,1,1,\n";
  write_text(out + "/training.csv", rows.str());
  const std::string page = report(out);
  const Json points = data_of(page).at(0)["training"]["loss"];
  CHECK(points.size() <= 1500);
  bool spike = false;
  for (const Json& point : points) spike = spike || (point[0] == 77777 && point[1] == 99);
  CHECK(spike);
  CHECK(page.size() < 500000);
  for (const char* absent : {"env.json", "heartbeats"}) CHECK(has(page, absent));
}

TEST_CASE("report: a run's state is its last heartbeat that tells of one", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  fs::create_directory(out);
  const auto state = [&](const std::vector<std::string>& told, const std::string& on_nonfinite) {
    write_text(out + "/config.json", R"({"train": {"on_nonfinite": ")" + on_nonfinite + "\"}}");
    std::string lines;
    for (const std::string& msg : told) lines += R"({"schema": 1, "step": 3, "msg": ")" + msg + "\"}\n";
    write_text(out + "/heartbeat_rank0.jsonl", lines);
    const std::string page = report(out);
    const size_t end = page.find("</b><span>state</span>"), begin = page.rfind('>', end - 1) + 1;
    return page.substr(begin, end - begin);
  };
  CHECK(state({"boot", "hung"}, "stop") == "failed: hung");
  CHECK(state({"boot", "hung", "progress", "stackdump"}, "stop") == "failed: hung");
  CHECK(state({"boot", "hung", "recovered", "stackdump"}, "stop") == "running, or killed");
  CHECK(state({"stackdump"}, "stop") == "running, or killed");
  CHECK(state({"boot", "nonfinite"}, "stop") == "failed: nonfinite");
  CHECK(state({"boot", "nonfinite", "checkpoint"}, "stop") == "failed: nonfinite");
  CHECK(state({"boot", "nonfinite"}, "skip") == "running, or killed");
  CHECK(state({"boot", "nonfinite", "done"}, "skip") == "complete");
}

TEST_CASE("report: folders that are no run's, and files that are broken", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const auto refused = [&](const std::string& args, const std::vector<std::string>& words) {
    const Outcome outcome = run_program("report " + args);
    INFO(args << ": " << outcome.output);
    CHECK(outcome.exit_code == 1);
    for (const std::string& word : words) {
      INFO(word);
      CHECK(has(outcome.output, word));
    }
    CHECK_FALSE(fs::exists(out + "/report.html"));
  };
  refused(out, {out, "no such folder"});
  write_text(folder.file("file"), "x");
  refused(folder.file("file"), {"is not a folder"});
  fs::create_directory(out);
  refused(out, {"holds no run", "config.json"});
  write_text(out + "/config.json", "{\"train\": ");
  refused(out, {"config.json"});
  write_text(out + "/config.json", "[1]");
  refused(out, {"config.json", "no JSON object"});
  write_text(out + "/config.json", "{}");
  const std::string header = "step,loss,lr,tokens_per_s,grad_norm,step_ms,mfu\n";
  write_text(out + "/training.csv", "when,what\n");
  refused(out, {"training.csv", "no column step"});
  write_text(out + "/training.csv", header + "1,2,3,4,5,6,\n2,2");  // a row that is being written is no fault
  write_text(out + "/heartbeat_rank0.jsonl", "{\"step\": 1, \"msg\": \"boot\", \"schema\": 9}\n");
  refused(out, {"heartbeat_rank0.jsonl line 1", "schema is 9"});
  write_text(out + "/heartbeat_rank0.jsonl", "{\"step\": 1, \"msg\": \"boot\", \"schema\": 1}\n{\"st");
  refused(out + " --vs " + folder.file("none"), {folder.file("none"), "no such folder"});
  write_text(out + "/mem_boot.json", "{");
  refused(out, {"mem_boot.json"});
  fs::remove(out + "/mem_boot.json");
  CHECK(data_of(report(out)).at(0)["training"]["loss"].size() == 1);
}

TEST_CASE("report: a damaged line, or a name with a number of nobody, costs no other", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  fs::create_directory(out);
  write_text(out + "/config.json", "{}");
  write_text(out + "/training.csv",
             "step,loss,lr,tokens_per_s,grad_norm,step_ms,mfu\n1,2,3,4,5,6,\n2,bad,3,4,5,6,\n3,2,3\nx,2,3,4,5,6,\n"
             "4,2.5,3,4,5,6,\n");
  write_text(out + "/val.csv", "step,val_loss,ppl\n" + std::string("\0\0\n", 3) + "4,2,7\n");
  write_text(out + "/gates.csv",
             "step,layer,entropy_mean,entropy_min,max_mean,max_max,collapse_frac,cmp,sel,win\n"
             "1,0,1,1,1,1,0,1,0,0\n2,\x1b[2J,1,1,1,1,0,1,0,0\n3,0,1,1,1,1,0,1,0,0\n");
  write_text(out + "/heartbeat_rank0.jsonl",
             "{\"step\": 1, \"msg\": \"boot\"}\n{\"step\"\n[]\n{\"step\": 4, \"msg\": \"step_end\", \"step_ms\": 7}\n");
  const std::string nobodys = "99999999999999999999";
  write_text(out + "/heartbeat_rank" + nobodys + ".jsonl", "{\"step\": 1, \"msg\": \"boot\"}\n");
  write_text(out + "/mem_step" + nobodys + ".json", R"({"triad": {"category_bytes": {"params": 1048576}}})");
  const Outcome outcome = run_program("report " + out);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  for (const char* word :
       {"training.csv line 3: loss is \"bad\"", "training.csv line 4 is left out: 3 fields under a header of 7",
        "training.csv line 5: step is \"x\"", "val.csv line 2 is left out", "gates.csv line 3: layer is \"\\x1b[2J\"",
        "heartbeat_rank0.jsonl line 2 is left out", "heartbeat_rank0.jsonl line 3 is left out"})
    CHECK(has(outcome.output, word));
  const Json run = data_of(read_text(out + "/report.html")).at(0);
  CHECK(run["training"]["loss"] == Json::parse("[[1.0, 2.0], [2.0, null], [4.0, 2.5]]"));
  CHECK(run["validation"] == Json::parse("[[4.0, 2.0]]"));
  CHECK(run["gates"]["cmp"]["values"] == Json::parse("[[1.0, 1.0]]"));
  REQUIRE(run["ranks"].size() == 1);
  CHECK(run["ranks"][0]["lines"]["step_ms"] == Json::parse("[[4.0, 7.0]]"));
  CHECK(run["memory"].empty());
}

TEST_CASE("report: a browser draws every chart", "[report]") {
  if (run_command("command -v chromium").exit_code != 0) {
    std::printf("SKIPPED: no chromium\n");
    return;
  }
  const TemporaryFolder folder;
  const std::string out = train(folder.file("run"), "--set train.eval_every=10");
  add_files(out);
  report(out);
  const Outcome page = run_command(
      "timeout 120 chromium --headless --no-sandbox --disable-gpu --enable-logging=stderr --virtual-time-budget=5000 "
      "--dump-dom file://" +
      out + "/report.html");
  REQUIRE(page.exit_code == 0);
  CHECK_FALSE(has(page.output, "Uncaught"));
  size_t charts = 0;
  for (size_t at = 0; (at = page.output.find("<svg ", at)) != std::string::npos; ++at) ++charts;
  // Loss, validation, throughput, norm, rate; two of time; memory, host, GPU; 7 of gates, 5 of selection.
  CHECK(charts == 22);
  // NaN in a path would be a chart that shows nothing.
  CHECK_FALSE(has(page.output, "NaN"));
}
