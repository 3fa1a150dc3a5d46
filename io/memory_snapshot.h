// What fills a device's memory, for the tools that users of PyTorch know: a table in the layout of
// torch.cuda.memory_summary, the numbers of torch.cuda.memory_stats as JSON, and a pickle as of
// torch.cuda.memory._snapshot, which PyTorch's memory viewer opens (FORMATS.md section 1).
//
// A device's memory is one allocation, our arena, so there is one segment: first the scratch region, with the
// temporaries that are handed out just now, then tensors that stay for the whole run, side by side.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/memory_log.h"
#include "io/json_config.h"

namespace triad {

struct MemorySnapshot {
  // Stays until the run ends. Bytes: asked for, and with the padding up to the next one.
  struct Block {
    std::string name, category;
    int64_t offset, bytes, padded_bytes;
    DType dtype;
    Shape shape;
    int64_t time_us;
    std::string file;
    int64_t line;
  };
  // Of this process, but not of the arena: the CUDA context, libraries' workspaces.
  struct Outside {
    std::string what;
    int64_t bytes;
  };
  // The allocation that failed.
  struct Oom {
    int64_t asked, free;
    std::string what;  // a line for people
  };

  std::string when;  // "boot", "step1", ...
  Device device;
  int64_t time_us = 0;
  uint64_t address = 0;  // of the arena
  int64_t arena_bytes = 0;
  int64_t scratch_bytes = 0;  // it begins the arena
  std::vector<Block> blocks;  // ascending; the scratch is none of them
  MemoryLog::Contents scratch;
  std::vector<Outside> outside;
  int64_t in_use_bytes = 0;  // of the device, as its driver reports; on the CPU of this process, as Linux does
  std::optional<Oom> oom;
  bool planned = false;  // of a run that did not fit: nothing of it is there, and addresses are made up

  // MiB by category, what lies outside of the arena, and what is left between their sum and the driver's figure.
  struct Category {
    std::string name;
    int64_t bytes;
  };
  std::vector<Category> categories() const;
  int64_t unaccounted_bytes() const;
};

std::string memory_summary(const MemorySnapshot&);  // .txt: the table, then:
std::string memory_by_name(const MemorySnapshot&);  // MiB by category, and the ten largest tensors
Json memory_stats(const MemorySnapshot&);           // .json
std::string memory_pickle(const MemorySnapshot&);   // .pickle

}  // namespace triad
