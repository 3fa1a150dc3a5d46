// DirectWriter: writes a file's whole blocks past the page cache (O_DIRECT), on two separate threads, so that the disk
// has the next block when one is finished. Large files reach the disk's rate that way, also while training fills
// memory; through the page cache the kernel slows the writer down once too many pages wait to be written.
#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <limits>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/file.h"

namespace triad {

class DirectWriter {
 public:
  static constexpr int64_t kBlock = 4096;               // offsets and sizes on the disk are multiples of this
  static constexpr int64_t kFewest = int64_t{4} << 20;  // smaller pieces are not worth the detour

  // path: an existing file. name: what messages call it.
  DirectWriter(const std::string& path, std::string name);
  ~DirectWriter();
  DirectWriter(const DirectWriter&) = delete;

  // Copies the whole blocks in a piece that begins at `offset` in the file, to be written soon, and returns which bytes
  // these are: [first, second), empty if the file system has no direct writes. Throws an earlier write's error.
  std::pair<int64_t, int64_t> write(int64_t offset, std::span<const std::byte> piece);
  // Waits until no write to the file's bytes [begin, end), or to any bytes, is pending; throws a write's error.
  void wait_until_written(int64_t begin, int64_t end);
  void finish() { wait_until_written(0, std::numeric_limits<int64_t>::max()); }

 private:
  struct Free {
    void operator()(std::byte* memory) const;
  };
  using Buffer = std::unique_ptr<std::byte, Free>;
  struct Full {
    Buffer buffer;
    int64_t offset = 0, bytes = 0;
  };
  Buffer take();
  void work(size_t thread);
  void write_block(const Full&);

  std::string name_;
  FileHandle file_;  // opened with O_DIRECT; none if that failed

  std::mutex mutex_;  // guards all that follows, except the threads
  std::condition_variable changed_;
  std::vector<Buffer> free_;
  std::deque<Full> full_;
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::pair<int64_t, int64_t>> writing_;  // each thread's bytes [first, second) that it is writing
  std::vector<std::thread> threads_;                  // started by the first write
};

}  // namespace triad
