// triad export: which class a model leaves as, the files, names and bits of its tensors, the way back through `triad
// import`, and what is refused. tests/tools/test_huggingface_export.py tests that transformers computes the same.
#include <unistd.h>

#include <filesystem>
#include <limits>

#include "io/huggingface/model_config.h"
#include "io/safetensors.h"
#include "io/weight_index.h"
#include "tests/support/checked_run.h"
#include "tests/support/huggingface_folder.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using triad::test::count_files;
using triad::test::has;
using triad::test::HuggingFaceFolder;
using triad::test::json_of;
using triad::test::kTiny;
using triad::test::Outcome;
using triad::test::read_text;
using triad::test::run_ok;
using triad::test::run_program;
using triad::test::TemporaryFolder;
using triad::test::tiny_llama;
using triad::test::write_text;
namespace fs = std::filesystem;

namespace {

const std::string kPython = TRIAD_SOURCE_DIR "/tools/huggingface/";

// A checkpoint with fresh weights for configs/tiny.json with changes, and the folder to which it is exported.
struct Exported {
  TemporaryFolder folder;
  std::string checkpoint = folder.file("checkpoint"), out = folder.file("out");

  explicit Exported(const std::string& sets = "", const std::string& options = "--dtype f32") {
    run_ok("init " + kTiny + " " + sets + " --out " + checkpoint);
    run_ok("export " + checkpoint + " --out " + out + " " + options);
  }
  Json config() const { return json_of(out + "/config.json"); }
};

const std::string kDense = "--set model.attention=dense --set model.mlp=swiglu ";

// Whether tensor `a` in one file has the same dtype, shape and bytes as `b` in another.
bool same_tensor(const SafetensorsFile& in_a, const std::string& a, const SafetensorsFile& in_b, const std::string& b) {
  const TensorEntry *x = in_a.find(a), *y = in_b.find(b);
  return x != nullptr && y != nullptr && x->str() == y->str() && in_a.read(*x) == in_b.read(*y);
}

}  // namespace

TEST_CASE("export: a dense model leaves as the class that holds it, every tensor to the bit", "[export]") {
  struct Case {
    std::string sets, architecture;
  };
  for (const auto& [sets, architecture] : std::initializer_list<Case>{
           {"", "LlamaForCausalLM"},
           {"--set model.tie_embeddings=true --set model.d_k=12 --set model.d_v=12", "LlamaForCausalLM"},
           {"--set model.qkv_bias=true", "Qwen2ForCausalLM"},
           {"--set model.qk_norm=true", "Qwen3ForCausalLM"},
           {"--set model.nope_layers=0:1", "SmolLM3ForCausalLM"}}) {
    INFO(sets);
    const Exported e(kDense + sets);
    CHECK(e.config()["architectures"] == Json::array({architecture}));
    CHECK(!fs::exists(e.out + "/modeling_triad.py"));
    const HuggingFaceConfig config = read_huggingface_config(e.out);
    CHECK(word_of(config.model_class) == architecture);
    CHECK(config.tie_embeddings == has(sets, "tie"));
    CHECK(config.nope_layers == (has(sets, "nope") ? std::vector<int64_t>{0} : std::vector<int64_t>{}));
    const SafetensorsFile ours(e.checkpoint + "/model.safetensors"), theirs(e.out + "/model.safetensors");
    REQUIRE(ours.entries().size() == theirs.entries().size());
    CHECK(same_tensor(ours, "embed.weight", theirs, "model.embed_tokens.weight"));
    CHECK(same_tensor(ours, "blocks.1.attn.k_win_proj.weight", theirs, "model.layers.1.self_attn.k_proj.weight"));
    CHECK(same_tensor(ours, "blocks.0.mlp.up_proj.weight", theirs, "model.layers.0.mlp.up_proj.weight"));

    // Back again: import takes the folder, the tensors are the same, and so is the text.
    const std::string back = e.folder.file("back");
    run_ok("import " + e.out + " --out " + back);
    const SafetensorsFile again(back + "/model.safetensors");
    REQUIRE(again.entries().size() == ours.entries().size());
    for (const TensorEntry& entry : ours.entries()) {
      INFO(entry.name);
      CHECK(same_tensor(ours, entry.name, again, entry.name));
    }
    const std::string text = " --device cpu --temperature 0 --tokens 20 --prompt A";
    CHECK(run_ok("generate --checkpoint " + back + text) == run_ok("generate --checkpoint " + e.checkpoint + text));
  }
}

TEST_CASE("export: what no class of transformers holds leaves with its code", "[export]") {
  struct Case {
    std::string sets, reason;
  };
  for (const auto& [sets, reason] : std::initializer_list<Case>{
           {"", "NSA layers, mlp silu"},
           {"--set model.mlp=swiglu --set model.dense_layers=0:1", "NSA and dense layers"},
           {"--set 'nsa.layers=[{\"layers\":\"1:2\",\"branches\":\"win\",\"w\":9}]'", "NSA and window layers"},
           {"--set model.attention=dense", "mlp silu"},
           {kDense + "--set model.d_v=12", "d_k 8 with d_v 12"},
           {kDense + "--set model.qk_norm=true --set model.nope_layers=1:2", "nope_layers with qk_norm"},
           {kDense + "--set model.qkv_bias=true --set model.qk_norm=true", "qkv_bias with qk_norm"}}) {
    INFO(sets);
    const Exported e(sets);
    const Json config = e.config();
    CHECK(config["model_type"] == "triad");
    CHECK(has(read_text(e.out + "/README.md"), reason));
    CHECK(read_text(e.out + "/modeling_triad.py") == read_text(kPython + "modeling_triad.py"));
    CHECK(read_text(e.out + "/configuration_triad.py") == read_text(kPython + "configuration_triad.py"));
    const std::string dense = has(sets, "0:1") ? "[0]" : has(sets, "=dense") ? "[0,1]" : "[]";
    CHECK(config["dense_layers"].dump() == dense);
    CHECK(config["nope_layers"].dump() == (has(sets, "nope_layers") ? "[1]" : "[]"));
    CHECK(config.contains("nsa") == !has(sets, "=dense"));
    const SafetensorsFile ours(e.checkpoint + "/model.safetensors"), theirs(e.out + "/model.safetensors");
    REQUIRE(ours.entries().size() == theirs.entries().size());
    for (const TensorEntry& entry : ours.entries()) {
      INFO(entry.name);
      CHECK(same_tensor(ours, entry.name, theirs, entry.name == "lm_head.weight" ? entry.name : "model." + entry.name));
    }
  }
  const Exported other(
      "--set nsa.phi=conv --set nsa.gate=sigmoid --set nsa.gate_temperature=0.5 "
      "--set model.rope_theta=500");
  const Json config = other.config();
  CHECK(config["nsa"]["phi"] == "conv");
  CHECK(config["nsa"]["gate"] == "sigmoid");
  CHECK(config["nsa"]["gate_temperature"] == 0.5);
  CHECK(config["nsa"]["l_sel"] == 8);
  CHECK(config["rope"]["theta"] == 500);

  // Verbs that need a checkpoint say how to get one.
  for (const std::string& args :
       {"generate --device cpu --prompt A --checkpoint " + other.out,
        "export " + other.out + " --out " + other.out + "2", "train " + other.out + "/config.json"}) {
    const Outcome outcome = run_program(args);
    INFO(args << "\n" << outcome.output);
    CHECK(has(outcome.output, "triad import takes it"));
  }
}

TEST_CASE("export: scaled rotations are written for both generations of transformers", "[export]") {
  struct Case {
    std::string sets, type;
  };
  for (const auto& [sets, type] : std::initializer_list<Case>{
           {"--set model.rope_theta=500000", "default"},
           {"--set model.rope_scale=4", "linear"},
           {"--set model.rope_scaling=llama3 --set model.rope_factor=4 --set model.rope_original_len=24", "llama3"},
           {"--set model.rope_scaling=yarn --set model.rope_factor=4 --set model.rope_original_len=24", "yarn"}}) {
    INFO(sets);
    const Exported e(kDense + sets);
    Json config = e.config();
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
      Json one = config;
      one.erase(key);
      const HuggingFaceRope rope = parse_huggingface_config(one, "config.json").rope;
      INFO("without " << key);
      CHECK(rope.type == type);
      CHECK(rope.theta == (type == "default" ? 500000 : 10000));
      if (type != "default") CHECK(rope.factor == 4);
      if (type == "llama3" || type == "yarn") CHECK(rope.original_len == 24);
    }
    CHECK(config["max_position_embeddings"] == (type == "llama3" || type == "yarn" ? 96 : 48));
  }
}

TEST_CASE("export: an imported model leaves as it came", "[export]") {
  for (const std::string architecture : {"LlamaForCausalLM", "MistralForCausalLM"})
    for (const std::string dtype : {"F32", "BF16"}) {
      INFO(architecture << " in " << dtype);
      const TemporaryFolder folder;
      const std::string hf = folder.file("hf"), checkpoint = folder.file("checkpoint"), out = folder.file("out");
      HuggingFaceFolder model = tiny_llama();
      model.set_dtype(dtype);
      model.config["architectures"] = {architecture};
      model.config["model_type"] = architecture == "LlamaForCausalLM" ? "llama" : "mistral";
      model.config["sliding_window"] = nullptr;
      model.config["a_key_of_others"] = {1, "x"};
      model.write(hf, 2);
      write_text(hf + "/tokenizer_config.json", "{\"bos_token\": \"a\"}");
      write_text(hf + "/generation_config.json", "{\"eos_token_id\": [3, 5], \"top_p\": 0.9}");
      run_ok("import " + hf + " --out " + checkpoint);
      run_ok("export " + checkpoint + " --out " + out + (dtype == "F32" ? " --dtype f32" : ""));

      const Json before = json_of(hf + "/config.json"), after = json_of(out + "/config.json");
      for (const auto& [key, value] : before.items()) {
        INFO(key);
        if (key != "dtype" && key != "torch_dtype") CHECK(after[key] == value);
      }
      CHECK(after["torch_dtype"] == (dtype == "F32" ? "float32" : "bfloat16"));
      CHECK(json_of(out + "/generation_config.json") == json_of(hf + "/generation_config.json"));
      const WeightIndex came(hf), left(out);
      REQUIRE(came.count() == left.count());
      came.for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
        INFO(entry.name);
        CHECK(same_tensor(file, entry.name, left.file_of(entry.name), entry.name));
      });
      // As NSA it can leave with its code only.
      const std::string nsa = folder.file("nsa"), out_nsa = folder.file("out_nsa");
      run_ok("import " + hf + " --attention nsa --set nsa.w=32 --out " + nsa);
      run_ok("export " + nsa + " --out " + out_nsa);
      CHECK(json_of(out_nsa + "/config.json")["model_type"] == "triad");
      CHECK(json_of(out_nsa + "/config.json")["nsa"]["w"] == 32);
      CHECK(json_of(out_nsa + "/generation_config.json") == json_of(hf + "/generation_config.json"));
    }
}

TEST_CASE("export: SmolLM3 stays itself if all its layers rotate, and adapters leave for what was imported alone",
          "[export]") {
  const TemporaryFolder folder;
  const std::string hf = folder.file("hf"), base = folder.file("base"), out = folder.file("out");
  HuggingFaceFolder model = tiny_llama();
  model.config["architectures"] = {"SmolLM3ForCausalLM"};
  model.config["model_type"] = "smollm3";
  model.config["no_rope_layers"] = {1, 1};
  model.config["tie_word_embeddings"] = false;
  model.write(hf);
  run_ok("import " + hf + " --out " + base);
  run_ok("export " + base + " --out " + out);
  CHECK(json_of(out + "/config.json")["architectures"] == Json::array({"SmolLM3ForCausalLM"}));
  CHECK(json_of(out + "/config.json")["no_rope_layers"] == Json::array({1, 1}));
  CHECK(has(run_ok("inspect " + hf), "rope default of theta"));
  CHECK_FALSE(has(run_ok("inspect " + hf), "no rotation"));
  struct Case {
    std::string sets;
    bool same;
  };
  for (const auto& [sets, same] : std::initializer_list<Case>{
           {"", true}, {"--set model.nope_layers=1:2", false}, {"--set model.rope_theta=77", false}}) {
    INFO(sets);
    const std::string run = folder.file("run"), adapters = folder.file("adapters");
    run_ok("train " + base + "/config.json --overwrite --set train.steps=1 --set train.init_from=" + base +
           " --set train.lora.rank=2 --set data.kind=synthetic --set train.seq_len=16 "
           "--set runtime.device=cpu --set log.out_dir=" +
           run + " " + sets);
    const Outcome adapter = run_program("export " + run + " --adapter --out " + adapters);
    INFO(adapter.output);
    CHECK(adapter.exit_code == (same ? 0 : 1));
    CHECK(has(adapter.output, "the imported model, to which PEFT adds the adapters, computes something else") != same);
    CHECK(fs::exists(adapters) == same);
    fs::remove_all(adapters);
    if (!has(sets, "nope")) continue;
    run_ok("export " + run + " --out " + adapters);
    CHECK(has(read_text(adapters + "/README.md"), "dense, no rotation in layers 1:2"));
    CHECK(has(run_ok("inspect " + adapters), ", no rotation in layers 1:2"));
    fs::remove_all(adapters);
  }
}

TEST_CASE("export: bf16 rounds to nearest even; large weights are split and indexed", "[export]") {
  const Exported e("", "--file-gb 2e-5");  // 20,000 bytes
  const SafetensorsFile ours(e.checkpoint + "/model.safetensors");
  const WeightIndex left(e.out);
  CHECK(left.files().size() > 3);
  CHECK(left.count() == ours.entries().size());
  CHECK(!fs::exists(e.out + "/model.safetensors"));
  for (const SafetensorsFile& file : left.files()) {
    int64_t bytes = 0;
    for (const TensorEntry& entry : file.entries()) bytes += entry.bytes();
    INFO(file.path());
    CHECK((bytes <= 20000 || file.entries().size() == 1));
    CHECK(has(file.path(), fmt::format("-of-{:05}.safetensors", left.files().size())));
  }
  int64_t total = 0;
  for (const TensorEntry& entry : ours.entries()) {
    const std::string name = entry.name == "lm_head.weight" ? entry.name : "model." + entry.name;
    const TensorEntry* const found = left.find(name);
    REQUIRE(found != nullptr);
    INFO(entry.name);
    CHECK(found->dtype == "BF16");
    const std::vector<std::byte> wide = ours.read(entry), narrow = left.file_of(name).read(*found);
    total += found->bytes();
    bool equal = true;
    for (int64_t i = 0; i < entry.numel(); ++i)
      equal = equal && bf16(reinterpret_cast<const float*>(wide.data())[i]).bits ==
                           reinterpret_cast<const bf16*>(narrow.data())[i].bits;
    CHECK(equal);
  }
  CHECK(json_of(e.out + "/model.safetensors.index.json")["metadata"]["total_size"] == total);
}

TEST_CASE("export: format triad is a checkpoint with the same weights", "[export]") {
  const Exported e("", "--format triad");
  for (const char* file : {"/model.safetensors", "/state.json"})
    CHECK(read_text(e.out + file) == read_text(e.checkpoint + file));
  CHECK(count_files(e.out) == 2);
  const std::string text = " --device cpu --temperature 0 --tokens 8 --prompt A";
  CHECK(run_ok("generate --checkpoint " + e.out + text) == run_ok("generate --checkpoint " + e.checkpoint + text));
  const std::string small = e.folder.file("small");
  run_ok("export " + e.checkpoint + " --format triad --dtype bf16 --out " + small);
  CHECK(SafetensorsFile(small + "/model.safetensors").at("embed.weight").dtype == "BF16");
}

TEST_CASE("export: what another process may be writing stays, with a warning", "[export]") {
  const Exported model;
  const std::string left = model.folder.file("next.tmp.471101234567890123456789");
  fs::create_directories(left);
  write_text(left + "/.triad_unfinished", "");
  const auto stays = [&](const std::string& before, const std::string& why) {
    const std::string out = model.folder.file("next");
    const Outcome outcome =
        triad::test::run_command(before + TRIAD_PROGRAM " export " + model.checkpoint + " --out " + out);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(has(outcome.output, "triad: " + left + ": " + why));
    CHECK(fs::exists(left + "/.triad_unfinished"));
    fs::remove_all(out);
  };
  stays(triad::test::with_faults("TRIAD_NO_LOCKS=1"), "is not removed, because it cannot be locked");
  fs::permissions(left, fs::perms::owner_write | fs::perms::owner_exec);
  stays(geteuid() == 0 ? "setpriv --bounding-set=-dac_override,-dac_read_search,-fowner " : "",
        "the folder cannot be opened: Permission denied");
  fs::permissions(left, fs::perms::owner_all);
  run_ok("export " + model.checkpoint + " --out " + model.folder.file("next"));
  CHECK_FALSE(fs::exists(left));
}

TEST_CASE("export: bad input is refused, and nothing is left", "[export]") {
  const TemporaryFolder folder;
  const std::string checkpoint = folder.file("checkpoint"), out = folder.file("place/out");
  run_ok("init " + kTiny + " --out " + checkpoint);
  fs::create_directories(folder.file("place"));
  const auto refused = [&](const std::string& args, int exit_code, const std::vector<std::string>& words,
                           const std::string& environment = "") {
    const Outcome outcome = run_program("export " + args, environment);
    INFO(environment << " triad export " << args << "\n" << outcome.output);
    CHECK(outcome.exit_code == exit_code);
    for (const std::string& word : words) {
      INFO("expected: " << word);
      CHECK(has(outcome.output, word));
    }
    CHECK(count_files(folder.file("place")) == 0);
  };
  refused(checkpoint + " --out " + checkpoint, 1, {"--out " + checkpoint, "the folder that is read"});
  refused(checkpoint + " --out " + checkpoint + "/../checkpoint/", 1, {"the folder that is read"});
  refused(checkpoint + " --out " + folder.path(), 1, {"not empty"});
  refused(checkpoint + " --out " + checkpoint + "/state.json", 1, {"state.json", "no folder"});
  refused(checkpoint + " --out " + out + " --format gguf", 2, {"gguf", "hf or triad"});
  refused(checkpoint + " --out " + out + " --dtype f16", 2, {"f16", "bf16 or f32"});
  refused(checkpoint + " --out " + out + " --file-gb 0", 2, {"--file-gb"});
  refused(checkpoint + " --out " + out + " --file-gb 1 --format triad", 2, {"--file-gb is 1", "--format triad"});
  refused(checkpoint + " --out \"\"", 2, {"--out is empty"});
  fs::create_directory_symlink(folder.file("nowhere"), folder.file("broken"));
  refused(checkpoint + " --out " + folder.file("broken"), 1, {folder.file("broken"), "leads to no folder"});
  refused(folder.file("none") + " --out " + out, 1, {folder.file("none")});
  refused(checkpoint + " --out /proc/triad/out", 1, {"/proc/triad"});
  refused(checkpoint + " --out " + out, 1, {"model.safetensors"}, "ulimit -f 8; ");

  // Weights that are damaged in one tensor.
  const std::string weights = checkpoint + "/model.safetensors";
  const SafetensorsFile whole(weights);
  struct Damage {
    std::string tensor;
    float value;
    std::vector<int64_t> shape;  // empty: the tensor's own
    std::string options;
    std::vector<std::string> words;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const Damage& damage : std::initializer_list<Damage>{
           {"blocks.1.norm2.weight", nan, {}, "", {"blocks.1.norm2.weight", "nan at index 0"}},
           {"norm_f.weight", inf, {}, "--dtype f32", {"norm_f.weight", "inf at index 0"}},
           {"norm_f.weight", nan, {}, "--format triad", {"norm_f.weight", "nan at index 0"}},
           {"norm_f.weight", 3.4e38F, {}, "", {"norm_f.weight", "too large for bf16", "--dtype f32"}},
           {"norm_f.weight", 1, {31}, "", {"norm_f.weight", "F32[31]", "[32]"}},
           {"norm_f.weight", 1, {0}, "", {"norm_f.weight", "no tensor"}}}) {
    INFO(damage.tensor << " " << damage.options);
    std::vector<std::vector<std::byte>> bytes;
    std::vector<HostTensor> tensors;
    for (const TensorEntry& entry : whole.entries()) {
      const bool here = entry.name == damage.tensor;
      if (here && damage.shape == std::vector<int64_t>{0}) continue;
      bytes.push_back(whole.read(entry));
      Shape shape;
      for (const int64_t axis : here && !damage.shape.empty() ? damage.shape : entry.shape)
        shape.dim[static_cast<size_t>(shape.rank++)] = axis;
      if (here) reinterpret_cast<float*>(bytes.back().data())[0] = damage.value;
      tensors.push_back({{entry.name, DType::f32, shape}, bytes.back().data()});
    }
    const std::string damaged = folder.file("damaged");
    fs::create_directories(damaged);
    fs::copy_file(checkpoint + "/state.json", damaged + "/state.json", fs::copy_options::overwrite_existing);
    write_safetensors(damaged + "/model.safetensors", tensors);
    refused(damaged + " --out " + out + " " + damage.options, 1, damage.words);
  }
}
