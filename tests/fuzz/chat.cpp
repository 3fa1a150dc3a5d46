// Fuzzes chat templates and conversations (io/chat/): rendering ends, repeats, and finds answers within the text.
#include "io/chat/chat_format.h"
#include "tests/fuzz/contract.h"

namespace triad::fuzz {

void read_chat(std::string_view bytes) {
  const std::vector<std::string_view> parts = sections(bytes, 2);
  const std::string file = "chat.jinja", place = "chat.jsonl: line 7";
  const auto format = read_or_refuse(file, [&] {
    return ChatFormat(file, {{"default", std::string(parts[0])}}, {{"bos_token", "<s>"}});
  });
  if (!format) return;
  const auto conversation =
      read_or_refuse(place, [&] { return read_conversation(parse_json(parts[1], place), place); });
  if (!conversation) return;
  Conversation sized = *conversation;
  sized.bytes = parts[1].size();
  const auto text = read_or_refuse(file, [&] { return format->render(sized); });
  if (!text) return;
  expect(format->text(sized) == text->text, "a text of {} bytes differs when it is rendered again", text->text.size());
  expect(text->answers.size() == sized.messages.size(), "{} answers to {} messages", text->answers.size(),
         sized.messages.size());
  for (const auto& answers : text->answers)
    for (const ChatFormat::Span& span : answers)
      expect(span.begin <= span.end && span.end <= text->text.size(), "an answer from {} to {} in {} bytes", span.begin,
             span.end, text->text.size());
}

}  // namespace triad::fuzz
