// Fuzzes reading JSONL records (io/data/record.h): an accepted record's parts, joined, are its strings.
#include "io/data/record.h"

#include <initializer_list>
#include <memory>
#include <nlohmann/json.hpp>

#include "io/chat/chat_format.h"
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
  for (const nlohmann::json& message : object["messages"]) {  // ChatML
    const std::string content = text(message["content"]) + "<|im_end|>";
    texts.all += "<|im_start|>" + text(message["role"]) + "\n" + content + "\n";
    bool learned = message["role"] == "assistant";
    for (const char* key : {"weight", "train", "loss"})
      if (message.contains(key) && (message[key] == false || message[key] == 0)) learned = false;
    if (learned) texts.learned += content;
  }
  return texts;
}

}  // namespace

void read_record(std::string_view bytes) {
  const std::string place = "lines.jsonl: line 7";
  const ChatOptions chatml{.format = std::make_shared<const ChatFormat>(ChatFormat::chatml(Json::object()))};
  const auto record = read_or_refuse(place, [&] { return parse_record(bytes, place, chatml); });
  if (!record) return;
  const nlohmann::json strict = nlohmann::json::parse(bytes, nullptr, false);
  Texts found;
  for (size_t i = 0; i < record->parts.size(); ++i) {
    const Record::Part& part = record->parts[i];
    found.all += part.text;
    if (part.learned) found.learned += part.text;
    expect(i == 0 || part.learned != record->parts[i - 1].learned, "parts {} and {} of {} could be one", i - 1, i,
           record->parts.size());
  }
  expect(record->masked || found.learned == found.all, "a record without a mask of which not all is learned");
  expect(record->empty() == found.all.empty(), "a record of {} bytes counts as empty or not", found.all.size());
  if (strict.is_discarded()) return;  // a line with what JSON does not have, in keys that are not used
  // Variables of the template may change the text, and contents that spell ChatML what is taken for the answer.
  if (strict.contains("chat_template_kwargs") || bytes.find("<|im_") != std::string_view::npos) return;
  const Texts expected = texts_of(strict);
  expect(found.all == expected.all, "a text of {} bytes instead of {}", found.all.size(), expected.all.size());
  expect(found.learned == expected.learned, "{} bytes are learned instead of {}", found.learned.size(),
         expected.learned.size());
}

}  // namespace triad::fuzz
