// triad import: transformers model folders that the tests write, and what becomes of them.
// test_huggingface_import.py tests that the numbers are transformers' own.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <tuple>

#include "io/data/shards.h"
#include "io/huggingface/tensor_names.h"
#include "io/safetensors.h"
#include "model/params.h"
#include "tests/support/checked_run.h"
#include "tests/support/huggingface_folder.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/checkpoint/state.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

std::vector<float> floats_of(const SafetensorsFile& file, const std::string& name) {
  const TensorEntry& entry = file.at(name);
  const std::vector<std::byte> bytes = file.read(entry);
  std::vector<float> out;
  for (int64_t i = 0; i < entry.numel(); ++i) {
    const auto* const at = bytes.data() + i * entry.bytes() / entry.numel();
    out.push_back(entry.dtype == "BF16" ? static_cast<float>(*reinterpret_cast<const bf16*>(at))
                                        : *reinterpret_cast<const float*>(at));
  }
  return out;
}

// The logits that `triad grads` writes for a checkpoint and tokens.
std::vector<float> logits_of(const std::string& checkpoint, const TemporaryFolder& folder, int64_t T,
                             const std::string& environment = "") {
  const std::string tokens = folder.file("tokens.bin"), out = folder.file("grads.safetensors");
  std::vector<int32_t> ids;
  for (int64_t i = 0; i <= T; ++i) ids.push_back(static_cast<int32_t>((i * i + 3 * i) % 61));
  ShardWriter shard(tokens, TokenWidth::u16);
  shard.append(ids);
  shard.finish();
  run_ok(fmt::format("grads --device cpu --checkpoint {} --tokens {} --batch 1 --seq {} --out {}", checkpoint, tokens,
                     T, out),
         environment);
  return floats_of(SafetensorsFile(out), "logits");
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  REQUIRE(norm > 0);
  return std::sqrt(difference / norm);
}

}  // namespace

TEST_CASE("import: names of tensors are translated both ways", "[import]") {
  for (const auto& [name, tensor] : tiny_llama().tensors) {
    INFO(name);
    const std::optional<std::string> ours = triad_name(name);
    REQUIRE(ours);
    CHECK(huggingface_name(*ours) == name);
  }
  CHECK(triad_name("model.layers.12.self_attn.k_proj.weight") == "blocks.12.attn.k_win_proj.weight");
  CHECK(triad_name("model.layers.0.self_attn.k_norm.weight") == "blocks.0.attn.k_win_norm.weight");
  for (const char* other : {"model.layers..input_layernorm.weight", "model.layers.01.input_layernorm.weight",
                            "model.layers.1.mlp.gate_proj.bias", "model.layers.1", "embed.weight", ""}) {
    INFO(other);
    CHECK(!triad_name(other));
  }
  CHECK(!huggingface_name("blocks.0.attn.k_cmp_proj.weight"));
  CHECK(!huggingface_name("blocks.0.attn.gate.fc1.weight"));
}

TEST_CASE("import: every tensor arrives under its name, from one file and from three, in each dtype", "[import]") {
  for (const std::string dtype : {"F32", "BF16", "F16"})
    for (const size_t files : {1, 3}) {
      INFO(dtype << " in " << files);
      const TemporaryFolder folder;
      HuggingFaceFolder f = tiny_llama();
      f.set_dtype(dtype);
      f.tensors["model.norm.weight"].dtype = "F32";
      f.write(folder.file("hf"), files);
      const std::string output = run_ok("import " + folder.file("hf") + " --out " + folder.file("ckpt"));
      CHECK(has(output, "LlamaForCausalLM"));
      const SafetensorsFile weights(folder.file("ckpt/model.safetensors"));
      CHECK(weights.entries().size() == f.tensors.size());
      for (const auto& [name, tensor] : f.tensors) {
        INFO(name);
        CHECK(floats_of(weights, *triad_name(name)) == tensor.values);
        CHECK(weights.at(*triad_name(name)).dtype == (tensor.dtype == "BF16" ? "BF16" : "F32"));
      }
      CHECK(count_files(folder.path()) == 2);  // nothing else is left
      const Json state = parse_json(read_text(folder.file("ckpt/state.json")), "state.json");
      CHECK(state["origin"]["architecture"] == "LlamaForCausalLM");
      CHECK(state["origin"]["config"] == f.config);
      CHECK(state["step"] == 0);
    }
}

TEST_CASE("import: what a checkpoint is for works: train, resume, eval, grads, score, generate", "[import]") {
  const TemporaryFolder folder;
  HuggingFaceFolder f = tiny_llama();
  f.set_vocabulary(kBpeTokens);
  f.write(folder.file("hf"));
  write_text(folder.file("hf/tokenizer.json"), bpe_tokenizer_json());
  write_text(folder.file("hf/tokenizer_config.json"), R"({"eos_token": "<|endoftext|>"})");
  write_text(folder.file("a.txt"), std::string(20'000, 'a') + " text");
  const std::string ckpt = folder.file("ckpt"), on_cpu = " --device cpu --checkpoint " + ckpt;
  run_ok("import " + folder.file("hf") + " --out " + ckpt);
  CHECK(read_text(ckpt + "/tokenizer.json") == bpe_tokenizer_json());
  const std::string short_run =
      " --set train.steps=2 --set train.seq_len=32 --set runtime.device=cpu --set log.out_dir=";
  run_ok("train " + ckpt + "/config.json" + short_run + folder.file("as_it_is"));
  run_ok("train " + ckpt + "/config.json" + short_run + folder.file("run") +
         " --set data.kind=text --set 'data.paths=[\"" + folder.file("a.txt") + "\"]'");
  // Training begins from the imported weights, so the first step's loss is eval's, and its checkpoint keeps where they
  // came from.
  const Json state = parse_json(read_text(folder.file("run/checkpoints/latest/state.json")), "state.json");
  CHECK(state["origin"]["architecture"] == "LlamaForCausalLM");
  CHECK(state["origin"]["files"]["tokenizer_config.json"] == R"({"eos_token": "<|endoftext|>"})");
  run_ok("train --resume " + folder.file("run") + " --set train.steps=3");
  CHECK(parse_json(read_text(folder.file("run/checkpoints/latest/state.json")), "state.json")["origin"] ==
        state["origin"]);
  CHECK(find_model(folder.file("run")).origin == state["origin"]);
  CHECK(has(run_ok("eval --seq 32" + on_cpu + " --data " + folder.file("a.txt")), "bits per byte"));
  run_ok("generate --tokens 4 --prompt aa" + on_cpu);
  write_text(folder.file("requests.jsonl"), R"({"context": "a", "continuation": "a text"})");
  CHECK(has(run_ok("score --jsonl " + folder.file("requests.jsonl") + on_cpu), "logprob"));
  CHECK(logits_of(ckpt, folder, 32).size() == 32 * kBpeTokens);
}

TEST_CASE("import: every branch of NSA begins with the dense keys and values", "[import]") {
  const TemporaryFolder folder;
  const HuggingFaceFolder f = tiny_llama();
  f.write(folder.file("hf"));
  run_ok("import " + folder.file("hf") + " --out " + folder.file("dense"));
  const std::string nsa = "import --attention nsa " + folder.file("hf") +
                          " --set nsa.l=8 --set nsa.d=4 --set nsa.l_sel=8 "
                          "--set nsa.n_sel=4 --set nsa.w=64 --out ";
  run_ok(nsa + folder.file("nsa"));
  const SafetensorsFile weights(folder.file("nsa/model.safetensors"));
  for (const std::string branch : {"cmp", "sel", "win"})
    for (const std::string letter : {"k", "v"}) {
      INFO(branch << letter);
      CHECK(floats_of(weights, "blocks.1.attn." + letter + "_" + branch + "_proj.weight") ==
            f.tensors.at("model.layers.1.self_attn." + letter + "_proj.weight").values);
    }
  for (const float x : floats_of(weights, "blocks.0.attn.gate.fc2.weight")) CHECK(x == 0);
  const std::vector<float> bias = floats_of(weights, "blocks.1.attn.gate.fc2.bias");
  REQUIRE(bias.size() == 3);
  CHECK(bias[1] - bias[0] == Approx(std::log(3.0)));
  CHECK(bias[2] - bias[0] == Approx(std::log(6.0)));
  // With the window branch alone, which covers the row, the model is the dense one.
  const std::vector<float> dense = logits_of(folder.file("dense"), folder, 48);
  CHECK(relative_difference(logits_of(folder.file("nsa"), folder, 48, "NSA_FORCE_BRANCH=win"), dense) < 2e-5);
  CHECK(relative_difference(logits_of(folder.file("nsa"), folder, 48), dense) > 1e-3);
  run_ok("train " + folder.file("nsa/config.json") +
         " --set train.steps=2 --set train.seq_len=32 --set "
         "runtime.device=cpu --set log.out_dir=" +
         folder.file("run"));
  // What --set chooses: another phi begins fresh, shared keys have one tensor.
  run_ok(nsa + folder.file("conv") + " --set nsa.phi=conv --set nsa.shared_kv=true --set 'nsa.gate_init=[1,1,2]'");
  const SafetensorsFile shared(folder.file("conv/model.safetensors"));
  CHECK(shared.find("blocks.0.attn.k_cmp_proj.weight") == nullptr);
  CHECK(floats_of(shared, "blocks.0.attn.k_win_proj.weight") ==
        f.tensors.at("model.layers.0.self_attn.k_proj.weight").values);
  CHECK(floats_of(shared, "blocks.0.attn.phi_k.weight").front() == 1.0f / 8);
  refused(nsa + folder.file("x") + " --set model.dim=64", 2, {"model.dim is 64", "has 32"});
  refused(nsa + folder.file("x") + " --set model.attention=dense", 2, {"--attention dense"});
  refused(nsa + folder.file("x") + " --set nsa.wide=64", 2, {"nsa.wide"});
  CHECK(!fs::exists(folder.file("x")));
}

TEST_CASE("import: a taught index begins with dense weights, trains after a warm-up, leaves and generates",
          "[import]") {
  const TemporaryFolder folder;
  const HuggingFaceFolder f = tiny_llama();
  f.write(folder.file("hf"));
  run_ok("import " + folder.file("hf") + " --out " + folder.file("dense"));
  const std::string index = "import --attention nsa " + folder.file("hf") + " --set nsa.selector=index --out ",
                    one_softmax = index + folder.file("sel") + " --set nsa.branches=sel";
  CHECK(has(run_ok(one_softmax), "25 tensors, 4 tensors begin fresh (index)"));
  const SafetensorsFile weights(folder.file("sel/model.safetensors"));
  for (const auto& [name, tensor] : f.tensors) {
    INFO(name);
    CHECK(floats_of(weights, *triad_name(name)) == tensor.values);
  }
  CHECK(weights.find("blocks.1.attn.index_q_proj.weight") != nullptr);
  const Json nsa = parse_json(read_text(folder.file("sel/config.json")), "config.json")["nsa"];
  CHECK(nsa["l_sel"] == 128);
  CHECK(nsa["init_blocks"] == 0);
  CHECK(nsa["local_blocks"] == 1);
  // A text that fits into the lists has the dense model's logits.
  CHECK(relative_difference(logits_of(folder.file("sel"), folder, 48), logits_of(folder.file("dense"), folder, 48)) <
        2e-5);
  // With blocks that hold a quarter of each row: a dense warm-up, then sparse steps.
  fs::remove_all(folder.file("sel"));
  run_ok(one_softmax + " --set nsa.l_sel=8 --set nsa.n_sel=2 --set nsa.d_index=8");
  run_ok("train " + folder.file("sel/config.json") +
         R"( --set 'train.stages=[{"steps": 2, "attention": "dense"}, {"steps": 2}]' --set train.steps=null)" +
         " --set train.lr=1e-3 --set train.warmup_steps=0 --set train.seq_len=64 --set runtime.device=cpu" +
         " --set log.out_dir=" + folder.file("run"));
  const SafetensorsFile trained(folder.file("run/model.safetensors")), begun(folder.file("sel/model.safetensors"));
  for (const char* name :
       {"blocks.0.attn.index_q_proj.weight", "blocks.1.attn.index_k_proj.weight", "blocks.1.attn.k_win_proj.weight"}) {
    INFO(name);
    CHECK(relative_difference(floats_of(trained, name), floats_of(begun, name)) > 1e-3);
  }
  run_ok("export " + folder.file("run") + " --out " + folder.file("left"));
  const Json left = parse_json(read_text(folder.file("left/config.json")), "config.json");
  CHECK(left["model_type"] == "triad");
  CHECK(left["nsa"]["branches"] == "sel");
  CHECK(left["nsa"]["selector"] == "index");
  CHECK(run_ok("generate --device cpu --tokens 20 --prompt-ids 1,2,3 --checkpoint " + folder.file("run"))
            .starts_with("1,2,3,"));
  // Three branches keep their gates and their blocks.
  CHECK(has(run_ok(index + folder.file("three")), "12 tensors begin fresh (gates, index)"));
  refused("import --attention nsa " + folder.file("hf") + " --set nsa.branches=sel --out " + folder.file("x"), 2,
          {"nsa.branches is sel", "nsa.selector index", "compressed"});
  refused(index + folder.file("x") + " --set nsa.branches=sel --set 'nsa.gate_init=[1,1,2]'", 2,
          {"nsa.gate_init is [1, 1, 2]", "nsa.branches"});
  CHECK(!fs::exists(folder.file("x")));
}

TEST_CASE("import: layers with a window alone begin with dense weights", "[import]") {
  const TemporaryFolder folder;
  tiny_llama().write(folder.file("hf"));
  run_ok("import " + folder.file("hf") + " --out " + folder.file("dense"));
  const std::string nsa = "import --attention nsa " + folder.file("hf");
  CHECK_FALSE(has(run_ok(nsa + " --set nsa.branches=win --out " + folder.file("win")), "fresh"));
  CHECK(parse_json(read_text(folder.file("win/config.json")), "config.json")["nsa"]["w"] == 512);
  CHECK(relative_difference(logits_of(folder.file("win"), folder, 48), logits_of(folder.file("dense"), folder, 48)) <
        2e-5);
  CHECK(has(run_ok(nsa + R"( --set 'nsa.layers=[{"layers":"1:2","branches":"win"}]' --out )" + folder.file("mixed")),
            "4 tensors begin fresh (gates)"));
}

TEST_CASE("import: rotations of the Hub's files and of transformers 5 become the same keys", "[import]") {
  using Check = std::function<void(const Json& model)>;
  const auto number = [](const char* key, double value) {
    return [=](const Json& model) { CHECK(model[key].get<double>() == value); };
  };
  const Json llama3 = {{"rope_type", "llama3"},
                       {"factor", 4.0},
                       {"low_freq_factor", 1.5},
                       {"high_freq_factor", 3.0},
                       {"original_max_position_embeddings", 64}};
  const Json yarn = {{"rope_type", "yarn"},
                     {"factor", 2.0},
                     {"original_max_position_embeddings", 32},
                     {"attention_factor", 0.1 * std::log(2.0) + 1},
                     {"beta_slow", 2}};
  const std::tuple<const char*, Json, std::vector<Check>> cases[] = {
      {"none", nullptr, {number("rope_theta", 5e5), number("rope_scale", 1)}},
      {"default", {{"rope_type", "default"}}, {number("rope_theta", 5e5), number("rope_scale", 1)}},
      {"linear", {{"type", "linear"}, {"factor", 4}}, {number("rope_theta", 5e5), number("rope_scale", 4)}},
      {"llama3",
       llama3,
       {number("rope_factor", 4), number("rope_low_freq", 1.5), number("rope_high_freq", 3),
        number("rope_original_len", 64), number("rope_theta", 5e5),
        [](const Json& model) { CHECK(model["rope_scaling"] == "llama3"); }}},
      {"yarn",
       yarn,
       {number("rope_factor", 2), number("rope_original_len", 32), number("rope_beta_fast", 32),
        number("rope_beta_slow", 2), [](const Json& model) { CHECK(model["rope_scaling"] == "yarn"); }}}};
  for (const auto& [name, rope, checks] : cases)
    for (const bool is_new : {false, true}) {
      INFO(name << (is_new ? ", rope_parameters" : ", rope_scaling"));
      const TemporaryFolder folder;
      HuggingFaceFolder f = tiny_llama();
      if (is_new) {
        f.config["rope_parameters"] = rope.is_null() ? Json::object() : rope;
        f.config["rope_parameters"]["rope_theta"] = 5e5;
      } else {
        f.config["rope_scaling"] = rope;
        f.config["rope_theta"] = 5e5;
      }
      f.write(folder.file("hf"));
      run_ok("import " + folder.file("hf") + " --out " + folder.file("ckpt"));
      const Json model = parse_json(read_text(folder.file("ckpt/config.json")), "config.json")["model"];
      for (const Check& check : checks) check(model);
    }
}

TEST_CASE("import: without a tokenizer the model speaks ids", "[import]") {
  const TemporaryFolder folder;
  HuggingFaceFolder f = tiny_llama();
  f.set_vocabulary(kBpeTokens);
  f.write(folder.file("hf"));
  const std::string ckpt = folder.file("ckpt"),
                    generate = "generate --device cpu --temperature 0 --tokens 5 --checkpoint " + ckpt;
  const std::string warning = run_ok("import " + folder.file("hf") + " --out " + ckpt);
  CHECK(has(warning, "no tokenizer.json"));
  CHECK(has(warning, "--prompt-ids"));
  CHECK(has(warning, "data.kind=shards"));  // text would need a tokenizer
  CHECK(!has(warning, "data.kind=text"));
  refused(generate + " --prompt hello", 1, {ckpt, "no tokenizer", "tokenizer.json", "--prompt-ids"});
  const std::string ids = run_ok(generate + " --prompt-ids 1,2,3");
  INFO(ids);
  REQUIRE(ids.starts_with("1,2,3,"));
  CHECK(std::count(ids.begin(), ids.end(), ',') == 7);
  const std::string lines = run_ok(generate + " --json --prompt-ids 1,2,3 --prompt-ids 4");
  const Json line = parse_json(lines.substr(0, lines.find('\n')), "generate");
  CHECK(line["prompt_ids"] == Json({1, 2, 3}));
  CHECK(fmt::format("1,2,3,{}\n", fmt::join(line["tokens"].get<std::vector<int>>(), ",")) == ids);
  refused(generate + " --prompt-ids 1,,3", 2, {"--prompt-ids", "\"\"", "447"});
  refused(generate + " --prompt-ids 448", 2, {"--prompt-ids", "448", "447"});
  write_text(folder.file("a.txt"), "text");
  refused("eval --device cpu --checkpoint " + ckpt + " --data " + folder.file("a.txt"), 1, {"no tokenizer"});
  const std::string run = " --set train.steps=1 --set train.seq_len=32 --set runtime.device=cpu --set log.out_dir=";
  run_ok("train " + ckpt + "/config.json" + run + folder.file("run"));
  refused("generate --device cpu --prompt a --checkpoint " + folder.file("run"), 1, {"no tokenizer"});
  // The folder's end-of-text tokens end a text: here the first token that is sampled.
  const std::string first = ids.substr(6, ids.find(',', 6) - 6);
  write_text(folder.file("hf/generation_config.json"), "{\"eos_token_id\": [" + first + "]}");
  run_ok("import " + folder.file("hf") + " --out " + folder.file("ends"));
  CHECK(run_ok("generate --device cpu --temperature 0 --prompt-ids 1,2,3 --checkpoint " + folder.file("ends")) ==
        "1,2,3\n");
  // They do not if the model was trained on another tokenizer's tokens.
  run_ok("train " + folder.file("ends") + "/config.json --set data.tokenizer=byte --set train.lr=1e-9" + run +
         folder.file("bytes"));
  CHECK(run_ok("generate --device cpu --temperature 0 --prompt-ids 1,2,3 --tokens 1 --checkpoint " +
               folder.file("bytes")) == "1,2,3," + first + "\n");
  // A tokenizer that is put there later is used.
  write_text(ckpt + "/tokenizer.json", bpe_tokenizer_json());
  CHECK(run_ok(generate + " --prompt hello").starts_with("hello"));
}

TEST_CASE("import: inspect says what a folder is", "[import]") {
  const TemporaryFolder folder;
  HuggingFaceFolder f = tiny_llama();
  f.set_dtype("BF16");
  f.write(folder.file("hf"), 2);
  const std::string seen = run_ok("inspect " + folder.file("hf"));
  INFO(seen);
  for (const char* word : {"LlamaForCausalLM", "2 layers", "4 heads of 8", "21 tensors in 2 files", "BF16",
                           "triad import takes it, unless a weight is not finite", "model.layers.0.mlp.up_proj.weight"})
    CHECK(has(seen, word));
  run_ok("import " + folder.file("hf") + " --out " + folder.file("ckpt"));
  CHECK(!has(run_ok("inspect " + folder.file("ckpt")), "triad import"));
}
