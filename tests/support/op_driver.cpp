#include "tests/support/op_driver.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/check.h"

namespace triad::test {

namespace {
constexpr std::byte kGuard{0xa5};
constexpr int64_t kGuardBytes = kMemAlign;  // an alignment multiple, so the tensor itself is aligned
}  // namespace

int64_t OpRun::first_byte(const Slot& slot) const {
  return kGuardBytes + options_.shift * size_of(dtype_in(slot.type, options_.dtype));
}
int64_t OpRun::region_bytes(const Slot& slot) const {
  return first_byte(slot) + slot.elements() * size_of(dtype_in(slot.type, options_.dtype)) + kGuardBytes;
}

// Copies a slot's initial values in another run to host memory, laid out like the slot. If the two runs store the slot
// in different dtypes, each element is converted. This changes no number, because both runs round their inputs to the
// same dtype.
void OpRun::copy_slot(size_t s, std::byte* to, const OpRun& like) const {
  const Slot& slot = slots_[s];
  const std::byte* from = like.regions_[s].before.data() + like.first_byte(slot);
  if (dtype(s) == like.dtype(s)) {
    std::copy_n(from, slot.elements() * size_of(dtype(s)), to);
    return;
  }
  for (int64_t i = 0; i < slot.numel(); ++i) {
    const int64_t at = slot.offset(i);
    store_element(to, at, dtype(s), load_element(from, at, like.dtype(s)));
  }
}

OpRun::OpRun(const OpCase& c, const RunOptions& options, const OpRun* like)
    : case_(c), options_(options), slots_(slots_of(c)) {
  TRIAD_CHECK(like == nullptr || (like->case_.op == c.op && like->case_.name == c.name &&
                                  like->options_.seed == options.seed && like->precision() == precision()),
              "{} {}: the run to copy from has another case, seed or precision", c.op, c.name);
  const Device device = options.device;
  // The scratch memory has exactly the planned size, so an op that allocates more than in its dry run fails.
  const int64_t scratch_bytes = planned_scratch_bytes(c, device, options.dtype);
  int64_t arena_bytes = align_up(scratch_bytes);
  for (const Slot& slot : slots_) arena_bytes += align_up(region_bytes(slot));
  runtime_ = std::make_unique<Runtime>(Runtime::Options{
      .device = device, .arena_bytes = arena_bytes, .scratch_bytes = scratch_bytes, .kernels = c.kernels});
  Context& ctx = runtime_->ctx();
  ctx.threads = options.threads;
  {  // fills scratch with NaN (and -1 as an integer)
    Scratch::Scope scope(ctx.scratch);
    const Tensor scratch = scope.alloc(DType::u8, {scratch_bytes});
    backend::fill(scratch.data, device, 0xff, scratch_bytes, ctx.stream.handle());
  }
  for (size_t s = 0; s < slots_.size(); ++s) {
    const Slot& slot = slots_[s];
    Region region;
    region.before.assign(static_cast<size_t>(region_bytes(slot)), kGuard);
    std::byte* const first = region.before.data() + first_byte(slot);
    if (like != nullptr)
      copy_slot(s, first, *like);
    else
      fill_slot(slot, first, dtype(s), options.seed, s, options.precision);
    region.memory = runtime_->arena().alloc(MemTag::io, slot.name, DType::u8, {region_bytes(slot)});
    write(ctx, region.memory, region.before.data());
    args_.set(slot.name, slot_view(slot, region.memory.data + first_byte(slot), dtype(s), device));
    regions_.push_back(std::move(region));
  }
}

void OpRun::forward() {
  case_.forward(runtime_->ctx(), args_);
  runtime_->stream().synchronize();
}

void OpRun::backward() {
  case_.backward(runtime_->ctx(), args_);
  runtime_->stream().synchronize();
}

void OpRun::run() {
  forward();
  if (case_.backward) backward();
  for (Region& region : regions_) {
    region.after.resize(region.before.size());
    read(runtime_->ctx(), region.after.data(), region.memory);
  }
}

std::byte* OpRun::live(size_t s, int64_t i) {
  return regions_[s].memory.data + first_byte(slots_[s]) + slots_[s].offset(i) * size_of(dtype(s));
}

std::vector<double> OpRun::values(size_t s) const {
  const Slot& slot = slots_[s];
  const std::byte* before = regions_[s].before.data() + first_byte(slot);
  const std::byte* after = regions_[s].after.data() + first_byte(slot);
  std::vector<double> out(static_cast<size_t>(slot.numel()));
  for (int64_t i = 0; i < slot.numel(); ++i) {
    const int64_t at = slot.offset(i);
    out[static_cast<size_t>(i)] = load_element(after, at, dtype(s));
    if (slot.kind == SlotKind::added_to) out[static_cast<size_t>(i)] -= load_element(before, at, dtype(s));
  }
  return out;
}

bool OpRun::same_bits(const OpRun& other) const {
  return std::equal(regions_.begin(), regions_.end(), other.regions_.begin(), other.regions_.end(),
                    [](const Region& a, const Region& b) { return a.after == b.after; });
}

std::vector<std::string> OpRun::complaints() const {
  std::vector<std::string> out;
  for (size_t s = 0; s < slots_.size(); ++s) {
    const Slot& slot = slots_[s];
    const Region& region = regions_[s];
    if (slot.kind == SlotKind::fixed) {
      if (region.before != region.after) out.push_back(slot.name + " was changed, or bytes around it");
      continue;
    }
    int64_t unwritten_count = 0;
    // In this copy the loop overwrites the tensor's elements with guard bytes. If only guard bytes are left after it,
    // the op wrote nothing outside the tensor.
    std::vector<std::byte> rest = region.after;
    std::byte* const first = rest.data() + first_byte(slot);
    for (int64_t i = 0; i < slot.numel(); ++i) {
      const double value = load_element(first, slot.offset(i), dtype(s));
      if (std::isnan(value) || (dtype(s) == DType::i32 && value == kUnwrittenInt)) ++unwritten_count;
      std::fill_n(first + slot.offset(i) * size_of(dtype(s)), size_of(dtype(s)), kGuard);
    }
    if (unwritten_count > 0)
      out.push_back(
          fmt::format("{}: {} of {} elements are NaN or were not written", slot.name, unwritten_count, slot.numel()));
    const auto is_guard = [](std::byte b) { return b == kGuard; };
    if (!std::all_of(rest.begin(), rest.end(), is_guard)) {
      const auto at = std::find_if_not(rest.begin(), rest.end(), is_guard) - rest.begin();
      out.push_back(fmt::format("{}: wrote outside of the tensor, first at byte {} from its start", slot.name,
                                at - first_byte(slot)));
    }
  }
  return out;
}

double relative_error(std::span<const double> got, std::span<const double> expected) {
  TRIAD_CHECK(got.size() == expected.size(), "{} values compared with {}", got.size(), expected.size());
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double difference = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i] && std::isinf(expected[i])) continue;
    if (!std::isfinite(got[i]) || !std::isfinite(expected[i])) return kInfinity;
    difference += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  if (difference == 0) return 0;
  return norm == 0 ? kInfinity : std::sqrt(difference / norm);
}

namespace {

// At most `count` different indices below n, one from each `count`-th part of the range.
std::vector<int64_t> sample_indices(int64_t n, int64_t count, const Philox& random) {
  count = std::min(n, count);
  std::vector<int64_t> indices;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = i * n / count, end = (i + 1) * n / count;
    indices.push_back(begin +
                      static_cast<int64_t>(random.below(static_cast<uint64_t>(i), static_cast<uint64_t>(end - begin))));
  }
  return indices;
}

// The loss whose finite differences are compared with gradients: <dout, out> summed over the outputs.
class CaseLoss {
 public:
  explicit CaseLoss(OpRun& run) : run_(run) {
    const auto& slots = run.slots();
    for (size_t s = 0; s < slots.size(); ++s)
      if (slots[s].arg->role == ArgRole::output && slots[s].gradient) dout_.push_back(s);
    for (const size_t s : dout_)
      for (int64_t i = 0; i < slots[s].numel(); ++i) weights_.push_back(run.live_value(s, i));
  }
  // Runs forward on the current inputs and returns all outputs.
  std::vector<double> outputs() {
    run_.forward();
    std::vector<double> out;
    out.reserve(weights_.size());
    for (const size_t s : dout_)  // slot s - 1 is gradient s's output
      for (int64_t i = 0; i < run_.slots()[s].numel(); ++i) out.push_back(run_.live_value(s - 1, i));
    return out;
  }
  // Returns loss(plus) - loss(minus). Subtracts element by element, because subtracting two nearly equal sums would
  // lose digits.
  double difference(const std::vector<double>& plus, const std::vector<double>& minus) const {
    long double sum = 0;
    for (size_t i = 0; i < weights_.size(); ++i)
      if (plus[i] != minus[i]) sum += static_cast<long double>(weights_[i]) * (plus[i] - minus[i]);
    return static_cast<double>(sum);
  }
  // How much rounding the outputs to double changes such a difference.
  double rounding_noise(const std::vector<double>& out) const {
    double sum = 0;
    for (size_t i = 0; i < out.size(); ++i)
      if (std::isfinite(out[i])) sum += weights_[i] * weights_[i] * out[i] * out[i];
    return 8 * std::numeric_limits<double>::epsilon() * std::sqrt(sum);
  }

 private:
  OpRun& run_;
  std::vector<size_t> dout_;
  std::vector<double> weights_;
};

}  // namespace

std::vector<GradientError> gradient_errors(const OpCase& c, uint64_t seed) {
  constexpr double kStep = 1e-5;
  constexpr int64_t kSamples = 24;
  OpRun run(c, {.device = Device::cpu(), .dtype = DType::f64, .seed = seed});
  run.run();
  CaseLoss loss(run);
  const double noise = loss.rounding_noise(loss.outputs()) / kStep;
  std::vector<GradientError> errors;
  for (size_t s = 0; s < run.slots().size(); ++s) {
    const Slot& slot = run.slots()[s];
    if (!slot.gradient || slot.kind == SlotKind::fixed) continue;
    const std::vector<double> gradient = run.values(s);
    std::vector<double> got, expected;
    for (const int64_t i : sample_indices(slot.numel(), kSamples, Philox(seed, 1000 + s))) {
      const auto set = [&](double value) { store_element(run.live(s - 1, i), 0, DType::f64, value); };
      const double x = run.live_value(s - 1, i), above = x + kStep, below = x - kStep;
      set(above);
      const std::vector<double> plus = loss.outputs();
      set(below);
      const std::vector<double> minus = loss.outputs();
      set(x);
      got.push_back(gradient[static_cast<size_t>(i)]);
      expected.push_back(loss.difference(plus, minus) / (above - below));
    }
    double distance = 0;
    for (size_t i = 0; i < got.size(); ++i) distance += (got[i] - expected[i]) * (got[i] - expected[i]);
    // A difference below the noise counts as zero error, because central differences cannot measure a gradient near
    // zero.
    const bool within_noise = std::sqrt(distance) <= noise * std::sqrt(static_cast<double>(got.size()));
    errors.push_back({slot.name, static_cast<int64_t>(got.size()), within_noise ? 0 : relative_error(got, expected)});
  }
  return errors;
}

}  // namespace triad::test
