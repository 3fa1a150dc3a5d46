#include "io/checkpoint.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <initializer_list>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "io/file.h"
#include "io/huggingface/model_config.h"
#include "io/json_config.h"
#include "io/weight_index.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

constexpr const char* kSetAside = "set_aside_";

std::string join(const std::string& folder, const std::string& name) { return (fs::path(folder) / name).string(); }

// Renames a completely written folder to its final name. If a folder of that name exists, the two folders swap names in
// one step, where the file system supports it; then the old one is removed.
void put_in_place(const std::string& parent, const std::string& temporary, const std::string& place) {
  if (::rename(temporary.c_str(), place.c_str()) == 0) return sync_folder(parent);
  std::string old = temporary;
  bool placed = errno == EEXIST || errno == ENOTEMPTY;
  if (placed && ::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, place.c_str(), RENAME_EXCHANGE) != 0) {
    // The file system cannot swap. If the process is killed between the next two steps, both folders are complete under
    // temporary names, and remove_leftovers renames one of them.
    old = temporary_name(place);
    placed = ::rename(place.c_str(), old.c_str()) == 0 && ::rename(temporary.c_str(), place.c_str()) == 0;
  }
  if (!placed) fail("{}: cannot be put in place: {}", place, std::strerror(errno));
  sync_folder(parent);  // before the old folder, which has this name on the disk until then, loses its files
  remove_checkpoint(old);
}

// The number N in a name of the form PREFIX<N>; nullopt for other names and for numbers that int64_t cannot hold.
std::optional<int64_t> number_after(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  const std::optional<int64_t> number = parse_number<int64_t>(name.substr(prefix.size()));
  return number && *number >= 0 ? number : std::nullopt;
}

// The number N of a folder called step_N; nullopt for other names.
std::optional<int64_t> step_of(const std::string& name) { return number_after("step_", name); }

// Moves `latest` away if it is neither a link nor a file that names a checkpoint. A copy of a checkpoint gets the name
// of its step, if that is free and no later than the one to which `latest` will point.
void free_latest(const std::string& parent, const std::string& name) {
  const std::string link = join(parent, kLatest);
  if (!fs::exists(fs::symlink_status(link)) || target_of_latest(parent)) return;
  const int64_t step = step_of_latest_folder(parent).value_or(-1);
  const std::string place = join(parent, fmt::format("step_{}", step));
  const bool fits = step >= 0 && step <= step_of(name).value_or(-1) && !fs::exists(fs::symlink_status(place));
  if (!fits || ::rename(link.c_str(), place.c_str()) != 0) set_aside(parent, {link});
}

void point_latest_at(const std::string& parent, const std::string& name) {
  const std::string link = join(parent, kLatest), temporary = temporary_name(link);
  free_latest(parent, name);
  // Without symbolic links the calls below return EPERM, ENOTSUP, ENOSYS or others, as the file system likes.
  if (::symlink(name.c_str(), temporary.c_str()) != 0) return write_file_atomically(link, name + "\n");
  if (::rename(temporary.c_str(), link.c_str()) != 0)
    fail("{}: the link cannot be replaced: {}", link, std::strerror(errno));
  sync_folder(parent);
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error))
    names.push_back(entry.path().filename().string());
  return names;
}

}  // namespace

std::string write_checkpoint(const std::string& parent, const std::string& name,
                             const std::function<std::string(const std::string& folder)>& write) {
  const std::string temporary = begin_checkpoint(parent, name);
  try {
    return finish_checkpoint(parent, name, temporary, write(temporary));
  } catch (...) {
    drop_checkpoint(temporary);
    throw;
  }
}

std::string begin_checkpoint(const std::string& parent, const std::string& name) {
  make_folders(parent);
  remove_leftovers(parent);
  std::string temporary = temporary_name(join(parent, name));
  make_folders(temporary);
  return temporary;
}

std::string finish_checkpoint(const std::string& parent, const std::string& name, const std::string& temporary,
                              const std::string& state) {
  const std::string place = join(parent, name);
  sync_tree(temporary);
  write_file_atomically(join(temporary, kStateFile), state);
  put_in_place(parent, temporary, place);
  point_latest_at(parent, name);
  return place;
}

void drop_checkpoint(const std::string& temporary) {
  try {
    remove_checkpoint(temporary);
  } catch (const std::exception&) {}  // the next save removes what is left
}

void remove_checkpoint(const std::string& folder) {
  if (::unlink(join(folder, kStateFile).c_str()) == 0) sync_folder(folder);
  remove_tree(folder);
}

bool is_checkpoint(const std::string& folder) {
  std::error_code error;
  return fs::is_regular_file(join(folder, kStateFile), error);
}

std::vector<CheckpointFolder> list_checkpoints(const std::string& parent) {
  std::vector<CheckpointFolder> found;
  for (const std::string& name : names_in(parent)) {
    const std::optional<int64_t> step = step_of(name);
    if (step && is_checkpoint(join(parent, name))) found.push_back({*step, join(parent, name)});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  return found;
}

std::optional<std::string> find_newest_checkpoint(const std::string& parent) {
  const std::vector<CheckpointFolder> all = list_checkpoints(parent);
  const int64_t newest = all.empty() ? -1 : all.back().step;
  if (step_of_latest_folder(parent).value_or(-1) > newest) return join(parent, kLatest);
  if (!all.empty()) return all.back().path;
  std::optional<std::string> target = target_of_latest(parent);
  return target && is_checkpoint(*target) ? target : std::nullopt;
}

std::optional<std::string> target_of_latest(const std::string& parent) {
  constexpr int64_t kLongestName = 4096;
  const std::string link = join(parent, kLatest);
  std::error_code error;
  fs::path target = fs::read_symlink(link, error);
  if (error) {
    if (!fs::is_regular_file(link, error) || fs::file_size(link, error) > kLongestName) return std::nullopt;
    std::string text = InputFile(link).text(0, kLongestName);
    text.erase(text.find_last_not_of(" \r\n") + 1);
    target = text;
    if (!step_of(target.filename().string())) return std::nullopt;
  }
  return target.is_absolute() ? target.string() : join(parent, target.string());
}

std::optional<int64_t> step_of_latest_folder(const std::string& parent) {
  const std::string folder = join(parent, kLatest);
  std::error_code error;
  if (!fs::is_directory(fs::symlink_status(folder, error))) return std::nullopt;
  if (!is_checkpoint(folder)) return -1;
  try {
    const std::string path = join(folder, kStateFile);
    const int64_t step = parse_json(read_file(path), path).at("step").get<int64_t>();
    return std::max<int64_t>(-1, step);
  } catch (const std::exception&) { return -1; }  // it is damaged, or not a checkpoint of this program
}

std::string resolve_checkpoint(const std::string& path) {
  fs::path folder = fs::path(path);
  if (!folder.has_filename()) folder = folder.parent_path();  // the path ends in a slash
  std::error_code error;
  const bool link = fs::is_symlink(folder, error);
  if (!link && is_checkpoint(folder.string())) {
    if (folder.filename() != kLatest) return folder.string();
    const fs::path parent = folder.has_parent_path() ? folder.parent_path() : fs::path(".");
    return find_newest_checkpoint(parent.string()).value_or(folder.string());
  }
  // The path ends in `latest`: search its parent folder, even if the link does not exist or is broken.
  if (folder.filename() == kLatest)
    folder = folder.has_parent_path() ? folder.parent_path() : fs::path(".");
  else if (link && is_checkpoint(folder.string()))
    return fs::canonical(folder).string();
  for (const fs::path& parent : {folder / "checkpoints", folder})
    if (const std::optional<std::string> newest = find_newest_checkpoint(parent.string())) return *newest;
  TRIAD_CHECK(fs::exists(folder, error), "{}: there is no such folder", path);
  refuse_adapter(folder.string());
  if (is_huggingface_folder(folder.string()))
    fail_huggingface_folder(path, parse_json(read_file(folder / "config.json"), path, JsonComments::allowed));
  fail("{}: no whole checkpoint: neither {} in it nor in checkpoints/step_N or step_N below it", path, kStateFile);
}

void thin_out_checkpoints(const std::string& parent, int64_t keep_last, int64_t keep_every) {
  if (keep_last == 0) return;
  const std::vector<CheckpointFolder> all = list_checkpoints(parent);
  const std::string latest = target_of_latest(parent).value_or("");
  for (size_t i = 0; i + static_cast<size_t>(keep_last) < all.size(); ++i) {
    const std::string& path = all[i].path;
    const bool kept_for_good = keep_every > 0 && all[i].step > 0 && all[i].step % keep_every == 0;
    std::error_code error;
    if (kept_for_good || fs::equivalent(path, latest, error)) continue;
    // If the process is killed after this rename, the folder keeps its temporary name and remove_leftovers removes it.
    const std::string aside = temporary_name(path);
    if (::rename(path.c_str(), aside.c_str()) != 0)
      fail("{}: cannot be moved aside to be removed: {}", path, std::strerror(errno));
    remove_checkpoint(aside);
  }
}

std::string next_set_aside(const std::string& parent) {
  for (int64_t k = 0;; ++k) {
    std::string folder = join(parent, kSetAside + std::to_string(k));
    if (!fs::exists(fs::symlink_status(folder))) return folder;
  }
}

std::string set_aside(const std::string& parent, const std::vector<std::string>& paths) {
  const std::string folder = next_set_aside(parent);
  make_folders(folder);
  for (const std::string& path : paths) {
    const std::string place = join(folder, fs::path(path).filename().string());
    if (::rename(path.c_str(), place.c_str()) == 0) continue;
    if (errno != EXDEV || !fs::is_regular_file(path))
      fail("{}: cannot be moved to {}: {}", path, place, std::strerror(errno));
    std::error_code error;
    if (!fs::copy_file(path, place, error)) fail("{}: cannot be copied to {}: {}", path, place, error.message());
    sync_tree(folder);
    remove_tree(path);
  }
  sync_folder(folder);
  sync_folder(parent);
  return folder;
}

std::vector<std::string> list_set_aside(const std::string& parent) {
  std::vector<std::string> found;
  for (const std::string& name : names_in(parent))
    if (number_after(kSetAside, name)) found.push_back(join(parent, name));
  std::sort(found.begin(), found.end());
  return found;
}

void remove_leftovers(const std::string& parent) {
  for (const std::string& name : names_in(parent)) {
    std::string target;
    // Files of other names are kept: only checkpoints and `latest` are written here.
    if (!is_temporary(name, &target) || !(step_of(target) || target == kLatest)) continue;
    const std::string path = join(parent, name), place = join(parent, target);
    std::error_code error;
    const bool whole = !fs::is_symlink(path, error) && is_checkpoint(path);
    if (whole && !fs::exists(place, error) && ::rename(path.c_str(), place.c_str()) == 0) continue;
    whole ? remove_checkpoint(path) : remove_tree(path);
  }
}

}  // namespace triad
