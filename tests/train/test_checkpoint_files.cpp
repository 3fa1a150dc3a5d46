// train/checkpoint: how tensors are divided into files, and partial reads and writes of a model.
#include <algorithm>
#include <filesystem>
#include <limits>
#include <memory>
#include <numeric>

#include "engine/check.h"
#include "io/checkpoint.h"
#include "tests/support/dist_run.h"
#include "tests/support/test.h"
#include "train/checkpoint/final_weights.h"
#include "train/checkpoint/param_reader.h"
#include "train/checkpoint/state.h"
#include "train/config/load_config.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// A model with random weights on the CPU.
struct Weights {
  Config config;
  std::unique_ptr<Runtime> runtime;
  std::unique_ptr<TrainStep> step;

  explicit Weights(uint64_t seed, const std::vector<std::string>& sets = {}) : config(load_config(kTiny, sets).config) {
    runtime = allocate_planned(config, Device::cpu(), nullptr);
    step = std::make_unique<TrainStep>(*runtime, config, nullptr);
    params().init(ctx(), seed);
  }
  Params& params() { return step->model().params(); }
  Context& ctx() { return runtime->ctx(); }
  std::vector<float> values() {
    std::vector<float> all(static_cast<size_t>(params().stored_elements()));
    read(ctx(), all.data(), params().master());
    return all;
  }
  void write(const std::string& folder, int64_t files, DType dtype = DType::f32) {
    fs::create_directories(folder);
    const auto comm = make_self_comm(Device::cpu());
    write_weight_files(
        ctx(), params(), *comm, {.files = files, .writers = 1}, DType::f32, dtype, folder,
        [&](const BucketVisitor& visitor) { step->optimizer().gather(ctx(), Optimizer::State::parameter, visitor); });
  }
};

int64_t sum(std::span<const int64_t> sizes, const ParamRange& range) {
  return std::accumulate(sizes.begin() + range.begin, sizes.begin() + range.end, int64_t{0});
}

}  // namespace

TEST_CASE("checkpoint files: a part has memory for the values that it holds", "[train]") {
  Weights model(1);
  const auto is_matrix = [](const ParamSpec& spec) { return spec.shape.rank == 2; };
  const StatePart part(model.params(), {1, 4}, Device::cpu(), {{DType::f32}, {DType::bf16, is_matrix}, {DType::f32}});
  const std::byte* end = nullptr;
  for (int buffer = 0; buffer < 3; ++buffer)
    for (int64_t i = 1; i < 4; ++i) {
      const ParamSpec& spec = model.params().specs()[static_cast<size_t>(i)];
      const Tensor values = part.values(buffer, i);
      INFO(spec.name << ", buffer " << buffer);
      CHECK(values.numel() == (buffer == 1 && !is_matrix(spec) ? 0 : spec.shape.numel()));
      if (end != nullptr) CHECK((values.data >= end && values.data < end + kMemAlign));
      end = values.data + values.bytes();
    }
}

TEST_CASE("checkpoint files: tensors are divided evenly into ranges, none of them empty", "[train]") {
  const std::vector<std::vector<int64_t>> lists = {
      {5},          {1, 1, 1, 1},          {100, 1, 1, 1, 1}, {1, 1, 1, 100},
      {3, 9, 2, 7}, {4, 4, 4, 4, 4, 4, 4}, {0, 0, 0},         {7, 0, 7, 0, 1}};
  for (const std::vector<int64_t>& sizes : lists)
    for (int64_t parts = 1; parts <= 9; ++parts) {
      INFO(parts << " parts of " << sizes.size());
      const std::vector<ParamRange> ranges = split_evenly(sizes, parts);
      CHECK(std::ssize(ranges) == std::min<int64_t>(parts, std::ssize(sizes)));
      int64_t next = 0, largest = 0;
      for (const ParamRange& range : ranges) {
        CHECK(range.begin == next);
        CHECK(range.size() > 0);
        next = range.end;
        largest = std::max(largest, sum(sizes, range));
      }
      CHECK(next == std::ssize(sizes));
      // No other division has a smaller largest range: try all, as inner-boundary subsets.
      int64_t best = std::numeric_limits<int64_t>::max();
      for (unsigned cuts = 0; cuts < 1u << (sizes.size() - 1); ++cuts) {
        if (__builtin_popcount(cuts) + 1 > std::ssize(ranges)) continue;
        int64_t here = 0, worst = 0;
        for (size_t i = 0; i < sizes.size(); ++i) {
          here += sizes[i];
          worst = std::max(worst, here);
          if (cuts >> i & 1u) here = 0;
        }
        best = std::min(best, worst);
      }
      CHECK(largest == best);
    }
  CHECK(split_evenly({}, 3).empty());
}

TEST_CASE("checkpoint files: final weights are one file up to 5 GB without dist.zero 3", "[train]") {
  const auto are = [](const FinalFiles& found, int64_t files, int64_t writers) {
    return found.files == files && found.writers == writers;
  };
  constexpr int64_t kGB = 1'000'000'000;
  CHECK(are(final_files(5 * kGB, false, 1), 1, 1));
  CHECK(are(final_files(5 * kGB, false, 8), 1, 1));
  CHECK(are(final_files(5 * kGB + 1, false, 1), 2, 1));
  CHECK(are(final_files(21 * kGB, false, 1), 5, 1));
  CHECK(are(final_files(21 * kGB, false, 2), 5, 2));
  CHECK(are(final_files(21 * kGB, false, 8), 8, 8));
  CHECK(are(final_files(1000, true, 4), 4, 4));
  CHECK(are(final_files(1000, true, 1), 1, 1));
}

TEST_CASE("checkpoint files: weights in any number of files are read as they were, whole or in part", "[train]") {
  const TemporaryFolder folder;
  for (const char* precision : {"fp32", "bf16"}) {
    Weights from(7, {std::string("runtime.precision=") + precision});
    const std::vector<float> expected = from.values();
    const Params& params = from.params();
    for (const int64_t files : {1, 2, 3, 1000}) {
      INFO(precision << ", " << files << " files");
      const std::string out = folder.file(precision + std::to_string(files));
      from.write(out, files);
      const WeightIndex index(out);
      CHECK(std::ssize(index.files()) == std::min(files, params.count()));
      CHECK((index.path() == tensors_path(out)));
      CHECK(index.path().ends_with(files == 1 ? "/model.safetensors" : "/model.safetensors.index.json"));
      CHECK(static_cast<int64_t>(count_files(out)) == (files == 1 ? 1 : std::ssize(index.files()) + 1));
      Weights to(8, {std::string("runtime.precision=") + precision});
      CHECK(to.values() != expected);
      load_weights(to.ctx(), to.params(), tensors_path(out));
      CHECK(to.values() == expected);

      // Ranges like a rank's shards: they cut tensors anywhere, and begin and end in padding.
      const int64_t all = params.stored_elements();
      const std::vector<ElementRange> ranges = {{0, 1}, {17, all / 3}, {all / 2, all / 2 + 5}, {all - 700, all}};
      std::vector<float> read(expected.size(), -1.0f);
      const std::vector<PartialSum> sums = read_params(index, params, with_prefix(""), ranges, Device::cpu(),
                                                       [&](int64_t begin, std::span<const float> values) {
                                                         std::copy(values.begin(), values.end(), read.begin() + begin);
                                                       });
      for (int64_t i = 0; i < params.count(); ++i) {
        const int64_t first = params.offset(i), n = params.specs()[static_cast<size_t>(i)].shape.numel();
        int64_t bytes = 0;
        for (int64_t e = first; e < first + n; ++e) {
          const auto at = static_cast<size_t>(e);
          const bool wanted = std::any_of(ranges.begin(), ranges.end(),
                                          [&](const ElementRange& r) { return e >= r.begin && e < r.end; });
          bytes += wanted ? 4 : 0;
          if (read[at] != (wanted ? expected[at] : -1.0f)) FAIL("element " << e);
          read[at] = -1.0f;
        }
        CHECK(sums[static_cast<size_t>(i)].bytes == bytes);
      }
      CHECK(std::count(read.begin(), read.end(), -1.0f) == std::ssize(read));  // padding is not passed
    }
  }
}

TEST_CASE("checkpoint files: final weights replace those of another layout, and round to bf16", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("out");
  Weights weights(7);
  const std::vector<float> exact = weights.values();
  const auto loaded = [&] {
    Weights to(8);
    load_weights(to.ctx(), to.params(), tensors_path(out));
    return to.values();
  };
  for (const int64_t files : {3, 1, 4, 2}) {
    weights.write(out, files);
    CHECK(WeightIndex(out).files().size() == static_cast<size_t>(files));
    CHECK(count_files(out) == static_cast<size_t>(files == 1 ? 1 : files + 1));
    CHECK(loaded() == exact);
  }
  weights.write(out, 2, DType::bf16);
  const WeightIndex index(out);
  CHECK(index.at("embed.weight").dtype == "BF16");
  CHECK(parse_json(read_text(index.path()), "index")["metadata"]["total_size"] ==
        2 * count_parameters(weights.config.model));
  const std::vector<float> rounded = loaded();
  for (size_t i = 0; i < exact.size(); ++i)
    if (rounded[i] != static_cast<float>(bf16(exact[i]))) FAIL("element " << i);
}

TEST_CASE("checkpoint files: a damaged tensor is found by ranks that read parts of it", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("out");
  Weights weights(7);
  weights.write(out, 3);
  const WeightIndex index(out);
  const int64_t half = weights.params().stored_elements() / 2;
  const auto read = [&](const ElementRange& range) {
    return read_params(index, weights.params(), with_prefix(""), {&range, 1}, Device::cpu(),
                       [](int64_t, std::span<const float>) {});
  };
  const auto together = [&] {
    std::vector<PartialSum> sums = read({0, half});
    const std::vector<PartialSum> others = read({half, 2 * half + 1});
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += others[i];
    const auto comm = make_self_comm(Device::cpu());
    check_sums(index, weights.params(), with_prefix(""), sums, *comm);
  };
  CHECK_NOTHROW(together());
  // The tensor that both ranks read.
  const ParamSpec* shared = nullptr;
  for (int64_t i = 0; i < weights.params().count(); ++i) {
    const ElementRange range = range_of(weights.params(), i);
    if (range.begin < half && range.end > half) shared = &weights.params().specs()[static_cast<size_t>(i)];
  }
  REQUIRE(shared != nullptr);
  const std::string path = index.file_of(shared->name).path();
  std::string bytes = read_text(path);
  bytes[static_cast<size_t>(index.at(shared->name).begin) + 1] ^= 1;
  write_text(path, bytes);
  check_error(together, {path, "tensor " + shared->name, "CRC-32"});
}
