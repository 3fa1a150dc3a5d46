// MemoryReport: reports a run's memory tensor by tensor in mem_*.{txt,json,pickle}, opt_state_mb.txt and
// dtypes_report.txt. Sizes come from allocations that the host has recorded; the device is queried only for its total
// memory in use.
#pragma once
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "engine/comm/comm.h"
#include "io/memory_snapshot.h"
#include "train/config/config.h"
#include "train/run/run_folder.h"
#include "train/step/train_step.h"

namespace triad {

// Device memory that a run uses outside its arena (by libraries and the driver), measured by how the device's memory in
// use grows.
class OutsideMemory {
 public:
  explicit OutsideMemory(Device);  // the memory in use now (CUDA context, other processes) is the first entry
  // Runs work() and counts the device memory that it allocates under the name `what`.
  template <class Work>
  auto during(const std::string& what, Work&& work) {
    const int64_t before = backend::bytes_in_use(device_);
    auto result = work();
    add(what, backend::bytes_in_use(device_) - before);
    return result;
  }
  const std::vector<MemorySnapshot::Outside>& parts() const { return parts_; }

 private:
  void add(const std::string& what, int64_t bytes);
  Device device_;
  std::vector<MemorySnapshot::Outside> parts_;
};

// One block for every tensor in the arena; the flat buffers (weights, gradients, moments) are split into one block per
// parameter.
std::vector<MemorySnapshot::Block> name_blocks(const Arena&, TrainStep&);

// The layer that a tensor's name contains, as "layer 7"; empty for tensors outside the layers.
std::string layer_of(const std::string& tensor);

// opt_state_mb.txt's text. The first line is all ranks' moments together in MiB, without padding.
std::string optimizer_report(const std::vector<ParamSpec>&, OptimizerKind, DType moments, int64_t kept_bytes,
                             int64_t ranks);

class MemoryReport {
 public:
  MemoryReport(Runtime&, TrainStep&, const OutsideMemory&, const RunFolder&, const Comm&);

  static std::string suffix(const Comm&);  // "" on the first rank, else "_rank{R}"
  // Writes the snapshot mem_{when}{suffix}.*. Any thread may call it at any time: it does not wait for the device.
  void write_snapshot(const std::string& when) const;
  // Writes the snapshot mem_oom{suffix}.* for this exception.
  void write_oom(const OutOfMemory&) const;
  // On the first rank, writes opt_state_mb.txt and dtypes_report.txt.
  void write_tables() const;

 private:
  MemorySnapshot snapshot(const std::string& when) const;

  Runtime& runtime_;
  TrainStep& step_;
  const OutsideMemory& outside_;
  const RunFolder& folder_;
  const Comm& comm_;
  std::vector<MemorySnapshot::Block> blocks_;  // one per tensor in the arena; constant, because the arena is sealed
};

// Writes the three files of a snapshot: FOLDER/mem_{when}{suffix}.{txt,json,pickle}. check() is called before each, and
// throws Error if the folder may not be written now.
void write_memory_snapshot(
    const std::string& folder, const std::string& suffix, const MemorySnapshot&,
    const std::function<void()>& check = [] {});

}  // namespace triad
