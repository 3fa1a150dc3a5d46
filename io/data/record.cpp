#include "io/data/record.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/chat/chat_format.h"
#include "io/data/format/text_format.h"
#include "io/json_config.h"
#include "io/tokenizer/unicode.h"

namespace triad {

namespace {

using Object = nlohmann::json;

// A value for a message. Lists and objects are only named, because they may be nested so deeply that printing them
// would overflow the stack.
std::string shown(const Object& value) { return value.is_structured() ? value.type_name() : brief(value); }

// The string under an object's key.
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

// Whether a value says nothing: what a table writes where a record has no such key, or a factor 1.
bool says_nothing(std::string_view key, const Object& value) {
  const bool factor = key.ends_with("_weight") || key.ends_with("_scale");
  return value.is_null() || (factor && value.is_number() && value.get<double>() == 1) ||
         (value.is_boolean() && !value.get<bool>()) ||
         (value.is_string() && value.get_ref<const std::string&>().empty()) || (value.is_structured() && value.empty());
}

// Keys that change what is learned, or the text before it, and that Triad does not support: `functions` (OpenAI's
// former format), `train_detail` (axolotl's), `loss_scale` (ms-swift's), `suffix` (fill-in-the-middle), ...
constexpr const char* kOfMessages[] = {"function_call", "functions",   "audio",     "images", "refusal", "train_detail",
                                       "loss_scale",    "loss_weight", "loss_mask", "mask",   "masked"};
constexpr const char* kOfRecords[] = {"loss_mask", "loss_weight", "sample_weight", "mask", "masked"};
constexpr const char* kOfChats[] = {"functions", "function_call", "system",   "suffix",     "images",
                                    "videos",    "audios",        "rejected", "loss_scale", "documents"};
// Keys of conversations alone.
constexpr const char* kOfMessagesOnly[] = {"tools", "chat_template_kwargs"};

template <size_t N>
void refuse_keys(const char* const (&keys)[N], const Object& object, const std::string& place) {
  for (const char* key : keys)
    if (const auto found = object.find(key); found != object.end() && !says_nothing(key, *found))
      fail("{}: `{}` is {}: this key changes what is learned, and is not supported", place, key, shown(*found));
}

// A key's value that says whether something is learned: 0, 1, true or false; nullopt if it is absent or null.
std::optional<bool> learned_by(const Object& object, const char* key, const std::string& place) {
  const auto found = object.find(key);
  if (found == object.end() || found->is_null()) return std::nullopt;
  if (found->is_boolean()) return found->get<bool>();
  const double number = found->is_number() ? found->get<double>() : -1;
  if (number == 0 || number == 1) return number == 1;
  fail("{}: `{}` is {}: 0, 1, false or true is supported", place, key, shown(*found));
}

// A weight for a whole record: only 1, the same as none, is supported.
void check_record_weight(const Object& object, const std::string& place) {
  for (const char* key : {"weight", "train"})
    if (const auto found = object.find(key); found != object.end() && (found->is_number() || found->is_boolean()))
      if (!learned_by(object, key, place).value_or(true))
        fail("{}: `{}` is {}: records that are not learned are not supported", place, key, shown(*found));
  // A number with this name may be the loss that another model had.
  if (const auto found = object.find("loss"); found != object.end() && found->is_boolean() && !found->get<bool>())
    fail("{}: `loss` is false: records that are not learned are not supported", place);
}

// Whether a message is learned: the assistant's are, unless their weight, train or loss says otherwise.
bool is_learned(const Object& message, const std::string& role, const std::string& place) {
  std::optional<bool> learned;
  for (const char* key : {"weight", "train", "loss"}) {
    const std::optional<bool> says = learned_by(message, key, place);
    if (!says) continue;
    if (learned.value_or(*says) != *says) fail("{}: `{}` is {}, and another key says the opposite", place, key, *says);
    if (*says && role != "assistant")
      fail("{}: `{}` is {}: of role \"{}\" nothing can be learned, only of assistant", place, key, *says,
           shortened(role));
    learned = says;
  }
  return learned.value_or(role == "assistant");
}

// The text with what is learned: these spans, which may touch or overlap, or with `inverted` all else.
Record record_of_spans(const std::string& text, std::vector<ChatFormat::Span> spans, bool inverted) {
  std::sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  Record record{.parts = {}, .masked = true, .chat = true};
  size_t at = 0;
  const auto take = [&](size_t end, bool learned) {
    if (end > at) append(record, std::string_view(text).substr(at, end - at), learned);
    at = std::max(at, end);
  };
  for (const ChatFormat::Span& span : spans) {
    take(span.begin, inverted);
    take(span.end, !inverted);
  }
  take(text.size(), inverted);
  return record;
}

// Throws for an integer beyond 64 bits in a line of JSON, of which Python prints all digits, but the parser makes a
// double.
void refuse_long_integers(std::string_view line, const std::string& place) {
  const auto is_part = [](char c) { return (c >= '0' && c <= '9') || c == '.' || c == 'e' || c == 'E' || c == '+'; };
  for (size_t at = 0; at < line.size(); ++at) {
    if (line[at] == '"') {
      for (++at; at < line.size() && line[at] != '"'; ++at) at += line[at] == '\\' ? 1 : 0;
    } else if (line[at] >= '0' && line[at] <= '9') {
      size_t end = at;
      while (end < line.size() && (is_part(line[end]) || line[end] == '-')) ++end;
      const std::string_view number = line.substr(at, end - at);
      int64_t value = 0;
      const bool integer = number.find_first_not_of("0123456789") == std::string_view::npos;
      if (integer && std::from_chars(number.data(), number.data() + number.size(), value).ec != std::errc())
        fail("{}: the number {} has more than 64 bits", place, shortened(number, 40));
      at = end - 1;
    }
  }
}

// line: the record's text again, for the order of its keys.
Record record_of_messages(const Object& messages, std::string_view line, const std::string& place,
                          const ChatOptions& chat) {
  if (!messages.is_array()) fail("{}: `messages` is {}: a list is needed", place, shown(messages));
  std::vector<size_t> answers, left_out;  // messages of the assistant by whether they are learned
  for (size_t i = 0; i < messages.size(); ++i) {
    const Object& message = messages[i];
    const std::string message_place = fmt::format("{}: message {}", place, i + 1);
    if (!message.is_object()) fail("{} is {}: an object is needed", message_place, shown(message));
    const std::string& role = string_in(message, "role", message_place);
    if (role.empty() || role.find('\n') != std::string::npos)
      fail("{}: `role` is \"{}\": one line is needed", message_place, shortened(role));
    refuse_keys(kOfMessages, message, message_place);
    const bool learned = is_learned(message, role, message_place);
    if (role == "assistant") (learned ? answers : left_out).push_back(i);
  }
  refuse_long_integers(line, place);
  Conversation conversation = read_conversation(parse_json(line, place), place);
  conversation.bytes = line.size();
  try {
    const bool all = chat.learn == ChatLearn::all;
    if (all && left_out.empty()) return record_of_spans(chat.format->text(conversation), {}, true);
    const ChatFormat::Text text = chat.format->render(conversation);
    if (!text.unknown.empty() && (!left_out.empty() || chat.learn == ChatLearn::last))
      fail("{{% generation %}} outside of a loop over the messages does not say which message it is of");
    if (chat.learn == ChatLearn::last && answers.size() > 1) answers = {answers.back()};
    std::vector<ChatFormat::Span> spans = text.unknown;
    for (const size_t i : all ? left_out : answers)
      spans.insert(spans.end(), text.answers[i].begin(), text.answers[i].end());
    return record_of_spans(text.text, std::move(spans), all);
  } catch (const Error& e) { fail("{}: {}", place, e.what()); }
}

// The end of an error: what a line has to be, and what to do if the file is no JSONL.
const std::string kNeeded =
    fmt::format("a JSON object with a string `text`, with `prompt` and `completion`, or with `messages` is needed; {}",
                kTakenAsText);

constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";

bool is_used(std::string_view key) {
  const auto among = [&](const auto& keys) {
    return std::find(std::begin(keys), std::end(keys), key) != std::end(keys);
  };
  constexpr const char* kTexts[] = {"text", "prompt", "completion", "messages", "weight", "train", "label"};
  return among(kTexts) || among(kOfRecords) || among(kOfChats) || among(kOfMessagesOnly);
}

// Rewrites a line that strict JSON refuses, so that what other programs write in keys that are not used does not end a
// run: numbers that no double holds, NaN and Infinity become null, and strings in unused keys lose what is no text.
class Tolerant {
 public:
  explicit Tolerant(std::string_view line) : line_(line) {}

  std::string rewrite() {
    while (at_ < line_.size()) {
      const char c = line_[at_];
      if (c == '"') {
        string();
      } else if (c == '-' || c == 'N' || c == 'I' || (c >= '0' && c <= '9')) {
        number();
      } else {
        depth_ += c == '{' || c == '[' ? 1 : c == '}' || c == ']' ? -1 : 0;
        if (c == ',' && depth_ == 1) key_ = true;
        out_ += c;
        ++at_;
      }
    }
    return std::move(out_);
  }

 private:
  void string() {
    const size_t begin = at_++;
    while (at_ < line_.size() && line_[at_] != '"') at_ += line_[at_] == '\\' ? 2 : 1;
    at_ = std::min(at_ + 1, line_.size());
    const std::string_view whole = line_.substr(begin, at_ - begin);
    const bool is_text = Object::accept(whole);
    if (depth_ == 1 && key_) {
      used_ = !is_text || is_used(Object::parse(whole).get_ref<const std::string&>());
      key_ = false;
    }
    out_ += is_text || used_ ? whole : "\"\"";
  }

  void number() {
    const size_t end = std::min(line_.find_first_of(",}] \t\r\n", at_), line_.size());
    const std::string_view word = line_.substr(at_, end - at_);
    const bool is_number = word.find_first_not_of("+-.eE0123456789") == std::string_view::npos;
    const bool infinite = is_number && std::isinf(std::strtod(std::string(word).c_str(), nullptr));
    // An infinite number in a used key is refused like any wrong one; NaN is what pandas writes for nothing.
    if (infinite || word == "Infinity" || word == "-Infinity")
      out_ += used_ ? "-1" : "null";
    else
      out_ += word == "NaN" ? "null" : word;
    at_ = end;
  }

  std::string_view line_;
  std::string out_;
  size_t at_ = 0;
  int64_t depth_ = 0;
  bool key_ = true, used_ = true;  // the next string at depth 1 is a key; the current key is used
};

// line: becomes what was parsed, if that is not the line itself.
Object parse_object(std::string& line, const std::string& place) {
  // The parser takes a NUL after the object for the end, and so would leave out what follows.
  if (line.find('\0') != std::string_view::npos) fail("{}: a NUL byte, which no JSON holds", place);
  try {
    return Object::parse(line);
  } catch (const Object::exception& e) {
    const std::string tolerant = Tolerant(line).rewrite();
    if (tolerant == line) fail("{}: {}: {}", place, shortened(e.what()), kNeeded);
    try {
      Object object = Object::parse(tolerant);
      line = tolerant;
      return object;
    } catch (const Object::exception& rest) { fail("{}: {}: {}", place, shortened(rest.what()), kNeeded); }
  }
}

}  // namespace

bool Record::empty() const {
  return std::all_of(parts.begin(), parts.end(), [](const Part& part) { return part.text.empty(); });
}

bool is_blank_line(std::string_view line) {
  if (line.starts_with(kByteOrderMark)) line.remove_prefix(kByteOrderMark.size());
  size_t at = 0;
  while (at < line.size()) {
    const auto c = static_cast<unsigned char>(line[at]);
    if (c < 0x80) {
      if (c != ' ' && (c < 0x09 || c > 0x0d) && (c < 0x1c || c > 0x1f)) return false;
      ++at;
      continue;
    }
    constexpr size_t kLongest = 4;
    if (utf8_prefix(line.substr(at, kLongest)) == 0) return false;
    if (!is_python_space(point_at(line, at))) return false;
    at += character_bytes(line, at);
  }
  return true;
}

bool is_conversation(std::string_view line) {
  const Object object = Object::parse(line, nullptr, false);
  if (!object.is_object() || !object.contains("messages")) return false;
  return !object.contains("text") || !object["text"].is_string();
}

Record parse_record(std::string_view text, const std::string& place, const ChatOptions& chat) {
  std::string line(text);
  Object object = parse_object(line, place);
  if (object.is_array()) fail("{}: is a JSON array (jq -c '.[]' writes its elements, one a line): {}", place, kNeeded);
  if (!object.is_object()) fail("{}: is {}: {}", place, shown(object), kNeeded);
  const auto has = [&](const char* key) { return object.contains(key); };
  refuse_keys(kOfRecords, object, place);
  check_record_weight(object, place);
  if (has("text") && object["text"].is_string()) {
    Record record;
    record.parts.push_back({.text = std::move(object["text"].get_ref<std::string&>())});
    return record;
  }
  const bool prompt = has("prompt") || has("completion");
  if (prompt && has("messages")) fail("{}: has both `messages` and `prompt` or `completion`", place);
  if (!prompt && !has("messages")) fail("{}: {}", place, kNeeded);
  refuse_keys(kOfChats, object, place);
  if (const auto label = object.find("label"); label != object.end() && label->is_boolean() && !label->get<bool>())
    fail("{}: `label` is false, an answer that is not to be learned: not supported", place);
  if (has("messages")) return record_of_messages(object["messages"], line, place, chat);
  refuse_keys(kOfMessagesOnly, object, place);
  Record record{.parts = {}, .masked = true};
  append(record, string_in(object, "prompt", place), false);
  append(record, string_in(object, "completion", place), true);
  return record;
}

}  // namespace triad
