// Fuzzes reading tensors from several files (io/weight_index.h): an index, and headers for the two files that it may
// name, each with 16 data bytes.
#include "io/weight_index.h"

#include <cstring>
#include <set>

#include "tests/fuzz/contract.h"

namespace triad::fuzz {

namespace {

std::string file_of(std::string_view header) {
  const uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(header).append(16, '\1');
}

}  // namespace

void read_weight_index(std::string_view bytes) {
  const std::vector<std::string_view> parts = sections(bytes, 3);
  const std::string path = scratch_file("moments.safetensors.index.json", parts[0]), folder = scratch_folder();
  for (int64_t i = 0; i < 2; ++i)
    scratch_file(part_file_name("moments", i, 2), file_of(parts[static_cast<size_t>(i) + 1]));
  expect(tensors_path(folder, "moments") == path, "{}: the index is not found", folder);
  const std::optional<WeightIndex> index = read_or_refuse(folder, [&] { return WeightIndex(path); });
  if (!index) return;
  const auto map = read_weight_map(path);
  expect(index->count() == map.size() && !map.empty(), "{}: {} tensors, the index names {}", path, index->count(),
         map.size());
  int64_t total = 0;
  std::set<std::string> seen;
  index->for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
    expect(seen.insert(entry.name).second, "{}: tensor {} twice", path, entry.name);
    expect(map.contains(entry.name) && file.path() == folder + "/" + map.at(entry.name), "{}: tensor {} is in {}", path,
           entry.name, file.path());
    expect(index->find(entry.name) == &entry && &index->file_of(entry.name) == &file, "{}: find({}) is another tensor",
           path, entry.name);
    total += entry.bytes();
    accepts(folder, [&] { file.read(entry); });
  });
  expect(seen.size() == map.size() && total == index->bytes(), "{}: {} of {} tensors, {} bytes", path, seen.size(),
         map.size(), total);
}

}  // namespace triad::fuzz
