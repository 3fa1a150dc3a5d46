// A config's fields. A config struct S declares them once, in a free function
//   template <class V> void visit(S& s, V&& v) { v("lr", s.lr, "peak learning rate", above(0).up_to(1)); ... }
// Parsing, range checks, --help, the config echo and the check of a resumed run's config all visit this list. A field
// is a bool, int64_t, double, std::string, std::vector<std::string>, std::vector<double>, an enum whose words are in
// EnumWords, KernelChoices (routes.h), a std::optional of one of these (null: absent), or a std::vector of structs with
// their own visit().
#pragma once
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace triad {

// The values that a field may take: a number range, and whether the config must set the field.
struct Rule {
  bool required = false;
  double min = -std::numeric_limits<double>::infinity(), max = std::numeric_limits<double>::infinity();
  bool min_is_open = false;  // the minimum itself is not allowed

  constexpr Rule up_to(double value) const {
    Rule r = *this;
    r.max = value;
    return r;
  }
  bool allows(double x) const { return (min_is_open ? x > min : x >= min) && x <= max; }
  std::string str() const;  // "a number in (0, 1]", for messages
};
constexpr Rule at_least(double value) { return {.min = value}; }
constexpr Rule above(double value) { return {.min = value, .min_is_open = true}; }
constexpr Rule required(Rule rule = {}) {
  rule.required = true;
  return rule;
}

// An enum field's words. Specialise it with `static constexpr std::pair<std::string_view, E> words[] = {...};`
template <class E>
struct EnumWords;

template <class E>
std::string_view word_of(E value) {
  for (const auto& [word, v] : EnumWords<E>::words)
    if (v == value) return word;
  return "?";
}
template <class E>
std::string all_words() {
  std::string out;
  for (const auto& [word, v] : EnumWords<E>::words)
    if (!word.empty()) out.append(out.empty() ? "" : "|").append(word);
  return out;
}

}  // namespace triad
