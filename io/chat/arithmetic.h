// Operators of a chat template's expressions, with Python's meaning.
#pragma once
#include <string>

#include "io/chat/value.h"

namespace triad::chat {

Value calculate(const std::string& op, const Value& left, const Value& right, Budget&);  // + - * / // % ** ~
Value negated(const std::string& op, const Value&);                                      // + - not
bool holds(const std::string& op, const Value& left, const Value& right, Budget&);       // == != < <= > >= in, not in

}  // namespace triad::chat
