#include "train/checkpoint/param_reader.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "engine/check.h"
#include "engine/process/text.h"

namespace triad {

namespace {

// The entry for the tensor from which a parameter is read. Throws Error if its shape is not the parameter's.
const TensorEntry& entry_of(const WeightIndex& index, const ParamSpec& spec, const std::string& name) {
  const TensorEntry& entry = index.at(name);
  const std::vector<int64_t> shape(spec.shape.dim.begin(), spec.shape.dim.begin() + spec.shape.rank);
  TRIAD_CHECK(entry.shape == shape, "{}: tensor {} is {}, but the model's{} is {}", index.file_of(name).path(),
              entry.name, entry.str(), name.ends_with(spec.name) ? "" : " " + spec.name, spec.shape.str());
  return entry;
}

}  // namespace

NameOf with_prefix(const std::string& prefix) {
  return [prefix](const ParamSpec& spec) { return prefix + spec.name; };
}

void check_names(const WeightIndex& index, const Params& params, const std::vector<NameOf>& names,
                 const std::vector<ParamSpec>& unread) {
  std::set<std::string> expected;
  for (const ParamSpec& p : unread) expected.insert(p.name);
  for (const NameOf& name_of : names)
    for (const ParamSpec& p : params.specs()) expected.insert(name_of(p));
  index.for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
    TRIAD_CHECK(expected.contains(entry.name), "{}: tensor {} is none of this model's", file.path(),
                shortened(entry.name));
  });
}

std::vector<PartialSum> read_params(const WeightIndex& index, const Params& params, const NameOf& name_of,
                                    std::span<const ElementRange> ranges, Device device, const FlatSink& sink) {
  std::vector<TensorRange> reads;
  std::vector<int64_t> param_of;  // parameter by read
  for (int64_t i = 0; i < params.count(); ++i) {
    const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
    const std::string name = name_of(spec);
    if (name.empty()) continue;
    const TensorEntry& entry = entry_of(index, spec, name);
    // The values without padding are the first stored ones.
    const int64_t first = params.offset(i), n = spec.shape.numel();
    for (const ElementRange& range : ranges) {
      const int64_t begin = std::max(range.begin, first), end = std::min(range.end, first + n);
      if (begin >= end) continue;
      reads.push_back({&index.file_of(name), &entry, begin - first, end - first});
      param_of.push_back(i);
    }
  }
  const std::vector<PartialSum> read_sums = read_ranges(reads,
                                                        [&](size_t read, int64_t first, std::span<const float> values) {
                                                          sink(params.offset(param_of[read]) + first, values);
                                                        },
                                                        {.device = device});
  std::vector<PartialSum> sums(static_cast<size_t>(params.count()));
  for (size_t r = 0; r < reads.size(); ++r) {
    PartialSum& sum = sums[static_cast<size_t>(param_of[r])];
    sum += read_sums[r];
    check_sum(*reads[r].file, *reads[r].entry, sum);  // passes until all bytes are in the sum
  }
  return sums;
}

void check_sums(const WeightIndex& index, const Params& params, const NameOf& name_of,
                const std::vector<PartialSum>& sums, Comm& comm) {
  std::string own(sums.size() * sizeof(PartialSum), '\0');
  std::memcpy(own.data(), sums.data(), own.size());
  std::vector<PartialSum> total(sums.size());
  for (const std::string& text : comm.all_gather_host_text(own, "the checksums of what the ranks have read")) {
    TRIAD_CHECK(text.size() == own.size(), "a rank has read another number of parameters than {}", sums.size());
    std::vector<PartialSum> theirs(sums.size());
    std::memcpy(theirs.data(), text.data(), text.size());
    for (size_t i = 0; i < total.size(); ++i) total[i] += theirs[i];
  }
  for (size_t i = 0; i < total.size(); ++i) {
    const std::string name = name_of(params.specs()[i]);
    if (!name.empty()) check_sum(index.file_of(name), index.at(name), total[i]);
  }
}

}  // namespace triad
