// Matrix products on the CPU through CBLAS, and the route's choice on a GPU. D is cut into tiles that depend on the
// shape alone, and each tile is one gemm on one thread. So results have the same bits on any number of threads, and no
// OpenBLAS threads compete for cores.
#include "kernels/ops/matmul.h"

#include <cblas.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>
#include <vector>

#include "engine/check.h"
#include "engine/op_scope.h"
#include "engine/process/cpu_threads.h"
#include "kernels/common/parallel.h"
#include "kernels/common/route.h"
#include "kernels/ops/cast.h"

// Allocate and free one running gemm's work buffer. OpenBLAS exports these functions but declares them in no header.
extern "C" {
void* blas_memory_alloc(int position);
void blas_memory_free(void* buffer);
}

namespace triad {

namespace {

struct Size {
  int64_t M, N, K;
};

Size check_matmul(const ConstTensor& d, const ConstTensor& a, const ConstTensor& b, const MatmulOptions& o,
                  const ConstTensor& addend) {
  for (const ConstTensor* t : {&d, &a, &b})
    TRIAD_CHECK(t->rank == 2, "matmul: {} is not a matrix (D {}, A {}, B {})", t->str(), d.str(), a.str(), b.str());
  const Size s = {d.size(0), d.size(1), a.size(o.trans_a ? 0 : 1)};
  check_tensor("matmul's A", a, o.trans_a ? Shape{s.K, s.M} : Shape{s.M, s.K}, a.dtype);
  check_tensor("matmul's B", b, o.trans_b ? Shape{s.N, s.K} : Shape{s.K, s.N}, a.dtype);
  TRIAD_CHECK(is_float(a.dtype) && (d.dtype == a.dtype || d.dtype == acc_dtype(a.dtype)),
              "matmul: D of {} cannot take a product of {}", name_of(d.dtype), name_of(a.dtype));
  if (!addend.empty()) {
    check_tensor("matmul's addend", addend, d.shape(), d.dtype);
    TRIAD_CHECK(!o.accumulate, "matmul: both accumulate and an addend {}", addend.str());
  }
  for (const ConstTensor* t : {&d, &a, &b, &addend}) {
    if (t->empty()) continue;
    TRIAD_CHECK(t->stride[1] == 1 || t->size(1) <= 1, "matmul: the columns of {} are {} apart", t->str(), t->stride[1]);
    TRIAD_CHECK(leading_dimension(*t) >= t->size(1) || (t == &addend && is_repeated_row(*t)),
                "matmul: the rows of {} overlap, {} apart", t->str(), t->stride[0]);
    // CBLAS takes sizes as int.
    TRIAD_CHECK(std::max(t->size(0), leading_dimension(*t)) <= INT_MAX, "matmul: {} is too large", t->str());
  }
  return s;
}

// Makes OpenBLAS run the calling thread's gemms on that thread alone. OpenBLAS has one setting per process if built
// with pthreads; built with OpenMP it reads omp_get_max_threads(), a setting per thread.
void make_blas_single_threaded() {
  static const bool once = (openblas_set_num_threads(1), true);
  static thread_local const bool once_here = (omp_set_num_threads(1), once);
  static_cast<void>(once_here);
}

// The part of a product that one gemm computes: its rows and columns in D, and how much of K it sums over.
struct Tile {
  int64_t rows, cols, depth;
};

// Chooses the tile from the shape alone. Larger tiles repack operands less often; 16 tiles (32 for large products) keep
// a desktop machine's cores busy. If D is small and K is long, as for weight gradients, K is cut instead.
Tile choose_tile(const Size& s) {
  constexpr int64_t kLargest = 512, kSmallest = 128, kShallowest = 512;
  constexpr double kLargeProduct = 1e9;  // multiply-adds in a large product
  const bool large = static_cast<double>(s.M) * static_cast<double>(s.N) * static_cast<double>(s.K) > kLargeProduct;
  const int64_t enough = large ? 32 : 16;
  const auto first = [&](int64_t n) {
    return std::min(kLargest, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(n))));
  };
  Tile t{first(s.M), first(s.N), s.K};
  const auto tiles = [&] { return ceil_div(s.M, t.rows) * ceil_div(s.N, t.cols); };
  while (tiles() < enough && std::max(t.rows, t.cols) > kSmallest) (t.rows >= t.cols ? t.rows : t.cols) /= 2;
  const int64_t cuts = std::min(s.K / kShallowest, enough / tiles());
  if (cuts > 1) t.depth = ceil_div(s.K, cuts);
  return t;
}

template <class T>
struct Matrix {
  explicit Matrix(const ConstTensor& t) : data(t.ptr<T>()), ld(leading_dimension(t)) {}
  const T* at(int64_t row, int64_t col) const { return data + row * ld + col; }
  const T* data;
  int64_t ld;
};

template <class T>
void gemm(const MatmulOptions& o, int m, int n, int k, const T* a, int lda, const T* b, int ldb, T beta, T* d,
          int ldd) {
  const CBLAS_TRANSPOSE ta = o.trans_a ? CblasTrans : CblasNoTrans, tb = o.trans_b ? CblasTrans : CblasNoTrans;
  const T alpha = static_cast<T>(o.alpha);
  make_blas_single_threaded();
  if constexpr (std::is_same_v<T, double>) {
    cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, d, ldd);
  } else {
    cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, d, ldd);
  }
}

// Makes OpenBLAS allocate the work buffers for this many concurrent gemms; it keeps them for later ones.
void allocate_blas_buffers(int64_t gemms) {
  constexpr int64_t kMiB = int64_t{1} << 20, kBufferMiB = 128;  // MiB per buffer in OpenBLAS's x86-64 builds
  const auto bytes = static_cast<size_t>(gemms * kBufferMiB * kMiB);
  void* const room = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TRIAD_CHECK(room != MAP_FAILED,
              "matmul: OpenBLAS takes {} MiB of addresses for each of {} threads, and this process may not have them: "
              "raise its limit (ulimit -v) or lower OMP_NUM_THREADS",
              kBufferMiB, gemms);
  munmap(room, bytes);
  std::vector<void*> buffers;
  for (int64_t i = 0; i < gemms; ++i) buffers.push_back(blas_memory_alloc(0));
  for (void* buffer : buffers) blas_memory_free(buffer);
}

// Split-K: computes one product per K piece into scratch, then adds the products in order. base: the addend, or null.
template <class T>
void multiply_in_depth(Context& ctx, Tensor d, const Matrix<T>& A, const Matrix<T>& B, const Size& s, const Tile& tile,
                       const MatmulOptions& o, const Matrix<T>* base) {
  Scratch::Scope scope(ctx.scratch);
  const int64_t cuts = ceil_div(s.K, tile.depth), across = ceil_div(s.N, tile.cols);
  const int64_t tiles = ceil_div(s.M, tile.rows) * across;
  const Tensor partials = scope.alloc(dtype_of<T>, {cuts, s.M, s.N});
  parallel_for(ctx, cuts * tiles, [&](int64_t i) {
    const int64_t cut = i / tiles, row = i % tiles / across * tile.rows, col = i % across * tile.cols;
    const int64_t from = cut * tile.depth, m = std::min(tile.rows, s.M - row), n = std::min(tile.cols, s.N - col);
    gemm<T>(o, m, n, std::min(tile.depth, s.K - from), o.trans_a ? A.at(from, row) : A.at(row, from), A.ld,
            o.trans_b ? B.at(col, from) : B.at(from, col), B.ld, T{0},
            partials.ptr<T>() + (cut * s.M + row) * s.N + col, s.N);
  });
  const int64_t ldd = leading_dimension(d);
  parallel_for(ctx, s.M, [&](int64_t row) {
    T* const to = d.ptr<T>() + row * ldd;
    for (int64_t cut = 0; cut < cuts; ++cut) {
      const T* const part = partials.ptr<T>() + (cut * s.M + row) * s.N;
      const T* const before = cut > 0 ? to : base != nullptr ? base->at(row, 0) : nullptr;
#pragma omp simd
      for (int64_t j = 0; j < s.N; ++j) to[j] = before == nullptr ? part[j] : before[j] + part[j];
    }
  });
}

// The product for operands of type T, double or float.
template <class T>
void multiply(Context& ctx, Tensor d, ConstTensor a, ConstTensor b, const Size& s, const MatmulOptions& o,
              ConstTensor addend) {
  allocate_matmul_buffers();
  const Tile tile = choose_tile(s);
  const Matrix<T> A(a), B(b), Addend(addend.empty() ? ConstTensor(d) : addend);
  T* const D = d.ptr<T>();
  const int64_t ldd = leading_dimension(d);
  if (tile.depth < s.K)
    return multiply_in_depth<T>(ctx, d, A, B, s, tile, o, o.accumulate || !addend.empty() ? &Addend : nullptr);
  const bool copy_addend = !addend.empty() && addend.data != d.data;
  const T beta = o.accumulate || !addend.empty() ? T{1} : T{0};
  const int64_t tiles_down = ceil_div(s.M, tile.rows), tiles_across = ceil_div(s.N, tile.cols);
  parallel_for(ctx, tiles_down * tiles_across, [&](int64_t i) {
    const int64_t row = i / tiles_across * tile.rows, col = i % tiles_across * tile.cols;
    const int64_t m = std::min(tile.rows, s.M - row), n = std::min(tile.cols, s.N - col);
    if (copy_addend)
      for (int64_t r = row; r < row + m; ++r) std::memcpy(D + r * ldd + col, Addend.at(r, col), n * sizeof(T));
    gemm<T>(o, m, n, s.K, o.trans_a ? A.at(0, row) : A.at(row, 0), A.ld, o.trans_b ? B.at(col, 0) : B.at(0, col), B.ld,
            beta, D + row * ldd + col, ldd);
  });
}

// Returns a bf16 matrix's float copy, in the scope's scratch.
Tensor upcast_matrix(Context& ctx, Scratch::Scope& scope, ConstTensor x) {
  const Tensor copy = scope.alloc(DType::f32, x.shape());
  const Matrix<bf16> from(x);
  float* const to = copy.ptr<float>();
  const int64_t cols = x.size(1);
  parallel_for(ctx, x.size(0), [&](int64_t r) { std::copy_n(from.at(r, 0), cols, to + r * cols); });
  return copy;
}

void multiply_bf16(Context& ctx, Tensor d, ConstTensor a, ConstTensor b, const Size& s, const MatmulOptions& o,
                   ConstTensor addend) {
  Scratch::Scope scope(ctx.scratch);
  const Tensor a_f32 = upcast_matrix(ctx, scope, a), b_f32 = upcast_matrix(ctx, scope, b);
  if (d.dtype == DType::f32) return multiply<float>(ctx, d, a_f32, b_f32, s, o, addend);
  const Tensor d_f32 = scope.alloc(DType::f32, d.shape());
  MatmulOptions product = o;
  product.accumulate = false;
  multiply<float>(ctx, d_f32, a_f32, b_f32, s, product, {});
  if (o.accumulate) addend = d;
  bf16* const D = d.ptr<bf16>();
  const int64_t ldd = leading_dimension(d);
  const float* const sums = d_f32.ptr<float>();
  const bool has_addend = !addend.empty();
  const Matrix<bf16> Addend(has_addend ? addend : ConstTensor(d));
  parallel_for(ctx, s.M, [&](int64_t r) {
    for (int64_t c = 0; c < s.N; ++c)
      D[r * ldd + c] = bf16(sums[r * s.N + c] + (has_addend ? static_cast<float>(*Addend.at(r, c)) : 0.0f));
  });
}

// Multiplies by cuBLASLt and records the call. The record has the shapes from the last Routes::set_call() and one of
// these algorithm names:
//   cublaslt measured  the algorithm that matmul_tuned.h names for these sizes
//   cublaslt           the algorithm that cuBLASLt's heuristic lists first. The call is a fallback if matmul_tuned.h
//                      names an algorithm, but cuBLASLt cannot run it.
//   cublaslt first     the same algorithm, because runtime.kernels.matmul is general
//   reference          the same algorithm, for a product of f32 operands or f32 copies
void multiply_cublaslt(Context& ctx, Tensor d, ConstTensor a, ConstTensor b, const MatmulOptions& o,
                       ConstTensor addend) {
  if constexpr (kBuiltWithCuda) {
    using cuda::MatmulAlgorithm;
    const MatmulAlgorithm algorithm = cuda::matmul(ctx, d, a, b, o, addend);
    const KernelChoice choice = ctx.routes.wanted("matmul");
    const char* const kernel = algorithm == MatmulAlgorithm::measured ? "cublaslt measured"
                               : choice == KernelChoice::general      ? "cublaslt first"
                               : choice == KernelChoice::reference    ? "reference"
                                                                      : "cublaslt";
    const bool is_refused = algorithm == MatmulAlgorithm::refused;
    ctx.routes.record("matmul", kernel, is_refused ? "cuBLASLt cannot run the algorithm of ops/matmul_tuned.h" : "");
  }
}

// The product on a GPU, by runtime.kernels.matmul. automatic and fused use matmul_tuned.h's algorithm if it names one
// that cuBLASLt can run, otherwise the first in cuBLASLt's heuristic. general always uses the heuristic's first.
// reference multiplies f32 operand copies without tensor cores and rounds once.
void multiply_cuda(Context& ctx, Tensor d, ConstTensor a, ConstTensor b, const MatmulOptions& o, ConstTensor addend) {
  ctx.routes.set_call(d, a);
  dispatch_route(
      ctx, "matmul", a.dtype, [&](Context& on) { multiply_cublaslt(on, d, a, b, o, addend); },
      [&](Context& on) {
        Scratch::Scope scope(on.scratch);
        const ConstTensor a_f32 = upcasted(on, scope, a), b_f32 = upcasted(on, scope, b);
        if (d.dtype == DType::f32) return multiply_cublaslt(on, d, a_f32, b_f32, o, addend);
        const Tensor d_f32 = scope.alloc(DType::f32, d.shape());
        MatmulOptions without_addition = o;
        without_addition.accumulate = false;
        multiply_cublaslt(on, d_f32, a_f32, b_f32, without_addition, {});
        downcast(on, d, d_f32, o.accumulate ? ConstTensor(d) : addend);
      });
}

}  // namespace

void allocate_matmul_buffers() {
  static const bool once = (allocate_blas_buffers(cpu_threads()), true);
  static_cast<void>(once);
}

void matmul(Context& ctx, Tensor d, ConstTensor a, ConstTensor b, const MatmulOptions& options, ConstTensor addend) {
  const OpScope op_scope(ctx, "matmul");
  const Size s = check_matmul(d, a, b, options, addend);
  if (s.M == 0 || s.N == 0) return;
  if (s.K == 0) {  // the sum is empty; not every BLAS accepts K = 0
    if (options.accumulate) return;
    return addend.empty() ? zero(ctx, d) : copy(ctx, d, addend);
  }
  if (ctx.device.is_cuda()) return multiply_cuda(ctx, d, a, b, options, addend);
  record_cpu(ctx, "matmul", d, a);
  switch (a.dtype) {
    case DType::f64:
      return multiply<double>(ctx, d, a, b, s, options, addend);
    case DType::f32:
      return multiply<float>(ctx, d, a, b, s, options, addend);
    default:
      return multiply_bf16(ctx, d, a, b, s, options, addend);
  }
}

void matmul_batched(Context& ctx, Tensor d, ConstTensor a, ConstTensor b, const MatmulOptions& options,
                    ConstTensor addend) {
  ConstTensor out = d;
  for (const ConstTensor* t : {&out, &a, &b, &addend})
    TRIAD_CHECK(t->empty() || (t->rank == 3 && t->contiguous() && t->size(0) == d.size(0) && t->dtype == d.dtype),
                "matmul_batched: D {}, A {}, B {}, addend {}: contiguous [n, ...] of one dtype are needed", d.str(),
                a.str(), b.str(), addend.empty() ? "none" : addend.str());
  TRIAD_CHECK(!options.accumulate, "matmul_batched: accumulate with D {}: an addend is possible", d.str());
  const auto of = [&](int64_t i) { return addend.empty() ? addend : addend[i]; };
  if (ctx.device.is_cuda() && d.numel() > 0 && a.numel() > 0) {
    if (ctx.routes.wanted("matmul") != KernelChoice::reference) {
      const OpScope op_scope(ctx, "matmul");
      check_matmul(d[0], a[0], b[0], options, of(0));
      ctx.routes.set_call(d[0], a[0]);
      const auto product = [&](Context& on) { multiply_cublaslt(on, d, a, b, options, addend); };
      return dispatch_route(ctx, "matmul", d.dtype, product, product);
    }
  }
  for (int64_t i = 0; i < d.size(0); ++i) matmul(ctx, d[i], a[i], b[i], options, of(i));
}

ConstTensor repeat_row(ConstTensor row, int64_t N) {
  if (row.empty()) return row;
  TRIAD_CHECK(row.rank == 1, "repeat_row: {} is not one row", row.str());
  ConstTensor rows = row.view({1, row.size(0)});
  rows.dim[0] = N, rows.stride[0] = 0;
  return rows;
}

void linear_forward(Context& ctx, Tensor y, ConstTensor x, ConstTensor w, ConstTensor addend) {
  matmul(ctx, y, x, w, {.trans_b = true}, addend);
}

void linear_backward(Context& ctx, Tensor dx, Tensor dw, ConstTensor dy, ConstTensor x, ConstTensor w, bool add) {
  TRIAD_CHECK(dw.shape() == w.shape(), "linear: the gradient of w {} is {}", w.str(), dw.str());
  if (!dx.empty()) linear_backward_input(ctx, dx, dy, w);
  linear_backward_weight(ctx, dw, dy, x, add);
}

void linear_backward_input(Context& ctx, Tensor dx, ConstTensor dy, ConstTensor w) { matmul(ctx, dx, dy, w); }

void linear_backward_weight(Context& ctx, Tensor dw, ConstTensor dy, ConstTensor x, bool add) {
  TRIAD_CHECK(dw.dtype == acc_dtype(dy.dtype), "linear: the gradient of weights {} from {}", dw.str(), dy.str());
  matmul(ctx, dw, dy, x, {.trans_a = true, .accumulate = add});
}

std::string matmul_libraries(Device device) {
  std::string text = openblas_get_config();
  if (device.is_cuda())
    if constexpr (kBuiltWithCuda) text += ", " + cuda::matmul_library();
  return text;
}

}  // namespace triad
