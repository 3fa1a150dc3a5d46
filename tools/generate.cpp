// triad generate: samples text from a checkpoint with a KV cache: one forward pass over each prompt, then one decoding
// step per token for all prompts together. When a text's cache is full, it is refilled with the text's last half.
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <set>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/parse.h"
#include "engine/process/progress_line.h"
#include "engine/process/text.h"
#include "engine/random_streams.h"
#include "engine/rng.h"
#include "io/data/text_input.h"
#include "io/huggingface/model_config.h"
#include "io/tokenizer/tokenizer.h"
#include "model/decode_session.h"
#include "model/sampling.h"
#include "tools/options.h"
#include "tools/verbs.h"
#include "tools/work_progress.h"
#include "train/config/load_config.h"
#include "train/inference.h"

namespace triad {

namespace {

struct Options {
  std::string checkpoint, device = "auto", dtype = "f32";
  std::vector<std::string> prompts, prompt_files, prompt_ids;
  std::vector<int64_t> stop;
  bool json = false;
  int64_t tokens = 200, context = 0;
  uint64_t seed = 1337;
  SamplingOptions sampling;
};

struct Text {
  std::string prompt_text;      // empty if the prompt is an id list
  bool ids;                     // the prompt was given as ids, so the text is printed as ids
  std::vector<int32_t> tokens;  // prompt tokens, then sampled ones
  size_t prompt;                // tokens in the prompt
  Philox random;
  bool ended = false, stopped = false;  // ended: no more tokens; stopped: ended by a stop token
  size_t sampled() const { return tokens.size() - prompt; }
  std::span<const int32_t> last(int64_t n) const {
    return std::span(tokens).last(std::min(tokens.size(), static_cast<size_t>(n)));
  }
};

// Parses "1,2,3", tokens in the vocabulary.
std::vector<int32_t> parse_ids(const std::string& list, int64_t vocab) {
  std::vector<int32_t> ids;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    const std::string word = list.substr(begin, end - begin);
    const std::optional<int64_t> id = parse_number<int64_t>(word);
    if (!id || *id < 0 || *id >= vocab)
      fail_usage("--prompt-ids holds \"{}\": numbers from 0 to {}, separated by commas, are needed", shortened(word),
                 vocab - 1);
    ids.push_back(static_cast<int32_t>(*id));
    begin = end + 1;
  }
  return ids;
}

class Generator {
 public:
  explicit Generator(const Options& o)
      : o_(o),
        source_(find_model(o.checkpoint)),
        tokenizer_(tokenizer_of_checkpoint(source_.folder, source_.config.data.tokenizer)),
        context_(o.context > 0 ? o.context : source_.config.train.longest_seq_len()),
        stop_(o.stop.begin(), o.stop.end()) {
    const int64_t vocab = source_.config.model.vocab_size;
    const bool has_texts = !o.prompts.empty();
    if (has_texts && !tokenizer_->available())
      fail(
          "{} has no tokenizer, which --prompt needs: put its tokenizer.json into the folder {}, or give --prompt-ids "
          "1,2,3",
          o.checkpoint, source_.folder);
    if (has_texts && source_.config.data.tokenizer.empty() && tokenizer_->files().empty())
      fmt::print(stderr,
                 "triad: {} was trained on shards whose tokenizer is not known, so tokens are taken for bytes (put its "
                 "tokenizer.json into the folder of the weights to use it)\n",
                 o.checkpoint);
    for (const int64_t token : stop_)
      if (token >= vocab) fail_usage("--stop is {}: the vocabulary has {} tokens", token, vocab);
    if (tokenizer_->available()) stop_.insert(tokenizer_->eot());
    const Json origin = origin_for_tokens(source_.origin, *tokenizer_, source_.config.data.tokenizer);
    for (const int64_t token : eos_tokens(origin)) stop_.insert(token);
    for (const std::string& prompt : o.prompts) {
      // The prompt begins with an end-of-text token, because one precedes each document in training.
      std::vector<int32_t> tokens = {tokenizer_->eot()};
      for (const int32_t token : tokenizer_->encode(prompt)) tokens.push_back(token);
      add_text(prompt, false, std::move(tokens));
    }
    for (const std::string& ids : o.prompt_ids) add_text("", true, parse_ids(ids, vocab));
    std::vector<int64_t> prefills = {half()};
    for (const Text& text : texts_) prefills.push_back(static_cast<int64_t>(text.last(context_).size()));
    const DType dtype = parse_dtype(o.dtype);
    const Device device = parse_device(o.device);
    if (device.is_cuda() && dtype == DType::f64) fail_usage("--dtype f64 runs on the CPU only");
    session_ = std::make_unique<DecodeSession>(source_.config.model,
                                               DecodeSession::Options{.device = device,
                                                                      .dtype = dtype,
                                                                      .batch = static_cast<int64_t>(texts_.size()),
                                                                      .context = context_,
                                                                      .prefills = prefills});
    load_weights(session_->ctx(), session_->model().params(), source_.weights);
  }

  void run() {
    WorkProgress progress("generate", "tokens a text", o_.tokens);
    // False if the text itself, streamed to the terminal, shows the progress.
    const bool shows_progress = !streams() || !is_terminal(STDOUT_FILENO);
    if (streams()) show(prompt_of(texts_.front()));
    if (o_.tokens > 0) {
      for (size_t b = 0; b < texts_.size(); ++b) session_->prefill(static_cast<int64_t>(b), texts_[b].last(context_));
      take(greedy() ? session_->choose_greedy() : sampled());
    }
    while (std::any_of(texts_.begin(), texts_.end(), [](const Text& t) { return !t.ended; })) {
      take(next());
      if (shows_progress) progress.show(longest(), all_sampled());
    }
    const double seconds = progress.seconds();
    end_progress_line();
    print_texts();
    if (is_terminal(STDERR_FILENO))
      fmt::print(stderr, "{} in {:.1f} s, {:.1f} tokens/s\n", counted(all_sampled(), "token"), seconds,
                 static_cast<double>(all_sampled()) / seconds);
  }

 private:
  bool greedy() const { return o_.sampling.temperature <= 0; }
  bool streams() const { return texts_.size() == 1 && !o_.json; }
  int64_t longest() const {
    size_t most = 0;
    for (const Text& t : texts_) most = std::max(most, t.sampled());
    return static_cast<int64_t>(most);
  }
  int64_t all_sampled() const {
    size_t sum = 0;
    for (const Text& t : texts_) sum += t.sampled();
    return static_cast<int64_t>(sum);
  }

  // Prints the texts. A text streamed while it was generated lacks only the newline.
  void print_texts() const {
    if (streams()) return show("\n");
    for (size_t b = 0; b < texts_.size(); ++b) {
      const Text& t = texts_[b];
      const std::vector<int32_t> sampled(t.tokens.begin() + static_cast<std::ptrdiff_t>(t.prompt), t.tokens.end());
      if (o_.json) {
        Json line = Json::object();
        if (t.ids)
          line["prompt_ids"] = std::span(t.tokens).first(t.prompt);
        else
          line["prompt"] = t.prompt_text, line["text"] = words(t, sampled);
        line["tokens"] = sampled, line["stopped"] = t.stopped;
        show(dump_json(line, -1) + "\n");
        continue;
      }
      show(prompt_of(t) + words(t, sampled) + "\n");
      if (b + 1 < texts_.size()) show("---\n");
    }
  }
  int64_t half() const { return std::max<int64_t>(1, context_ / 2); }

  // Returns each text's next token: by one decoding step, or by a prefill for texts whose cache is full.
  std::vector<int32_t> next() {
    std::vector<int32_t> last, full;
    for (size_t b = 0; b < texts_.size(); ++b) {
      last.push_back(texts_[b].ended ? 0 : texts_[b].tokens.back());
      if (!texts_[b].ended && session_->decoder().length(static_cast<int64_t>(b)) == context_)
        full.push_back(static_cast<int32_t>(b));
    }
    const bool any_step = full.size() < texts_.size();
    std::vector<int32_t> chosen;
    if (any_step && greedy()) chosen = session_->step_greedy();
    if (any_step && !greedy()) session_->step(last);
    for (const int32_t b : full) session_->prefill(b, texts_[static_cast<size_t>(b)].last(half()));
    if (!greedy()) return sampled();
    return full.empty() ? chosen : session_->choose_greedy();
  }

  std::vector<int32_t> sampled() {
    std::vector<int32_t> tokens;
    for (size_t b = 0; b < texts_.size(); ++b) {
      const Text& t = texts_[b];
      if (t.ended) {
        tokens.push_back(0);
        continue;
      }
      const double uniform = t.random.uniform(static_cast<uint64_t>(t.sampled()));
      tokens.push_back(sample_token(finite_logits(static_cast<int64_t>(b)), o_.sampling, uniform));
    }
    return tokens;
  }

  // Returns a text's logits. Throws an Error if one is not finite, because sampling needs an order.
  std::vector<float> finite_logits(int64_t b) {
    std::vector<float> logits = session_->logits(b);
    for (size_t i = 0; i < logits.size(); ++i)
      TRIAD_CHECK(std::isfinite(logits[i]), "{}: the logit of token {} is {}: weights that are not finite?",
                  o_.checkpoint, i, logits[i]);
    return logits;
  }

  void take(const std::vector<int32_t>& tokens) {
    for (size_t b = 0; b < texts_.size(); ++b) {
      Text& t = texts_[b];
      if (t.ended) continue;
      // Throws an Error that names the logit that is not finite.
      if (tokens[b] < 0) finite_logits(static_cast<int64_t>(b));
      if (stop_.contains(tokens[b])) {
        t.ended = t.stopped = true;
        continue;
      }
      t.tokens.push_back(tokens[b]);
      if (streams()) show(words(t, {tokens[b]}));
      t.ended = static_cast<int64_t>(t.sampled()) >= o_.tokens;
    }
  }

  void add_text(std::string prompt, bool ids, std::vector<int32_t> tokens) {
    const size_t n = tokens.size();
    texts_.push_back({std::move(prompt), ids, std::move(tokens), n,
                      Philox(o_.seed, random_stream(RandomUse::sampling, texts_.size())), o_.tokens == 0});
  }
  std::string prompt_of(const Text& t) const {
    return t.ids ? fmt::format("{}", fmt::join(std::span(t.tokens).first(t.prompt), ",")) : t.prompt_text;
  }
  // Sampled tokens as they are printed after what precedes them.
  std::string words(const Text& t, const std::vector<int32_t>& tokens) const {
    std::string text;
    if (t.ids) {
      for (const int32_t token : tokens) text += fmt::format(",{}", token);
      return text;
    }
    for (const int32_t token : tokens)
      text +=
          tokenizer_->has(token) ? tokenizer_->decode(std::array{token}) : "?";  // ?: an id that pads the vocabulary
    return text;
  }
  static void show(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    TRIAD_CHECK(std::fflush(stdout) == 0, "standard output cannot be written: {}", std::strerror(errno));
  }

  const Options& o_;
  ModelSource source_;
  std::unique_ptr<Tokenizer> tokenizer_;
  int64_t context_;
  std::set<int64_t> stop_;
  std::vector<Text> texts_;
  std::unique_ptr<DecodeSession> session_;
};

// Returns a file's or standard input's text without a newline at its end, which editors and echo add.
std::string read_prompt(const std::string& path) {
  std::string text = read_whole_text(path);
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

void read_prompts(Options& o) {
  if (o.prompts.empty() && o.prompt_files.empty() && o.prompt_ids.empty())
    fail_usage("generate: --prompt, --prompt-file or --prompt-ids is required");
  int readers = 0;
  for (std::string& prompt : o.prompts) {
    if (prompt != kStandardInput) continue;
    if (++readers > 1) fail_usage("--prompt - is given twice: standard input is read once");
    prompt = read_prompt(kStandardInput);
  }
  for (const std::string& file : o.prompt_files) o.prompts.push_back(read_prompt(file));
}

}  // namespace

void add_generate(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("generate", "sample text from a checkpoint");
  verb->add_option("--checkpoint", o->checkpoint, "a checkpoint, or a run's folder")->required();
  verb->add_option(
          "--prompt", o->prompts,
          "the text to continue (-: read it from standard input); may be repeated: all texts are sampled together "
          "and printed at the end")
      ->take_all()
      ->expected(1);
  verb->add_option("--prompt-file", o->prompt_files,
                   "a file with a prompt, without the newline at its end; may be repeated, follows those of --prompt")
      ->take_all()
      ->expected(1);
  verb->add_option("--prompt-ids", o->prompt_ids,
                   "a prompt as token ids, 1,2,3, without an end-of-text token before it; prints ids and needs no "
                   "tokenizer; may be repeated, follows the texts")
      ->take_all()
      ->expected(1);
  verb->add_flag("--json", o->json,
                 "print a line of JSON for each prompt: prompt, text (or prompt_ids), tokens, stopped (whether a stop "
                 "token ended it)");
  verb->add_option("--tokens", o->tokens, "largest number of tokens to sample for each prompt")
      ->check(within(at_least(0).up_to(kMaxInteger)))
      ->capture_default_str();
  verb->add_option("--stop", o->stop,
                   "id of a token that ends a text, in addition to the end-of-text tokens; may be repeated")
      ->take_all()
      ->expected(1)
      ->check(within(at_least(0).up_to(kMaxInteger)));
  verb->add_option("--context", o->context, "size of the KV cache in tokens; 0: the training length")
      ->check(within(at_least(0).up_to(kMaxSeqLen)))
      ->capture_default_str();
  add_sampling(*verb, o->sampling, o->seed, "text");
  add_device(*verb, o->device, o->dtype);
  verb->callback([o] {
    check_environment();
    read_prompts(*o);
    Generator(*o).run();
  });
}

}  // namespace triad
