// io/weight_index and io/tensor_reader: tensors in one file or in several, and parallel partial reads.
#include "io/tensor_reader.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "engine/check.h"
#include "io/crc32.h"
#include "io/weight_index.h"
#include "tests/support/huggingface_folder.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using triad::test::check_error;
using triad::test::FolderTensor;
using triad::test::HuggingFaceFolder;
using triad::test::read_text;
using triad::test::TemporaryFolder;
using triad::test::write_text;
namespace fs = std::filesystem;

namespace {

// n values that every float dtype in a file can hold.
std::vector<float> values_of(int64_t n, int64_t seed) {
  std::vector<float> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) values[static_cast<size_t>(i)] = static_cast<float>((i * 37 + seed * 11) % 251 - 125);
  return values;
}

// A folder with the f32 tensors a [5,7] and b [300] in the first file and c [64] in the second.
struct Split {
  TemporaryFolder folder;
  std::vector<float> a = values_of(35, 1), b = values_of(300, 2), c = values_of(64, 3);
  std::string first = folder.file("model-00001-of-00002.safetensors"),
              second = folder.file("model-00002-of-00002.safetensors"),
              index = folder.file("model.safetensors.index.json");

  Split() { write({{"a", first_name()}, {"b", first_name()}, {"c", second_name()}}); }
  static std::string first_name() { return part_file_name(kWeightsStem, 0, 2); }
  static std::string second_name() { return part_file_name(kWeightsStem, 1, 2); }
  void write(const std::map<std::string, std::string>& map) {
    write_safetensors(
        first, std::vector<HostTensor>{{{"a", DType::f32, {5, 7}}, a.data()}, {{"b", DType::f32, {300}}, b.data()}});
    write_safetensors(second, std::vector<HostTensor>{{{"c", DType::f32, {64}}, c.data()}});
    write_text(index, weight_map_json(map, 399 * 4));
  }
};

// Reads ranges into a vector for each, and requires that each element comes once.
std::vector<std::vector<float>> read_all(std::span<const TensorRange> ranges, const ReadOptions& o,
                                         std::vector<PartialSum>* sums = nullptr) {
  std::vector<std::vector<float>> out;
  std::vector<std::vector<int>> times;
  for (const TensorRange& range : ranges) {
    out.emplace_back(static_cast<size_t>(range.end - range.begin));
    times.emplace_back(out.back().size(), 0);
  }
  const std::vector<PartialSum> found = read_ranges(
      ranges,
      [&](size_t range, int64_t first, std::span<const float> values) {
        CHECK(static_cast<int64_t>(values.size()) <= o.piece_elements);
        for (size_t i = 0; i < values.size(); ++i) {
          const auto at = static_cast<size_t>(first - ranges[range].begin) + i;
          out.at(range).at(at) = values[i];
          ++times.at(range).at(at);
        }
      },
      o);
  if (sums != nullptr) *sums = found;
  for (const std::vector<int>& each : times) CHECK(std::count(each.begin(), each.end(), 1) == std::ssize(each));
  return out;
}

void flip(const std::string& path, int64_t at) {
  std::string bytes = read_text(path);
  bytes.at(static_cast<size_t>(at)) ^= 4;
  write_text(path, bytes);
}

}  // namespace

TEST_CASE("io: an index opens by its folder and by its path, and a whole file goes before it", "[io]") {
  const Split split;
  for (const std::string& path : {split.folder.path(), split.index}) {
    const WeightIndex index(path);
    CHECK(index.path() == split.index);
    CHECK(index.count() == 3);
    CHECK(index.bytes() == 399 * 4);
    CHECK(index.files().size() == 2);
    CHECK(index.file_of("b").path() == split.first);
    CHECK(index.file_of("c").path() == split.second);
    CHECK(index.at("a").str() == "F32[5,7]");
    CHECK(index.find("d") == nullptr);
    check_error([&] { index.at("d"); }, {split.index, "tensor d"});
  }
  CHECK(tensors_path(split.folder.path()) == split.index);
  CHECK(tensors_path(split.folder.path(), kMomentsStem) == split.folder.file("optimizer.safetensors"));
  CHECK_FALSE(has_tensors(split.folder.path(), kMomentsStem));
  CHECK(WeightIndex(split.second).count() == 1);
  fs::copy(split.second, split.folder.file("model.safetensors"));
  CHECK(WeightIndex(split.folder.path()).path() == split.folder.file("model.safetensors"));

  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
                           "model-123456-of-123456.safetensors"})
    CHECK(is_tensor_file_name(name, kWeightsStem));
  for (const char* name :
       {"model-1-of-2.safetensors", "model-00001-of-.safetensors", "model-0000x-of-00002.safetensors",
        "model-.safetensors", "model-00001-of-00002.safetensors.tmp", "optimizer.safetensors", "my_model.safetensors",
        "model-safetensors"})
    CHECK_FALSE(is_tensor_file_name(name, kWeightsStem));
}

TEST_CASE("io: an index and files that disagree are refused before anything is read", "[io]") {
  Split split;
  const auto refused = [&](const std::vector<std::string>& words) {
    check_error([&] { WeightIndex(split.folder.path()); }, words);
  };
  const std::string one = Split::first_name(), two = Split::second_name();
  fs::remove(split.second);
  refused({split.folder.path(), two, "missing", "for 1 tensor"});
  split.write({{"a", one}, {"b", one}, {"c", two}});
  fs::resize_file(split.second, fs::file_size(split.second) - 1);
  refused({split.second, "truncated", "tensor c"});
  split.write({{"a", one}, {"b", one}, {"c", one}});
  refused({split.first, "no tensor c"});
  split.write({{"a", one}, {"c", two}});
  refused({split.first, "tensor b is not in model.safetensors.index.json"});
  for (const char* file : {"../model-00001-of-00002.safetensors", "/etc/passwd", "..", "", "sub/file"}) {
    split.write({{"a", one}, {"b", file}, {"c", two}});
    refused({split.index, "tensor b", "a name without a path"});
  }
  write_text(split.index, R"({"weight_map": {}})");
  refused({split.index, "names no tensor"});
  write_text(split.index, R"({"weight_map": {"a": 3}})");
  refused({split.index, "tensor a", "a string is needed"});
  fs::remove(split.index);
  refused({split.folder.path(), "neither model.safetensors nor model.safetensors.index.json"});
}

TEST_CASE("io: parts of tensors are read by any number of threads, in pieces of any size", "[io]") {
  const Split split;
  const WeightIndex index(split.folder.path());
  const auto range = [&](const char* name, int64_t begin, int64_t end) {
    return TensorRange{&index.file_of(name), &index.at(name), begin, end};
  };
  const std::vector<TensorRange> ranges = {range("c", 0, 64),    range("a", 3, 20), range("b", 0, 300),
                                           range("b", 299, 300), range("a", 0, 0),  range("b", 10, 290)};
  const auto part = [](const std::vector<float>& of, int64_t begin, int64_t end) {
    return std::vector<float>(of.begin() + begin, of.begin() + end);
  };
  for (const int threads : {0, 1, 2, 7})
    for (const int64_t piece : {1, 13, 64, 1 << 20}) {
      INFO(threads << " threads, pieces of " << piece);
      const auto read = read_all(ranges, {.threads = threads, .piece_elements = piece});
      CHECK(read[0] == split.c);
      CHECK(read[1] == part(split.a, 3, 20));
      CHECK(read[2] == split.b);
      CHECK(read[3] == part(split.b, 299, 300));
      CHECK(read[4].empty());
      CHECK(read[5] == part(split.b, 10, 290));
    }
  CHECK(read_all({}, {}).empty());
  check_error([&] { read_all(std::vector{range("a", 3, 36)}, {}); },
              {split.first, "tensor a", "35 elements", "[3, 36)"});
  check_error([&] { read_all(std::vector{range("a", -1, 3)}, {}); }, {split.first, "tensor a"});
  // A sink error ends the read; the threads do not wait for buffers forever.
  check_error(
      [&] {
        read_ranges(ranges, [](size_t, int64_t, std::span<const float>) { fail("sink"); },
                    {.threads = 3, .piece_elements = 1});
      },
      {"sink"});
  // The file shrinks after it was opened.
  fs::resize_file(split.second, fs::file_size(split.second) - 40);
  check_error([&] { read_all(ranges, {.threads = 3, .piece_elements = 5}); }, {split.second, "the file ends before"});
}

TEST_CASE("io: CRC-32 is zlib's, for every length and alignment, and parts combine", "[io]") {
  std::vector<std::byte> bytes(1000);
  uint32_t state = 1;
  for (std::byte& each : bytes) each = static_cast<std::byte>((state = state * 1664525 + 1013904223) >> 24);
  const auto expected = [](std::span<const std::byte> part, uint32_t crc) {
    return static_cast<uint32_t>(crc32_z(crc, reinterpret_cast<const Bytef*>(part.data()), part.size()));
  };
  bool same = true, combine = true;
  for (size_t begin = 0; begin < 20; ++begin)
    for (size_t n = 1; n + begin <= bytes.size(); ++n) {
      const auto part = std::span(bytes).subspan(begin, n);
      same = same && crc32_of(part) == expected(part, 0) && crc32_of(part, 0xdeadbeef) == expected(part, 0xdeadbeef);
      const size_t cut = n * 7 % (n + 1);
      combine = combine && crc32_of(part) == (crc32_shifted(crc32_of(part.first(cut)), static_cast<int64_t>(n - cut)) ^
                                              crc32_of(part.subspan(cut)));
    }
  CHECK(same);
  CHECK(combine);
  CHECK(crc32_of({}) == 0);
  CHECK(crc32_of({}, 7) == 7);
}

TEST_CASE("io: float tensors of each dtype are read as f32, others are refused", "[io]") {
  const TemporaryFolder folder;
  const std::vector<float> values = values_of(50, 4);
  const std::vector<double> wide(values.begin(), values.end());
  write_safetensors(folder.file("wide.safetensors"), std::vector<HostTensor>{{{"x", DType::f64, {50}}, wide.data()}});
  const std::vector<int32_t> whole(50);
  write_safetensors(folder.file("ints.safetensors"), std::vector<HostTensor>{{{"x", DType::i32, {50}}, whole.data()}});
  const auto read = [&](const std::string& path, const std::string& name) {
    const WeightIndex index(path);
    const TensorRange range{&index.file_of(name), &index.at(name), 7, 49};
    return read_all({&range, 1}, {.threads = 2, .piece_elements = 9}).front();
  };
  const std::vector<float> part(values.begin() + 7, values.begin() + 49);
  CHECK(read(folder.file("wide.safetensors"), "x") == part);
  check_error([&] { read(folder.file("ints.safetensors"), "x"); }, {"ints.safetensors", "tensor x", "I32[50]"});
  HuggingFaceFolder model;
  for (const char* dtype : {"F32", "BF16", "F16"})
    model.tensors[dtype] = {.dtype = dtype, .shape = {50}, .values = values};
  model.write(folder.file("hf"), 2);
  for (const char* dtype : {"F32", "BF16", "F16"}) CHECK(read(folder.file("hf"), dtype) == part);
}

TEST_CASE("io: a damaged tensor is found by its pieces, or by the sum of what several readers have read", "[io]") {
  const Split split;
  const int64_t at = WeightIndex(split.folder.path()).at("b").begin + 4 * 200;
  flip(split.first, at);
  const WeightIndex index(split.folder.path());
  const SafetensorsFile& file = index.file_of("b");
  const TensorEntry& entry = index.at("b");
  const std::vector<TensorRange> all = {{&file, &entry, 0, 300}},
                                 parts = {{&file, &entry, 150, 300}, {&file, &entry, 0, 150}};
  for (const int64_t piece : {1, 7, 300})
    check_error([&] { read_all(all, {.threads = 3, .piece_elements = piece}); }, {split.first, "tensor b", "CRC-32"});
  std::vector<PartialSum> sums;
  read_all(parts, {.threads = 2, .piece_elements = 7}, &sums);
  CHECK_NOTHROW(check_sum(file, entry, sums[0]));  // half a tensor has no checksum
  PartialSum sum = sums[0];
  sum += sums[1];
  check_error([&] { check_sum(file, entry, sum); }, {split.first, "tensor b", "CRC-32"});
  flip(split.first, at);
  read_all(parts, {.threads = 2, .piece_elements = 7}, &sums);
  sum = sums[1];
  sum += sums[0];
  CHECK(sum.bytes == 1200);
  CHECK_NOTHROW(check_sum(file, entry, sum));
}
