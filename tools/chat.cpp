// triad chat: talks to a model in the terminal, in the chat template that it was trained with. Each line of standard
// input is a message; the answer is streamed.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/check.h"
#include "engine/process/progress_line.h"
#include "engine/process/text.h"
#include "engine/random_streams.h"
#include "engine/rng.h"
#include "io/chat/chat_format.h"
#include "io/huggingface/model_config.h"
#include "io/tokenizer/tokenizer.h"
#include "model/decoding/decode_session.h"
#include "model/decoding/sampling.h"
#include "tools/options.h"
#include "tools/verbs.h"
#include "train/checkpoint/adapted_weights.h"
#include "train/checkpoint/state.h"
#include "train/config/load_config.h"
#include "train/inference.h"

namespace triad {

namespace {

struct ReplyOptions {
  std::string checkpoint, system, chat_template, device = "auto", dtype = "f32";
  std::vector<std::string> variables;
  int64_t tokens = 1000, context = 0;
  uint64_t seed = 1337;
  SamplingOptions sampling;
};

void show(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  TRIAD_CHECK(std::fflush(stdout) == 0, "standard output cannot be written: {}", std::strerror(errno));
}

class Chat {
 public:
  explicit Chat(const ReplyOptions& o)
      : o_(o),
        source_(find_model(o.checkpoint)),
        tokenizer_(tokenizer_of_checkpoint(source_.folder, source_.config.data.tokenizer)),
        format_(choose_format()),
        turn_end_(format_.turn_end()),
        context_(o.context > 0 ? o.context : source_.config.train.longest_seq_len()) {
    if (!tokenizer_->available())
      fail("{} has no tokenizer: put its tokenizer.json into the folder {}", o.checkpoint, source_.folder);
    stop_.insert(tokenizer_->eot());
    for (const int64_t token :
         eos_tokens(origin_for_tokens(source_.origin, *tokenizer_, source_.config.data.tokenizer)))
      stop_.insert(token);
    if (const std::vector<int32_t> end = tokenizer_->encode(turn_end_); end.size() == 1) stop_.insert(end[0]);
    if (utf8_prefix(o.system) < o.system.size()) fail_usage("--system {}: UTF-8 is needed", shortened(o.system));
    for (const std::string& variable : o.variables) set_variable(variable);
    begin_conversation();
    open_session();
  }

  void run() {
    const bool terminal = is_terminal(STDIN_FILENO);
    if (terminal)
      fmt::print(stderr, "{}, chat template: {}. /clear begins a new conversation, /exit ends.\n", o_.checkpoint,
                 format_.source());
    std::string line;
    while (read_line(line, terminal)) {
      if (line == "/exit") break;
      if (line == "/clear") {
        begin_conversation();
        continue;
      }
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      messages_.push_back({{"role", "user"}, {"content", line}});
      const std::string text = answer();
      // A model may write bytes that are not UTF-8, which no template takes.
      messages_.push_back({{"role", "assistant"}, {"content", parse_json(dump_json(Json(text), -1), "the answer")}});
    }
    if (terminal) show("\n");
  }

 private:
  ChatFormat choose_format() const {
    if (!o_.chat_template.empty()) return choose_chat_format(o_.chat_template, *tokenizer_, {source_.folder});
    std::optional<ChatFormat> trained = trained_chat(source_);
    if (!trained)
      fail_usage(
          "{} was not trained on conversations, nor imported with a chat template: --chat-template names one, chatml "
          "or "
          "a file",
          o_.checkpoint);
    return std::move(*trained);
  }

  // NAME=VALUE, as in a record's chat_template_kwargs.
  void set_variable(const std::string& text) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0 || utf8_prefix(text) < text.size())
      fail_usage("--set-variable {}: NAME=VALUE is needed", shortened(text));
    Json value;
    try {
      value = parse_json(text.substr(equals + 1), text);
    } catch (const Error&) { value = text.substr(equals + 1); }  // no JSON: a string
    variables_[text.substr(0, equals)] = value;
  }

  void begin_conversation() {
    messages_ = Json::array();
    if (!o_.system.empty()) messages_.push_back({{"role", "system"}, {"content", o_.system}});
  }

  // A prompt is prefilled up to a length that was planned for, and the rest of it token by token.
  void open_session() {
    const int64_t step = std::max<int64_t>(64, context_ / 64);
    prefills_ = {1};
    for (int64_t n = step; n <= context_; n += step) prefills_.push_back(n);
    const DType dtype = parse_dtype(o_.dtype);
    const Device device = parse_device(o_.device);
    if (device.is_cuda() && dtype == DType::f64) fail_usage("--dtype f64 runs on the CPU only");
    session_ = std::make_unique<DecodeSession>(
        source_.config.model,
        DecodeSession::Options{.device = device, .dtype = dtype, .context = context_, .prefills = prefills_});
    load_model(session_->ctx(), session_->model().params(), source_);
  }

  bool read_line(std::string& line, bool terminal) const {
    if (terminal) show("> ");
    if (!std::getline(std::cin, line)) return false;
    if (line.ends_with('\r')) line.pop_back();
    const size_t valid = utf8_prefix(line);
    if (valid < line.size())
      fail("standard input: the byte 0x{:02x} at offset {} of a line is not UTF-8",
           static_cast<unsigned char>(line[valid]), valid);
    return true;
  }

  std::vector<int32_t> prompt() const {
    Json record = {{"messages", messages_}};
    if (!variables_.empty()) record["chat_template_kwargs"] = variables_;
    Conversation conversation = read_conversation(record, "the conversation");
    conversation.bytes = dump_json(record, -1).size();
    return tokenizer_->encode(format_.prompt(conversation));
  }

  void start(const std::vector<int32_t>& tokens) {
    const auto n = static_cast<int64_t>(tokens.size());
    const int64_t planned = *std::prev(std::upper_bound(prefills_.begin(), prefills_.end(), n));
    session_->prefill(0, std::span(tokens).first(static_cast<size_t>(planned)));
    for (int64_t i = planned; i < n; ++i) session_->step({&tokens[static_cast<size_t>(i)], 1});
  }

  int32_t choose() {
    const std::vector<float> logits = session_->logits(0);
    for (size_t i = 0; i < logits.size(); ++i)
      TRIAD_CHECK(std::isfinite(logits[i]), "{}: the logit of token {} is {}: weights that are not finite?",
                  o_.checkpoint, i, logits[i]);
    return sample_token(logits, o_.sampling, random_.uniform(drawn_++));
  }

  // Streams an answer, and returns it.
  std::string answer() {
    const std::vector<int32_t> tokens = prompt();
    const auto n = static_cast<int64_t>(tokens.size());
    if (tokens.empty()) fail("{}: the chat template writes no prompt", format_.source());
    if (n >= context_)
      fail("the conversation has {} tokens, of {} that the context holds (--context): /clear begins a new one", n,
           context_);
    start(tokens);
    std::string text;
    size_t shown = 0;
    bool ended = false;
    for (int64_t i = 0; i < o_.tokens && n + i < context_ && !ended; ++i) {
      const int32_t token = choose();
      if (stop_.contains(token)) {
        ended = true;
        break;
      }
      text += tokenizer_->has(token) ? tokenizer_->decode(std::array{token}) : "?";
      if (const size_t end = turn_end_.empty() ? std::string::npos : text.find(turn_end_); end != std::string::npos) {
        text.resize(end);
        ended = true;
      }
      const size_t sure = ended ? text.size() : text.size() - begun_end(text);
      if (sure > shown) show(std::string_view(text).substr(shown, sure - shown));
      shown = std::max(shown, sure);
      if (!ended && n + i + 1 < context_) session_->step({&token, 1});
    }
    show(text.substr(shown) + "\n");
    if (!ended && is_terminal(STDERR_FILENO))
      fmt::print(stderr, "(cut after {} tokens: --tokens, --context)\n", std::min(o_.tokens, context_ - n));
    return text;
  }

  // How many bytes at a text's end may begin what ends a turn.
  size_t begun_end(std::string_view text) const {
    for (size_t n = std::min(turn_end_.size(), text.size()); n > 0; --n)
      if (text.ends_with(std::string_view(turn_end_).substr(0, n))) return n;
    return 0;
  }

  const ReplyOptions& o_;
  ModelSource source_;
  std::unique_ptr<Tokenizer> tokenizer_;
  ChatFormat format_;
  std::string turn_end_;
  int64_t context_;
  std::set<int64_t> stop_;
  Json messages_, variables_ = Json::object();
  std::vector<int64_t> prefills_;  // ascending
  std::unique_ptr<DecodeSession> session_;
  Philox random_{o_.seed, random_stream(RandomUse::sampling, 0)};
  uint64_t drawn_ = 0;
};

}  // namespace

void add_chat(CLI::App& app) {
  auto o = std::make_shared<ReplyOptions>();
  CLI::App* verb = app.add_subcommand("chat", "talk to a model that was trained on conversations");
  verb->add_option("CHECKPOINT", o->checkpoint, "a checkpoint, or a run's folder")->required();
  verb->add_option("--system", o->system, "the system message");
  verb->add_option("--chat-template", o->chat_template,
                   "chatml, or a file with a chat template; not set: the one that the model was trained with, or else "
                   "imported with");
  verb->add_option("--set-variable", o->variables,
                   "NAME=VALUE: a variable of the template, such as enable_thinking=false; may be repeated")
      ->take_all()
      ->expected(1);
  verb->add_option("--tokens", o->tokens, "largest number of tokens of an answer")
      ->check(within(at_least(1).up_to(kMaxInteger)))
      ->capture_default_str();
  verb->add_option("--context", o->context, "size of the KV cache in tokens; 0: the training length")
      ->check(within(at_least(0).up_to(kMaxSeqLen)))
      ->capture_default_str();
  add_sampling(*verb, o->sampling, o->seed, "answers");
  add_device(*verb, o->device, o->dtype);
  verb->callback([o] {
    check_environment();
    Chat(*o).run();
  });
}

}  // namespace triad
