#include "io/data/dataset.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/random_streams.h"
#include "engine/rng.h"
#include "io/chat/chat_format.h"
#include "io/data/corpus.h"
#include "io/data/record.h"
#include "io/data/shard_manifest.h"
#include "io/data/shard_tokens.h"
#include "io/data/shards.h"
#include "io/data/text_input.h"
#include "io/file.h"

namespace triad {

namespace {

class SyntheticTokens final : public TokenSource {
 public:
  SyntheticTokens(int64_t vocab, uint64_t seed, uint64_t stream)
      : vocab_(static_cast<uint64_t>(vocab)), random_(seed, stream) {}
  // The sequence has no end; this number is larger than any run needs.
  int64_t size() const override { return int64_t{1} << 61; }
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
  void read(int64_t begin, std::span<int32_t> out) const override { check_range(begin, out); }
  std::string name() const override { return "the empty validation split (data.val_fraction, data.val_paths)"; }
};

// In-memory tokens, stored as T, the narrowest type that holds the vocabulary.
template <class T>
class MemoryTokens final : public TokenSource {
 public:
  MemoryTokens(std::string name, DataFiles files) : name_(std::move(name)), files_(std::move(files)) {}
  // Appends a document, which begins with the separator. learned: a byte for each token, 1 if it is learned; empty: all
  // are. The separator is learned if the last token before it is.
  void append(std::span<const int32_t> document, std::span<const uint8_t> learned) {
    if (!learned.empty() && mask_.size() == 0) mask_.append(true, size());
    if (!learned.empty() || mask_.size() > 0) {
      mask_.append(mask_.size() == 0 || mask_.learned(mask_.size() - 1), 1);
      if (learned.empty())
        mask_.append(true, static_cast<int64_t>(document.size()) - 1);
      else
        mask_.append(learned.subspan(1));
    }
    index_.begins.push_back(size());
    separators_ += std::count(document.begin() + 1, document.end(), document.front());
    for (const int32_t token : document) tokens_.push_back(static_cast<T>(token));
    index_.size = size();
    index_.eot = document.front();
    index_.after_end = mask().learned(size() - 1) ? index_.eot : -1;
  }
  const DocumentIndex* documents() const override { return &index_; }
  MaskView mask() const override { return {.mask = mask_.size() > 0 ? &mask_ : nullptr}; }
  int64_t size() const override { return static_cast<int64_t>(tokens_.size()); }
  void set_chat(std::shared_ptr<const ChatFormat> chat) { chat_ = std::move(chat); }
  std::shared_ptr<const ChatFormat> chat() const override { return chat_; }
  void read(int64_t begin, std::span<int32_t> out) const override {
    check_range(begin, out);
    std::copy_n(tokens_.begin() + begin, out.size(), out.begin());
  }
  std::string warning() const override {
    if (separators_ == 0) return {};
    return fmt::format(
        "{}: its text spells the separator (token {}) {}: attention reads on there, but in shards of triad data, and "
        "in "
        "triad generate, a document begins",
        name_, index_.eot, counted(separators_, "time"));
  }
  DataFiles files() const override { return files_; }
  std::string name() const override { return name_; }

 private:
  std::string name_;
  DataFiles files_;
  std::vector<T> tokens_;
  int64_t separators_ = 0;  // separators within documents
  LossMask mask_;           // empty as long as all tokens are learned
  std::shared_ptr<const ChatFormat> chat_;
  DocumentIndex index_;
};

// Another source's tokens [begin, end).
class TokenRange final : public TokenSource {
 public:
  TokenRange(std::shared_ptr<const TokenSource> whole, int64_t begin, int64_t end, std::string what)
      : whole_(std::move(whole)), begin_(begin), end_(end), what_(std::move(what)) {
    if (const DocumentIndex* whole_index = whole_->documents()) index_ = whole_index->part(begin, end);
  }
  const DocumentIndex* documents() const override { return index_ ? &*index_ : nullptr; }
  MaskView mask() const override {
    const MaskView whole_mask = whole_->mask();
    return {.mask = whole_mask.mask, .first = whole_mask.first + begin_};
  }
  std::string warning() const override { return whole_->warning(); }
  std::shared_ptr<const ChatFormat> chat() const override { return whole_->chat(); }
  DataFiles files() const override { return whole_->files(); }
  int64_t size() const override { return end_ - begin_; }
  void read(int64_t begin, std::span<int32_t> out) const override {
    check_range(begin, out);  // an error here: the tokens outside the range belong to the other split
    whole_->read(begin_ + begin, out);
  }
  std::string name() const override { return what_ + whole_->name(); }

 private:
  std::shared_ptr<const TokenSource> whole_;
  int64_t begin_, end_;
  std::string what_;
  std::optional<DocumentIndex> index_;
};

DataSplit split_by_position(std::shared_ptr<const TokenSource> whole, double val_fraction) {
  const int64_t size = whole->size();
  const int64_t cut = train_part(size, val_fraction);
  if (cut == size) return {whole, no_tokens()};
  return {std::make_shared<TokenRange>(whole, 0, cut, "the training split of "),
          std::make_shared<TokenRange>(whole, cut, size, "the validation split of ")};
}

// The training and validation files. Links are resolved, so that one file under two names is recognized.
struct SplitFiles {
  std::vector<std::string> train, val;
};
SplitFiles checked_split(const SplitOptions& options, SplitFiles files) {
  if (options.paths.empty()) fail_usage("data.paths is empty: files or globs are needed");
  refuse_streams(files.train);
  refuse_streams(files.val);
  std::set<std::string> train;
  for (const std::string& file : files.train) train.insert(std::filesystem::canonical(file).string());
  for (const std::string& file : files.val)
    TRIAD_CHECK(!train.contains(std::filesystem::canonical(file).string()),
                "{} is in data.paths and in data.val_paths: training and validation may not overlap", file);
  return files;
}

struct TextFile {
  std::string path;
  bool jsonl = false;
};
bool is_jsonl(const TextFile& file) { return file.jsonl; }

// The files without the empty ones, in order. Throws if one is a token shard: most likely data.kind is wrong.
std::vector<TextFile> text_files(const std::vector<std::string>& files, TextFormat format) {
  std::vector<TextFile> texts;
  for (const std::string& file : files) {
    const Content content = content_of(file, format);
    TRIAD_CHECK(content != Content::shard, "{} is a token shard, not text: data.kind=shards reads it", file);
    if (InputFile(file).size() > 0) texts.push_back({file, content == Content::jsonl});
  }
  TRIAD_CHECK(!texts.empty(), "there is no text in {}", files_text("files", files));
  return texts;
}

// Calls append(document, learned) for each document in the files, in order; a document begins with the end-of-text
// token. learned: as in MemoryTokens::append. Returns whether there is a conversation among them.
template <class F>
bool for_each_document(const std::vector<TextFile>& files, const Tokenizer& tokenizer, const ChatOptions& chat,
                       F&& append) {
  bool chats = false;
  std::vector<int32_t> document;
  std::vector<uint8_t> mask;
  const auto add = [&](std::span<const int32_t> tokens, std::span<const uint8_t> learned = {}) {
    document.assign(1, tokenizer.eot());
    document.insert(document.end(), tokens.begin(), tokens.end());
    mask.assign(learned.empty() ? 0 : 1, 1);
    mask.insert(mask.end(), learned.begin(), learned.end());
    append(document, mask);
  };
  const int threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, 8u));
  for (const TextFile& file : files) {
    if (!file.jsonl) {
      if (const std::string text = read_whole_text(file.path); !text.empty()) add(tokenizer.encode(text));
      continue;
    }
    const CorpusOptions corpus{.files = {file.path}, .format = TextFormat::jsonl, .threads = threads, .chat = chat};
    encode_corpus(corpus, tokenizer, {}, [&](const EncodedPiece& piece) {
      chats = chats || piece.chats;
      for (const EncodedPiece::Part& part : piece.parts) add(piece.tokens_of(part), piece.learned_of(part));
    });
  }
  return chats;
}

// A source in memory, filled by fill(append), which returns how its conversations are written.
template <class T, class F>
std::shared_ptr<const TokenSource> fill_memory(const std::string& name, DataFiles files, F&& fill) {
  auto source = std::make_shared<MemoryTokens<T>>(name, std::move(files));
  source->set_chat(fill(
      [&](std::span<const int32_t> document, std::span<const uint8_t> learned) { source->append(document, learned); }));
  return source;
}
template <class F>
std::shared_ptr<const TokenSource> fill_memory(const Tokenizer& tokenizer, const std::string& name,
                                               const DataFiles& files, F&& fill) {
  if (tokenizer.vocab_size() <= 1 << 8) return fill_memory<uint8_t>(name, files, fill);
  if (tokenizer.vocab_size() <= 1 << 16) return fill_memory<uint16_t>(name, files, fill);
  return fill_memory<int32_t>(name, files, fill);
}

std::shared_ptr<const TokenSource> read_texts(const std::vector<TextFile>& files, const Tokenizer& tokenizer,
                                              const ChatOptions& chat, const std::string& what) {
  std::vector<std::string> paths;
  for (const TextFile& file : files) paths.push_back(file.path);
  auto source = fill_memory(tokenizer, what + files_text("text files", paths), describe_data_files(paths),
                            [&](auto append) -> std::shared_ptr<const ChatFormat> {
                              const ChatOptions used = with_format(chat, tokenizer);
                              return for_each_document(files, tokenizer, used, append) ? used.format : nullptr;
                            });
  TRIAD_CHECK(source->size() > 0, "{}: holds no document", source->name());
  return source;
}

// A source's documents that `wanted` accepts.
template <class F>
std::shared_ptr<const TokenSource> choose_documents(const TokenSource& source, const Tokenizer& tokenizer,
                                                    const std::string& what, F&& wanted) {
  return fill_memory(tokenizer, what + source.name(), source.files(), [&](auto append) {
    const DocumentIndex& index = *source.documents();
    const MaskView mask = source.mask();
    std::vector<int32_t> document;
    std::vector<uint8_t> learned;
    for (int64_t i = 0; i < index.count(); ++i) {
      if (!wanted(i)) continue;
      document.resize(static_cast<size_t>(index.length(i)));
      source.read(index.begins[i], document);
      learned.resize(mask.empty() ? 0 : document.size());
      for (size_t j = 0; j < learned.size(); ++j) learned[j] = mask.learned(index.begins[i] + static_cast<int64_t>(j));
      append(document, learned);
    }
    return source.chat();
  });
}

int64_t held_out_documents(int64_t n, double val_fraction) {
  if (n < 2 || val_fraction <= 0) return 0;
  return std::clamp<int64_t>(std::llround(static_cast<double>(n) * val_fraction), 1, n - 1);
}

}  // namespace

void TokenSource::check_range(int64_t begin, std::span<int32_t> out) const {
  const auto n = static_cast<int64_t>(out.size());
  TRIAD_CHECK(begin >= 0 && n <= size() && begin <= size() - n, "{}: {} tokens from {} on were asked for, of {}",
              name(), n, begin, size());
}

void TokenSource::read_sequence(int64_t begin, std::span<int32_t> tokens, std::span<int32_t> targets) const {
  read(begin + 1, targets);
  read(begin, tokens.first(1));
  std::copy(targets.begin(), targets.end() - 1, tokens.begin() + 1);
}

const DocumentIndex& require_documents(const TokenSource& source) {
  const DocumentIndex* index = source.documents();
  TRIAD_CHECK(index != nullptr, "{}: where its documents begin is not known", source.name());
  return *index;
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
  const std::vector<TextFile> texts = text_files(files.train, options.format);
  if (!files.val.empty())
    return {read_texts(texts, tokenizer, options.chat, "the training split of "),
            read_texts(text_files(files.val, options.format), tokenizer, options.chat, "the validation split of ")};
  if (std::any_of(texts.begin(), texts.end(), is_jsonl)) {
    const auto all = read_texts(texts, tokenizer, options.chat, "");
    const int64_t documents = all->documents()->count();
    if (documents == 1) return split_by_position(all, options.val_fraction);
    const HeldOut held_out(documents, options.val_fraction, options.seed);
    if (held_out.count() == 0) return {all, no_tokens()};
    return {choose_documents(*all, tokenizer, "the training split of ", [&](int64_t i) { return !held_out(i); }),
            choose_documents(*all, tokenizer, "the validation split of ", held_out)};
  }
  if (texts.size() == 1) return split_by_position(read_texts(texts, tokenizer, options.chat, ""), options.val_fraction);
  const HeldOut held_out(static_cast<int64_t>(texts.size()), options.val_fraction, options.seed);
  std::vector<TextFile> train, val;
  for (size_t i = 0; i < texts.size(); ++i) (held_out(static_cast<int64_t>(i)) ? val : train).push_back(texts[i]);
  DataSplit split{read_texts(train, tokenizer, options.chat, "the training split of "), no_tokens()};
  if (!val.empty()) split.val = read_texts(val, tokenizer, options.chat, "the validation split of ");
  return split;
}

bool begins_with_conversation(const std::vector<std::string>& paths, TextFormat format) {
  for (const std::string& file : expand_globs(paths)) {
    if (is_stream(file) || content_of(file, format) != Content::jsonl) continue;
    TextInput input(file);
    constexpr size_t kMostBytes = size_t{1} << 28;  // the limit in corpus.cpp, too
    for (size_t bytes = size_t{1} << 16; bytes <= kMostBytes; bytes *= 2) {
      const std::string_view text = input.look(bytes);
      for (size_t begin = 0; begin < text.size();) {
        const size_t end = text.find('\n', begin);
        if (end == std::string_view::npos && text.size() == bytes) break;  // the line goes on
        const std::string_view line = text.substr(begin, end == std::string_view::npos ? end : end - begin);
        if (!is_blank_line(line)) return is_conversation(line);
        begin += line.size() + 1;
      }
      if (text.size() < bytes) break;
    }
  }
  return false;
}

DataSplit shard_data(const SplitOptions& options, int64_t vocab) {
  const SplitFiles files = checked_split(
      options, {expand_shards(options.paths, ShardSplit::train), expand_shards(options.val_paths, ShardSplit::val)});
  auto train = shard_tokens(files.train, vocab, options.accept_changed);
  if (files.val.empty()) return split_by_position(std::move(train), options.val_fraction);
  auto val = shard_tokens(files.val, vocab, options.accept_changed);
  check_no_overlap(*train->files(), *val->files());
  return {std::move(train), std::move(val)};
}

std::shared_ptr<const TokenSource> open_tokens(const std::vector<std::string>& paths, const Tokenizer& tokenizer,
                                               int64_t vocab, TextFormat format, const ChatOptions& chat) {
  const std::vector<std::string> files = expand_globs(paths);
  TRIAD_CHECK(!files.empty(), "no file is named");
  refuse_streams(files);
  const auto shards = static_cast<size_t>(std::count_if(files.begin(), files.end(), is_shard));
  if (shards == files.size()) return shard_tokens(files, vocab);
  TRIAD_CHECK(vocab >= tokenizer.vocab_size(), "the tokenizer {} has {} tokens, the model's vocabulary only {}",
              tokenizer.name(), tokenizer.vocab_size(), vocab);
  TRIAD_CHECK(shards == 0,
              "of {} files {} are token shards and the others are not ({}, ...): one kind at a time is needed",
              files.size(), shards, files[0]);
  return read_texts(text_files(files, format), tokenizer, chat, "");
}

}  // namespace triad
