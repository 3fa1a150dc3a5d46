// A snapshot of a device's memory in three formats for PyTorch's tools: a table laid out like
// torch.cuda.memory_summary, torch.cuda.memory_stats's numbers as JSON, and a pickle in torch.cuda.memory._snapshot's
// format, which PyTorch's memory viewer opens (io/README.md).
//
// Triad allocates one arena per device, so there is one segment: first the scratch region with the live temporaries,
// then the tensors that stay for the whole run, in address order.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "engine/memory_log.h"
#include "io/json_config.h"

namespace triad {

struct MemorySnapshot {
  // An arena tensor, which stays for the whole run. padded_bytes: its size with the padding up to the next tensor.
  struct Block {
    std::string name, category;
    int64_t offset, bytes, padded_bytes;
    DType dtype;
    Shape shape;
    int64_t time_us;
    std::string file;
    int64_t line;
  };
  // This process's memory outside the arena, such as the CUDA context or a library's workspace.
  struct Outside {
    std::string what;
    int64_t bytes;
  };
  // A failed allocation: how many bytes were requested, and how many were free.
  struct Oom {
    int64_t asked, free;
    std::string what;  // description in one line
  };

  std::string when;  // when it was taken: "boot", "step1", ...
  Device device;
  int64_t time_us = 0;
  uint64_t address = 0;  // the arena's address
  int64_t arena_bytes = 0;
  int64_t scratch_bytes = 0;  // size of the scratch region, with which the arena begins
  std::vector<Block> blocks;  // tensors by ascending offset, without the scratch region
  MemoryLog::Contents scratch;
  std::vector<Outside> outside;
  int64_t in_use_bytes = 0;  // memory in use as the driver reports it for a GPU, or Linux for this process on a CPU
  std::optional<Oom> oom;
  bool planned = false;  // true: a plan for a run that does not fit; nothing is allocated and addresses are fictitious

  // Bytes in each category of arena tensors, then in each kind of memory outside the arena. unaccounted_bytes() is
  // in_use_bytes minus their sum.
  struct Category {
    std::string name;
    int64_t bytes;
  };
  std::vector<Category> categories() const;
  int64_t unaccounted_bytes() const;
};

std::string memory_summary(const MemorySnapshot&);  // the .txt file's text: the table, then memory_by_name()
std::string memory_by_name(const MemorySnapshot&);  // text: MiB by category, and the ten largest tensors
Json memory_stats(const MemorySnapshot&);           // the .json file's content
std::string memory_pickle(const MemorySnapshot&);   // the .pickle file's content

}  // namespace triad
