#include "io/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <tuple>

#include "engine/check.h"
#include "io/crc32.h"
#include "io/direct_writer.h"
#include "io/foreign_format.h"
#include "io/json_config.h"

namespace triad {

namespace {

static_assert(std::endian::native == std::endian::little, "tensors are written and read in place");

constexpr int64_t kLengthBytes = 8, kMaxHeaderBytes = 100'000'000;  // the limit on the header is the format's own
constexpr std::string_view kChecksumPrefix = "crc32/";
constexpr const char* kMetadataKey = "__metadata__";

struct FileType {
  const char* word;
  int64_t bits;  // bits per element
  std::optional<DType> engine;
};
const std::array<FileType, 22> kTypes = {
    {{"F64", 64, DType::f64}, {"F32", 32, DType::f32}, {"BF16", 16, DType::bf16}, {"I64", 64, DType::i64},
     {"I32", 32, DType::i32}, {"U8", 8, DType::u8},    {"BOOL", 8, {}},           {"I8", 8, {}},
     {"F8_E4M3", 8, {}},      {"F8_E5M2", 8, {}},      {"F8_E8M0", 8, {}},        {"F8_E4M3FNUZ", 8, {}},
     {"F8_E5M2FNUZ", 8, {}},  {"F6_E2M3", 6, {}},      {"F6_E3M2", 6, {}},        {"F4", 4, {}},
     {"I16", 16, {}},         {"U16", 16, {}},         {"F16", 16, {}},           {"U32", 32, {}},
     {"U64", 64, {}},         {"C64", 64, {}}}};

const FileType* find_type(std::string_view word) {
  const auto it = std::find_if(kTypes.begin(), kTypes.end(), [&](const FileType& t) { return word == t.word; });
  return it == kTypes.end() ? nullptr : &*it;
}

const char* word_of_dtype(DType dtype) {
  return std::find_if(kTypes.begin(), kTypes.end(), [&](const FileType& t) { return t.engine == dtype; })->word;
}

// The header's length in bytes, which the file's first 8 bytes hold. The file must have 8 bytes.
uint64_t header_length(const InputFile& file) {
  uint64_t bytes = 0;
  file.read(0, std::as_writable_bytes(std::span(&bytes, 1)));
  return bytes;
}

// Reads a JSON integer in [0, 2^62].
int64_t size_value(const std::string& path, const std::string& name, const char* what, const nlohmann::json& value) {
  constexpr uint64_t kLargest = uint64_t{1} << 62;
  TRIAD_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= kLargest,
              "{}: tensor {}: {} holds {}: a size is needed", path, shortened(name), what, brief(value));
  return static_cast<int64_t>(value.get<uint64_t>());
}

// Parses one header entry and checks it without regard to the others. Its offsets are relative to the start of the
// data.
TensorEntry parse_entry(const std::string& path, const std::string& name, const nlohmann::json& value) {
  const std::string called = shortened(name);  // the tensor's name, shortened for messages
  TRIAD_CHECK(value.is_object(), "{}: tensor {}: an object is needed, found {}", path, called, brief(value));
  for (const char* key : {"dtype", "shape", "data_offsets"})
    TRIAD_CHECK(value.contains(key), "{}: tensor {} has no {}", path, called, key);
  const nlohmann::json &dtype = value["dtype"], &shape = value["shape"], &offsets = value["data_offsets"];
  const FileType* type = dtype.is_string() ? find_type(dtype.get<std::string>()) : nullptr;
  TRIAD_CHECK(type != nullptr, "{}: tensor {}: unknown dtype {}", path, called, brief(dtype));
  TRIAD_CHECK(shape.is_array(), "{}: tensor {}: the shape is {}, a list is needed", path, called, brief(shape));
  TRIAD_CHECK(offsets.is_array() && offsets.size() == 2, "{}: tensor {}: data_offsets is {}, [begin, end] is needed",
              path, called, brief(offsets));
  TensorEntry entry{.name = name, .dtype = type->word, .shape = {}};
  int64_t bits = type->bits;
  for (const nlohmann::json& axis : shape) {
    entry.shape.push_back(size_value(path, name, "the shape", axis));
    TRIAD_CHECK(!__builtin_mul_overflow(bits, entry.shape.back(), &bits), "{}: tensor {}: the shape {} is too large",
                path, called, brief(shape));
  }
  entry.begin = size_value(path, name, "data_offsets", offsets[0]);
  entry.end = size_value(path, name, "data_offsets", offsets[1]);
  TRIAD_CHECK(bits % 8 == 0, "{}: tensor {}: {} is {} bits, no whole number of bytes", path, called,
              shortened(entry.str()), bits);
  TRIAD_CHECK(entry.bytes() == bits / 8, "{}: tensor {}: data_offsets {} hold {} bytes, {} needs {}", path, called,
              brief(offsets), entry.bytes(), shortened(entry.str()), bits / 8);
  return entry;
}

}  // namespace

int64_t TensorEntry::numel() const {
  int64_t n = 1;
  for (const int64_t axis : shape) n *= axis;
  return n;
}

std::optional<DType> TensorEntry::engine_dtype() const { return find_type(dtype)->engine; }

std::string TensorEntry::str() const { return fmt::format("{}[{}]", dtype, fmt::join(shape, ",")); }

bool is_safetensors(const std::string& path) {
  const InputFile file(path);
  return file.size() >= kLengthBytes + 2 && header_length(file) <= kMaxHeaderBytes && file.text(kLengthBytes, 1) == "{";
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  TRIAD_CHECK(file_.size() >= kLengthBytes,
              "{}: no safetensors file: expected the header's length in 8 bytes at offset 0, "
              "the file ends at offset {}",
              path, file_.size());
  const uint64_t header_bytes = header_length(file_);
  if (header_bytes > kMaxHeaderBytes)
    if (const std::string text = file_.text(0, kFormatBytes); !foreign_format(text).empty())
      fail("{}: is {}, no safetensors file", path, foreign_format(text));
  TRIAD_CHECK(header_bytes <= kMaxHeaderBytes,
              "{}: no safetensors file: at offset 0 a header of {} bytes, at most {} are allowed", path, header_bytes,
              kMaxHeaderBytes);
  TRIAD_CHECK(static_cast<int64_t>(header_bytes) <= file_.size() - kLengthBytes,
              "{}: truncated: a header of {} bytes at offset {}, the file ends at offset {}", path, header_bytes,
              kLengthBytes, file_.size());
  parse_header(static_cast<int64_t>(header_bytes));
}

void SafetensorsFile::parse_header(int64_t header_bytes) {
  const std::string text = file_.text(kLengthBytes, header_bytes);
  TRIAD_CHECK(text.starts_with('{'), "{}: no safetensors file: expected byte 123 ('{{') at offset {}, found {}", path(),
              kLengthBytes, text.empty() ? "nothing" : std::to_string(static_cast<unsigned char>(text[0])));
  const auto header =
      parse_json<nlohmann::json>(text, fmt::format("{}: the header, at offset {}", path(), kLengthBytes));
  for (const auto& [name, value] : header.items()) {
    if (name != kMetadataKey) {
      entries_.push_back(parse_entry(path(), name, value));
      continue;
    }
    TRIAD_CHECK(value.is_object(), "{}: {} is {}, an object is needed", path(), name, brief(value));
    for (const auto& [key, word] : value.items()) {
      TRIAD_CHECK(word.is_string(), "{}: {}: {} is {}, a string is needed", path(), name, shortened(key), brief(word));
      metadata_[key] = word.get<std::string>();
    }
  }
  std::sort(entries_.begin(), entries_.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  const int64_t data = kLengthBytes + header_bytes;
  int64_t expected = data;
  for (TensorEntry& entry : entries_) {
    entry.begin += data;
    entry.end += data;
    TRIAD_CHECK(entry.begin == expected, "{}: tensor {} begins at offset {}, {} the tensor before it, which ends at {}",
                path(), shortened(entry.name), entry.begin,
                entry.begin < expected ? "overlapping" : "leaving a hole behind", expected);
    expected = entry.end;
    TRIAD_CHECK(expected <= file_.size(), "{}: truncated: tensor {} ends at offset {}, the file at {}", path(),
                shortened(entry.name), expected, file_.size());
  }
  TRIAD_CHECK(expected == file_.size(), "{}: the last tensor ends at offset {}, the file at {}", path(), expected,
              file_.size());
  for (size_t i = 0; i < entries_.size(); ++i) index_.emplace(entries_[i].name, i);
}

const TensorEntry* SafetensorsFile::find(std::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &entries_[it->second];
}

const TensorEntry& SafetensorsFile::at(std::string_view name) const {
  const TensorEntry* entry = find(name);
  TRIAD_CHECK(entry != nullptr, "{}: there is no tensor {} among its {}", path(), shortened(name), entries_.size());
  return *entry;
}

void SafetensorsFile::read(const TensorEntry& entry, std::span<std::byte> out) const {
  TRIAD_CHECK(static_cast<int64_t>(out.size()) == entry.bytes(), "{}: tensor {} has {} bytes, room is for {}", path(),
              shortened(entry.name), entry.bytes(), out.size());
  file_.read(entry.begin, out);
  if (has_checksum(entry)) verify(entry, crc32_of(out));
}

bool SafetensorsFile::has_checksum(const TensorEntry& entry) const {
  return metadata_.contains(std::string(kChecksumPrefix) + entry.name);
}

void SafetensorsFile::read_bytes(const TensorEntry& entry, int64_t first, std::span<std::byte> out) const {
  const auto bytes = static_cast<int64_t>(out.size());
  TRIAD_CHECK(first >= 0 && bytes <= entry.bytes() - first, "{}: tensor {} has {} bytes, {} from byte {} on are wanted",
              path(), shortened(entry.name), entry.bytes(), bytes, first);
  file_.read(entry.begin + first, out);
}

void SafetensorsFile::verify(const TensorEntry& entry, uint32_t crc) const {
  const auto expected = metadata_.find(std::string(kChecksumPrefix) + entry.name);
  if (expected == metadata_.end()) return;
  const std::string found = fmt::format("{:08x}", crc);
  TRIAD_CHECK(found == expected->second, "{}: tensor {} at offset {} is damaged: its CRC-32 is {}, the header says {}",
              path(), shortened(entry.name), entry.begin, found, shortened(expected->second));
}

std::optional<uint32_t> SafetensorsFile::checksum() const {
  std::string text;
  for (const auto& [name, i] : index_) {
    const auto crc = metadata_.find(std::string(kChecksumPrefix) + name);
    if (crc == metadata_.end()) return std::nullopt;
    text += fmt::format("{}\n{}\n{}\n", name, entries_[i].str(), crc->second);
  }
  return crc32_of(std::as_bytes(std::span(text)));
}

std::vector<std::byte> SafetensorsFile::read(const TensorEntry& entry) const {
  std::vector<std::byte> bytes(static_cast<size_t>(entry.bytes()));
  read(entry, bytes);
  return bytes;
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<TensorSpec> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), metadata_(metadata), file_(path) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return size_of(a.dtype) != size_of(b.dtype) ? size_of(a.dtype) > size_of(b.dtype) : a.name < b.name;
  });
  for (TensorSpec& spec : tensors) {
    TRIAD_CHECK(spec.name != kMetadataKey && index_.emplace(spec.name, places_.size()).second,
                "{}: a tensor cannot be called {}, or not twice", path, spec.name);
    places_.push_back({.spec = std::move(spec)});
    places_.back().bytes = places_.back().spec.shape.numel() * size_of(places_.back().spec.dtype);
  }
  // Offsets are relative to the header's end, so the header's length does not depend on them.
  int64_t offset = 0;
  for (Place& place : places_) {
    place.begin = offset;
    offset += place.bytes;
  }
  const auto data = static_cast<int64_t>(header().size());
  for (Place& place : places_) place.begin += data;
}

std::string SafetensorsWriter::header() const {
  nlohmann::ordered_json metadata = nlohmann::ordered_json::object();
  metadata["format"] = "pt";
  for (const auto& [key, value] : metadata_) metadata[key] = value;
  nlohmann::ordered_json root = {{kMetadataKey, nlohmann::ordered_json::object()}};
  // Names are unique, and operator[] would compare each with all before it.
  const auto append = [](nlohmann::ordered_json& to, const std::string& key) -> nlohmann::ordered_json& {
    return to.get_ref<nlohmann::ordered_json::object_t&>().emplace_back(key, nullptr).second;
  };
  int64_t offset = 0;
  for (const Place& place : places_) {
    const TensorSpec& spec = place.spec;
    append(metadata, std::string(kChecksumPrefix) + spec.name) = fmt::format("{:08x}", place.crc);
    nlohmann::ordered_json& entry = append(root, spec.name);
    entry["dtype"] = word_of_dtype(spec.dtype);
    entry["shape"] = std::vector<int64_t>(spec.shape.dim.begin(), spec.shape.dim.begin() + spec.shape.rank);
    entry["data_offsets"] = {offset, offset + place.bytes};
    offset += place.bytes;
  }
  root[kMetadataKey] = std::move(metadata);
  std::string json = root.dump();
  json.resize((json.size() + 7) / 8 * 8, ' ');  // 8 bytes are the largest alignment that a tensor needs
  const uint64_t length = json.size();
  std::string out(kLengthBytes, '\0');
  std::memcpy(out.data(), &length, sizeof length);
  return out + json;
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> piece) {
  const auto it = index_.find(name);
  TRIAD_CHECK(it != index_.end(), "{}: tensor {} was not declared", path_, name);
  Place& place = places_[it->second];
  TRIAD_CHECK(place.written + static_cast<int64_t>(piece.size()) <= place.bytes, "{}: tensor {} has {} bytes, not {}",
              path_, name, place.bytes, place.written + static_cast<int64_t>(piece.size()));
  // In slices that stay in the cache between the checksum and the copy, and end with a file block.
  constexpr int64_t kSlice = int64_t{8} << 20;
  while (!piece.empty()) {
    const int64_t at = place.begin + place.written, end = (at + kSlice) / DirectWriter::kBlock * DirectWriter::kBlock;
    const auto slice = piece.first(std::min(piece.size(), static_cast<size_t>(end - at)));
    place.crc = crc32_of(slice, place.crc);
    file_.write_at(at, slice);
    place.written += static_cast<int64_t>(slice.size());
    piece = piece.subspan(slice.size());
  }
}

void SafetensorsWriter::finish() {
  for (const Place& place : places_)
    TRIAD_CHECK(place.written == place.bytes, "{}: tensor {} has {} bytes, only {} were written", path_,
                place.spec.name, place.bytes, place.written);
  const std::string bytes = header();
  file_.write_at(0, std::as_bytes(std::span(bytes)));
  file_.commit();
}

void write_safetensors(const std::string& path, std::span<const HostTensor> tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<TensorSpec> specs;
  for (const HostTensor& tensor : tensors) specs.push_back(tensor.spec);
  SafetensorsWriter writer(path, std::move(specs), metadata);
  for (const HostTensor& tensor : tensors) {
    const auto bytes = static_cast<size_t>(tensor.spec.shape.numel() * size_of(tensor.spec.dtype));
    writer.write(tensor.spec.name, {static_cast<const std::byte*>(tensor.data), bytes});
  }
  writer.finish();
}

}  // namespace triad
