#include "train/monitor/memory_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "engine/units.h"
#include "io/file.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

// Elements [begin, end) in a flat buffer that belong to one parameter.
struct NamedRange {
  std::string name;
  int64_t begin, end;
  Shape shape;
};

// All parameters' ranges in storage order, without padding.
std::vector<NamedRange> ranges_of(const Params& params) {
  std::vector<NamedRange> all;
  for (int64_t i = 0; i < params.count(); ++i) {
    const ParamSpec& spec = params.specs()[static_cast<size_t>(i)];
    const Shape stored = spec.stored();
    all.push_back({spec.name, params.offset(i), params.offset(i) + stored.numel(), stored});
  }
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
  return all;
}

// Ranges of the parameters that parts of the flat buffer contain, as elements in a buffer with these parts.
std::vector<NamedRange> ranges_in(const std::vector<NamedRange>& params, const Parts& parts) {
  std::vector<NamedRange> all;
  for (const Parts::Part& part : parts)
    for (const NamedRange& p : params) {
      const int64_t begin = std::max(p.begin, part.elements.begin), end = std::min(p.end, part.elements.end);
      if (begin >= end) continue;
      const bool whole = begin == p.begin && end == p.end;
      const int64_t shift = part.at - part.elements.begin;
      all.push_back({whole ? p.name : fmt::format("{}[{}:{}]", p.name, begin - p.begin, end - p.begin), begin + shift,
                     end + shift, whole ? p.shape : Shape{end - begin}});
    }
  return all;
}

// Splits a flat buffer's block into one block per range; alignment bytes after a range belong to it. The padding that
// makes the ranks' shards equally large becomes a separate block.
void split(std::vector<MemorySnapshot::Block>& blocks, const MemorySnapshot::Block& buffer, const std::string& prefix,
           const std::vector<NamedRange>& ranges) {
  constexpr int64_t kAlignment = 4096;
  const bool wide = buffer.shape.rank == 2;  // [elements, values per element]
  const int64_t element = size_of(buffer.dtype) * (wide ? buffer.shape[1] : 1);
  const auto shape_in = [&](Shape elements) {
    if (wide) elements.dim[static_cast<size_t>(elements.rank++)] = buffer.shape[1];
    return elements;
  };
  const int64_t before = ranges.empty() ? buffer.padded_bytes : ranges[0].begin * element;
  if (before > 0) {  // a shard may begin in padding, or have nothing else
    MemorySnapshot::Block block = buffer;
    block.name = prefix + "padding of shards";
    block.bytes = block.padded_bytes = before;
    block.shape = shape_in({before / element});
    blocks.push_back(block);
  }
  for (size_t i = 0; i < ranges.size(); ++i) {
    const NamedRange& r = ranges[i];
    const int64_t next = i + 1 < ranges.size() ? ranges[i + 1].begin * element : buffer.padded_bytes;
    MemorySnapshot::Block block = buffer;
    block.name = prefix + r.name;
    block.offset = buffer.offset + r.begin * element;
    block.bytes = (r.end - r.begin) * element;
    block.padded_bytes = next - r.begin * element;
    block.shape = shape_in(r.shape);
    const int64_t padding = block.padded_bytes - block.bytes;
    if (padding >= kAlignment) block.padded_bytes = block.bytes;
    blocks.push_back(block);
    if (padding < kAlignment) continue;
    block.name = prefix + "padding of shards";
    block.offset += block.bytes;
    block.bytes = block.padded_bytes = padding;
    block.shape = shape_in({padding / element});
    blocks.push_back(block);
  }
}

std::string number_of_layer(const std::string& name, const std::string& before) {
  if (!name.starts_with(before)) return "";
  const size_t end = name.find('.', before.size());
  if (end == std::string::npos) return "";
  const std::string digits = name.substr(before.size(), end - before.size());
  const std::optional<int64_t> number = parse_number<int64_t>(digits);
  return number && *number >= 0 ? std::to_string(*number) : "";
}

}  // namespace

OutsideMemory::OutsideMemory(Device device) : device_(device) {
  add(device.is_cuda() ? "CUDA context, other processes" : "program and libraries", backend::bytes_in_use(device));
}
void OutsideMemory::add(const std::string& what, int64_t bytes) {
  if (bytes > 0) parts_.push_back({what, bytes});
}

std::vector<MemorySnapshot::Block> name_blocks(const Arena& arena, TrainStep& step) {
  const Params& params = step.model().params();
  const std::vector<NamedRange> ranges = ranges_of(params);
  const std::vector<NamedRange> kept = ranges_in(ranges, step.optimizer().parts());
  const std::vector<NamedRange> squares = ranges_in(ranges, step.optimizer().parts(Optimizer::State::exp_avg_sq));
  const int64_t whole = params.stored_elements();
  const auto is = [](const MemorySnapshot::Block& b, MemTag tag, const char* name) {
    return b.category == name_of(tag) && b.name == name;
  };
  std::vector<MemorySnapshot::Block> blocks;
  for (const Arena::Allocation& a : arena.allocations()) {
    const MemorySnapshot::Block b{
        a.name,    name_of(a.tag),      a.offset,      a.bytes, align_up(a.bytes), a.dtype, a.shape,
        a.time_us, a.where.file_name(), a.where.line()};
    if (is(b, MemTag::workspace, kScratchName)) continue;
    // A layer ring, which several layers use in turn, stays one block.
    if (is(b, MemTag::params, "weights") && b.shape.numel() == whole)
      split(blocks, b, "", ranges);
    else if (is(b, MemTag::master, "master weights"))
      split(blocks, b, "master/", b.shape[0] == whole ? ranges : kept);
    else if (is(b, MemTag::grads, "gradients") && b.shape.numel() == whole)
      split(blocks, b, "grad/", ranges);
    else if (is(b, MemTag::grads, "summed gradients"))
      split(blocks, b, "grad/", b.shape.numel() == whole ? ranges : kept);
    else if (is(b, MemTag::optimizer, "exp_avg") || is(b, MemTag::optimizer, "exp_avg_sq"))
      split(blocks, b, b.name + "/", b.name == "exp_avg" ? kept : squares);
    else
      blocks.push_back(b);
  }
  return blocks;
}

std::string layer_of(const std::string& tensor) {
  const size_t slash = tensor.find('/');
  const std::string name = slash == std::string::npos ? tensor : tensor.substr(slash + 1);
  for (const char* before : {"layer", "blocks."})
    if (const std::string number = number_of_layer(name, before); !number.empty()) return "layer " + number;
  return "";
}

MemoryReport::MemoryReport(Runtime& runtime, TrainStep& step, const OutsideMemory& outside, const RunFolder& folder,
                           const Comm& comm)
    : runtime_(runtime),
      step_(step),
      outside_(outside),
      folder_(folder),
      comm_(comm),
      blocks_(name_blocks(runtime.arena(), step)) {}

std::string MemoryReport::suffix(const Comm& comm) { return comm.first() ? "" : fmt::format("_rank{}", comm.rank()); }

MemorySnapshot MemoryReport::snapshot(const std::string& when) const {
  const Arena& arena = runtime_.arena();
  MemorySnapshot s;
  s.when = when;
  s.device = arena.device();
  s.time_us = now_us();
  s.address = reinterpret_cast<uint64_t>(arena.base());
  s.arena_bytes = arena.capacity_bytes();
  s.scratch_bytes = runtime_.scratch().capacity_bytes();
  s.blocks = blocks_;
  s.scratch = runtime_.memory_log()->read();
  s.outside = outside_.parts();
  if (runtime_.ctx().blas) s.outside.push_back({"matrix library's workspace", kMatmulWorkspaceBytes});
  s.in_use_bytes = backend::bytes_in_use(arena.device());
  return s;
}

void MemoryReport::write_snapshot(const std::string& when) const {
  write_memory_snapshot(folder_.file(""), suffix(comm_), snapshot(when), [&] { folder_.require(); });
}

void MemoryReport::write_oom(const OutOfMemory& e) const {
  MemorySnapshot s = snapshot("oom");
  s.oom = {e.asked, e.free, e.what()};
  write_memory_snapshot(folder_.file(""), suffix(comm_), s);
}

std::string optimizer_report(const std::vector<ParamSpec>& params, OptimizerKind kind, DType moments,
                             int64_t kept_bytes, int64_t ranks) {
  int64_t elements = 0, squares = 0;
  for (const ParamSpec& spec : params) {
    elements += spec.shape.numel();
    if (!is_updated_by_muon(spec, kind)) squares += spec.shape.numel();
  }
  const auto mib = [](int64_t bytes) { return static_cast<double>(bytes) / kMiB; };
  const double first = mib(elements * size_of(moments)), second = mib(squares * size_of(moments));
  return fmt::format(
      "{:.2f}\n\nmoments of {} parameters by {}, MiB\n  exp_avg     {:10.2f} {}\n  exp_avg_sq  {:10.2f} {}\n"
      "kept by rank 0 of {}: {:.2f}\n",
      first + second, elements, word_of(kind), first, name_of(moments), second, name_of(moments), ranks,
      mib(kept_bytes));
}

void MemoryReport::write_tables() const {
  if (!comm_.first()) return;
  int64_t kept = 0;
  for (const MemorySnapshot::Block& b : blocks_)
    if (b.category == name_of(MemTag::optimizer)) kept += b.bytes;
  write_file_atomically(folder_.file("opt_state_mb.txt"),
                        optimizer_report(step_.model().params().specs(), step_.optimizer().kind(),
                                         step_.optimizer().moments_dtype(), kept, comm_.world()));

  // Role -> dtype -> (tensors, bytes).
  std::map<std::string, std::map<std::string, std::pair<int64_t, int64_t>>> roles;
  for (const MemorySnapshot::Block& b : blocks_) {
    auto& [tensors, bytes] = roles[b.category][name_of(b.dtype)];
    tensors += 1, bytes += b.bytes;
  }
  std::string text = "role          dtype   tensors          MiB\n";
  for (const auto& [role, dtypes] : roles)
    for (const auto& [dtype, sums] : dtypes)
      text += fmt::format("{:<12}  {:<6} {:>8} {:>12.2f}\n", role, dtype, sums.first,
                          static_cast<double>(sums.second) / kMiB);
  text += "\nrole          dtype   tensor\n";
  for (const MemorySnapshot::Block& b : blocks_)
    text += fmt::format("{:<12}  {:<6}  {} {}\n", b.category, name_of(b.dtype), b.name, b.shape.str());
  write_file_atomically(folder_.file("dtypes_report.txt"), text);
}

void write_memory_snapshot(const std::string& folder, const std::string& suffix, const MemorySnapshot& s,
                           const std::function<void()>& check) {
  // The main thread and the watchdog would otherwise use the same temporary file names at the same time.
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  const std::string path = fmt::format("{}/mem_{}{}.", folder, s.when, suffix);
  const auto write = [&](const char* extension, const std::string& text) {
    check();
    write_file_atomically(path + extension, text);
  };
  write("txt", memory_summary(s));
  write("json", dump_json(memory_stats(s), 1) + "\n");
  write("pickle", memory_pickle(s));
}

}  // namespace triad
