#include "tools/prompt_file.h"

#include <algorithm>
#include <span>
#include <utility>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/text.h"
#include "io/data/record.h"
#include "io/json_config.h"
#include "tools/options.h"

namespace triad {

namespace {

// A line's keys. Lists of numbers are read as doubles.
struct Line {
  std::optional<std::string> prompt;
  std::vector<double> prompt_ids;
  std::vector<std::string> stop;
  PromptOptions options;
  std::optional<int64_t> seed;
};
template <class V>
void visit(Line& l, V&& v) {
  v("prompt", l.prompt, "the text to continue", Rule());
  v("prompt_ids", l.prompt_ids, "the tokens to continue", at_least(0).up_to(kMaxInteger));
  v("stop", l.stop, "texts that end the continuation", Rule());
  v("max_tokens", l.options.most, "largest number of sampled tokens", at_least(0).up_to(kMaxInteger));
  v("temperature", l.options.sampling.temperature, "divides the logits", at_least(0));
  v("top_k", l.options.sampling.top_k, "sample among the k most likely tokens", at_least(0).up_to(kMaxInteger));
  v("top_p", l.options.sampling.top_p, "sample among those whose probabilities reach p", at_least(0).up_to(1));
  v("seed", l.seed, "seed of the random numbers", at_least(0).up_to(kMaxInteger));
  v("truncate", l.options.truncate, "a prompt that is too long loses its beginning", Rule());
}

}  // namespace

PromptFile::PromptFile(const std::string& path, TextFormat format, const PromptOptions& options,
                       const Tokenizer& tokenizer, int64_t vocab, int64_t context)
    : input_(path),
      options_(options),
      tokenizer_(tokenizer),
      vocab_(vocab),
      context_(context),
      jsonl_(content_of(input_, format) == Content::jsonl) {}

// The next line without its newline. False at the end.
bool PromptFile::read_line(std::string& line) {
  constexpr size_t kBytes = size_t{1} << 16;
  size_t end = buffer_.find('\n', at_);
  while (end == std::string::npos && !at_end_) {
    buffer_.erase(0, std::exchange(at_, 0));
    const size_t had = buffer_.size();
    buffer_.resize(had + kBytes);
    const size_t n = input_.read(std::span(buffer_).subspan(had));
    buffer_.resize(had + n);
    at_end_ = n < kBytes;
    end = buffer_.find('\n', had);
  }
  if (end == std::string::npos && at_ == buffer_.size()) return false;
  end = std::min(end, buffer_.size());
  line = buffer_.substr(at_, end - at_);
  at_ = std::min(end + 1, buffer_.size());
  ++line_;
  return true;
}

std::optional<FilePrompt> PromptFile::next() {
  std::string line;
  do {
    if (!read_line(line)) return std::nullopt;
  } while (is_blank_line(line));
  const std::string place = fmt::format("{} line {}", name(), line_);
  FilePrompt prompt;
  try {
    prompt = parse(line, place);
  } catch (const Error& e) {  // this line's error alone
    prompt = {};
    prompt.error = e.what();
  }
  ++prompts_;
  return prompt;
}

FilePrompt PromptFile::parse(const std::string& line, const std::string& place) const {
  FilePrompt prompt;
  prompt.options = options_, prompt.stream = static_cast<uint64_t>(prompts_);
  if (jsonl_) {
    Json object = parse_json(line, place);
    TRIAD_CHECK(object.is_object(), "{}: {} is no object", place, brief(object));
    if (const auto stop = object.find("stop"); stop != object.end() && stop->is_null()) object.erase(stop);
    Line keys;
    keys.options = options_;
    json_config::read_item(place + ": prompt", object, keys);
    TRIAD_CHECK(keys.prompt.has_value() != object.contains("prompt_ids"),
                "{}: {}: one of \"prompt\" and \"prompt_ids\" is needed", place, brief(object));
    prompt.text = std::move(keys.prompt), prompt.stop = std::move(keys.stop), prompt.options = keys.options;
    if (keys.seed) prompt.options.seed = static_cast<uint64_t>(*keys.seed), prompt.stream = 0;
    for (const double id : keys.prompt_ids) {
      TRIAD_CHECK(id == static_cast<double>(static_cast<int64_t>(id)) && id < static_cast<double>(vocab_),
                  "{}: prompt_ids has {}: numbers from 0 to {} are needed", place, id, vocab_ - 1);
      prompt.tokens.push_back(static_cast<int32_t>(id));
    }
    for (const std::string& stop : prompt.stop) TRIAD_CHECK(!stop.empty(), "{}: a stop text is empty", place);
    TRIAD_CHECK(prompt.text || !prompt.tokens.empty(), "{}: prompt_ids is empty", place);
  } else {
    const size_t valid = utf8_prefix(line);
    TRIAD_CHECK(valid == line.size(), "{}: the byte 0x{:02x} at offset {} is not UTF-8", place,
                static_cast<unsigned char>(line[valid]), valid);
    prompt.text = line.ends_with('\r') ? line.substr(0, line.size() - 1) : line;
  }
  TRIAD_CHECK(tokenizer_.available() || (!prompt.text && prompt.stop.empty()),
              "{}: the model has no tokenizer, which \"{}\" needs: \"prompt_ids\" needs none", place,
              prompt.text ? "prompt" : "stop");
  if (prompt.text) {
    prompt.tokens = prompt_tokens(tokenizer_, *prompt.text);
    for (const int32_t token : prompt.tokens)
      TRIAD_CHECK(token < vocab_, "{}: token {} is outside of the model's vocabulary of {}", place, token, vocab_);
  }
  const auto tokens = static_cast<int64_t>(prompt.tokens.size());
  TRIAD_CHECK(tokens <= context_ || prompt.options.truncate,
              "{}: the prompt has {}, and the context holds {} (--context): \"truncate\": true drops its beginning",
              place, counted(tokens, "token"), context_);
  return prompt;
}

std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, const std::string& text) {
  std::vector<int32_t> tokens = {tokenizer.eot()};
  tokenizer.append(text, tokens);
  return tokens;
}

}  // namespace triad
