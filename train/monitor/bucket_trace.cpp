#include "train/monitor/bucket_trace.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "engine/check.h"
#include "kernels/step/checksum.h"
#include "train/monitor/step_text.h"

namespace triad {

std::string odd_ranks(const std::vector<int64_t>& by_rank) {
  std::map<int64_t, std::vector<size_t>> ranks_of;
  for (size_t r = 0; r < by_rank.size(); ++r) ranks_of[by_rank[r]].push_back(r);
  if (ranks_of.size() <= 1) return "";
  const auto most = std::max_element(ranks_of.begin(), ranks_of.end(),
                                     [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  std::string text;
  if (2 * most->second.size() <= by_rank.size()) {  // no value has a majority
    for (size_t r = 0; r < by_rank.size(); ++r)
      text += fmt::format("{}rank {} has {:016x}", r == 0 ? "" : ", ", r, static_cast<uint64_t>(by_rank[r]));
    return text;
  }
  for (const auto& [value, ranks] : ranks_of)
    if (value != most->first)
      text += fmt::format("{}rank {} has {:016x}", text.empty() ? "" : ", ", fmt::join(ranks, " and "),
                          static_cast<uint64_t>(value));
  return text + fmt::format(", the others {:016x}", static_cast<uint64_t>(most->first));
}

BucketTrace::Slot::Slot(Device device, int64_t count)
    : began(device, true), done(device), checksums(device, count * static_cast<int64_t>(sizeof(int64_t))) {
  for (int64_t b = 0; b < count; ++b) buckets.emplace_back(device);
}

BucketTrace::BucketTrace(Context& ctx, Arena& arena, Comm& comm, int64_t buckets, bool shared, size_t queued)
    : comm_(comm),
      shared_(shared),
      checksums_(
          arena.alloc(MemTag::comm, "the buckets' checksums", DType::i64, {static_cast<int64_t>(queued), buckets})) {
  if (ctx.planning) return;
  for (size_t i = 0; i < queued; ++i) slots_.emplace_back(ctx.device, buckets);
}

void BucketTrace::begin(const Stream& compute) {
  if (slots_.empty()) return;  // only memory is planned
  TRIAD_CHECK(waiting_ < slots_.size(), "{} steps' buckets are traced without a look at them", waiting_);
  slots_[next_].began.record(compute);
}

void BucketTrace::launch(int64_t bucket) {
  if (!slots_.empty()) slots_[next_].buckets[static_cast<size_t>(bucket)].launch.record(comm_.stream());
}

void BucketTrace::finish(Context& comm_ctx, int64_t bucket, ConstTensor sums) {
  checksum(comm_ctx, checksums_[static_cast<int64_t>(next_)].slice(0, bucket, bucket + 1), sums);
  if (slots_.empty()) return;
  Timed& timed = slots_[next_].buckets[static_cast<size_t>(bucket)];
  timed.finish.record(comm_.stream());
  timed.elements = sums.numel();
}

void BucketTrace::end(Context& comm_ctx) {
  if (slots_.empty()) return;
  Slot& slot = slots_[next_];
  const Tensor own = checksums_[static_cast<int64_t>(next_)];
  backend::copy(slot.checksums.data(), Device::cpu(), own.data, own.device, own.bytes(), comm_ctx.stream.handle());
  slot.done.record(comm_ctx.stream);
  next_ = (next_ + 1) % slots_.size();
  ++waiting_;
}

BucketTrace::Step BucketTrace::take() {
  TRIAD_CHECK(waiting_ > 0, "the buckets of a step were asked for, and none is traced");
  const Slot& slot = slots_[oldest_];
  oldest_ = (oldest_ + 1) % slots_.size();
  --waiting_;
  slot.done.synchronize();
  Step step;
  for (size_t b = 0; b < slot.buckets.size(); ++b) {
    const Timed& timed = slot.buckets[b];
    Bucket& bucket = step.buckets.emplace_back();
    bucket.launch_ms = timed.launch.ms_since(slot.began);
    bucket.finish_ms = timed.finish.ms_since(slot.began);
    bucket.elements = timed.elements;
    std::memcpy(&bucket.checksum, slot.checksums.data() + b * sizeof(int64_t), sizeof(int64_t));
  }
  if (shared_) compare(step);
  return step;
}

void BucketTrace::compare(Step& step) {
  std::string own;
  for (const Bucket& bucket : step.buckets)
    own.append(reinterpret_cast<const char*>(&bucket.checksum), sizeof(int64_t));
  const std::vector<std::string> all = comm_.all_gather_host_text(own, "the buckets' checksums");
  for (size_t b = 0; b < step.buckets.size(); ++b) {
    std::vector<int64_t> by_rank(all.size());
    for (size_t r = 0; r < all.size(); ++r)
      std::memcpy(&by_rank[r], all[r].data() + b * sizeof(int64_t), sizeof(int64_t));
    if (const std::string odd = odd_ranks(by_rank); !odd.empty()) step.odd.push_back({static_cast<int64_t>(b), odd});
  }
}

std::string BucketTrace::rows(int64_t step, const Step& s) {
  std::string out;
  for (size_t b = 0; b < s.buckets.size(); ++b) {
    const Bucket& bucket = s.buckets[b];
    out += fmt::format("{},{},{},{:.4f},{:.4f},{:016x}\n", step, b, bucket.elements, bucket.launch_ms, bucket.finish_ms,
                       static_cast<uint64_t>(bucket.checksum));
  }
  return out;
}

std::string BucketTrace::rows_until(int64_t step, std::string_view beginning, std::string_view file) {
  if (!file.starts_with(beginning)) return "";
  return text_until(file.substr(beginning.size()), step,
                    [](std::string_view line) { return number_between(line, "", ","); });
}

}  // namespace triad
