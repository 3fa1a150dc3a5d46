// dispatch_float: calls a template with a float dtype's C++ type.
#pragma once
#include "engine/check.h"
#include "engine/dtype.h"

namespace triad {

// Calls f.template operator()<T>() with T = double, float or bf16; throws for any other dtype:
//   dispatch_float(x.dtype, [&]<class T>() { ... });
template <class F>
decltype(auto) dispatch_float(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f64:
      return f.template operator()<double>();
    case DType::f32:
      return f.template operator()<float>();
    case DType::bf16:
      return f.template operator()<bf16>();
    default:
      fail("an op for floats was given {}", name_of(dtype));
  }
}

}  // namespace triad
