// Fuzzes reading safetensors files (io/safetensors.h). A safetensors file begins with its header's length, which random
// changes to the header rarely match. An input may therefore have two sections, header and data, from which the file is
// built with the right length.
#include <algorithm>
#include <cstring>

#include "io/safetensors.h"
#include "tests/fuzz/contract.h"

namespace triad::fuzz {

namespace {

std::string whole_file(std::string_view input) {
  if (input.find(kCut) == std::string_view::npos) return std::string(input);
  const std::vector<std::string_view> parts = sections(input, 2);
  const uint64_t length = parts[0].size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(parts[0]).append(parts[1]);
}

bool is_checksum(const std::string& key) { return key.starts_with("crc32/"); }

// Checks that writing the file's tensors and reading them again gives the same tensors and metadata.
void check_copy(const SafetensorsFile& file) {
  std::vector<HostTensor> tensors;
  std::vector<std::vector<std::byte>> data;  // owns the tensors' bytes
  for (const TensorEntry& entry : file.entries()) {
    const std::optional<DType> dtype = entry.engine_dtype();
    if (!dtype || entry.shape.size() > kMaxRank) return;
    HostTensor& tensor = tensors.emplace_back();
    tensor.spec = {.name = entry.name, .dtype = *dtype, .shape = {}};
    std::copy(entry.shape.begin(), entry.shape.end(), tensor.spec.shape.dim.begin());
    tensor.spec.shape.rank = static_cast<int8_t>(entry.shape.size());
    tensor.data = data.emplace_back(file.read(entry)).data();
  }
  std::map<std::string, std::string> metadata;
  for (const auto& [key, value] : file.metadata())
    if (!is_checksum(key)) metadata[key] = value;
  const std::string path = scratch_folder() + "/copy.safetensors";
  write_safetensors(path, tensors, metadata);

  const SafetensorsFile copy(path);
  expect(copy.entries().size() == file.entries().size(), "{} tensors became {}", file.entries().size(),
         copy.entries().size());
  for (const TensorEntry& entry : file.entries()) {
    const TensorEntry* same = copy.find(entry.name);
    expect(same != nullptr && same->str() == entry.str(), "{} {} is not in the copy", entry.name, entry.str());
    expect(file.read(entry) == copy.read(*same), "{} has other bytes in the copy", entry.name);
  }
  for (const auto& [key, value] : metadata)
    expect(copy.metadata().contains(key) && copy.metadata().at(key) == value, "metadata {} is not in the copy", key);
}

}  // namespace

void read_safetensors(std::string_view input) {
  const std::string bytes = whole_file(input), path = scratch_file("model.safetensors", bytes);
  const bool looks_like = is_safetensors(path);
  const std::optional<SafetensorsFile> file = read_or_refuse(path, [&] { return SafetensorsFile(path); });
  if (!file) return;
  expect(looks_like, "{}: read, but is_safetensors() is false", path);
  const auto size = static_cast<int64_t>(bytes.size());
  int64_t end = file->entries().empty() ? size : file->entries().front().begin;
  bool sound = true;  // whether all checksums match
  for (const TensorEntry& entry : file->entries()) {
    expect(entry.begin == end && entry.end >= entry.begin && entry.end <= size, "{}: {} lies at [{}, {}) of {}", path,
           entry.name, entry.begin, entry.end, size);
    end = entry.end;
    expect(file->find(entry.name) == &entry, "{}: find({}) is another tensor", path, entry.name);
    for (const int64_t axis : entry.shape) expect(axis >= 0, "{}: {} is {}", path, entry.name, entry.str());
    if (const std::optional<DType> dtype = entry.engine_dtype())
      expect(entry.numel() * size_of(*dtype) == entry.bytes(), "{}: {} is {} in {} bytes", path, entry.name,
             entry.str(), entry.bytes());
    sound &= accepts(path, [&] {
      const std::vector<std::byte> found = file->read(entry);
      expect(
          std::ranges::equal(found, std::as_bytes(std::span(bytes))
                                        .subspan(static_cast<size_t>(entry.begin), static_cast<size_t>(entry.bytes()))),
          "{}: {} has other bytes than the file", path, entry.name);
    });
  }
  expect(end == size, "{}: the last tensor ends at {} of {}", path, end, size);
  expect(!accepts(path, [&] { file->at("no such tensor, whatever the file holds"); }), "{}: at() finds what is not",
         path);
  if (sound) check_copy(*file);
}

}  // namespace triad::fuzz
