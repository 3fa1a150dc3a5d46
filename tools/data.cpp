// triad data: text files and JSONL to token shards, split into training and validation by document, with a manifest.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/check.h"
#include "io/dataset.h"
#include "io/file.h"
#include "io/json_config.h"
#include "io/shards.h"
#include "io/tokenizer.h"
#include "tools/options.h"
#include "tools/verbs.h"

namespace triad {

namespace {

struct Options {
  std::string tokenizer = "byte", out;
  std::vector<std::string> input;
  int64_t shard_tokens = 100'000'000;  // what published token shards hold
  double val_fraction = 0.1;
  uint64_t seed = 1337;
};

using DocumentBody = std::function<void(std::string_view text)>;

// The field `text` of one line of JSONL.
std::string text_of_line(const std::string& file, std::string_view line, int64_t number, int64_t offset) {
  try {
    const nlohmann::json object = nlohmann::json::parse(line);
    if (object.is_object() && object.contains("text") && object["text"].is_string()) return object["text"];
  } catch (const nlohmann::json::exception& e) {
    fail("{}: line {}, at offset {}: {}", file, number, offset, shortened(e.what()));
  }
  fail("{}: line {}, at offset {}: a JSON object with a string `text` is needed", file, number, offset);
}

void for_each_line(const MappedFile& file, const DocumentBody& body) {
  const std::string_view text = file.text();
  int64_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    ++number;
    if (line.find_first_not_of(" \t\r") != std::string_view::npos)
      body(text_of_line(file.path(), line, number, static_cast<int64_t>(begin)));
    begin = end + 1;
  }
}

// Every document that holds anything: a text file is one, a line of *.jsonl or *.ndjson is one.
void for_each_document(const std::vector<std::string>& files, const DocumentBody& body) {
  const auto unless_empty = [&](std::string_view text) {
    if (!text.empty()) body(text);
  };
  for (const std::string& name : files) {
    if (is_shard(name)) fail("{} is a token shard already", name);
    const MappedFile file(name);
    const std::string extension = std::filesystem::path(name).extension().string();
    if (extension == ".jsonl" || extension == ".ndjson")
      for_each_line(file, unless_empty);
    else
      unless_empty(file.text());
  }
}

// Fills shards PREFIX_000000.bin, ... to exactly `shard_tokens` tokens each, but for the last. Documents run on across
// them. They stay if keep() is called at the end: shards without a manifest are none.
class ShardSequence {
 public:
  ShardSequence(const Options& options, std::string prefix, TokenWidth width)
      : options_(options), prefix_(std::move(prefix)), width_(width) {}
  ShardSequence(const ShardSequence&) = delete;
  ~ShardSequence() {
    std::error_code ignored;  // what went wrong is thrown already
    if (!kept_)
      for (const Json& shard : shards_) std::filesystem::remove(path(shard["file"]), ignored);
  }

  void append(std::span<const int32_t> tokens) {
    tokens_ += static_cast<int64_t>(tokens.size());
    while (!tokens.empty()) {
      if (!shard_) {
        name_ = fmt::format("{}_{:06}.bin", prefix_, shards_.size());
        shard_ = std::make_unique<ShardWriter>(path(name_), width_);
      }
      const int64_t room = options_.shard_tokens - shard_->size();
      const auto n = static_cast<size_t>(std::min(room, static_cast<int64_t>(tokens.size())));
      shard_->append(tokens.first(n));
      tokens = tokens.subspan(n);
      if (shard_->size() == options_.shard_tokens) finish();
    }
  }
  void finish() {
    if (!shard_) return;
    const ShardWriter::Written w = shard_->finish();
    shard_.reset();
    shards_.push_back(
        {{"file", name_}, {"tokens", w.tokens}, {"bytes", w.bytes}, {"crc32", fmt::format("{:08x}", w.crc32)}});
  }
  void keep() { kept_ = true; }
  int64_t tokens() const { return tokens_; }
  Json report(int64_t documents) const { return {{"documents", documents}, {"tokens", tokens_}, {"shards", shards_}}; }

 private:
  std::string path(const std::string& name) const { return options_.out + "/" + name; }

  const Options& options_;
  std::string prefix_, name_;
  TokenWidth width_;
  std::unique_ptr<ShardWriter> shard_;
  Json shards_ = Json::array();
  int64_t tokens_ = 0;
  bool kept_ = false;
};

// Shards of an earlier call would be read as part of this one's.
void refuse_used_folder(const std::string& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const bool shard = (name.starts_with("train_") || name.starts_with("val_")) && name.ends_with(".bin");
    if (shard || name == "manifest.json")
      fail("{} already holds {}: remove its shards and manifest.json, or choose another --out", folder, name);
  }
}

void data(const Options& o) {
  const std::unique_ptr<Tokenizer> tokenizer = make_tokenizer(o.tokenizer);
  const std::vector<std::string> files = expand_globs(o.input);
  // Read twice: the first pass counts the documents, which the split needs, and finds a malformed line before anything
  // is written.
  int64_t documents = 0;
  for_each_document(files, [&](std::string_view) { ++documents; });
  TRIAD_CHECK(documents > 0, "there is no text in the {} input files ({}, ...)", files.size(), files[0]);
  make_folders(o.out);
  refuse_used_folder(o.out);

  const TokenWidth width = tokenizer->vocab_size() <= 1 << 16 ? TokenWidth::u16 : TokenWidth::u32;
  ShardSequence train(o, "train", width), val(o, "val", width);
  const HeldOut held_out(documents, o.val_fraction, o.seed);
  int64_t index = 0;
  for_each_document(files, [&](std::string_view text) {
    std::vector<int32_t> tokens = {tokenizer->eot()};
    const std::vector<int32_t> encoded = tokenizer->encode(text);
    tokens.insert(tokens.end(), encoded.begin(), encoded.end());
    const auto size = static_cast<int64_t>(tokens.size());
    int64_t to_train = held_out(index++) ? 0 : size;
    if (documents == 1) to_train = train_part(size, o.val_fraction);
    train.append(std::span(tokens).first(static_cast<size_t>(to_train)));
    val.append(std::span(tokens).subspan(static_cast<size_t>(to_train)));
  });
  train.finish();
  val.finish();

  const Json manifest = {{"format", width == TokenWidth::u16 ? "llm.c u16" : "llm.c u32"},
                         {"tokenizer", tokenizer->name()},
                         {"vocab_size", tokenizer->vocab_size()},
                         {"eot", tokenizer->eot()},
                         {"files", files.size()},
                         {"documents", documents},
                         {"val_fraction", o.val_fraction},
                         {"seed", o.seed},
                         {"train", train.report(documents - held_out.count())},
                         {"val", val.report(held_out.count())}};
  write_file_atomically(o.out + "/manifest.json", dump_json(manifest, 2) + "\n");
  train.keep();
  val.keep();
  fmt::print("{}: {} documents of {} files; train {} tokens in {} shards, val {} tokens in {} shards\n", o.out,
             documents, files.size(), train.tokens(), manifest["train"]["shards"].size(), val.tokens(),
             manifest["val"]["shards"].size());
}

}  // namespace

void add_data(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("data", "text files and JSONL (its field text) to token shards");
  verb->add_option("--tokenizer", o->tokenizer, "byte")->capture_default_str();
  verb->add_option("--input", o->input, "files or globs; *.jsonl and *.ndjson hold a document a line")->required();
  verb->add_option("--out", o->out, "folder for train_000000.bin, ..., val_000000.bin, manifest.json")->required();
  verb->add_option("--shard-tokens", o->shard_tokens, "tokens a shard")
      ->check(within(at_least(1).up_to(INT32_MAX)))
      ->capture_default_str();
  verb->add_option("--val-fraction", o->val_fraction, "share of the documents held out; a single one: of its end")
      ->check(within(at_least(0).up_to(0.9)))
      ->capture_default_str();
  verb->add_option("--seed", o->seed, "of the choice of validation documents")
      ->check(within(at_least(0).up_to(kMaxInteger)))
      ->capture_default_str();
  verb->callback([o] { data(*o); });
}

}  // namespace triad
