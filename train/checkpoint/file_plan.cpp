#include "train/checkpoint/file_plan.h"

#include <algorithm>
#include <numeric>

#include "io/weight_index.h"

namespace triad {

namespace {

// How many ranges, up to `most` each, the sizes need; each is filled before the next begins. No size exceeds `most`.
int64_t ranges_needed(std::span<const int64_t> sizes, int64_t most) {
  int64_t ranges = 1, filled = 0;
  for (const int64_t size : sizes) {
    if (filled + size > most) ++ranges, filled = 0;
    filled += size;
  }
  return ranges;
}

}  // namespace

std::vector<ParamRange> split_evenly(std::span<const int64_t> sizes, int64_t parts) {
  if (sizes.empty()) return {};
  const auto n = static_cast<int64_t>(sizes.size());
  parts = std::clamp<int64_t>(parts, 1, n);
  // The smallest limit with which `parts` ranges suffice, by bisection.
  int64_t low = *std::max_element(sizes.begin(), sizes.end()),
          high = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (ranges_needed(sizes, middle) <= parts)
      high = middle;
    else
      low = middle + 1;
  }
  std::vector<ParamRange> ranges;
  int64_t begin = 0, filled = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t size = sizes[static_cast<size_t>(i)];
    // A range ends where it is full, or where each remaining item has to begin one.
    const bool last_chance = n - i <= parts - 1 - static_cast<int64_t>(ranges.size());
    if (i > begin && (filled + size > low || last_chance)) {
      ranges.push_back({begin, i});
      begin = i, filled = 0;
    }
    filled += size;
  }
  ranges.push_back({begin, n});
  return ranges;
}

FilePlan::FilePlan(const Params& params, int64_t files) {
  std::vector<int64_t> sizes;
  for (const ParamSpec& spec : params.specs()) sizes.push_back(spec.shape.numel());
  ranges_ = split_evenly(sizes, files);
}

ParamRange FilePlan::params(int64_t file) const {
  return file < files() ? ranges_[static_cast<size_t>(file)] : ParamRange{};
}

std::string FilePlan::name(const std::string& stem, int64_t file) const {
  return whole() ? whole_file_name(stem) : part_file_name(stem, file, files());
}

std::string FilePlan::index(const Params& params, const std::string& stem, const std::vector<NamedBuffer>& buffers,
                            DType dtype) const {
  std::map<std::string, std::string> file_of;
  int64_t bytes = 0;
  for (int64_t file = 0; file < files(); ++file)
    for (int64_t i = ranges_[static_cast<size_t>(file)].begin; i < ranges_[static_cast<size_t>(file)].end; ++i)
      for (const NamedBuffer& buffer : buffers) {
        const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
        if (!buffer.has(spec)) continue;
        file_of[buffer.prefix + spec.name] = name(stem, file);
        bytes += spec.shape.numel() * size_of(dtype);
      }
  return weight_map_json(file_of, bytes);
}

}  // namespace triad
