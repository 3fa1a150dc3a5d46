#include "tests/support/grads_run.h"

#include <cmath>
#include <cstring>

#include "io/data/shards.h"
#include "io/safetensors.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

namespace triad::test {

void write_bounds(const std::string& path, const std::vector<int32_t>& bounds, size_t cut) {
  write_text(path, std::string(reinterpret_cast<const char*>(bounds.data()), bounds.size() * sizeof(int32_t) - cut));
}

void write_shard(const std::string& path, std::span<const int32_t> tokens) {
  ShardWriter writer(path, TokenWidth::u16);
  writer.append(tokens);
  writer.finish();
}

std::map<std::string, GradsEntry> read_grads(const std::string& path) {
  std::map<std::string, GradsEntry> all;
  const SafetensorsFile file(path);
  for (const TensorEntry& e : file.entries()) {
    std::vector<std::byte> bytes(static_cast<size_t>(e.bytes()));
    file.read(e, bytes);
    GradsEntry& entry = all[e.name];
    entry.shape.assign(e.shape.begin(), e.shape.end());
    if (e.name.starts_with("block_index/")) {
      entry.ids.resize(bytes.size() / sizeof(int32_t));
      std::memcpy(entry.ids.data(), bytes.data(), bytes.size());
    } else {
      entry.floats.resize(bytes.size() / sizeof(double));
      std::memcpy(entry.floats.data(), bytes.data(), bytes.size());
    }
  }
  return all;
}

double norm_of_difference(const std::vector<double>& a, const std::vector<double>& b) {
  REQUIRE(a.size() == b.size());
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

}  // namespace triad::test
