// Reads a call's arguments: checks them, with their values in the messages, and converts them to tensors.
#include <algorithm>
#include <cmath>
#include <span>

#include "engine/dtype_dispatch.h"
#include "kernels/library/library.h"
#include "kernels/nsa/document_bounds.h"

namespace triad::library {

namespace {

// All tensors' address while planning, the same as for planned scratch. It is aligned, as a kernel's choice may
// require.
std::byte* planned_address() { return reinterpret_cast<std::byte*>(uintptr_t{4096}); }

DType read_dtype(const std::string& name, int32_t dtype) {
  switch (dtype) {
    case TRIAD_NSA_F64:
      return DType::f64;
    case TRIAD_NSA_F32:
      return DType::f32;
    case TRIAD_NSA_BF16:
      return DType::bf16;
    case TRIAD_NSA_I32:
      return DType::i32;
    default:
      reject(TRIAD_NSA_ERROR_ARGUMENT, "{}: dtype {} is none of triad_nsa_dtype", name, dtype);
  }
}

std::string numbers(const int64_t* first, int n) {
  std::string text = "(";
  for (int i = 0; i < n; ++i) text += (i > 0 ? "," : "") + std::to_string(first[i]);
  return text + ")";
}

// Throws if the elements are so far from each other that addresses cannot be computed.
void check_extent(const std::string& name, const Tensor& t, const triad_nsa_tensor& from) {
  int64_t last = 0;  // last element's index in memory
  for (int i = 0; i < t.rank; ++i) {
    int64_t more = 0;
    if (__builtin_mul_overflow(t.dim[i] - 1, t.stride[i], &more) || __builtin_add_overflow(last, more, &last) ||
        last >= int64_t{1} << 58)
      reject(TRIAD_NSA_ERROR_STRIDE, "{}: strides {} of sizes {} pass 2^58 elements", name,
             numbers(from.stride, t.rank), numbers(from.size, t.rank));
  }
}

// Throws unless every element has its own address. check_extent() has accepted the tensor.
void check_overlap(const std::string& name, const Tensor& t, const triad_nsa_tensor& from) {
  std::array<bool, TRIAD_NSA_MAX_RANK> done{};
  int64_t within = 1;  // elements from first to last along the axes done so far
  for (;;) {
    int axis = -1;  // the remaining axis with the least stride
    for (int i = 0; i < t.rank; ++i)
      if (!done[i] && t.dim[i] > 1 && (axis < 0 || t.stride[i] < t.stride[axis])) axis = i;
    if (axis < 0) break;
    done[axis] = true;
    const int64_t stride = t.stride[axis], size = t.dim[axis];
    if (stride < within)
      reject(TRIAD_NSA_ERROR_STRIDE, "{}: strides {} of sizes {}: elements of axis {} share memory", name,
             numbers(from.stride, t.rank), numbers(from.size, t.rank), axis);
    within += (size - 1) * stride;
  }
}

}  // namespace

Key& Key::add(const triad_nsa_tensor& t) {
  add(t.dtype).add(t.rank);
  const int rank = std::clamp(t.rank, 0, TRIAD_NSA_MAX_RANK);
  for (int i = 0; i < rank; ++i) add(t.size[i]).add(t.stride[i]);
  return *this;
}
Key& Key::add(const triad_nsa_documents* d) {
  return d == nullptr ? add(int64_t{0}) : add(d->count).add(d->max_per_row);
}
Key& Key::add(const triad_nsa_options& o) {
  return add(o.compress_length)
      .add(o.compress_stride)
      .add(o.block)
      .add(o.selected)
      .add(o.window)
      .add(o.init_blocks)
      .add(o.local_blocks)
      .add(o.scale)
      .add(o.kernels)
      .add(o.flags);
}

double Options::factor(int64_t dk) const {
  const double factor = scale == 0 ? 1 : scale * std::sqrt(static_cast<double>(dk));
  return std::abs(factor - 1) < 1e-12 ? 1 : factor;  // near 1: the caller has computed the default in double
}

Options read_options(const triad_nsa_options* from) {
  constexpr uint32_t kFlags = TRIAD_NSA_UNCHECKED_POINTERS | TRIAD_NSA_SIGNED_GATES | TRIAD_NSA_GIVEN_LISTS;
  constexpr int64_t kMost = int64_t{1} << 30;
  const triad_nsa_options& o = sized("options", from);
  const auto at_least = [](const char* name, int64_t value, int64_t least) {
    if (value < least || value > kMost)
      reject(TRIAD_NSA_ERROR_ARGUMENT, "options.{} is {}: {} to 2^30 is allowed", name, value, least);
  };
  at_least("compress_length", o.compress_length, 1);
  at_least("compress_stride", o.compress_stride, 1);
  at_least("block", o.block, 1);
  at_least("window", o.window, 1);
  at_least("init_blocks", o.init_blocks, 0);
  at_least("local_blocks", o.local_blocks, 1);
  at_least("selected", o.selected, o.init_blocks + o.local_blocks);
  if (o.compress_length % o.compress_stride != 0)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "options.compress_length is {}, no multiple of compress_stride, {}",
           o.compress_length, o.compress_stride);
  if (o.block % o.compress_stride != 0)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "options.block is {}, no multiple of compress_stride, {}", o.block,
           o.compress_stride);
  if (!std::isfinite(o.scale)) reject(TRIAD_NSA_ERROR_ARGUMENT, "options.scale is {}", o.scale);
  if ((o.flags & ~kFlags) != 0) reject(TRIAD_NSA_ERROR_ARGUMENT, "options.flags is {}: unknown flags", o.flags);
  Options to;
  to.l = o.compress_length, to.d = o.compress_stride, to.l_sel = o.block, to.n_sel = o.selected;
  to.init_blocks = o.init_blocks, to.local_blocks = o.local_blocks, to.w = o.window, to.scale = o.scale;
  switch (o.kernels) {
    case TRIAD_NSA_KERNELS_FASTEST:
      break;
    case TRIAD_NSA_KERNELS_PORTABLE:
      to.kernels = KernelChoices::all(KernelChoice::general);
      break;
    case TRIAD_NSA_KERNELS_REFERENCE:
      to.kernels = KernelChoices::all(KernelChoice::reference);
      break;
    default:
      reject(TRIAD_NSA_ERROR_ARGUMENT, "options.kernels is {}: 0 to 2 is allowed", o.kernels);
  }
  to.check_pointers = (o.flags & TRIAD_NSA_UNCHECKED_POINTERS) == 0;
  to.signed_gates = (o.flags & TRIAD_NSA_SIGNED_GATES) != 0;
  to.given_lists = (o.flags & TRIAD_NSA_GIVEN_LISTS) != 0;
  return to;
}

std::byte* Call::address(const std::string& name, void* data, DType dtype, int64_t numel) const {
  if (planning()) return planned_address();
  if (numel == 0) return static_cast<std::byte*>(data);
  if (data == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "{}: data is NULL", name);
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size_of(dtype)) != 0)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "{}: data is {}, no multiple of the {} bytes of an element", name,
           static_cast<const void*>(data), size_of(dtype));
  if (options.check_pointers) {
    const int at = device_of(data), wanted = context_.device.is_cuda() ? context_.device.index : kHost;
    if (at != wanted && at != kAnywhere)
      reject(TRIAD_NSA_ERROR_DEVICE, "{}: data is memory of {}, and the context is for {}", name,
             at == kHost ? "the host" : Device::cuda(at).str(), context_.device.str());
  }
  return static_cast<std::byte*>(data);
}

Tensor Call::tensor(const std::string& name, const triad_nsa_tensor* from, int rank, Strides strides,
                    bool written) const {
  if (from == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "{} is NULL", name);
  return tensor(name, *from, rank, strides, written);
}

Tensor Call::tensor(const std::string& name, const triad_nsa_tensor& from, int rank, Strides strides,
                    bool written) const {
  if (from.rank != rank)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "{} has {} axes{}, not {}", name, from.rank, from.rank == 0 ? " (is absent)" : "",
           rank);
  Tensor t;
  t.dtype = read_dtype(name, from.dtype);
  t.rank = static_cast<int8_t>(rank);
  t.device = context_.device;
  int64_t numel = 1;
  for (int i = 0; i < rank; ++i) {
    if (from.size[i] < 0 || __builtin_mul_overflow(numel, from.size[i], &numel) || numel > int64_t{1} << 48)
      reject(TRIAD_NSA_ERROR_ARGUMENT, "{}: sizes {} are no sizes of a tensor", name, numbers(from.size, rank));
    t.dim[i] = from.size[i];
  }
  // Strides of size-1 axes do not matter. They become contiguous ones, which suit every kernel.
  for (int i = rank - 1; i >= 0; --i) {
    t.stride[i] = from.stride[i];
    if (from.size[i] > 1) continue;
    if (i + 1 == rank || __builtin_mul_overflow(t.dim[i + 1], t.stride[i + 1], &t.stride[i])) t.stride[i] = 1;
  }
  for (int i = 0; i < rank && numel > 0; ++i)
    if (t.stride[i] < 0 || (t.dim[i] > 1 && t.stride[i] == 0 && (strides == Strides::heads || written)))
      reject(TRIAD_NSA_ERROR_STRIDE, "{}: strides {} of sizes {}: axis {} has stride {}", name,
             numbers(from.stride, rank), numbers(from.size, rank), i, t.stride[i]);
  if (numel > 0 && strides == Strides::heads && t.dim[rank - 1] > 1 && t.stride[rank - 1] != 1)
    reject(TRIAD_NSA_ERROR_STRIDE, "{}: strides {} of sizes {}: the last axis needs stride 1", name,
           numbers(from.stride, rank), numbers(from.size, rank));
  if (numel > 0) check_extent(name, t, from);
  if (numel > 0 && (strides == Strides::heads || written)) check_overlap(name, t, from);
  if (numel > 0 && strides == Strides::contiguous && !t.contiguous())
    reject(TRIAD_NSA_ERROR_STRIDE, "{}: strides {} of sizes {}: it has to be contiguous", name,
           numbers(from.stride, rank), numbers(from.size, rank));
  t.data = address(name, from.data, t.dtype, numel);
  // Planning a workspace chooses kernels by strides, before it knows addresses. So outputs must be aligned as the
  // strictest kernel needs.
  if (written && strides == Strides::heads && ctx.device.is_cuda() && reinterpret_cast<uintptr_t>(t.data) % 16 != 0)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "{}: data is {}, no multiple of 16 bytes", name,
           static_cast<const void*>(from.data));
  return t;
}

Tensor Call::at(const std::string& name, void* data, DType dtype, const Shape& shape, Scratch::Scope& scope) const {
  if (data == nullptr) return scope.alloc(dtype, shape);
  Tensor t(nullptr, dtype, shape, context_.device);
  t.data = address(name, data, dtype, shape.numel());
  if (ctx.device.is_cuda() && reinterpret_cast<uintptr_t>(t.data) % 16 != 0)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "{} is {}, no multiple of 16 bytes", name, static_cast<const void*>(data));
  return t;
}

void Call::expect_count(int64_t B, int64_t T, int64_t heads, int64_t width) const {
  const double count =
      static_cast<double>(B) * static_cast<double>(T) * static_cast<double>(heads) * static_cast<double>(width);
  if (count > 0x1p50)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "the sizes give a tensor ({},{},{},{}) of more than 2^50 elements", B, T, heads,
           width);
}

void Call::expect(const std::string& name, const ConstTensor& t, const Shape& shape, DType dtype) const {
  expect(name, t, shape, dtype, dtype);
}
void Call::expect(const std::string& name, const ConstTensor& t, const Shape& shape, DType dtype,
                  DType or_dtype) const {
  if (t.shape() == shape && (t.dtype == dtype || t.dtype == or_dtype)) return;
  reject(TRIAD_NSA_ERROR_ARGUMENT, "{} is {}, not {}{}{}", name, t.str(), name_of(dtype),
         or_dtype == dtype ? "" : std::string(" or ") + name_of(or_dtype), shape.str());
}

void Call::expect_element(const std::string& name, const ConstTensor& q) const {
  if (!is_float(q.dtype)) reject(TRIAD_NSA_ERROR_ARGUMENT, "{} is {}, not floats", name, q.str());
  if (ctx.device.is_cuda() && q.dtype == DType::f64)
    reject(TRIAD_NSA_ERROR_UNSUPPORTED, "{} is {}: GPUs compute bf16 and f32", name, q.str());
}

Documents Call::documents(const triad_nsa_documents* d, int64_t B, int64_t T, Scratch::Scope& scope) const {
  if (d == nullptr || d->count == 0 || B * T == 0) return {};
  constexpr int64_t kMost = int64_t{1} << 31;
  if (d->count < 0 || d->count >= kMost || d->max_per_row < 0)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "documents: count is {} and max_per_row {}", d->count, d->max_per_row);
  if (B * T >= kMost)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "documents: {} rows of {} tokens pass the 2^31 - 1 that i32 bounds can count", B,
           T);
  const int64_t most = std::min(max_documents(*d), T);
  Tensor bounds(nullptr, DType::i32, {d->count + 1}, context_.device);
  bounds.data = address("documents.cu_seqlens", const_cast<int32_t*>(d->cu_seqlens), DType::i32, d->count + 1);
  if (!planning() && !ctx.device.is_cuda()) check_host_bounds(d->cu_seqlens, d->count, B, T, most);
  const auto table = [&](int64_t n) { return scope.alloc(DType::i32, {B, n}); };
  const DocumentTables tables{table(T), table(T), table(T), table(block_ids(T, options.l_sel, most))};
  nsa_document_tables(ctx, tables, bounds, options.l_sel);
  return tables;
}

void check_host_bounds(const int32_t* bounds, int64_t count, int64_t B, int64_t T, int64_t most) {
  int64_t n = count + 1;
  while (n > 2 && bounds[n - 1] == B * T && bounds[n - 2] == B * T) --n;  // repeated B * T at the end
  try {
    check_bounds(std::span(bounds, static_cast<size_t>(n)), B, T, most);
  } catch (const UsageError& e) { reject(TRIAD_NSA_ERROR_BOUNDS, "{}", e.what()); }
}

std::vector<int32_t> on_host(const triad_nsa_context& c, void* stream, const void* from, int64_t count) {
  std::vector<int32_t> host(static_cast<size_t>(count));
  const CurrentDevice current(c.device);
  try {
    backend::copy(reinterpret_cast<std::byte*>(host.data()), Device::cpu(), static_cast<const std::byte*>(from),
                  c.device, static_cast<int64_t>(host.size() * sizeof(int32_t)), stream);
    if (c.device.is_cuda()) backend::synchronize(c.device, stream);
  } catch (const Error& e) { reject(TRIAD_NSA_ERROR_CUDA, "{}", e.what()); }
  return host;
}

std::vector<int32_t> host_bounds(const triad_nsa_context& c, void* stream, int64_t B, int64_t T,
                                 const triad_nsa_documents& d) {
  if (d.cu_seqlens == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "documents.cu_seqlens is NULL");
  std::vector<int32_t> host = on_host(c, stream, d.cu_seqlens, d.count + 1);
  check_host_bounds(host.data(), d.count, B, T, max_documents(d));
  return host;
}

}  // namespace triad::library

extern "C" void triad_nsa_default_options(triad_nsa_options* options) {
  if (options == nullptr) return;
  *options = {};
  options->struct_size = sizeof *options;
  options->compress_length = 32, options->compress_stride = 16;
  options->block = 64, options->selected = 16, options->window = 512;
  options->init_blocks = 1, options->local_blocks = 2;
}
