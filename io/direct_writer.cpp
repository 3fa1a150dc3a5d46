#include "io/direct_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "engine/check.h"

namespace triad {

namespace {
constexpr int64_t kBufferBytes = int64_t{8} << 20;
constexpr int kThreads = 2, kBuffers = kThreads + 2;  // one more buffer is filled, and one is ready
}  // namespace

void DirectWriter::Free::operator()(std::byte* memory) const { std::free(memory); }

DirectWriter::DirectWriter(const std::string& path, std::string name)
    : name_(std::move(name)), file_(::open(path.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC)) {}

DirectWriter::~DirectWriter() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

std::pair<int64_t, int64_t> DirectWriter::write(int64_t offset, std::span<const std::byte> piece) {
  const auto size = static_cast<int64_t>(piece.size());
  const int64_t first = (kBlock - offset % kBlock) % kBlock, last = (offset + size) / kBlock * kBlock - offset;
  if (file_.get() < 0 || last <= first) return {0, 0};
  wait_until_written(offset, offset + size);  // the threads may write two blocks in either order
  if (threads_.empty()) {
    for (int i = 0; i < kBuffers; ++i)
      free_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(kBlock, static_cast<size_t>(kBufferBytes))));
    writing_.resize(kThreads);
    for (size_t i = 0; i < kThreads; ++i) threads_.emplace_back([this, i] { work(i); });
  }
  for (int64_t at = first; at < last; at += kBufferBytes) {
    Full full{.buffer = take(), .offset = offset + at, .bytes = std::min(kBufferBytes, last - at)};
    std::memcpy(full.buffer.get(), piece.data() + at, static_cast<size_t>(full.bytes));
    const std::lock_guard lock(mutex_);
    full_.push_back(std::move(full));
    changed_.notify_all();
  }
  return {first, last};
}

DirectWriter::Buffer DirectWriter::take() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return error_ != nullptr || !free_.empty(); });
  if (error_ != nullptr) std::rethrow_exception(error_);
  Buffer buffer = std::move(free_.back());
  free_.pop_back();
  return buffer;
}

void DirectWriter::wait_until_written(int64_t begin, int64_t end) {
  const auto overlaps = [&](int64_t b, int64_t e) { return b < e && b < end && begin < e; };
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    if (error_ != nullptr) return true;
    bool pending = false;
    for (const Full& full : full_) pending = pending || overlaps(full.offset, full.offset + full.bytes);
    for (const auto& [b, e] : writing_) pending = pending || overlaps(b, e);
    return !pending;
  });
  if (error_ != nullptr) std::rethrow_exception(error_);
}

void DirectWriter::work(size_t thread) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !full_.empty(); });
    if (stop_) return;
    Full full = std::move(full_.front());
    full_.pop_front();
    writing_[thread] = {full.offset, full.offset + full.bytes};
    lock.unlock();
    std::exception_ptr error;
    try {
      write_block(full);
    } catch (...) { error = std::current_exception(); }
    lock.lock();
    writing_[thread] = {0, 0};
    free_.push_back(std::move(full.buffer));
    if (error != nullptr) error_ = error;
    changed_.notify_all();
    if (error != nullptr) return;
  }
}

void DirectWriter::write_block(const Full& full) {
  for (int64_t done = 0; done < full.bytes;) {
    const ssize_t n =
        ::pwrite(file_.get(), full.buffer.get() + done, static_cast<size_t>(full.bytes - done), full.offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL) {  // this file system's blocks are larger, or a short write ended within one
      ::fcntl(file_.get(), F_SETFL, ::fcntl(file_.get(), F_GETFL) & ~O_DIRECT);
      errno = 0;
      const ssize_t rest =
          ::pwrite(file_.get(), full.buffer.get() + done, static_cast<size_t>(full.bytes - done), full.offset + done);
      if (rest > 0) done += rest;
      if (rest > 0) continue;
    } else if (n > 0) {
      done += n;
      continue;
    }
    fail("{}: cannot write {} bytes at offset {} ({} of them written): {}", name_, full.bytes, full.offset, done,
         std::strerror(errno));
  }
}

}  // namespace triad
