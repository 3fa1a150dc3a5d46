// A run's folder: two runs in one folder, complete runs' folders, older checkpoints, and missing permissions.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <set>
#include <thread>

#include "io/checkpoint.h"
#include "io/folder_lock.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// A command prefix with which root drops the capabilities that ignore file modes.
const std::string kAsOthers = geteuid() == 0 ? "setpriv --bounding-set=-dac_override,-dac_read_search,-fowner " : "";

// Waits until all threads in a process have stopped after SIGSTOP; until then each may still write.
void wait_for_stop(int pid) {
  const auto is_stopped = [](const fs::directory_entry& thread) {
    const std::string stat = read_text(thread.path().string() + "/stat");  // "123 (name) T ...": T means stopped
    return has(stat.substr(std::min(stat.rfind(')'), stat.size())), ") T ");
  };
  for (int i = 0; i < 180000; ++i) {
    const fs::directory_iterator threads("/proc/" + std::to_string(pid) + "/task");
    if (std::all_of(begin(threads), end(threads), is_stopped)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  FAIL("process " << pid << " does not stop");
}

}  // namespace

TEST_CASE("run folder: of two runs in one folder the second ends without changing a file", "[train][waits]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const std::string args =
      train_args(out, "--set train.save_every=5 --set train.steps=1000000 --set train.allow_unsafe=true ");
  BackgroundProgram first(args);
  wait_for_text(out + "/training.csv", "\n12,");
  first.send(SIGSTOP);  // the suspended process writes nothing, but keeps its lock
  wait_for_stop(first.pid());
  const auto before = contents(out);
  const Outcome second =
      run_command("(" TRIAD_PROGRAM " " + args + "--overwrite; echo exit $?) > " + folder.file("overwrite") +
                  " 2>&1 & " TRIAD_PROGRAM " " + args + "--resume latest; code=$?; wait; exit $code");
  const std::string overwrite = read_text(folder.file("overwrite")), holder = lock_holder(out);
  INFO(second.output << "\n" << overwrite);
  // Empty if /proc/locks cannot be read.
  CHECK((holder.empty() || holder == " (pid " + std::to_string(first.pid()) + ")"));
  CHECK(second.exit_code == 1);
  CHECK(has(overwrite, "exit 1\n"));
  for (const std::string& message : {second.output, overwrite}) {
    CHECK(has(message, out + " is in use by another process" + holder + ": waiting up to 10 s"));
    CHECK(has(message, "log.out_dir " + out + " is in use by another run" + holder));
  }
  CHECK(contents(out) == before);

  // A new run waits until a stopping one ends, and a killed process leaves no lock.
  BackgroundProgram third(args + "--overwrite --set train.steps=6 ", "", folder.file("third"));
  wait_for_text(folder.file("third"), "waiting up to 10 s");
  first.send(SIGKILL);
  CHECK(first.wait() == 128 + SIGKILL);
  CHECK(third.wait() == 0);
  CHECK(lines(out + "/training.csv").size() == 7);
}

namespace {

void check_complete_run(int ranks) {
  const TemporaryFolder folder;
  const std::string more = "--set train.save_every=2 --set train.eval_every=2 ";
  const std::string out = run(folder.file(std::to_string(ranks)), ranks, more + "--set train.steps=4");
  fs::remove_all(out + "/checkpoints/step_4");  // mimics a run that hasn't saved its last step
  for (const char* name : {"/needle.csv", "/needle.svg", "/config.json.tmp.471101234567890123456789"})
    write_text(out + name, "");
  const auto before = contents(out);
  // The message that all steps are trained is printed before data is opened or memory allocated.
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
  // A run without checkpoints is complete too, whether the command contains `latest` or its folder.
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
  // A resume from a named checkpoint goes back to it.
  run(out, ranks, more + "--set train.steps=6 --overwrite --resume " + out + "/checkpoints/step_4");
  fs::remove(out + kWeights);  // a run without final weights isn't complete
  run(out, ranks, more + "--set train.steps=6 --resume latest");
  CHECK(fs::exists(out + kWeights));
}

}  // namespace

TEST_CASE("run folder: --resume latest does not change a complete run", "[train]") { check_complete_run(1); }

TEST_CASE("run folder: --resume latest does not change a complete run of two ranks", "[train][dist]") {
  if (require_mpirun()) check_complete_run(2);
}

TEST_CASE("run folder: a resume from an older checkpoint names the newer ones, and moves them aside", "[train]") {
  const TemporaryFolder folder;
  const std::string all = "--set train.save_every=2 --set train.keep_last=0 ";
  const std::string out = run(folder.file("run"), 1, all + "--set train.steps=6");
  const std::string checkpoints = out + "/checkpoints", older = checkpoints + "/step_2";
  const auto go = [&](const std::string& steps, const std::string& more) {
    return run_program(
        train_args(out, all + "--set train.accumulate_grad_batches=4 --set train.steps=" + steps + " " + more));
  };
  const auto before = contents(out);
  const Outcome refused = go("4", "--resume " + older);
  INFO(refused.output);
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, older + " is not the newest checkpoint of " + out + ": step_4, step_6 are newer"));
  CHECK(has(refused.output, "--overwrite"));
  CHECK(contents(out) == before);

  // Newer checkpoints are found although `latest` points to an older one.
  fs::remove(checkpoints + "/latest");
  fs::create_symlink("step_2", checkpoints + "/latest");
  const Outcome longer = go("8", "--resume latest");
  INFO(longer.output);
  CHECK(longer.exit_code == 0);
  CHECK(has(longer.output, "resumed from " + checkpoints + "/step_6 at step 6"));

  const std::string weights = read_text(out + kWeights), metrics = read_text(out + "/metrics.json");
  const Outcome back = go("4", "--overwrite --resume " + older);
  INFO(back.output);
  CHECK(back.exit_code == 0);
  const std::string aside = checkpoints + "/set_aside_0";
  CHECK(has(back.output, "moved what was newer to " + aside));
  CHECK(read_text(aside + kWeights) == weights);
  CHECK(read_text(aside + "/metrics.json") == metrics);
  for (const char* step : {"/step_4", "/step_6", "/step_8"})
    for (const char* name : {"/state.json", kWeights, "/optimizer.safetensors"}) CHECK(fs::exists(aside + step + name));
  CHECK(read_text(aside + "/step_8" + kWeights) == weights);
  CHECK(resolve_checkpoint(out) == checkpoints + "/step_4");

  // Folders that were set aside earlier are kept: the next one gets a new name, and a run that would remove one is
  // refused.
  CHECK(go("3", "--overwrite --resume " + older).exit_code == 0);
  CHECK(fs::exists(checkpoints + "/set_aside_1/step_4/state.json"));
  CHECK(fs::exists(aside + "/step_4/state.json"));
  const auto now = contents(out);
  for (const char* more : {"", "--overwrite "})
    CHECK(go("9", std::string(more) + "--resume " + aside + "/step_8").exit_code == 1);
  CHECK(contents(out) == now);
  run(folder.file("elsewhere"), 1, "--set train.steps=9 --resume " + aside + "/step_8");
  for (const char* name : {"/step_2", "/step_3", "/step_0"}) fs::remove_all(checkpoints + name);
  for (const char* name : {"/model.safetensors", "/metrics.json"}) fs::remove(out + name);
  CHECK(go("2", "").exit_code ==
        1);  // checkpoints that were set aside are protected like any other files from an earlier run
}

TEST_CASE("run folder: a new run does not overwrite final weights, with or without checkpoints", "[train]") {
  const TemporaryFolder folder;
  const std::string none = "--set train.steps=2 --set train.save_last=false ", out = run(folder.file("run"), 1, none);
  CHECK_FALSE(fs::exists(out + "/checkpoints"));
  const auto before = contents(out);
  const Outcome again = run_program(train_args(out, "--set train.seed=7 --set train.steps=2"));
  INFO(again.output);
  CHECK(again.exit_code == 1);
  CHECK(has(again.output, "holds the final weights of an earlier run, " + out + "/model.safetensors: --overwrite"));
  CHECK(contents(out) == before);
  // A folder with weights, but without a run.
  const std::string bare = folder.file("bare");
  fs::create_directory(bare);
  write_text(bare + kWeights, "a user's file");
  for (const char* more : {"", "--overwrite"}) CHECK(run_program(train_args(bare, none + more)).exit_code == 1);
  CHECK(read_text(bare + kWeights) == "a user's file");
  fs::copy_file(out + kWeights, bare + kWeights, fs::copy_options::overwrite_existing);
  const std::vector<std::string> measured = {"/needle.svg", "/needle_copy.csv", "/needle_counting.svg",
                                             "/positions.csv"};
  for (const std::string& name : measured) write_text(bare + name, "");
  write_text(bare + "/needle_mine.csv", "a user's file");
  run(bare, 1, none + "--overwrite");
  for (const std::string& name : measured) CHECK_FALSE(fs::exists(bare + name));
  CHECK(fs::exists(bare + "/needle_mine.csv"));
  // Final weights without a checkpoint are set aside if a resume starts from an earlier step.
  const std::string some =
      run(folder.file("some"), 1, "--set train.steps=3 --set train.save_every=2 --set train.save_last=false");
  const std::string weights = read_text(some + kWeights);
  run(some, 1, "--set train.steps=4 --resume latest");
  CHECK(read_text(some + "/checkpoints/set_aside_0" + kWeights) == weights);
  CHECK(fs::exists(some + "/checkpoints/step_4/state.json"));
}

namespace {

void check_last_step(int ranks) {
  const TemporaryFolder folder;
  const std::string same = "--set train.warmup_steps=0 --set train.min_lr_fraction=1 ";
  const std::string out = folder.file("run"), whole = folder.file("whole");
  run(out, ranks, same + "--set train.steps=2");
  CHECK(fs::read_symlink(out + "/checkpoints/latest") == "step_2");
  CHECK(same_file(out + kWeights, out + "/checkpoints/step_2" + kWeights));
  run(out, ranks, same + "--set train.steps=4 --resume latest");
  run(whole, ranks, same + "--set train.steps=4");
  CHECK(same_file(out + kWeights, whole + kWeights));
  // Step 2's final weights are not moved to set_aside_0, because checkpoint step_2 has the same weights.
  CHECK_FALSE(fs::exists(out + "/checkpoints/set_aside_0"));
}

}  // namespace

TEST_CASE("run folder: a run without train.save_every saves its last step, from which a longer run resumes",
          "[train]") {
  check_last_step(1);
}

TEST_CASE("run folder: two ranks without train.save_every save their last step", "[train][dist]") {
  if (require_mpirun()) check_last_step(2);
}

TEST_CASE("run folder: a last checkpoint that does not fit on the disk leaves the final weights", "[train]") {
  const TemporaryFolder folder;
  const std::string full = folder.file("full");
  const Outcome outcome = run_program(train_args(full, "--set train.steps=2"), "ulimit -f 500; ");
  INFO(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.output, full + "/checkpoints/step_2"));
  CHECK(fs::exists(full + kWeights));
  CHECK(fs::exists(full + "/metrics.json"));
  CHECK(count_files(full + "/checkpoints") == 0);
}

TEST_CASE("run folder: final weights are set aside on the disk of the checkpoints", "[train]") {
  const TemporaryFolder folder;
  const std::string shared = run_command("mktemp -d /dev/shm/triad-test-XXXXXX").standard_output;
  const std::string elsewhere = shared.substr(0, shared.find('\n')), out = folder.file("run");
  if (!fs::is_directory(elsewhere) ||
      run_command("[ $(stat -c %d " + elsewhere + ") != $(stat -c %d " + folder.path() + ") ]").exit_code != 0) {
    if (fs::is_directory(elsewhere)) fs::remove_all(elsewhere);
    return void(skip("there is no second file system"));
  }
  fs::create_directory(out);
  fs::create_directory_symlink(elsewhere, out + "/checkpoints");
  run(out, 1, "--set train.steps=4 --set train.save_every=2");
  const std::string weights = read_text(out + kWeights);
  run(out, 1, "--set train.steps=3 --overwrite --resume " + out + "/checkpoints/step_2");
  CHECK(read_text(elsewhere + "/set_aside_0" + kWeights) == weights);
  CHECK(fs::exists(elsewhere + "/set_aside_0/step_4/state.json"));
  run(out, 1, "--set train.steps=1 --overwrite");
  CHECK_FALSE(fs::exists(elsewhere + "/set_aside_0"));
  fs::remove_all(elsewhere);
}

TEST_CASE("run folder: a folder of checkpoints on another disk stays there", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), elsewhere = folder.file("elsewhere");
  for (const std::string& each : {out, elsewhere}) fs::create_directory(each);
  fs::create_directory_symlink(elsewhere, out + "/checkpoints");
  fs::create_directory(elsewhere + "/another");
  write_text(elsewhere + "/another/file", "a user's file");
  run(out, 1, "--set train.steps=4 --set train.save_every=2");
  CHECK(fs::exists(elsewhere + "/step_4"));
  run(out, 1, "--set train.steps=3 --set train.save_every=3 --overwrite");
  CHECK(fs::is_symlink(out + "/checkpoints"));
  CHECK(fs::exists(elsewhere + "/step_3/state.json"));
  CHECK_FALSE(fs::exists(elsewhere + "/step_4"));
  CHECK(read_text(elsewhere + "/another/file") == "a user's file");
}

TEST_CASE("run folder: a run on a file system without locks trains, with a warning", "[train]") {
  const TemporaryFolder folder;
  const Outcome outcome =
      run_program(train_args(folder.file("run"), "--set train.steps=2"),
                  "ASAN_OPTIONS=verify_asan_link_order=0 TRIAD_NO_LOCKS=1 LD_PRELOAD=" TRIAD_FAULTS);
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(has(outcome.output, folder.file("run") + ": cannot be locked (No locks available)"));
}

TEST_CASE("run folder: files that --overwrite may not remove are named, and the checkpoints stay", "[train]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, "--set train.steps=4 --set train.save_every=2");
  const std::string table = out + "/tb";
  fs::permissions(table, fs::perms::owner_read | fs::perms::owner_exec);
  const Outcome outcome = run_command(kAsOthers + TRIAD_PROGRAM " " + train_args(out, "--overwrite"));
  fs::permissions(table, fs::perms::owner_all);
  INFO(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.output, table + "/events.out.tfevents."));
  CHECK(has(outcome.output, ": cannot be removed: Permission denied"));
  for (const char* name : {"/model.safetensors", "/checkpoints/step_2/state.json", "/checkpoints/latest/state.json"})
    CHECK(fs::exists(out + name));
  run(out, 1, "--overwrite");
}

TEST_CASE("run folder: a run that is refused or does not fit changes no file of an earlier run", "[train]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, "--set train.steps=2 --set train.save_every=2");
  const auto before = contents(out);
  const Outcome outcome = run_program(train_args(out, "--set train.micro_batch_size=500000 --set train.seq_len=4000"));
  INFO(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.output, out + " holds a checkpoint of an earlier run: --resume"));
  CHECK(contents(out) == before);

  // Even with --overwrite a run that doesn't fit in memory changes no previous files.
  const std::string bare = run(folder.file("bare"), 1, "--set train.steps=2");
  const auto healthy = contents(bare);
  const Outcome large =
      run_program(train_args(bare, "--overwrite --set train.micro_batch_size=500000 --set train.seq_len=4000"));
  INFO(large.output);
  CHECK(large.exit_code == 1);
  CHECK(contents(bare) == healthy);

  for (const char* name : {"/mem_oom.txt", "/mem_oom_rank1.json"}) write_text(out + name, "");
  run(out, 1, "--set train.steps=2 --set train.save_every=2 --overwrite --resume " + out + "/checkpoints/step_0");
  for (const char* name : {"/mem_oom.txt", "/mem_oom_rank1.json"}) CHECK_FALSE(fs::exists(out + name));
}

TEST_CASE("run folder: a resume that cannot write checkpoints ends before its first step", "[train]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, "--set train.steps=2 --set train.save_every=2");
  fs::permissions(out + "/checkpoints", fs::perms::owner_read | fs::perms::owner_exec);
  const Outcome refused = run_command(kAsOthers + TRIAD_PROGRAM " " +
                                      train_args(out, "--set train.steps=4 --set train.save_every=4 --resume latest"));
  fs::permissions(out + "/checkpoints", fs::perms::owner_all);
  INFO(refused.output);
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, out + "/checkpoints/probe: cannot be written"));
  CHECK(column(out + "/training.csv", "loss").size() == 2);
}

TEST_CASE("run folder: a resume does not use files that a killed run left unfinished", "[train]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, "--set train.steps=6 --set train.save_every=2");
  const std::string tmp = ".tmp.471101234567890123456789";
  // A checkpoint that is whole, but not renamed yet; one that is not, and may not be removed; and files.
  fs::rename(out + "/checkpoints/step_6", out + "/checkpoints/step_6" + tmp);
  const std::string unfinished = out + "/checkpoints/step_5" + tmp;
  fs::create_directory(unfinished);
  write_text(unfinished + "/model.safetensors" + tmp, "half");
  fs::permissions(unfinished, fs::perms::owner_read | fs::perms::owner_exec);
  for (const std::string name : {"/model.safetensors", "/config.json", "/notes"}) write_text(out + name + tmp, "half");
  const std::string resume =
      "--set train.steps=4 --set train.save_every=1 --set train.keep_last=2 --overwrite --resume " + out +
      "/checkpoints/step_2";
  const Outcome outcome = run_command(kAsOthers + TRIAD_PROGRAM " " + train_args(out, resume));
  fs::permissions(unfinished, fs::perms::owner_all);
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(has(outcome.output, "cannot be removed: Permission denied (an old checkpoint, which stays)"));
  const auto names = [&] {
    std::set<std::string> all;
    for (const fs::directory_entry& entry : fs::directory_iterator(out + "/checkpoints"))
      all.insert(entry.path().filename().string());
    return all;
  };
  CHECK(names() == std::set<std::string>{"latest", "set_aside_0", "step_3", "step_4", "step_5" + tmp});
  for (const char* step : {"/step_4", "/step_6"}) CHECK(is_checkpoint(out + "/checkpoints/set_aside_0" + step));
  for (const std::string name : {"/model.safetensors", "/config.json"}) CHECK_FALSE(fs::exists(out + name + tmp));
  CHECK(fs::exists(out + "/notes" + tmp));  // a user's file is kept
  run(out, 1, "--set train.steps=5 --set train.save_every=1 --set train.keep_last=2 --resume latest");
  CHECK(names() == std::set<std::string>{"latest", "set_aside_0", "step_4", "step_5"});
}
