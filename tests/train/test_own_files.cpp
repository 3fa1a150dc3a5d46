// Files that Triad has not made stay as they are; and a run whose folder is moved, removed or replaced under it.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "io/checkpoint.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// The files and folders below a folder, by their paths in it.
std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> all;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder))
    all[entry.path().lexically_relative(folder).string()] =
        fs::is_regular_file(entry.symlink_status()) ? read_text(entry.path().string()) : "";
  return all;
}

void put(const std::string& path, const std::string& text) {
  fs::create_directories(fs::path(path).parent_path());
  write_text(path, text);
}

const std::string kSaves = "--set train.save_every=2 --set train.keep_last=0 ";

// Whether this user may mount in its own namespace.
bool require_mounts() { return run_command("unshare -rm true").exit_code == 0 || skip("no mount namespaces"); }

size_t count_states(const std::string& folder) {
  size_t n = 0;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder))
    n += entry.path().filename() == "state.json";
  return n;
}

}  // namespace

TEST_CASE("own files: a new run is refused where another program's file has one of its names", "[train]") {
  const std::vector<std::string> names = {"config.json",
                                          "env.json",
                                          "metrics.json",
                                          "tokenizer.json",
                                          "vocab.json",
                                          "merges.txt",
                                          "encoder.json",
                                          "vocab.bpe",
                                          "training.csv",
                                          "val.csv",
                                          "k_stats.csv",
                                          "gates.csv",
                                          "fallback_counters.csv",
                                          "grad_ledger.csv",
                                          "positions.csv",
                                          "needle.csv",
                                          "needle_copy.svg",
                                          "selection_sample.json",
                                          "document_lengths.json",
                                          "opt_state_mb.txt",
                                          "dtypes_report.txt",
                                          "ddp_buckets.txt",
                                          "all_missing_params.txt",
                                          "traces.log",
                                          ".anomaly_type",
                                          "heartbeat_rank0.jsonl",
                                          "stackdump_rank0_1.txt",
                                          "mem_boot.txt",
                                          "mem_boot.json",
                                          "mem_step1.pickle",
                                          "model.safetensors",
                                          "model.safetensors.index.json",
                                          "model-00001-of-00003.safetensors",
                                          "ranks/rank_0.log",
                                          "ranks/rank_1_collectives.csv",
                                          "checkpoints/step_4/model.ckpt",
                                          "checkpoints/step_0",
                                          "checkpoints/step_2/model.safetensors",
                                          "checkpoints/latest/model",
                                          "checkpoints",
                                          "ranks",
                                          "tb"};
  for (const std::string& name : names) {
    INFO(name);
    const TemporaryFolder folder;
    put(folder.file("run/" + name), "{\"architectures\": [\"LlamaForCausalLM\"]}");
    const auto before = contents(folder.path());
    for (const char* more : {"", "--overwrite "}) {
      const Outcome outcome = run_program(train_args(folder.file("run"), std::string(more) + "--set train.steps=2 "));
      INFO(outcome.output);
      CHECK(outcome.exit_code == 1);
      CHECK(has(outcome.output, name));
      CHECK(contents(folder.path()) == before);
    }
  }
  // A link and a folder aren't a run's files either.
  const TemporaryFolder folder;
  fs::create_directories(folder.file("run/config.json"));
  put(folder.file("kept.csv"), "step,loss,lr\n");
  fs::create_symlink(folder.file("kept.csv"), folder.file("run/training.csv"));
  const Outcome outcome = run_program(train_args(folder.file("run"), "--set train.steps=2"));
  INFO(outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.output, "run/config.json, "));
  CHECK(has(outcome.output, "run/training.csv: these are in the way of a run, which Triad has not made"));
  CHECK(read_text(folder.file("kept.csv")) == "step,loss,lr\n");
}

TEST_CASE("own files: other files in a run's folder stay, and --overwrite removes all that the run made", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const std::vector<std::string> others = {"notes.txt",
                                           "pytorch_model.bin",
                                           "checkpoints/best.pt",
                                           "checkpoints/probe",
                                           "checkpoints/epoch_1/model.ckpt",
                                           "tb/notes.txt",
                                           "ranks/mine.log",
                                           "model.safetensors.tmp.1",
                                           "checkpoints/step_4.tmp.12/model.safetensors",
                                           "tb/events.out.tfevents.1.host.1.0"};
  for (const std::string& name : others) put(out + "/" + name, "precious");
  for (const char* more : {"", "--overwrite "}) {
    run(out, 1, kSaves + more + "--set train.steps=4 --set train.eval_every=2");
    for (const std::string& name : others) CHECK(read_text(out + "/" + name) == "precious");
  }
  run(out, 1, kSaves + "--set train.steps=6 --resume latest");
  run(out, 1, "--overwrite --set train.steps=1 --set train.save_last=false --set log.stats=false");
  CHECK_FALSE(fs::exists(out + "/checkpoints/step_6"));
  CHECK_FALSE(fs::exists(out + "/checkpoints/latest"));
  CHECK_FALSE(fs::exists(out + "/gates.csv"));
  for (const std::string& name : others) CHECK(read_text(out + "/" + name) == "precious");

  // A checkpoint to which something was added is not removed: by --overwrite, or to keep the last ones only.
  run(out, 1, kSaves + "--overwrite --set train.steps=4");
  put(out + "/checkpoints/step_2/optimizer.pt", "precious");
  const auto before = contents(out);
  const Outcome refused = run_program(train_args(out, "--overwrite --set train.steps=2"));
  INFO(refused.output);
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, out + "/checkpoints/step_2/optimizer.pt: this is in the way of a run"));
  CHECK(contents(out) == before);
  const Outcome thinned = run_program(
      train_args(out, "--set train.steps=8 --set train.save_every=2 --set train.keep_last=1 --resume latest"));
  INFO(thinned.output);
  CHECK(thinned.exit_code == 0);
  CHECK(has(thinned.output, "step_2: is kept: " + out + "/checkpoints/step_2/optimizer.pt is not Triad's"));
  CHECK(is_checkpoint(out + "/checkpoints/step_2"));
  CHECK_FALSE(fs::exists(out + "/checkpoints/step_4"));
  // A resume replaces no one else's files either.
  put(out + "/config.json", "{\"architectures\": [\"LlamaForCausalLM\"]}");
  CHECK(run_program(train_args(out, "--set train.steps=9 --resume latest")).exit_code == 1);
  CHECK(has(read_text(out + "/config.json"), "Llama"));
}

TEST_CASE("own files: what links and mounts in checkpoints lead to is never removed", "[train]") {
  const TemporaryFolder folder;
  const std::string archive = folder.file("archive"), checkpoints = folder.file("run/checkpoints");
  const std::string out = run(folder.file("run"), 1, kSaves + "--set train.steps=12");
  fs::create_directory(archive);
  for (const char* name : {"/step_2", "/step_4", "/step_8"}) {
    fs::rename(checkpoints + name, archive + name);
    fs::create_directory_symlink("../../archive" + std::string(name), checkpoints + name);
  }
  const auto archived = contents(archive);
  // Back to an older one, which is a link, as the run's own: newer ones are set aside, links among them too.
  const Outcome refused = run_program(train_args(out, kSaves + "--resume " + checkpoints + "/step_4"));
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, "is not the newest checkpoint of " + out));
  const Outcome back =
      run_program(train_args(out, kSaves + "--set train.steps=6 --overwrite --resume " + checkpoints + "/step_4"));
  INFO(back.output);
  CHECK(back.exit_code == 0);
  CHECK(has(back.output, "moved what was newer to " + checkpoints + "/set_aside_0"));
  for (const char* name : {"/step_6", "/step_8", "/step_10", "/step_12"})
    CHECK(is_checkpoint(checkpoints + "/set_aside_0" + name));
  CHECK(contents(archive) == archived);
  // Keeping the last only, and starting anew.
  const std::string thin = "--set train.save_every=1 --set train.keep_last=1 --set train.steps=8 --resume latest";
  CHECK(run_program(train_args(out, thin)).exit_code == 0);
  CHECK(contents(archive) == archived);
  const auto before = contents(out);
  const Outcome anew = run_program(train_args(out, "--overwrite --set train.steps=2"));
  INFO(anew.output);
  CHECK(anew.exit_code == 1);
  CHECK(has(anew.output, checkpoints + "/step_2, "));
  CHECK(contents(out) == before);
  CHECK(contents(archive) == archived);
}

TEST_CASE("own files: checkpoints that are mount points stay, whatever path leads to them", "[train]") {
  if (!require_mounts()) return;
  const TemporaryFolder folder;
  const std::string archive = folder.file("archive"), checkpoints = folder.file("run/checkpoints");
  const std::string out = run(folder.file("run"), 1, kSaves + "--set train.steps=8");
  fs::create_directory(archive);
  fs::rename(checkpoints + "/step_2", archive + "/step_2");
  fs::create_directory(checkpoints + "/step_2");
  fs::create_directory(folder.file("other"));
  const std::string mounted = "unshare -rm sh -c 'mount --bind " + archive + "/step_2 " + checkpoints +
                              "/step_2 && mount --bind " + out + " " + folder.file("other") + " && " TRIAD_PROGRAM " ";
  const auto archived = contents(archive);
  const Outcome thinned =
      run_command(mounted + train_args(out, "--set train.save_every=1 --set train.keep_last=2 --set train.steps=10 ") +
                  "--resume latest'");
  INFO(thinned.output);
  CHECK(thinned.exit_code == 0);
  CHECK(has(thinned.output, checkpoints + "/step_2: is kept: it is a link, a mount point"));
  CHECK(contents(archive) == archived);
  const Outcome anew = run_command(mounted + train_args(out, "--overwrite --set train.steps=2 ") + "'");
  INFO(anew.output);
  CHECK(anew.exit_code == 1);
  CHECK(contents(archive) == archived);
  // The run's checkpoint under another path to the same folder.
  const size_t states = count_states(folder.path());
  const Outcome back = run_command(mounted + train_args(out, kSaves + "--overwrite --set train.steps=11 ") +
                                   "--resume " + folder.file("other") + "/checkpoints/step_9'");
  INFO(back.output);
  CHECK(back.exit_code == 0);
  CHECK(has(back.output, "moved what was newer to " + checkpoints + "/set_aside_0"));
  CHECK(count_states(folder.path()) > states);
}

TEST_CASE("own files: an old checkpoint that cannot be removed is a warning", "[train]") {
  const std::string as_others = geteuid() == 0 ? "setpriv --bounding-set=-dac_override,-dac_read_search,-fowner " : "";
  const std::string thin = "--set train.save_every=1 --set train.keep_last=1 --set train.steps=8 --resume latest";
  const TemporaryFolder folder;
  for (const bool busy : {false, true}) {
    INFO(busy);
    const std::string out = run(folder.file(busy ? "busy" : "locked"), 1, kSaves + "--set train.steps=4");
    const std::string old = out + "/checkpoints/step_2";
    if (!busy) fs::permissions(old, fs::perms::owner_read | fs::perms::owner_exec);
    const Outcome outcome =
        run_command((busy ? with_faults("TRIAD_BUSY=step_2") : as_others) + TRIAD_PROGRAM " " + train_args(out, thin));
    if (!busy) fs::permissions(old, fs::perms::owner_all);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 0);
    const std::string words = "an old checkpoint stays: " + old;
    CHECK(has(outcome.output, words));
    CHECK(outcome.output.find(words) == outcome.output.rfind(words));  // said once
    CHECK(is_checkpoint(old));
    CHECK(is_checkpoint(out + "/checkpoints/step_8"));
    CHECK_FALSE(fs::exists(out + "/checkpoints/step_4"));
  }
}

namespace {

// Trains until step 12, far from the end, lets `disturb` change the run's folder, and returns what the run says, which
// must name the folder RUN.rescued_0 with a whole checkpoint.
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

TEST_CASE("own files: a checkpoint that is a link belongs to the run whose path names it", "[train]") {
  const TemporaryFolder folder;
  const std::string first = run(folder.file("first"), 1, kSaves + "--set train.steps=4"), copy = folder.file("copy");
  fs::copy(first, copy, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  fs::create_directory(folder.file("archive"));
  fs::rename(copy + "/checkpoints/step_2", folder.file("archive/step_2"));
  fs::create_directory_symlink(folder.file("archive/step_2"), copy + "/checkpoints/step_2");
  const auto before = contents(first);
  const Outcome resumed = run_program("train --resume " + copy + "/checkpoints/step_2 --overwrite --set train.steps=3");
  INFO(resumed.output);
  CHECK(resumed.exit_code == 0);
  CHECK(has(resumed.output, copy + "/checkpoints/step_3"));
  CHECK(contents(first) == before);  // state.json names this folder
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
