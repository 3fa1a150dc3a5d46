// Decides what a data file holds. Every verb that reads data asks here.
#pragma once
#include <string>
#include <string_view>

#include "engine/fields.h"

namespace triad {

class TextInput;

// data.format and --format: which documents a text file holds.
enum class TextFormat {
  automatic,  // content and name decide
  text,       // one document
  jsonl       // each line a record (io/data/record.h)
};
template <>
struct EnumWords<TextFormat> {
  static constexpr std::pair<std::string_view, TextFormat> words[] = {
      {"auto", TextFormat::automatic}, {"text", TextFormat::text}, {"jsonl", TextFormat::jsonl}};
};

inline constexpr const char* kTakenAsText = "--format text or data.format text takes it as text";

enum class Content { text, jsonl, shard };

// Distinguishes text and JSONL by the input's first bytes, which a later read still returns. gzip, zstd and a
// byte-order mark make no difference, and neither does a pipe in place of a file. Lines of JSON objects are JSONL under
// any file name, and so is a file named .jsonl, .ndjson, .jsonlines or .jl. Throws an Error that names what the input
// is instead: other JSON (io/data/format/json_shape.h), a *.json file with a single object (which may be either), HTML
// named .jsonl, binary data, another program's file (io/foreign_format.h). In JSONL by name or `format` a line that is
// other JSON is a bad record, and only a value over several lines throws. `format` text takes all of these as text,
// except packed_format().
Content content_of(TextInput& input, TextFormat format = TextFormat::automatic);
// The same for a file, which may also be a token shard.
Content content_of(const std::string& path, TextFormat format = TextFormat::automatic);

}  // namespace triad
