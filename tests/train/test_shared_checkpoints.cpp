// Checkpoints to which every rank writes a file (dist.zero), in whole runs started through mpirun: who reads them, and
// what is left when a rank fails during a save.
#include <fmt/format.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <set>
#include <thread>

#include "io/checkpoint.h"
#include "io/data/shards.h"
#include "io/json_config.h"
#include "io/weight_index.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kZero = "--set dist.zero=1 ", kSaves = "--set train.save_every=10 ";
const std::string kWide = "--set model.dim=128 ";  // both ranks have a part of every large tensor

std::set<std::string> files_in(const std::string& folder) {
  std::set<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder))
    names.insert(entry.path().filename().string());
  return names;
}

// Files in a checkpoint that this many ranks have written.
std::set<std::string> files_of(int ranks) {
  std::set<std::string> names = {"state.json"};
  for (const char* stem : {kWeightsStem, kMomentsStem}) {
    names.insert(index_file_name(stem));
    for (int r = 0; r < ranks; ++r) names.insert(part_file_name(stem, r, ranks));
  }
  return names;
}

bool has_temporary(const std::string& folder) {
  for (const std::string& name : files_in(folder))
    if (name.find(".tmp.") != std::string::npos) return true;
  return false;
}

// A shell prefix that starts one rank (of two) as torchrun would, with its own faults.
std::string as_rank(int rank, const std::string& faults) {
  return as_torchrun_would(rank) + with_faults(faults) + "exec timeout -s KILL 200 ";
}

Outcome train_ranks(int ranks, const std::string& out, const std::string& more, const std::string& before = "") {
  return run_command(before + mpirun(ranks) + TRIAD_PROGRAM " " + train_args(out, kZero + more));
}

}  // namespace

TEST_CASE("shared: each rank writes a file of whole tensors, which every verb reads", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string whole = run(folder.file("whole"), 4, kSaves),
                    shared = run(folder.file("shared"), 4, kSaves + kZero);
  const std::string step = shared + "/checkpoints/step_10";
  CHECK(files_in(step) == files_of(4));
  CHECK(files_in(whole + "/checkpoints/step_10") ==
        std::set<std::string>{"model.safetensors", "optimizer.safetensors", "state.json"});
  CHECK(same_file(whole + kWeights, shared + kWeights));  // final weights are whole
  for (const char* stem : {kWeightsStem, kMomentsStem}) {
    const WeightIndex index(tensors_path(step, stem));
    CHECK(index.files().size() == 4);
    const Json json = parse_json(read_text(index.path()), index.path());
    CHECK(json["metadata"]["total_size"] == index.bytes());
  }
  const auto output = [](const std::string& args) {
    const Outcome outcome = run_program(args);
    INFO(args << "\n" << outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return outcome.standard_output;
  };
  const std::string cpu = " --device cpu ", from_whole = whole + "/checkpoints/step_10";
  const std::string generate = "generate --prompt ab --tokens 8 --temperature 0" + cpu + "--checkpoint ";
  CHECK(output(generate + step) == output(generate + from_whole));
  CHECK(output(generate + tensors_path(step)) == output(generate + from_whole));
  write_text(folder.file("text"), std::string(4000, 'x'));
  const std::string eval = "eval --data " + folder.file("text") + cpu + "--checkpoint ";
  CHECK(output(eval + step) == output(eval + from_whole));
  CHECK(has(output("inspect " + step), "model.safetensors.index.json: "));
  CHECK(has(output("inspect " + tensors_path(step, kMomentsStem)), "optimizer-00004-of-00004.safetensors"));
  // `export --format triad` writes one whole file, whose bytes do not depend on the files before.
  output("export " + step + " --format triad --out " + folder.file("exported"));
  CHECK(same_file(folder.file("exported") + kWeights, from_whole + kWeights));
  output("export " + step + " --out " + folder.file("hf"));
  output("export " + from_whole + " --out " + folder.file("hf_whole"));
  CHECK(same_file(folder.file("hf") + kWeights, folder.file("hf_whole") + kWeights));
  // Another run begins with the weights.
  run(folder.file("next"), 1, "--set train.steps=1 --set train.init_from=" + step);
  const Outcome init = run_program("init " + kTiny + " --out " + step);
  CHECK(init.exit_code == 1);
  CHECK(has(init.output, "optimizer.safetensors.index.json"));
}

TEST_CASE("shared: a checkpoint of any arrangement of ranks resumes in any other", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const Arrangement all[] = {{1, ""},
                             {2, "--set dist.zero=1 --set dist.bucket_mb=0.02 "},
                             {4, "--set dist.zero=2 --set dist.replicas=2 "},
                             {4, "--set dist.zero=3 "}};
  const std::string kTen = "--set train.eps=1e-4 --set train.steps=10 ";
  const std::string first = run(folder.file("first"), 1, kTen + kSaves);
  std::string from = first + "/checkpoints/step_10";
  const auto expected_weights = tensors(tensors_path(from)),
             expected_moments = tensors(tensors_path(from, kMomentsStem));
  int number = 0;
  // Each arrangement resumes from each other's checkpoint.
  for (const int i : {1, 0, 3, 1, 2, 3, 0, 2, 1, 3}) {
    const std::string to = folder.file("run" + std::to_string(number++));
    run(to, all[i].ranks, all[i].keys + kSaves + kTen + "--resume " + from);
    from = to + "/checkpoints/step_10";
    INFO(all[i].ranks << " ranks " << all[i].keys);
    CHECK(tensors(tensors_path(from)) == expected_weights);
    CHECK(tensors(tensors_path(from, kMomentsStem)) == expected_moments);
    CHECK(fs::exists(from + "/model.safetensors") == (std::string(all[i].keys).empty()));
  }
  // Each goes on as one rank does.
  std::map<int, double> first_losses;
  for (const auto& [ranks, more] : all) {
    const std::string to = folder.file("further" + std::to_string(number++));
    run(to, ranks, more + kTen + "--set train.steps=14 --set log.every=1 --resume " + from);
    const std::map<int, double> losses = column(to + "/training.csv", "loss");
    if (first_losses.empty()) first_losses = losses;
    INFO(ranks << " ranks " << more);
    CHECK(losses.size() == 4);
    for (const auto& [step, loss] : losses) CHECK(loss == Approx(first_losses.at(step)).epsilon(1e-6));
  }
}

TEST_CASE("shared: keep_last and keep_every count checkpoints of several files, and later ones are set aside",
          "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), more = kZero + "--set train.save_every=2 --set train.steps=12 ";
  run(out, 2, more + "--set train.keep_last=2 --set train.keep_every=6 ");
  CHECK(files_in(out + "/checkpoints") == std::set<std::string>{"step_6", "step_10", "step_12", "latest"});
  for (const char* step : {"step_6", "step_10", "step_12"})
    CHECK(files_in(out + "/checkpoints/" + step) == files_of(2));
  run(out, 2, more + "--overwrite --resume " + out + "/checkpoints/step_10");
  CHECK(files_in(out + "/checkpoints/set_aside_0/step_12") == files_of(2));
  CHECK(fs::exists(out + "/checkpoints/set_aside_0/model.safetensors"));
}

TEST_CASE("shared: files that are missing, cut or damaged are named, on every number of ranks", "[dist][waits]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = run(folder.file("run"), 2, kSaves + kZero + kWide + "--set train.steps=10 ");
  const std::string step = out + "/checkpoints/step_10", second = "optimizer-00002-of-00002.safetensors";
  const auto refused = [&](const std::vector<std::string>& words) {
    for (const int ranks : {1, 2}) {
      const std::string into = folder.file("into");
      const Outcome outcome = train_ranks(ranks, into, kWide + "--set train.steps=12 --resume " + step);
      INFO(outcome.output);
      CHECK(outcome.exit_code == 1);
      for (const std::string& word : words) CHECK(has(outcome.output, word));
      CHECK_FALSE(fs::exists(into + "/training.csv"));
    }
  };
  const std::string bytes = read_text(step + "/" + second);
  fs::remove(step + "/" + second);
  refused({second, "missing"});
  write_text(step + "/" + second, bytes.substr(0, bytes.size() / 2));
  refused({second, "truncated"});
  write_text(step + "/" + second, bytes);
  // One bit in a tensor whose halves are read by two ranks.
  const WeightIndex index(tensors_path(step, kMomentsStem));
  for (const std::string name : {"exp_avg/embed.weight", "exp_avg_sq/embed.weight"}) {
    const std::string path = index.file_of(name).path(), whole = read_text(path);
    std::string damaged = whole;
    damaged[static_cast<size_t>(index.at(name).begin) + 5] ^= 8;
    write_text(path, damaged);
    refused({path, name, "CRC-32"});
    write_text(path, whole);
  }
  Json map = parse_json(read_text(index.path()), index.path());
  map["weight_map"]["exp_avg/embed.weight"] = "../" + second;
  write_text(index.path(), map.dump());
  refused({"optimizer.safetensors.index.json", "exp_avg/embed.weight", "without a path"});
}

TEST_CASE("shared: files of two saves in one checkpoint are refused by name, and files that tell nothing are not",
          "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string more = "--set train.save_every=2 --set train.steps=4 ";
  const std::string several = run(folder.file("several"), 2, more + kZero), whole = run(folder.file("whole"), 1, more);
  const std::string into = folder.file("into"), mixed = folder.file("mixed");
  const auto resume = [&] {
    fs::remove_all(into);
    return run_program(train_args(into, "--set train.accumulate_grad_batches=4 --set train.steps=5 --resume " + mixed));
  };
  // A run's step 4 with a file from step 2.
  const auto mix = [&](const std::string& run, const std::string& file) {
    fs::remove_all(mixed);
    fs::copy(run + "/checkpoints/step_4", mixed);
    fs::copy(run + "/checkpoints/step_2/" + file, mixed + "/" + file, fs::copy_options::overwrite_existing);
  };
  const auto refused = [&](const Outcome& outcome, const std::string& file) {
    INFO(file << "\n" << outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(has(outcome.output, mixed + ": it holds files of several saves: "));
    CHECK(has(outcome.output, file));
    CHECK_FALSE(fs::exists(into + "/training.csv"));
  };
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json"}) {
    mix(whole, file);
    refused(resume(), file);
  }
  for (const char* file : {"model-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors", "state.json"}) {
    mix(several, file);
    refused(resume(), file);
  }
  // The other verbs refuse half a model, too.
  mix(several, "model-00002-of-00002.safetensors");
  refused(run_program("generate --prompt ab --tokens 1 --device cpu --checkpoint " + mixed),
          "model-00002-of-00002.safetensors");
  // A whole file that hides the index's files.
  fs::remove_all(mixed);
  fs::copy(several + "/checkpoints/step_4", mixed);
  fs::copy(whole + "/checkpoints/step_2/model.safetensors", mixed);
  refused(resume(), "model.safetensors");
  // Checkpoints from before state.json had checksums, and weights that another program has written, without any.
  mix(whole, "model.safetensors");
  Json state = parse_json(read_text(mixed + "/state.json"), "state.json");
  CHECK(state["files"].size() == 2);
  state.erase("files");
  write_text(mixed + "/state.json", state.dump());
  CHECK(resume().exit_code == 0);
  mix(whole, "model.safetensors");
  std::string bytes = read_text(mixed + kWeights);
  for (size_t at; (at = bytes.find("crc32/")) != std::string::npos;) bytes.replace(at, 6, "other/");
  write_text(mixed + kWeights, bytes);
  CHECK(resume().exit_code == 0);
}

TEST_CASE("shared: a full disk on one rank ends the run, and leaves the older checkpoints", "[dist][waits]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  for (const char* file :
       {"model-00001", "model-00002", "optimizer-00002", "optimizer.safetensors.index", "state.json"}) {
    INFO(file);
    const std::string out = folder.file(file);
    const Outcome outcome =
        train_ranks(2, out, "--set train.steps=1000000 --set train.allow_unsafe=true --set train.save_every=4 ",
                    with_faults(std::string("TRIAD_FULL_DISK='step_8.tmp ") + file + "'"));
    INFO(outcome.output);
    CHECK(outcome.exit_code != 0);
    CHECK(has(outcome.output, file));
    CHECK(has(outcome.output, "No space left on device"));
    CHECK(files_in(out + "/checkpoints") == std::set<std::string>{"step_0", "step_4", "latest"});
    CHECK(files_in(out + "/checkpoints/step_4") == files_of(2));
    CHECK(fs::read_symlink(out + "/checkpoints/latest") == "step_4");
  }
  // A folder that cannot be made.
  const std::string out = run(folder.file("file"), 2, kZero + "--set train.steps=2 --set train.save_last=false ");
  write_text(out + "/checkpoints", "");
  const Outcome outcome = train_ranks(2, out, "--set train.steps=4 --set train.save_every=2 --overwrite ");
  INFO(outcome.output);
  CHECK(outcome.exit_code != 0);
  CHECK(has(outcome.output, out + "/checkpoints"));
  CHECK(fs::is_regular_file(out + "/checkpoints"));  // not known to be Triad's, so it stays
}

TEST_CASE("shared: a rank that is killed during a save leaves the older checkpoints, and the next run goes on",
          "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string more = "--set train.steps=12 --set train.save_every=4 --set train.accumulate_grad_batches=2 ";
  const std::string whole = folder.file("whole");
  REQUIRE(train_ranks(2, whole, more).exit_code == 0);
  for (const int victim : {0, 1}) {
    const std::string out = folder.file("killed" + std::to_string(victim));
    BackgroundProgram program(train_args(out, kZero + more + "--set dist.timeout_s=20 "),
                              with_faults("TRIAD_SLOW_SYNC='0.4 step_8.tmp'") + mpirun(2));
    bool began = false;
    for (int i = 0; i < 60'000 && !began; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (!fs::exists(out + "/checkpoints/step_4")) continue;
      for (const std::string& name : files_in(out + "/checkpoints")) began = began || name.starts_with("step_8.tmp.");
    }
    REQUIRE(began);
    const std::string beats = out + "/heartbeat_rank" + std::to_string(victim) + ".jsonl";
    kill(parse_json(lines(beats).front(), beats)["pid"].get<int>(), SIGKILL);
    CHECK(program.wait() != 0);
    CHECK_FALSE(fs::exists(out + "/checkpoints/step_8"));
    CHECK(has(resolve_checkpoint(out), "step_4"));
    CHECK(files_in(out + "/checkpoints/step_4") == files_of(2));
    REQUIRE(train_ranks(2, out, more + "--resume latest").exit_code == 0);
    CHECK_FALSE(has_temporary(out + "/checkpoints"));
    CHECK(same_file(whole + kWeights, out + kWeights));
    CHECK(tensors(tensors_path(out + "/checkpoints/step_12", kMomentsStem)) ==
          tensors(tensors_path(whole + "/checkpoints/step_12", kMomentsStem)));
  }
}

TEST_CASE("shared: the first rank waits for the slowest one before it puts a checkpoint in place", "[dist][waits]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log");
  const std::string args = train_args(out, kZero + "--set train.steps=4 --set train.save_every=4 ");
  BackgroundProgram first(args, as_rank(0, "TRIAD_SLOW_SYNC='0 x'"), log),
      other(args, as_rank(1, "TRIAD_SLOW_SYNC='0.5 .tmp.'"));
  CHECK(first.wait() == 0);
  CHECK(other.wait() == 0);
  INFO(read_text(log));
  CHECK(files_in(out + "/checkpoints") == std::set<std::string>{"step_0", "step_4", "latest"});
  for (const char* step : {"step_0", "step_4"}) CHECK(files_in(out + "/checkpoints/" + step) == files_of(2));
}

TEST_CASE("shared: an error of all ranks waits for the pending checkpoint", "[dist][waits]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  const Outcome stopped = train_ranks(2, out, "--set train.save_every=1 --set train.lr=1e30 --set train.grad_clip=0 ",
                                      with_faults("TRIAD_SLOW_SYNC='0.2 step_1.tmp'"));
  INFO(stopped.output);
  CHECK(stopped.exit_code == 1);
  CHECK(has(stopped.output, "triad: rank 0: step 2: "));
  CHECK(files_in(out + "/checkpoints") == std::set<std::string>{"step_0", "step_1", "latest"});
  CHECK(files_in(out + "/checkpoints/step_1") == files_of(2));
  CHECK(run_program("inspect " + out + "/checkpoints/step_1").exit_code == 0);
}

TEST_CASE("shared: the first rank, after an error of its own, completes the pending checkpoint", "[dist]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), log = folder.file("log"), shard = folder.file("part.bin");
  ShardWriter writer(shard, TokenWidth::u16);
  writer.append(std::vector<int32_t>(20'000, 7));
  writer.finish();
  const std::string args =
      train_args(out, kZero + "--set train.steps=1000000 --set train.allow_unsafe=true " +
                          "--set train.save_every=20 --set data.kind=shards --set data.paths=" + shard);
  BackgroundProgram first(args, as_rank(0, "TRIAD_BAD_DISK=" + shard), log),
      other(args, as_rank(1, "TRIAD_SLOW_SYNC='0.7 step_20.tmp'"));
  bool began = false;
  for (int i = 0; i < 60'000 && !began; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!fs::exists(out + "/checkpoints")) continue;
    for (const std::string& name : files_in(out + "/checkpoints")) began = began || name.starts_with("step_20.tmp.");
  }
  REQUIRE(began);
  write_text(shard + ".bad", "");
  CHECK(first.wait() == 1);
  CHECK(other.wait() == 1);
  const std::string text = read_text(log);
  INFO(text);
  CHECK(has(text, "triad: rank 0: " + shard + ": cannot be read at offset "));
  CHECK(files_in(out + "/checkpoints/step_20") == files_of(2));
  fs::remove(shard + ".bad");
  CHECK(run_program("inspect " + out + "/checkpoints/step_20").exit_code == 0);
}

TEST_CASE("shared: with dist.zero 3 the final weights are several files in train.final_dtype, which a new run removes",
          "[dist][waits]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), more = "--set dist.zero=3 --set train.save_every=2 --set train.steps=4 ";
  run(out, 2, more + "--set train.final_dtype=bf16 ");
  const auto weights = [&] {
    std::set<std::string> names;
    for (const std::string& name : files_in(out))
      if (name.find("safetensors") != std::string::npos) names.insert(name);
    return names;
  };
  const std::set<std::string> several = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                                         "model.safetensors.index.json"};
  CHECK(weights() == several);
  const WeightIndex index(out);
  const auto exact = tensors(tensors_path(out + "/checkpoints/step_4"));
  CHECK(index.count() == exact.size());
  index.for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
    CHECK(entry.dtype == "BF16");
    const std::vector<std::byte> bytes = file.read(entry);
    const auto* const values = reinterpret_cast<const bf16*>(bytes.data());
    const std::vector<float>& expected = exact.at(entry.name);
    bool same = true;
    for (size_t i = 0; i < expected.size(); ++i)
      same = same && static_cast<float>(values[i]) == static_cast<float>(bf16(expected[i]));
    CHECK(same);
  });
  // A resume from an older checkpoint moves them away, and a new run removes them.
  run(out, 2, more + "--overwrite --resume " + out + "/checkpoints/step_2");
  for (const std::string& name : several) CHECK(fs::exists(out + "/checkpoints/set_aside_0/" + name));
  CHECK(weights() == several);
  CHECK(has(train_ranks(2, out, "--set train.steps=2 ").output, "holds a checkpoint of an earlier run"));
  fs::remove_all(out + "/checkpoints");
  CHECK(has(train_ranks(2, out, "--set train.steps=2 ").output, "holds the final weights of an earlier run, " + out));
  // --overwrite removes the old weights when the run starts. This run diverges, and so writes none.
  CHECK(train_ranks(2, out, "--overwrite --set train.lr=1e30 --set train.grad_clip=0 ").exit_code == 1);
  CHECK(weights().empty());
}
