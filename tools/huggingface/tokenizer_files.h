// An exported model's tokenizer files, as transformers' AutoTokenizer reads them.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/chat/chat_format.h"
#include "tools/huggingface/model_files.h"

namespace triad {

// Returns the files: tokenizer.json (for the byte tokenizer one that gives the same tokens) or vocab.json and
// merges.txt, tokenizer_config.json and special_tokens_map.json. An imported model's small files are kept as they were
// if the model still has its tokens: origin comes from origin_for_tokens(). None if the model has no tokenizer.
// seq_len: the training length, transformers' model_max_length.
std::vector<Tokenizer::File> tokenizer_files(const Tokenizer&, const Json& origin, const ExportClass&, int64_t seq_len);
// The two small ones, for a tokenizer that was not imported. vocabulary: the file that holds its vocabulary.
std::vector<Tokenizer::File> special_token_files(const Tokenizer&, const std::string& vocabulary,
                                                 std::optional<int64_t> seq_len);

// Adds the chat template that was trained to a model's files, in place of any other.
void set_chat_template(std::vector<Tokenizer::File>& files, const ChatFormat&);
// Adds the token that ends an answer, if it is one token, to those that end a text.
void add_turn_end(Json& generation_config, const ChatFormat&, const Tokenizer&);

// Removes the chat templates from an imported model's origin, since training here went without them. Returns whether
// there was one.
bool remove_chat_template(Json& origin);

}  // namespace triad
