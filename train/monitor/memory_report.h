// What a run's memory holds, tensor by tensor: the files mem_*.{txt,json,pickle}, opt_state_mb.txt and
// dtypes_report.txt of its folder (SPEC.md section 3). Everything here is the host's bookkeeping: the device is asked
// for nothing but how much of it is in use.
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

// A device's memory that a run takes without its arena, measured while it is taken.
class OutsideMemory {
 public:
  explicit OutsideMemory(Device);  // what is in use already: the context, and other processes
  // What work() takes counts as `what`.
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

// Every tensor of the arena; the flat buffers of weights, gradients and moments as the parameters they hold.
std::vector<MemorySnapshot::Block> name_blocks(const Arena&, TrainStep&);

// "layer 7", of a tensor's name; empty outside of the layers.
std::string layer_of(const std::string& tensor);

// opt_state_mb.txt: first the MiB of all moments, as files hold them, on however many ranks they lie.
std::string optimizer_report(const std::vector<ParamSpec>&, int64_t kept_bytes, int64_t ranks);

class MemoryReport {
 public:
  MemoryReport(Runtime&, TrainStep&, const OutsideMemory&, const RunFolder&, const Comm&);

  static std::string suffix(const Comm&);  // of the files of a rank: empty for the first
  // mem_{when}.*, on another rank than the first mem_{when}_rank{R}.*. Any thread may call it at any time: nothing
  // waits for the device.
  void write_snapshot(const std::string& when) const;
  // mem_oom.*, on the way of this exception.
  void write_oom(const OutOfMemory&) const;
  // opt_state_mb.txt and dtypes_report.txt; the first rank's.
  void write_tables() const;

 private:
  MemorySnapshot snapshot(const std::string& when) const;

  Runtime& runtime_;
  TrainStep& step_;
  const OutsideMemory& outside_;
  const RunFolder& folder_;
  const Comm& comm_;
  std::vector<MemorySnapshot::Block> blocks_;  // the arena is sealed: they stay as they are
};

// The three files of a snapshot: FOLDER/mem_{when}{suffix}.*
void write_memory_snapshot(const std::string& folder, const std::string& suffix, const MemorySnapshot&);

}  // namespace triad
