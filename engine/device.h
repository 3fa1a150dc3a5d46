// Where memory lives and work runs: the host, or one CUDA device of this process.
#pragma once
#include <string>

namespace triad {

struct Device {
  enum class Kind : unsigned char { cpu, cuda };
  Kind kind = Kind::cpu;
  int index = 0;

  static constexpr Device cpu() { return {}; }
  static constexpr Device cuda(int index = 0) { return {Kind::cuda, index}; }
  constexpr bool is_cuda() const { return kind == Kind::cuda; }
  std::string str() const { return is_cuda() ? "cuda:" + std::to_string(index) : "cpu"; }
  friend constexpr bool operator==(const Device&, const Device&) = default;
};

}  // namespace triad
