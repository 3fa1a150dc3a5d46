// How OpenBLAS's kernels are chosen: by its version, its own choice and the CPU's vectors.
#include "io/json_config.h"
#include "kernels/common/blas_core.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

TEST_CASE("matmul: OpenBLAS versions that choose slow kernels for a CPU get better ones", "[ops]") {
  const CpuVectors none{}, avx2{.avx2 = true}, avx512{.avx2 = true, .avx512 = true};
  struct Row {
    const char *version, *loaded;
    CpuVectors cpu;
    const char* wanted;
  };
  const Row rows[] = {
      {"0.3.21", "Haswell", avx512, "SkylakeX"},     // a CPU that this version does not know
      {"0.3.21", "Cooperlake", avx512, "SkylakeX"},  // Sapphire Rapids
      {"0.3.21", "SkylakeX", avx512, ""},
      {"0.3.21", "Prescott", avx2, "Haswell"},
      {"0.3.21", "Haswell", avx2, ""},
      {"0.3.21", "Zen", avx2, ""},
      {"0.3.21", "Nehalem", none, ""},
      {"0.3.26", "SapphireRapids", avx512, ""},
      {"0.3.26", "Cooperlake", avx512, ""},
      {"0.3.26", "Haswell", avx512, "SkylakeX"},
      {"0.3.29", "Haswell", avx512, ""},  // newer versions choose for themselves
      {"1.0.0", "Haswell", avx512, ""},
  };
  for (const Row& row : rows) {
    INFO(row.version << " " << row.loaded);
    const std::string config = std::string("OpenBLAS ") + row.version + " DYNAMIC_ARCH USE_OPENMP MAX_THREADS=64";
    CHECK(better_blas_core(config, row.loaded, row.cpu) == row.wanted);
  }
  CHECK(better_blas_core("OpenBLAS 0.3.21 USE_OPENMP Haswell", "Haswell", avx512).empty());  // built for one core type
  CHECK(better_blas_core("something else", "Haswell", avx512).empty());
}

TEST_CASE("matmul: a comparison of OpenBLAS's kernels ends in advice if others are much faster", "[ops]") {
  const BlasRate slow{"Cooperlake, chosen by OpenBLAS", 60}, fine{"SkylakeX, chosen by triad (OpenBLAS: Haswell)", 120};
  const std::vector<BlasRate> others = {{"Haswell", 122}, {"SkylakeX", 125}};
  CHECK(blas_rates_text(slow, others) ==
        "matrix products at 60 GFLOP/s (OpenBLAS Cooperlake, chosen by OpenBLAS), 122 with Haswell, 125 with SkylakeX: "
        "OPENBLAS_CORETYPE=SkylakeX makes training faster");
  CHECK(!has(blas_rates_text(fine, others), "faster"));
}

TEST_CASE("matmul: a run's env.json says which of OpenBLAS's kernels it uses, and who chose them", "[ops]") {
  const TemporaryFolder folder;
  const auto kernels = [&](const std::string& environment) {
    const Outcome o = run_program("doctor --device cpu --only environment --out " + folder.file("out"), environment);
    INFO(o.output);
    REQUIRE(o.exit_code == 0);
    CHECK(has(o.output, "matrix products at "));
    const Json env = Json::parse(read_text(folder.file("out/environment/env.json")));
    return env["libraries"]["OpenBLAS kernels"].get<std::string>();
  };
  // An OpenBLAS that pretends to be Debian 12's on a CPU that it doesn't know.
  const std::string unknown_cpu =
      "OPENBLAS_CORETYPE= " + with_faults("TRIAD_BLAS_CONFIG='OpenBLAS 0.3.21 DYNAMIC_ARCH' TRIAD_BLAS_CORE=Prescott");
  if (!blas_cores_for(cpu_vectors()).empty())
    CHECK(has(kernels(unknown_cpu), ", chosen by triad (OpenBLAS: Prescott)"));
  CHECK(has(kernels("OPENBLAS_CORETYPE=Nehalem"), ", chosen by OPENBLAS_CORETYPE"));
}
