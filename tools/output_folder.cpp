#include "tools/output_folder.h"

#include <fmt/format.h>
#include <stdio.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "engine/check.h"
#include "io/file.h"
#include "io/folder_lock.h"
#include "io/own_files.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

// Marks an unfinished folder as one that may be removed.
constexpr const char* kUnfinishedMark = ".triad_unfinished";

// Removes an unfinished folder, unless a process is writing it. Whatever keeps it from being removed is a warning.
void remove_unfinished_folder(const std::string& path) {
  std::error_code unknown;
  try {
    FolderLock lock;
    if (!lock.take(path)) return;
    if (!lock.exclusive()) fail("{}: is not removed, because it cannot be locked", path);
    remove_tree(path);
  } catch (const Error& e) {
    if (fs::exists(path, unknown))  // else its process has just put it in place, or removed it
      fmt::print(stderr, "triad: {} (left by a process that was killed, if none is writing it; it stays)\n", e.what());
  }
}

// Removes what killed processes have left of this folder: folders of a temporary name with the mark, which no running
// process has locked.
void remove_unfinished(const fs::path& out) {
  std::vector<std::string> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(out.parent_path(), error)) {
    std::string target;
    const std::string path = entry.path().string();
    if (is_temporary(entry.path().filename().string(), &target) && target == out.filename() &&
        !is_link_or_mount(path) && fs::is_regular_file(fs::symlink_status(entry.path() / kUnfinishedMark, error)))
      found.push_back(path);
  }
  for (const std::string& path : found) remove_unfinished_folder(path);
}

}  // namespace

std::string check_output_folder(const std::string& out, const std::string& source) {
  if (out.empty()) fail_usage("--out is empty: a folder is needed");
  fs::path path = fs::absolute(out).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  std::error_code error, ignored;
  // The result is renamed to the folder itself, because a folder can't replace a link.
  if (fs::is_symlink(path, ignored)) {
    const fs::path target = fs::canonical(path, error);
    if (error) fail("--out {} is a link that leads to no folder: {}", out, error.message());
    path = target;
  }
  if (fs::equivalent(source, path, ignored))
    fail("--out {} is the folder that is read: the result needs a folder of its own", out);
  const fs::file_status status = fs::status(path, ignored);
  if (!fs::exists(status)) return path.string();
  if (!fs::is_directory(status)) fail("--out {} exists and is no folder", out);
  const bool empty = fs::is_empty(path, error);
  if (error) fail("--out {} cannot be read: {}", out, error.message());
  if (!empty) fail("--out {} exists and is not empty: remove it, or choose another --out", out);
  return path.string();
}

void write_output_folder(const std::string& out, const std::function<void(const std::string& folder)>& write) {
  const std::string parent = fs::path(out).parent_path().string(), temporary = temporary_name(out);
  make_folders(parent);
  remove_unfinished(out);
  FolderLock lock;
  try {
    make_folders(temporary);
    write_file_atomically(temporary + "/" + kUnfinishedMark, "");
    lock.take(temporary);
    write(temporary);
    sync_tree(temporary);  // may take long, so it comes before the mark goes
    remove_tree(temporary + "/" + kUnfinishedMark);
    sync_folder(temporary);
    if (::rename(temporary.c_str(), out.c_str()) != 0)
      fail("{}: cannot be put in place: {}", out, std::strerror(errno));
  } catch (...) {
    std::error_code ignored;  // the first error is rethrown
    fs::remove_all(temporary, ignored);
    throw;
  }
  sync_folder(parent);
}

void check_output_place(const std::string& out) {
  fs::path existing = fs::path(out).parent_path();
  std::error_code unknown;
  while (!fs::exists(existing, unknown) && existing.has_relative_path()) existing = existing.parent_path();
  AtomicFile removed_again((existing / fs::path(out).filename()).string());
}

void check_output_file(const std::string& option, const std::string& path) {
  std::error_code unknown;
  if (fs::is_directory(path, unknown)) fail_usage("{}: {} is a folder, and a file is needed", option, path);
  AtomicFile removed_again(path);
}

}  // namespace triad
