// Files at the level of the system: checked reads, writes that appear whole or not at all, appended lines, globs,
// folders. Every failure is an Error that names the path, what was tried and the system's reason.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace triad {

// A file descriptor, closed when it goes.
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

// A regular file, open for reading as long as this object lives, even if another file takes its name. Bytes are copied
// out, not mapped: if another program cuts the file, or its disk fails, a read throws an Error that names the offset,
// where a load from mapped memory would end the process with SIGBUS. Any thread may read.
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }  // bytes when the file was opened
  // Fills out with the bytes from offset on, all of which have to lie within the file.
  void read(int64_t offset, std::span<std::byte> out) const;
  std::string text(int64_t offset, int64_t bytes) const;  // fewer bytes only where size() ends them

 private:
  std::string path_;
  FileHandle file_;
  int64_t size_ = 0;
};

// A file that appears under its name whole or not at all: written beside it as temporary_name(), renamed by commit().
// Without commit() the destructor removes it, and an older file of that name stays.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  // Written beside it as NAME.part, on which a later process may go on: the first `bytes` of it, or of a whole file of
  // that name, stay.
  AtomicFile(const std::string& path, int64_t bytes);
  AtomicFile(AtomicFile&&) = delete;
  ~AtomicFile();

  void write(std::span<const std::byte> bytes);  // at the end
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  void write_at(int64_t offset, std::span<const std::byte> bytes);  // anywhere; size() grows to cover it
  int64_t size() const { return size_; }
  void leave();   // fsync; from now on the destructor lets it be
  void commit();  // fsync, rename, fsync of the folder

 private:
  std::string path_, temporary_;
  FileHandle file_;
  int64_t size_ = 0;
  bool left_ = false;
};

// A file that grows by whole pieces, each one write(2): what was appended survives an abort of this process.
class AppendFile {
 public:
  explicit AppendFile(const std::string& path);  // goes on behind what is there
  void append(std::string_view text);
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  FileHandle file_;
};

std::string read_file(const std::string& path);
void write_file_atomically(const std::string& path, std::string_view text);  // through AtomicFile

void truncate_file(const std::string& path, int64_t bytes);

void make_folders(const std::string& path);  // parents too; existing ones are fine, a file in the way is an Error
void sync_folder(const std::string& path);   // a rename or a new file in it survives a power cut
void sync_tree(const std::string& path);     // a folder's files, then the folder, all the way down
void remove_tree(const std::string& path);   // what is absent is fine; symbolic links are removed, not followed

// True for NAME.tmp.NUMBER, the name that a file or folder has until it is whole; target, if given, becomes NAME.
bool is_temporary(const std::string& name, std::string* target = nullptr);
// One with a number that nobody else has: other ranks may share the folder, and in containers the process's number too.
std::string temporary_name(const std::string& name);

// The files, no folders, that the patterns match, sorted within a pattern, each file once however many patterns or
// names lead to it. A pattern that matches no file is an Error that names it.
std::vector<std::string> expand_globs(std::span<const std::string> patterns);

}  // namespace triad
