// triad import: what it cannot take is named, and then nothing is written.
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>

#include "io/json_config.h"
#include "tests/support/checked_run.h"
#include "tests/support/huggingface_folder.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

TEST_CASE("import: what config.json has and Triad cannot compute is named, and nothing is written", "[import]") {
  const auto rope = [](Json values) { return Json{{"rope_scaling", std::move(values)}}; };
  const std::pair<Json, std::vector<std::string>> cases[] = {
      {{{"architectures", {"MixtralForCausalLM"}}}, {"architectures", "MixtralForCausalLM", "Qwen3ForCausalLM"}},
      {{{"architectures", nullptr}, {"model_type", "gemma"}}, {"model_type", "gemma"}},
      {{{"mlp_bias", true}}, {"mlp_bias is true"}},
      {{{"attention_bias", true}}, {"attention_bias is true", "o_proj"}},
      {{{"architectures", {"Qwen3ForCausalLM"}}, {"attention_bias", true}}, {"attention_bias is true"}},
      {{{"hidden_act", "gelu"}}, {"hidden_act is \"gelu\"", "silu"}},
      {{{"quantization_config", {{"bits", 4}}}}, {"quantization_config"}},
      {{{"architectures", {"MistralForCausalLM"}}, {"sliding_window", 64}}, {"sliding_window is 64", "128"}},
      {{{"architectures", {"MistralForCausalLM"}}, {"max_position_embeddings", 8192}}, {"sliding_window is 4096"}},
      {{{"architectures", {"Qwen2ForCausalLM"}},
        {"use_sliding_window", true},
        {"sliding_window", 64},
        {"max_window_layers", 1}},
       {"sliding_window is 64"}},
      {{{"architectures", {"SmolLM3ForCausalLM"}}, {"use_sliding_window", true}, {"sliding_window", 64}},
       {"sliding_window is 64"}},
      {{{"architectures", {"SmolLM3ForCausalLM"}}, {"attention_bias", true}}, {"attention_bias is true"}},
      {{{"architectures", {"SmolLM3ForCausalLM"}}, {"no_rope_layers", {1}}}, {"no_rope_layers is [1]", "at least 2"}},
      {{{"architectures", {"SmolLM3ForCausalLM"}}, {"no_rope_layers", {1, 2}}}, {"no_rope_layers is 2", "or 0"}},
      {{{"layer_types", {"full_attention", "sliding_attention"}}}, {"layer_types", "sliding_attention"}},
      {{{"head_dim", 7}}, {"head_dim", "7"}},
      {{{"head_dim", 512}}, {"head_dim", "512"}},
      {{{"num_attention_heads", 5}, {"num_key_value_heads", 5}}, {"hidden_size is 32", "num_attention_heads = 5"}},
      {{{"num_key_value_heads", 3}}, {"num_key_value_heads is 3"}},
      {{{"hidden_size", nullptr}}, {"hidden_size is missing"}},
      {{{"vocab_size", "64"}}, {"vocab_size is \"64\""}},
      {{{"partial_rotary_factor", 0.5}}, {"partial_rotary_factor is 0.5"}},
      {rope({{"rope_type", "dynamic"}, {"factor", 2}}), {"rope_scaling.rope_type is \"dynamic\"", "llama3"}},
      {rope({{"type", "longrope"}}), {"rope_scaling.type is \"longrope\""}},
      {rope({{"rope_type", "linear"}}), {"rope_scaling.factor is missing"}},
      {rope({{"rope_type", "yarn"}, {"factor", 4}, {"attention_factor", 1.0}}), {"attention_factor is 1.0", "1.138"}},
      {rope({{"rope_type", "yarn"}, {"factor", 4}, {"mscale", 1.0}, {"mscale_all_dim", 1.0}}), {"mscale"}},
      {rope({{"rope_type", "yarn"}, {"factor", 4}, {"truncate", false}}), {"truncate is false"}},
      {rope({{"rope_type", "llama3"}, {"factor", 4}, {"low_freq_factor", 4}, {"high_freq_factor", 1}}),
       {"high_freq_factor is 1"}},
      {rope({{"partial_rotary_factor", 0.5}}), {"rope_scaling.partial_rotary_factor is 0.5"}}};
  for (const auto& [change, words] : cases) {
    INFO(change.dump());
    const TemporaryFolder folder;
    HuggingFaceFolder f = tiny_llama();
    f.config.update(change);
    f.write(folder.file("hf"));
    refused("import " + folder.file("hf") + " --out " + folder.file("ckpt"), 1, words);
    CHECK(count_files(folder.path()) == 1);
    const std::string seen = run_ok("inspect " + folder.file("hf"));
    CHECK(has(seen, "cannot take it"));
    for (const std::string& word : words) CHECK(has(seen, word));
  }
}

TEST_CASE("import: weights that do not fit are named, and nothing is written", "[import]") {
  const std::string q = "model.layers.1.self_attn.q_proj.weight";
  using Change = std::function<void(HuggingFaceFolder&)>;
  const auto value = [&](float x) { return [=](HuggingFaceFolder& f) { f.tensors[q].values[9] = x; }; };
  const std::pair<Change, std::vector<std::string>> cases[] = {
      {[&](HuggingFaceFolder& f) { f.tensors.erase(q); }, {q, "missing", "32,32"}},
      {[&](HuggingFaceFolder& f) {
         f.tensors[q].shape = {16, 64};
       },
       {q, "F32[16,64]", "32,32"}},
      {[&](HuggingFaceFolder& f) { f.tensors["model.layers.2.mlp.up_proj.weight"] = f.tensors[q]; },
       {"model.layers.2.mlp.up_proj.weight", "none of a LlamaForCausalLM"}},
      {[&](HuggingFaceFolder& f) { f.tensors["lm_head.bias"] = f.tensors["model.norm.weight"]; }, {"lm_head.bias"}},
      {[&](HuggingFaceFolder& f) { f.tensors[q].dtype = "I32"; }, {q, "I32", "BF16"}},
      {value(std::nanf("")), {q, "nan at index 9", "finite"}},
      {value(std::numeric_limits<float>::infinity()), {q, "inf at index 9"}},
      {[&](HuggingFaceFolder& f) { f.tensors[q].dtype = "BF16", f.tensors[q].values[9] = std::nanf(""); }, {q, "nan"}},
      {[&](HuggingFaceFolder& f) { f.tensors[q].dtype = "F16", f.tensors[q].values[9] = 1e9f; }, {q, "inf"}},
      {[&](HuggingFaceFolder& f) { f.config["tie_word_embeddings"] = true; },
       {"lm_head.weight", "tie_word_embeddings"}}};
  for (const auto& [change, words] : cases)
    for (const size_t files : {1, 2}) {
      INFO(words.front() << " in " << files);
      const TemporaryFolder folder;
      HuggingFaceFolder f = tiny_llama();
      change(f);
      f.write(folder.file("hf"), files);
      refused("import " + folder.file("hf") + " --out " + folder.file("ckpt"), 1, words);
      CHECK(count_files(folder.path()) == 1);
    }
}

TEST_CASE("import: files that are missing, cut or foreign are named, and nothing is written", "[import]") {
  const TemporaryFolder folder;
  const std::string hf = folder.file("hf"), args = "import " + hf + " --out " + folder.file("ckpt"),
                    second = hf + "/model-00002-of-00002.safetensors", index = hf + "/model.safetensors.index.json";
  const auto begin = [&](size_t files) {
    fs::remove_all(hf);
    tiny_llama().write(hf, files);
  };
  refused(args, 1, {"hf", "no such folder"});
  fs::create_directories(hf);
  refused(args, 1, {"config.json"});
  begin(1);
  fs::remove(hf + "/model.safetensors");
  refused(args, 1, {"model.safetensors", "hf"});
  write_text(hf + "/pytorch_model.bin", "x");
  refused(args, 1, {"pytorch_model.bin", "safetensors"});
  begin(2);
  fs::remove(second);
  refused(args, 1, {"model-00002-of-00002.safetensors", "missing"});
  begin(2);
  fs::resize_file(second, fs::file_size(second) - 1);
  refused(args, 1, {second, "truncated"});
  begin(2);
  fs::remove(index);
  refused(args, 1, {"model.safetensors.index.json"});
  begin(2);
  Json map = parse_json(read_text(index), index);
  map["weight_map"].erase("model.norm.weight");
  write_text(index, map.dump());
  refused(args, 1, {"model.norm.weight", "index.json"});
  map["weight_map"]["model.norm.weight"] = "../other.safetensors";
  write_text(index, map.dump());
  refused(args, 1, {"model.norm.weight", "../other.safetensors"});
  map["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors";
  write_text(index, map.dump());
  refused(args, 1, {"model.norm.weight", "model-00001-of-00002.safetensors"});
  begin(1);
  write_text(hf + "/config.json", read_text(hf + "/config.json").substr(0, 40));
  refused(args, 1, {"config.json", "JSON"});
  begin(1);
  write_text(hf + "/generation_config.json", R"({"eos_token_id": "two"})");
  refused(args, 1, {"generation_config.json", "eos_token_id", "two"});
  write_text(hf + "/generation_config.json", R"({"eos_token_id": [2, 64]})");
  refused(args, 1, {"eos_token_id 64", "64"});
  fs::remove(hf + "/generation_config.json");
  write_text(hf + "/tokenizer.json", bpe_tokenizer_json());
  refused(args, 1, {"tokenizer.json", "tokens", "vocab_size in config.json is 64"});
  write_text(hf + "/tokenizer.json", R"({"model": {"type": "Unigram"}})");
  refused(args, 1, {"tokenizer.json", "Unigram", "--no-tokenizer"});
  fs::remove(hf + "/tokenizer.json");
  write_text(hf + "/tokenizer_config.json", "{\"eos_token\": \"\xff\"}");
  refused(args, 1, {hf + "/tokenizer_config.json", "0xff at offset 15", "UTF-8"});
  fs::remove(hf + "/tokenizer_config.json");
  refused("import " + hf + " --out \"\"", 2, {"--out is empty"});
  refused("import " + hf + " --out " + hf, 1, {"--out " + hf, "the folder that is read"});
  refused("import " + hf + " --out " + hf + "/../hf/", 1, {"the folder that is read"});
  // A limit on file sizes simulates a full disk.
  refused(args, 1, {"model.safetensors", "cannot write"}, "ulimit -f 8; ");
  write_text(hf + "/model.safetensors.bad", "");
  refused(args, 1, {"model.safetensors", "Input/output error"},
          triad::test::with_faults("TRIAD_BAD_DISK=" + hf + "/model.safetensors"));
  fs::remove(hf + "/model.safetensors.bad");
  CHECK(count_files(folder.path()) == 1);
  fs::create_directories(folder.file("ckpt"));
  write_text(folder.file("ckpt/kept"), "mine");
  refused(args, 1, {"ckpt", "not empty"});
  CHECK(read_text(folder.file("ckpt/kept")) == "mine");
  fs::remove(folder.file("ckpt/kept"));
  // An empty folder is written to, and what a killed import has left, which has a mark, is removed.
  const std::string tmp = folder.file("ckpt.tmp.");
  const std::string left = tmp + "471101234567890123456789", others[] = {tmp + "5", tmp + "471101234567890123456780"};
  for (const std::string& each : {left, others[0], others[1]}) {
    fs::create_directories(each);
    write_text(each + "/model.safetensors", "half");
  }
  write_text(left + "/.triad_unfinished", "");
  run_ok(args + "/");
  CHECK_FALSE(fs::exists(left));
  for (const std::string& each : others) CHECK(read_text(each + "/model.safetensors") == "half");
  CHECK(count_files(folder.path()) == 4);
  CHECK_FALSE(fs::exists(folder.file("ckpt/.triad_unfinished")));
  // A link to an empty folder: the folder is written, and the link stays.
  fs::create_directories(folder.file("elsewhere"));
  fs::create_directory_symlink(folder.file("elsewhere"), folder.file("link"));
  run_ok("import " + hf + " --out " + folder.file("link") + "/");
  CHECK(fs::is_symlink(folder.file("link")));
  CHECK(fs::exists(folder.file("elsewhere/state.json")));
}

TEST_CASE("import: a transformers folder in place of a checkpoint is named as one", "[import]") {
  const TemporaryFolder folder;
  const std::string words = " is a transformers folder: triad import takes it";
  write_text(folder.file("a.txt"), "text");
  for (const size_t files : {1, 2}) {
    INFO(files);
    const std::string hf = folder.file("hf" + std::to_string(files)), checkpoint = " --device cpu --checkpoint " + hf;
    tiny_llama().write(hf, files);
    refused("export " + hf + " --out " + folder.file("out"), 2, {hf + words});
    refused("generate --prompt a" + checkpoint, 2, {hf + words});
    refused("eval --data " + folder.file("a.txt") + checkpoint, 2, {hf + words});
    refused("train " TRIAD_SOURCE_DIR "/configs/tiny.json --set runtime.device=cpu --set train.init_from=" + hf +
                " --set log.out_dir=" + folder.file("run"),
            2, {hf + words});
    refused("train " + hf + "/config.json", 2, {hf + words});
  }
}
