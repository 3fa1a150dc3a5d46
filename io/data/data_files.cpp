#include "io/data/data_files.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <filesystem>
#include <map>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "engine/process/text.h"
#include "io/crc32.h"
#include "io/file.h"

namespace triad {

namespace {

// Reads a number that a blank follows, and removes both from `text`. Returns whether it could.
template <class T>
bool take_number(std::string_view& text, T& value, int base) {
  const char* const end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data(), end, value, base);
  if (error != std::errc() || read == end || *read != ' ') return false;
  text.remove_prefix(static_cast<size_t>(read - text.data()) + 1);
  return true;
}

std::string size_text(const DataFile& file) { return fmt::format("{} bytes, CRC-32 {:08x}", file.bytes, file.crc32); }

}  // namespace

uint32_t checksum_of(const InputFile& file, int64_t begin) {
  constexpr int64_t kPiece = 1 << 20;
  std::vector<std::byte> buffer(static_cast<size_t>(std::clamp<int64_t>(file.size() - begin, 0, kPiece)));
  uint32_t crc = 0;
  for (int64_t at = begin; at < file.size(); at += kPiece) {
    const auto piece = std::span(buffer).first(static_cast<size_t>(std::min(kPiece, file.size() - at)));
    file.read(at, piece);
    crc = crc32_of(piece, crc);
  }
  return crc;
}

std::string file_name_of(const std::string& path) { return std::filesystem::path(path).filename().string(); }

std::string files_text(const char* kind, const std::vector<std::string>& files) {
  return files.size() == 1 ? files[0] : fmt::format("{} {} ({}, ...)", files.size(), kind, files[0]);
}

uint32_t checksum_of(const std::vector<DataFile>& files) {
  uint32_t crc = 0;
  for (const DataFile& file : files)
    for (const int64_t word : {file.bytes, static_cast<int64_t>(file.crc32)})
      crc = crc32_of(std::as_bytes(std::span(&word, 1)), crc);
  return crc;
}

DataFile describe_data_file(const std::string& path) {
  const InputFile file(path);
  return {.name = file_name_of(path), .bytes = file.size(), .crc32 = checksum_of(file, 0)};
}

DataFiles describe_data_files(const std::vector<std::string>& paths) {
  auto files = std::make_shared<std::vector<DataFile>>();
  for (const std::string& path : paths) files->push_back(describe_data_file(path));
  return files;
}

Json files_to_json(const std::vector<DataFile>& files) {
  Json lines = Json::array();
  for (const DataFile& file : files)
    lines.push_back(fmt::format("{:08x} {} {}", file.crc32, file.bytes, printable(file.name)));
  return lines;
}

std::vector<DataFile> files_from_json(const Json& lines, const std::string& what) {
  TRIAD_CHECK(lines.is_array(), "{} is {}: a list is needed", what, brief(lines));
  std::vector<DataFile> files;
  for (const Json& line : lines) {
    DataFile& file = files.emplace_back();
    std::string_view rest = line.is_string() ? line.get_ref<const std::string&>() : std::string_view();
    const bool read = take_number(rest, file.crc32, 16) && take_number(rest, file.bytes, 10) && file.bytes >= 0;
    TRIAD_CHECK(read, "{}[{}] is {}: a string of checksum, bytes and name is needed", what, files.size() - 1,
                brief(line));
    file.name = rest;
  }
  return files;
}

std::string changed_files(const std::vector<DataFile>& before, const std::vector<DataFile>& now) {
  if (before.size() != now.size()) {
    size_t same = 0;
    while (same < std::min(before.size(), now.size()) && before[same].same_content(now[same])) ++same;
    const bool more = now.size() > same;
    return fmt::format("{}, now {}; the first that {} is {}", counted(static_cast<int64_t>(before.size()), "file"),
                       now.size(), more ? "is new there" : "is gone",
                       shortened(more ? now[same].name : before[same].name));
  }
  constexpr int64_t kNamed = 3;
  int64_t changed = 0;
  std::string text;
  for (size_t i = 0; i < before.size(); ++i) {
    if (before[i].same_content(now[i]) || ++changed > kNamed) continue;
    text +=
        fmt::format("{}{} ({}), now {}{}", text.empty() ? "" : "; ", shortened(before[i].name), size_text(before[i]),
                    now[i].name == before[i].name ? "" : shortened(now[i].name) + ": ", size_text(now[i]));
  }
  if (changed > kNamed) text += fmt::format("; and {} more", changed - kNamed);
  return text;
}

void check_no_overlap(const std::vector<DataFile>& train, const std::vector<DataFile>& val) {
  std::map<std::pair<int64_t, uint32_t>, const DataFile*> trained;
  for (const DataFile& file : train) trained.emplace(std::pair(file.bytes, file.crc32), &file);
  for (const DataFile& file : val)
    if (const auto found = trained.find({file.bytes, file.crc32}); found != trained.end())
      fail("{}, to evaluate on, holds the same {} bytes as {}, to train on: training and validation may not overlap",
           file.name, file.bytes, found->second->name);
}

}  // namespace triad
