#include "io/pickle.h"

#include <bit>
#include <limits>
#include <utility>

#include "engine/check.h"

namespace triad {

namespace {
constexpr char kProto = '\x80', kMark = '(', kStop = '.';
constexpr char kEmptyDict = '}', kSetItems = 'u', kEmptyList = ']', kAppends = 'e', kTuple2 = '\x86';
constexpr char kTrue = '\x88', kFalse = '\x89', kBinInt = 'J', kBinInt1 = 'K', kLong1 = '\x8a', kBinFloat = 'G';
constexpr char kBinUnicode = 'X', kBinPut = 'q', kLongBinPut = 'r', kBinGet = 'h', kLongBinGet = 'j';
// How many list items are written as one batch. PyTorch's viewer passes a batch's items as arguments to one JavaScript
// call, which may have some 120,000.
constexpr int64_t kBatch = 1000;
constexpr uint32_t kShortIds = 256;
}  // namespace

PickleWriter::PickleWriter() { out_ = {kProto, 2}; }

void PickleWriter::item() {
  if (open_.empty() || !open_.back().list) return;
  const int64_t n = open_.back().items++;
  if (n % kBatch != 0) return;
  if (n > 0) out_ += kAppends;
  out_ += kMark;
}

void PickleWriter::little_endian(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i) & 0xff);
}

// Stores the value just written in the pickle's memo under the next number, with which get() refers to it.
void PickleWriter::put() {
  const uint32_t id = next_id_++;
  out_ += id < kShortIds ? kBinPut : kLongBinPut;
  little_endian(id, id < kShortIds ? 1 : 4);
}
void PickleWriter::get(uint32_t id) {
  out_ += id < kShortIds ? kBinGet : kLongBinGet;
  little_endian(id, id < kShortIds ? 1 : 4);
}

void PickleWriter::begin_dict() {
  item();
  out_ += kEmptyDict;
  out_ += kMark;
  open_.push_back({.list = false});
}
void PickleWriter::end_dict() {
  TRIAD_CHECK(!open_.empty() && !open_.back().list, "a pickled dict ends where none began");
  open_.pop_back();
  out_ += kSetItems;
}

void PickleWriter::begin_list() {
  item();
  out_ += kEmptyList;
  open_.push_back({.list = true});
}
void PickleWriter::end_list() {
  TRIAD_CHECK(!open_.empty() && open_.back().list, "a pickled list ends where none began");
  if (open_.back().items > 0) out_ += kAppends;
  open_.pop_back();
}

void PickleWriter::boolean(bool value) {
  item();
  out_ += value ? kTrue : kFalse;
}

void PickleWriter::integer(int64_t value) {
  item();
  if (value >= 0 && value < 256) {
    out_ += kBinInt1;
    little_endian(static_cast<uint64_t>(value), 1);
  } else if (value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max()) {
    out_ += kBinInt;
    little_endian(static_cast<uint64_t>(value), 4);
  } else {
    out_ += kLong1;
    little_endian(sizeof value, 1);
    little_endian(static_cast<uint64_t>(value), sizeof value);
  }
}

void PickleWriter::number(double value) {
  item();
  out_ += kBinFloat;
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  for (int i = 7; i >= 0; --i) out_ += static_cast<char>(bits >> (8 * i) & 0xff);
}

void PickleWriter::text(std::string_view value) {
  item();
  const auto [known, is_new] = texts_.try_emplace(std::string(value), next_id_);
  if (!is_new) return get(known->second);
  out_ += kBinUnicode;
  little_endian(value.size(), 4);
  out_ += value;
  put();
}

void PickleWriter::pair(int64_t first, int64_t second) {
  item();
  open_.push_back({.list = false});  // marks that the pair's two values are not items in the enclosing list
  integer(first);
  integer(second);
  open_.pop_back();
  out_ += kTuple2;
}

bool PickleWriter::again(const std::string& name) {
  const auto known = kept_.find(name);
  if (known == kept_.end()) return false;
  item();
  get(known->second);
  return true;
}

void PickleWriter::keep(const std::string& name) {
  kept_[name] = next_id_;
  put();
}

std::string PickleWriter::finish() {
  TRIAD_CHECK(open_.empty(), "{} pickled lists and dicts did not end", open_.size());
  out_ += kStop;
  return std::move(out_);
}

}  // namespace triad
