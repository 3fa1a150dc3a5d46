// triad report: pages for one run and for two, and folders that contain no run. A real browser, if there is one, runs
// the page's script.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "io/json_config.h"
#include "tests/support/report_page.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

std::string train(const std::string& out, const std::string& more = "") {
  const Outcome outcome =
      run_program("train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + out + " " + more);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return out;
}

// Returns the text in the tile with this name; empty if there is none.
std::string tile(const std::string& page, const std::string& name) {
  const size_t end = page.find("</b><span>" + name + "</span>");
  if (end == std::string::npos) return "";
  const size_t begin = page.rfind('>', end - 1) + 1;
  return page.substr(begin, end - begin);
}

// Adds files to a run's folder: gates, selection, memory snapshots and anomalies for 2 layers and 1,000 steps.
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

TEST_CASE("report: a run on one self-contained page", "[report]") {
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
  CHECK(tile(page, "state") == "complete");
  CHECK(tile(page, "steps") == "20 of 20");
  CHECK(tile(page, "tokens") == "1,920");
  CHECK(tile(page, "parameters") == "43,270");
  CHECK(tile(page, "precision") == "fp32");
  CHECK(tile(page, "attention") == "nsa");
  CHECK(tile(page, "data") == "synthetic");
  for (const char* known :
       {"last loss", "validation loss", "perplexity", "wall time", "tokens/s at the end", "peak MiB"})
    CHECK(tile(page, known).find_first_of("123456789") != std::string::npos);
  CHECK(has(tile(page, "device"), "CPU"));
  CHECK(tile(page, "bits per byte").empty());  // unknown, because synthetic tokens aren't text bytes

  const Json run = data_of(page).at(0);
  CHECK(run["training"]["loss"].size() == 20);
  CHECK(run["training"]["loss"][4][0] == 5);
  CHECK(run["training"]["mfu"][0][1].is_null());  // MFU is unknown on the CPU
  CHECK(run["validation"].size() == 2);
  CHECK(run["tokens_per_step"] == 96);
  CHECK(run["bits_per_nat"].is_null());
  REQUIRE(run["clock"].size() == 20);
  for (size_t i = 1; i < 20; ++i) CHECK(run["clock"][i][1].get<double>() >= run["clock"][i - 1][1].get<double>());
  CHECK(run["sample"]["step"] == 20);
  CHECK(run["sample"]["lists"].size() == 2);
  CHECK(run["gradient_norms"].is_null());  // the run did not record them
  CHECK(run["ranks"].size() == 2);
  CHECK(run["ranks"][0]["lines"]["step_ms"].size() == 20);
  CHECK(run["ranks"][1]["means"]["step_ms"] == 5.5);
  const Json& heat = run["gates"]["entropy_mean"];
  CHECK(heat["layers"].size() == 2);
  CHECK(heat["steps"].size() == 240);  // each of 240 columns is a mean over some of the 1,000 steps
  CHECK(heat["steps"][0] == 1);
  CHECK(heat["values"][1].size() == 240);
  CHECK(heat["values"][1][0].get<double>() == Approx(0.003));  // mean over steps 1 to 5
  CHECK(heat["values"][1][239].get<double>() == Approx(0.9985));
  CHECK(run["selection"]["k_mean"]["values"][0][7] == 752.5);
  CHECK(run["memory"][0]["label"] == "boot");
  CHECK(run["memory"][0]["categories"] == Json({{"params", 1}}));
  CHECK(run["memory"].back()["step"] == 20);
  CHECK(run["memory"].back()["categories"]["activations"] == 3);
  bool hung = false;
  for (const Json& event : run["events"]) hung = hung || (event["kind"] == "hung" && event["rank"] == 1);
  CHECK(hung);

  // Two ranks that share sequences train on as many tokens as one. Stage losses aren't compared.
  CHECK(has(page, "best validation loss"));
  Json config = read_json_file(out + "/config.json"), environment = read_json_file(out + "/env.json");
  config["dist"]["context"] = environment["world"] = 2;
  write_text(out + "/config.json", config.dump());
  write_text(out + "/env.json", environment.dump());
  CHECK(data_of(report(out)).at(0)["tokens_per_step"] == 96);
  config["train"]["stages"] = Json::array({{{"steps", 10}}, {{"steps", 10}, {"seq_len", 24}}});
  write_text(out + "/config.json", config.dump());
  const std::string staged_page = report(out);
  CHECK(data_of(staged_page).at(0)["tokens_per_step"].is_null());
  CHECK_FALSE(has(staged_page, "best validation loss"));
}

TEST_CASE("report: two runs, their differing options and the first step with different losses", "[report]") {
  const TemporaryFolder folder;
  const std::string a = train(folder.file("a")), same = train(folder.file("same")),
                    b = train(folder.file("b"), "--set train.lr=2e-3 --set train.steps=15");
  const std::string own = report(a);
  const std::string page = report(a + " --vs " + b);
  CHECK(read_text(a + "/report.html") == own);  // a comparison does not replace the run's own report
  write_text(b + "/report.html", "<html>a user's page</html>");
  const Outcome theirs = run_program("report " + b);
  CHECK(theirs.exit_code == 1);
  CHECK(theirs.output.find("report.html is no page that `triad report` has written") != std::string::npos);
  CHECK(read_text(b + "/report.html") == "<html>a user's page</html>");
  CHECK(read_text(a + "/report_vs_b.html") == page);
  const std::string elsewhere = report(a + " --vs " + b + " --out " + folder.file("vs.html"));
  CHECK(elsewhere == page);
  CHECK(read_text(folder.file("vs.html")) == page);
  report(a + " --vs " + same + "/");
  CHECK(fs::exists(a + "/report_vs_same.html"));
  CHECK(read_text(a + "/report_vs_b.html") == page);
  CHECK(data_of(page).size() == 2);
  // Both runs' first loss comes from the same initial weights.
  CHECK(data_of(page, "first_difference")["first"] == 2);
  CHECK(has(page, "The losses first differ at step 2"));
  CHECK(has(page, "15 steps are common to both."));
  const size_t differs = page.find("What differs"), next = page.find("id=\"charts\"");
  const std::string table = page.substr(differs, next - differs);
  CHECK(has(table, "<td>train.lr</td><td>0.001</td><td>0.002</td>"));
  CHECK(has(table, "<td>train.steps</td><td>20</td><td>15</td>"));
  CHECK_FALSE(has(table, "train.seq_len"));
  CHECK(has(table, "<td>tokens</td><td>1,920</td><td>1,440</td><td>-480 (-25.00%)</td>"));
  CHECK(has(table, "<td>parameters</td><td>43,270</td><td>43,270</td><td>none</td>"));
  const Json runs = data_of(page), difference = data_of(page, "difference");
  REQUIRE(difference["loss"]["steps"].size() == 15);
  for (size_t i = 0; i < 15; ++i) {
    const Json &left = runs[0]["training"]["loss"][i], &right = runs[1]["training"]["loss"][i];
    CHECK(difference["loss"]["steps"][i][0] == left[0]);
    CHECK(difference["loss"]["steps"][i][1].get<double>() ==
          Approx(right[1].get<double>() - left[1].get<double>()).margin(1e-12));
    CHECK(difference["loss"]["tokens"][i][0].get<double>() == 96 * left[0].get<double>());
    CHECK(difference["loss"]["tokens"][i][1].get<double>() ==
          Approx(difference["loss"]["steps"][i][1].get<double>()).margin(1e-9));
  }
  CHECK_FALSE(difference["validation"].contains("steps"));
  CHECK(data_of(own, "difference").is_null());
  const std::string alike = report(a + " --vs " + same);
  CHECK(has(alike, "The losses are the same at all 20 steps"));
  CHECK(data_of(alike, "first_difference")["first"].is_null());
}

TEST_CASE("report: a resumed run has each step once, and a run without heartbeats can be compared", "[report]") {
  const TemporaryFolder folder;
  const std::string out = train(folder.file("run"), "--set train.save_every=10");
  train(folder.file("run"), "--overwrite --resume " + out + "/checkpoints/step_10");  // trains steps 11 to 20 again
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
    CHECK(data_of(page, "first_difference")["first"].is_null());
  }
  const std::string other = train(folder.file("other"), "--set train.lr=2e-3");
  CHECK(data_of(report(bare + " --vs " + other), "first_difference")["first"] == 2);
}

TEST_CASE("report: long runs are downsampled, and spikes stay", "[report]") {
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
  // Without data there is no card.
  for (const char* absent : {">env.json<", ">Events<", ">Ranks<", ">Fallbacks", ">Stack dumps<", "What happened"})
    CHECK_FALSE(has(page, absent));
  for (const char* unknown :
       {"state", "device", "parameters", "validation loss", "tokens", "commit", "peak MiB", "anomalies"})
    CHECK(tile(page, unknown).empty());
  CHECK(tile(page, "steps") == "100,000");
  CHECK(tile(page, "wall time") == "1 min 40 s");  // each step takes one millisecond
}

TEST_CASE("report: gradient norms by layer, from heartbeats or the ledger", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  fs::create_directory(out);
  write_text(out + "/config.json", "{}");
  write_text(out + "/grad_ledger.csv",
             "step,parameter,norm,zero,not_finite\n"
             "10,embed.weight,7,0,0\n10,blocks.0.norm1.weight,3,0,0\n10,blocks.0.mlp.fc1.weight,4,0,0\n"
             "10,blocks.1.mlp.fc1.weight,2,0,0\nx,blocks.0.mlp.fc1.weight,9,0,0\n15,blocks.0.mlp.fc1.weight,,0,0\n20,"
             "blocks.1.mlp.fc1.weight,6,0,0\n");
  const auto norms = [&] { return data_of(report(out)).at(0)["gradient_norms"]; };
  CHECK(norms()["steps"] == Json({10, 20}));
  CHECK(norms()["layers"] == Json({0, 1}));
  CHECK(norms()["values"] == Json::array({{5.0, nullptr}, {2.0, 6.0}}));
  write_text(out + "/heartbeat_rank0.jsonl",
             R"({"step": 3, "msg": "step_end", "loss": 2, "layer_grad_norms": [0.5, 0.25]})"
             "\n");
  CHECK(norms()["steps"] == Json({3}));
  CHECK(norms()["values"] == Json::array({Json::array({0.5}), Json::array({0.25})}));
}

TEST_CASE("report: text from a run's files cannot end an element of the page", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), markup = "</script></style><script>alert(1)</script><!--<script>";
  fs::create_directory(out);
  Json config = {{"model", {{"attention", markup}}},
                 {"data", {{"kind", "text"}, {"paths", {markup, markup}}, {"tokenizer", markup}}},
                 {"runtime", {{"precision", markup}}},
                 {markup, {{markup, markup}}}};
  config["train"] = {{"steps", markup}, {"seq_len", markup}};
  write_text(out + "/config.json", config.dump());
  const Json environment = {{"build", "triad (" + markup + ")"},
                            {"device", markup},
                            {"device_name", markup},
                            {"world", markup},
                            {markup, markup}};
  write_text(out + "/env.json", environment.dump());
  write_text(
      out + "/heartbeat_rank0.jsonl",
      Json({{"step", 1}, {"msg", markup}, {"iso", markup}, {"text", markup}, {"layer_grad_norms", markup}}).dump() +
          "\n" + Json({{"step", 1}, {"msg", "step_end"}, {"loss", markup}, {"step_ms", 1}}).dump() + "\n");
  write_text(out + "/fallback_counters.csv",
             "step,layer,branch,kernel,reason,count\n1,0," + markup + "," + markup + "," + markup + ",1\n");
  write_text(out + "/.anomaly_type", markup);
  write_text(out + "/mem_boot.json", Json({{"triad", {{"category_bytes", {{markup, 1048576}}}}}}).dump());
  write_text(out + "/stackdump_rank0_" + std::string("<script>alert(2)"), "");
  for (const std::string& page : {report(out), report(out + " --vs " + out)}) {
    for (const char* raw : {"<script>alert", "</style><script>", "<!--"}) CHECK_FALSE(has(page, raw));
    CHECK(has(page, "&lt;script&gt;alert(1)"));
    CHECK(count(page, "</script>") == 5);
    CHECK(count(page, "<script") == 5);
    CHECK(data_of(page).at(0)["stopped_by"] == markup);  // the script gets the text unescaped
  }
}

TEST_CASE("report: an invalid sample of selection lists is refused", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), file = out + "/selection_sample.json";
  fs::create_directory(out);
  write_text(out + "/config.json", "{}");
  const Json whole = {{"schema", 1},        {"step", 2},
                      {"seq_len", 16},      {"l_sel", 8},
                      {"init_blocks", 1},   {"local_blocks", 2},
                      {"queries", {7, 15}}, {"lists", Json::array({Json::array({Json::array({{0}, {0, 1}})})})}};
  write_text(file, whole.dump());
  Json read = whole;
  read["bounds"] = {0, 16};  // a row was one sequence before schema 2
  // Layers could not differ before schema 3.
  read["l_sel"] = Json::array({8}), read["init_blocks"] = Json::array({1}), read["local_blocks"] = Json::array({2});
  CHECK(data_of(report(out)).at(0)["sample"] == read);
  fs::remove(out + "/report.html");
  const auto refused = [&](const char* key, const Json& value) {
    Json broken = whole;
    broken[key] = value;
    check_report_refused(out, "selection_sample.json", broken.dump());
  };
  refused("schema", 4);
  refused("schema", 2);  // bounds are missing
  refused("step", "2");
  refused("l_sel", 0);
  refused("queries", {7});
  refused("queries", {"<b>", 15});
  refused("queries", {7, 16});
  refused("lists", {});
  refused("lists", Json::array({Json::array()}));
  refused("lists", Json::array({Json::array({Json::array({{0}, {"x"}})})}));
  refused("init_blocks", Json::array({1}));
  write_text(file, "{");
  CHECK(run_program("report " + out).exit_code == 1);
}

TEST_CASE("report: a run's state is that of its last heartbeat with a state", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  fs::create_directory(out);
  std::string page;
  const auto state = [&](const std::vector<std::string>& messages, const std::string& on_nonfinite) {
    write_text(out + "/config.json", R"({"train": {"on_nonfinite": ")" + on_nonfinite + "\"}}");
    std::string lines;
    for (const std::string& msg : messages)
      lines += R"({"schema": 1, "step": 3, "why": "<because> )" + msg + R"(", "msg": ")" + msg + "\"}\n";
    write_text(out + "/heartbeat_rank0.jsonl", lines);
    page = report(out);
    return tile(page, "state");
  };
  CHECK(state({"boot", "hung"}, "stop") == "failed: hung");
  CHECK(state({"boot", "hung", "progress", "stackdump"}, "stop") == "failed: hung");
  CHECK(has(page, "role=\"alert\"><b>failed: hung</b>: &lt;because&gt; hung</p>"));
  CHECK(state({"boot", "hung", "recovered", "stackdump"}, "stop") == "killed");
  CHECK(has(page, "<b>killed</b>: no process trains here, and the last heartbeat, at step 3, is no end</p>"));
  CHECK(state({"stackdump"}, "stop") == "killed");
  CHECK(state({"boot", "nonfinite"}, "stop") == "failed: nonfinite");
  CHECK(state({"boot", "nonfinite", "checkpoint"}, "stop") == "failed: nonfinite");
  CHECK(state({"boot", "nonfinite"}, "skip") == "killed");
  CHECK(state({"boot", "nonfinite", "done"}, "skip") == "complete");
  CHECK_FALSE(has(page, "role=\"alert\""));
  CHECK(state({"boot", "failed", "boot", "failed"}, "skip") == "failed");
  CHECK(has(page, "<b>failed</b>: &lt;because&gt; failed</p>"));
  CHECK(state({"boot", "failed", "boot", "done"}, "skip") == "complete");
  CHECK(state({"boot", "stopped"}, "skip") == "stopped");
  CHECK_FALSE(has(page, "role=\"alert\""));
  // A process that holds the folder trains.
  const std::string holds = "flock " + out + " " TRIAD_PROGRAM " report " + out;
  state({"boot"}, "skip");
  CHECK(run_command(holds).exit_code == 0);
  CHECK(tile(read_text(out + "/report.html"), "state") == "running");
}

TEST_CASE("report: folders without a run and malformed files are refused", "[report]") {
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
  write_text(out + "/config.json", "{\"model\": 3}");
  refused(out, {"config.json", "its model is 3"});
  write_text(out + "/config.json", "{}");
  const std::string header = "step,loss,lr,tokens_per_s,grad_norm,step_ms,mfu\n";
  write_text(out + "/training.csv", "when,what\n");
  refused(out, {"training.csv", "no column step"});
  write_text(out + "/training.csv", header + "1,2,3,4,5,6,\n2,2");  // an incomplete last row is no error
  write_text(out + "/heartbeat_rank0.jsonl", "{\"step\": 1, \"msg\": \"boot\", \"schema\": 9}\n");
  refused(out, {"heartbeat_rank0.jsonl line 1", "schema is 9"});
  write_text(out + "/heartbeat_rank0.jsonl", "{\"step\": 1, \"msg\": \"boot\", \"schema\": 1}\n{\"st");
  refused(out + " --vs " + folder.file("none"), {folder.file("none"), "no such folder"});
  write_text(out + "/mem_boot.json", "{");
  refused(out, {"mem_boot.json"});
  fs::remove(out + "/mem_boot.json");
  CHECK(data_of(report(out)).at(0)["training"]["loss"].size() == 1);
}

TEST_CASE("report: damaged lines and file names with impossible numbers are skipped", "[report]") {
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
  const std::string impossible = "99999999999999999999";
  write_text(out + "/heartbeat_rank" + impossible + ".jsonl", "{\"step\": 1, \"msg\": \"boot\"}\n");
  write_text(out + "/mem_step" + impossible + ".json", "{");
  const Outcome outcome = run_program("report " + out);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  for (const char* word :
       {"training.csv line 3: loss is \"bad\"", "training.csv line 4 is left out: 3 fields under a header of 7",
        "training.csv line 5 is left out: its step is no number", "val.csv line 2 is left out",
        "gates.csv line 3: layer is \"\\x1b[2J\"", "heartbeat_rank0.jsonl line 2 is left out",
        "heartbeat_rank0.jsonl line 3 is left out"})
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
  if (!require_browser()) return;
  const TemporaryFolder folder;
  const std::string out = train(folder.file("run"),
                                "--set train.eval_every=10 --set log.diagnostics='[\"layer_norms\"]'"),
                    other = train(folder.file("other"), "--set model.attention=dense --set train.eval_every=10");
  add_files(out);
  write_text(out + "/positions.csv", "from,to,positions,loss,perplexity\n0,2048,9,2,7.4\n2048,4096,9,1.5,4.5\n");
  const std::string page = report(out);
  const std::string dom = drawn(folder, page);
  // Expected charts: loss, validation, loss by position, throughput, norm, rate, norms by layer (7); time by part and
  // by rank (2); memory, host, GPU (3); gates: 3 for shares, 6 maps; selection: distances, their map, 4 block maps, 3
  // for k, 2 lines (11).
  CHECK(count(dom, "<svg viewBox") == 7 + 2 + 3 + 9 + 11);
  CHECK(has(dom, ">2k</text>"));                     // the tick at 2,048 tokens
  CHECK_FALSE(has(dom, "Model FLOPs utilisation"));  // a CPU has no known peak
  // Hovers over the loss chart, which shows perplexity over tokens, and reads the tooltip.
  const std::string hover = drawn(folder, page, R"(
    document.querySelector('input[value=tokens]').click();
    document.querySelector('input[value=perplexity]').click();
    const chart = document.querySelector('.chart'), box = chart.getBoundingClientRect();
    chart.dispatchEvent(new PointerEvent('pointermove', {clientX: box.right - 14, clientY: box.top + 50}));)");
  const double loss = data_of(page).at(0)["training"]["loss"].back()[1];
  const size_t tip = hover.find("class=\"tip\"");
  REQUIRE(tip != std::string::npos);
  const std::string tooltip = hover.substr(tip, hover.find("</section>", tip) - tip);
  CHECK(has(tooltip, "1920 tokens"));
  CHECK(has(tooltip, "training: "));
  CHECK(std::stod(tooltip.substr(tooltip.find("training: ") + 10)) == Approx(std::exp(loss)).epsilon(1e-3));
  CHECK(has(tooltip, "at step 20"));
  const std::string two =
      drawn(folder, report(out + " --vs " + other), "document.querySelector('input[value=time]').click();");
  CHECK(has(two, "Difference of the losses"));
  CHECK(has(two, "training A"));
  CHECK(has(two, "training B"));
  // A run's page has no panels for what the run did not record, such as gates and samples. A page for a run with only a
  // config has no panels at all.
  const std::string dense = drawn(folder, report(other));
  for (const char* absent : {"Gates", "Selection", "Gradient norm by layer"}) CHECK_FALSE(has(dense, absent));
  const std::string bare = folder.file("bare");
  fs::create_directory(bare);
  write_text(bare + "/config.json", "{}");
  const std::string empty = drawn(folder, report(bare));
  for (const char* any : {"<section", "<details", "<h2", "<table"}) CHECK_FALSE(has(empty, any));
}
