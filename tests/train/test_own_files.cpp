// Files that Triad has not made stay as they are.
#include <unistd.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "io/checkpoint.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

void put(const std::string& path, const std::string& text) {
  fs::create_directories(fs::path(path).parent_path());
  write_text(path, text);
}

const std::string kEachSaves = "--set train.save_every=2 --set train.keep_last=0 ";

// Whether this user may mount in its own namespace.
bool require_mounts() { return run_command("unshare -rm true").exit_code == 0 || skip("no mount namespaces"); }

size_t count_states(const std::string& folder) {
  size_t n = 0;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder))
    n += entry.path().filename() == "state.json";
  return n;
}

}  // namespace

namespace {

// Names of a run's files that a new run and a resume refuse to replace, and those that only a new run refuses.
const std::vector<std::string> kNames = {"config.json",
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
                                         "index.csv",
                                         "index_recall.csv",
                                         "fp8.csv",
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
                                         "ranks/rank_1_collectives.csv",
                                         "mem_loader_rank1.txt",
                                         "ddp_buckets_rank1.txt"};
const std::vector<std::string> kOtherNames = {"ranks/rank_0.log",
                                              "checkpoints/step_4/model.ckpt",
                                              "checkpoints/step_0",
                                              "checkpoints/step_2/model.safetensors",
                                              "checkpoints/latest/model",
                                              "checkpoints",
                                              "ranks",
                                              "tb"};
const std::string kForeign = "{\"architectures\": [\"LlamaForCausalLM\"]}";

}  // namespace

TEST_CASE("own files: a new run is refused where another program's file has one of its names", "[train]") {
  std::vector<std::string> names = kNames;
  names.insert(names.end(), kOtherNames.begin(), kOtherNames.end());
  for (const std::string& name : names) {
    INFO(name);
    const TemporaryFolder folder;
    put(folder.file("run/" + name), kForeign);
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
    run(out, 1, kEachSaves + more + "--set train.steps=4 --set train.eval_every=2");
    for (const std::string& name : others) CHECK(read_text(out + "/" + name) == "precious");
  }
  run(out, 1, kEachSaves + "--set train.steps=6 --resume latest");
  run(out, 1, "--overwrite --set train.steps=1 --set train.save_last=false --set log.stats=false");
  CHECK_FALSE(fs::exists(out + "/checkpoints/step_6"));
  CHECK_FALSE(fs::exists(out + "/checkpoints/latest"));
  CHECK_FALSE(fs::exists(out + "/gates.csv"));
  for (const std::string& name : others) CHECK(read_text(out + "/" + name) == "precious");

  // If someone has added a file to a checkpoint's folder, neither --overwrite nor train.keep_last removes it.
  run(out, 1, kEachSaves + "--overwrite --set train.steps=4");
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

TEST_CASE("own files: a resume in a folder without env.json replaces nothing of other programs", "[train]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, kEachSaves + "--set train.steps=2 --set train.eval_every=2");
  const std::string resume = "--set train.steps=3 --resume latest";
  fs::remove(out + "/env.json");
  for (const std::string& name : kNames) {
    INFO(name);
    const std::string copy = folder.file("copy"), path = copy + "/" + name;
    fs::copy(out, copy, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
    fs::remove(path);
    put(path, kForeign);
    const auto before = contents(copy);
    const Outcome outcome = run_program(train_args(copy, resume));
    INFO(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.output, path));
    CHECK(contents(copy) == before);
    fs::remove_all(copy);
  }
  // A resume accepts a run's own files without env.json too, by their content, also as earlier versions wrote them.
  const std::map<std::string, std::string> earlier = {
      {"opt_state_mb.txt", "1.25\n\nAdamW's moments of 163840 parameters, MiB\n  exp_avg           0.62 f32\n"},
      {"ddp_buckets.txt", "1 bucket, 2 collectives a step on 2 ranks\nbucket,elements,mib,dtype\n"},
      {".anomaly_type", "loss_plateau\nthe loss is on a plateau\n"},
      {"ranks/rank_1_collectives.csv", "# rank 1: why\nnumber,what,bytes,began_s,finished_s\n"},
      {"mem_boot_rank1.txt", "memory summary (step 1)\n"}};
  for (const auto& [name, text] : earlier) put(out + "/" + name, text);
  run(out, 1, resume);
  fs::remove_all(out + "/checkpoints/step_3");
  put(out + "/env.json", R"({"build": "b", "kernel": "k", "cpu": "c", "device": "cpu", "environment": {}})");
  run(out, 1, resume);
}

TEST_CASE("own files: --overwrite removes links that a resume has moved aside, not what they lead to", "[train]") {
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 1, kEachSaves + "--set train.steps=6"),
                    archive = folder.file("archive");
  const std::string checkpoints = out + "/checkpoints";
  fs::create_directory(archive);
  fs::rename(checkpoints + "/step_6", archive + "/step_6");
  fs::create_directory_symlink("../../archive/step_6", checkpoints + "/step_6");
  const auto archived = contents(archive);
  run(out, 1, kEachSaves + "--set train.steps=4 --overwrite --resume " + checkpoints + "/step_2");
  CHECK(fs::is_symlink(checkpoints + "/set_aside_0/step_6"));
  run(out, 1, "--set train.steps=1 --overwrite");
  CHECK_FALSE(fs::exists(checkpoints + "/set_aside_0"));
  CHECK(contents(archive) == archived);
  // The user puts a link into set_aside_0. It is not a checkpoint that a resume moved there, so a new run is refused.
  run(out, 1, kEachSaves + "--set train.steps=4 --overwrite");
  run(out, 1, kEachSaves + "--set train.steps=3 --overwrite --resume " + checkpoints + "/step_2");
  fs::create_directory_symlink(archive, checkpoints + "/set_aside_0/mine");
  const Outcome refused = run_program(train_args(out, "--overwrite --set train.steps=2"));
  INFO(refused.output);
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, "set_aside_0/mine: this is in the way"));
}

TEST_CASE("own files: what links and mounts in checkpoints lead to is never removed", "[train]") {
  const TemporaryFolder folder;
  const std::string archive = folder.file("archive"), checkpoints = folder.file("run/checkpoints");
  const std::string out = run(folder.file("run"), 1, kEachSaves + "--set train.steps=12");
  fs::create_directory(archive);
  for (const char* name : {"/step_2", "/step_4", "/step_8"}) {
    fs::rename(checkpoints + name, archive + name);
    fs::create_directory_symlink("../../archive" + std::string(name), checkpoints + name);
  }
  const auto archived = contents(archive);
  // A resume from step_4, a link, is one from this run's own older checkpoint: without --overwrite it is refused, and
  // with it the newer checkpoints are set aside, links too.
  const Outcome refused = run_program(train_args(out, kEachSaves + "--resume " + checkpoints + "/step_4"));
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, "is not the newest checkpoint of " + out));
  const Outcome back =
      run_program(train_args(out, kEachSaves + "--set train.steps=6 --overwrite --resume " + checkpoints + "/step_4"));
  INFO(back.output);
  CHECK(back.exit_code == 0);
  CHECK(has(back.output, "moved what was newer to " + checkpoints + "/set_aside_0"));
  for (const char* name : {"/step_6", "/step_8", "/step_10", "/step_12"})
    CHECK(is_checkpoint(checkpoints + "/set_aside_0" + name));
  CHECK(contents(archive) == archived);
  // train.keep_last = 1 removes nothing in the archive. A new run with --overwrite is refused because of the links.
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
  const std::string out = run(folder.file("run"), 1, kEachSaves + "--set train.steps=8");
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
  // `other` is the run's folder, mounted a second time: a resume by that path is a resume of the same run.
  const size_t states = count_states(folder.path());
  const Outcome back = run_command(mounted + train_args(out, kEachSaves + "--overwrite --set train.steps=11 ") +
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
    const std::string out = run(folder.file(busy ? "busy" : "locked"), 1, kEachSaves + "--set train.steps=4");
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

TEST_CASE("own files: a checkpoint that is a link belongs to the run whose path names it", "[train]") {
  const TemporaryFolder folder;
  const std::string first = run(folder.file("first"), 1, kEachSaves + "--set train.steps=4"),
                    copy = folder.file("copy");
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
