// Fuzzes deciding what a data file holds (io/data/format/text_format.h): nothing that is JSON is text, and what is
// JSONL without a name is so with one.
#include <nlohmann/json.hpp>

#include "io/data/format/text_format.h"
#include "io/data/text_input.h"
#include "tests/fuzz/contract.h"

namespace triad::fuzz {

void read_content(std::string_view bytes) {
  const std::string plain = scratch_file("content", bytes), lines = scratch_file("content.jsonl", bytes);
  const auto content = read_or_refuse(plain, [&] { return content_of(plain); });
  const auto named = read_or_refuse(lines, [&] { return content_of(lines); });
  if (content == Content::jsonl)
    expect(named == Content::jsonl, "JSONL of {} bytes that is none as {}", bytes.size(), lines);
  expect(named != Content::text, "{}: {} bytes count as text", lines, bytes.size());
  if (content != Content::text) return;
  const auto read = read_or_refuse(plain, [&] { return read_whole_text(plain); });  // compressed data may end damaged
  if (!read) return;
  const std::string& text = *read;
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  const bool ends_at_nul = text.find('\0') != std::string::npos;  // the parser leaves out what follows
  expect(json.is_discarded() || !(json.is_structured() || json.is_string()) || ends_at_nul,
         "{}: {} bytes of JSON count as text", plain, text.size());
}

}  // namespace triad::fuzz
