// System-level files: checked reads, atomic writes, appended lines, globs, folders. Every failure throws an Error with
// the path, the operation and the system's reason.
#pragma once
#include <cstddef>
#include <cstdint>
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

// A regular file, open for reading. It keeps reading the same file even if another one is renamed to its path. Bytes
// are copied by pread, not mapped: if another program cuts the file, or its disk fails, a read throws an Error that
// names the offset, where a load from mapped memory would end the process with SIGBUS. Thread-safe.
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // bytes when the file was opened
  // Fills `out` with the bytes from `offset` on. Throws if the file ends earlier.
  void read(int64_t offset, std::span<std::byte> out) const;
  std::string text(int64_t offset, int64_t bytes) const;  // fewer than `bytes` only at the file's end

 private:
  std::string path_;
  FileHandle file_;
  int64_t size_ = 0;
};

// A file that appears under its name whole or not at all: written under temporary_name() in the same folder, renamed by
// commit(). Without commit() the destructor removes the temporary file, and an older file of that name stays.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  // Continues a file that an earlier process left: writes to NAME.part and keeps its first `bytes` bytes. If NAME.part
  // does not exist, renames a finished NAME to it first.
  AtomicFile(const std::string& path, int64_t bytes);
  AtomicFile(AtomicFile&&) = delete;
  ~AtomicFile();

  void write(std::span<const std::byte> bytes);  // at the end
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void write_at(int64_t offset, std::span<const std::byte> bytes);  // at any offset; size() grows to cover it
  int64_t size() const { return size_; }
  void leave();   // fsync; the destructor no longer removes the temporary file
  void commit();  // fsync, rename, fsync of the folder

 private:
  std::string path_, temporary_;
  FileHandle file_;
  int64_t size_ = 0;
  bool left_ = false;
};

// A file that grows by appended pieces. Each piece is one write(2), so it survives an abort of this process.
class AppendFile {
 public:
  explicit AppendFile(const std::string& path);  // appends to existing content
  void append(std::string_view text);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  FileHandle file_;
};

std::string read_file(const std::string& path);
void write_file_atomically(const std::string& path, std::string_view text);  // by AtomicFile

void truncate_file(const std::string& path, int64_t bytes);

void make_folders(const std::string& path);  // with parents; existing folders are fine, a file of that name throws
void sync_folder(const std::string& path);   // afterwards a rename or a new file in it survives a power failure
void sync_tree(const std::string& path);     // syncs all files below the folder, then the folders
void remove_tree(const std::string& path);   // an absent path is fine; symbolic links are removed, not followed

// True for NAME.tmp.NUMBER, the name of an unfinished file or folder. If target is given, it becomes NAME.
bool is_temporary(const std::string& name, std::string* target = nullptr);
// NAME.tmp.NUMBER with a random number: several ranks may share the folder, and processes in containers a process id.
std::string temporary_name(const std::string& name);

// The files (not folders) that match the patterns, sorted within a pattern. A file that several patterns or links reach
// is listed once. A pattern without a match throws an Error that names it.
std::vector<std::string> expand_globs(std::span<const std::string> patterns);

}  // namespace triad
