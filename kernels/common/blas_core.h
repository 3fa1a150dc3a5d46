// Which of its CPU kernels OpenBLAS uses. It chooses them when it is loaded ("core types": Haswell, SkylakeX, ...), and
// older versions know newer CPUs badly: with Debian 12's 0.3.21 a Sapphire Rapids Xeon (two cores) trained the
// quickstart at 4,665 tokens/s with the default choice, and at 9,822 with SkylakeX kernels (2026-11-28).
#pragma once
#include <string>
#include <vector>

namespace triad {

struct CpuVectors {
  bool avx2 = false;    // AVX2 and FMA
  bool avx512 = false;  // AVX-512 F, BW, DQ, VL and CD
};
CpuVectors cpu_vectors();

// The core type that suits this CPU where OpenBLAS is known to choose a slower one; "" where its own choice stays.
// config: what openblas_get_config() returns, "OpenBLAS 0.3.21 ... DYNAMIC_ARCH ..."; loaded: the core type in use.
std::string better_blas_core(const std::string& config, const std::string& loaded, CpuVectors cpu);

// Runs this program again, with OPENBLAS_CORETYPE set, where better_blas_core() names a core type and the user has set
// none. main() calls this first: OpenBLAS cannot change its kernels after it was loaded, and the kernels decide a
// training run's bits, so they must not depend on a measurement. Returns where nothing is to be changed.
void use_better_blas_core(char** argv);

// The core type in use and who chose it: "SkylakeX, chosen by triad (OpenBLAS: Haswell)".
std::string blas_core();

// The core types that this CPU can use and whose vectors differ, for a comparison.
std::vector<std::string> blas_cores_for(CpuVectors cpu);

struct BlasRate {
  std::string core;
  double gflop_per_s = 0;
};
// One line of the comparison, with advice if another core type is at least a quarter faster.
std::string blas_rates_text(const BlasRate& in_use, const std::vector<BlasRate>& others);

}  // namespace triad
