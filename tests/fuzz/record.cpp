// Fuzzes the reader of JSONL records (io/data/record.h): the parts of an accepted record, joined, are its strings.
#include "io/data/record.h"

#include <nlohmann/json.hpp>

#include "tests/fuzz/contract.h"

namespace triad::fuzz {

namespace {

struct Texts {
  std::string all, learned;
};

Texts texts_of(const nlohmann::json& object) {
  const auto text = [](const nlohmann::json& value) { return value.get<std::string>(); };
  if (object.contains("text") && object["text"].is_string()) return {text(object["text"]), text(object["text"])};
  if (!object.contains("messages"))
    return {text(object["prompt"]) + text(object["completion"]), text(object["completion"])};
  Texts texts;
  for (const nlohmann::json& message : object["messages"]) {
    const std::string content = text(message["content"]) + "\n";
    texts.all += text(message["role"]) + "\n" + content;
    if (message["role"] == "assistant") texts.learned += content;
  }
  return texts;
}

}  // namespace

void read_record(std::string_view bytes) {
  const std::string place = "lines.jsonl: line 7";
  const auto record = read_or_refuse(place, [&] { return parse_record(bytes, place); });
  if (!record) return;
  const Texts expected = texts_of(nlohmann::json::parse(bytes));
  Texts found;
  for (size_t i = 0; i < record->parts.size(); ++i) {
    const Record::Part& part = record->parts[i];
    found.all += part.text;
    if (part.learned) found.learned += part.text;
    expect(i == 0 || part.learned != record->parts[i - 1].learned, "parts {} and {} of {} could be one", i - 1, i,
           record->parts.size());
  }
  expect(found.all == expected.all, "a text of {} bytes instead of {}", found.all.size(), expected.all.size());
  expect(found.learned == expected.learned, "{} bytes are learned instead of {}", found.learned.size(),
         expected.learned.size());
  expect(record->empty() == expected.all.empty(), "a record of {} bytes counts as empty or not", expected.all.size());
  expect(record->masked || found.learned == found.all, "a record without a mask of which not all is learned");
}

}  // namespace triad::fuzz
