#include "io/tensor_reader.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "engine/check.h"
#include "engine/memory.h"
#include "engine/process/text.h"
#include "io/crc32.h"

namespace triad {

namespace {

// Elements [begin, end) of a range's tensor, small enough for one buffer.
struct Piece {
  size_t range = 0;
  int64_t begin = 0, end = 0;
};

bool is_float(const TensorEntry& entry) {
  const std::optional<DType> dtype = entry.engine_dtype();
  return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::bf16 || entry.dtype == "F16";
}

int64_t element_bytes(const TensorEntry& entry) {
  const std::optional<DType> dtype = entry.engine_dtype();
  return dtype ? size_of(*dtype) : static_cast<int64_t>(sizeof(_Float16));
}

template <class T>
void convert(std::span<const std::byte> raw, std::span<float> out) {
  const T* const from = reinterpret_cast<const T*>(raw.data());
  for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(from[i]);
}

// The pieces of all ranges: one file's in the order of the ranges, and one from each file in turn, so that several
// files are read at a time.
std::vector<Piece> pieces_of(std::span<const TensorRange> ranges, int64_t most) {
  std::map<std::string, std::deque<Piece>> by_file;
  for (size_t i = 0; i < ranges.size(); ++i)
    for (int64_t begin = ranges[i].begin; begin < ranges[i].end; begin += most)
      by_file[ranges[i].file->path()].push_back({i, begin, std::min(begin + most, ranges[i].end)});
  std::vector<Piece> pieces;
  while (!by_file.empty())
    for (auto it = by_file.begin(); it != by_file.end();) {
      pieces.push_back(it->second.front());
      it->second.pop_front();
      it = it->second.empty() ? by_file.erase(it) : std::next(it);
    }
  return pieces;
}

// ParallelReader: threads that read the pieces in their order, each into the next free buffer, and the calling thread,
// which passes full buffers to the sink and frees them.
class ParallelReader {
 public:
  ParallelReader(std::span<const TensorRange> ranges, std::vector<Piece> pieces, const ReadOptions& o, int threads)
      : ranges_(ranges),
        pieces_(std::move(pieces)),
        largest_(largest(pieces_)),
        buffers_(std::min(static_cast<int64_t>(pieces_.size()), int64_t{2} * threads)),
        memory_(o.device, buffers_ * largest_ * static_cast<int64_t>(sizeof(float))),
        sums_(ranges.size()) {
    for (int64_t i = 0; i < buffers_; ++i) free_.push_back(i);
  }
  ~ParallelReader() { stop(); }

  std::vector<PartialSum> run(const FloatSink& sink, int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    for (size_t passed = 0; passed < pieces_.size(); ++passed) {
      const Full full = take();
      const Piece& piece = pieces_[full.piece];
      sink(piece.range, piece.begin, values(full.buffer, piece));
      sums_[piece.range] += full.sum;
      const std::lock_guard lock(mutex_);
      free_.push_back(full.buffer);
      changed_.notify_all();
    }
    return std::move(sums_);
  }

 private:
  struct Full {
    size_t piece = 0;
    int64_t buffer = 0;
    PartialSum sum;
  };

  static int64_t largest(const std::vector<Piece>& pieces) {
    int64_t elements = 0;
    for (const Piece& piece : pieces) elements = std::max(elements, piece.end - piece.begin);
    return elements;
  }

  std::span<float> values(int64_t buffer, const Piece& piece) const {
    return {reinterpret_cast<float*>(memory_.data()) + buffer * largest_, static_cast<size_t>(piece.end - piece.begin)};
  }

  // The next full buffer. Throws a thread's error.
  Full take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !full_.empty() || error_ != nullptr; });
    if (error_ != nullptr) std::rethrow_exception(error_);
    const Full full = full_.back();
    full_.pop_back();
    return full;
  }

  void work() {
    std::vector<std::byte> raw;  // bytes of a piece that is not f32
    try {
      for (;;) {
        Full full;
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, [&] { return stop_ || !free_.empty() || next_ == pieces_.size(); });
          if (stop_ || next_ == pieces_.size()) return;
          full.piece = next_++;
          full.buffer = free_.back();
          free_.pop_back();
        }
        const Piece& piece = pieces_[full.piece];
        full.sum = read(piece, values(full.buffer, piece), raw);
        const std::lock_guard lock(mutex_);
        full_.push_back(full);
        changed_.notify_all();
      }
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (error_ == nullptr) error_ = std::current_exception();
      changed_.notify_all();
    }
  }

  PartialSum read(const Piece& piece, std::span<float> out, std::vector<std::byte>& raw) const {
    const TensorRange& range = ranges_[piece.range];
    const int64_t size = element_bytes(*range.entry), bytes = (piece.end - piece.begin) * size;
    const bool same = range.entry->engine_dtype() == DType::f32;
    if (!same) raw.resize(static_cast<size_t>(bytes));
    const std::span<std::byte> to = same ? std::as_writable_bytes(out) : std::span(raw);
    range.file->read_bytes(*range.entry, piece.begin * size, to);
    PartialSum sum{.bytes = bytes};
    if (range.file->has_checksum(*range.entry)) {
      // This piece's part of the whole checksum: its own one, moved by the bytes that follow it in the tensor.
      sum.crc = crc32_shifted(crc32_of(to), range.entry->bytes() - piece.end * size);
    }
    if (range.entry->engine_dtype() == DType::f64) convert<double>(raw, out);
    if (range.entry->engine_dtype() == DType::bf16) convert<bf16>(raw, out);
    if (range.entry->dtype == "F16") convert<_Float16>(raw, out);
    return sum;
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
      changed_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  std::span<const TensorRange> ranges_;
  std::vector<Piece> pieces_;
  int64_t largest_, buffers_;
  PinnedMemory memory_;  // buffers_ pieces, largest_ floats each
  std::vector<PartialSum> sums_;

  std::mutex mutex_;  // guards all that follows, except the threads
  std::condition_variable changed_;
  size_t next_ = 0;  // the first piece that no thread has begun
  std::vector<int64_t> free_;
  std::vector<Full> full_;
  std::exception_ptr error_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

void check_sum(const SafetensorsFile& file, const TensorEntry& entry, const PartialSum& sum) {
  if (sum.bytes == entry.bytes()) file.verify(entry, sum.crc);
}

std::vector<PartialSum> read_ranges(std::span<const TensorRange> ranges, const FloatSink& sink, const ReadOptions& o) {
  for (const TensorRange& range : ranges) {
    const TensorEntry& entry = *range.entry;
    if (!is_float(entry))
      fail("{}: tensor {} is {}: F32, BF16, F16 or F64 is needed", range.file->path(), shortened(entry.name),
           entry.str());
    TRIAD_CHECK(range.begin >= 0 && range.begin <= range.end && range.end <= entry.numel(),
                "{}: tensor {} has {} elements, [{}, {}) are wanted", range.file->path(), shortened(entry.name),
                entry.numel(), range.begin, range.end);
  }
  constexpr unsigned kMostThreads = 8;
  const int cores = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, kMostThreads));
  std::vector<Piece> pieces = pieces_of(ranges, std::max<int64_t>(1, o.piece_elements));
  const int threads =
      std::min(o.threads > 0 ? o.threads : cores, static_cast<int>(std::min<size_t>(pieces.size(), 64)));
  if (pieces.empty()) return std::vector<PartialSum>(ranges.size());
  std::vector<PartialSum> sums = ParallelReader(ranges, std::move(pieces), o, threads).run(sink, threads);
  for (size_t i = 0; i < ranges.size(); ++i) check_sum(*ranges[i].file, *ranges[i].entry, sums[i]);
  return sums;
}

}  // namespace triad
