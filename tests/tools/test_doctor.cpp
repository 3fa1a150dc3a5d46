// `triad doctor`: the whole examination on the CPU, and each verdict, caused by an injected fault.
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "io/json_config.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// A row in RESULTS.md: | [phase](phase/) | question | **VERDICT** | s (budget) | evidence | next |
struct Row {
  std::string verdict, evidence, next;
};
std::map<std::string, Row> results(const std::string& out) {
  std::map<std::string, Row> rows;
  std::istringstream lines(read_text(out + "/RESULTS.md"));
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("| [")) continue;
    std::vector<std::string> cells;
    for (size_t begin = 2, end; (end = line.find(" |", begin)) != std::string::npos; begin = end + 3)
      cells.push_back(line.substr(begin, end - begin));
    REQUIRE(cells.size() == 6);
    const std::string name = cells[0].substr(1, cells[0].find(']') - 1), bold = cells[2];
    rows[name] = {bold.substr(2, bold.size() - 4), cells[4], cells[5]};
  }
  return rows;
}

// Returns a pattern for pgrep that matches the doctor's training runs, but not the shell that runs pgrep.
std::string trainers_of(const TemporaryFolder& folder) { return "'train " + folder.path() + "[/]out/doctor.json'"; }

// Returns whether a phase passed. On a busy machine it may also be SLOW for its duration, but for no other reason.
bool holds(const Row& row) {
  const bool late = has(row.evidence, " s, budget ") || has(row.evidence, " slow steps");
  return row.verdict == "PASS" || (row.verdict == "SLOW" && late && !has(row.evidence, "killed by the doctor"));
}

struct Examination {
  Outcome outcome;
  std::map<std::string, Row> rows;
};
Examination examine(const TemporaryFolder& folder, const std::string& args, const std::string& environment = "") {
  const std::string out = folder.file("out");
  Examination e;
  e.outcome = run_program("doctor --device cpu --out " + out + " " + args, environment);
  UNSCOPED_INFO(environment << " triad doctor " << args << "\nexit code " << e.outcome.exit_code << "\n"
                            << e.outcome.output);
  if (fs::exists(out + "/RESULTS.md")) e.rows = results(out);
  return e;
}

}  // namespace

TEST_CASE("doctor: on the CPU every phase passes and leaves its evidence", "[doctor]") {
  const TemporaryFolder folder;
  const Examination e = examine(folder, "--full");
  CHECK(e.outcome.exit_code == 0);
  // Phases that need a GPU are skipped with a reason, and so are those that need MPI if there is none. All others pass.
  const std::set<std::string> needs_gpus = {"topology", "collectives_nccl", "backend_nccl", "cuda_graph",
                                            "kernel_routes"};
  const bool mpi = has(read_text(folder.file("out/environment/machine.json")), "\"why_no_mpi\": \"\"");
  CHECK(e.rows.size() == 24);
  for (const auto& [phase, row] : e.rows) {
    INFO(phase << ": " << row.verdict << ", " << row.evidence);
    const bool skipped = needs_gpus.count(phase) > 0 || (!mpi && has(phase, "_mpi"));
    CHECK((skipped ? row.verdict == "SKIPPED" : holds(row)));
    CHECK(!row.evidence.empty());
    const std::string env = folder.file("out/" + phase + "/env.json");
    if (!skipped) CHECK(Json::parse(read_text(env)).contains("build"));
  }
  const auto file = [&](const char* name) { return folder.file("out") + "/" + name; };
  CHECK(has(read_text(file("gradient_trace/ranks/rank_0.log")), "[GRAD-TRACE] after_backward_step1 arrived="));
  CHECK(has(e.rows.at("gradient_trace").evidence, "missing=0"));
  CHECK(read_text(file("recompute_all/model.safetensors")) == read_text(file("baseline/model.safetensors")));
  CHECK(read_text(file("branch_sel/model.safetensors")) != read_text(file("baseline/model.safetensors")));
  CHECK(Json::parse(read_text(file("recompute_second/config.json")))["runtime"]["recompute"] == "2:4=block");
  CHECK(fs::exists(file("backend_tcp/ddp_buckets_rank1.txt")));
  CHECK(fs::exists(file("causality/after.safetensors")));
  CHECK(fs::exists(file("long_context/mem_step1.json")));
}

TEST_CASE("doctor: a silent run is HANG, and is killed", "[doctor][slow]") {
  const TemporaryFolder folder;
  const std::string trainers = trainers_of(folder);
  // The first product sleeps for practically unlimited time. The run's watchdog detects that and dumps stacks; the
  // doctor kills the run.
  const Examination e = examine(folder, "--only gradient_trace --budget 0.5", with_faults("TRIAD_FAULTS=\"0 1e6\""));
  CHECK(e.outcome.exit_code == 1);
  const Row row = e.rows.at("gradient_trace");
  CHECK(row.verdict == "HANG");
  CHECK(has(row.evidence, "\"hung\" at step 0"));
  CHECK(has(row.next, "gradient_trace/stackdump_rank0_"));
  CHECK(run_command("pgrep -f " + trainers).output.empty());
}

TEST_CASE("doctor: a suspended run is HANG, and phases that need it are SKIPPED", "[doctor][slow]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("out"), log = folder.file("log"), trainers = trainers_of(folder);
  // Products sleep, so that the run lasts until it is suspended, 11 s after its start. At 18 s, three times its budget,
  // the run is over time, but has been silent for less than 12 s. The doctor must therefore wait until it can
  // distinguish HANG from SLOW.
  BackgroundProgram doctor("doctor --device cpu --only repeat --budget 0.2 --out " + out,
                           with_faults("TRIAD_FAULTS=\"0 0.03\""), log);
  wait_for_file(out + "/baseline/output.txt");
  const auto start = std::chrono::steady_clock::now();
  wait_for_text(out + "/baseline/heartbeat_rank0.jsonl", "boot");
  std::this_thread::sleep_until(start + std::chrono::seconds(11));
  run_command("pgrep -f " + trainers + " | xargs -r kill -STOP");
  CHECK(doctor.wait() == 1);
  INFO(read_text(log));
  const auto rows = results(out);
  CHECK(rows.at("baseline").verdict == "HANG");
  CHECK(has(rows.at("baseline").evidence, "no sign of life for 12 s; the last: rank 0 \""));
  CHECK(rows.at("repeat").verdict == "SKIPPED");
  CHECK(rows.at("repeat").evidence == "baseline is HANG");
}

TEST_CASE("doctor: a phase that takes too long but advances is SLOW, which is no failure", "[doctor][slow]") {
  const TemporaryFolder folder;
  // The products' sleeps together exceed the 6 s budget in the first case, and three times the budget in the second.
  const auto sleeping = [&](const std::string& seconds) {
    const Examination e = examine(folder, "--only gradient_trace --budget 0.3",
                                  with_faults("TRIAD_FAULTS=\"0 0.15\" TRIAD_FAULTS_MOST_S=" + seconds));
    INFO(e.outcome.output);
    CHECK(e.outcome.exit_code == 0);
    CHECK(e.rows.at("gradient_trace").verdict == "SLOW");
    return e.rows.at("gradient_trace").evidence;
  };
  const std::string late = sleeping("6.5"), endless = sleeping("1e6");
  CHECK((has(late, " s, budget 6 s") || has(late, "alive, but not done at 3 times its budget")));
  CHECK(has(endless, "alive, but not done at 3 times its budget"));
}

TEST_CASE("doctor: a run killed for its time is no reference, so phases that need it are SKIPPED", "[doctor][slow]") {
  const TemporaryFolder folder;
  const Examination e = examine(folder, "--only repeat,health --budget 0.3", with_faults("TRIAD_FAULTS=\"0 0.1\""));
  CHECK(e.outcome.exit_code == 0);
  CHECK(e.rows.at("baseline").verdict == "SLOW");
  CHECK(has(e.rows.at("baseline").evidence, "alive, but not done at 3 times its budget"));
  CHECK(has(e.rows.at("baseline").next, "more time (--budget 3"));
  for (const char* phase : {"repeat", "health"}) {
    CHECK(e.rows.at(phase).verdict == "SKIPPED");
    CHECK(e.rows.at(phase).evidence == "baseline was ended before it was done");
    CHECK(has(e.rows.at(phase).next, "more time (--budget 3"));
  }
}

TEST_CASE("doctor: it kills the processes that it has started, and no others", "[doctor]") {
  const TemporaryFolder folder;
  // A shell starts a child in the background and then replaces itself by the doctor (exec), so the child becomes the
  // doctor's.
  const std::string pids = folder.file("pids");
  const Outcome o =
      run_command("sh -c 'sleep 300 & echo $! $$ >>" + pids + "; wait' >/dev/null 2>&1 & until [ -s " + pids +
                  " ]; do sleep 0.05; done; exec " TRIAD_PROGRAM " doctor --device cpu --only environment --out " +
                  folder.file("out"));
  INFO(o.output);
  CHECK(o.exit_code == 0);
  CHECK(holds(results(folder.file("out")).at("environment")));
  CHECK(run_command("for pid in $(cat " + pids + "); do kill -0 $pid || exit 1; done").exit_code == 0);
  run_command("kill $(cat " + pids + ")");
}

TEST_CASE("doctor: wrong numbers are FAIL, and the evidence gives the difference", "[doctor]") {
  const TemporaryFolder folder;
  // Runs a phase in which matrix products are wrong in the processes whose command line contains the word.
  const auto with_wrong_products = [&](const std::string& word, const std::string& phase) {
    const Examination e = examine(folder, "--only " + phase, with_faults("TRIAD_WRONG=" + word));
    CHECK(e.outcome.exit_code == 1);
    CHECK(has(e.outcome.output, "triad: at least one phase is FAIL or HANG"));
    CHECK(holds(e.rows.at("baseline")));
    CHECK(e.rows.at(phase).verdict == "FAIL");
    return e.rows.at(phase);
  };
  CHECK(has(with_wrong_products("runtime.recompute=block", "recompute_all").evidence,
            "tensors differ from baseline/model.safetensors"));
  CHECK(has(with_wrong_products("after.safetensors", "causality").evidence,
            "rows of logits before a changed token differ; first row 0"));
  CHECK(has(with_wrong_products("here.safetensors", "attention_parity").evidence, "logits differ by "));
  const std::string rank = with_wrong_products("dist.backend=auto", "backend_tcp").evidence;
  CHECK(has(rank, "weights differ by "));
}

TEST_CASE("doctor: a gradient that is not finite is FAIL, and named", "[doctor]") {
  const TemporaryFolder folder;
  // Only weight gradients are NaN, from which no other value is computed.
  const Examination e =
      examine(folder, "--only attention_parity", with_faults("TRIAD_WRONG=here.safetensors TRIAD_WRONG_NAN=1"));
  CHECK(e.outcome.exit_code == 1);
  CHECK(e.rows.at("attention_parity").verdict == "FAIL");
  CHECK(has(e.rows.at("attention_parity").evidence, "here.safetensors: grad/"));
  CHECK(has(e.rows.at("attention_parity").evidence, " has nan at element 0"));
}

TEST_CASE("doctor: missing statistics of gates or lists are FAIL", "[doctor]") {
  const TemporaryFolder folder;
  for (const std::string name : {"gates.csv", "k_stats.csv"}) {
    const Examination e =
        examine(folder, "--only health", with_faults("TRIAD_DELETE=" + folder.file("out/baseline/" + name)));
    CHECK(e.outcome.exit_code == 1);
    CHECK(holds(e.rows.at("baseline")));
    CHECK(e.rows.at("health").verdict == "FAIL");
    CHECK(has(e.rows.at("health").evidence, name + " is missing: log.stats, which is on, writes it"));
  }
}

TEST_CASE("doctor: files of an earlier examination are not compared", "[doctor]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  fs::create_directories(folder.file("out/backend_nccl"));
  write_text(folder.file("out/RESULTS.md"), "# triad doctor\n");
  write_text(folder.file("out/backend_nccl/model.safetensors"), "of another build");
  const Examination e = examine(folder, "--only backend_mpi");
  CHECK(e.outcome.exit_code == 0);
  CHECK(holds(e.rows.at("backend_mpi")));
  CHECK(fs::exists(folder.file("out/backend_nccl/model.safetensors")));
}

TEST_CASE("doctor: runs use half of the cores that this process may use", "[doctor]") {
  const TemporaryFolder folder;
  const Outcome o =
      run_command("unset OMP_NUM_THREADS; exec taskset -c $(taskset -cp $$ | sed 's/.*: //; s/[,-].*//') " TRIAD_PROGRAM
                  " doctor --device cpu --only gradient_trace --out " +
                  folder.file("out"));
  INFO(o.output);
  CHECK(o.exit_code == 0);
  CHECK(Json::parse(read_text(folder.file("out/environment/machine.json")))["cores"] == 1);
  const Json env = Json::parse(read_text(folder.file("out/gradient_trace/env.json")));
  CHECK(env["environment"]["OMP_NUM_THREADS"] == "1");
}

TEST_CASE("doctor: a run that ends with an error is FAIL, with the error's message", "[doctor]") {
  const TemporaryFolder folder;
  // Files are limited to 512 KiB, which is too little for the weights.
  const std::string out = folder.file("out");
  const Outcome o = run_command("ulimit -f 1000; " TRIAD_PROGRAM " doctor --device cpu --only baseline --out " + out);
  INFO(o.output);
  CHECK(o.exit_code == 1);
  const Row row = results(out).at("baseline");
  CHECK(row.verdict == "FAIL");
  CHECK(has(row.evidence, "exit code 1: triad: "));
  CHECK(has(row.evidence, "model.safetensors"));
  CHECK(has(read_text(out + "/RESULTS.md"), "## baseline: FAIL"));
}

TEST_CASE("doctor: without mpirun the phases that need it are SKIPPED, with the reason", "[doctor]") {
  const TemporaryFolder folder;
  const Examination none = examine(folder, "--only collectives_mpi", "PATH=/nowhere");
  CHECK(none.outcome.exit_code == 0);
  CHECK(none.rows.at("collectives_mpi").verdict == "SKIPPED");
  if (!require_mpirun()) return;
  CHECK(none.rows.at("collectives_mpi").evidence == "no mpirun on PATH");
  write_text(folder.file("mpirun"), "#!/bin/sh\necho no slots here\nexit 3\n");
  fs::permissions(folder.file("mpirun"), fs::perms::owner_all);
  const Examination broken = examine(folder, "--only collectives_mpi", "PATH=" + folder.path() + ":$PATH");
  CHECK(broken.rows.at("collectives_mpi").verdict == "SKIPPED");
  CHECK(broken.rows.at("collectives_mpi").evidence == "mpirun -np 2 true exits with 3: no slots here");
}

TEST_CASE("doctor: the environment is checked, and not passed on to the runs", "[doctor]") {
  const TemporaryFolder folder;
  const Examination wrong = examine(folder, "", "NSA_NO_SUCH=1");
  CHECK(wrong.outcome.exit_code == 1);
  CHECK(wrong.rows.at("environment").verdict == "FAIL");
  CHECK(has(wrong.rows.at("environment").evidence, "NSA_NO_SUCH"));
  CHECK(holds(wrong.rows.at("collectives_tcp")));
  const Examination right = examine(folder, "--only gradient_trace", "NSA_SEQ_LEN=7 NSA_FORCE_BRANCH=win");
  CHECK(has(right.rows.at("environment").evidence, "not passed on to later phases: NSA_"));
  CHECK(holds(right.rows.at("gradient_trace")));
  const Json config = Json::parse(read_text(folder.file("out/gradient_trace/config.json")));
  CHECK(config["train"]["seq_len"] == 128);
  CHECK(config["nsa"]["force_branch"] == "none");
}

TEST_CASE("doctor: invalid arguments are refused", "[doctor]") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& args, const std::string& words, const std::string& environment = "") {
    const Outcome o = run_program("doctor " + args, environment);
    INFO(args << "\n" << o.output);
    CHECK(o.exit_code == 2);
    CHECK(has(o.output, words));
  };
  refused("--only nothing --out " + folder.file("a"), "--only nothing: the phases are environment, topology");
  refused("--budget 0 --out " + folder.file("a"), "--budget");
  refused("--out " + folder.file("a"), "it starts ranks itself", "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2");
  CHECK(!fs::exists(folder.file("a")));
  write_text(folder.file("mine.txt"), "not to be removed");
  refused("--out " + folder.path(), "is not empty, and `triad doctor` did not write it");
  CHECK(fs::exists(folder.file("mine.txt")));
}
