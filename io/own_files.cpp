#include "io/own_files.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "engine/check.h"
#include "io/checkpoint.h"
#include "io/file.h"
#include "io/json_config.h"
#include "io/weight_index.h"

namespace triad {

namespace fs = std::filesystem;

namespace {

bool is_mount(const std::string& path) {
#ifdef STATX_ATTR_MOUNT_ROOT
  struct statx info {};
  if (::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, STATX_TYPE, &info) == 0 &&
      (info.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) != 0)
    return (info.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0;
#endif
  // An older kernel does not say so; another file system's mount shows itself by its device.
  struct stat own {
  }, parent{};
  return ::lstat(path.c_str(), &own) == 0 && S_ISDIR(own.st_mode) && ::stat((path + "/..").c_str(), &parent) == 0 &&
         own.st_dev != parent.st_dev;
}

bool is_regular(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

bool is_own_index(const std::string& path) {
  try {
    const fs::path folder = fs::path(path).parent_path();
    for (const auto& [tensor, file] : read_weight_map(path))
      if (is_own_tensor_file((folder / file).string())) return true;
  } catch (const std::exception&) {}  // no index
  return false;
}

}  // namespace

bool is_link_or_mount(const std::string& path) {
  std::error_code unknown;
  return fs::is_symlink(path, unknown) || is_mount(path);
}

std::string head_of(const std::string& path) {
  constexpr int64_t kBytes = 4096;
  if (!is_regular(path)) return "";
  try {
    return InputFile(path).text(0, kBytes);
  } catch (const Error&) { return ""; }
}

bool is_empty_file(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && info.st_size == 0;
}

bool is_tokenizer_file_name(std::string_view name) {
  constexpr std::string_view kNames[] = {"tokenizer.json", "encoder.json", "vocab.bpe",
                                         "vocab.json",     "merges.txt",   "separator.json"};
  return std::ranges::find(kNames, name) != std::end(kNames);
}

bool is_own_tensor_file(const std::string& path) {
  if (is_empty_file(path)) return true;
  if (path.ends_with(".json")) return is_regular(path) && is_own_index(path);
  // The header is not parsed, so that a file that was damaged later is recognised too.
  constexpr std::string_view kBegin = "{\"__metadata__\":{";
  constexpr size_t kLength = 8;  // bytes before the header
  const std::string head = head_of(path);
  return head.size() > kLength && head.compare(kLength, kBegin.size(), kBegin) == 0 &&
         head.find("\"crc32/", kLength) != std::string::npos;
}

bool is_own_state_file(const std::string& path) {
  if (!is_regular(path)) return false;
  try {
    const Json state = parse_json(read_file(path), path);
    return state.is_object() && state.value("format", "") == "triad checkpoint";
  } catch (const std::exception&) { return false; }
}

std::vector<std::string> foreign_in_checkpoint(const std::string& folder) {
  std::error_code error;
  if (is_link_or_mount(folder) || !fs::is_directory(folder, error)) return {folder};
  std::vector<std::string> foreign, tokenizer;
  bool known = false;  // the folder holds Triad's state or tensors, so the tokenizer is Triad's copy
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string path = entry.path().string(), name = entry.path().filename().string();
    if (name.starts_with(".nfs")) continue;  // a removed file that a process still reads, on NFS
    std::string target;
    const bool half = is_temporary(name, &target);
    const std::string& base = half ? target : name;
    const bool tensors = is_tensor_file_name(base, kWeightsStem) || is_tensor_file_name(base, kMomentsStem);
    if (!is_regular(path) || is_link_or_mount(path)) {
      foreign.push_back(path);
    } else if (half) {
      if (!tensors && base != kStateFile && !is_tokenizer_file_name(base)) foreign.push_back(path);
    } else if (is_tokenizer_file_name(name)) {
      tokenizer.push_back(path);
    } else if ((tensors && is_own_tensor_file(path)) || (name == kStateFile && is_own_state_file(path))) {
      known = true;
    } else {
      foreign.push_back(path);
    }
  }
  if (error) return {folder};
  if (!known) foreign.insert(foreign.end(), tokenizer.begin(), tokenizer.end());
  std::sort(foreign.begin(), foreign.end());
  return foreign;
}

std::string listed(const std::vector<std::string>& paths) {
  constexpr size_t kMost = 10;
  const size_t shown = std::min(paths.size(), kMost);
  std::string text = fmt::format("{}", fmt::join(paths.begin(), paths.begin() + static_cast<ptrdiff_t>(shown), ", "));
  if (shown < paths.size()) text += fmt::format(" and {} more", paths.size() - shown);
  return text;
}

}  // namespace triad
