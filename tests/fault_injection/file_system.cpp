// Faulty file systems for tests, preloaded with LD_PRELOAD. Environment variables:
//   TRIAD_NO_LOCKS=1               flock(2) fails, as on a file system without locks
//   TRIAD_NO_LINKS=ERRNO           symlink(2) fails with this error, as on a file system without symbolic links
//   TRIAD_NO_FOLDER_SYNC=ERRNO     fsync(2) of a folder fails with this error
//   TRIAD_SLOW_SYNC="S [WORD]"     fsync(2) takes S more seconds; with WORD only for paths that contain it
//   TRIAD_BAD_DISK=FILE            pread(2) of FILE fails while FILE.bad exists
//   TRIAD_COUNT_CALLS=FILE         at the end of a process, writes to FILE how often it called stat(2) and
//                                  malloc(3): {"stat": 12, "malloc": 345}
//   TRIAD_FULL_DISK="A B"          pwrite(2) to paths that contain A and B fails as on a full disk
//   TRIAD_RECORD=FOLDER            appends every call that changes something below FOLDER, or syncs it, to the file
//                                  FOLDER.record, which tests/support/disk_record.h reads
//   TRIAD_BUSY=WORD                unlink(2) and remove(3) of paths that contain WORD fail as for a busy file
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

namespace {

// A function's next definition after this library's.
#define NEXT(function) reinterpret_cast<decltype(&::function)>(dlsym(RTLD_NEXT, #function))

std::string path_of(int fd) {
  std::error_code gone;
  return std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), gone).string();
}

// The absolute path for one relative to an open folder, or to the working folder (AT_FDCWD).
std::string path_in(int folder, const char* path) {
  if (path[0] == '/') return path;
  std::error_code gone;
  return (folder == AT_FDCWD ? std::filesystem::current_path(gone).string() : path_of(folder)) + "/" + path;
}

bool is_there(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}

// Sets errno to the number in an environment variable, if there is one.
bool fails_with(const char* variable) {
  const char* number = std::getenv(variable);
  if (number != nullptr) errno = std::atoi(number);
  return number != nullptr;
}

// Sets errno if a path contains TRIAD_BUSY.
bool is_busy(const std::string& path) {
  const char* word = std::getenv("TRIAD_BUSY");
  if (word == nullptr || path.find(word) == std::string::npos) return false;
  errno = EBUSY;
  return true;
}

// TRIAD_RECORD's record. A lock makes each call and its line one, so lines are in call order.
class Record {
 public:
  static bool has(const std::string& path) {
    static const char* const folder = std::getenv("TRIAD_RECORD");
    return folder != nullptr && (path + "/").starts_with(std::string(folder) + "/");
  }
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  // Appends a line: words separated by tabs, the last being the byte count that follows the line.
  static void add(std::string line, std::string_view bytes = {}) {
    static const auto real_open = NEXT(open);
    static const auto real_write = NEXT(write);
    static const int file =
        real_open((std::getenv("TRIAD_RECORD") + std::string(".record")).c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666);
    const int error = errno;
    line += "\t" + std::to_string(bytes.size()) + "\n";
    line += bytes;
    if (real_write(file, line.data(), line.size()) != static_cast<ssize_t>(line.size())) std::abort();
    errno = error;
  }
};

// Makes the call and, if it succeeds, records the line.
template <class F>
int recorded(bool record, const std::string& line, F&& call) {
  if (!record) return call();
  const std::lock_guard lock(Record::mutex());
  const int result = call();
  if (result >= 0) Record::add(line);
  return result;
}

// open(2), which may make a file or cut one to nothing.
template <class F>
int recorded_open(const char* name, int flags, F&& call) {
  if ((flags & (O_CREAT | O_TRUNC)) == 0) return call();
  const std::string path = path_in(AT_FDCWD, name);
  if (!Record::has(path)) return call();
  const std::lock_guard lock(Record::mutex());
  const bool there = is_there(path);
  const int fd = call();
  if (fd >= 0 && !there) Record::add("create\t" + path);
  if (fd >= 0 && there && (flags & O_TRUNC) != 0) Record::add("cut\t" + path + "\t0");
  return fd;
}

// Writes `from` at an offset, or at the file's position (-1).
template <class F>
ssize_t recorded_write(int fd, const void* from, off_t offset, F&& call) {
  static const bool any = std::getenv("TRIAD_RECORD") != nullptr;
  const std::string path = any ? path_of(fd) : "";
  if (!any || !Record::has(path)) return call();
  const std::lock_guard lock(Record::mutex());
  const ssize_t n = call();
  if (n > 0) {
    const off_t at = offset >= 0 ? offset : ::lseek(fd, 0, SEEK_CUR) - n;
    Record::add("write\t" + path + "\t" + std::to_string(at), {static_cast<const char*>(from), static_cast<size_t>(n)});
  }
  return n;
}

bool is_full(int fd) {
  char a[100] = "", b[100] = "";
  const char* full = std::getenv("TRIAD_FULL_DISK");
  if (full == nullptr || std::sscanf(full, "%99s %99s", a, b) != 2) return false;
  const std::string path = path_of(fd);
  return path.find(a) != std::string::npos && path.find(b) != std::string::npos;
}

bool is_bad(int fd) {
  const char* file = std::getenv("TRIAD_BAD_DISK");
  return file != nullptr && ::access((std::string(file) + ".bad").c_str(), F_OK) == 0 && path_of(fd) == file;
}

mode_t mode_of(int flags, va_list arguments) { return (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0; }

}  // namespace

extern "C" {

int flock(int fd, int operation) {
  static const auto real = reinterpret_cast<int (*)(int, int)>(dlsym(RTLD_NEXT, "flock"));
  if (std::getenv("TRIAD_NO_LOCKS") == nullptr) return real(fd, operation);
  errno = ENOLCK;
  return -1;
}

int fsync(int fd) {
  static const auto real = NEXT(fsync);
  double slow_s = 0;
  char word[100] = "";
  if (const char* slow = std::getenv("TRIAD_SLOW_SYNC"); slow != nullptr &&
                                                         std::sscanf(slow, "%lf %99s", &slow_s, word) >= 1 &&
                                                         path_of(fd).find(word) != std::string::npos)
    std::this_thread::sleep_for(std::chrono::duration<double>(slow_s));
  struct stat info {};
  if (::fstat(fd, &info) == 0 && S_ISDIR(info.st_mode) && fails_with("TRIAD_NO_FOLDER_SYNC")) return -1;
  const std::string path = path_of(fd);
  return recorded(Record::has(path), "sync\t" + path, [&] { return real(fd); });
}

ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
  static const auto real = NEXT(pread);
  if (!is_bad(fd)) return real(fd, to, bytes, offset);
  errno = EIO;
  return -1;
}

ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
  static const auto real = NEXT(pwrite);
  if (!is_full(fd)) return recorded_write(fd, from, offset, [&] { return real(fd, from, bytes, offset); });
  errno = ENOSPC;
  return -1;
}

ssize_t write(int fd, const void* from, size_t bytes) {
  static const auto real = NEXT(write);
  return recorded_write(fd, from, -1, [&] { return real(fd, from, bytes); });
}

ssize_t writev(int fd, const iovec* parts, int n) {
  static const auto real = NEXT(writev);
  std::string all;
  if (std::getenv("TRIAD_RECORD") != nullptr)
    for (int i = 0; i < n; ++i) all.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
  return recorded_write(fd, all.data(), -1, [&] { return real(fd, parts, n); });
}

int open(const char* path, int flags, ...) {
  static const auto real = NEXT(open);
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return recorded_open(path, flags, [&] { return real(path, flags, mode); });
}

int open64(const char* path, int flags, ...) {
  static const auto real = NEXT(open64);
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = mode_of(flags, arguments);
  va_end(arguments);
  return recorded_open(path, flags, [&] { return real(path, flags, mode); });
}

int ftruncate(int fd, off_t bytes) noexcept {
  static const auto real = NEXT(ftruncate);
  const std::string path = path_of(fd);
  return recorded(Record::has(path), "cut\t" + path + "\t" + std::to_string(bytes), [&] { return real(fd, bytes); });
}

int truncate(const char* path, off_t bytes) noexcept {
  static const auto real = NEXT(truncate);
  const std::string whole = path_in(AT_FDCWD, path);
  return recorded(Record::has(whole), "cut\t" + whole + "\t" + std::to_string(bytes),
                  [&] { return real(path, bytes); });
}

int rename(const char* from, const char* to) noexcept {
  static const auto real = NEXT(rename);
  const std::string a = path_in(AT_FDCWD, from), b = path_in(AT_FDCWD, to);
  return recorded(Record::has(a) || Record::has(b), "rename\t" + a + "\t" + b, [&] { return real(from, to); });
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  static const auto real = NEXT(renameat2);
  const std::string a = path_in(from_folder, from), b = path_in(to_folder, to);
  const std::string word = (flags & RENAME_EXCHANGE) != 0 ? "exchange\t" : "rename\t";
  return recorded(Record::has(a) || Record::has(b), word + a + "\t" + b,
                  [&] { return real(from_folder, from, to_folder, to, flags); });
}

int unlink(const char* path) noexcept {
  static const auto real = NEXT(unlink);
  const std::string whole = path_in(AT_FDCWD, path);
  if (is_busy(whole)) return -1;
  return recorded(Record::has(whole), "remove\t" + whole, [&] { return real(path); });
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  static const auto real = NEXT(unlinkat);
  const std::string whole = path_in(folder, path);
  return recorded(Record::has(whole), "remove\t" + whole, [&] { return real(folder, path, flags); });
}

int rmdir(const char* path) noexcept {
  static const auto real = NEXT(rmdir);
  const std::string whole = path_in(AT_FDCWD, path);
  return recorded(Record::has(whole), "remove\t" + whole, [&] { return real(path); });
}

int remove(const char* path) noexcept {
  static const auto real = NEXT(remove);
  const std::string whole = path_in(AT_FDCWD, path);
  if (is_busy(whole)) return -1;
  return recorded(Record::has(whole), "remove\t" + whole, [&] { return real(path); });
}

int mkdir(const char* path, mode_t mode) noexcept {
  static const auto real = NEXT(mkdir);
  const std::string whole = path_in(AT_FDCWD, path);
  return recorded(Record::has(whole), "mkdir\t" + whole, [&] { return real(path, mode); });
}

int symlink(const char* target, const char* path) noexcept {
  static const auto real = NEXT(symlink);
  if (fails_with("TRIAD_NO_LINKS")) return -1;
  const std::string whole = path_in(AT_FDCWD, path);
  return recorded(Record::has(whole), "symlink\t" + whole + "\t" + target, [&] { return real(target, path); });
}

}  // extern "C"
namespace {

std::atomic<long> stat_calls, malloc_calls;

struct CallCounts {
  ~CallCounts() {
    const char* file = std::getenv("TRIAD_COUNT_CALLS");
    if (file == nullptr) return;
    std::FILE* out = std::fopen(file, "w");
    if (out == nullptr) return;
    std::fprintf(out, "{\"stat\": %ld, \"malloc\": %ld}", stat_calls.load(), malloc_calls.load());
    std::fclose(out);
  }
} call_counts;

}  // namespace

extern "C" int stat(const char* path, struct stat* info) noexcept {
  using Stat = int (*)(const char*, struct stat*);
  static const auto real = reinterpret_cast<Stat>(dlsym(RTLD_NEXT, "stat"));
  stat_calls.fetch_add(1, std::memory_order_relaxed);
  return real(path, info);
}

// glibc's own names, because dlsym() itself may allocate.
extern "C" void* __libc_malloc(size_t bytes);
extern "C" void* malloc(size_t bytes) {
  malloc_calls.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(bytes);
}
