// Helpers for tests that run `triad grads`: the files that it reads, and the tensors that it writes.
#pragma once
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace triad::test {

// Writes a file with 32-bit bounds for --documents; `cut`: bytes missing at its end.
void write_bounds(const std::string& path, const std::vector<int32_t>& bounds, size_t cut = 0);
// Writes a shard with 16-bit tokens for --tokens.
void write_shard(const std::string& path, std::span<const int32_t> tokens);

// A tensor in the file that `triad grads --dtype f64` writes.
struct GradsEntry {
  std::vector<double> floats;
  std::vector<int32_t> ids;  // block ids, in lists
  std::vector<int64_t> shape;
};
std::map<std::string, GradsEntry> read_grads(const std::string& path);

// |a - b|; the sizes must be equal.
double norm_of_difference(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace triad::test
