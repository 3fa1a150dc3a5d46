// eval, score and generate compute what training's forward does, whatever a layer attends to: `triad grads` runs that
// forward, over a text in which blocks are chosen. And exported models that no class of transformers holds come back.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "io/json_config.h"
#include "io/safetensors.h"
#include "tests/support/checked_run.h"
#include "tests/support/grads_run.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using namespace triad::test;

namespace {

// Lists hold 3 of up to 32 blocks. Large weights, so that blocks and tokens differ clearly.
const std::string kShape =
    "--set model.init_std=0.15 --set model.d_v=12 --set nsa.n_sel=3 --set nsa.init_blocks=0 --set nsa.w=12 ";
const std::string kIndex = "--set nsa.selector=index --set nsa.d_index=6 ";
struct Kind {
  std::string name, sets;
};
const std::vector<Kind> kKinds = {
    {"compressed", ""},
    {"index, norms", kIndex + "--set model.qk_norm=true"},
    {"one softmax", kIndex + "--set nsa.branches=sel"},
    {"window", "--set nsa.branches=win"},
    {"one list for 4 tokens", "--set nsa.select_every=4"},
    {"by layer",
     "--set model.n_layers=4 --set model.dense_layers=0:1 --set model.nope_layers=0:1,2:4 --set "
     "'nsa.layers=[{\"layers\":\"1:2\",\"branches\":\"win\"},"
     "{\"layers\":\"2:3\",\"branches\":\"sel\",\"selector\":\"index\",\"d_index\":8,\"local_blocks\":1},"
     "{\"layers\":\"3:4\",\"selector\":\"index\"}]'"}};

std::string init_kind(const TemporaryFolder& folder, const Kind& kind) {
  run_ok("init " + kTiny + " " + kShape + kind.sets + " --out " + folder.file("model"));
  return folder.file("model");
}

std::string text_of(size_t length) {
  std::string text;
  for (int i = 0; text.size() < length; ++i) text += fmt::format("{} sheep; ", i * i);
  return text.substr(0, length);
}
// Of each token of "<end of text>" + text but the last: the log-probabilities of all tokens after it.
std::vector<std::vector<double>> log_probabilities(const TemporaryFolder& folder, const std::string& text) {
  std::vector<int32_t> tokens = {0};
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  write_shard(folder.file("tokens.bin"), tokens);
  run_ok(fmt::format("grads --device cpu --dtype f64 --checkpoint {} --tokens {} --batch 1 --seq {} --out {}",
                     folder.file("model"), folder.file("tokens.bin"), text.size(), folder.file("grads")));
  const std::vector<double> logits = read_grads(folder.file("grads")).at("logits").floats;
  const size_t vocab = logits.size() / text.size();
  std::vector<std::vector<double>> rows;
  for (size_t t = 0; t < text.size(); ++t) {
    std::vector<double> row(logits.begin() + static_cast<int64_t>(t * vocab),
                            logits.begin() + static_cast<int64_t>((t + 1) * vocab));
    double sum = 0;
    for (const double x : row) sum += std::exp(x);
    for (double& x : row) x -= std::log(sum);
    rows.push_back(std::move(row));
  }
  return rows;
}
unsigned char byte_at(const std::string& text, size_t i) { return static_cast<unsigned char>(text[i]); }

}  // namespace

TEST_CASE("verbs: eval and score have the losses of training's forward, with any attention", "[score]") {
  for (const Kind& kind : kKinds) {
    INFO(kind.name);
    const TemporaryFolder folder;
    const std::string from = " --device cpu --dtype f64 --checkpoint " + init_kind(folder, kind), text = text_of(250);
    const auto rows = log_probabilities(folder, text);
    double whole = 0, end = 0;
    for (size_t t = 0; t < text.size(); ++t) {
      const double each = rows[t][byte_at(text, t)];
      whole += each;
      if (t >= 200) end += each;
    }
    write_text(folder.file("text"), text);
    const Json evaluated =
        parse_json(run_ok("eval --json --seq 400" + from + " --data " + folder.file("text")), "eval");
    CHECK(evaluated["positions"] == text.size());
    CHECK(evaluated["loss"].get<double>() == Approx(-whole / static_cast<double>(text.size())).epsilon(1e-9));
    const Json request = {{"context", text.substr(0, 200)}, {"continuation", text.substr(200)}};
    write_text(folder.file("requests"), request.dump() + "\n");
    const Json scored = parse_json(run_ok("score --seq 400" + from + " --jsonl " + folder.file("requests")), "score");
    CHECK(scored["logprob"].get<double>() == Approx(end).epsilon(1e-9));
  }
}

TEST_CASE("verbs: generate chooses the tokens of training's forward, with any attention", "[generate]") {
  for (const Kind& kind : kKinds) {
    INFO(kind.name);
    const TemporaryFolder folder;
    const std::string prompt = text_of(150), from = " --device cpu --dtype f64 --checkpoint " + init_kind(folder, kind);
    const std::string ids = fmt::format("0,{}", fmt::join(std::vector<int>(prompt.begin(), prompt.end()), ","));
    const Json generated = parse_json(
        run_ok("generate --json --temperature 0 --tokens 80 --context 400 --prompt-ids " + ids + from), "generate");
    std::string all = prompt;
    for (const Json& token : generated["tokens"]) all += static_cast<char>(token.get<int>());
    REQUIRE(all.size() > prompt.size() + 20);
    const auto rows = log_probabilities(folder, all);
    for (size_t t = prompt.size(); t < all.size(); ++t) {
      const auto best = std::max_element(rows[t].begin(), rows[t].end());
      REQUIRE(best - rows[t].begin() == byte_at(all, t));
    }
  }
}

TEST_CASE("export: a model with code of its own comes back through import, every tensor to the bit", "[export]") {
  std::vector<Kind> kinds = kKinds;
  kinds.push_back({"conv, sigmoid, shared, tied, gate_init",
                   "--set nsa.phi=conv --set nsa.gate=sigmoid --set nsa.shared_kv=true --set model.tie_embeddings=true "
                   "--set nsa.gate_init=[0.2,0.3,0.5] --set model.rope_scale=3 --set model.qkv_bias=true"});
  kinds.push_back({"mlp, swiglu, yarn",
                   "--set nsa.phi=mlp --set model.mlp=swiglu --set model.rope_scaling=yarn --set model.rope_factor=4 "
                   "--set model.rope_original_len=24 --set model.rope_beta_fast=20"});
  kinds.push_back({"llama3", "--set model.rope_scaling=llama3 --set model.rope_low_freq=2 --set model.rope_theta=500"});
  kinds.push_back({"dense, silu", "--set model.attention=dense"});
  for (const Kind& kind : kinds) {
    INFO(kind.name);
    const TemporaryFolder folder;
    const std::string model = init_kind(folder, kind), out = folder.file("out"), back = folder.file("back");
    run_ok("export " + model + " --dtype f32 --out " + out);
    run_ok("import " + out + " --out " + back);
    const SafetensorsFile before(model + "/model.safetensors"), after(back + "/model.safetensors");
    REQUIRE(before.entries().size() == after.entries().size());
    for (const TensorEntry& entry : before.entries()) {
      const TensorEntry* const other = after.find(entry.name);
      INFO(entry.name);
      REQUIRE(other != nullptr);
      CHECK(entry.str() == other->str());
      CHECK(before.read(entry) == after.read(*other));
    }
    const auto config_of = [](const std::string& path) {
      return parse_json(read_text(path + "/state.json"), path)["config"];
    };
    const Json ours = config_of(model), theirs = config_of(back);
    for (const char* group : {"model", "nsa"})
      if (ours.contains(group) && !(kind.name == "dense, silu" && group == std::string("nsa")))
        CHECK(ours[group] == theirs[group]);
    const std::string text =
        "generate --device cpu --temperature 0 --tokens 60 --context 300 --prompt '" + text_of(100) + "' --checkpoint ";
    CHECK(run_ok(text + model) == run_ok(text + back));
    run_ok("export " + back + " --dtype f32 --out " + folder.file("again"));
    const auto exported = [&](const std::string& path) {
      Json json = parse_json(read_text(path + "/config.json"), path);
      json.erase("max_position_embeddings");  // that of the config's train.seq_len, which import chooses anew
      return json;
    };
    CHECK(exported(out) == exported(folder.file("again")));
  }
}

TEST_CASE("import: what an exported model with code of its own cannot become", "[import]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("out"), to = " --out " + folder.file("to");
  run_ok("export " + init_kind(folder, kKinds.back()) + " --out " + out);
  const std::string seen = run_ok("inspect " + out);
  for (const char* word : {"TriadForCausalLM", "2 layers with NSA", "1 with a sliding window", "1 with dense attention",
                           "triad import takes it"}) {
    INFO(word << "\n" << seen);
    CHECK(seen.find(word) != std::string::npos);
  }
  refused("import " + out + to + " --attention dense", 2, {"--attention dense", "has NSA"});
  refused("import " + out + to + " --set nsa.w=9", 2, {"--set nsa.w is 9", "has 12"});
  refused("import " + out + to + " --set model.dense_layers=1:2", 2, {"model.dense_layers is \"1:2\"", "has \"0:1\""});
  run_ok("import " + out + to + " --attention nsa --set nsa.index_loss=0.5");
  const std::string path = out + "/config.json";
  const Json good = parse_json(read_text(path), path);
  struct Case {
    const char* key;
    Json value;
    std::vector<std::string> words;
  };
  for (const Case& bad : std::initializer_list<Case>{
           {"nsa", nullptr, {"config.json: nsa is missing", "dense_layers is [0]", "all 4 layers"}},
           {"nsa", {1}, {"config.json: nsa is [1]", "object"}},
           {"nsa", {{"l", 8}, {"k", 1}}, {"config.json", "nsa.k"}},
           {"dense_layers", {0, 4}, {"dense_layers is 4", "0 to 3"}},
           {"dense_layers", {1}, {"blocks.0.attn"}},
           {"nope_layers", {-1}, {"nope_layers is -1", "0 to 3"}},
           {"mlp", "relu", {"config.json", "mlp", "relu"}},
           {"v_head_dim", 0, {"v_head_dim is 0"}},
           {"rope", {{"scaling", "linear"}}, {"rope.scaling is \"linear\"", "llama3"}},
           {"rope", {{"theta", 0}}, {"rope.theta is 0"}}}) {
    Json changed = good;
    changed[bad.key] = bad.value;
    write_text(path, changed.dump());
    refused("import " + out + " --out " + folder.file("bad"), 1, bad.words);
  }
}
