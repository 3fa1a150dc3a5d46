#include "train/checkpoint/final_weights.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "io/file.h"
#include "io/own_files.h"
#include "io/weight_index.h"
#include "train/checkpoint/file_plan.h"
#include "train/checkpoint/rank_work.h"

namespace triad {

namespace fs = std::filesystem;

namespace {
constexpr int64_t kMostBytes = 5'000'000'000;  // bytes in one file
const std::vector<NamedBuffer> kBuffers = {{"", 0}};
}  // namespace

FinalFiles final_files(int64_t bytes, bool sharded_weights, int64_t writers) {
  if (bytes <= kMostBytes && !sharded_weights) return {};
  return {.files = std::max(writers, (bytes + kMostBytes - 1) / kMostBytes), .writers = writers};
}

void write_weight_files(Context& ctx, const Params& params, Comm& comm, const FinalFiles& how, DType held, DType dtype,
                        const std::string& folder, const std::function<void(const BucketVisitor&)>& gather,
                        const std::function<void()>& check) {
  constexpr const char* kWhat = "the final weights being written";
  const FilePlan plan(params, how.files);
  for (int64_t first = 0; first < plan.files(); first += how.writers) {
    const int64_t file = first + comm.rank();
    const bool writes = comm.rank() < how.writers && file < plan.files();
    const StatePart part(params, writes ? plan.params(file) : ParamRange{}, Device::cpu(), {{held}});
    gather([&](const ElementRange& elements, const Tensor& values) { part.copy(ctx, 0, elements, values); });
    ctx.stream.synchronize();
    const auto write = [&] {
      check();
      write_part(part, params, kBuffers, folder + "/" + plan.name(kWeightsStem, file), dtype);
    };
    run_on_ranks(comm, writes, write, kWhat);
  }
  const auto finish = [&] {
    check();
    const std::string index = index_file_name(kWeightsStem);
    if (!plan.whole()) write_file_atomically(folder + "/" + index, plan.index(params, kWeightsStem, kBuffers, dtype));
    for (const std::string& path : weight_files_in(folder)) {
      const std::string name = fs::path(path).filename().string();
      bool current = !plan.whole() && name == index;
      for (int64_t i = 0; i < plan.files(); ++i) current = current || name == plan.name(kWeightsStem, i);
      if (!current && is_own_tensor_file(path)) remove_tree(path);
    }
  };
  run_on_ranks(comm, comm.first(), finish, kWhat);
}

std::vector<std::string> weight_files_in(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored))
    if (is_tensor_file_name(entry.path().filename().string(), kWeightsStem)) paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  const std::string whole = whole_file_name(kWeightsStem), index = index_file_name(kWeightsStem);
  std::stable_partition(paths.begin(), paths.end(), [&](const std::string& path) {
    const std::string name = fs::path(path).filename().string();
    return name == whole || name == index;
  });
  return paths;
}

}  // namespace triad
