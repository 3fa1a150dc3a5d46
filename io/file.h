// The operating system's files: checked reads, atomic writes, appended lines, globs, folders. Every failure throws an
// Error with the path, the operation and the system's reason.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// Owns a file descriptor and closes it in the destructor.
class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int fd) : fd_(fd) {}
  FileHandle(FileHandle&& other) noexcept : fd_(other.release()) {}
  FileHandle& operator=(FileHandle&& other) noexcept;
  ~FileHandle() { reset(); }
  int get() const { return fd_; }
  int release();
  void reset() noexcept;

 private:
  int fd_ = -1;
};

// A regular file that is open for reading. It keeps reading the same file even if another one is renamed to its path.
// Bytes are copied by pread, not mapped: if another program shortens the file, or its disk fails, a read throws an
// Error that names the offset, whereas a load from mapped memory would end the process with SIGBUS. Thread-safe.
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // size in bytes when the file was opened
  // Fills `out` with the bytes from `offset` on. Throws if the file ends earlier.
  void read(int64_t offset, std::span<std::byte> out) const;
  // Bytes from `offset` on; fewer than `bytes` only at the file's end.
  std::string text(int64_t offset, int64_t bytes) const;

 private:
  std::string path_;
  FileHandle file_;
  int64_t size_ = 0;
};

class DirectWriter;

// A file that appears under its name completely or not at all: it is written under temporary_name() in the same folder,
// and commit() renames it. Without commit() the destructor removes the temporary file, and an older file with that name
// is kept.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  // Continues a file that an earlier process began: writes to NAME.part and keeps its first `bytes` bytes. If NAME.part
  // does not exist, a finished file NAME is first renamed to it.
  AtomicFile(const std::string& path, int64_t bytes);
  AtomicFile(AtomicFile&&) = delete;
  ~AtomicFile();

  void write(std::span<const std::byte> bytes);  // appends at the file's end
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  // Writes at any offset; size() grows to include it. In pieces of some MiB, most bytes go past the page cache
  // (io/direct_writer.h), and their errors may appear in a later call.
  void write_at(int64_t offset, std::span<const std::byte> bytes);
  int64_t size() const { return size_; }
  void leave();   // syncs to disk and keeps the temporary file, which the destructor would remove
  void commit();  // syncs to disk, renames the file to its path, and syncs the folder

 private:
  std::string path_, temporary_;
  FileHandle file_;
  std::unique_ptr<DirectWriter> direct_;
  int64_t size_ = 0;
  bool left_ = false;
};

// A file to which text pieces are appended. Each piece is one write(2), so it is in the file even if this process then
// aborts.
class AppendFile {
 public:
  explicit AppendFile(const std::string& path);  // existing content is kept
  void append(std::string_view text);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  FileHandle file_;
};

std::string read_file(const std::string& path);
void write_file_atomically(const std::string& path, std::string_view text);  // uses an AtomicFile

void truncate_file(const std::string& path, int64_t bytes);

// Creates parents too; existing folders are no error, a file with that name is.
void make_folders(const std::string& path);
void sync_folder(const std::string& path);  // a rename or new file in the folder then survives a power failure
void sync_tree(const std::string& path);    // syncs all files below the folder, then the folders
void remove_tree(const std::string& path);  // an absent path is no error; symbolic links are removed, not followed

// True for a name that temporary_name() has made, which an unfinished file or folder has: NAME.tmp.NUMBER with at least
// 21 digits. If target is given, it is set to NAME.
bool is_temporary(const std::string& name, std::string* target = nullptr);
// Returns NAME.tmp.NUMBER with a random number, because several ranks may share the folder, and processes in different
// containers a process id.
std::string temporary_name(const std::string& name);

// The files (not folders) that match the patterns, in pattern order, sorted within each. A file that several patterns
// or links lead to is listed once. A part ** matches folders at any depth. A pattern without a match throws an Error
// that names it, and so does a folder that cannot be listed or a link without a target.
std::vector<std::string> expand_globs(std::span<const std::string> patterns);

}  // namespace triad
