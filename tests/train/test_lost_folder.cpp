// Runs whose folder is moved, removed or replaced under them.
#include <fcntl.h>
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <system_error>
#include <thread>

#include "io/checkpoint.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// Trains until step 12 of many, lets `disturb` change the run's folder, and returns what the run says, which must name
// the folder RUN.rescued_0 with a whole checkpoint.
std::string lose(const TemporaryFolder& folder, const std::string& more, const std::function<void()>& disturb) {
  const std::string out = folder.file("run"), log = folder.file("log");
  BackgroundProgram program(train_args(out, "--set train.steps=1000000 --set train.allow_unsafe=true " + more), "",
                            log);
  wait_for_text(out + "/training.csv", "\n12,");
  disturb();
  CHECK(program.wait() == 1);
  const std::string text = read_text(log), rescued = out + ".rescued_0";
  INFO(text);
  CHECK(has(text, "log.out_dir " + out + " is not this run's folder any more"));
  CHECK(has(text, "are in " + rescued + "/checkpoints: --resume " + rescued + " goes on"));
  const std::string newest = resolve_checkpoint(rescued);
  CHECK(run_program("inspect " + newest + kWeights).exit_code == 0);
  return text;
}

}  // namespace

TEST_CASE("run folder: a run whose folder is moved or removed saves beside it, and fails", "[train]") {
  for (const char* more : {"", "--set train.save_every=1 --set train.keep_last=1 "}) {
    INFO(more);
    const TemporaryFolder moved, removed;
    CHECK(has(lose(moved, more, [&] { fs::rename(moved.file("run"), moved.file("moved")); }),
              "it is now " + moved.file("moved")));
    CHECK_FALSE(fs::exists(moved.file("run") + kWeights));
    const std::string newest = resolve_checkpoint(moved.file("run.rescued_0"));
    const int step = std::stoi(newest.substr(newest.rfind('_') + 1));
    const Outcome resumed = run_program("train --resume " + moved.file("run.rescued_0") +
                                        " --set train.save_every=0 --set train.steps=" + std::to_string(step + 1));
    INFO(resumed.output);
    CHECK(resumed.exit_code == 0);
    CHECK(has(resumed.output, "resumed from " + moved.file("run.rescued_0")));
    // The removal takes a moment, in which the run may write: it is repeated until nothing is left.
    lose(removed, more, [&] {
      fs::rename(removed.file("run"), removed.file("gone"));
      fs::remove_all(removed.file("gone"));
    });
  }
}

TEST_CASE("run folder: a run whose folder is replaced by another run's changes nothing there", "[train]") {
  for (const char* more : {"", "--set train.save_every=3 "}) {
    for (const bool same_folder : {false, true}) {
      INFO(more << same_folder);
      const TemporaryFolder folder;
      const std::string out = folder.file("run"), other = run(folder.file("other"), 1, "--set train.steps=2");
      std::map<std::string, std::string> before;
      const std::string text = lose(folder, more, [&] {
        if (same_folder) {
          fs::copy(other + "/model.safetensors", out + "/model.safetensors");
          fs::copy(other + "/env.json", out + "/env.json.new");
          fs::rename(out + "/env.json.new", out + "/env.json");
        } else {
          const std::string another = folder.file("another");
          fs::copy(other, another, fs::copy_options::recursive);
          before = contents(another);
          REQUIRE(renameat2(AT_FDCWD, another.c_str(), AT_FDCWD, out.c_str(), RENAME_EXCHANGE) == 0);
        }
      });
      CHECK(has(text, same_folder ? "the files in it are another run's" : "and another folder is in its place"));
      CHECK(same_file(out + kWeights, other + kWeights));
      if (!same_folder) CHECK(contents(out) == before);
    }
  }
}

TEST_CASE("run folder: ranks whose folder is moved save together beside it", "[train][dist]") {
  if (!require_mpirun()) return;
  for (const char* more : {"", "--set dist.zero=3 "}) {
    INFO(more);
    const TemporaryFolder folder;
    const std::string out = folder.file("run");
    Outcome outcome;
    std::thread ranks([&] {
      outcome =
          run_ranks(2, train_args(out, "--set train.steps=1000000 --set train.allow_unsafe=true " + std::string(more)));
    });
    wait_for_text(out + "/training.csv", "\n12,");
    fs::rename(out, folder.file("moved"));
    ranks.join();
    INFO(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.output, "it is now " + folder.file("moved")));
    CHECK(is_checkpoint(resolve_checkpoint(out + ".rescued_0")));
  }
}

namespace {

// Two ranks that save after each step, slowly. Once a save is under way, `disturb` changes the run's folder; then both
// must end alike, with a whole checkpoint beside it that both name.
void lose_during_save(const TemporaryFolder& folder, const std::string& more, const std::function<void()>& disturb) {
  const std::string out = folder.file("run"), checkpoints = out + "/checkpoints", rescued = out + ".rescued_0";
  const std::string args =
      train_args(out, "--set train.steps=1000000 --set train.allow_unsafe=true --set train.save_every=1 " + more);
  const std::string logs[] = {folder.file("log0"), folder.file("log1")};
  const std::string prefix = with_faults("TRIAD_SLOW_SYNC='0.2 step_'") + "exec timeout -s KILL 300 ";
  BackgroundProgram first(args, as_torchrun_would(0) + prefix, logs[0]),
      other(args, as_torchrun_would(1) + prefix, logs[1]);
  const auto is_under_way = [&] {
    std::error_code absent;
    for (const fs::directory_entry& entry : fs::directory_iterator(checkpoints, absent))
      if (entry.path().filename().string().starts_with("step_3.tmp.")) return true;
    return false;
  };
  for (int i = 0; i < 180'000 && !is_under_way(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(is_under_way());
  disturb();
  const int codes[] = {first.wait(), other.wait()};
  for (const int rank : {0, 1}) {
    const std::string text = read_text(logs[rank]);
    INFO(text);
    CHECK(codes[rank] == 1);
    CHECK(has(text, fmt::format("rank {}: log.out_dir {} is not this run's folder any more", rank, out)));
    CHECK(has(text, "are in " + rescued + "/checkpoints: --resume " + rescued + " goes on"));
  }
  CHECK(run_program("inspect " + resolve_checkpoint(rescued)).exit_code == 0);
}

}  // namespace

TEST_CASE("run folder: ranks whose folder is lost during a save learn of it together, and save beside it",
          "[train][dist][waits]") {
  const TemporaryFolder finished;
  const std::string other = run(finished.file("other"), 1, "--set train.steps=2 --set train.save_every=1");
  for (const char* zero : {"--set dist.zero=0 ", "--set dist.zero=1 "}) {
    INFO(zero);
    const TemporaryFolder moved, removed, replaced;
    lose_during_save(moved, zero, [&] { fs::rename(moved.file("run"), moved.file("moved")); });
    lose_during_save(removed, zero, [&] {
      for (const char* name : {"/env.json", "/config.json"}) fs::remove(removed.file("run") + name);
      fs::remove_all(removed.file("run/checkpoints"));
    });
    const std::string out = replaced.file("run"), another = replaced.file("another");
    fs::copy(other, another, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    const auto before = contents(another);
    lose_during_save(replaced, zero, [&] {
      REQUIRE(renameat2(AT_FDCWD, another.c_str(), AT_FDCWD, out.c_str(), RENAME_EXCHANGE) == 0);
    });
    CHECK(contents(out) == before);
  }
}
