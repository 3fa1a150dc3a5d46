// What a run does with its folder where it is not alone there, or may not do all that it has to.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <set>
#include <thread>

#include "io/folder_lock.h"
#include "tests/dist_run.h"
#include "tests/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// Before a command: root as others are, without the right to write where a file's mode says no.
const std::string kAsOthers = geteuid() == 0 ? "setpriv --bounding-set=-dac_override,-dac_read_search,-fowner " : "";

// Until every thread of a process that was sent SIGSTOP has stopped: each may be in the midst of writing.
void wait_for_stop(int pid) {
  const auto is_stopped = [](const fs::directory_entry& thread) {
    const std::string stat = read_text(thread.path().string() + "/stat");  // "123 (name) T ..."
    return has(stat.substr(std::min(stat.rfind(')'), stat.size())), ") T ");
  };
  for (int i = 0; i < 180000; ++i) {
    const fs::directory_iterator threads("/proc/" + std::to_string(pid) + "/task");
    if (std::all_of(begin(threads), end(threads), is_stopped)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  FAIL("process " << pid << " does not stop");
}

std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> all;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder))
    all[entry.path().string()] = entry.is_regular_file() ? read_text(entry.path().string()) : "";
  return all;
}

}  // namespace

TEST_CASE("run folder: of two runs in one the second ends, having changed nothing", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const std::string args =
      train_args(out, "--set train.save_every=5 --set train.steps=1000000 --set train.allow_unsafe=true ");
  BackgroundProgram first(args);
  wait_for_text(out + "/training.csv", "\n12,");
  first.send(SIGSTOP);  // it lives, and writes nothing
  wait_for_stop(first.pid());
  const auto before = contents(out);
  const Outcome second =
      run_command("(" TRIAD_PROGRAM " " + args + "--overwrite; echo exit $?) > " + folder.file("overwrite") +
                  " 2>&1 & " TRIAD_PROGRAM " " + args + "--resume latest; code=$?; wait; exit $code");
  const std::string overwrite = read_text(folder.file("overwrite")), holder = lock_holder(out);
  INFO(second.output << "\n" << overwrite);
  CHECK((holder.empty() || holder == " (pid " + std::to_string(first.pid()) + ")"));  // /proc/locks may be hidden
  CHECK(second.exit_code == 1);
  CHECK(has(overwrite, "exit 1\n"));
  for (const std::string& told : {second.output, overwrite}) {
    CHECK(has(told, out + " is in use by another process" + holder + ": waiting up to 10 s"));
    CHECK(has(told, "log.out_dir " + out + " is in use by another run" + holder));
  }
  CHECK(contents(out) == before);

  // One that is ending is waited for; and a kill leaves no lock behind.
  BackgroundProgram third(args + "--overwrite --set train.steps=6 ", "", folder.file("third"));
  wait_for_text(folder.file("third"), "waiting up to 10 s");
  first.send(SIGKILL);
  CHECK(first.wait() == 128 + SIGKILL);
  CHECK(third.wait() == 0);
  CHECK(lines(out + "/training.csv").size() == 7);
}

TEST_CASE("run folder: --resume latest leaves a run that is complete as it is", "[train][dist]") {
  const TemporaryFolder folder;
  const std::string more = "--set train.save_every=2 --set train.eval_every=2 ";
  for (const int ranks : {1, 2}) {
    if (ranks > 1 && !require_mpirun()) continue;
    const std::string out = run(folder.file(std::to_string(ranks)), ranks, more + "--set train.steps=4");
    fs::remove_all(out + "/checkpoints/step_4");  // as where the run's end is not saved
    for (const char* name : {"/needle.csv", "/needle.svg", "/config.json.tmp.4711"}) write_text(out + name, "");
    const auto before = contents(out);
    // Told before anything is opened or allocated.
    const std::string impossible =
        "--set data.kind=shards --set data.paths='[\"/nowhere/*.bin\"]' "
        "--set train.micro_batch_size=1000000 ";
    const std::string words = "nothing is left to train: " + out + " is at step 4 already, train.steps is ";
    for (const std::string steps : {"4", "3"}) {
      const std::string args = train_args(out, more + impossible + "--set train.steps=" + steps + " --resume latest");
      const Outcome again = ranks == 1 ? run_program(args) : run_ranks(ranks, args);
      INFO(again.output);
      CHECK(again.exit_code == 0);
      CHECK(has(again.output, words + steps + "\n"));
      CHECK(contents(out) == before);
    }
    // One that has saved no checkpoint is complete as well, by whichever name.
    const std::string unsaved = run(folder.file(std::to_string(ranks) + "unsaved"), ranks, "--set train.steps=2");
    for (const std::string& name : {std::string("latest"), unsaved}) {
      const Outcome again = run_program(train_args(unsaved, "--set train.steps=2 --resume " + name));
      INFO(again.output);
      CHECK(again.exit_code == 0);
      CHECK(has(again.output, "nothing is left to train: " + unsaved));
    }
    run(out, ranks, more + "--set train.steps=6 --resume latest");
    CHECK(column(out + "/training.csv", "loss").size() == 6);
    CHECK_FALSE(fs::exists(out + "/needle.csv"));
    // A checkpoint that is named is gone back to.
    run(out, ranks, more + "--set train.steps=6 --resume " + out + "/checkpoints/step_4");
    fs::remove(out + kWeights);  // a run without its weights is not complete
    run(out, ranks, more + "--set train.steps=6 --resume latest");
    CHECK(fs::exists(out + kWeights));
  }
}

TEST_CASE("run folder: a folder of checkpoints on another disk stays there", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), elsewhere = folder.file("elsewhere");
  for (const std::string& each : {out, elsewhere}) fs::create_directory(each);
  fs::create_directory_symlink(elsewhere, out + "/checkpoints");
  fs::create_directory(elsewhere + "/another");
  write_text(elsewhere + "/another/file", "of somebody else");
  run(out, 1, "--set train.steps=4 --set train.save_every=2");
  CHECK(fs::exists(elsewhere + "/step_4"));
  run(out, 1, "--set train.steps=3 --set train.save_every=3 --overwrite");
  CHECK(fs::is_symlink(out + "/checkpoints"));
  CHECK(fs::exists(elsewhere + "/step_3/state.json"));
  CHECK_FALSE(fs::exists(elsewhere + "/step_4"));
  CHECK(read_text(elsewhere + "/another/file") == "of somebody else");
}

TEST_CASE("run folder: a file system without locks stops no run, which says so", "[train]") {
  const TemporaryFolder folder;
  const Outcome outcome = run_program(train_args(folder.file("run"), "--set train.steps=2"),
                                      "ASAN_OPTIONS=verify_asan_link_order=0 TRIAD_NO_LOCKS=1 LD_PRELOAD=" TRIAD_PLANT);
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(has(outcome.output, folder.file("run") + ": cannot be locked (No locks available)"));
}

TEST_CASE("run folder: what --overwrite may not remove is named, and the checkpoints stay", "[train]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, "--set train.steps=4 --set train.save_every=2");
  fs::create_directory(out + "/tb/kept");
  write_text(out + "/tb/kept/file", "");
  fs::permissions(out + "/tb/kept", fs::perms::owner_read | fs::perms::owner_exec);
  const Outcome outcome = run_command(kAsOthers + TRIAD_PROGRAM " " + train_args(out, "--overwrite"));
  fs::permissions(out + "/tb/kept", fs::perms::owner_all);
  INFO(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.output, out + "/tb/kept/file: cannot be removed: Permission denied"));
  for (const char* name : {"/model.safetensors", "/checkpoints/step_2/state.json", "/checkpoints/latest/state.json"})
    CHECK(fs::exists(out + name));
  run(out, 1, "--overwrite");
}

TEST_CASE("run folder: a run that is refused leaves nothing in another's folder, though it would not fit", "[train]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, "--set train.steps=2 --set train.save_every=2");
  const auto before = contents(out);
  const Outcome outcome = run_program(train_args(out, "--set train.micro_batch_size=500000 --set train.seq_len=4000"));
  INFO(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.output, out + " holds a checkpoint of an earlier run: --resume"));
  CHECK(contents(out) == before);

  // One that may begin there does not fit: its plan would stand beside what the run before has left.
  const std::string bare = run(folder.file("bare"), 1, "--set train.steps=2");
  const auto healthy = contents(bare);
  const Outcome large = run_program(train_args(bare, "--set train.micro_batch_size=500000 --set train.seq_len=4000"));
  INFO(large.output);
  CHECK(large.exit_code == 1);
  CHECK(contents(bare) == healthy);

  for (const char* name : {"/mem_oom.txt", "/mem_oom_rank1.json"}) write_text(out + name, "");
  run(out, 1, "--set train.steps=2 --set train.save_every=2 --resume " + out + "/checkpoints/step_0");
  for (const char* name : {"/mem_oom.txt", "/mem_oom_rank1.json"}) CHECK_FALSE(fs::exists(out + name));
}

TEST_CASE("run folder: what a killed run left unfinished is no part of what goes on", "[train]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, "--set train.steps=6 --set train.save_every=2");
  fs::rename(out + "/checkpoints/step_6", out + "/checkpoints/step_6.tmp.4711");  // whole, and not yet in its place
  for (const char* name : {"/model.safetensors.tmp.4711", "/config.json.tmp.4711", "/notes.tmp.4711"})
    write_text(out + name, "half");
  // An older one that cannot go: in whatever order its files are listed, what is left must not look whole.
  const auto allow_removal = [&](bool allowed) {
    for (const char* name : {"a", "b", "c", "d", "e", "f", "g", "h"})
      fs::permissions(out + "/checkpoints/step_4/" + name,
                      allowed ? fs::perms::owner_all : fs::perms::owner_read | fs::perms::owner_exec);
  };
  for (const char* name : {"a", "b", "c", "d", "e", "f", "g", "h"}) {
    fs::create_directory(out + "/checkpoints/step_4/" + name);
    write_text(out + "/checkpoints/step_4/" + name + "/file", "");
  }
  allow_removal(false);
  const std::string resume =
      "--set train.steps=4 --set train.save_every=1 --set train.keep_last=2 --resume " + out + "/checkpoints/step_2";
  const Outcome refused = run_command(kAsOthers + TRIAD_PROGRAM " " + train_args(out, resume));
  allow_removal(true);
  INFO(refused.output);
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, "/file: cannot be removed: Permission denied"));
  CHECK_FALSE(fs::exists(out + "/checkpoints/step_4/state.json"));

  run(out, 1, resume);
  std::set<std::string> left;
  for (const fs::directory_entry& entry : fs::directory_iterator(out + "/checkpoints"))
    left.insert(entry.path().filename().string());
  CHECK(left == std::set<std::string>{"latest", "step_3", "step_4"});
  CHECK_FALSE(fs::exists(out + "/model.safetensors.tmp.4711"));
  CHECK_FALSE(fs::exists(out + "/config.json.tmp.4711"));
  CHECK(fs::exists(out + "/notes.tmp.4711"));  // the user's
}
