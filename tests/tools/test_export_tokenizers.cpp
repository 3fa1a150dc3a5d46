// triad export: with which tokenizer, chat template, special tokens and model card a model leaves.
#include <fmt/format.h>

#include <filesystem>

#include "io/tokenizer/tokenizer.h"
#include "tests/support/checked_run.h"
#include "tests/support/huggingface_folder.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using triad::test::bpe_tokenizer_json;
using triad::test::has;
using triad::test::HuggingFaceFolder;
using triad::test::json_of;
using triad::test::kBpeTokens;
using triad::test::kTiny;
using triad::test::Outcome;
using triad::test::read_text;
using triad::test::run_ok;
using triad::test::run_program;
using triad::test::TemporaryFolder;
using triad::test::tiny_llama;
using triad::test::write_text;
namespace fs = std::filesystem;

TEST_CASE("export: a model that was trained on tokens of another tokenizer leaves with that one alone", "[export]") {
  const TemporaryFolder folder;
  HuggingFaceFolder model = tiny_llama();
  model.set_vocabulary(kBpeTokens);
  model.config["bos_token_id"] = 5;
  model.config["eos_token_id"] = 6;
  model.config["pad_token_id"] = 7;
  const std::string hf = folder.file("hf"), checkpoint = folder.file("checkpoint"), bpe = hf + "/tokenizer.json";
  model.write(hf);
  write_text(bpe, bpe_tokenizer_json());
  write_text(hf + "/tokenizer_config.json", "{\"eos_token\": \"imported\"}");
  write_text(hf + "/special_tokens_map.json", "{\"eos_token\": \"imported\"}");
  write_text(hf + "/added_tokens.json", "{\"imported\": 6}");
  write_text(hf + "/generation_config.json", "{\"eos_token_id\": [6], \"top_p\": 0.9}");
  run_ok("import " + hf + " --no-tokenizer --out " + checkpoint);
  const auto exported = [&](const std::string& name, const std::string& tokenizer) {
    run_ok("train " + checkpoint + "/config.json --set train.steps=1 --set train.seq_len=32 --set train.lr=1e-6 " +
           "--set runtime.device=cpu --set data.tokenizer=" + tokenizer + " --set log.out_dir=" + folder.file(name));
    run_ok("export " + folder.file(name) + " --out " + folder.file(name + "_out"));
    return folder.file(name + "_out");
  };
  const std::string bytes = exported("bytes", "byte");
  CHECK(read_text(bytes + "/tokenizer.json") == byte_tokenizer_json());
  CHECK(json_of(bytes + "/tokenizer_config.json")["eos_token"] == std::string(1, '\0'));
  CHECK(json_of(bytes + "/special_tokens_map.json")["eos_token"] == std::string(1, '\0'));
  CHECK(!fs::exists(bytes + "/added_tokens.json"));
  CHECK(json_of(bytes + "/generation_config.json") ==
        Json({{"_from_model_config", true}, {"bos_token_id", 0}, {"eos_token_id", 0}}));
  const Json config = json_of(bytes + "/config.json");
  CHECK(config["architectures"] == Json::array({"LlamaForCausalLM"}));
  CHECK(config["bos_token_id"] == 0);
  CHECK(config["eos_token_id"] == 0);
  CHECK(!config.contains("pad_token_id"));
  CHECK(has(read_text(bytes + "/README.md"), "tokenizer.bos_token"));

  // The tokenizer that the import left out is still the model's own, and so are tokens without a tokenizer.
  const std::string own = exported("own", bpe), none = exported("none", "none");
  CHECK(read_text(own + "/tokenizer.json") == bpe_tokenizer_json());
  for (const char* file : {"/tokenizer_config.json", "/special_tokens_map.json", "/added_tokens.json"}) {
    CHECK(read_text(own + file) == read_text(hf + file));
    CHECK(!fs::exists(none + file));
  }
  for (const std::string& out : {own, none}) {
    CHECK(json_of(out + "/generation_config.json") == json_of(hf + "/generation_config.json"));
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
      CHECK(json_of(out + "/config.json")[key] == model.config[key]);
  }
}

TEST_CASE("export: a chat_template leaves only with the model that it came with", "[export]") {
  const TemporaryFolder folder;
  HuggingFaceFolder model = tiny_llama();
  model.set_vocabulary(kBpeTokens);
  const std::string hf = folder.file("hf"), checkpoint = folder.file("checkpoint"), run = folder.file("run");
  model.write(hf);
  write_text(hf + "/tokenizer.json", bpe_tokenizer_json());
  write_text(hf + "/tokenizer_config.json", R"({"chat_template": "{{ messages }}", "eos_token": "x"})");
  write_text(hf + "/chat_template.jinja", "{{ messages }}");
  write_text(hf + "/chat_template.json", R"({"chat_template": "{{ messages }}"})");
  run_ok("import " + hf + " --out " + checkpoint);
  const std::string kept = run_ok("export " + checkpoint + " --out " + folder.file("kept"));
  CHECK(!has(kept, "chat_template"));
  for (const char* file : {"/tokenizer_config.json", "/chat_template.jinja", "/chat_template.json"})
    CHECK(read_text(folder.file("kept") + file) == read_text(hf + file));
  run_ok("train " + checkpoint + "/config.json --set train.steps=1 --set train.seq_len=32 --set train.lr=1e-6 " +
         "--set train.save_every=1 --set runtime.device=cpu --set log.out_dir=" + run);
  for (const std::string& from : {run, run + "/checkpoints/step_1", run + "/model.safetensors"}) {
    INFO(from);
    const std::string out = folder.file("out");
    fs::remove_all(out);
    CHECK(has(run_ok("export " + from + " --out " + out), out + " has no chat_template"));
    CHECK(!fs::exists(out + "/chat_template.jinja"));
    CHECK(!fs::exists(out + "/chat_template.json"));
    CHECK(json_of(out + "/tokenizer_config.json") == Json({{"eos_token", "x"}}));
  }
}

TEST_CASE("export: tokenizers and the model card", "[export]") {
  const TemporaryFolder folder;
  CHECK(!byte_tokenizer_json().empty());
  write_text(folder.file("tokenizer.json"), byte_tokenizer_json());
  CHECK(make_tokenizer(folder.file("tokenizer.json"))->name() == "byte");

  const std::string run = folder.file("run"), out = folder.file("out");
  std::string corpus;
  for (int i = 0; i < 400; ++i) corpus += fmt::format("{} sheep; ", i * i);
  write_text(folder.file("corpus"), corpus);
  run_ok("train " + kTiny + " --set runtime.device=cpu --set data.kind=text --set train.steps=3 " +
         R"(--set 'train.stages=[{"steps":2,"seq_len":24},{"steps":1,"lr_factor":0.5}]' --set train.optimizer=muon )" +
         "--set train.schedule=wsd --set train.decay_fraction=0 " + "--set train.eval_every=3 --set 'data.paths=[\"" +
         folder.file("corpus") + "\"]' --set log.out_dir=" + run);
  run_ok("export " + run + " --out " + out);
  CHECK(read_text(out + "/tokenizer.json") == byte_tokenizer_json());
  const Json tokenizer = json_of(out + "/tokenizer_config.json"), generation = json_of(out + "/generation_config.json");
  CHECK(tokenizer["eos_token"] == std::string(1, '\0'));
  CHECK(generation["eos_token_id"] == 0);
  const std::string card = read_text(out + "/README.md");
  const Json metrics = json_of(run + "/metrics.json");
  INFO(card);
  CHECK(has(card, "| optimizer steps | 3 |"));
  CHECK(has(card, "| optimizer | muon |"));
  CHECK(has(card, "| learning rate | 0.001 after 2 steps of warm-up, then constant |"));
  CHECK(has(card, "stage 2 of 2: step 3 of 2 x 48 tokens, learning rate x 0.5 |"));
  const double loss = metrics["val_loss"].get<double>();
  CHECK(has(card, fmt::format("| validation loss | {:.4f} nats", loss)));
  CHECK(!has(card, "bits per byte"));  // a loss per token says nothing about bytes
  CHECK(has(card, "Trained on text data. The checkpoint's state.json holds all hyperparameters."));
  CHECK(!has(card, folder.path()));
  // As a checkpoint a run's folder keeps its step and tokens, from metrics.json or the newest checkpoint.
  for (const char* name : {"triad", "triad_again"}) {
    run_ok("export " + run + " --format triad --out " + folder.file(name));
    const Json state = json_of(folder.file(name) + "/state.json");
    CHECK(state["step"] == 3);
    CHECK(state["tokens"] == metrics["tokens"]);
    fs::remove(run + "/metrics.json");
  }

  // A tokenizer with files goes along; one that does not fit is refused.
  write_text(folder.file("bpe.json"), bpe_tokenizer_json());
  fs::create_directories(folder.file("bpe"));
  fs::rename(folder.file("bpe.json"), folder.file("bpe/tokenizer.json"));
  const std::string set = " --set data.tokenizer=" + folder.file("bpe/tokenizer.json");
  run_ok("init " + kTiny + set + " --set model.vocab_size=440 --out " + folder.file("a"));
  run_ok("export " + folder.file("a") + " --out " + folder.file("a_out"));
  CHECK(read_text(folder.file("a_out/tokenizer.json")) == bpe_tokenizer_json());
  CHECK(json_of(folder.file("a_out/tokenizer_config.json"))["tokenizer_class"] == "PreTrainedTokenizerFast");
  const std::string untrained = read_text(folder.file("a_out/README.md"));
  CHECK(has(untrained, "not been trained by Triad"));
  CHECK(!has(untrained, "Trained on"));
  CHECK(!has(untrained, "hyperparameters"));
  run_ok("init " + kTiny + set + " --out " + folder.file("b"));
  const Outcome refused = run_program("export " + folder.file("b") + " --out " + folder.file("b_out"));
  INFO(refused.output);
  CHECK(refused.exit_code == 1);
  CHECK(has(refused.output, "model.vocab_size is 256"));
}
