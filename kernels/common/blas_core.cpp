#include "kernels/common/blas_core.h"

#include <cblas.h>
#include <fmt/format.h>
#include <strings.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

extern "C" char* openblas_get_corename();

namespace triad {

namespace {

constexpr const char* kCoreVariable = "OPENBLAS_CORETYPE";     // OpenBLAS reads this when it is loaded
constexpr const char* kReplaced = "TRIAD_REPLACED_BLAS_CORE";  // the core type that OpenBLAS had chosen, for reports

// The version in "OpenBLAS 0.3.21 ..." as 321; -1 if the text holds none.
int version_of(const std::string& config) {
  int major = 0, minor = 0, patch = 0;
  if (std::sscanf(config.c_str(), "OpenBLAS %d.%d.%d", &major, &minor, &patch) != 3) return -1;
  return (major * 100 + minor) * 100 + patch;
}

const char* core_variable() {
  const char* const value = std::getenv(kCoreVariable);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

template <size_t N>
bool is_one_of(const std::string& name, const std::array<const char*, N>& names) {
  for (const char* each : names)
    if (strcasecmp(name.c_str(), each) == 0) return true;
  return false;
}

}  // namespace

CpuVectors cpu_vectors() {
#ifdef __x86_64__
  __builtin_cpu_init();
  return {.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
          .avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                    __builtin_cpu_supports("avx512cd")};
#else
  return {};
#endif
}

std::string better_blas_core(const std::string& config, const std::string& loaded, CpuVectors cpu) {
  // 0.3.22 detects Sapphire Rapids as such, and 0.3.29 is the first version that was seen fast there.
  constexpr int kKnowsSapphireRapids = 322, kKnowsAll = 329;
  const int version = version_of(config);
  if (version < 0 || version >= kKnowsAll || config.find("DYNAMIC_ARCH") == std::string::npos) return "";
  const std::string wanted = cpu.avx512 ? "SkylakeX" : cpu.avx2 ? "Haswell" : "";
  if (wanted.empty() || strcasecmp(wanted.c_str(), loaded.c_str()) == 0) return "";
  if (version >= kKnowsSapphireRapids && is_one_of(loaded, std::array{"Cooperlake", "SapphireRapids"})) return "";
  // On a CPU without AVX-512 both of these use AVX2.
  if (!cpu.avx512 && is_one_of(loaded, std::array{"Haswell", "Zen"})) return "";
  return wanted;
}

void use_better_blas_core(char** argv) {
  if (core_variable() != nullptr) return;
  const std::string loaded = openblas_get_corename();
  const std::string wanted = better_blas_core(openblas_get_config(), loaded, cpu_vectors());
  if (wanted.empty()) return;
  setenv(kCoreVariable, wanted.c_str(), 1);
  setenv(kReplaced, loaded.c_str(), 1);
  execv("/proc/self/exe", argv);
  std::fprintf(stderr, "triad: OpenBLAS uses its %s kernels, and those of %s are faster here: set %s=%s (%s)\n",
               loaded.c_str(), wanted.c_str(), kCoreVariable, wanted.c_str(), std::strerror(errno));
  unsetenv(kCoreVariable);
  unsetenv(kReplaced);
}

std::vector<std::string> blas_cores_for(CpuVectors cpu) {
  std::vector<std::string> cores;
  if (cpu.avx2) cores.push_back("Haswell");
  if (cpu.avx512) cores.push_back("SkylakeX");
  return cores;
}

std::string blas_rates_text(const BlasRate& in_use, const std::vector<BlasRate>& others) {
  constexpr double kWorthChanging = 1.25;
  std::string text = fmt::format("matrix products at {:.0f} GFLOP/s (OpenBLAS {})", in_use.gflop_per_s, in_use.core);
  BlasRate best = in_use;
  for (const BlasRate& other : others) {
    text += fmt::format(", {:.0f} with {}", other.gflop_per_s, other.core);
    if (other.gflop_per_s > best.gflop_per_s) best = other;
  }
  if (best.gflop_per_s >= kWorthChanging * in_use.gflop_per_s)
    text += fmt::format(": {}={} makes training faster", kCoreVariable, best.core);
  return text;
}

std::string blas_core() {
  const std::string loaded = openblas_get_corename();
  if (const char* replaced = std::getenv(kReplaced))
    return loaded + ", chosen by triad (OpenBLAS: " + std::string(replaced) + ")";
  return loaded + (core_variable() != nullptr ? ", chosen by OPENBLAS_CORETYPE" : ", chosen by OpenBLAS");
}

}  // namespace triad
