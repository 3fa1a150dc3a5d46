// Training on packed rows: a packed row's loss and gradient equal its documents' alone, ranks and resumes agree, and a
// run that began before data.documents existed continues unchanged.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <span>

#include "io/data/shards.h"
#include "io/file.h"
#include "io/json_config.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/inference.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

using Tokens = std::vector<int32_t>;

// One micro-step of configs/tiny.json's model from fixed weights.
struct OneStep {
  OneStep(int64_t rows, int64_t T, int64_t most_documents)
      : config(load_config(kTiny, {fmt::format("train.seq_len={}", T), fmt::format("train.micro_batch_size={}", rows)})
                   .config),
        runtime(allocate_planned(config, Device::cpu(), nullptr, most_documents)),
        step(*runtime, config, nullptr, most_documents) {
    step.model().params().init(runtime->ctx(), 7);
  }
  // Returns the loss times the target count.
  double run(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t n_targets,
             std::span<const int32_t> bounds = {}) {
    step.begin();
    step.micro_step(tokens, targets, n_targets, bounds);
    const Params& params = step.model().params();
    grads.clear();
    for (int64_t i = 0; i < params.count(); ++i)
      grads.push_back(read_floats(runtime->ctx(), params.part(params.grads(), i)));
    step.update(0, n_targets);
    return step.result().loss * static_cast<double>(n_targets);
  }
  Config config;
  std::unique_ptr<Runtime> runtime;
  TrainStep step;
  std::vector<std::vector<double>> grads;  // gradients by parameter
};

// JSONL with short documents, written as shards by `triad data`; returns the folder.
std::string make_shards(const TemporaryFolder& folder, const std::string& position = "first") {
  std::string text;
  for (int i = 0; i < 400; ++i)
    text += fmt::format("{{\"text\":\"{}\"}}\n", std::string(1 + i * i % 60, static_cast<char>('a' + i % 26)));
  write_text(folder.file("a.jsonl"), text);
  const std::string out = folder.file("shards_" + position);
  if (fs::exists(out)) return out;
  const Outcome outcome = run_program("data --input " + folder.file("a.jsonl") + " --val-fraction 0.1 --out " + out);
  REQUIRE(outcome.exit_code == 0);
  Json manifest = parse_json(read_file(out + "/manifest.json"), "manifest");
  manifest["eot_position"] = position;
  write_text(out + "/manifest.json", manifest.dump());
  return out;
}

std::string within(const std::string& shards) {
  return "--set data.kind=shards --set data.paths=" + shards +
         " --set data.documents=attend_within --set train.eval_every=10 --set train.eval_batches=3 ";
}

}  // namespace

TEST_CASE("documents: a packed row's loss and gradient are the sums over its documents alone", "[train]") {
  constexpr int64_t B = 2, T = 48;
  const Tokens bounds = {0, 1, 2, 20, 21, 48, 53, 86, 87, 96};
  Tokens tokens, targets;
  for (int32_t i = 0; i < B * T; ++i) {
    tokens.push_back((i * i + 3 * i) % 256);
    targets.push_back(i % 5 == 4 ? -1 : (7 * i + 1) % 256);
  }
  const int64_t n = B * T - std::count(targets.begin(), targets.end(), -1);
  OneStep packed(B, T, 6);
  const double loss = packed.run(tokens, targets, n, bounds);
  double sum = 0;
  std::vector<std::vector<double>> grads;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    const auto begin = static_cast<size_t>(bounds[i]), length = static_cast<size_t>(bounds[i + 1]) - begin;
    OneStep alone(1, static_cast<int64_t>(length), 0);
    sum += alone.run(std::span(tokens).subspan(begin, length), std::span(targets).subspan(begin, length), n);
    if (grads.empty()) grads.resize(alone.grads.size());
    for (size_t p = 0; p < grads.size(); ++p) {
      grads[p].resize(alone.grads[p].size());
      for (size_t j = 0; j < grads[p].size(); ++j) grads[p][j] += alone.grads[p][j];
    }
  }
  CHECK(loss == Approx(sum).epsilon(1e-6));
  for (size_t p = 0; p < grads.size(); ++p) {
    double error = 0, size = 0;
    for (size_t j = 0; j < grads[p].size(); ++j) {
      error += std::pow(packed.grads[p][j] - grads[p][j], 2);
      size += std::pow(grads[p][j], 2);
    }
    INFO("parameter " << p);
    CHECK(std::sqrt(error) <= 1e-5 * std::sqrt(size) + 1e-12);
  }
  check_error([&] { packed.run(tokens, targets, n, Tokens{0, 48, 40, 96}); }, {"row 1", "ascend"});
  check_error([&] { packed.run(tokens, targets, n); }, {"row 0"});
}

TEST_CASE("documents: runs on 1 and 2 ranks, in 1 and 4 micro-steps, have the same losses and weights", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  for (const char* position : {"first", "last", "packed"}) {
    const bool packed = std::string(position) == "packed";
    const std::string more =
        within(make_shards(folder, packed ? "first" : position)) + (packed ? "--set data.packing=best_fit " : "");
    const std::string one = run(folder.file(std::string("1") + position), 1, more);
    const std::string two = run(folder.file(std::string("2") + position), 2, more);
    const Difference d = difference(one + kWeights, two + kWeights);
    CHECK(d.all < 1e-6);
    CHECK(d.worst < 1e-4);
    const auto losses = column(one + "/training.csv", "loss");
    for (const auto& [step, loss] : column(two + "/training.csv", "loss")) CHECK(loss == Approx(losses.at(step)));
    CHECK(column(one + "/val.csv", "val_loss").at(20) == Approx(column(two + "/val.csv", "val_loss").at(20)));
    // Eight rows in one micro-step: the mean over the step's targets is the same.
    const Outcome wide =
        run_program(train_args(folder.file(std::string("wide") + position), more + "--set train.micro_batch_size=8"));
    REQUIRE(wide.exit_code == 0);
    CHECK(difference(one + kWeights, folder.file(std::string("wide") + position) + kWeights).all < 1e-6);
  }
}

TEST_CASE("documents: a resume ends in the same bits; one from before data.documents attends across", "[train]") {
  const TemporaryFolder folder;
  const std::string shards = make_shards(folder, "last");
  const std::string more = within(shards) + "--set data.packing=best_fit --set train.save_every=7 ";
  const std::string whole = run(folder.file("whole"), 1, more);
  CHECK(parse_json(read_file(whole + "/config.json"), "config")["data"]["documents"] == "attend_within");
  const std::string again = run(folder.file("again"), 1, more + "--resume " + whole + "/checkpoints/step_7");
  CHECK(same_file(whole + kWeights, again + kWeights));
  const Outcome changed = run_program(train_args(
      folder.file("changed"), "--set train.accumulate_grad_batches=4 " + more +
                                  "--set data.documents=attend_across --resume " + whole + "/checkpoints/step_7"));
  CHECK(changed.exit_code != 0);
  CHECK(has(changed.output, "data.documents"));

  const std::string unset = "--set data.kind=shards --set data.paths=" + shards + " --set train.save_every=7 ";
  const std::string plain = run(folder.file("plain"), 1, unset + "--set data.documents=attend_across ");
  CHECK(parse_json(read_file(plain + "/config.json"), "config")["data"]["documents"] == "attend_across");
  CHECK(!same_file(whole + kWeights, plain + kWeights));
  const std::string state_path = plain + "/checkpoints/step_7/state.json";
  Json state = parse_json(read_file(state_path), "state");
  state["config"]["data"].erase("documents");
  state["config"]["data"].erase("max_documents");
  write_text(state_path, state.dump());
  const std::string resume = "--resume " + plain + "/checkpoints/step_7 ";
  const std::string later = run(folder.file("later"), 1, unset + resume);
  CHECK(same_file(plain + kWeights, later + kWeights));
  const Outcome within_now =
      run_program(train_args(folder.file("now"), "--set train.accumulate_grad_batches=4 " + unset + resume +
                                                     "--set data.documents=attend_within"));
  CHECK(within_now.exit_code == 1);
  CHECK(has(within_now.output, "data.documents"));
}

TEST_CASE("documents: ranks with other masks, documents or separators of the same tokens do not start",
          "[dist][waits]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const auto repeat = [](const std::string& text) {
    std::string all;
    for (int i = 0; i < 200; ++i) all += text;
    return all;
  };
  const auto answer = [](const char* prompt, const char* completion) {
    return Json{{"prompt", prompt}, {"completion", completion}}.dump() + "\n";
  };
  const auto text = [](const char* content) { return Json{{"text", content}}.dump() + "\n"; };
  for (const int rank : {0, 1}) {  // each rank has its own working directory
    const std::string here = folder.file(std::to_string(rank));
    fs::create_directory(here);
    const auto write = [&](const char* name, const std::string& zero, const std::string& one) {
      write_text(here + "/" + name, repeat(rank == 0 ? zero : one));
    };
    write("same.jsonl", answer("ab", "cd"), answer("ab", "cd"));
    write("learned.jsonl", answer("ab", "cd"), answer("abc", "d"));
    write("mask.jsonl", answer("ab", "cdef") + answer("abcd", "ef"), answer("abcd", "ef") + answer("ab", "cdef"));
    write("count.jsonl", text("abcd"), text("a") + text("bc"));
    write("begins.jsonl", text("abc") + text("d"), text("ab") + text("cd"));
    const Outcome shards =
        run_program("data --val-fraction 0 --input " + here + "/same.jsonl --out " + here + "/shards");
    REQUIRE(shards.exit_code == 0);
    Json manifest = parse_json(read_file(here + "/shards/manifest.json"), "manifest");
    fs::copy(here + "/shards", here + "/other_eot");
    Json other = manifest;
    if (rank == 1) manifest["eot_position"] = "last", other["eot"] = 'a';
    write_text(here + "/shards/manifest.json", manifest.dump());
    write_text(here + "/other_eot/manifest.json", other.dump());
  }
  const auto refused = [&](const std::string& keys, const std::string& words) {
    const Outcome outcome =
        run_command(mpirun(2) + "sh -c 'cd " + folder.path() + "/$OMPI_COMM_WORLD_RANK; exec " + TRIAD_PROGRAM + " " +
                    train_args(folder.file("run"), "--set train.steps=1 --set data.val_fraction=0 " + keys) + "'");
    INFO(outcome.output);
    CHECK(outcome.exit_code != 0);
    CHECK(has(outcome.output, words));
    CHECK(!fs::exists(folder.file("run") + "/training.csv"));
  };
  const std::string text_data = "--set data.kind=text --set data.paths=";
  refused(text_data + "learned.jsonl", "the learned tokens to train on are");
  refused(text_data + "same.jsonl --set data.val_paths=learned.jsonl", "the learned tokens to evaluate on are");
  refused(text_data + "mask.jsonl", "the checksum of the loss mask to train with is");
  refused(text_data + "count.jsonl", "the documents to train on are");
  refused(text_data + "begins.jsonl", "the beginnings of the documents to train on have checksum");
  const std::string shard_data = "--set data.kind=shards --set data.documents=attend_across --set data.paths=";
  refused(shard_data + "shards", "the place of the separator (0: first, 1: last) in the documents to train on is");
  refused(shard_data + "other_eot", "the separator (-1: unknown) of the documents to train on is token");
}

TEST_CASE("documents: a resume refuses data that changed, and JSONL that the run read as plain text", "[train]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("a.jsonl"), from = folder.file("run/checkpoints/step_1");
  const auto write = [&](int documents, const char* prompt, const char* completion) {
    std::string text;
    for (int i = 0; i < documents; ++i) text += Json{{"prompt", prompt}, {"completion", completion}}.dump() + "\n";
    write_text(path, text);
  };
  const std::string keys =
      "--set train.save_every=1 --set data.kind=text --set data.val_fraction=0.1 --set data.paths=" + path + " ";
  const auto resume = [&](const std::string& name) {
    return run_program(train_args(folder.file(name), keys + "--set train.steps=2 --resume " + from));
  };
  const auto refused = [&](const std::vector<std::string>& words) {
    const Outcome outcome = resume("refused");
    INFO(outcome.output);
    CHECK(outcome.exit_code == 1);
    for (const std::string& part : words) {
      INFO(part);
      CHECK(has(outcome.output, part));
    }
    CHECK(!fs::exists(folder.file("refused") + "/training.csv"));
  };
  write(200, "ab", "cd");
  REQUIRE(run_program(train_args(folder.file("run"), keys + "--set train.steps=1 ")).exit_code == 0);
  const std::string state_path = from + "/state.json";
  const Json written = parse_json(read_file(state_path), "state");
  Json state = written;
  const auto tokens = state["data"]["train"]["tokens"].get<int64_t>();
  CHECK(state["data"]["train"]["documents"] == tokens / 5);
  CHECK(state["data"]["train"]["documents"].get<int64_t>() + state["data"]["val"]["documents"].get<int64_t>() == 200);
  CHECK(state["data"]["train"]["learned"].get<int64_t>() < tokens);
  CHECK(resume("same").exit_code == 0);

  write(300, "ab", "cd");
  refused({state_path, fmt::format("its data.train.tokens is {}, but", tokens), path, "now"});
  write(200, "abc", "d");
  refused({state_path, "its data.train.learned is", path});
  write(200, "ab", "cd");
  state["data"]["val"]["documents"] = 77;
  write_text(state_path, state.dump());
  refused({state_path, "its data.val.documents is 77, but", path});
  state.erase("data");  // earlier versions' checkpoints lack it
  write_text(state_path, state.dump());
  CHECK(resume("earlier").exit_code == 0);
  state["config"]["data"].erase("documents");  // absent before data.documents existed
  write_text(state_path, state.dump());
  refused({state_path, "before data.documents", path, "plain text"});
}

TEST_CASE("documents: attention stays within them where all are known, unless the config says otherwise", "[train]") {
  const TemporaryFolder folder;
  const std::string shards = make_shards(folder), bare = folder.file("bare.bin");
  const std::string bare_val = folder.file("bare_val.bin");
  fs::copy_file(shards + "/train_000000.bin", bare);
  fs::copy_file(shards + "/val_000000.bin", bare_val);
  write_text(folder.file("a.txt"), std::string(500, 'x'));
  const std::string shard_data = "data.kind=shards --set data.paths=" + shards;
  const std::string val = " --set data.val_paths=";
  int number = 0;
  for (const auto& [data, expected] : {std::pair<std::string, std::string>{shard_data, "attend_within"},
                                       {shard_data + val + shards + "/val_000000.bin", "attend_within"},
                                       {shard_data + val + bare_val, "attend_across"},
                                       {"data.kind=shards --set data.paths=" + bare, "attend_across"},
                                       {"data.kind=text --set data.paths=" + folder.file("a.txt"), "attend_within"},
                                       {"data.kind=synthetic", "attend_across"},
                                       {shard_data + " --set data.documents=attend_across", "attend_across"}}) {
    const std::string out = folder.file("run" + std::to_string(number++));
    const Outcome outcome = run_program(train_args(out, "--set train.steps=1 --set " + data));
    INFO(data << "\n" << outcome.output);
    REQUIRE(outcome.exit_code == 0);
    CHECK(parse_json(read_file(out + "/config.json"), "config")["data"]["documents"] == expected);
  }
  // `triad init` does not open the data: its checkpoint is evaluated as the data allows.
  REQUIRE(run_program("init " + kTiny + " --out " + folder.file("init")).exit_code == 0);
  const auto loss = [&](const std::string& checkpoint, const std::string& data) {
    const Outcome outcome = run_program("eval --device cpu --json --checkpoint " + checkpoint + " --data " + data);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return parse_json(outcome.standard_output.substr(outcome.standard_output.find('{')), "eval")["loss"].get<double>();
  };
  const std::string file = shards + "/train_000000.bin", path = folder.file("init/state.json");
  const double by_data = loss(folder.file("init"), file), unknown = loss(folder.file("init"), bare);
  Json state = parse_json(read_file(path), "state");
  CHECK(state["config"]["data"]["documents"] == "");
  const auto with = [&](const char* word) {
    state["config"]["data"]["documents"] = word;
    write_text(path, state.dump());
    return loss(folder.file("init"), file);
  };
  CHECK(with("attend_within") == by_data);
  CHECK(with("attend_across") == unknown);
  CHECK(by_data != unknown);
}

TEST_CASE("documents: a plan includes the tables of the most documents that a row may have", "[train]") {
  const TemporaryFolder folder;
  const std::string shards = make_shards(folder);
  const auto peak = [&](const std::string& more) {
    const Outcome plan = run_program("plan " + kTiny + " --json --set runtime.device=cpu " + within(shards) + more);
    INFO(plan.output);
    REQUIRE(plan.exit_code == 0);
    return parse_json(plan.standard_output, "plan")["peak_bytes"].get<int64_t>();
  };
  const int64_t across = peak("--set data.documents=attend_across");
  const int64_t by_data = peak(""), many = peak("--set data.max_documents=4096");
  CHECK(across < by_data);
  CHECK(peak("--set data.documents=") == by_data);
  CHECK(by_data < many);
  const Config config = load_config(kTiny, {}).config;
  CHECK(plan_memory(config, Device::cpu(), nullptr, 4096).peak_bytes() == many);
}

TEST_CASE("documents: evaluation by document agrees with each document alone, and a run reports its documents",
          "[train]") {
  const TemporaryFolder folder;
  const std::string shards = make_shards(folder);
  const std::string run_folder = run(folder.file("run"), 1, within(shards) + "--set train.steps=3 ");
  for (const Json& stats : {heartbeats(run_folder, 0, "boot").at(0)["documents"],
                            parse_json(read_file(run_folder + "/metrics.json"), "metrics")["documents"]}) {
    CHECK(stats["documents"].get<int64_t>() > 300);
    CHECK(stats["documents_per_row"].get<double>() > 1);
    CHECK(stats["cut_share"].get<double>() > 0.1);
    CHECK(stats["padded_share"] == 0.0);
  }
  CHECK(has(read_text(run_folder + "/ranks/rank_0.log"), "stays within them; stream: "));
  const auto eval = [&](const std::string& files) {
    const Outcome outcome =
        run_program("eval --device cpu --json --batch 3 --checkpoint " + run_folder + " --data " + files);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return parse_json(outcome.standard_output.substr(outcome.standard_output.find('{')), "eval");
  };
  // Texts up to a row long, alone, and packed together (the next text's separator is one more target).
  double sum = 0, mean_sum = 0;
  int64_t positions = 0;
  for (int i = 0; i < 4; ++i) {
    const std::string file = folder.file(fmt::format("text{}.txt", i));
    write_text(file, std::string(static_cast<size_t>(5 + 11 * i), static_cast<char>('a' + i)) + "xyz");
    const Json alone = eval(file);
    CHECK(alone["by_document"]["documents"] == 1);
    CHECK(alone["by_document"]["mean_loss"].get<double>() == Approx(alone["loss"].get<double>()));
    sum += alone["loss"].get<double>() * alone["positions"].get<double>();
    mean_sum += alone["loss"].get<double>() / 4;
    positions += alone["positions"].get<int64_t>();
  }
  const Json together = eval("'" + folder.file("text*.txt") + "' --seq 200");
  CHECK(together["positions"].get<int64_t>() == positions + 3);
  CHECK(together["by_document"]["documents"] == 4);
  const Json& range = together["by_document"]["by_position"].at(0);
  CHECK(range["from"] == 0);
  CHECK(range["to"] == 2048);
  CHECK(range["positions"] == together["positions"]);
  CHECK(range["loss"].get<double>() == Approx(together["loss"].get<double>()));
  // Three more targets: losses at separators after a text, about ln 256 after three steps.
  const double more = together["loss"].get<double>() * static_cast<double>(positions + 3) - sum;
  CHECK(more / 3 == Approx(std::log(256)).epsilon(0.3));
  CHECK(together["by_document"]["mean_loss"].get<double>() == Approx(mean_sum).epsilon(0.1));
  const Outcome unknown = run_program("eval --device cpu --checkpoint " + run_folder + " --data " + [&] {
    fs::create_directories(folder.file("bare"));
    fs::copy_file(shards + "/train_000000.bin", folder.file("bare/a.bin"));
    return folder.file("bare/a.bin");
  }());
  CHECK(unknown.exit_code == 1);
  CHECK(has(unknown.output, "attend_within"));
}
