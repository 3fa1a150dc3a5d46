// The tensors with which an OpCase runs, gradients included: memory layout and initial values. The test driver and
// tools/bench/bench.cpp use it.
#pragma once
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "engine/rng.h"
#include "kernels/common/op_case.h"

namespace triad {

enum class SlotKind {
  fixed,        // inputs, constants, upstream gradients: no op may change them
  overwritten,  // outputs, saved tensors, input gradients
  added_to,     // parameter gradients
};

// One tensor: an argument, or an argument's gradient.
struct Slot {
  const Arg* arg = nullptr;  // the argument itself, or the one that this gradient belongs to and shares shape and
                             // padding with
  std::string name;          // arg->name, or d<name>
  SlotKind kind = SlotKind::fixed;
  bool gradient = false;
  ArgType type = ArgType::element;

  int64_t numel() const { return arg->shape.numel(); }
  int64_t cols() const { return arg->shape[-1]; }
  int64_t row_stride() const { return cols() + arg->row_pad; }
  int64_t rows() const { return cols() == 0 ? 0 : numel() / cols(); }
  int64_t elements() const { return rows() * row_stride(); }  // elements in memory, padding included
  // The offset, in elements, for row-major index i.
  int64_t offset(int64_t i) const { return i / cols() * row_stride() + i % cols(); }
};

inline DType dtype_in(ArgType type, DType run) {
  switch (type) {
    case ArgType::element:
      return run;
    case ArgType::acc:
      return acc_dtype(run);
    case ArgType::i32:
      return DType::i32;
    case ArgType::f64:
      return DType::f64;
  }
  return run;
}

// A case's tensors: every argument with a shape, in table order, each followed by its gradient, if any.
inline std::vector<Slot> slots_of(const OpCase& c) {
  std::vector<Slot> slots;
  for (const Arg& a : c.args) {
    if (a.shape.rank == 0) continue;
    const bool written = a.role == ArgRole::output || a.role == ArgRole::saved;
    slots.push_back({&a, a.name, written ? SlotKind::overwritten : SlotKind::fixed, false, a.type});
    if (!c.backward || a.type == ArgType::i32) continue;
    switch (a.role) {
      case ArgRole::input:
        slots.push_back({&a, "d" + a.name, SlotKind::overwritten, true, a.type});
        break;
      case ArgRole::input_acc:
      case ArgRole::param:
        slots.push_back({&a, "d" + a.name, SlotKind::added_to, true, ArgType::acc});
        break;
      case ArgRole::output:
        slots.push_back({&a, "d" + a.name, SlotKind::fixed, true, a.type});
        break;
      case ArgRole::constant:
      case ArgRole::saved:
        break;
    }
  }
  return slots;
}

// A slot's tensor in the memory that starts at `first`.
inline Tensor slot_view(const Slot& slot, std::byte* first, DType dtype, Device device) {
  Tensor t(first, dtype, slot.arg->shape, device);
  int64_t stride = slot.row_stride();
  for (int i = t.rank - 2; i >= 0; --i) {
    t.stride[i] = stride;
    stride *= t.dim[i];
  }
  return t;
}

inline double load_element(const std::byte* base, int64_t offset, DType dtype) {
  const std::byte* at = base + offset * size_of(dtype);
  auto as = [&]<class T>(T value) {
    std::memcpy(&value, at, sizeof(T));
    return value;
  };
  switch (dtype) {
    case DType::f64:
      return as(double{});
    case DType::f32:
      return as(float{});
    case DType::bf16:
      return as(bf16{});
    case DType::i64:
      return static_cast<double>(as(int64_t{}));
    case DType::i32:
      return as(int32_t{});
    case DType::u8:
      return as(uint8_t{});
  }
  return 0;
}

inline void store_element(std::byte* base, int64_t offset, DType dtype, double value) {
  std::byte* at = base + offset * size_of(dtype);
  auto put = [&](auto v) { std::memcpy(at, &v, sizeof(v)); };
  switch (dtype) {
    case DType::f64:
      return put(value);
    case DType::f32:
      return put(static_cast<float>(value));
    case DType::bf16:
      return put(bf16(static_cast<float>(value)));
    case DType::i64:
      return put(static_cast<int64_t>(value));
    case DType::i32:
      return put(static_cast<int32_t>(value));
    case DType::u8:
      return put(static_cast<uint8_t>(value));
  }
}

inline double round_to(DType dtype, double value) {
  std::byte bytes[sizeof(double)];
  store_element(bytes, 0, dtype, value);
  return load_element(bytes, 0, dtype);
}

// What elements that an op must overwrite hold at first: NaN, or this number for i32. An element that still holds it
// after the op was not written.
inline constexpr double kUnwrittenInt = -2023406815;  // 0x87654321 as i32
inline double unwritten(DType dtype) {
  return is_float(dtype) ? std::numeric_limits<double>::quiet_NaN() : kUnwrittenInt;
}

// Fills host memory, laid out as `slot`, with initial values; padding is left as it is. stream: the random stream, a
// different one for each of a case's slots. precision: the dtype to which values are rounded first, so that different
// dtypes can have equal inputs.
inline void fill_slot(const Slot& slot, std::byte* first, DType dtype, uint64_t seed, uint64_t stream,
                      std::optional<DType> precision = {}) {
  constexpr double kGradientStd =
      0.01;  // standard deviation for gradients that the op adds to: small, so that the sum keeps its precision
  constexpr int64_t kWorthThreads = 1 << 16;
  const Arg& arg = *slot.arg;
  const bool drawn = slot.kind == SlotKind::added_to || (!arg.fill && !arg.fill_all);
  const std::vector<double> whole =
      slot.kind == SlotKind::fixed && arg.fill_all ? arg.fill_all(seed) : std::vector<double>{};
  const double mean = slot.kind == SlotKind::added_to ? 0 : arg.mean;
  const double std = slot.kind == SlotKind::added_to ? kGradientStd : arg.std;
  const DType rounded = precision ? dtype_in(slot.type, *precision) : dtype;
  const Philox random(seed, stream);
  const int64_t n = slot.numel();
#pragma omp parallel for schedule(static) if (n > kWorthThreads)
  for (int64_t i = 0; i < n; ++i) {
    double value = 0;
    if (slot.kind == SlotKind::overwritten) {
      value = unwritten(dtype);
    } else if (drawn) {
      value = mean + std * random.normal(static_cast<uint64_t>(i));
    } else {
      value = arg.fill_all ? whole[static_cast<size_t>(i)] : arg.fill(i, seed);
    }
    store_element(first, slot.offset(i), dtype, round_to(rounded, value));
  }
}

// The scratch bytes that this case needs on top of its arguments, measured by a dry run on a planning context.
inline int64_t planned_scratch_bytes(const OpCase& c, Device device, DType dtype) {
  Runtime plan({.device = device, .planning = true, .kernels = c.kernels});
  Args args;
  for (const Slot& slot : slots_of(c)) {
    const DType type = dtype_in(slot.type, dtype);
    const Tensor memory = plan.arena().alloc(MemTag::io, slot.name, type, {slot.elements()});
    args.set(slot.name, slot_view(slot, memory.data, type, device));
  }
  c.forward(plan.ctx(), args);
  if (c.backward) c.backward(plan.ctx(), args);
  return align_up(plan.scratch().peak_bytes());
}

}  // namespace triad
