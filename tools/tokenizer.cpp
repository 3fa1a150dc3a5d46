// triad tokenizer train: learns a byte-level BPE tokenizer from texts and JSONL. The folder that it writes is one that
// `triad data`, a config and transformers' AutoTokenizer take.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/text.h"
#include "engine/process/tone.h"
#include "io/chat/chat_format.h"
#include "io/data/corpus.h"
#include "io/file.h"
#include "io/json_config.h"
#include "io/tokenizer/bpe_trainer.h"
#include "io/tokenizer/tokenizer_file.h"
#include "io/tokenizer/word_counter.h"
#include "tools/huggingface/tokenizer_files.h"
#include "tools/options.h"
#include "tools/output_folder.h"
#include "tools/text_files.h"
#include "tools/verbs.h"
#include "tools/work_progress.h"

namespace triad {

namespace {

struct BpeTrainOptions {
  std::vector<std::string> input;
  std::string out;
  TextFormat format = TextFormat::automatic;
  bool skip_bad = false;
  WordSplit split = WordSplit::gpt4;
  BpeTrainerOptions bpe = {.special_tokens = {"<|endoftext|>"}};
  int64_t threads = 0;
};

// The token that precedes each document: one with a usual name, or the first special one.
std::string separator_of(const std::vector<std::string>& special_tokens) {
  const std::string usual = usual_eot(special_tokens);
  return usual.empty() ? special_tokens.front() : usual;
}

// What the corpus holds, beside its words.
struct Corpus {
  int64_t documents = 0, skipped = 0;
  std::string first_skipped;
};

Corpus read_corpus(const BpeTrainOptions& o, const std::vector<std::string>& files, const WordCounter& words) {
  Corpus corpus;
  int64_t text_bytes = 0;
  const int64_t input_bytes = size_of_files(files);
  InputProgress progress("M different words", input_bytes);
  const std::string eot = separator_of(o.bpe.special_tokens);
  // Conversations are written as a model from scratch reads them.
  auto chat = std::make_shared<const ChatFormat>(ChatFormat::chatml({{"bos_token", eot}, {"eos_token", eot}}));
  const CorpusOptions options{.files = files,
                              .format = o.format,
                              .skip_bad = o.skip_bad,
                              .threads = threads_of(o.threads),
                              .chat = {.format = std::move(chat)}};
  encode_corpus(options, words, {}, [&](const EncodedPiece& piece) {
    corpus.documents = piece.after.documents;
    if (corpus.skipped == 0) corpus.first_skipped = piece.first_skipped;
    corpus.skipped += piece.skipped;
    text_bytes += piece.text_bytes;
    progress.show(piece.after.input_bytes, text_bytes, static_cast<int64_t>(words.size()));
  });
  const std::string skipped = corpus.skipped == 0
                                  ? ""
                                  : fmt::format("{} skipped (--skip-bad), the first: {}",
                                                counted(corpus.skipped, "bad record"), corpus.first_skipped);
  TRIAD_CHECK(text_bytes > 0, "there is no text in the {} input files ({}, ...){}{}", files.size(), files[0],
              skipped.empty() ? "" : "; ", skipped);
  progress.show(input_bytes, text_bytes, static_cast<int64_t>(words.size()), true);
  if (!skipped.empty()) print_warning("warning: " + skipped);
  return corpus;
}

void write_tokenizer(const std::string& folder, const TrainedBpe& bpe, const BpeTrainOptions& o) {
  const std::string file = "tokenizer.json";
  write_file_atomically(folder + "/" + file, tokenizer_json(bpe, o.bpe.special_tokens, o.split));
  // Read back as every verb reads it.
  const auto tokenizer = make_tokenizer(folder, {.separator = separator_of(o.bpe.special_tokens)});
  std::vector<Tokenizer::File> files = special_token_files(*tokenizer, file, std::nullopt);
  for (const Tokenizer::File& own : tokenizer->files()) files.push_back(own);
  write_tokenizer_files(files, folder);
}

void train(const BpeTrainOptions& o) {
  check_bpe_options(o.bpe);
  const std::string out = check_output_folder(o.out, "");
  check_output_place(out);
  const std::vector<std::string> files = text_files(o.input, o.format);
  WordCounter words(o.split);
  const Corpus corpus = read_corpus(o, files, words);
  TrainedBpe bpe;
  {
    WorkProgress progress("merging", "tokens", o.bpe.vocab_size);
    bpe = train_bpe(words.finish(), o.bpe, [&](int64_t tokens) { progress.show(tokens); });
  }
  write_output_folder(out, [&](const std::string& folder) { write_tokenizer(folder, bpe, o); });
  const auto tokens = static_cast<int64_t>(bpe.tokens.size());
  fmt::print("{}: {} from {} in {}, {:.1f} MB of text, {}; {:.3f} bytes a token\n", out, counted(tokens, "token"),
             counted(corpus.documents, "document"), counted(static_cast<int64_t>(files.size()), "file"),
             static_cast<double>(bpe.text_bytes) / 1e6, counted(bpe.words, "different word"),
             static_cast<double>(bpe.text_bytes) / static_cast<double>(bpe.text_tokens));
  if (tokens < o.bpe.vocab_size)
    print_warning(fmt::format(
        "warning: the vocabulary has {} in place of the {} that --vocab-size asks for: no other pair occurs {} in this "
        "text{}",
        counted(tokens, "token"), o.bpe.vocab_size,
        o.bpe.min_frequency > 1 ? counted(o.bpe.min_frequency, "time") : "at all",
        o.bpe.max_token_bytes < kMaxInteger ? " and is short enough" : ""));
}

void add_tokenizer_train(CLI::App& parent) {
  auto o = std::make_shared<BpeTrainOptions>();
  CLI::App* verb = parent.add_subcommand("train", "learn a byte-level BPE vocabulary from texts and JSONL");
  add_text_input(*verb, o->input);
  verb->add_option("--out", o->out, "folder to write: tokenizer.json, and what transformers' AutoTokenizer needs")
      ->required();
  verb->add_option("--vocab-size", o->bpe.vocab_size, "tokens, with the 256 bytes and the special tokens")
      ->check(within(at_least(1).up_to(kMaxTokens)))
      ->capture_default_str();
  verb->add_option_function<std::string>(
          "--split",
          [o](const std::string& text) {
            for (const auto& [word, value] : EnumWords<WordSplit>::words)
              if (text == word) return void(o->split = value);
            fail_usage("--split is {}: {} is allowed", text, all_words<WordSplit>());
          },
          "how texts are split into words, in which tokens are: as by GPT-2, GPT-4 (cl100k: numbers of up to three "
          "digits) or Qwen (digit by digit)")
      ->type_name("TEXT:{gpt2,gpt4,qwen}")
      ->default_str(std::string(word_of(o->split)));
  verb->add_option("--special", o->bpe.special_tokens,
                   "special tokens, which get the first numbers; the one with a usual name such as <|endoftext|>, or "
                   "else the first, precedes each document")
      ->capture_default_str();
  verb->add_option("--min-frequency", o->bpe.min_frequency, "pairs that occur less often are not merged")
      ->check(within(at_least(1).up_to(kMaxInteger)))
      ->capture_default_str();
  verb->add_option("--max-token-bytes", o->bpe.max_token_bytes, "longest token that is learned; not set: of any length")
      ->check(within(at_least(2).up_to(kMaxInteger)));
  add_format(*verb, o->format);
  add_skip_bad(*verb, o->skip_bad);
  add_threads(*verb, o->threads, "count words");
  verb->callback([o] { train(*o); });
}

}  // namespace

void add_tokenizer(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("tokenizer", "train a tokenizer on your own text");
  verb->require_subcommand(1);
  add_tokenizer_train(*verb);
}

}  // namespace triad
