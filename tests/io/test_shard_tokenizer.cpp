// Token shards' tokenizer: what training reads from manifest.json, contradictions between manifest and config, and
// evaluation on another tokenizer's shards.
#include <filesystem>

#include "io/data/shard_manifest.h"
#include "io/data/shards.h"
#include "io/file.h"
#include "io/json_config.h"
#include "tests/support/checked_run.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/run/data_source.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// Two shard folders: `words`, made with the BPE tokenizer tokenizer.json (about 300 tokens), and `bytes`, made with the
// byte tokenizer.
class Shards {
 public:
  Shards() {
    const std::string known_path = TRIAD_SOURCE_DIR "/tests/io/known_tokens.json";
    json_ = parse_json(read_file(known_path), known_path)[0]["tokenizer"];
    write_text(file("tokenizer.json"), json_.dump());
    std::string text;
    for (int i = 0; i < 150; ++i) text += fmt::format("{{\"text\":\"Line {} of a text, it's all there is.\"}}\n", i);
    write_text(file("a.jsonl"), text);
    const std::string input = " --val-fraction 0.2 --input " + file("a.jsonl");
    run_ok("data --tokenizer " + file("tokenizer.json") + input + " --out " + words());
    run_ok("data" + input + " --out " + bytes());
  }
  std::string file(const std::string& name) const { return folder_.file(name); }
  std::string words() const { return file("words"); }
  std::string bytes() const { return file("bytes"); }
  // Writes a tokenizer that differs from the shards' tokenizer, and returns its path.
  std::string other_tokenizer() {
    Json other = json_;
    other["model"]["merges"].erase(3);
    fs::create_directories(file("other"));
    write_text(file("other/tokenizer.json"), other.dump());
    return file("other/tokenizer.json");
  }
  // Arguments for a two-step run that saves a checkpoint after each.
  std::string train(const std::string& out, const std::string& paths, const std::string& more = "") const {
    return train_args(file(out), "--set data.kind=shards --set data.paths='" + paths +
                                     "' --set model.vocab_size=512 --set train.save_every=1 --set train.steps=2 " +
                                     more);
  }

 private:
  TemporaryFolder folder_;
  Json json_;
};

Json data_of(const std::string& path) { return parse_json(read_file(path), path)["data"]; }

Config shard_config(const std::string& paths, const std::vector<std::string>& sets = {}) {
  std::vector<std::string> all = {"data.kind=shards", "data.paths=" + paths, "model.vocab_size=512"};
  all.insert(all.end(), sets.begin(), sets.end());
  Config config = load_config(kTiny, all).config;
  resolve_shards(config);
  return config;
}

}  // namespace

TEST_CASE("shard tokenizer: a resume takes shards and tokenizer under another path", "[data]") {
  Shards shards;
  run_ok(shards.train("run", shards.words()));
  fs::rename(shards.words(), shards.file("moved"));
  const std::string paths = shards.file("moved");
  run_ok(shards.train("again", paths, "--set train.steps=3 --resume " + shards.file("run/checkpoints/step_2")));
  run_ok("train --resume " + shards.file("run") + " --set train.steps=3 --set data.paths=" + paths);
  CHECK(same_file(shards.file("run") + kWeights, shards.file("again") + kWeights));
  CHECK(data_of(shards.file("run/config.json"))["tokenizer"] == paths + "/tokenizer.json");
  CHECK(data_of(shards.file("run/config.json"))["val_paths"] == Json::array({paths}));
  const std::string other = " --set data.tokenizer=" + shards.other_tokenizer();
  refused("train --resume " + shards.file("run") + " --set train.steps=4" + other, 1, {"data.tokenizer"});
}

TEST_CASE("shard tokenizer: a run reads the tokenizer and the validation shards from the manifest", "[data]") {
  const Shards shards;
  const Json manifest = parse_json(read_file(shards.words() + "/manifest.json"), "manifest");
  REQUIRE(manifest["tokenizer_files"].size() == 1);
  CHECK(manifest["tokenizer_files"][0]["file"] == "tokenizer.json");
  CHECK(manifest["tokenizer_files"][0]["crc32"].get<std::string>().size() == 8);
  for (const std::string& paths : {shards.words(), shards.words() + "/train_*.bin"}) {
    const std::string out = shards.file("run");
    run_ok(shards.train("run", paths, "--overwrite --set train.eval_every=2"));
    const Json data = data_of(out + "/config.json");
    CHECK(data["tokenizer"] == shards.words() + "/tokenizer.json");
    CHECK(data["val_paths"] == Json::array({shards.words()}));
    CHECK(read_file(out + "/checkpoints/step_2/tokenizer.json") == read_file(shards.file("tokenizer.json")));
    run_ok(shards.train("run", paths, "--set train.steps=3 --set train.eval_every=2 --resume latest"));
  }
  const auto split = open_data(shard_config(shards.words()));
  CHECK(split.train.size() == manifest["train"]["tokens"]);
  CHECK(split.val.size() == manifest["val"]["tokens"]);
  CHECK(split.warning.empty());
}

TEST_CASE("shard tokenizer: a config that contradicts the manifest is refused", "[data]") {
  Shards shards;
  const std::string manifest = shards.words() + "/manifest.json", own = shards.words() + "/tokenizer.json";
  const std::string other = shards.other_tokenizer();
  const auto with = [&](const std::string& more) { return shards.train("run", shards.words(), more); };
  refused(with("--set data.tokenizer=byte"), 2, {"data.tokenizer is byte", own, manifest});
  refused(with("--set data.tokenizer=" + other), 2, {"data.tokenizer is " + other, own, manifest});
  refused(with("--set model.vocab_size=256"), 2, {"model.vocab_size is 256", own, manifest});
  refused(with("--set data.val_paths=" + shards.bytes()), 2, {own, shards.bytes() + "/manifest.json", "byte"});
  refused(shards.train("run", "[\"" + shards.words() + "\",\"" + shards.bytes() + "\"]"), 2,
          {own, shards.bytes() + "/manifest.json", "byte"});
  CHECK(!fs::exists(shards.file("run")));
  // The same tokenizer under another path is no contradiction.
  run_ok(with("--set data.tokenizer=" + shards.file("tokenizer.json")));
  CHECK(data_of(shards.file("run/config.json"))["tokenizer"] == shards.file("tokenizer.json"));

  write_text(own, read_file(other));
  refused(with("--overwrite"), 1, {manifest, own, "any more"});
  fs::remove(own);
  refused(with("--overwrite"), 1, {manifest, own, "gone"});
  run_ok(with("--overwrite --set data.tokenizer=" + shards.file("tokenizer.json")));
  write_text(manifest, "{\"format\":\"llm.c u16\",\"tokenizer\":3,\"train\":[]}");
  refused(with("--overwrite"), 1, {manifest, "damaged"});
}

TEST_CASE("shard tokenizer: eval refuses shards of another tokenizer", "[data]") {
  const Shards shards;
  run_ok(shards.train("words_run", shards.words()));
  run_ok(shards.train("bytes_run", shards.bytes()));
  const auto eval = [&](const std::string& run, const std::string& data) {
    return "eval --json --device cpu --checkpoint " + shards.file(run) + " --data '" + data + "/val_*.bin'";
  };
  refused(eval("words_run", shards.bytes()), 1,
          {shards.bytes() + "/manifest.json", "byte", "words_run/tokenizer.json"});
  refused(eval("bytes_run", shards.words()), 1, {shards.words() + "/manifest.json", "byte", "words/tokenizer.json"});
  // With the run's own tokenizer bits per byte are computed, even if the model's vocabulary is larger than the
  // tokenizer's.
  for (const char* kind : {"words", "bytes"}) {
    const Outcome own = run_program(eval(std::string(kind) + "_run", shards.file(kind)));
    INFO(own.output);
    REQUIRE(own.exit_code == 0);
    CHECK(parse_json(own.standard_output, "eval")["bits_per_byte"].is_number());
  }
}

TEST_CASE("shard tokenizer: for shards without a manifest it is unknown until the config names it", "[data]") {
  const Shards shards;
  fs::create_directories(shards.file("foreign"));
  fs::copy_file(shards.words() + "/train_000000.bin", shards.file("foreign/train_000000.bin"));
  const std::string paths = shards.file("foreign/train_000000.bin");
  const Outcome trained = run_program(shards.train("run", paths));
  INFO(trained.output);
  REQUIRE(trained.exit_code == 0);
  const std::string warning = "the tokenizer of the shards in " + paths + " is not known";
  const size_t first_warning = trained.output.find(warning);
  CHECK(first_warning != std::string::npos);
  CHECK(trained.output.find("is not known", first_warning + warning.size()) ==
        std::string::npos);  // the warning occurs once
  CHECK(data_of(shards.file("run/config.json"))["tokenizer"] == "");
  const std::string checkpoint = " --device cpu --checkpoint " + shards.file("run");
  refused("generate --tokens 3 --prompt x" + checkpoint, 0, {"not known", "bytes"});
  const Outcome evaluated = run_program("eval --json --data '" + shards.words() + "/*.bin'" + checkpoint);
  INFO(evaluated.output);
  REQUIRE(evaluated.exit_code == 0);
  CHECK(parse_json(evaluated.standard_output, "eval")["bits_per_byte"].is_null());
  // A resume may name the tokenizer, because that changes no token in the run.
  run_ok(shards.train("run", paths,
                      "--resume latest --set train.steps=3 --set data.tokenizer=" + shards.file("tokenizer.json")));
  CHECK(fs::exists(shards.file("run/checkpoints/step_3/tokenizer.json")));
  // A manifest that is added later contains validation shards, and so another split. A resume is refused, unless it
  // uses the run's own config.
  for (const char* name : {"manifest.json", "tokenizer.json", "val_000000.bin"})
    fs::copy_file(shards.words() + "/" + name, shards.file("foreign/") + name);
  refused(shards.train("run", paths, "--resume latest --set train.steps=4"), 1, {"data.val.tokens", "val_000000.bin"});
  run_ok("train --resume " + shards.file("run") + " --set train.steps=4");
}

TEST_CASE("shard tokenizer: which shards are for validation", "[data]") {
  const Shards shards;
  const std::string &words = shards.words(), val = words + "/val_000000.bin";
  using Paths = std::vector<std::string>;
  CHECK(shard_config(words).data.val_paths == Paths{words});
  CHECK(shard_config(words, {"data.val_paths=" + val}).data.val_paths == Paths{val});
  // The glob names all files, so all are for training, and the last tokens are held out.
  CHECK(shard_config(words + "/*.bin").data.val_paths.empty());
  CHECK(shard_config(val).data.val_paths.empty());
  fs::create_directories(shards.file("links"));
  fs::create_symlink(words + "/train_000000.bin", shards.file("links/x.bin"));
  const Config linked = shard_config(shards.file("links/x.bin"));
  CHECK(linked.data.tokenizer == fs::canonical(words).string() + "/tokenizer.json");
  CHECK(linked.data.val_paths == Paths{fs::canonical(words).string()});

  // Older versions' manifests don't list the tokenizer's files. Then tokenizer.json in the same folder is used, if it
  // exists.
  const std::string path = words + "/manifest.json";
  Json manifest = parse_json(read_file(path), path);
  manifest.erase("tokenizer_files");
  write_text(path, manifest.dump());
  CHECK(shard_config(words).data.tokenizer == words + "/tokenizer.json");
  fs::remove(words + "/tokenizer.json");
  CHECK(shard_config(words).data.tokenizer.empty());
  fs::remove(val);  // mimics a user who copied only the training shards
  CHECK(shard_config(words).data.val_paths.empty());
  write_text(path, "{\"of\":\"another program\"}");
  CHECK(!read_manifest(words));
  CHECK(shard_config(words + "/*.bin").data.tokenizer.empty());
  check_error([&] { shard_config(words); }, {words, "folder"});
  fs::remove(path);
  CHECK(!read_manifest(words));
}
