// MemoryReport: reports a run's memory tensor by tensor in mem_*.{txt,json,pickle}, opt_state_mb.txt and
// dtypes_report.txt. Uses the host's bookkeeping; the only query to the device is its memory in use.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "engine/comm/comm.h"
#include "io/memory_snapshot.h"
#include "train/config.h"
#include "train/run_folder.h"
#include "train/train_step.h"

namespace triad {

// Device memory that a run uses outside its arena, measured as the growth of the memory in use.
class OutsideMemory {
 public:
  explicit OutsideMemory(Device);  // counts memory in use already: the CUDA context and other processes
  // Counts the memory that work() allocates as `what`.
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

// Every tensor of the arena; flat buffers of weights, gradients and moments are split into their parameters.
std::vector<MemorySnapshot::Block> name_blocks(const Arena&, TrainStep&);

// "layer 7" from a tensor's name; empty outside the layers.
std::string layer_of(const std::string& tensor);

// Text of opt_state_mb.txt; the first line is the MiB of all moments of all ranks without padding.
std::string optimizer_report(const std::vector<ParamSpec>&, int64_t kept_bytes, int64_t ranks);

class MemoryReport {
 public:
  MemoryReport(Runtime&, TrainStep&, const OutsideMemory&, const RunFolder&, const Comm&);

  static std::string suffix(const Comm&);  // "" on the first rank, else "_rank{R}"
  // Writes mem_{when}{suffix}.*. Any thread may call it at any time: it does not wait for the device.
  void write_snapshot(const std::string& when) const;
  // Writes mem_oom{suffix}.* for this exception.
  void write_oom(const OutOfMemory&) const;
  // Writes opt_state_mb.txt and dtypes_report.txt on the first rank.
  void write_tables() const;

 private:
  MemorySnapshot snapshot(const std::string& when) const;

  Runtime& runtime_;
  TrainStep& step_;
  const OutsideMemory& outside_;
  const RunFolder& folder_;
  const Comm& comm_;
  std::vector<MemorySnapshot::Block> blocks_;  // constant, since the arena is sealed
};

// Writes the three files of a snapshot: FOLDER/mem_{when}{suffix}.{txt,json,pickle}.
void write_memory_snapshot(const std::string& folder, const std::string& suffix, const MemorySnapshot&);

}  // namespace triad
