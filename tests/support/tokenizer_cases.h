// The tokenizers of tests/io/known_tokens.json, which Hugging Face's `tokenizers` library made, with its tokens of some
// texts.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "io/file.h"
#include "io/json_config.h"
#include "io/tokenizer/tokenizer.h"
#include "tests/support/program.h"

namespace triad::test {

inline std::vector<Json> known_cases() {
  const std::string path = TRIAD_SOURCE_DIR "/tests/io/known_tokens.json";
  const Json cases = parse_json(read_file(path), path);
  return {cases.begin(), cases.end()};
}

// Lets `change` modify a case's tokenizer.json, writes it, and reads it.
template <class F>
std::unique_ptr<Tokenizer> tokenizer_of(const TemporaryFolder& folder, const Json& known, F&& change,
                                        const TokenizerOptions& options = {}) {
  Json json = known.at("tokenizer");
  change(json);
  write_text(folder.file("tokenizer.json"), json.dump());
  return make_tokenizer(folder.file("tokenizer.json"), options);
}
inline std::unique_ptr<Tokenizer> tokenizer_of(const TemporaryFolder& folder, const Json& known) {
  return tokenizer_of(folder, known, [](Json&) {});
}

}  // namespace triad::test
