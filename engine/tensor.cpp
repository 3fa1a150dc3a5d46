#include "engine/tensor.h"

#include <fmt/format.h>

#include "engine/check.h"

namespace triad {

Shape::Shape(std::initializer_list<int64_t> dims) {
  TRIAD_CHECK(dims.size() <= kMaxRank, "a tensor has at most {} axes, not {}", kMaxRank, dims.size());
  for (int64_t d : dims) {
    TRIAD_CHECK(d >= 0, "axis {} of a tensor has the negative size {}", int{rank}, d);
    dim[rank++] = d;
  }
}

int64_t Shape::numel() const {
  int64_t n = 1;
  for (int i = 0; i < rank; ++i)
    TRIAD_CHECK(!__builtin_mul_overflow(n, dim[i], &n), "a tensor {} has more elements than 2^63", str());
  return n;
}

std::string Shape::str() const { return fmt::format("[{}]", fmt::join(dim.begin(), dim.begin() + rank, ",")); }

template <bool kConst>
BasicTensor<kConst>::BasicTensor(Byte* data, DType dtype, const Shape& shape, Device device)
    : data(data), dim(shape.dim), rank(shape.rank), dtype(dtype), device(device) {
  int64_t s = 1;
  for (int i = rank - 1; i >= 0; --i) {
    stride[i] = s;
    s *= dim[i];
  }
}

template <bool kConst>
int64_t BasicTensor<kConst>::numel() const {
  return empty() ? 0 : shape().numel();
}

template <bool kConst>
Shape BasicTensor<kConst>::shape() const {
  Shape s;
  s.dim = dim;
  s.rank = rank;
  return s;
}

template <bool kConst>
bool BasicTensor<kConst>::contiguous() const {
  int64_t s = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (dim[i] != 1 && stride[i] != s) return false;
    s *= dim[i];
  }
  return true;
}

template <bool kConst>
std::string BasicTensor<kConst>::str() const {
  return empty() ? "absent" : fmt::format("{}{} on {}", name_of(dtype), shape().str(), device.str());
}

template <bool kConst>
void BasicTensor<kConst>::throw_dtype(DType wanted) const {
  fail("a tensor {} was read as {}", str(), name_of(wanted));
}

template <bool kConst>
BasicTensor<kConst> BasicTensor<kConst>::slice(int axis, int64_t begin, int64_t end) const {
  if (axis < 0) axis += rank;
  TRIAD_CHECK(axis >= 0 && axis < rank && 0 <= begin && begin <= end && end <= dim[axis],
              "slice [{}, {}) of axis {} is outside of {}", begin, end, axis, str());
  BasicTensor t = *this;
  t.data += begin * stride[axis] * size_of(dtype);
  t.dim[axis] = end - begin;
  return t;
}

template <bool kConst>
BasicTensor<kConst> BasicTensor<kConst>::operator[](int64_t i) const {
  BasicTensor t = slice(0, i, i + 1);
  for (int a = 1; a < rank; ++a) t.dim[a - 1] = t.dim[a], t.stride[a - 1] = t.stride[a];
  t.dim[--t.rank] = 0;
  t.stride[t.rank] = 0;
  return t;
}

// Computes the new shape's strides by matching new axes to old ones, innermost first. A new axis takes its elements
// from the current old axis, and from the next one when the current one is used up. A new axis that spans two old axes
// needs their elements to be evenly spaced.
template <bool kConst>
BasicTensor<kConst> BasicTensor<kConst>::view(const Shape& to) const {
  TRIAD_CHECK(to.numel() == shape().numel(), "{} cannot be viewed as {}: the counts differ", str(), to.str());
  BasicTensor t(data, dtype, to, device);
  if (contiguous() || to.numel() == 0) return t;
  int old_axis = rank - 1;
  int64_t left = dim[old_axis], step = stride[old_axis];
  for (int i = to.rank - 1; i >= 0; --i) {
    while (left == 1 && old_axis > 0) left = dim[--old_axis], step = stride[old_axis];
    t.stride[i] = step;
    int64_t need = to.dim[i];
    while (need > left) {  // merges the next old axis, which must continue this one
      TRIAD_CHECK(need % left == 0 && old_axis > 0 && stride[old_axis - 1] == step * left,
                  "{} cannot be viewed as {} without a copy", str(), to.str());
      need /= left;
      step *= left;
      left = dim[--old_axis];
    }
    TRIAD_CHECK(left % need == 0, "{} cannot be viewed as {} without a copy", str(), to.str());
    left /= need;
    step *= need;
  }
  return t;
}

template struct BasicTensor<false>;
template struct BasicTensor<true>;

void check_tensor(const char* what, const ConstTensor& t, const Shape& shape, DType dtype) {
  TRIAD_CHECK(t.shape() == shape && t.dtype == dtype, "{} is {}, not {}{}", what, t.str(), name_of(dtype), shape.str());
}

}  // namespace triad
