#include "io/data/record.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "engine/check.h"
#include "io/json_config.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace {

using Object = nlohmann::json;

// A value for a message. Lists and objects are only named, because they may be nested so deeply that printing them
// would overflow the stack.
std::string shown(const Object& value) { return value.is_structured() ? value.type_name() : brief(value); }

// The string under a key of an object.
const std::string& string_in(const Object& object, const char* key, const std::string& place) {
  const auto found = object.find(key);
  if (found == object.end()) fail("{}: `{}` is missing", place, key);
  if (!found->is_string()) fail("{}: `{}` is {}: a string is needed", place, key, shown(*found));
  return found->get_ref<const std::string&>();
}

// Appends text; text that follows text of the same kind joins it, so that both are tokenized as one.
void append(Record& record, std::string_view text, bool learned) {
  if (record.parts.empty() || record.parts.back().learned != learned)
    record.parts.push_back({.text = {}, .learned = learned});
  record.parts.back().text += text;
}

Record record_of_messages(const Object& messages, const std::string& place) {
  if (!messages.is_array()) fail("{}: `messages` is {}: a list is needed", place, shown(messages));
  if (messages.empty()) fail("{}: `messages` is an empty list", place);
  Record record{.parts = {}, .masked = true};
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string of_message = fmt::format("{}: message {}", place, i + 1);
    if (!messages[i].is_object()) fail("{} is {}: an object is needed", of_message, shown(messages[i]));
    const std::string& role = string_in(messages[i], "role", of_message);
    if (role.empty() || role.find('\n') != std::string::npos)
      fail("{}: `role` is \"{}\": one line is needed", of_message, shortened(role));
    append(record, role + "\n", false);
    append(record, string_in(messages[i], "content", of_message) + "\n", role == "assistant");
  }
  return record;
}

}  // namespace

bool Record::empty() const {
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.text.empty(); });
}

Record parse_record(std::string_view line, const std::string& place) {
  Object object;
  try {
    object = Object::parse(line);
  } catch (const Object::exception& e) { fail("{}: {}", place, shortened(e.what())); }
  const auto has = [&](const char* key) { return object.is_object() && object.contains(key); };
  if (has("text") && object["text"].is_string()) {
    Record record;
    record.parts.push_back({.text = std::move(object["text"].get_ref<std::string&>())});
    return record;
  }
  const bool prompt = has("prompt") || has("completion");
  if (prompt && has("messages")) fail("{}: has both `messages` and `prompt` or `completion`", place);
  if (has("messages")) return record_of_messages(object["messages"], place);
  if (!prompt)
    fail("{}: a JSON object with a string `text`, with `prompt` and `completion`, or with `messages` is needed", place);
  Record record{.parts = {}, .masked = true};
  append(record, string_in(object, "prompt", place), false);
  append(record, string_in(object, "completion", place), true);
  return record;
}

}  // namespace triad
