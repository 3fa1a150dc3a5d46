// train.lora: what a run with adapters trains and saves, in which arrangements it gives the same bits, how it resumes,
// what its checkpoints are to other verbs, and what is refused. tests/tools/test_lora_peft.py compares it with PEFT.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "io/weight_index.h"
#include "model/lora.h"
#include "tests/support/dist_run.h"
#include "tests/support/huggingface_folder.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace fs = std::filesystem;

namespace {

using Weights = std::map<std::string, std::vector<float>>;

Outcome must(const Outcome& outcome, const std::string& args) {
  INFO("triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return outcome;
}
Outcome run_triad(const std::string& args, int ranks = 1) {
  return must(ranks == 1 ? run_program(args) : run_ranks(ranks, args), args);
}

// Weights to freeze: `triad init` of configs/tiny.json.
std::string make_base(const TemporaryFolder& folder, const std::string& more = "", const std::string& name = "base") {
  run_triad("init " + kTiny + " --out " + folder.file(name) + " " + more);
  return folder.file(name);
}

std::string lora_args(const std::string& out, const std::string& base, const std::string& more = "") {
  return train_args(
      out, "--set train.init_from=" + base +
               " --set train.lora.rank=4 --set train.lora.alpha=8 --set train.steps=6 --set train.lr=0.01 " + more);
}

// The loss of `triad eval` on random tokens.
std::string eval_loss(const std::string& model, const std::string& text) {
  const Json json = parse_json(
      run_triad("eval --device cpu --dtype f32 --json --checkpoint " + model + " --data " + text).standard_output,
      "triad eval");
  return json.at("loss").dump();
}

}  // namespace

TEST_CASE("lora: a run saves what it trains, resumes to the bit, and needs the base that it had", "[lora]") {
  const TemporaryFolder folder;
  const std::string base = make_base(folder), run = folder.file("run"), part = folder.file("part");
  const std::string frozen = read_text(base + kWeights);
  const Outcome whole = run_triad(lora_args(run, base));
  CHECK(has(whole.output, "which stay as they are; trains"));
  CHECK_FALSE(has(whole.output, "anomaly"));  // A's first gradients are 0, because B is
  CHECK(read_text(base + kWeights) == frozen);
  Weights weights = tensors(run + kWeights);
  size_t adapters = 0;
  for (const auto& [name, values] : weights) {
    INFO(name);
    const bool adapter = has(name, ".lora_");
    adapters += adapter;
    CHECK((adapter || has(name, ".gate.")));
    if (has(name, ".lora_B.")) CHECK(std::any_of(values.begin(), values.end(), [](float x) { return x != 0; }));
  }
  CHECK(adapters == 2 * 2 * 10);  // two layers; q, three k and v, out_proj, fc1 and fc2

  run_triad(lora_args(part, base, "--set train.save_every=3"));
  fs::remove_all(part + "/checkpoints/step_6");
  fs::remove(part + kWeights);
  run_triad("train --resume " + part + "/checkpoints/step_3 --set log.out_dir=" + part + " --overwrite");
  CHECK(same_file(run + kWeights, part + kWeights));

  make_base(folder, "--set train.seed=5", "other");
  const Outcome other =
      run_program("train --resume " + part + "/checkpoints/step_3 --overwrite --set log.out_dir=" + part +
                  " --set train.init_from=" + folder.file("other"));
  INFO(other.output);
  CHECK(other.exit_code == 1);
  CHECK(has(other.output, "its adapters were trained on other weights than those of"));
  CHECK(has(other.output, folder.file("other")));
  const Outcome changed =
      run_program("train --resume " + part + "/checkpoints/step_3 --overwrite --set log.out_dir=" + part +
                  " --set train.lora.alpha=9");
  CHECK(changed.exit_code == 1);
  CHECK(has(changed.output, "train.lora is"));
}

TEST_CASE("lora: recomputation, state dtypes and bf16 weights give the bits that they give without", "[lora]") {
  const TemporaryFolder folder;
  const std::string base = make_base(folder);
  const auto weights = [&](const std::string& name, const std::string& more) {
    run_triad(lora_args(folder.file(name), base, more));
    return read_text(folder.file(name) + kWeights);
  };
  const std::string plain = weights("plain", "");
  CHECK(weights("block", "--set runtime.recompute=block") == plain);
  CHECK(weights("mlp", "--set runtime.recompute=0:1=mlp,1:2=attention") == plain);
  const std::string bf16 = weights("bf16", "--set runtime.precision=bf16");
  CHECK(bf16 != plain);
  CHECK(weights("split", "--set runtime.precision=bf16 --set train.master_dtype=split") == bf16);
}

TEST_CASE("lora: every dist.zero gives the same bits, and dist.context and micro-steps the weights of one rank",
          "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string base = make_base(folder);
  const auto weights = [&](const std::string& name, int ranks, const std::string& more) {
    run_triad(lora_args(folder.file(name), base, "--set train.eps=1e-4 --set dist.bucket_mb=0.01 " + more), ranks);
    return folder.file(name);
  };
  const std::string one = weights("one", 1, "--set train.micro_batch_size=4");
  CHECK(difference(one + kWeights, weights("micro", 1, "--set train.accumulate_grad_batches=2") + kWeights).all < 1e-6);
  Weights first;
  for (int zero = 0; zero < 4; ++zero) {
    INFO("dist.zero " << zero);
    const std::string run = weights(fmt::format("zero{}", zero), 2, fmt::format("--set dist.zero={}", zero));
    const Weights its = tensors(tensors_path(run));
    if (zero == 0) {
      first = its;
      CHECK(difference(one + kWeights, run + kWeights).all < 1e-6);
    }
    CHECK(its == first);
  }
  const std::string context = weights("context", 2, "--set dist.context=2 --set train.micro_batch_size=4");
  CHECK(difference(one + kWeights, context + kWeights).all < 1e-5);
}

TEST_CASE("lora: eval, generate and export take a run's adapters merged into the base", "[lora]") {
  const TemporaryFolder folder;
  const std::string base = make_base(folder), run = folder.file("run"), text = folder.file("text.txt");
  std::string words;
  for (int i = 0; i < 100; ++i) words += fmt::format("{} and {}; ", i * i % 97, i);
  write_text(text, words);
  write_text(folder.file("val.txt"), words.substr(7));
  run_triad(lora_args(run, base,
                      "--set data.kind=text --set data.paths=" + text +
                          " --set data.val_paths=" + folder.file("val.txt") +
                          " --set train.eval_every=6 --set train.eval_batches=100 --set train.steps=12"));
  const std::string loss = eval_loss(run, text);
  CHECK(loss != eval_loss(base, text));
  run_triad("export " + run + " --format triad --out " + folder.file("merged"));
  CHECK(eval_loss(folder.file("merged"), text) == loss);
  CHECK(eval_loss(run + "/checkpoints/step_12", text) == loss);
  const std::map<int, double> during = column(run + "/val.csv", "val_loss");
  CHECK(during.at(12) < during.at(6));
  CHECK(run_triad("generate --device cpu --checkpoint " + run + " --prompt 1 --tokens 8 --temperature 0")
            .standard_output == run_triad("generate --device cpu --checkpoint " + folder.file("merged") +
                                          " --prompt 1 --tokens 8 --temperature 0")
                                    .standard_output);
  const Weights own = tensors(run + kWeights), frozen = tensors(base + kWeights);
  for (const auto& [name, values] : tensors(folder.file("merged") + kWeights)) {
    INFO(name);
    const bool trained = own.contains(name), adapted = !trained && own.contains(lora_name(name, 'A'));
    std::vector<float> expected = trained ? own.at(name) : frozen.at(name);
    if (adapted) {
      const std::vector<float>&a = own.at(lora_name(name, 'A')), &b = own.at(lora_name(name, 'B'));
      const size_t rank = 4, width = a.size() / rank;
      for (size_t i = 0; i < values.size(); ++i)
        for (size_t k = 0; k < rank; ++k) expected[i] += 2 * b[i / width * rank + k] * a[k * width + i % width];
    }
    for (size_t i = 0; i < values.size(); ++i)
      if (std::abs(values[i] - expected[i]) > (adapted ? 1e-6f : 0.0f)) FAIL(i << ": " << values[i]);
  }
  // A merged checkpoint is a base, and adapters alone are none.
  run_triad(lora_args(folder.file("again"), folder.file("merged")));
  const Outcome nested = run_program(lora_args(folder.file("nested"), run));
  CHECK(nested.exit_code == 2);
  CHECK(has(nested.output, "which holds adapters (train.lora) of"));
}

TEST_CASE("lora: a plan counts gradients and state of the adapters alone", "[lora]") {
  const auto plan = [](const std::string& more) {
    return parse_json(
        run_triad("plan " + kTiny +
                  " --json --set runtime.device=cpu --set runtime.precision=bf16 --set model.attention=dense "
                  "--set model.dim=256 --set model.vocab_size=4096 " +
                  more)
            .standard_output,
        "plan");
  };
  const Json full = plan(""), lora = plan("--set train.lora.rank=2");
  CHECK(lora.at("parameters") == full.at("parameters"));
  const double parameters = full.at("parameters").get<double>(), trained = lora.at("trained_parameters").get<double>();
  CHECK(full.at("trained_parameters") == full.at("parameters"));
  CHECK(trained < parameters / 50);
  // 18 bytes a parameter less: gradient, master and two moments; what remains of the weights is 2 bytes.
  const double less = full.at("peak_bytes").get<double>() - lora.at("peak_bytes").get<double>();
  CHECK(less > 14 * parameters);
  CHECK(less < 17 * parameters);
  // No gradients of frozen weights: two thirds of the products.
  const double flops = lora.at("flops_per_token").get<double>() / full.at("flops_per_token").get<double>();
  CHECK(flops > 0.66);
  CHECK(flops < 0.8);
  // Llama 8B with rank 16. What bf16 products on a CPU convert is in the peak too.
  for (const char* attention : {"dense", "nsa"})
    for (const auto& [tokens, most] : {std::pair{2048, 24e9}, {8192, 40e9}}) {
      INFO(attention << ", " << tokens << " tokens");
      const Json large = parse_json(
          run_triad(fmt::format("plan " TRIAD_SOURCE_DIR "/configs/llama_8b.json --json --set runtime.device=cpu --set "
                                "model.attention={} --set train.seq_len={} --set train.micro_batch_size=1 "
                                "--set train.accumulate_grad_batches=1 --set runtime.recompute=block --set "
                                "train.lora.rank=16",
                                attention, tokens))
              .standard_output,
          "plan");
      CHECK(large.at("peak_bytes").get<double>() < most);
    }
}

TEST_CASE("lora: what is refused", "[lora]") {
  const TemporaryFolder folder;
  const std::string base = make_base(folder);
  struct Refusal {
    std::string more;
    int exit_code;
    std::vector<std::string> words;
  };
  const std::string peft = folder.file("peft");
  fs::create_directories(peft);
  const auto adapter_config = [&](const std::string& json) { write_text(peft + "/adapter_config.json", json); };
  adapter_config(R"({"peft_type": "LORA", "r": 8, "lora_alpha": 8})");
  const Refusal refusals[] = {
      {"--set train.lora.rank=0", 2, {"train.lora.rank is 0", "in [1, 65536]"}},
      {"--set train.lora.rank=-2", 2, {"train.lora.rank is -2"}},
      {"--set train.lora.rank=1.5", 2, {"train.lora.rank is 1.5"}},
      {"--set train.lora.rank=17", 2, {"train.lora.rank is 17", "blocks.0.attn.k_cmp_proj.weight", "at most 16"}},
      {"--set train.lora.alpha=-1", 2, {"train.lora.alpha is -1"}},
      {"--set 'train.lora.targets=[\"q_proj\",\"gate_proj\"]'",
       2,
       {"train.lora.targets holds \"gate_proj\": no layer of this model has it", "all-linear, q_proj, k_proj"}},
      {"--set 'train.lora.targets=[]'", 2, {"train.lora.targets is empty"}},
      {"--set train.lora.dropout=0.1", 2, {"train.lora.dropout"}},
      {"--set 'train.lora={\"alpha\":2}'", 2, {"train.lora", "lacks train.lora.rank"}},
      {"--set train.lora=16", 2, {"train.lora is 16: an object is allowed"}},
      {"--set train.optimizer=muon", 2, {"train.lora is set: train.optimizer must be adamw", "muon"}},
      {"--set 'log.samples=[\"Once\"]'", 2, {"log.samples holds \"Once\"", "with train.lora"}},
      {"--set runtime.matmul_dtype=fp8", 2, {"train.lora is set: runtime.matmul_dtype must be bf16"}},
      {"--set train.init_from=\"\"", 2, {"train.lora is set, but train.init_from", "is empty"}},
      {"--set model.dim=64", 1, {"embed.weight"}},
      {"--set train.lora.init_from=" + folder.file("none"), 1, {"none/adapter_config.json"}},
      {"--set train.lora.init_from=" + peft, 1, {"adapter_config.json: r is 8: train.lora.rank, 4, is needed"}}};
  for (const Refusal& r : refusals) {
    const Outcome outcome = run_program(lora_args(folder.file("run"), base, r.more));
    INFO(r.more << "\nexit code " << outcome.exit_code << "\n" << outcome.output);
    CHECK(outcome.exit_code == r.exit_code);
    for (const std::string& word : r.words) CHECK(has(outcome.output, word));
    CHECK_FALSE(fs::exists(folder.file("run") + kWeights));
  }
}
