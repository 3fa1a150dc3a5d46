#include "io/chat/arithmetic.h"

#include <cmath>

#include "engine/check.h"

namespace triad::chat {

namespace {

[[noreturn]] void refuse(const std::string& op, const Value& left, const Value& right) {
  fail("`{}` of {} and {} is not supported", op, left.kind(), right.kind());
}

[[noreturn]] void overflow(const std::string& op) { fail("the result of `{}` has more than 64 bits", op); }

Value power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  constexpr int64_t kMost = 64;  // a larger exponent overflows unless the base is 0, 1 or -1
  if (exponent > kMost && base != 0 && base != 1 && base != -1) overflow("**");
  const int64_t times = exponent > kMost ? kMost + exponent % 2 : exponent;
  for (int64_t i = 0; i < times; ++i)
    if (__builtin_mul_overflow(result, base, &result)) overflow("**");
  return result;
}

Value calculate_integers(const std::string& op, int64_t a, int64_t b) {
  int64_t result = 0;
  if (op == "+" && !__builtin_add_overflow(a, b, &result)) return result;
  if (op == "-" && !__builtin_sub_overflow(a, b, &result)) return result;
  if (op == "*" && !__builtin_mul_overflow(a, b, &result)) return result;
  if (op == "+" || op == "-" || op == "*") overflow(op);
  if (op == "**") return b < 0 ? Value(std::pow(static_cast<double>(a), static_cast<double>(b))) : power(a, b);
  if (b == 0) fail("`{}` divides by 0", op);
  if (op == "/") return static_cast<double>(a) / static_cast<double>(b);
  if (b == -1) {
    if (op == "%") return int64_t{0};
    if (__builtin_sub_overflow(int64_t{0}, a, &result)) overflow(op);
    return result;
  }
  // Python rounds down, and a remainder has the divisor's sign.
  const bool round = a % b != 0 && (a < 0) != (b < 0);
  return op == "//" ? a / b - (round ? 1 : 0) : a % b + (round ? b : 0);
}

Value calculate_floats(const std::string& op, double a, double b) {
  if (op == "+") return a + b;
  if (op == "-") return a - b;
  if (op == "*") return a * b;
  if (op == "**") return std::pow(a, b);
  if (b == 0) fail("`{}` divides by 0", op);
  if (op == "/") return a / b;
  if (op == "//") return std::floor(a / b);
  const double rest = std::fmod(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// A string or list several times.
Value repeated(const Value& value, int64_t times, Budget& budget) {
  const int64_t n = std::max<int64_t>(0, times);
  if (value.is_string()) {
    std::string text;
    for (int64_t i = 0; i < n && !value.string().empty(); ++i) {
      budget.spend(value.string().size());
      text += value.string();
    }
    return text;
  }
  std::vector<Value> items;
  for (int64_t i = 0; i < n && !value.list().items.empty(); ++i) {
    budget.spend(value.list().items.size() * sizeof(Value));
    items.insert(items.end(), value.list().items.begin(), value.list().items.end());
  }
  return Value::list(std::move(items), value.list().kind);
}

bool is_sequence(const Value& value) {
  return value.is_string() || (value.is_list() && value.list().kind != List::Kind::generator);
}

}  // namespace

Value calculate(const std::string& op, const Value& left, const Value& right, Budget& budget) {
  if (op == "~") return to_text(left, budget) + to_text(right, budget);
  if (left.is_marked_safe() || right.is_marked_safe())
    fail("`{}` of a string that the filter safe has marked is not supported: `~` joins it", op);
  if (left.is_number() && right.is_number()) {
    if (left.is_float() || right.is_float()) return calculate_floats(op, left.number(), right.number());
    return calculate_integers(op, left.integer(), right.integer());
  }
  if (op == "+" && left.is_string() && right.is_string()) {
    budget.spend(left.string().size() + right.string().size());
    return left.string() + right.string();
  }
  if (op == "+" && is_sequence(left) && is_sequence(right) && left.is_list() && right.is_list() &&
      left.list().kind == right.list().kind) {
    std::vector<Value> items = items_of(left, budget), more = items_of(right, budget);
    items.insert(items.end(), more.begin(), more.end());
    return Value::list(std::move(items), left.list().kind);
  }
  if (op == "*" && is_sequence(left) && (right.is_int() || right.is_bool()))
    return repeated(left, right.integer(), budget);
  if (op == "*" && is_sequence(right) && (left.is_int() || left.is_bool()))
    return repeated(right, left.integer(), budget);
  refuse(op, left, right);
}

Value negated(const std::string& op, const Value& value) {
  if (op == "not") return !value.truth();
  if (!value.is_number()) fail("`{}` of {} is not supported", op, value.kind());
  if (value.is_float()) return op == "-" ? -value.number() : value.number();
  return op == "-" ? calculate_integers("-", 0, value.integer()) : Value(value.integer());
}

bool holds(const std::string& op, const Value& left, const Value& right, Budget& budget) {
  if (op == "==") return equal(left, right, budget);
  if (op == "!=") return !equal(left, right, budget);
  if (op == "in") return contains(right, left, budget);
  if (op == "not in") return !contains(right, left, budget);
  const int order = compare(left, right, budget);
  if (op == "<") return order < 0;
  if (op == "<=") return order <= 0;
  return op == ">" ? order > 0 : order >= 0;
}

}  // namespace triad::chat
