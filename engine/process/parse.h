// Text to numbers by std::from_chars: no locale, no exceptions, nothing beyond the type's range.
#pragma once
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>

namespace triad {

// The whole of a text as a number. Nothing where it is none, where more text follows, or where T does not hold it.
template <class T>
std::optional<T> parse_number(std::string_view text) {
  T value{};
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end ? std::optional<T>(value) : std::nullopt;
}

}  // namespace triad
