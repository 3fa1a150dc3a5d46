// Errors: every failure is an exception whose message contains the values that caused it; main() reports it.
#pragma once
#ifdef __CUDACC__  // nvcc 13 cannot evaluate fmt 9's compile-time format checks; .cu files format without them
#define FMT_CONSTEVAL
#define FMT_USE_CONSTEXPR 1
#endif
#include <fmt/core.h>

#include <stdexcept>
#include <string>

namespace triad {

// A failure at run time: exit code 1.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An invalid user request (config, option, value): exit code 2.
class UsageError : public Error {
 public:
  using Error::Error;
};

[[noreturn]] inline void throw_error(fmt::string_view format, fmt::format_args args) {
  throw Error(fmt::vformat(format, args));
}

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw_error(format, fmt::make_format_args(args...));
}

template <class... Args>
[[noreturn]] void fail_usage(fmt::format_string<Args...> format, Args&&... args) {
  throw UsageError(fmt::vformat(format, fmt::make_format_args(args...)));
}

}  // namespace triad

// TRIAD_CHECK(cond, "format {}", values...): throws Error with the formatted message when cond is false.
#define TRIAD_CHECK(condition, ...)               \
  do {                                            \
    if (!(condition)) ::triad::fail(__VA_ARGS__); \
  } while (0)
