#include "io/data/dataset.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "engine/check.h"
#include "engine/random_streams.h"
#include "engine/rng.h"
#include "io/data/shard_manifest.h"
#include "io/data/shards.h"
#include "io/file.h"

namespace triad {

namespace {

void check_range(const TokenSource& source, int64_t begin, std::span<int32_t> out) {
  const auto n = static_cast<int64_t>(out.size());
  TRIAD_CHECK(begin >= 0 && n <= source.size() && begin <= source.size() - n,
              "{}: {} tokens from {} on were asked for, of {}", source.name(), n, begin, source.size());
}

// "a.txt", or "12 text files (a.txt, ...)"
std::string describe(const char* kind, const std::vector<std::string>& files) {
  return files.size() == 1 ? files[0] : fmt::format("{} {} ({}, ...)", files.size(), kind, files[0]);
}

class SyntheticTokens final : public TokenSource {
 public:
  SyntheticTokens(int64_t vocab, uint64_t seed, uint64_t stream)
      : vocab_(static_cast<uint64_t>(vocab)), random_(seed, stream) {}
  int64_t size() const override { return int64_t{1} << 61; }  // practically endless
  void read(int64_t begin, std::span<int32_t> out) const override {
    for (size_t i = 0; i < out.size(); ++i)
      out[i] = static_cast<int32_t>(random_.below(static_cast<uint64_t>(begin) + i, vocab_));
  }
  std::string name() const override { return "synthetic tokens"; }

 private:
  uint64_t vocab_;
  Philox random_;
};

class NoTokens final : public TokenSource {
 public:
  int64_t size() const override { return 0; }
  void read(int64_t begin, std::span<int32_t> out) const override { check_range(*this, begin, out); }
  std::string name() const override { return "the empty validation split"; }
};

// Tokens in memory. T: the narrowest type that holds the vocabulary.
template <class T>
class MemoryTokens final : public TokenSource {
 public:
  explicit MemoryTokens(std::string name) : name_(std::move(name)) {}
  void append(std::span<const int32_t> tokens) {
    for (const int32_t token : tokens) tokens_.push_back(static_cast<T>(token));
  }
  int64_t size() const override { return static_cast<int64_t>(tokens_.size()); }
  void read(int64_t begin, std::span<int32_t> out) const override {
    check_range(*this, begin, out);
    std::copy_n(tokens_.begin() + begin, out.size(), out.begin());
  }
  std::string name() const override { return name_; }

 private:
  std::string name_;
  std::vector<T> tokens_;
};

// The concatenation of several shards.
class ShardTokens final : public TokenSource {
 public:
  ShardTokens(const std::vector<std::string>& files, int64_t vocab)
      : name_(describe("token shards", files)), vocab_(vocab) {
    int64_t tokens = 0;
    for (const std::string& file : files) ends_.push_back(tokens += shards_.emplace_back(file).size());
    for (const Shard& shard : shards_) shard.scan(vocab);  // after all headers were checked, which is quick
  }
  int64_t size() const override { return ends_.back(); }
  void read(int64_t begin, std::span<int32_t> out) const override {
    check_range(*this, begin, out);
    auto shard = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    for (; !out.empty(); ++shard) {
      const int64_t first = begin - (ends_[shard] - shards_[shard].size());
      const auto n = std::min(out.size(), static_cast<size_t>(ends_[shard] - begin));
      shards_[shard].read(first, out.first(n), vocab_);  // the file may have changed since the scan
      out = out.subspan(n);
      begin += static_cast<int64_t>(n);
    }
  }
  std::string name() const override { return name_; }

 private:
  std::string name_;
  int64_t vocab_;
  std::vector<Shard> shards_;
  std::vector<int64_t> ends_;  // running sums of the shards' tokens
};

// Tokens [begin, end) of another source.
class TokenRange final : public TokenSource {
 public:
  TokenRange(std::shared_ptr<const TokenSource> whole, int64_t begin, int64_t end, std::string what)
      : whole_(std::move(whole)), begin_(begin), end_(end), what_(std::move(what)) {}
  int64_t size() const override { return end_ - begin_; }
  void read(int64_t begin, std::span<int32_t> out) const override {
    check_range(*this, begin, out);  // the rest of `whole` is the other split
    whole_->read(begin_ + begin, out);
  }
  std::string name() const override { return what_ + whole_->name(); }

 private:
  std::shared_ptr<const TokenSource> whole_;
  int64_t begin_, end_;
  std::string what_;
};

DataSplit split_by_position(std::shared_ptr<const TokenSource> whole, double val_fraction) {
  const int64_t size = whole->size();
  const int64_t cut = train_part(size, val_fraction);
  if (cut == size) return {whole, no_tokens()};
  return {std::make_shared<TokenRange>(whole, 0, cut, "the training split of "),
          std::make_shared<TokenRange>(whole, cut, size, "the validation split of ")};
}

// The files of both splits. Links are resolved, so that one file under two names is recognized.
struct SplitFiles {
  std::vector<std::string> train, val;
};
SplitFiles checked_split(const SplitOptions& options, SplitFiles files) {
  if (options.paths.empty()) fail_usage("data.paths is empty: files or globs are needed");
  std::set<std::string> train;
  for (const std::string& file : files.train) train.insert(std::filesystem::canonical(file).string());
  for (const std::string& file : files.val)
    TRIAD_CHECK(!train.contains(std::filesystem::canonical(file).string()),
                "{} is in data.paths and in data.val_paths: training and validation may not overlap", file);
  return files;
}

void append_document(std::vector<int32_t>& tokens, std::string_view text, const Tokenizer& tokenizer) {
  const std::vector<int32_t> encoded = tokenizer.encode(text);
  tokens.clear();
  tokens.push_back(tokenizer.eot());
  tokens.insert(tokens.end(), encoded.begin(), encoded.end());
}

// The files that are not empty, in order. A shard among them throws: most likely data.kind is wrong.
std::vector<std::string> text_files(const std::vector<std::string>& files) {
  std::vector<std::string> texts;
  for (const std::string& file : files) {
    TRIAD_CHECK(!is_shard(file), "{} is a token shard, not text: data.kind=shards reads it", file);
    if (InputFile(file).size() > 0) texts.push_back(file);
  }
  TRIAD_CHECK(!texts.empty(), "there is no text in {}", describe("files", files));
  return texts;
}

template <class T>
std::shared_ptr<const TokenSource> read_texts(const std::vector<std::string>& files, const Tokenizer& tokenizer,
                                              const std::string& what) {
  auto source = std::make_shared<MemoryTokens<T>>(what + describe("text files", files));
  std::vector<int32_t> document;
  for (const std::string& file : files) {
    append_document(document, read_file(file), tokenizer);
    source->append(document);
  }
  return source;
}

std::shared_ptr<const TokenSource> read_texts(const std::vector<std::string>& files, const Tokenizer& tokenizer,
                                              const std::string& what) {
  if (tokenizer.vocab_size() <= 1 << 8) return read_texts<uint8_t>(files, tokenizer, what);
  if (tokenizer.vocab_size() <= 1 << 16) return read_texts<uint16_t>(files, tokenizer, what);
  return read_texts<int32_t>(files, tokenizer, what);
}

int64_t held_out_documents(int64_t n, double val_fraction) {
  if (n < 2 || val_fraction <= 0) return 0;
  return std::clamp<int64_t>(std::llround(static_cast<double>(n) * val_fraction), 1, n - 1);
}

}  // namespace

void TokenSource::read_sequence(int64_t begin, std::span<int32_t> tokens, std::span<int32_t> targets) const {
  read(begin + 1, targets);
  read(begin, tokens.first(1));
  std::copy(targets.begin(), targets.end() - 1, tokens.begin() + 1);
}

std::shared_ptr<const TokenSource> no_tokens() { return std::make_shared<NoTokens>(); }

int64_t train_part(int64_t n_tokens, double val_fraction) {
  return n_tokens - static_cast<int64_t>(static_cast<double>(n_tokens) * val_fraction);
}

HeldOut::HeldOut(int64_t n_documents, double val_fraction, uint64_t seed)
    : count_(held_out_documents(n_documents, val_fraction)),
      order_(std::max<int64_t>(1, n_documents), seed, random_stream(RandomUse::held_out_documents)) {}

DataSplit synthetic_data(int64_t vocab, uint64_t seed, double val_fraction) {
  DataSplit split{std::make_shared<SyntheticTokens>(vocab, seed, random_stream(RandomUse::synthetic, 0)), no_tokens()};
  if (val_fraction > 0)
    split.val = std::make_shared<SyntheticTokens>(vocab, seed, random_stream(RandomUse::synthetic, 1));
  return split;
}

DataSplit text_data(const SplitOptions& options, const Tokenizer& tokenizer) {
  const SplitFiles files = checked_split(options, {expand_globs(options.paths), expand_globs(options.val_paths)});
  const std::vector<std::string> texts = text_files(files.train);
  if (!files.val.empty())
    return {read_texts(texts, tokenizer, "the training split of "),
            read_texts(text_files(files.val), tokenizer, "the validation split of ")};
  if (texts.size() == 1) return split_by_position(read_texts(texts, tokenizer, ""), options.val_fraction);
  const HeldOut held_out(static_cast<int64_t>(texts.size()), options.val_fraction, options.seed);
  std::vector<std::string> train, val;
  for (size_t i = 0; i < texts.size(); ++i) (held_out(static_cast<int64_t>(i)) ? val : train).push_back(texts[i]);
  DataSplit split{read_texts(train, tokenizer, "the training split of "), no_tokens()};
  if (!val.empty()) split.val = read_texts(val, tokenizer, "the validation split of ");
  return split;
}

DataSplit shard_data(const SplitOptions& options, int64_t vocab) {
  const SplitFiles files = checked_split(
      options, {expand_shards(options.paths, ShardSplit::train), expand_shards(options.val_paths, ShardSplit::val)});
  auto train = std::make_shared<ShardTokens>(files.train, vocab);
  if (files.val.empty()) return split_by_position(std::move(train), options.val_fraction);
  return {std::move(train), std::make_shared<ShardTokens>(files.val, vocab)};
}

std::shared_ptr<const TokenSource> open_tokens(const std::vector<std::string>& paths, const Tokenizer& tokenizer,
                                               int64_t vocab) {
  const std::vector<std::string> files = expand_globs(paths);
  TRIAD_CHECK(!files.empty(), "no file is named");
  const auto shards = static_cast<size_t>(std::count_if(files.begin(), files.end(), is_shard));
  if (shards == files.size()) return std::make_shared<ShardTokens>(files, vocab);
  TRIAD_CHECK(vocab >= tokenizer.vocab_size(), "the tokenizer {} has {} tokens, the model's vocabulary only {}",
              tokenizer.name(), tokenizer.vocab_size(), vocab);
  TRIAD_CHECK(shards == 0,
              "of {} files {} are token shards and the others are not ({}, ...): one kind at a time is needed",
              files.size(), shards, files[0]);
  return read_texts(text_files(files), tokenizer, "");
}

}  // namespace triad
