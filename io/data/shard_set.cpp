#include "io/data/shard_set.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "engine/random_streams.h"

namespace triad {

namespace fs = std::filesystem;

namespace {
constexpr int64_t kCopyTokens = 1 << 20;
}  // namespace

HeldOutStream::HeldOutStream(double val_fraction, uint64_t seed)
    : fraction_(val_fraction), random_(seed, random_stream(RandomUse::held_out_strata)) {}

int64_t HeldOutStream::first_of(int64_t stratum) const {
  return static_cast<int64_t>(std::ceil(static_cast<double>(stratum) / fraction_));
}

bool HeldOutStream::operator()(int64_t document) const {
  if (fraction_ <= 0 || document == 0) return false;
  auto stratum = static_cast<int64_t>(static_cast<double>(document) * fraction_);
  while (first_of(stratum) > document) --stratum;
  while (first_of(stratum + 1) <= document) ++stratum;
  const int64_t first = std::max<int64_t>(1, first_of(stratum)), n = first_of(stratum + 1) - first;
  const auto chosen = static_cast<int64_t>(random_.below(static_cast<uint64_t>(stratum), static_cast<uint64_t>(n)));
  return document == first + chosen;
}

ShardRow::ShardRow(std::string folder, std::string prefix, TokenWidth width, int64_t shard_tokens)
    : folder_(std::move(folder)), prefix_(std::move(prefix)), width_(width), shard_tokens_(shard_tokens) {}

void ShardRow::append(std::span<const int32_t> tokens) {
  tokens_ += static_cast<int64_t>(tokens.size());
  while (!tokens.empty()) {
    if (!shard_) {
      name_ = fmt::format("{}_{:06}.bin", prefix_, shards_.size());
      shard_ = std::make_unique<ShardWriter>(path(name_), width_);
    }
    const int64_t room = shard_tokens_ - shard_->size();
    const auto n = static_cast<size_t>(std::min(room, static_cast<int64_t>(tokens.size())));
    shard_->append(tokens.first(n));
    tokens = tokens.subspan(n);
    if (shard_->size() == shard_tokens_) finish_shard();
  }
}

void ShardRow::begin_document() {
  ++documents_;
  last_document_ = tokens_;
}

void ShardRow::finish_shard() {
  const ShardWriter::Written w = shard_->finish();
  shard_.reset();
  shards_.push_back(
      {{"file", name_}, {"tokens", w.tokens}, {"bytes", w.bytes}, {"crc32", fmt::format("{:08x}", w.crc32)}});
}

void ShardRow::finish() {
  if (shard_) finish_shard();
}

Json ShardRow::pause() {
  Json paused = report();
  paused["last_document"] = last_document_;
  if (shard_) {
    const ShardWriter::Progress progress = shard_->pause();
    paused["part"] = {{"tokens", progress.tokens}, {"crc32", progress.crc32}};
  }
  return paused;
}

std::optional<int64_t> ShardRow::number_of(std::string_view name) const {
  if (!name.starts_with(prefix_ + "_")) return std::nullopt;
  name.remove_prefix(prefix_.size() + 1);
  const size_t dot = name.find('.');
  if (dot == std::string_view::npos || (name.substr(dot) != ".bin" && name.substr(dot) != ".bin.part"))
    return std::nullopt;
  return parse_number<int64_t>(name.substr(0, dot));
}

void ShardRow::resume(const Json& paused) {
  documents_ = paused.at("documents").get<int64_t>();
  tokens_ = paused.at("tokens").get<int64_t>();
  last_document_ = paused.at("last_document").get<int64_t>();
  shards_ = paused.at("shards");
  const bool has_part = paused.contains("part");
  name_ = fmt::format("{}_{:06}.bin", prefix_, shards_.size());
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    const std::optional<int64_t> number = number_of(name);
    if (number >= static_cast<int64_t>(shards_.size()) && !(has_part && name.starts_with(name_)))
      fs::remove(entry.path());
  }
  if (has_part)
    shard_ = std::make_unique<ShardWriter>(
        path(name_), width_,
        ShardWriter::Progress{paused["part"].at("tokens").get<int64_t>(), paused["part"].at("crc32").get<uint32_t>()});
}

void ShardRow::copy_tail(int64_t begin, ShardRow& to) const {
  std::vector<int32_t> tokens;
  int64_t first = 0;  // position of the shard's first token within all shards of this prefix
  for (const Json& entry : shards_) {
    const Shard shard(path(entry["file"].get<std::string>()));
    for (int64_t at = std::max<int64_t>(0, begin - first); at < shard.size(); at += kCopyTokens) {
      tokens.resize(static_cast<size_t>(std::min(kCopyTokens, shard.size() - at)));
      shard.read(at, tokens);
      to.append(tokens);
    }
    first += shard.size();
  }
  to.finish();
}

void ShardRow::cut(int64_t begin) {
  Json kept = Json::array();
  int64_t first = 0;
  for (const Json& entry : shards_) {
    const auto n = entry["tokens"].get<int64_t>();
    name_ = entry["file"].get<std::string>();
    if (first + n <= begin) {
      kept.push_back(entry);
    } else if (first >= begin) {
      fs::remove(path(name_));
    } else {
      std::vector<int32_t> tokens;
      const Shard whole(path(name_));  // if the process was killed before, this may already be the shortened shard
      shard_ = std::make_unique<ShardWriter>(path(name_), width_);
      for (int64_t at = 0; at < begin - first; at += kCopyTokens) {
        tokens.resize(static_cast<size_t>(std::min(kCopyTokens, begin - first - at)));
        whole.read(at, tokens);
        shard_->append(tokens);
      }
      shards_.swap(kept);
      finish_shard();
      shards_.swap(kept);
    }
    first += n;
  }
  shards_ = kept;
  tokens_ = begin;
}

}  // namespace triad
