#include "io/data/shard_tokens.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <utility>

#include "engine/check.h"
#include "engine/process/counted.h"
#include "io/chat/chat_format.h"
#include "io/data/loss_mask.h"
#include "io/data/shard_manifest.h"
#include "io/data/shards.h"

namespace triad {

namespace {

class ShardTokens final : public TokenSource {
 public:
  ShardTokens(const std::vector<std::string>& files, int64_t vocab, bool accept_changed)
      : name_(files_text("token shards", files)), vocab_(vocab), accept_changed_(accept_changed) {
    int64_t tokens = 0;
    for (const std::string& file : files) ends_.push_back(tokens += shards_.emplace_back(file).size());
    if (std::any_of(shards_.begin(), shards_.end(), [](const Shard& shard) { return shard.has_mask(); }))
      for (const Shard& shard : shards_) mask_.append(shard.mask());
    // A scan is slow, so all headers were checked first, also against the manifests.
    const ShardOrigin origin = find_manifests(files);
    for (size_t i = 0; i < shards_.size(); ++i) check_listed(origin, i);
    const bool separated = origin.has_separator();
    const int32_t eot = separated ? origin.manifests.front().eot : -1;
    chat_ = chat_of(origin);
    std::vector<int64_t> marks;
    std::vector<int64_t> marks_of;  // each shard's separator count
    auto described = std::make_shared<std::vector<DataFile>>();
    for (size_t i = 0; i < shards_.size(); ++i) {
      const size_t before = marks.size();
      const uint32_t crc = shards_[i].scan(vocab, eot, separated ? &marks : nullptr);
      check_checksum(origin, i, crc);
      described->push_back({.name = file_name_of(files[i]), .bytes = shards_[i].bytes(), .crc32 = crc});
      const int64_t first = first_of(i);
      std::for_each(marks.begin() + static_cast<std::ptrdiff_t>(before), marks.end(), [&](int64_t& m) { m += first; });
      marks_of.push_back(static_cast<int64_t>(marks.size() - before));
    }
    files_ = std::move(described);
    if (!separated) return;
    const ShardManifest& manifest = origin.manifests.front();
    const int64_t listed = check_documents(origin, marks_of);
    if (listed > 0 && static_cast<int64_t>(marks.size()) > listed)
      warning_ += (warning_.empty() ? "" : "; ") +
                  fmt::format(
                      "{}: the separator (token {}) occurs {} more often than there are documents ({}): text that "
                      "spells it is cut "
                      "into documents there",
                      name_, manifest.eot, counted(static_cast<int64_t>(marks.size()) - listed, "time"), listed);
    index_ = index_documents(std::move(marks), size(), manifest.separator, manifest.eot);
    if (!mask().learned(size() - 1)) index_->after_end = -1;  // a separator is learned if the token before it is
  }
  DataFiles files() const override { return files_; }
  const DocumentIndex* documents() const override { return index_ ? &*index_ : nullptr; }
  MaskView mask() const override { return {.mask = mask_.size() > 0 ? &mask_ : nullptr}; }
  std::string warning() const override { return warning_; }
  std::shared_ptr<const ChatFormat> chat() const override { return chat_; }
  int64_t size() const override { return ends_.back(); }
  void read(int64_t begin, std::span<int32_t> out) const override {
    check_range(begin, out);
    auto shard = static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin());
    for (; !out.empty(); ++shard) {
      const int64_t first = begin - (ends_[shard] - shards_[shard].size());
      const auto n = std::min(out.size(), static_cast<size_t>(ends_[shard] - begin));
      // Checked against vocab_ again, because the file may have changed since.
      shards_[shard].read(first, out.first(n), vocab_);
      out = out.subspan(n);
      begin += static_cast<int64_t>(n);
    }
  }
  std::string name() const override { return name_; }

 private:
  // Throws an Error, or if the user accepts that, adds to the warning, that something is not as a manifest says.
  void differs(const std::string& text) {
    if (!accept_changed_) fail("{}", text);
    warning_ += (warning_.empty() ? "" : "; ") + text;
  }
  // Compares a shard's size and mask with what its manifest says.
  void check_listed(const ShardOrigin& origin, size_t i) {
    if (!origin.entries[i]) return;
    const ListedShard& listed = origin.entries[i]->shard;
    const std::string& list = origin.manifests[origin.entries[i]->manifest].path;
    const Shard& shard = shards_[i];
    const auto same = [&](const char* what, std::optional<int64_t> said, int64_t found) {
      if (said && *said != found)
        differs(
            fmt::format("{}: it has {} {}, but {} says {}: the file is not the one that was written with that "
                        "manifest",
                        shard.path(), found, what, list, *said));
    };
    same("tokens", listed.tokens, shard.size());
    same("bytes", listed.bytes, shard.bytes());
    if (listed.learned)
      same("learned tokens", listed.learned, mask_.size() == 0 ? shard.size() : mask_.count(first_of(i), ends_[i]));
  }
  void check_checksum(const ShardOrigin& origin, size_t i, uint32_t crc) {
    if (!origin.entries[i]) return;
    const auto& [manifest, listed] = *origin.entries[i];
    if (listed.crc32 && *listed.crc32 != crc)
      differs(fmt::format("{}: its CRC-32 is {:08x}, but {} says {:08x}: the file has changed, or is another shard's",
                          shards_[i].path(), crc, origin.manifests[manifest].path, *listed.crc32));
  }
  // Compares the documents. It is an error that a split has fewer separators than its manifest counts documents. It may
  // have more: text can spell the separator. marks: each shard's separator count. Returns how many documents all such
  // splits have.
  int64_t check_documents(const ShardOrigin& origin, const std::vector<int64_t>& marks) {
    int64_t documents = 0;
    for (const WholeSplit& split : origin.whole_splits()) {
      documents += split.documents;
      int64_t separators = 0;
      for (const size_t i : split.shards) separators += marks[i];
      const ShardManifest& manifest = origin.manifests.front();
      if (separators == 0 && split.documents > 1)
        fail("{}: its eot is {}, but {} hold no such token, and {} documents: it cannot be their separator",
             split.manifest, manifest.eot, name_, split.documents);
      // The last document's separator may be missing if it is that document's last token.
      const int64_t least = split.documents - (manifest.separator == Separator::last ? 1 : 0);
      if (separators < least && split.documents > 1)  // a single document needs none
        differs(fmt::format("{}: it says that {} hold {} documents, but they have {} separators (token {})",
                            split.manifest, name_, split.documents, separators, manifest.eot));
    }
    return documents;
  }
  // How the shards' conversations are written.
  static std::shared_ptr<const ChatFormat> chat_of(const ShardOrigin& origin) {
    const ShardManifest* first = nullptr;
    for (const ShardManifest& manifest : origin.manifests) {
      if (manifest.chat.is_null()) continue;
      if (first != nullptr && !same_chat(first->chat, manifest.chat))
        fail("{} and {} have conversations in different chat templates: train on one of them", first->path,
             manifest.path);
      if (first == nullptr) first = &manifest;
    }
    if (first == nullptr) return nullptr;
    return std::make_shared<const ChatFormat>(ChatFormat::from_json(first->chat, first->path));
  }
  int64_t first_of(size_t shard) const { return ends_[shard] - shards_[shard].size(); }

  std::string name_;
  DataFiles files_;
  int64_t vocab_;
  bool accept_changed_;
  std::vector<Shard> shards_;
  std::vector<int64_t> ends_;  // each shard's end, in tokens
  LossMask mask_;              // empty if no shard has a mask
  std::string warning_;
  std::shared_ptr<const ChatFormat> chat_;
  std::optional<DocumentIndex> index_;
};

}  // namespace

std::shared_ptr<const TokenSource> shard_tokens(const std::vector<std::string>& files, int64_t vocab,
                                                bool accept_changed) {
  return std::make_shared<ShardTokens>(files, vocab, accept_changed);
}

}  // namespace triad
