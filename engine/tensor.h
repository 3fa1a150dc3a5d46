// Tensor: a non-owning, trivially copyable view of device or host memory. Rank <= 5, int64 sizes and strides (in
// elements), innermost stride 1. Owners are Arena and Scratch (memory.h). ConstTensor is the same for read-only data.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "engine/device.h"
#include "engine/dtype.h"

namespace triad {

inline constexpr int kMaxRank = 5;

struct Shape {
  std::array<int64_t, kMaxRank> dim{};
  int8_t rank = 0;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  int64_t operator[](int i) const { return dim[i < 0 ? rank + i : i]; }
  int64_t numel() const;
  std::string str() const;  // "[2,3,4]"
  friend bool operator==(const Shape&, const Shape&) = default;
};

template <bool kConst>
struct BasicTensor {
  using Byte = std::conditional_t<kConst, const std::byte, std::byte>;
  template <class T>
  using Elem = std::conditional_t<kConst, const T, T>;

  Byte* data = nullptr;
  std::array<int64_t, kMaxRank> dim{}, stride{};
  int8_t rank = 0;
  DType dtype = DType::f32;
  Device device;

  BasicTensor() = default;
  BasicTensor(Byte* data, DType dtype, const Shape& shape, Device device);  // a contiguous view
  template <bool kOther>
  requires(kConst && !kOther)
      BasicTensor(const BasicTensor<kOther>& t)  // NOLINT: implicit, so that a Tensor can be passed as a ConstTensor
      : data(t.data), dim(t.dim), stride(t.stride), rank(t.rank), dtype(t.dtype), device(t.device) {}

  // True for an absent tensor (an optional argument not given). A tensor with a size-0 axis is not absent.
  bool empty() const { return rank == 0; }
  int64_t size(int i) const { return dim[i < 0 ? rank + i : i]; }
  int64_t numel() const;
  int64_t bytes() const { return numel() * size_of(dtype); }
  Shape shape() const;
  bool contiguous() const;
  std::string str() const;  // "f32[2,3] on cpu"

  // Typed pointer to the first element; throws unless T is the tensor's dtype.
  template <class T>
  Elem<T>* ptr() const {
    if (dtype != dtype_of<T>) throw_dtype(dtype_of<T>);
    return reinterpret_cast<Elem<T>*>(data);
  }
  // The elements [begin, end) along an axis, with the same strides.
  BasicTensor slice(int axis, int64_t begin, int64_t end) const;
  // Element i along the outermost axis: a view with rank - 1.
  BasicTensor operator[](int64_t i) const;
  // The same elements under another shape. Any axis may be split; axes may be merged if their strides allow it. Throws
  // if a copy would be needed.
  BasicTensor view(const Shape& shape) const;

 private:
  [[noreturn]] void throw_dtype(DType wanted) const;
};

using Tensor = BasicTensor<false>;
using ConstTensor = BasicTensor<true>;

// Throws with `what` in the message unless the tensor has this shape and dtype.
void check_tensor(const char* what, const ConstTensor& t, const Shape& shape, DType dtype);

}  // namespace triad
