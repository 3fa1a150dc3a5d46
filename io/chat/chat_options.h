// What a reader of conversations is told.
#pragma once
#include <memory>
#include <string_view>
#include <utility>

#include "engine/fields.h"

namespace triad {

class ChatFormat;  // chat_format.h

// What is learned of conversations: all answers of the assistant, the last one, or everything.
enum class ChatLearn { assistant, last, all };
template <>
struct EnumWords<ChatLearn> {
  static constexpr std::pair<std::string_view, ChatLearn> words[] = {
      {"assistant", ChatLearn::assistant}, {"last", ChatLearn::last}, {"all", ChatLearn::all}};
};

// What is needed to read conversations. format: null for ChatML.
struct ChatOptions {
  std::shared_ptr<const ChatFormat> format;
  ChatLearn learn = ChatLearn::assistant;
};

}  // namespace triad
