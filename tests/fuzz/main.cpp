// The entry point of a fuzzer. libFuzzer has main() and generates the bytes; CMake sets the reader (TRIAD_FUZZ_READER).
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/contract.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  triad::fuzz::run({TRIAD_FUZZ_NAME, triad::fuzz::TRIAD_FUZZ_READER}, {reinterpret_cast<const char*>(data), size});
  return 0;
}
