// triad generate: samples text from a checkpoint with a KV cache. Prompts of the command line or of a file are
// continued many at a time (slots.h), and printed in their order.
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <set>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/parse.h"
#include "engine/process/progress_line.h"
#include "engine/process/text.h"
#include "engine/random_streams.h"
#include "io/data/text_input.h"
#include "io/huggingface/model_config.h"
#include "io/tokenizer/tokenizer.h"
#include "model/decoding/slots.h"
#include "tools/options.h"
#include "tools/prompt_file.h"
#include "tools/verbs.h"
#include "tools/whole_lines.h"
#include "tools/work_progress.h"
#include "train/checkpoint/adapted_weights.h"
#include "train/config/load_config.h"
#include "train/inference.h"

namespace triad {

namespace {

struct GenerateOptions {
  std::string checkpoint, file, device = "auto", dtype = "f32";
  std::vector<std::string> prompts, prompt_files, prompt_ids, stop;
  TextFormat format = TextFormat::automatic;
  bool json = false;
  int64_t context = 0, batch = 0;
  PromptOptions each;
};

struct Text : Continuation {
  FilePrompt asked;
  std::string words;                    // what the sampled tokens print, up to a stop text
  size_t shown = 0;                     // its bytes that are streamed already
  bool ended = false, stopped = false;  // ended: no more tokens; stopped: ended by a stop token or text
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

// Lines of a file, for the progress; 0 for standard input or a pipe.
int64_t lines_of(const std::string& path) {
  if (is_stream(path)) return 0;
  TextInput input(path);
  std::vector<char> bytes(size_t{1} << 16);
  int64_t lines = 0;
  for (size_t n = bytes.size(); n == bytes.size();) {
    n = input.read(bytes);
    lines += std::count(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(n), '\n');
  }
  return lines;
}

class Generator {
 public:
  explicit Generator(const GenerateOptions& o)
      : o_(o),
        source_(find_model(o.checkpoint)),
        tokenizer_(tokenizer_of_checkpoint(source_.folder, source_.config.data.tokenizer)),
        context_(o.context > 0 ? o.context : source_.config.train.longest_seq_len()) {
    const int64_t vocab = source_.config.model.vocab_size;
    if (!o.prompts.empty() && !tokenizer_->available())
      fail(
          "{} has no tokenizer, which --prompt needs: put its tokenizer.json into the folder {}, or give --prompt-ids "
          "1,2,3",
          o.checkpoint, source_.folder);
    if ((!o.prompts.empty() || !o.file.empty()) && source_.config.data.tokenizer.empty() && tokenizer_->files().empty())
      fmt::print(stderr,
                 "triad: {} was trained on shards whose tokenizer is not known, so tokens are taken for bytes (put its "
                 "tokenizer.json into the folder of the weights to use it)\n",
                 o.checkpoint);
    for (const std::string& stop : o.stop) add_stop(stop, vocab);
    if (!stop_texts_.empty() && !o.prompt_ids.empty())
      fail_usage("--stop is \"{}\": with --prompt-ids the id of a token is needed", shortened(stop_texts_.front()));
    if (tokenizer_->available()) stop_.insert(tokenizer_->eot());
    const Json origin = origin_for_tokens(source_.origin, *tokenizer_, source_.config.data.tokenizer);
    for (const int64_t token : eos_tokens(origin)) stop_.insert(token);
    if (!o.file.empty()) file_.emplace(o.file, o.format, o.each, *tokenizer_, vocab, context_);
    for (const std::string& prompt : o.prompts) add_prompt(prompt, prompt_tokens(*tokenizer_, prompt));
    for (const std::string& ids : o.prompt_ids) add_prompt({}, parse_ids(ids, vocab));
    open_session();
  }

  void run() {
    const int64_t total = lists_texts() ? lines_of(o_.file) : o_.each.most;
    WorkProgress progress("generate", lists_texts() ? "lines" : "tokens a text", total);
    // False if the text itself, streamed to the terminal, shows the progress.
    const bool shows_progress = !streams() || !is_terminal(STDOUT_FILENO);
    if (streams()) show(prompt_of(texts_.front()));
    std::optional<StopRequest> stop;
    if (lists_texts()) stop.emplace();
    Slots slots(*session_, context_, o_.checkpoint);
    while (true) {
      fill(slots);
      print_ended();
      if (stop && stop->requested()) stop->end();
      if (slots.empty()) {
        if (waiting_ == texts_.size() && !read_prompt()) break;
        continue;
      }
      slots.step([this](Continuation& t, int32_t token) { return take(static_cast<Text&>(t), token); });
      if (shows_progress && total > 0) progress.show(lists_texts() ? printed_ : longest(), sampled_);
    }
    const double seconds = progress.seconds();
    end_progress_line();
    if (is_terminal(STDERR_FILENO))
      fmt::print(stderr, "{} in {:.1f} s, {:.1f} tokens/s\n", counted(sampled_, "token"), seconds,
                 static_cast<double>(sampled_) / seconds);
    if (bad_ > 0) fail("{} of {} could not be continued: {}", bad_, counted(printed_, "prompt"), first_error_);
  }

 private:
  // Whether each text is a line of its own, written when it and those before it have ended.
  bool lists_texts() const { return file_.has_value(); }
  bool streams() const { return !lists_texts() && !o_.json && o_.prompts.size() + o_.prompt_ids.size() == 1; }
  int64_t longest() const {
    size_t most = 0;
    for (const Text& t : texts_) most = std::max(most, t.sampled());
    return static_cast<int64_t>(most);
  }

  // Opens a session for as many texts as memory holds, but no more than there are.
  void open_session() {
    const DType dtype = parse_dtype(o_.dtype);
    const Device device = parse_device(o_.device);
    if (device.is_cuda() && dtype == DType::f64) fail_usage("--dtype f64 runs on the CPU only");
    const int64_t most = o_.batch > 0 ? o_.batch : default_slots(device);
    while (static_cast<int64_t>(texts_.size()) < most && read_prompt()) {}
    const auto texts = static_cast<int64_t>(texts_.size());
    session_ = open_slots(source_.config.model, {.device = device, .dtype = dtype, .context = context_},
                          std::clamp<int64_t>(texts, 1, most), o_.batch > 0);
    load_model(session_->ctx(), session_->model().params(), source_);
  }

  // Gives free slots to waiting texts. Texts that have ended wait for those before them, so their number is limited.
  void fill(Slots& slots) {
    constexpr size_t kMostForSlot = 32;
    const size_t most = kMostForSlot * static_cast<size_t>(session_->batch());
    while (slots.has_room()) {
      if (waiting_ == texts_.size() && (texts_.size() >= most || !read_prompt())) return;
      Text& t = texts_[waiting_++];
      if (!t.ended) slots.add(t);
    }
  }

  // Appends the file's next prompt to texts_. False at the end, or without a file.
  bool read_prompt() {
    if (!file_) return false;
    std::optional<FilePrompt> prompt = file_->next();
    if (!prompt) return false;
    add_text(std::move(*prompt));
    return true;
  }

  void add_prompt(const std::optional<std::string>& text, std::vector<int32_t> tokens) {
    FilePrompt prompt;
    prompt.text = text, prompt.tokens = std::move(tokens);
    prompt.options = o_.each, prompt.stream = texts_.size();
    add_text(std::move(prompt));
  }

  void add_text(FilePrompt prompt) {
    Text& t = texts_.emplace_back();
    t.tokens = prompt.tokens, t.prompt = t.tokens.size();
    t.sampling = prompt.options.sampling;
    t.random = Philox(prompt.options.seed, random_stream(RandomUse::sampling, prompt.stream));
    t.ended = !prompt.error.empty() || prompt.options.most == 0;
    prompt.stop.insert(prompt.stop.end(), stop_texts_.begin(), stop_texts_.end());
    t.asked = std::move(prompt);
  }

  // Adds a sampled token to its text, unless it ends it. Returns whether the text ends here.
  bool take(Text& t, int32_t token) {
    if (stop_.contains(token)) {
      t.stopped = true;
    } else {
      t.tokens.push_back(token);
      ++sampled_;
      const std::string word = word_of_token(t, token);
      t.words += word;
      const size_t cut = stop_begin(t, word.size());
      if (cut != std::string::npos) {
        t.words.resize(cut);
        t.stopped = true;
      }
    }
    t.ended = t.stopped || static_cast<int64_t>(t.sampled()) >= t.asked.options.most;
    if (streams()) show_more(t);
    return t.ended;
  }

  // Prints what is new of a text, without an end that may become a stop text.
  static void show_more(Text& t) {
    size_t held = 0;
    for (const std::string& stop : t.asked.stop)
      for (size_t n = std::min(stop.size() - 1, t.words.size()); !t.ended && n > held; --n)
        if (t.words.ends_with(std::string_view(stop).substr(0, n))) held = n;
    const size_t end = t.words.size() - held;
    if (end > t.shown) show(t.words.substr(t.shown, end - t.shown));
    t.shown = std::max(t.shown, end);
  }

  // Adds what --stop names: the id of a token, or a text.
  void add_stop(const std::string& stop, int64_t vocab) {
    if (stop.empty()) fail_usage("--stop is empty: the id of a token or a text is needed");
    if (!std::ranges::all_of(stop, [](char c) { return c >= '0' && c <= '9'; })) {
      if (!tokenizer_->available())
        fail_usage("--stop is \"{}\": {} has no tokenizer, so the id of a token is needed", shortened(stop),
                   o_.checkpoint);
      stop_texts_.push_back(stop);
      return;
    }
    const std::optional<int64_t> token = parse_number<int64_t>(stop);
    if (!token || *token >= vocab) fail_usage("--stop is {}: the vocabulary has {} tokens", shortened(stop), vocab);
    stop_.insert(*token);
  }

  // Where the first stop text begins that ends within the last `added` bytes; npos if there is none.
  static size_t stop_begin(const Text& t, size_t added) {
    size_t first = std::string::npos;
    for (const std::string& stop : t.asked.stop) {
      const size_t before = t.words.size() - added, from = before - std::min(before, stop.size() - 1);
      first = std::min(first, t.words.find(stop, from));
    }
    return first;
  }

  // Prints the texts that have ended, as far as all before them have, and forgets them.
  void print_ended() {
    while (waiting_ > 0 && texts_.front().ended) {
      const Text& t = texts_.front();
      const std::string text = printed(t);
      if (lists_texts())
        write_whole_line(text);
      else
        show(text);
      if (!t.asked.error.empty() && bad_++ == 0) first_error_ = t.asked.error;
      ++printed_;
      texts_.pop_front();
      --waiting_;
    }
  }

  // How a text is printed. One that was streamed while it was sampled lacks only the newline.
  std::string printed(const Text& t) const {
    if (streams()) return "\n";
    if (!t.asked.error.empty()) return dump_json(Json{{"error", t.asked.error}}, -1) + "\n";
    const auto all = std::span(t.tokens);
    if (!o_.json && !lists_texts()) return (printed_ > 0 ? "---\n" : "") + prompt_of(t) + t.words + "\n";
    Json line = Json::object();
    if (t.asked.text)
      line["prompt"] = *t.asked.text;
    else
      line["prompt_ids"] = all.first(t.prompt);
    if (prints_words(t)) line["text"] = t.words;
    line["tokens"] = all.subspan(t.prompt), line["stopped"] = t.stopped;
    return dump_json(line, -1) + "\n";
  }

  static bool prints_words(const Text& t) { return t.asked.text || !t.asked.stop.empty(); }
  static std::string prompt_of(const Text& t) {
    return t.asked.text ? *t.asked.text : fmt::format("{}", fmt::join(std::span(t.tokens).first(t.prompt), ","));
  }
  // A sampled token as it is printed after what precedes it; of a prompt of ids as an id.
  std::string word_of_token(const Text& t, int32_t token) const {
    if (!prints_words(t)) return fmt::format(",{}", token);
    return tokenizer_->has(token) ? tokenizer_->decode(std::array{token}) : "?";  // ?: an id that pads the vocabulary
  }
  static void show(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    TRIAD_CHECK(std::fflush(stdout) == 0, "standard output cannot be written: {}", std::strerror(errno));
  }

  const GenerateOptions& o_;
  ModelSource source_;
  std::unique_ptr<Tokenizer> tokenizer_;
  int64_t context_;
  std::set<int64_t> stop_;
  std::vector<std::string> stop_texts_;
  std::optional<PromptFile> file_;
  std::deque<Text> texts_;  // texts that are not printed yet, in order
  size_t waiting_ = 0;      // the first of them that had no slot yet
  std::unique_ptr<DecodeSession> session_;
  int64_t sampled_ = 0, printed_ = 0, bad_ = 0;  // tokens; texts; lines with an error
  std::string first_error_;
};

// Returns a file's or standard input's text without a newline at its end, which editors and echo add.
std::string read_prompt(const std::string& path) {
  std::string text = read_whole_text(path);
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

void read_prompts(GenerateOptions& o) {
  const bool listed = !o.prompts.empty() || !o.prompt_files.empty() || !o.prompt_ids.empty();
  if (!listed && o.file.empty()) fail_usage("generate: --prompt, --prompt-file, --prompt-ids or --prompts is required");
  if (listed && !o.file.empty()) fail_usage("--prompts {} is given with other prompts: put them into the file", o.file);
  int readers = 0;
  for (std::string& prompt : o.prompts) {
    if (prompt != kStandardInput) continue;
    if (++readers > 1) fail_usage("--prompt - is given twice: standard input is read once");
    prompt = read_prompt(kStandardInput);
  }
  for (const std::string& file : o.prompt_files) o.prompts.push_back(read_prompt(file));
}

void add_prompt_options(CLI::App& verb, GenerateOptions& o) {
  verb.add_option(
          "--prompt", o.prompts,
          "the text to continue (-: read it from standard input); may be repeated: all texts are sampled together "
          "and printed in order")
      ->take_all()
      ->expected(1);
  verb.add_option("--prompt-file", o.prompt_files,
                  "a file with a prompt, without the newline at its end; may be repeated, follows those of --prompt")
      ->take_all()
      ->expected(1);
  verb.add_option("--prompt-ids", o.prompt_ids,
                  "a prompt as token ids, 1,2,3, without an end-of-text token before it; prints ids and needs no "
                  "tokenizer; may be repeated, follows the texts")
      ->take_all()
      ->expected(1);
  verb.add_option(
          "--prompts", o.file,
          "a file of prompts (-: standard input), one a line: plain text, or JSON objects with \"prompt\" or "
          "\"prompt_ids\" and, for this prompt alone, max_tokens, stop (a text or a list of texts that end it), "
          "temperature, top_k, top_p, seed, and truncate (true: a prompt that is longer than --context loses its "
          "beginning). Prints JSON lines in the same order as soon as they are ready, {\"error\": ...} for a line that "
          "is no prompt; then the exit code is 1")
      ->check(named());
  add_format(verb, o.format)
      ->description("what --prompts holds; text: each line is a prompt; auto: by content and name");
}

}  // namespace

void add_generate(CLI::App& app) {
  auto o = std::make_shared<GenerateOptions>();
  CLI::App* verb = app.add_subcommand("generate", "sample text from a checkpoint");
  verb->add_option("--checkpoint", o->checkpoint, "a checkpoint, or a run's folder")->required();
  add_prompt_options(*verb, *o);
  verb->add_flag(
      "--json", o->json,
      "print a line of JSON for each prompt: prompt, text (or prompt_ids), tokens, stopped (whether --stop or "
      "an end-of-text token ended it); tokens has those of a stop text, text does not");
  verb->add_option("--tokens", o->each.most, "largest number of tokens to sample for each prompt")
      ->check(within(at_least(0).up_to(kMaxInteger)))
      ->capture_default_str();
  verb->add_option("--stop", o->stop,
                   "what ends a text, in addition to the end-of-text tokens, and is not printed: a text, or in digits "
                   "alone the id of a token; may be repeated")
      ->take_all()
      ->expected(1);
  verb->add_option("--context", o->context, "size of the KV cache in tokens; 0: the training length")
      ->check(within(at_least(0).up_to(kMaxSeqLen)))
      ->capture_default_str();
  verb->add_option("--batch", o->batch,
                   "prompts that are continued together; 0: as many as memory holds, at most 64 on a GPU and 16 on the "
                   "CPU")
      ->check(within(at_least(0).up_to(kMaxBatch)))
      ->capture_default_str();
  add_sampling(*verb, o->each.sampling, o->each.seed, "text");
  add_device(*verb, o->device, o->dtype);
  verb->callback([o] {
    check_environment();
    read_prompts(*o);
    Generator(*o).run();
  });
}

}  // namespace triad
