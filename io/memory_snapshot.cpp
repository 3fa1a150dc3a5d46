#include "io/memory_snapshot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "io/pickle.h"

namespace triad {

namespace {

using Total = MemoryLog::Total;
constexpr double kMiB = 1024.0 * 1024.0;
constexpr const char* kTemporary = "temporary";
constexpr const char* kUnknown = "unknown";  // the category "unknown", which the viewer requires

// ---- statistics for memory_stats ----

// all: all memory; large: requests above 1 MiB (the "large pool"); small: the others (the "small pool").
struct Stat {
  Total all, large, small;
};
struct Stats {
  Stat count, bytes, requested, segments, reserved, inactive_count, inactive_bytes;
};

Total plus(Total t, int64_t constant) {  // adds memory that is allocated during the whole run
  t.current += constant, t.peak += constant, t.allocated += constant;
  return t;
}

Stats count(const MemorySnapshot& s) {
  MemoryLog::Pool stays_all, stays_large, stays_small;
  for (const MemorySnapshot::Block& b : s.blocks)
    for (MemoryLog::Pool* pool : {&stays_all, b.bytes <= MemoryLog::kSmallBytes ? &stays_small : &stays_large}) {
      pool->count.current += 1;
      pool->bytes.current += b.padded_bytes;
      pool->requested.current += b.bytes;
    }
  Stats stats;
  const auto sum = [&](Stat& to, Total MemoryLog::Pool::*which) {
    to = {plus(s.scratch.all.*which, (stays_all.*which).current),
          plus(s.scratch.large.*which, (stays_large.*which).current),
          plus(s.scratch.small.*which, (stays_small.*which).current)};
  };
  sum(stats.count, &MemoryLog::Pool::count);
  sum(stats.bytes, &MemoryLog::Pool::bytes);
  sum(stats.requested, &MemoryLog::Pool::requested);
  // The arena is one device allocation, which belongs to the large pool. Inactive bytes are those that no tensor
  // occupies: they grow when temporaries are freed and shrink when temporaries are allocated.
  stats.segments.all = stats.segments.large = {1, 1, 1, 0};
  stats.reserved.all = stats.reserved.large = {s.arena_bytes, s.arena_bytes, s.arena_bytes, 0};
  const int64_t unused = s.arena_bytes - stays_all.bytes.current;
  const Total& temporaries = s.scratch.all.bytes;
  stats.inactive_bytes.all = stats.inactive_bytes.large = {unused - temporaries.current, unused,
                                                           unused + temporaries.freed, temporaries.allocated};
  const int64_t holes = stats.inactive_bytes.all.current > 0;
  stats.inactive_count.all = stats.inactive_count.large = {holes, 1, 1, 1 - holes};
  return stats;
}

// ---- the table ----

constexpr int kWidth = 75;

// A size as a table cell. The unit comes from `total`, the row's first line, so that all lines in a row have the same
// unit.
std::string size_cell(int64_t bytes, int64_t total) {
  constexpr const char* kUnits[] = {"B  ", "KiB", "MiB", "GiB", "TiB", "PiB"};
  constexpr double kStep = 768 * 1024;
  double scale = static_cast<double>(total);
  int unit = 0;
  for (; unit < 5 && scale >= kStep; ++unit) scale /= 1024, bytes /= 1024;
  return fmt::format("{:6d} {}", bytes, kUnits[unit]);
}
std::string count_cell(int64_t n, int64_t total) {
  constexpr const char* kUnits[] = {" ", "K", "M"};
  constexpr double kStep = 750 * 1000;
  double scale = static_cast<double>(total);
  int unit = 0;
  for (; unit < 2 && scale >= kStep; ++unit) scale /= 1000, n /= 1000;
  return fmt::format("{:7d} {} ", n, kUnits[unit]);
}

using Cell = std::string (*)(int64_t, int64_t);

std::string row(const std::string& name, const Total& t, const Total& scale, Cell cell) {
  return fmt::format("| {:<21} | {} | {} | {} | {} |\n", name, cell(t.current, scale.current), cell(t.peak, scale.peak),
                     cell(t.allocated, scale.allocated), cell(t.freed, scale.freed));
}

std::string rule(char c) { return fmt::format("|{}|\n", std::string(kWidth, c)); }

std::string torch_table(const MemorySnapshot& s) {
  const Stats stats = count(s);
  std::string out = rule('=');
  out += fmt::format("| {:16} PyTorch CUDA memory summary, device ID {:<17d} |\n", "", s.device.index);
  out += rule('-');
  out += fmt::format("|  {:9} CUDA OOMs: {:<12d} | {:6} cudaMalloc retries: {:<8d}  |\n", "", s.oom ? 1 : 0, "", 0);
  out += rule('=');
  out += "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |\n";
  const struct {
    const char* name;
    const Stat& stat;
    Cell cell;
  } metrics[] = {{"Allocated memory", stats.bytes, size_cell},
                 {"Active memory", stats.bytes, size_cell},
                 {"Requested memory", stats.requested, size_cell},
                 {"GPU reserved memory", stats.reserved, size_cell},
                 {"Non-releasable memory", stats.inactive_bytes, size_cell},
                 {"Allocations", stats.count, count_cell},
                 {"Active allocs", stats.count, count_cell},
                 {"GPU reserved segments", stats.segments, count_cell},
                 {"Non-releasable allocs", stats.inactive_count, count_cell}};
  for (const auto& m : metrics)
    out += rule('-') + row(m.name, m.stat.all, m.stat.all, m.cell) +
           row("      from large pool", m.stat.large, m.stat.all, m.cell) +
           row("      from small pool", m.stat.small, m.stat.all, m.cell);
  for (const char* name : {"Oversize allocations", "Oversize GPU segments"})
    out += rule('-') + row(name, {}, {}, count_cell);
  return out + rule('=');
}

// ---- the pickle ----

// The full name of an event's tensor, such as layer07.nsa_attend_selected_backward.temporary.
std::string full_name(const MemoryLog::Event& e) {
  std::string name = e.layer < 0 ? "" : fmt::format("layer{:02}.", e.layer);
  if (e.op != nullptr) name += std::string(e.op) + ".";
  return name + e.name;
}

// A source file's path without the part outside the source tree: "/somewhere/triad/model/layer.cpp" becomes
// "model/layer.cpp".
std::string in_tree(const std::string& path) {
  const size_t file = path.rfind('/'),
               folder = file == std::string::npos || file == 0 ? file : path.rfind('/', file - 1);
  return folder == std::string::npos ? path : path.substr(folder + 1);
}

class SnapshotPickle {
 public:
  explicit SnapshotPickle(const MemorySnapshot& s) : s_(s) {}

  std::string bytes() {
    w_.begin_dict();
    w_.text("segments");
    w_.begin_list();
    segment();
    w_.end_list();
    w_.text("device_traces");  // device_traces is a list of lists, one per device
    w_.begin_list();
    for (int i = 0; i < s_.device.index; ++i) w_.begin_list(), w_.end_list();
    w_.begin_list();
    trace();
    w_.end_list();
    w_.end_list();
    settings();
    w_.text("external_annotations");
    w_.begin_list();
    w_.end_list();
    w_.end_dict();
    return w_.finish();
  }

 private:
  uint64_t at(int64_t offset) const { return s_.address + static_cast<uint64_t>(offset); }

  void frames(const std::string& name, const std::string& file, int64_t line) {
    const std::string key = fmt::format("{}\n{}\n{}", name, file, line);
    w_.text("frames");
    if (w_.again(key)) return;
    w_.begin_list();
    if (!name.empty()) {
      w_.begin_dict();
      w_.entry("filename", in_tree(file));
      w_.entry("line", line);
      w_.entry("name", name);
      w_.end_dict();
    }
    w_.end_list();
    w_.keep(key);
  }

  void block(uint64_t address, int64_t size, int64_t requested, const char* state, const std::string& name,
             const std::string& file, int64_t line) {
    w_.begin_dict();
    w_.entry("address", static_cast<int64_t>(address));
    w_.entry("size", size);
    w_.entry("requested_size", requested);
    w_.entry("state", state);
    frames(name, file, line);
    w_.end_dict();
  }

  void segment() {
    const Stats stats = count(s_);
    w_.begin_dict();
    w_.entry("device", s_.device.index);
    w_.entry("address", static_cast<int64_t>(s_.address));
    w_.entry("total_size", s_.arena_bytes);
    w_.entry("allocated_size", stats.bytes.all.current);
    w_.entry("active_size", stats.bytes.all.current);
    w_.entry("requested_size", stats.requested.all.current);
    w_.entry("stream", int64_t{0});
    w_.entry("segment_type", "large");
    w_.text("segment_pool_id");
    w_.pair(0, 0);
    w_.flag("is_expandable", false);
    frames("arena", "engine/memory.cpp", 0);
    w_.text("blocks");
    w_.begin_list();
    int64_t end = 0;  // where the last block ends; the blocks must cover the segment without gaps
    const auto hole_up_to = [&](int64_t offset) {
      if (offset > end) block(at(end), offset - end, 0, "inactive", "", "", 0);
      end = offset;
    };
    for (const MemoryLog::Event& e : s_.scratch.live) {
      const auto offset = static_cast<int64_t>(reinterpret_cast<uint64_t>(e.address) - s_.address);
      hole_up_to(offset);
      block(at(offset), align_up(e.bytes), e.bytes, "active_allocated", full_name(e), e.file, e.line);
      end = offset + align_up(e.bytes);
    }
    for (const MemorySnapshot::Block& b : s_.blocks) {
      hole_up_to(b.offset);
      block(at(b.offset), b.padded_bytes, b.bytes, "active_allocated", b.name, b.file, b.line);
      end = b.offset + b.padded_bytes;
    }
    hole_up_to(s_.arena_bytes);
    w_.end_list();
    w_.end_dict();
  }

  void event(const char* action, uint64_t address, int64_t size, int64_t time_us, const std::string& category,
             const std::string& name, const std::string& file, int64_t line) {
    w_.begin_dict();
    w_.entry("action", action);
    w_.entry("addr", static_cast<int64_t>(address));
    w_.entry("size", size);
    w_.entry("stream", int64_t{0});
    w_.entry("time_us", time_us);
    w_.entry("category", category);
    frames(name, file, line);
    w_.end_dict();
  }

  // Tensors that stay for the whole run are written before temporaries, regardless of their age, so that the viewer
  // learns their categories.
  void trace() {
    const int64_t first_us = s_.blocks.empty() ? s_.time_us : s_.blocks.front().time_us;
    event("segment_alloc", s_.address, s_.arena_bytes, first_us, kUnknown, "arena", "engine/memory.cpp", 0);
    for (const MemorySnapshot::Block& b : s_.blocks)
      event("alloc", at(b.offset), b.padded_bytes, b.time_us, b.category, b.name, b.file, b.line);
    for (const MemoryLog::Event& e : s_.scratch.events) {
      const auto add = [&](const char* action) {
        event(action, reinterpret_cast<uint64_t>(e.address), align_up(e.bytes), e.time_us, kTemporary, full_name(e),
              e.file, e.line);
      };
      if (e.kind == MemoryLog::Kind::alloc) {
        add("alloc");
      } else {
        add("free_requested");
        add("free_completed");
      }
    }
    if (s_.oom) {
      w_.begin_dict();
      w_.entry("action", "oom");
      w_.entry("device_free", s_.oom->free);
      w_.entry("size", s_.oom->asked);
      w_.entry("stream", int64_t{0});
      w_.entry("time_us", s_.time_us);
      frames(s_.oom->what, "", 0);
      w_.end_dict();
    }
    event("snapshot", 0, 0, s_.time_us, kUnknown, s_.when, "", 0);
  }

  // The format allows extra keys here: the viewer shows them as they are.
  void settings() {
    w_.text("allocator_settings");
    w_.begin_dict();
    w_.entry("PYTORCH_CUDA_ALLOC_CONF", "");
    w_.entry("max_split_size", int64_t{-1});
    w_.text("garbage_collection_threshold");
    w_.number(0);
    w_.flag("expandable_segments", false);
    w_.entry("trace_alloc_max_entries", static_cast<int64_t>(MemoryLog::kEvents));
    w_.flag("trace_alloc_overflowed", s_.scratch.lost > 0);
    w_.entry("engine", "triad");
    w_.entry("snapshot", s_.when);
    for (const MemorySnapshot::Category& c : s_.categories())
      w_.entry(c.name + " (MiB)", fmt::format("{:.2f}", static_cast<double>(c.bytes) / kMiB));
    w_.entry("device in use (MiB)", fmt::format("{:.2f}", static_cast<double>(s_.in_use_bytes) / kMiB));
    w_.end_dict();
  }

  const MemorySnapshot& s_;
  PickleWriter w_;
};

}  // namespace

std::vector<MemorySnapshot::Category> MemorySnapshot::categories() const {
  std::vector<Category> all;
  const auto add = [&](const std::string& name, int64_t bytes) {
    for (Category& c : all)
      if (c.name == name) return void(c.bytes += bytes);
    all.push_back({name, bytes});
  };
  for (const Block& b : blocks) add(b.category, b.padded_bytes);
  add(kTemporary, scratch_bytes);
  int64_t rest = arena_bytes;
  for (const Category& c : all) rest -= c.bytes;
  if (rest != 0) add("unused", rest);
  for (const Outside& o : outside) add(o.what, o.bytes);
  return all;
}

int64_t MemorySnapshot::unaccounted_bytes() const {
  int64_t rest = in_use_bytes;
  for (const Category& c : categories()) rest -= c.bytes;
  return rest;
}

std::string memory_summary(const MemorySnapshot& s) {
  return torch_table(s) + "\n" + memory_by_name(s) + (s.oom ? "\n" + s.oom->what + "\n" : "");
}

std::string memory_by_name(const MemorySnapshot& s) {
  std::string out;
  const auto line = [&](const std::string& name, int64_t bytes) {
    out += fmt::format("  {:<44} {:>12.2f}\n", name, static_cast<double>(bytes) / kMiB);
  };
  out += fmt::format("memory of {} at {}, MiB\n", s.device.str(), s.when);
  int64_t sum = 0;
  for (const MemorySnapshot::Category& c : s.categories()) line(c.name, c.bytes), sum += c.bytes;
  line("sum", sum);
  if (!s.planned) {
    line(s.device.is_cuda() ? "in use, as the driver reports" : "of this process, as Linux reports", s.in_use_bytes);
    line("difference", s.in_use_bytes - sum);
  }
  out += "largest tensors, MiB\n";
  std::vector<const MemorySnapshot::Block*> largest;
  for (const MemorySnapshot::Block& b : s.blocks) largest.push_back(&b);
  std::stable_sort(largest.begin(), largest.end(), [](auto a, auto b) { return a->bytes > b->bytes; });
  constexpr size_t kMost = 10;
  if (largest.size() > kMost) largest.resize(kMost);
  for (const MemorySnapshot::Block* b : largest)
    line(fmt::format("{} {}{} ({})", b->name, name_of(b->dtype), b->shape.str(), b->category), b->bytes);
  return out;
}

Json memory_stats(const MemorySnapshot& s) {
  const Stats stats = count(s);
  Json j = Json::object();
  const auto add = [&](const char* key, const Stat& stat) {
    const auto pool = [&](const char* name, const Total& t) {
      const std::string prefix = fmt::format("{}.{}.", key, name);
      j[prefix + "current"] = t.current;
      j[prefix + "peak"] = t.peak;
      j[prefix + "allocated"] = t.allocated;
      j[prefix + "freed"] = t.freed;
    };
    pool("all", stat.all);
    pool("large_pool", stat.large);
    pool("small_pool", stat.small);
  };
  add("allocation", stats.count);
  add("segment", stats.segments);
  add("active", stats.count);
  add("inactive_split", stats.inactive_count);
  add("allocated_bytes", stats.bytes);
  add("reserved_bytes", stats.reserved);
  add("active_bytes", stats.bytes);
  add("inactive_split_bytes", stats.inactive_bytes);
  add("requested_bytes", stats.requested);
  for (const char* key : {"oversize_allocations", "oversize_segments"})
    for (const char* number : {"current", "peak", "allocated", "freed"}) j[fmt::format("{}.{}", key, number)] = 0;
  j["max_split_size"] = -1;
  j["num_alloc_retries"] = 0;
  j["num_device_alloc"] = 1;
  j["num_device_free"] = 0;
  j["num_ooms"] = s.oom ? 1 : 0;
  j["num_sync_all_streams"] = 0;
  // Triad's own keys, which memory_stats does not have.
  Json categories = Json::object(), tensors = Json::array();
  for (const MemorySnapshot::Category& c : s.categories()) categories[c.name] = c.bytes;
  for (const MemorySnapshot::Block& b : s.blocks) {
    Json shape = Json::array();
    for (int i = 0; i < b.shape.rank; ++i) shape.push_back(b.shape[i]);
    tensors.push_back({{"name", b.name},
                       {"category", b.category},
                       {"dtype", name_of(b.dtype)},
                       {"shape", shape},
                       {"bytes", b.bytes}});
  }
  j["triad"] = {{"when", s.when},
                {"time_us", s.time_us},
                {"device", s.device.str()},
                {"category_bytes", categories},
                {"in_use_bytes", s.in_use_bytes},
                {"unaccounted_bytes", s.unaccounted_bytes()},
                {"scratch_events_lost", s.scratch.lost},
                {"tensors", tensors}};
  if (s.oom) j["triad"]["oom"] = {{"asked", s.oom->asked}, {"free", s.oom->free}, {"what", s.oom->what}};
  return j;
}

std::string memory_pickle(const MemorySnapshot& s) { return SnapshotPickle(s).bytes(); }

}  // namespace triad
