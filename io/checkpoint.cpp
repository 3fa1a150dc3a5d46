#include "io/checkpoint.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <mutex>
#include <set>
#include <system_error>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "engine/process/tone.h"
#include "io/file.h"
#include "io/huggingface/model_config.h"
#include "io/json_config.h"
#include "io/own_files.h"
#include "io/weight_index.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

constexpr const char* kSetAside = "set_aside_";

std::string join(const std::string& folder, const std::string& name) { return (fs::path(folder) / name).string(); }

// Why a folder may not be removed that foreign_in_checkpoint() finds something in.
std::string reason_to_stay(const std::string& folder, const std::vector<std::string>& foreign) {
  if (foreign == std::vector{folder}) return "it is a link, a mount point or no folder";
  return listed(foreign) + " is not Triad's";
}

// Prints a warning, once: each save tries again to remove what could not be removed.
void warn_once(const std::string& text) {
  static std::mutex one_at_a_time;
  static std::set<std::string> said;
  const std::lock_guard lock(one_at_a_time);
  if (!said.insert(text).second) return;
  print_warning(text);
}

// Removes a checkpoint that is not needed any more. Training does not depend on it, so a failure is a warning.
void remove_old(const std::string& folder) {
  try {
    remove_checkpoint(folder);
  } catch (const Error& e) { warn_once(fmt::format("{} (an old checkpoint, which stays)", e.what())); }
}

// Renames a completely written folder to its final name. If a folder with that name exists, the two folders swap names
// in one step, where the file system supports it; then the old one is removed.
void put_in_place(const std::string& parent, const std::string& temporary, const std::string& place) {
  std::error_code unknown;
  if (fs::exists(fs::symlink_status(place, unknown)))
    if (const std::vector<std::string> foreign = foreign_in_checkpoint(place); !foreign.empty())
      fail("{} is in the way of a checkpoint, and stays: {}", place, reason_to_stay(place, foreign));
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
  sync_folder(parent);  // comes before the old folder, which has this name on the disk until then, loses its files
  remove_old(old);
}

// The number N in a name PREFIX<N>; nullopt for other names and for numbers that int64_t cannot hold.
std::optional<int64_t> number_after(std::string_view prefix, std::string_view name) {
  if (!name.starts_with(prefix)) return std::nullopt;
  const std::optional<int64_t> number = parse_number<int64_t>(name.substr(prefix.size()));
  return number && *number >= 0 ? number : std::nullopt;
}

// The number N if a folder is called step_N; nullopt for other names.
std::optional<int64_t> step_of(const std::string& name) { return number_after("step_", name); }

// Moves `latest` away if it is neither a link nor a file that names a checkpoint. A checkpoint copy gets its step's
// name, if that is free and no later than the one to which `latest` will point.
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
  // Not with their parents: if the run's folder was moved away, it must not appear again.
  const auto make = [](const std::string& folder) {
    const fs::path above = fs::absolute(fs::path(folder)).parent_path();
    if (std::error_code unknown; !fs::is_directory(above, unknown))
      fail("{}: the folder cannot be made, because {} is not there", folder, above.string());
    make_folders(folder);
  };
  make(parent);
  remove_leftovers(parent);
  std::string temporary = temporary_name(join(parent, name));
  make(temporary);
  return temporary;
}

std::string finish_checkpoint(const std::string& parent, const std::string& name, const std::string& temporary,
                              const std::string& state, const std::function<void()>& check) {
  const std::string place = join(parent, name);
  sync_tree(temporary);
  write_file_atomically(join(temporary, kStateFile), state);
  check();
  put_in_place(parent, temporary, place);
  check();  // the disk may have taken long to sync the folder
  point_latest_at(parent, name);
  return place;
}

void drop_checkpoint(const std::string& temporary) {
  try {
    remove_checkpoint(temporary);
  } catch (const std::exception&) {}  // the next save removes what is left
}

void remove_checkpoint(const std::string& folder) {
  const std::vector<std::string> foreign = foreign_in_checkpoint(folder);
  if (!foreign.empty()) fail("{}: is not removed: {}", folder, reason_to_stay(folder, foreign));
  if (is_checkpoint(folder)) {
    remove_tree(join(folder, kStateFile));
    sync_folder(folder);
  }
  // The tensors go last: they show, after a kill, that everything else in the folder is Triad's. An index alone does
  // not.
  for (const std::string& name : names_in(folder)) {
    const bool tensors = is_tensor_file_name(name, kWeightsStem) || is_tensor_file_name(name, kMomentsStem);
    if (!tensors || name.ends_with(".json")) remove_tree(join(folder, name));
  }
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
  } catch (const std::exception&) { return -1; }  // it is damaged, or not this program's checkpoint
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
  if (is_huggingface_folder(folder.string())) fail_huggingface_folder(path);
  fail("{}: no whole checkpoint: neither {} in it nor in checkpoints/step_N or step_N below it", path, kStateFile);
}

void thin_out_checkpoints(const std::string& parent, int64_t keep_last, int64_t keep_every, int64_t best) {
  if (keep_last == 0) return;
  const std::vector<CheckpointFolder> all = list_checkpoints(parent);
  const std::string latest = target_of_latest(parent).value_or("");
  for (size_t i = 0; i + static_cast<size_t>(keep_last) < all.size(); ++i) {
    const std::string& path = all[i].path;
    const bool kept_for_good =
        all[i].step == best || (keep_every > 0 && all[i].step > 0 && all[i].step % keep_every == 0);
    std::error_code error;
    if (kept_for_good || fs::equivalent(path, latest, error)) continue;
    if (const std::vector<std::string> foreign = foreign_in_checkpoint(path); !foreign.empty()) {
      warn_once(fmt::format("{}: is kept: {}", path, reason_to_stay(path, foreign)));
      continue;
    }
    // If the process is killed after this rename, the folder keeps its temporary name and remove_leftovers removes it.
    const std::string aside = temporary_name(path);
    if (::rename(path.c_str(), aside.c_str()) != 0) {
      warn_once(fmt::format("{}: an old checkpoint stays: cannot be removed: {}", path, std::strerror(errno)));
      continue;
    }
    try {
      remove_checkpoint(aside);
    } catch (const Error& e) {
      // A whole checkpoint gets its name back; a partial one is a leftover. The message has the name that stays the
      // same, because each warning is printed once.
      const bool restored = is_checkpoint(aside) && ::rename(aside.c_str(), path.c_str()) == 0;
      std::string why = e.what();
      if (const size_t at = why.find(aside); at != std::string::npos) why.replace(at, aside.size(), path);
      warn_once(fmt::format("an old checkpoint {}: {}", restored ? "stays" : "was removed in part", why));
    }
  }
}

std::string next_set_aside(const std::string& parent) {
  for (int64_t k = 0;; ++k) {
    std::string folder = join(parent, kSetAside + std::to_string(k));
    if (!fs::exists(fs::symlink_status(folder))) return folder;
  }
}

namespace {

// Renames a symbolic link into another folder. A relative target, which would lead elsewhere from there, is made
// absolute.
void move_link(const std::string& path, const std::string& place) {
  std::error_code error;
  fs::path target = fs::read_symlink(path, error);
  if (!error && target.is_relative()) target = fs::absolute(fs::path(path)).parent_path() / target;
  if (!error) fs::create_symlink(target.lexically_normal(), place, error);
  if (!error) fs::remove(path, error);
  if (error) fail("{}: the link cannot be moved to {}: {}", path, place, error.message());
}

}  // namespace

std::string set_aside(const std::string& parent, const std::vector<std::string>& paths) {
  std::vector<std::string> mounts;
  for (const std::string& path : paths)
    if (!fs::is_symlink(path) && is_link_or_mount(path)) mounts.push_back(path);
  if (!mounts.empty()) fail("{}: a mount point cannot be moved aside: unmount it first", listed(mounts));
  const std::string folder = next_set_aside(parent);
  make_folders(folder);
  for (const std::string& path : paths) {
    const std::string place = join(folder, fs::path(path).filename().string());
    if (fs::is_symlink(path)) {
      move_link(path, place);
      continue;
    }
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
    // Files with other names are kept: only checkpoints and `latest` are written here.
    if (!is_temporary(name, &target) || !(step_of(target) || target == kLatest)) continue;
    const std::string path = join(parent, name), place = join(parent, target);
    std::error_code error;
    if (target == kLatest) {
      if (!fs::is_directory(fs::symlink_status(path, error))) fs::remove(path, error);
      continue;
    }
    if (!foreign_in_checkpoint(path).empty()) continue;
    const bool free = !fs::exists(fs::symlink_status(place, error));
    if (is_checkpoint(path) && free && ::rename(path.c_str(), place.c_str()) == 0) continue;
    remove_old(path);
  }
}

}  // namespace triad
