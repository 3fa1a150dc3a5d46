#include "io/data/shard_set.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "engine/random_streams.h"
#include "io/data/data_files.h"

namespace triad {

namespace fs = std::filesystem;

namespace {
constexpr int64_t kCopyTokens = 1 << 20;

// Calls body(tokens, learned) for a shard's tokens [begin, end), piece by piece; the arguments are as for
// ShardWriter::append.
template <class F>
void for_each_piece(const Shard& shard, int64_t begin, int64_t end, F&& body) {
  const LossMask mask = shard.has_mask() ? shard.mask() : LossMask();
  std::vector<int32_t> tokens;
  std::vector<uint8_t> learned;
  for (int64_t at = begin; at < end; at += kCopyTokens) {
    tokens.resize(static_cast<size_t>(std::min(kCopyTokens, end - at)));
    shard.read(at, tokens);
    learned.resize(shard.has_mask() ? tokens.size() : 0);
    for (size_t i = 0; i < learned.size(); ++i) learned[i] = mask.learned(at + static_cast<int64_t>(i));
    body(tokens, learned);
  }
}
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

ShardRow::ShardRow(std::string folder, std::string prefix, const ShardLayout& layout, int64_t shard_tokens)
    : folder_(std::move(folder)), prefix_(std::move(prefix)), layout_(layout), shard_tokens_(shard_tokens) {}

void ShardRow::append(std::span<const int32_t> tokens, std::span<const uint8_t> learned) {
  if (tokens.empty()) return;
  std::vector<uint8_t> all;
  if (!layout_.masked) {
    learned = {};
  } else if (learned.empty()) {
    all.assign(tokens.size(), 1);
    learned = all;
  }
  last_learned_ = learned.empty() || learned.back() != 0;
  tokens_ += static_cast<int64_t>(tokens.size());
  while (!tokens.empty()) {
    if (!shard_) {
      name_ = name_of(shards_.size());
      shard_ = std::make_unique<ShardWriter>(path(name_), layout_);
    }
    const int64_t room = shard_tokens_ - shard_->size();
    const auto n = static_cast<size_t>(std::min(room, static_cast<int64_t>(tokens.size())));
    shard_->append(tokens.first(n), learned.first(std::min(n, learned.size())));
    tokens = tokens.subspan(n);
    learned = learned.subspan(std::min(n, learned.size()));
    if (shard_->size() == shard_tokens_) finish_shard();
  }
}

void ShardRow::begin_document(int32_t eot) {
  ++documents_;
  last_document_ = tokens_;
  const uint8_t learned = last_learned_ ? 1 : 0;
  append({&eot, 1}, {&learned, 1});
}

void ShardRow::finish_shard() {
  const ShardWriter::Written w = shard_->finish();
  shard_.reset();
  Json entry = {{"file", name_}, {"tokens", w.tokens}, {"bytes", w.bytes}, {"crc32", fmt::format("{:08x}", w.crc32)}};
  if (layout_.masked) entry["learned"] = w.learned;
  shards_.push_back(std::move(entry));
}

Json ShardRow::report() const {
  Json report = {{"documents", documents_}, {"tokens", tokens_}, {"shards", shards_}};
  if (layout_.masked)
    report["learned"] = std::accumulate(shards_.begin(), shards_.end(), int64_t{0}, [](int64_t sum, const Json& entry) {
      return sum + entry.at("learned").get<int64_t>();
    });
  return report;
}

void ShardRow::finish() {
  if (shard_) finish_shard();
}

Json ShardRow::pause() {
  Json paused = report();
  paused["last_document"] = last_document_;
  paused["last_learned"] = last_learned_;
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
  if (dot == std::string_view::npos) return std::nullopt;
  const std::string_view ending = name.substr(dot);
  if (ending != ".bin" && ending != ".bin.part" && ending != ".bin.mask") return std::nullopt;
  return parse_number<int64_t>(name.substr(0, dot));
}

std::string ShardRow::name_of(size_t number) const { return fmt::format("{}_{:06}.bin", prefix_, number); }

// Compares a saved state's finished shards with their files, whole, because the manifest will list what the state says.
// Shards that cut() may have changed or removed are left out.
void ShardRow::check_finished(const Json& shards, int64_t cut) const {
  int64_t end = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    const auto file = shards[i].at("file").get<std::string>();
    if (file != name_of(i))
      fail("{}: the state to go on from names {} as shard {}: {} is needed", folder_, brief(shards[i]["file"]), i,
           name_of(i));
    end += shards[i].at("tokens").get<int64_t>();
    if (cut >= 0 && end > cut) continue;
    const DataFile now = describe_data_file(path(file));
    const std::string was = fmt::format("{} bytes, CRC-32 {}", shards[i].at("bytes").get<int64_t>(),
                                        shards[i].at("crc32").get<std::string>()),
                      is = fmt::format("{} bytes, CRC-32 {:08x}", now.bytes, now.crc32);
    if (was != is)
      fail("{}: has changed since it was written: it had {}, now {}. Remove the folder, and call again", path(file),
           was, is);
  }
}

void ShardRow::resume(const Json& paused, int64_t cut) {
  documents_ = paused.at("documents").get<int64_t>();
  tokens_ = paused.at("tokens").get<int64_t>();
  last_document_ = paused.at("last_document").get<int64_t>();
  last_learned_ = paused.value("last_learned", true);
  check_finished(paused.at("shards"), cut);
  shards_ = paused.at("shards");
  const bool has_part = paused.contains("part");
  name_ = name_of(shards_.size());
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename().string();
    const std::optional<int64_t> number = number_of(name);
    if (number >= static_cast<int64_t>(shards_.size()) && !(has_part && name.starts_with(name_)))
      fs::remove(entry.path());
  }
  if (has_part)
    shard_ = std::make_unique<ShardWriter>(
        path(name_), layout_,
        ShardWriter::Progress{paused["part"].at("tokens").get<int64_t>(), paused["part"].at("crc32").get<uint32_t>()});
}

void ShardRow::copy_tail(int64_t begin, ShardRow& to) const {
  int64_t first = 0;  // the shard's first token among all shards with this prefix
  for (const Json& entry : shards_) {
    const Shard shard(path(entry["file"].get<std::string>()));
    for_each_piece(shard, std::max<int64_t>(0, begin - first), shard.size(),
                   [&](const auto& tokens, const auto& learned) { to.append(tokens, learned); });
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
      const Shard whole(path(name_));  // if the process was killed before, this may already be the shortened shard
      shard_ = std::make_unique<ShardWriter>(path(name_), layout_);
      for_each_piece(whole, 0, begin - first,
                     [&](const auto& tokens, const auto& learned) { shard_->append(tokens, learned); });
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
