// Checkpoint folders: atomic writes, the link `latest`, files left by killed saves, removing old checkpoints; and runs
// whose disk is full or whose folder is not writable.
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <thread>

#include "io/checkpoint.h"
#include "io/json_config.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// How a temporary name ends, as temporary_name() makes it.
const std::string kTmp = ".tmp.471101234567890123456789";
// A state.json with the key that marks a Triad checkpoint, and a text that distinguishes it.
std::string state_of(const std::string& text) { return R"({"format": "triad checkpoint", "is": ")" + text + "\"}"; }

}  // namespace

TEST_CASE("io: checkpoint folders are written whole, found, and restored after a killed save", "[io]") {
  const TemporaryFolder folder;
  const std::string run = folder.path(), parent = folder.file("checkpoints");
  const auto save = [&](int step, const std::string& text) {
    return write_checkpoint(parent, "step_" + std::to_string(step), [&](const std::string& temporary) {
      CHECK(temporary != parent + "/step_" + std::to_string(step));
      write_text(temporary + "/merges.txt", text);
      return state_of(text);
    });
  };
  CHECK(!find_newest_checkpoint(parent));
  check_error([&] { resolve_checkpoint(run); }, {run, "state.json"});
  check_error([&] { resolve_checkpoint(folder.file("none")); }, {"none", "no such folder"});
  CHECK(save(9, "nine") == parent + "/step_9");
  CHECK(save(10, "ten") == parent + "/step_10");
  CHECK(fs::read_symlink(parent + "/latest") == "step_10");
  for (const std::string& path : {run, run + "/", run + "/latest", parent, parent + "/latest", parent + "/step_10"})
    CHECK(resolve_checkpoint(path) == parent + "/step_10");
  CHECK(resolve_checkpoint(parent + "/step_9") == parent + "/step_9");
  CHECK(save(10, "ten again") == parent + "/step_10");  // a save replaces an existing folder
  CHECK(read_text(parent + "/step_10/state.json") == state_of("ten again"));

  // A failed save does not change the other checkpoints, and leaves no files.
  CHECK_THROWS_WITH(write_checkpoint(parent, "step_11", [](const std::string&) -> std::string { fail("disk full"); }),
                    "disk full");
  CHECK(count_files(parent) == 3);
  CHECK(find_newest_checkpoint(parent) == parent + "/step_10");

  // What saves leave when killed at three moments: a half-written folder, a whole folder that is not renamed yet, and a
  // renamed folder without a link.
  fs::create_directory(parent + "/step_12" + kTmp);
  write_text(parent + "/step_12" + kTmp + "/model.safetensors.tmp.123451234567890123456", "half");
  fs::create_directory(parent + "/step_13" + kTmp);
  write_text(parent + "/step_13" + kTmp + "/state.json", state_of("whole"));
  // The replaced checkpoint, if the save was killed after both folders had exchanged their names.
  fs::create_directory(parent + "/step_10" + kTmp);
  write_text(parent + "/step_10" + kTmp + "/state.json", state_of("whole"));
  fs::create_symlink("step_13", parent + "/latest" + kTmp);
  write_text(parent + "/notes.tmp.1", "the user's");
  fs::create_directory(parent + "/step_99");  // a folder without state.json is no checkpoint
  remove_leftovers(parent);
  CHECK(count_files(parent) == 6);
  CHECK(is_checkpoint(parent + "/step_13"));
  CHECK(read_text(parent + "/step_10/state.json") == state_of("ten again"));
  CHECK(find_newest_checkpoint(parent) == parent + "/step_13");  // newer than `latest`'s target, step_10
  const std::vector<CheckpointFolder> all = list_checkpoints(parent);
  REQUIRE(all.size() == 3);
  CHECK(all[0].step == 9);
  CHECK(all[2].step == 13);
  fs::remove_all(parent + "/step_10");  // `latest` now points to nothing
  CHECK(resolve_checkpoint(run) == parent + "/step_13");
  CHECK(resolve_checkpoint(parent + "/latest") == parent + "/step_13");
  fs::remove(parent + "/latest");
  CHECK(resolve_checkpoint(run + "/latest") == parent + "/step_13");

  // Folders that were set aside are not found, and neither are folders step_X in which X is no valid step.
  write_text(folder.file("metrics.json"), "{}");
  CHECK(set_aside(parent, {folder.file("metrics.json"), parent + "/step_13"}) == parent + "/set_aside_0");
  CHECK(next_set_aside(parent) == parent + "/set_aside_1");
  CHECK(list_set_aside(parent) == std::vector<std::string>{parent + "/set_aside_0"});
  CHECK(is_checkpoint(parent + "/set_aside_0/step_13"));
  CHECK(read_text(parent + "/set_aside_0/metrics.json") == "{}");
  for (const char* name : {"/step_99999999999999999999", "/step_-14", "/step_14x", "/step_ 14"}) {
    fs::create_directory(parent + name);
    write_text(parent + name + "/state.json", "whole");
  }
  CHECK(resolve_checkpoint(run) == parent + "/step_9");
}

TEST_CASE("io: `latest` may be a file, or a folder that a copy has made of the link", "[io]") {
  const TemporaryFolder folder;
  const std::string& parent = folder.path();
  const std::string latest = parent + "/latest";
  const auto save = [&](int step) {
    write_checkpoint(parent, fmt::format("step_{}", step), [&](const std::string& temporary) {
      write_text(temporary + "/merges.txt", std::to_string(step));
      return fmt::format(R"({{"format": "triad checkpoint", "step": {}}})", step);
    });
  };
  const auto newest = [&] { return fs::path(resolve_checkpoint(latest)).filename().string(); };
  save(4);
  save(6);
  // A file, as this program or a copy writes it. Its target is kept, and found if nothing else is.
  for (const std::string& text : {std::string("step_4\n"), std::string("step_4"), parent + "/step_4\r\n"}) {
    fs::remove(latest);
    write_text(latest, text);
    CHECK(target_of_latest(parent) == parent + "/step_4");
    CHECK(newest() == "step_6");
    thin_out_checkpoints(parent, 1, 0);
    CHECK(list_checkpoints(parent).size() == 2);
  }
  save(7);
  CHECK(fs::read_symlink(latest) == "step_7");
  // Any other kind of file is the user's.
  fs::remove(latest);
  write_text(latest, "my notes");
  CHECK_FALSE(target_of_latest(parent));
  save(8);
  CHECK(fs::read_symlink(latest) == "step_8");
  CHECK(read_text(parent + "/set_aside_0/latest") == "my notes");
  // An existing checkpoint's copy, too.
  fs::remove(latest);
  fs::copy(parent + "/step_8", latest);
  CHECK(step_of_latest_folder(parent) == 8);
  CHECK(newest() == "step_8");
  save(9);
  CHECK(fs::read_symlink(latest) == "step_9");
  CHECK(read_text(parent + "/set_aside_1/latest/merges.txt") == "8");
  // The newest checkpoint's only copy, which becomes step_9 again.
  fs::remove(latest);
  fs::rename(parent + "/step_9", latest);
  CHECK(newest() == "latest");
  CHECK(find_newest_checkpoint(parent) == latest);
  save(10);
  CHECK(fs::read_symlink(latest) == "step_10");
  CHECK(read_text(parent + "/step_9/merges.txt") == "9");
  // A copy that is newer than what is saved now, and a folder that is no checkpoint.
  fs::remove(latest);
  fs::rename(parent + "/step_10", latest);
  save(9);
  CHECK(read_text(parent + "/set_aside_2/latest/merges.txt") == "10");
  fs::remove(latest);
  fs::create_directory(latest);
  CHECK(step_of_latest_folder(parent) == -1);
  CHECK(newest() == "step_9");
  save(11);
  CHECK(fs::is_directory(parent + "/set_aside_3/latest"));
}

TEST_CASE("train: a run goes on without symbolic links or syncs of folders, and after copies that followed links",
          "[train]") {
  const TemporaryFolder folder;
  const std::string keys =
                        "--set train.save_every=2 --set train.keep_last=2 --set train.schedule=wsd "
                        "--set train.decay_fraction=0 ",
                    whole = folder.file("whole");
  REQUIRE(run_program(train_args(whole, keys + "--set train.steps=8")).exit_code == 0);
  const auto trains = [&](const std::string& out, const std::string& more, const std::string& environment) {
    const Outcome outcome = run_program(train_args(out, keys + more), environment);
    INFO(environment << "\n" << outcome.output);
    CHECK(outcome.exit_code == 0);
  };
  for (const int error : {EPERM, ENOTSUP, ENOSYS, EINVAL}) {
    const std::string out = folder.file(std::to_string(error)), latest = out + "/checkpoints/latest";
    const std::string faults =
        with_faults(fmt::format("TRIAD_NO_LINKS={} TRIAD_NO_FOLDER_SYNC={}", error, error == EPERM ? EINVAL : error));
    trains(out, "--set train.steps=4", faults);
    CHECK(read_text(latest) == "step_4\n");
    CHECK(run_program("generate --prompt a --tokens 1 --device cpu --checkpoint " + latest).exit_code == 0);
    trains(out, "--set train.steps=6 --resume " + latest, faults);
    CHECK(read_text(latest) == "step_6\n");
    trains(out, "--set train.steps=8 --resume latest", "");  // this file system has links
    CHECK(fs::read_symlink(latest) == "step_8");
    CHECK(same_file(whole + kWeights, out + kWeights));
  }
  // The run copied by cp -rL; then without the folder from which `latest` was copied.
  for (const bool only_copy : {false, true}) {
    const std::string out = folder.file(only_copy ? "only" : "copy"), checkpoints = out + "/checkpoints";
    trains(folder.file("source"), "--set train.steps=4 --overwrite", "");
    fs::copy(folder.file("source"), out, fs::copy_options::recursive);  // follows links
    REQUIRE(fs::is_directory(fs::symlink_status(checkpoints + "/latest")));
    if (only_copy) fs::remove_all(checkpoints + "/step_4");
    trains(out, "--set train.steps=8 --resume " + out + (only_copy ? "" : "/checkpoints/latest"), "");
    CHECK(fs::read_symlink(checkpoints + "/latest") == "step_8");
    CHECK(same_file(whole + kWeights, out + kWeights));
    CHECK(fs::exists(checkpoints + "/set_aside_0/latest/state.json") == !only_copy);
  }
  // Back to an older checkpoint: a newer one's copy is moved away at the start, or the next resume would take it.
  const std::string out = folder.file("back"), checkpoints = out + "/checkpoints";
  fs::copy(folder.file("source"), out, fs::copy_options::recursive);
  trains(out, "--set train.steps=2 --overwrite --resume " + checkpoints + "/step_2", "");
  CHECK(fs::exists(checkpoints + "/set_aside_0/latest/state.json"));
  CHECK(resolve_checkpoint(out) == checkpoints + "/step_2");
}

TEST_CASE("io: old checkpoints are removed, except the newest and every k-th", "[io]") {
  const TemporaryFolder folder;
  const std::string& parent = folder.path();
  const auto save = [&](int step) {
    write_checkpoint(parent, "step_" + std::to_string(step), [](const std::string&) { return state_of(""); });
  };
  const auto steps = [&] {
    std::vector<int64_t> all;
    for (const CheckpointFolder& c : list_checkpoints(parent)) all.push_back(c.step);
    return all;
  };
  for (int step = 1; step <= 7; ++step) save(step);
  thin_out_checkpoints(parent, 0, 0);
  CHECK(steps().size() == 7);
  thin_out_checkpoints(parent, 3, 2);
  CHECK(steps() == std::vector<int64_t>{2, 4, 5, 6, 7});
  save(3);  // `latest` points to step 3 now; newer checkpoints must still be found
  thin_out_checkpoints(parent, 1, 0);
  CHECK(steps() == std::vector<int64_t>{3, 7});
  for (const std::string& path : {parent, parent + "/latest"}) CHECK(resolve_checkpoint(path) == parent + "/step_7");
  CHECK(count_files(parent) == 3);
  // A removal that was killed leaves a renamed folder. The next save gives a whole one its name back, and deletes a
  // partial one.
  fs::rename(parent + "/step_7", parent + "/step_7" + kTmp);
  fs::create_directory(parent + "/step_6" + kTmp);
  save(8);
  CHECK(steps() == std::vector<int64_t>{3, 7, 8});
  CHECK(count_files(parent) == 4);
}

namespace {

const std::string kSaves = "--set train.steps=300 --set train.save_every=1 --set train.keep_last=2 ";

// Trains a run that saves at every step, and calls `disturb` after some saves. The run must end with a message that
// names the checkpoint, and earlier checkpoints must be whole. After `repair` a resume must end with the same bits as
// an uninterrupted run.
void check_failing_save(const std::string& before, const std::function<void(const std::string& out, int pid)>& disturb,
                        const std::function<void(const std::string& out)>& repair, const std::string& reason) {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), whole = folder.file("whole"), log = folder.file("log");
  REQUIRE(run_program(train_args(whole, kSaves)).exit_code == 0);
  // Each matrix product takes 1 ms longer, so that `disturb` is called before the run ends.
  BackgroundProgram program(train_args(out, kSaves), with_faults("TRIAD_FAULTS='0 0.001'") + before, log);
  for (int i = 0; i < 180000 && lines(out + "/training.csv").size() < 4; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(fs::exists(out + "/checkpoints/latest"));
  disturb(out, program.pid());
  CHECK(program.wait() == 1);
  const std::string text = read_text(log);
  INFO(text);
  CHECK(text.find(reason) != std::string::npos);
  CHECK(text.find("checkpoints") != std::string::npos);
  repair(out);
  const std::string newest = resolve_checkpoint(out);
  CHECK(run_program("inspect " + newest + kWeights).exit_code == 0);  // inspect verifies checksums, too
  const Outcome resumed = run_program(train_args(out, kSaves + "--resume latest"));
  INFO(resumed.output);
  CHECK(resumed.exit_code == 0);
  CHECK(same_file(whole + kWeights, out + kWeights));
  for (const fs::directory_entry& entry : fs::directory_iterator(out + "/checkpoints"))
    CHECK(entry.path().filename().string().find(".tmp.") == std::string::npos);
}

}  // namespace

TEST_CASE("train: a save that exceeds the file size limit ends the run, and the older checkpoint stays whole", "[io]") {
  check_failing_save(
      "",
      [](const std::string&, int pid) {
        const rlimit limit{100000, 100000};  // bytes: less than the weights' 170 KB, more than any other file
        REQUIRE(prlimit(pid, RLIMIT_FSIZE, &limit, nullptr) == 0);
      },
      [](const std::string&) {}, "File too large");
}

TEST_CASE("train: a checkpoints folder that is no longer writable ends the run, and the older checkpoint stays whole",
          "[io]") {
  // Root may write to any folder, so the program drops this capability first.
  check_failing_save(
      geteuid() == 0 ? "exec setpriv --bounding-set=-dac_override,-dac_read_search " : "",
      [](const std::string& out, int) {
        fs::permissions(out + "/checkpoints", fs::perms::owner_write, fs::perm_options::remove);
      },
      [](const std::string& out) {
        fs::permissions(out + "/checkpoints", fs::perms::owner_write, fs::perm_options::add);
      },
      "Permission denied");
}

TEST_CASE("train: a full disk ends the run, and the older checkpoints stay whole", "[io]") {
  const TemporaryFolder folder;
  const std::string disk = folder.file("disk"), whole = folder.file("whole"), log = folder.file("log");
  fs::create_directory(disk);
  const std::string own = "unshare -rm sh -c 'mount -t tmpfs -o size=2m none " + disk;
  if (run_command(own + "'").exit_code != 0) return void(skip("no file system of its own can be mounted here"));
  const std::string more = "--set train.steps=30 --set train.save_every=1 --set train.keep_last=0 ",
                    out = disk + "/run";
  REQUIRE(run_program(train_args(whole, more)).exit_code == 0);
  // A checkpoint takes about 500 KB, and old ones are kept, so the disk is full after three. Then a run in another
  // folder resumes from the last one.
  const Outcome outcome =
      run_command(own + "; " TRIAD_PROGRAM " " + train_args(out, more) + "; echo \"ended with $?\"; " +
                  TRIAD_PROGRAM " " + train_args(folder.file("resumed"), more) + "--resume " + out +
                  "; echo LISTING; ls -A " + out + "/checkpoints; df " + disk + "'");
  INFO(outcome.output);
  CHECK(outcome.output.find("No space left on device") != std::string::npos);
  CHECK(outcome.output.find("ended with 1") != std::string::npos);
  const size_t listing = outcome.output.find("LISTING");
  REQUIRE(listing != std::string::npos);
  CHECK(outcome.output.find("step_1", listing) != std::string::npos);
  CHECK(outcome.output.find(".tmp.", listing) == std::string::npos);
  CHECK(same_file(whole + kWeights, folder.file("resumed") + kWeights));
}

TEST_CASE("train: a run that cannot save is refused before its first step", "[io]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const Outcome outcome = run_program(train_args(out, kSaves), "ulimit -f 100; ");
  INFO(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(outcome.output.find("checkpoints/step_0") != std::string::npos);
  CHECK(lines(out + "/training.csv").size() == 1);
}

namespace {

// Returns a tokenizer.json from known_tokens.json.
std::string some_tokenizer() {
  return parse_json(read_text(TRIAD_SOURCE_DIR "/tests/io/known_tokens.json"), "known_tokens.json")[0]["tokenizer"]
      .dump();
}

}  // namespace

TEST_CASE("train: a resume requires the checkpoint's own tokenizer", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), file = folder.file("tokenizer.json"), tokenizer = some_tokenizer();
  write_text(file, tokenizer);
  const std::string with = "--set train.save_every=2 --set data.tokenizer=" + file + " ";
  REQUIRE(run_program(train_args(out, with + "--set train.steps=2")).exit_code == 0);
  CHECK(read_text(out + "/checkpoints/step_2/tokenizer.json") == tokenizer);
  const std::string rows = read_text(out + "/training.csv");
  write_text(file, tokenizer + "\n");  // an equivalent tokenizer whose bytes differ
  const Outcome other = run_program(train_args(out, with + "--set train.steps=4 --resume latest"));
  INFO(other.output);
  CHECK(other.exit_code == 1);
  CHECK(other.output.find("/step_2/tokenizer.json is not what data.tokenizer = " + file + " is now") !=
        std::string::npos);
  CHECK(read_text(out + "/training.csv") == rows);
  write_text(file, tokenizer);
  CHECK(run_program(train_args(out, with + "--set train.steps=4 --resume latest")).exit_code == 0);
  // A new run in the same folder deletes the replaced run's tokenizer.
  REQUIRE(run_program(train_args(out, "--set train.steps=1 --overwrite")).exit_code == 0);
  CHECK_FALSE(fs::exists(out + "/tokenizer.json"));
}

TEST_CASE("train: a tokenizer's files are read at the start, and may be deleted afterwards", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), file = folder.file("tokenizer.json"), tokenizer = some_tokenizer();
  write_text(file, tokenizer);
  BackgroundProgram program(train_args(
      out,
      "--set train.steps=1000000 --set train.allow_unsafe=true --set log.every=1000 --set data.tokenizer=" + file));
  for (int i = 0; i < 180000 && !fs::exists(out + "/mem_step1.json"); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(fs::exists(out + "/mem_step1.json"));
  fs::remove(file);
  write_text(out + "/.HALT", "");
  CHECK(program.wait() == 0);
  CHECK(read_text(out + "/checkpoints/latest/tokenizer.json") == tokenizer);
}

TEST_CASE("train: init_from takes another run's weights and nothing else", "[train]") {
  const TemporaryFolder folder;
  const std::string first = folder.file("first"), second = folder.file("second"), weights = "/model.safetensors";
  REQUIRE(run_program(train_args(first, "--set train.steps=3")).exit_code == 0);
  const std::string from = "--set train.init_from=" + first + " ";
  const Outcome none = run_program(train_args(second, from + "--set train.steps=0 --set train.seed=7"));
  INFO(none.output);
  REQUIRE(none.exit_code == 0);
  CHECK(none.output.find("done: 0 steps, 0.") != std::string::npos);  // no loss is shown
  CHECK(none.output.find("begins with the weights of " + first + weights) != std::string::npos);
  CHECK(same_file(first + weights, second + weights));
  // init_from allows other lengths and data, and starts at step 0.
  REQUIRE(run_program(train_args(second, from + "--overwrite --set train.steps=2 --set train.seq_len=96 --set "
                                                "train.save_every=1 --set data.seed=5"))
              .exit_code == 0);
  CHECK(lines(second + "/training.csv").size() == 3);
  CHECK_FALSE(same_file(first + weights, second + weights));
  // Invalid initial weights are an error before --overwrite removes the previous run's files.
  const std::string rows = read_text(second + "/training.csv");
  const auto refused = [&](const std::string& args, int exit_code, const std::string& words) {
    const Outcome outcome = run_program(train_args(second, "--overwrite " + args));
    INFO(outcome.output);
    CHECK(outcome.exit_code == exit_code);
    CHECK(outcome.output.find(words) != std::string::npos);
    CHECK(read_text(second + "/training.csv") == rows);
    CHECK(fs::exists(second + "/checkpoints/step_2" + weights));
  };
  refused("--set train.init_from=" + folder.file("absent"), 1, "train.init_from: " + folder.file("absent"));
  refused(from + "--set model.dim=64", 1, "embed.weight is F32[256,32]");
  refused("--set train.init_from=" + second, 2, "train.init_from is " + second + ", in log.out_dir");
  fs::create_directory(folder.file("other"));
  write_text(folder.file("other/tokenizer.json"), some_tokenizer());
  refused(from + "--set data.tokenizer=" + folder.file("other/tokenizer.json"), 1,
          "of data.tokenizer = byte: tokens of");
  fs::create_directories(folder.file("cut"));
  for (const char* name : {"/config.json", "/model.safetensors"}) fs::copy(first + name, folder.file("cut") + name);
  fs::resize_file(folder.file("cut") + weights, fs::file_size(first + weights) - 1);
  refused("--set train.init_from=" + folder.file("cut"), 1, folder.file("cut") + weights);
  // A run may not write into a checkpoint, nor into a folder with a run or a checkpoint below the usual depth.
  const std::string inside = second + "/checkpoints/step_2";
  const Outcome mixed = run_program(train_args(inside, "--overwrite"));
  CHECK(mixed.exit_code == 1);
  CHECK(mixed.output.find(inside + " is itself a checkpoint") != std::string::npos);
  const Outcome outer = run_program(train_args(folder.path(), from + "--set train.save_every=1 --set train.steps=1"));
  CHECK(outer.exit_code == 2);  // refused: the folder contains the run `first`
  fs::create_directories(folder.file("outer/checkpoints"));
  fs::copy(inside, folder.file("outer/checkpoints/step_9"), fs::copy_options::recursive);
  fs::copy(second, folder.file("outer/deeper"), fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  const Outcome nested = run_program(
      train_args(folder.file("outer"), "--set train.steps=3 --set train.seq_len=96 --set data.seed=5 --resume " +
                                           folder.file("outer/deeper/checkpoints/step_2")));
  CHECK(nested.exit_code != 0);
  CHECK(nested.output.find("holds a checkpoint of an earlier run") != std::string::npos);
  CHECK(fs::exists(folder.file("outer/checkpoints/step_9") + weights));
  // A resume reads its own checkpoint, so init_from's weights may be deleted.
  fs::remove_all(first);
  const Outcome resumed =
      run_program(train_args(second, from + "--resume latest --set train.steps=3 --set train.seq_len=96 --set "
                                            "train.save_every=1 --set data.seed=5"));
  INFO(resumed.output);
  CHECK(resumed.exit_code == 0);
}
