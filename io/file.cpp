#include "io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <glob.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "io/direct_writer.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

const char* reason() { return std::strerror(errno); }

std::string folder_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

// Writes all bytes at `offset`, or at the file's current position if offset < 0.
void write_all(int fd, const std::string& path, int64_t offset, std::span<const std::byte> bytes) {
  const size_t total = bytes.size();
  while (!bytes.empty()) {
    const ssize_t n =
        offset < 0 ? ::write(fd, bytes.data(), bytes.size()) : ::pwrite(fd, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      fail("{}: cannot write {} bytes{} ({} of them written): {}", path, total,
           offset < 0 ? "" : fmt::format(" at offset {}", offset), total - bytes.size(), reason());
    bytes = bytes.subspan(static_cast<size_t>(n));
    if (offset >= 0) offset += n;
  }
}

void sync_file(int fd, const std::string& path) {
  // Some file systems cannot sync a folder, or any file, and return one of these. This is not an error.
  const bool synced = ::fsync(fd) == 0 || errno == EINVAL || errno == ENOTSUP || errno == ENOSYS;
  if (!synced) fail("{}: cannot sync to disk: {}", path, reason());
}

// Raises this process's limit on open files to its hard maximum once half of the soft limit is in use: a data set may
// have more shards than the usual limit of 1,024 files.
void raise_file_limit(int opened) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return;
  if (opened >= 0 && static_cast<rlim_t>(opened) < limit.rlim_cur / 2) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

FileHandle open_to_read(const std::string& path) {
  // Nonblocking, because opening a pipe could otherwise wait forever.
  constexpr int kFlags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
  FileHandle file(::open(path.c_str(), kFlags));
  const bool too_many = file.get() < 0 && errno == EMFILE;
  if (file.get() >= 0 || too_many) raise_file_limit(file.get());
  if (too_many) file = FileHandle(::open(path.c_str(), kFlags));
  if (file.get() < 0) fail("{}: cannot be opened: {}", path, reason());
  return file;
}

}  // namespace

FileHandle& FileHandle::operator=(FileHandle&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

int FileHandle::release() { return std::exchange(fd_, -1); }

void FileHandle::reset() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

InputFile::InputFile(const std::string& path) : path_(path), file_(open_to_read(path)) {
  struct stat info;
  if (::fstat(file_.get(), &info) != 0) fail("{}: cannot be read: {}", path, reason());
  TRIAD_CHECK(S_ISREG(info.st_mode), "{}: {}, a regular file is needed", path,
              S_ISDIR(info.st_mode) ? "this is a folder" : "this is no file on disk");
  size_ = info.st_size;
}

void InputFile::read(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t n = ::pread(file_.get(), out.data(), out.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("{}: cannot be read at offset {}: {}", path_, offset, reason());
    TRIAD_CHECK(n > 0, "{}: cannot be read at offset {}: the file ends before, it had {} bytes when it was opened",
                path_, offset, size_);
    offset += n;
    out = out.subspan(static_cast<size_t>(n));
  }
}

std::string InputFile::text(int64_t offset, int64_t bytes) const {
  std::string text(static_cast<size_t>(std::clamp<int64_t>(size_ - offset, 0, bytes)), '\0');
  read(offset, std::as_writable_bytes(std::span(text)));
  return text;
}

AtomicFile::AtomicFile(const std::string& path) : path_(path), temporary_(temporary_name(path)) {
  struct stat info {};  // a device or pipe is no target of a rename, which would replace it with a file
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode))
    fail("{}: is no file that can be replaced, but a device, pipe or socket", path);
  file_ = FileHandle(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file_.get() < 0) fail("{}: cannot be written: {}", path, reason());
}

AtomicFile::AtomicFile(const std::string& path, int64_t bytes) : path_(path), temporary_(path + ".part"), size_(bytes) {
  const bool is_there = ::access(temporary_.c_str(), F_OK) == 0;
  if (bytes > 0 && !is_there && ::rename(path.c_str(), temporary_.c_str()) != 0)
    fail("{}: is not there to go on with its first {} bytes, nor is {}: {}", temporary_, bytes, path, reason());
  file_ = FileHandle(::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666));
  struct stat info {};
  if (file_.get() < 0 || ::fstat(file_.get(), &info) != 0) fail("{}: cannot be written: {}", temporary_, reason());
  left_ = bytes > 0;
  TRIAD_CHECK(info.st_size >= bytes, "{}: has {} bytes, {} were written to go on with", temporary_, info.st_size,
              bytes);
  if (::ftruncate(file_.get(), bytes) != 0) fail("{}: cannot be cut to {} bytes: {}", temporary_, bytes, reason());
}

AtomicFile::~AtomicFile() {
  if (file_.get() >= 0 && !left_) ::unlink(temporary_.c_str());
}

void AtomicFile::leave() {
  if (direct_) direct_->finish();
  sync_file(file_.get(), path_);
  left_ = true;
}

void AtomicFile::write(std::span<const std::byte> bytes) { write_at(size_, bytes); }

void AtomicFile::write_at(int64_t offset, std::span<const std::byte> bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  std::pair<int64_t, int64_t> direct = {0, 0};
  if (size >= DirectWriter::kFewest) {
    if (!direct_) direct_ = std::make_unique<DirectWriter>(temporary_, path_);
    direct = direct_->write(offset, bytes);
  }
  const auto write_part = [&](int64_t begin, int64_t end) {
    if (begin == end) return;
    if (direct_) direct_->wait_until_written(offset + begin, offset + end);
    write_all(file_.get(), path_, offset + begin,
              bytes.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)));
  };
  write_part(0, direct.first);
  write_part(direct.second, size);
  size_ = std::max(size_, offset + static_cast<int64_t>(bytes.size()));
}

void AtomicFile::commit() {
  if (direct_) direct_->finish();
  sync_file(file_.get(), path_);
  // Network file systems may report a full disk only in close(). The descriptor is released even if close() fails.
  const bool closed = ::close(file_.release()) == 0;
  const bool renamed = closed && ::rename(temporary_.c_str(), path_.c_str()) == 0;
  if (!renamed) {
    const std::string why = reason();
    if (!left_) ::unlink(temporary_.c_str());
    fail("{}: cannot be {} after {} bytes: {}", path_, closed ? "put in place" : "closed", size_, why);
  }
  sync_folder(folder_of(path_));
}

AppendFile::AppendFile(const std::string& path) : path_(path) {
  file_ = FileHandle(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (file_.get() < 0) fail("{}: cannot be written: {}", path, reason());
}

void AppendFile::append(std::string_view text) { write_all(file_.get(), path_, -1, std::as_bytes(std::span(text))); }

std::string read_file(const std::string& path) {
  const InputFile file(path);
  return file.text(0, file.size());
}

void write_file_atomically(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

void truncate_file(const std::string& path, int64_t bytes) {
  if (::truncate(path.c_str(), bytes) != 0) fail("{}: cannot be cut to {} bytes: {}", path, bytes, reason());
}

void make_folders(const std::string& path) {
  std::error_code error;
  std::vector<std::string> parents;  // parents of the folders that are made
  fs::path above = fs::absolute(path, error).lexically_normal();
  for (; above.has_relative_path() && !fs::exists(fs::symlink_status(above, error)); above = above.parent_path())
    parents.push_back(above.parent_path().string());
  error.clear();
  fs::create_directories(path, error);
  if (!error && !fs::is_directory(path, error)) error = std::make_error_code(std::errc::not_a_directory);
  if (error) fail("{}: the folder cannot be made: {}", path, error.message());
  for (const std::string& parent : parents) {
    const FileHandle folder(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder.get() >= 0) sync_file(folder.get(), parent);  // a folder may be writable but not readable
  }
}

void sync_folder(const std::string& path) {
  const FileHandle folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0) fail("{}: the folder cannot be opened: {}", path, reason());
  sync_file(folder.get(), path);
}

void sync_tree(const std::string& path) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    if (entry.is_symlink()) continue;
    const std::string name = entry.path().string();
    if (entry.is_directory()) {
      sync_tree(name);
    } else {
      const FileHandle file(::open(name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
      if (file.get() < 0) fail("{}: cannot be opened: {}", name, reason());
      sync_file(file.get(), name);
    }
  }
  if (error) fail("{}: the folder cannot be listed: {}", path, error.message());
  sync_folder(path);
}

void remove_tree(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(fs::symlink_status(path, error))) {
    std::vector<std::string> inside;
    for (const fs::directory_entry& entry : fs::directory_iterator(path, error))
      inside.push_back(entry.path().string());
    if (error) fail("{}: cannot be removed: the folder cannot be listed: {}", path, error.message());
    for (const std::string& each : inside) remove_tree(each);
  }
  fs::remove(path, error);
  if (error) fail("{}: cannot be removed: {}", path, error.message());
}

bool is_temporary(const std::string& name, std::string* target) {
  constexpr std::string_view kMark = ".tmp.";
  constexpr size_t kFewestDigits = 1 + 2 * 10;  // a process id and two random numbers; NAME.tmp.1 may be a user's
  const size_t mark = name.rfind(kMark);
  if (mark == std::string::npos || mark == 0) return false;
  const std::string_view number = std::string_view(name).substr(mark + kMark.size());
  if (number.size() < kFewestDigits ||
      !std::all_of(number.begin(), number.end(), [](unsigned char c) { return std::isdigit(c) != 0; }))
    return false;
  if (target) *target = name.substr(0, mark);
  return true;
}

std::string temporary_name(const std::string& name) {
  std::random_device draw;
  return fmt::format("{}.tmp.{}{:010}{:010}", name, ::getpid(), draw(), draw());
}

namespace {

bool has_wildcard(const std::string& text) { return text.find_first_of("*?[\\") != std::string::npos; }

// Matches a glob's parts, one folder after the other. glob(3) leaves out what it may not read, without a word.
class Glob {
 public:
  explicit Glob(const std::string& pattern) : pattern_(pattern) {
    for (const fs::path& part : fs::path(home(pattern)))
      if (!part.empty()) parts_.push_back(part.string());
    for (const std::string& part : parts_)
      if (part != kAnyDepth && part.find(kAnyDepth) != std::string::npos)
        fail("{}: ** matches folders at any depth only if it stands alone, as in DIR/**/*.txt", pattern);
  }
  // The files that match, sorted. Folders do not match.
  std::vector<std::string> files() {
    if (!parts_.empty()) match("", 0);
    std::sort(found_.begin(), found_.end());
    found_.erase(std::unique(found_.begin(), found_.end()), found_.end());
    return std::move(found_);
  }

 private:
  static constexpr const char* kAnyDepth = "**";

  // ~ and ~user at the beginning are home folders.
  static std::string home(const std::string& pattern) {
    if (!pattern.starts_with('~')) return pattern;
    const size_t end = std::min(pattern.find('/'), pattern.size());
    glob_t found{};
    const bool known = ::glob(pattern.substr(0, end).c_str(), GLOB_TILDE_CHECK, nullptr, &found) == 0;
    const std::string folder = known ? found.gl_pathv[0] : pattern.substr(0, end);
    ::globfree(&found);
    return folder + pattern.substr(end);
  }

  // Whether a path that was listed leads to a folder. Throws for a link without a target.
  bool is_folder(const std::string& path) const {
    struct stat info {};
    if (::stat(path.c_str(), &info) == 0) return S_ISDIR(info.st_mode);
    fail("{}: {} cannot be opened: {}", pattern_, path, reason());
  }

  // The names in a folder, which must be one; absent folders and files have none.
  std::vector<std::string> names_in(const std::string& folder) const {
    const std::string path = folder.empty() ? "." : folder;
    DIR* const opened = ::opendir(path.c_str());
    if (opened == nullptr && (errno == ENOENT || errno == ENOTDIR)) return {};
    if (opened == nullptr) fail("{}: {} cannot be listed: {}", pattern_, path, reason());
    const std::unique_ptr<DIR, int (*)(DIR*)> owner(opened, ::closedir);
    std::vector<std::string> names;
    for (errno = 0; const dirent* entry = ::readdir(opened); errno = 0) names.emplace_back(entry->d_name);
    if (errno != 0) fail("{}: {} cannot be listed: {}", pattern_, path, reason());
    return names;
  }

  static std::string join(const std::string& folder, const std::string& name) {
    return folder.empty() || folder.ends_with('/') ? folder + name : folder + "/" + name;
  }

  // Adds the files that parts_[part] and those after it match in `folder`.
  void match(const std::string& folder, size_t part) {
    const bool last = part + 1 == parts_.size();
    if (parts_[part] == kAnyDepth) return match_any_depth(folder, part);
    if (!has_wildcard(parts_[part])) {
      const std::string path = join(folder, parts_[part]);
      struct stat info {};
      if (::lstat(path.c_str(), &info) == 0) return last ? add(path) : match(path, part + 1);
      if (errno != ENOENT && errno != ENOTDIR) fail("{}: {} cannot be opened: {}", pattern_, path, reason());
      return;
    }
    for (const std::string& name : names_in(folder))
      if (::fnmatch(parts_[part].c_str(), name.c_str(), FNM_PERIOD) == 0 && name != "." && name != "..") {
        const std::string path = join(folder, name);
        if (last)
          add(path);
        else if (is_folder(path))
          match(path, part + 1);
      }
  }

  // ** is no folder or any number of folders, but not those whose names begin with a point. Links to folders are
  // followed, except back to a folder on the way.
  void match_any_depth(const std::string& folder, size_t part) {
    std::error_code error;
    const std::string real = fs::canonical(folder.empty() ? "." : folder, error).string();
    if (error) fail("{}: {} cannot be opened: {}", pattern_, folder, error.message());
    if (!on_the_way_.insert(real).second) return;
    const bool last = part + 1 == parts_.size();
    if (!last) match(folder, part + 1);
    for (const std::string& name : names_in(folder)) {
      if (name.starts_with('.')) continue;
      const std::string path = join(folder, name);
      if (is_folder(path))
        match_any_depth(path, part);
      else if (last)
        add(path);
    }
    on_the_way_.erase(real);
  }

  void add(const std::string& path) {
    if (!is_folder(path)) found_.push_back(path);
  }

  const std::string& pattern_;
  std::vector<std::string> parts_, found_;
  std::set<std::string> on_the_way_;  // the folders from the first ** to the current one, links resolved
};

}  // namespace

std::vector<std::string> expand_globs(std::span<const std::string> patterns) {
  std::vector<std::string> files;
  std::set<std::string> seen;  // the paths after resolving links, to list each file once
  for (const std::string& pattern : patterns) {
    std::vector<std::string> matches;
    std::error_code error;
    if (fs::exists(pattern, error))
      matches.push_back(pattern);  // a name that exists is meant literally, even if it contains brackets
    else
      matches = Glob(pattern).files();
    TRIAD_CHECK(!matches.empty(), "no file matches {}", pattern);
    for (const std::string& match : matches) {
      fs::path real = fs::canonical(match, error);
      std::error_code ignored;
      if (error && fs::exists(match, ignored))
        real = match;  // a pipe, such as bash's <(...), has no canonical path
      else if (error)
        fail("{}: cannot be opened: {}", match, error.message());
      if (fs::is_directory(real, error))
        fail("{}: this is a folder; {}/{}", match, match,
             fs::exists(real / "manifest.json", ignored) ? "*.bin takes its token shards" : "* takes its files");
      if (seen.insert(real.string()).second) files.push_back(match);
    }
  }
  return files;
}

}  // namespace triad
