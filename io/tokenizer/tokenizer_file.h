// The content of a tokenizer.json (io/tokenizer/tokenizer_json.cpp reads it).
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/json_config.h"
#include "io/tokenizer/bpe_trainer.h"
#include "io/tokenizer/word_counter.h"

namespace triad {

// Limit on token ids, far above real vocabularies. It bounds the token text table, which a wrong id would make huge, to
// 84 MB.
inline constexpr int64_t kMaxTokens = 1 << 21;

// byte_tokenizer_json()'s vocabulary, in id order. It spells byte 0 as itself, so that the character whose UTF-8 is
// that byte can be a special token, and no other character is one.
Json byte_vocabulary();

// A trained tokenizer, whose first tokens are these special ones.
std::string tokenizer_json(const TrainedBpe& bpe, const std::vector<std::string>& special_tokens, WordSplit split);

// The first of the usual names of an end-of-text token that is among these; "" if there is none.
std::string usual_eot(std::span<const std::string> names);

}  // namespace triad
