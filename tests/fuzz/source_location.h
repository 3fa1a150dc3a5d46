// Defines std::source_location for clang before version 16, which lacks the builtin that libstdc++ needs for it. CMake
// includes this file before all others.
#pragma once
namespace std {
class source_location {
 public:
  static constexpr source_location current(const char* file = __builtin_FILE(),
                                           const char* function = __builtin_FUNCTION(),
                                           unsigned line = __builtin_LINE()) noexcept {
    source_location here;
    here.file_ = file, here.function_ = function, here.line_ = line;
    return here;
  }
  constexpr const char* file_name() const noexcept { return file_; }
  constexpr const char* function_name() const noexcept { return function_; }
  constexpr unsigned line() const noexcept { return line_; }

 private:
  const char *file_ = "", *function_ = "";
  unsigned line_ = 0;
};
}  // namespace std
