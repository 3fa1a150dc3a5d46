#include "io/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <limits>
#include <optional>
#include <system_error>

#include "engine/process/parse.h"

namespace triad {

namespace {

// ---- encoding as protocol buffers: a field is a key (field number and wire type), then the value ----

enum Wire { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

template <class T>
void put_fixed(std::string& out, T value) {  // little-endian
  for (size_t i = 0; i < sizeof value; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
}
void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7f) | 0x80);
  out += static_cast<char>(value);
}
void put_key(std::string& out, int field, Wire wire) {
  put_varint(out, static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire));
}
void put_int(std::string& out, int field, int64_t value) {
  put_key(out, field, kVarint);
  put_varint(out, static_cast<uint64_t>(value));
}
void put_double(std::string& out, int field, double value) {
  put_key(out, field, kFixed64);
  put_fixed(out, std::bit_cast<uint64_t>(value));
}
void put_float(std::string& out, int field, float value) {
  put_key(out, field, kFixed32);
  put_fixed(out, std::bit_cast<uint32_t>(value));
}
void put_bytes(std::string& out, int field, std::string_view value) {
  put_key(out, field, kBytes);
  put_varint(out, value.size());
  out += value;
}
void put_doubles(std::string& out, int field, std::span<const double> values) {
  std::string packed;
  for (const double v : values) put_fixed(packed, std::bit_cast<uint64_t>(v));
  put_bytes(out, field, packed);
}

// Field numbers in the messages Event, Summary, Summary.Value, HistogramProto and SessionLog.
enum EventField { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7, kSourceMetadata = 10 };
constexpr int kWriter = 1;
constexpr int kSummaryValue = 1;
enum ValueField { kTag = 1, kSimpleValue = 2, kHistogram = 5, kTensor = 8, kMetadata = 9 };
enum HistogramField { kMin = 1, kMax, kNum, kSum, kSumSquares, kBucketLimit, kBucket };
constexpr int kSessionStatus = 1, kSessionStart = 1;

// Field numbers in SummaryMetadata, its PluginData, TensorProto and TensorShapeProto.
enum MetadataField { kPluginData = 1, kDataClass = 4 };
enum PluginField { kPluginName = 1, kPluginContent = 2 };
enum TensorField { kType = 1, kShape = 2, kStrings = 8 };
constexpr int kDim = 2, kDimSize = 1;
constexpr int64_t kTypeFloat = 1, kTypeString = 7, kClassTensor = 2;
// Field numbers in HParamsPluginData, SessionStartInfo, SessionEndInfo, a map's entry, and google.protobuf.Value.
enum HParamsField { kStartInfo = 3, kEndInfo = 4 };
enum StartField { kHParams = 1, kStartTime = 5 };
enum EndField { kStatus = 1, kEndTime = 2 };
enum MapField { kKey = 1, kMapValue = 2 };
enum AnyField { kNumber = 2, kString = 3, kBool = 4 };
constexpr int64_t kSuccess = 1;

// Clamps a finite value to float's range, so that a loss of 1e300 is drawn at the top instead of dropped as infinite.
float nearest_float(double v) {
  constexpr double kMost = std::numeric_limits<float>::max();
  return static_cast<float>(std::isfinite(v) ? std::clamp(v, -kMost, kMost) : v);
}

std::string event(double wall_time, int64_t step) {
  std::string out;
  put_double(out, kWallTime, wall_time);
  if (step != 0) put_int(out, kStep, step);
  return out;
}

// An Event message with one tensor value, which the named TensorBoard plugin reads.
std::string plugin_event(double wall_time, int64_t step, std::string_view tag, std::string_view plugin,
                         std::string_view content, std::string_view tensor) {
  std::string data, metadata, value, summary, out = event(wall_time, step);
  put_bytes(data, kPluginName, plugin);
  if (!content.empty()) put_bytes(data, kPluginContent, content);
  put_bytes(metadata, kPluginData, data);
  put_int(metadata, kDataClass, kClassTensor);
  put_bytes(value, kTag, tag);
  put_bytes(value, kTensor, tensor);
  put_bytes(value, kMetadata, metadata);
  put_bytes(summary, kSummaryValue, value);
  put_bytes(out, kSummary, summary);
  return out;
}

// An Event message for the plugin "hparams", which reads only the metadata; the tensor is empty.
std::string hparams_event(double wall_time, std::string_view tag, std::string_view content) {
  std::string no_elements, dim, tensor;
  put_int(dim, kDimSize, 0);
  put_bytes(no_elements, kDim, dim);
  put_int(tensor, kType, kTypeFloat);
  put_bytes(tensor, kShape, no_elements);
  return plugin_event(wall_time, 0, tag, "hparams", content, tensor);
}

// ---- histograms ----

// TensorFlow's own histogram bucket limits: ratio 1.1, symmetric around zero.
const std::vector<double>& bucket_limits() {
  static const std::vector<double> limits = [] {
    constexpr double kFirst = 1e-12, kLast = 1e20, kRatio = 1.1;
    std::vector<double> positive;
    for (double v = kFirst; v < kLast; v *= kRatio) positive.push_back(v);
    positive.push_back(std::numeric_limits<double>::max());
    std::vector<double> all;
    for (auto v = positive.rbegin(); v != positive.rend(); ++v) all.push_back(-*v);
    all.push_back(0);
    all.insert(all.end(), positive.begin(), positive.end());
    return all;
  }();
  return limits;
}

std::string histogram_message(std::span<const double> all) {
  std::vector<double> values;
  std::copy_if(all.begin(), all.end(), std::back_inserter(values), [](double v) { return std::isfinite(v); });
  double lowest = 0, highest = 0, sum = 0, squares = 0;
  const std::vector<double>& limits = bucket_limits();
  std::vector<double> counts(limits.size(), 0.0);
  for (const double v : values) {
    sum += v, squares += v * v;
    ++counts[static_cast<size_t>(std::upper_bound(limits.begin(), limits.end() - 1, v) - limits.begin())];
  }
  if (!values.empty()) {
    lowest = *std::min_element(values.begin(), values.end());
    highest = *std::max_element(values.begin(), values.end());
  }
  // Neighbouring empty buckets are joined into one. The bucket before a full one stays, because its limit is the full
  // one's lower limit.
  std::vector<double> kept_limits, kept_counts;
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] == 0 && i + 1 < counts.size() && counts[i + 1] == 0) continue;
    kept_limits.push_back(limits[i]);
    kept_counts.push_back(counts[i]);
  }
  std::string out;
  put_double(out, kMin, lowest);
  put_double(out, kMax, highest);
  put_double(out, kNum, static_cast<double>(values.size()));
  put_double(out, kSum, sum);
  put_double(out, kSumSquares, squares);
  put_doubles(out, kBucketLimit, kept_limits);
  put_doubles(out, kBucket, kept_counts);
  return out;
}

// ---- the frame ----

constexpr std::array<uint32_t, 256> crc_table() {
  constexpr uint32_t kReflected = 0x82F63B78;
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c & 1) != 0 ? c >> 1 ^ kReflected : c >> 1;
    table[i] = c;
  }
  return table;
}

// TFRecord's masked form of a CRC, because the CRC of data that contains its own CRC is weak.
uint32_t masked_crc(std::string_view bytes) {
  constexpr uint32_t kMask = 0xA282EAD8;
  return std::rotr(crc32c(bytes), 15) + kMask;
}

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

// A new event file's path; readers look for "tfevents" in the name, and read a folder's files in name order. So this
// one sorts after earlier runs', even if the clock was put back or another host's is ahead.
std::string new_file(const std::string& folder) {
  constexpr std::string_view kPrefix = "events.out.tfevents.";
  constexpr int64_t kLargest = 9'999'999'999;  // the largest ten-digit time
  make_folders(folder);
  std::string last;
  std::error_code unreadable;
  for (const std::filesystem::directory_entry& entry : std::filesystem::directory_iterator(folder, unreadable))
    if (const std::string name = entry.path().filename().string(); name.starts_with(kPrefix))
      last = std::max(last, name);
  char host[256] = "host";
  gethostname(host, sizeof host - 1);
  auto seconds = static_cast<int64_t>(now());
  std::string name;
  const auto make = [&] { name = fmt::format("{}{:010d}.{}.{}.0", kPrefix, seconds, host, getpid()); };
  make();
  if (name <= last) {
    const std::string rest = last.substr(kPrefix.size());
    const std::optional<int64_t> newest = parse_number<int64_t>(std::string_view(rest).substr(0, rest.find('.')));
    if (newest) seconds = *newest + 1;
    make();
    if (!newest || seconds > kLargest || name <= last) name = last + ".0";
  }
  return folder + "/" + name;
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = crc_table();
  uint32_t c = ~uint32_t{0};
  for (const char b : bytes) c = c >> 8 ^ kTable[(c ^ static_cast<uint8_t>(b)) & 0xff];
  return ~c;
}

namespace tensorboard {

std::string file_version(double wall_time) {
  std::string out = event(wall_time, 0);
  put_bytes(out, kFileVersion, "brain.Event:2");
  return out;
}

std::string scalars(double wall_time, int64_t step, std::span<const Scalar> all) {
  std::string summary;
  for (const Scalar& s : all) {
    std::string value;
    put_bytes(value, kTag, s.tag);
    put_float(value, kSimpleValue, nearest_float(s.value));
    put_bytes(summary, kSummaryValue, value);
  }
  std::string out = event(wall_time, step);
  put_bytes(out, kSummary, summary);
  return out;
}

std::string histogram(double wall_time, int64_t step, std::string_view tag, std::span<const double> values) {
  std::string value, summary, out = event(wall_time, step);
  put_bytes(value, kTag, tag);
  put_bytes(value, kHistogram, histogram_message(values));
  put_bytes(summary, kSummaryValue, value);
  put_bytes(out, kSummary, summary);
  return out;
}

std::string text(double wall_time, int64_t step, std::string_view tag, std::string_view markdown) {
  std::string dim, shape, tensor;
  put_int(dim, kDimSize, 1);
  put_bytes(shape, kDim, dim);
  put_int(tensor, kType, kTypeString);
  put_bytes(tensor, kShape, shape);
  put_bytes(tensor, kStrings, markdown);
  return plugin_event(wall_time, step, tag, "text", "", tensor);
}

std::string session_start(double wall_time, std::span<const HParam> all) {
  std::string start, content;
  for (const auto& [name, any] : all) {
    std::string value, entry;
    if (const bool* flag = std::get_if<bool>(&any)) put_int(value, kBool, *flag);
    if (const double* number = std::get_if<double>(&any)) put_double(value, kNumber, *number);
    if (const std::string* text = std::get_if<std::string>(&any)) put_bytes(value, kString, *text);
    put_bytes(entry, kKey, name);
    put_bytes(entry, kMapValue, value);
    put_bytes(start, kHParams, entry);
  }
  put_double(start, kStartTime, wall_time);
  put_bytes(content, kStartInfo, start);
  return hparams_event(wall_time, "_hparams_/session_start_info", content);
}

std::string session_end(double wall_time) {
  std::string end, content;
  put_int(end, kStatus, kSuccess);
  put_double(end, kEndTime, wall_time);
  put_bytes(content, kEndInfo, end);
  return hparams_event(wall_time, "_hparams_/session_end_info", content);
}

std::string restart(double wall_time, int64_t step) {
  std::string session, out = event(wall_time, step);
  put_int(session, kSessionStatus, kSessionStart);
  put_bytes(out, kSessionLog, session);
  return out;
}

std::string written_by(double wall_time, std::string_view writer) {
  std::string source, out = event(wall_time, 0);
  put_bytes(source, kWriter, writer);
  put_bytes(out, kSourceMetadata, source);
  return out;
}

std::string record(std::string_view message) {
  std::string length, out;
  put_fixed(length, static_cast<uint64_t>(message.size()));
  out = length;
  put_fixed(out, masked_crc(length));
  out += message;
  put_fixed(out, masked_crc(message));
  return out;
}

}  // namespace tensorboard

EventFile::EventFile(const std::string& folder, int64_t resume_step) : file_(new_file(folder)) {
  std::string begin = tensorboard::record(tensorboard::file_version(now())) +
                      tensorboard::record(tensorboard::written_by(now(), kEventWriter));
  if (resume_step >= 0) begin += tensorboard::record(tensorboard::restart(now(), resume_step + 1));
  file_.append(begin);
}

void EventFile::add(int64_t step, std::span<const Scalar> all) {
  file_.append(tensorboard::record(tensorboard::scalars(now(), step, all)));
}
void EventFile::add(int64_t step, std::string_view tag, std::span<const double> values) {
  file_.append(tensorboard::record(tensorboard::histogram(now(), step, tag, values)));
}

void EventFile::add_text(int64_t step, std::string_view tag, std::string_view markdown) {
  file_.append(tensorboard::record(tensorboard::text(now(), step, tag, markdown)));
}
void EventFile::add_session_start(std::span<const tensorboard::HParam> all) {
  file_.append(tensorboard::record(tensorboard::session_start(now(), all)));
}
void EventFile::add_session_end() { file_.append(tensorboard::record(tensorboard::session_end(now()))); }

}  // namespace triad
