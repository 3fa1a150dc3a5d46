// triad data: tokenizes texts and JSONL into token shards, split into training and validation by document, with a
// manifest. A call that was killed resumes when it is repeated, with bit-identical shards.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/seconds_since.h"
#include "engine/process/tone.h"
#include "io/chat/chat_format.h"
#include "io/data/dataset.h"
#include "io/data/format/text_format.h"
#include "io/data/shard_manifest.h"
#include "io/data/shard_set.h"
#include "io/data/text_input.h"
#include "io/file.h"
#include "io/folder_lock.h"
#include "io/own_files.h"
#include "tools/options.h"
#include "tools/text_files.h"
#include "tools/verbs.h"

namespace triad {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

struct DataOptions {
  std::string tokenizer = "byte", separator, chat_template, out;
  ChatLearn learn = ChatLearn::assistant;
  TextFormat format = TextFormat::automatic;
  std::vector<std::string> input;
  int64_t shard_tokens = 100'000'000;  // default of --shard-tokens: published token shards' usual size
  double val_fraction = 0.1;
  uint64_t seed = 1337;
  int64_t threads = 0;
  double save_seconds = 10;
  bool special_as_text = false, skip_bad = false;
};

// All inputs and options that determine the shards. A call may resume one that was killed only if these are equal.
Json describe(const DataOptions& o, const Tokenizer& tokenizer, const ChatFormat& chat,
              const std::vector<std::string>& files) {
  Json inputs = Json::array();
  for (const std::string& file : files) {
    if (is_stream(file)) {
      inputs.push_back({{"file", file}});
      continue;
    }
    const auto time = fs::last_write_time(file).time_since_epoch();
    inputs.push_back({{"file", fs::canonical(file).string()},
                      {"bytes", fs::file_size(file)},
                      {"modified_ns", std::chrono::duration_cast<std::chrono::nanoseconds>(time).count()}});
  }
  return {{"tokenizer", o.tokenizer},
          {"tokenizer_files", describe_files(tokenizer.files())},
          {"vocab_size", tokenizer.vocab_size()},
          {"eot", tokenizer.eot()},
          {"special_as_text", o.special_as_text},
          {"format", word_of(o.format)},
          {"chat", chat.to_json()},
          {"learn", word_of(o.learn)},
          {"skip_bad", o.skip_bad},
          {"shard_tokens", o.shard_tokens},
          {"val_fraction", o.val_fraction},
          {"seed", o.seed},
          {"inputs", inputs}};
}

Json to_json(const CorpusPosition& p) {
  return {{"file", p.file},
          {"offset", p.offset},
          {"lines", p.lines},
          {"documents", p.documents},
          {"in_document", p.in_document},
          {"input_bytes", p.input_bytes},
          {"standard_input_crc", p.stream_crc}};
}

CorpusPosition position_from(const Json& j) {
  return {.file = j.at("file"),
          .offset = j.at("offset"),
          .lines = j.at("lines"),
          .documents = j.at("documents"),
          .in_document = j.at("in_document"),
          .input_bytes = j.at("input_bytes"),
          .stream_crc = j.at("standard_input_crc")};
}

constexpr const char* kManifest = "manifest.json";
constexpr const char* kUnfinished = "unfinished.json";

// Job: what one `triad data` call does.
class Job {
 public:
  Job(const DataOptions& o, const Tokenizer& tokenizer, std::shared_ptr<const ChatFormat> chat,
      std::vector<std::string> files)
      : o_(o),
        tokenizer_(tokenizer),
        chat_(std::move(chat)),
        files_(std::move(files)),
        what_(describe(o, tokenizer, *chat_, files_)),
        train_(o.out, "train", layout(), o.shard_tokens),
        val_(o.out, "val", layout(), o.shard_tokens) {}

  void run() {
    if (fs::is_directory(o_.out)) lock_folder();
    prepare_folder();
    if (cut_ < 0) {
      write_shards();
      hold_out_something();
    }
    if (cut_ >= 0) train_.cut(cut_);
    write_manifest();
  }

 private:
  std::string path(const std::string& name) const { return o_.out + "/" + name; }

  // The shards have a mask if the first document has one, which is not known before it is read.
  bool masked() const { return masked_.value_or(false); }
  ShardLayout layout() const {
    const bool narrow = tokenizer_.vocab_size() <= 1 << 16 && !masked();
    return {.width = narrow ? TokenWidth::u16 : TokenWidth::u32, .masked = masked(), .vocab = tokenizer_.vocab_size()};
  }
  void set_masked(std::optional<bool> masked) {
    masked_ = masked;
    train_.lay_out(layout());
    val_.lay_out(layout());
  }

  // What a call wrote by a program that did not have the option yet.
  static Json later_key(const std::string& key) { return key == "skip_bad" ? Json(false) : Json(); }

  static bool is_output(const std::string& name) {
    const bool shard = (name.starts_with("train_") || name.starts_with("val_")) &&
                       (name.ends_with(".bin") || name.ends_with(".bin.part") || name.ends_with(".bin.mask"));
    return shard || name == kManifest || name == kUnfinished;
  }

  // Locks the output folder, because two concurrent calls would overwrite each other's files. Waits a little: a call
  // that was just killed may still be ending.
  void lock_folder() {
    constexpr double kWaitS = 3;
    TRIAD_CHECK(lock_.take_within(kWaitS, o_.out), "{}: another call is writing its shards{}", o_.out,
                lock_holder(o_.out));
  }

  // Resumes a call that was killed in this folder. Refuses a folder with another call's shards, which would be read as
  // part of this one.
  void prepare_folder() {
    refuse_tokenizer();
    resumes_ = fs::exists(path(kUnfinished));
    if (resumes_)
      resume();
    else if (fs::is_directory(o_.out))
      refuse_shards();
  }

  void resume() try {
    const Json unfinished = parse_json(read_file(path(kUnfinished)), path(kUnfinished));
    for (const auto& [key, value] : what_.items())
      if (const Json before = unfinished.at("call").value(key, later_key(key)); before != value)
        fail(
            "{} holds the unfinished shards of a call that differs in {}: {}, now {}. Repeat that call, or remove "
            "the folder",
            o_.out, key, brief(before), brief(value));
    from_ = position_from(unfinished.at("position"));
    TRIAD_CHECK(from_.file >= 0 && from_.file <= static_cast<int64_t>(files_.size()) && from_.offset >= 0,
                "{} is damaged: its position is file {} of {}, offset {}", path(kUnfinished), from_.file, files_.size(),
                from_.offset);
    text_bytes_ = unfinished.at("text_bytes");
    separators_ = unfinished.value("separators_in_text", int64_t{0});
    chats_ = unfinished.value("chats", false);
    skipped_ = unfinished.value("skipped", int64_t{0});
    first_skipped_ = unfinished.value("first_skipped", "");
    cut_ = unfinished.at("cut");
    const Json masked = unfinished.value("masked", Json(false));  // programs before masks wrote none
    if (masked.is_boolean()) set_masked(masked.get<bool>());
    remove_temporaries();
    train_.resume(unfinished.at("train"), cut_);
    val_.resume(unfinished.at("val"), -1);
    fmt::print("{}: resumes after {}, {}\n", o_.out, counted(from_.documents, "document"),
               counted(train_.tokens() + val_.tokens(), "token"));
  } catch (const Json::exception& e) {
    fail("{} is damaged: {}. Remove the folder, and call again", path(kUnfinished), e.what());
  }

  // Removes a killed call's temporary files.
  void remove_temporaries() const {
    std::set<std::string> copies;
    for (const Tokenizer::File& file : tokenizer_.files()) copies.insert(file.name);
    for (const auto& entry : fs::directory_iterator(o_.out)) {
      std::string target;
      if (is_temporary(entry.path().filename().string(), &target) && (is_output(target) || copies.contains(target)))
        fs::remove(entry.path());
    }
  }

  // Another tokenizer in the folder would be replaced by this one's copy.
  void refuse_tokenizer() const {
    for (const Tokenizer::File& file : tokenizer_.files())
      if (fs::exists(fs::symlink_status(path(file.name))) &&
          (is_link_or_mount(path(file.name)) || read_file(path(file.name)) != file.content))
        fail("{} is another file than this tokenizer's {}, whose copy would replace it: choose another --out",
             path(file.name), file.name);
  }

  void refuse_shards() const {
    for (const auto& entry : fs::directory_iterator(o_.out)) {
      const std::string name = entry.path().filename().string();
      if (is_output(name))
        fail("{} already holds {}: remove its shards and {}, or choose another --out", o_.out, name, kManifest);
    }
  }

  void write_shards() {
    const int64_t input_bytes = size_of_files(files_);
    InputProgress progress("M tokens", input_bytes, from_.input_bytes, text_bytes_);
    const CorpusOptions corpus{.files = files_,
                               .format = o_.format,
                               .skip_bad = o_.skip_bad,
                               .threads = threads_of(o_.threads),
                               .chat = {.format = chat_, .learn = o_.learn}};
    const HeldOutStream held_out(o_.val_fraction, o_.seed);
    const int32_t eot = tokenizer_.eot();
    Clock::time_point saved = Clock::now();
    bool begun = from_.file > 0 || from_.offset > 0;
    encode_corpus(corpus, tokenizer_, from_, [&](const EncodedPiece& piece) {
      check_mask(piece);
      if (!begun) {  // the folder is created only when there is something to write
        make_folders(o_.out);
        lock_folder();
        // Refuses again: another call may have written shards to this folder while this one waited for its first text.
        if (!resumes_) refuse_shards();
        remove_temporaries();  // left by a call that was killed while it saved its state for the first time
        save();
        begun = true;
      }
      for (const EncodedPiece::Part& part : piece.parts) {
        ShardRow& row = held_out(part.document) ? val_ : train_;
        if (part.begins) row.begin_document(eot);
        row.append(piece.tokens_of(part), piece.learned_of(part));
      }
      text_bytes_ += piece.text_bytes;
      chats_ = chats_ || piece.chats;
      separators_ += std::count(piece.tokens.begin(), piece.tokens.end(), eot);
      if (skipped_ == 0) first_skipped_ = piece.first_skipped;
      skipped_ += piece.skipped;
      from_ = piece.after;
      if (seconds_since(saved) >= o_.save_seconds) {
        save();
        saved = Clock::now();
      }
      progress.show(from_.input_bytes, text_bytes_, train_.tokens() + val_.tokens());
    });
    if (text_bytes_ == 0) remove_all();
    TRIAD_CHECK(text_bytes_ > 0, "there is no text in the {} input files ({}, ...){}", files_.size(), files_[0],
                skipped_ > 0 ? fmt::format("; {}", skipped_text()) : "");
    progress.show(input_bytes, text_bytes_, train_.tokens() + val_.tokens(), true);
    train_.finish();
    val_.finish();
  }

  std::string skipped_text() const {
    return fmt::format("{} skipped (--skip-bad), the first: {}", counted(skipped_, "bad record"), first_skipped_);
  }

  // Warns about what the shards don't hold, or hold differently from the text.
  void warn() const {
    if (skipped_ > 0) print_warning("warning: " + skipped_text());
    if (separators_ > 0)
      print_warning(
          fmt::format("warning: the text spells the separator (token {}) {}: in these shards a document begins at "
                      "each, which makes {} of {}",
                      tokenizer_.eot(), counted(separators_, "time"),
                      counted(train_.documents() + val_.documents() + separators_, "document"),
                      train_.documents() + val_.documents()));
  }

  // The first document decides whether the shards have a mask.
  void check_mask(const EncodedPiece& piece) {
    if (!masked_ && !piece.parts.empty()) set_masked(piece.parts.front().masked);
    if (!masked() && !piece.first_masked.empty())
      fail(
          "{}: this record has a loss mask (`completion` or `messages`), but the first document has none, and so have "
          "the shards in {}. Write shards of their own from records of either kind",
          piece.first_masked, o_.out);
  }

  // If no document was chosen for validation, moves the last one there; if there is only one, its end.
  void hold_out_something() {
    if (o_.val_fraction <= 0 || val_.tokens() > 0) return;
    const bool single = train_.documents() == 1;
    const int64_t begin = single ? train_part(train_.tokens(), o_.val_fraction) : train_.last_document();
    if (begin <= 0 || begin == train_.tokens()) return;
    train_.copy_tail(begin, val_);
    if (!single) {
      train_.set_documents(train_.documents() - 1);
      val_.set_documents(1);
    }
    cut_ = begin;
    save();
  }

  void save() {
    Json unfinished = {{"call", what_}, {"position", to_json(from_)}, {"text_bytes", text_bytes_},
                       {"cut", cut_},   {"train", train_.pause()},    {"val", val_.pause()}};
    unfinished["separators_in_text"] = separators_;
    unfinished["chats"] = chats_;
    unfinished["skipped"] = skipped_;
    unfinished["first_skipped"] = first_skipped_;
    unfinished["masked"] = masked_ ? Json(*masked_) : Json();
    write_file_atomically(path(kUnfinished), dump_json(unfinished, 2) + "\n");
  }

  void remove_all() {
    std::error_code ignored;
    fs::remove(path(kUnfinished), ignored);
    fs::remove(o_.out, ignored);  // removes the folder only if it is empty
  }

  void write_manifest() {
    write_tokenizer_files(tokenizer_.files(), o_.out);
    const char* const format =
        masked() ? "llmq u32 with a mask" : (layout().width == TokenWidth::u16 ? "llm.c u16" : "llm.c u32");
    Json manifest = {{"format", format},
                     {"tokenizer", tokenizer_.name()},
                     {"tokenizer_files", describe_files(tokenizer_.files())},
                     {"vocab_size", tokenizer_.vocab_size()},
                     {"eot", tokenizer_.eot()},
                     {"files", files_.size()},
                     {"documents", train_.documents() + val_.documents()},
                     {"text_bytes", text_bytes_},
                     {"val_fraction", o_.val_fraction},
                     {"seed", o_.seed},
                     {"train", train_.report()},
                     {"val", val_.report()}};
    if (chats_) manifest["chat"] = chat_->to_json();
    write_file_atomically(path(kManifest), dump_json(manifest, 2) + "\n");
    fs::remove(path(kUnfinished));
    const auto shards = [&](const char* split) { return counted(manifest[split]["shards"].size(), "shard"); };
    fmt::print("{}: {} of {}; train {} in {}, val {} in {}\n", o_.out,
               counted(manifest["documents"].get<int64_t>(), "document"), counted(files_.size(), "file"),
               counted(train_.tokens(), "token"), shards("train"), counted(val_.tokens(), "token"), shards("val"));
    warn();
    if (chats_) fmt::print("chat template: {}\n", chat_->source());
    if (masked()) {
      const auto learned = [&](const char* split) { return manifest[split]["learned"].get<int64_t>(); };
      fmt::print("loss mask: {:.2f}% of the tokens are learned\n",
                 100 * static_cast<double>(learned("train") + learned("val")) /
                     static_cast<double>(train_.tokens() + val_.tokens()));
    }
  }

  const DataOptions& o_;
  const Tokenizer& tokenizer_;
  std::shared_ptr<const ChatFormat> chat_;
  std::vector<std::string> files_;
  std::optional<bool> masked_;  // empty until a document was read
  Json what_;
  ShardRow train_, val_;
  CorpusPosition from_;
  FolderLock lock_;
  bool resumes_ = false;  // whether this call resumes one that was killed
  int64_t text_bytes_ = 0;
  int64_t separators_ = 0;  // text tokens that are the separator
  bool chats_ = false;      // whether a document is a conversation
  int64_t skipped_ = 0;     // bad records that --skip-bad left out
  std::string first_skipped_;
  // If >= 0, all is written, and the tokens from this position on have yet to be removed from the training shards.
  int64_t cut_ = -1;
};

void data(const DataOptions& o) {
  constexpr double kLeastFraction = 1e-9;
  if (o.val_fraction > 0 && o.val_fraction < kLeastFraction)
    fail_usage("--val-fraction is {}: 0, or {} or more, is needed", o.val_fraction, kLeastFraction);
  const std::unique_ptr<Tokenizer> tokenizer =
      make_tokenizer(o.tokenizer, {.special_as_text = o.special_as_text, .separator = o.separator});
  auto chat = std::make_shared<const ChatFormat>(
      choose_chat_format(o.chat_template, *tokenizer, {folder_of_tokenizer(o.tokenizer)}));
  Job(o, *tokenizer, std::move(chat), text_files(o.input, o.format)).run();
}

}  // namespace

void add_data(CLI::App& app) {
  auto o = std::make_shared<DataOptions>();
  CLI::App* verb =
      app.add_subcommand("data", "tokenize texts and JSONL (text, prompt and completion, or messages) into shards");
  verb->add_option(
          "--tokenizer", o->tokenizer,
          "byte, a tokenizer.json, an encoder.json with vocab.bpe in the same folder, or a folder that holds one")
      ->capture_default_str();
  verb->add_option("--separator", o->separator,
                   "the token that precedes each document, such as <|doc|>; not set: the one that the tokenizer's file "
                   "is known by, such as <|endoftext|>");
  add_text_input(*verb, o->input);
  verb->add_option("--out", o->out, "folder for train_000000.bin, ..., val_000000.bin, manifest.json")->required();
  add_format(*verb, o->format);
  verb->add_option("--chat-template", o->chat_template,
                   "how conversations (messages) are written: chatml, or a file with a chat template; not set: the one "
                   "in the tokenizer's folder (chat_template.jinja, tokenizer_config.json), else chatml");
  add_learn(*verb, o->learn);
  add_skip_bad(*verb, o->skip_bad);
  verb->add_option("--shard-tokens", o->shard_tokens, "tokens of a shard")
      ->check(within(at_least(1).up_to(INT32_MAX)))
      ->capture_default_str();
  verb->add_option("--val-fraction", o->val_fraction,
                   "share of the documents for validation; with a single document, the share of its end")
      ->check(within(at_least(0).up_to(0.9)))
      ->capture_default_str();
  verb->add_option("--seed", o->seed, "seed of the choice of validation documents")
      ->check(within(at_least(0).up_to(kMaxInteger)))
      ->capture_default_str();
  add_threads(*verb, o->threads, "tokenize");
  verb->add_option("--save-seconds", o->save_seconds,
                   "seconds between saved states from which a killed call can resume")
      ->check(within(at_least(0)))
      ->capture_default_str();
  verb->add_flag(
      "--special-as-text", o->special_as_text,
      "encode text that spells a special token as plain text (default: as the token, like the tokenizers library)");
  verb->callback([o] { data(*o); });
}

}  // namespace triad
