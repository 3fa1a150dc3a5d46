// Text to numbers by std::from_chars: locale-independent, without exceptions.
#pragma once
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace triad {

// The number, if the whole text is a number that T can hold; otherwise empty.
template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end ? std::optional<T>(value) : std::nullopt;
}

}  // namespace triad
