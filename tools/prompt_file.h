// The prompts of a file for `triad generate --prompts`, read one by one: JSON objects, one a line, or plain lines.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/data/format/text_format.h"
#include "io/data/text_input.h"
#include "io/tokenizer/tokenizer.h"
#include "model/decoding/sampling.h"

namespace triad {

// What the command line says of each prompt, and a line may say otherwise.
struct PromptOptions {
  int64_t most = 200;  // tokens to sample at most
  SamplingOptions sampling;
  uint64_t seed = 1337;
  bool truncate = false;  // a prompt longer than the context loses its beginning, where it otherwise is an error
};

struct FilePrompt {
  std::optional<std::string> text;  // absent: the prompt is a list of ids
  std::vector<int32_t> tokens;      // one or more tokens
  std::vector<std::string> stop;    // texts that end the continuation
  PromptOptions options;
  uint64_t stream = 0;  // random stream within the seed: the prompt's number, or 0 if the line has a seed of its own
  std::string error;    // what is wrong with the line, which has no other value then
};

// A text's tokens after an end-of-text token, because one precedes each document in training.
std::vector<int32_t> prompt_tokens(const Tokenizer&, const std::string& text);

class PromptFile {
 public:
  // context: tokens that a prompt may have.
  PromptFile(const std::string& path, TextFormat, const PromptOptions&, const Tokenizer&, int64_t vocab,
             int64_t context);
  // The next prompt, blank lines skipped; none at the end.
  std::optional<FilePrompt> next();
  const std::string& name() const { return input_.name(); }

 private:
  bool read_line(std::string& line);
  FilePrompt parse(const std::string& line, const std::string& place) const;

  TextInput input_;
  PromptOptions options_;
  const Tokenizer& tokenizer_;
  int64_t vocab_, context_;
  bool jsonl_;
  std::string buffer_;  // text that was read, from at_ on
  size_t at_ = 0;
  bool at_end_ = false;
  int64_t line_ = 0, prompts_ = 0;  // lines and prompts so far
};

}  // namespace triad
