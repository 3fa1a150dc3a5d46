// Matrix products on the GPU through cuBLASLt: bf16 on tensor cores with fp32 sums, f32 in true fp32.
//
// cuBLASLt is column-major. The row-major D = op(A) op(B) is the column-major D^T = op(B)^T op(A)^T, and a row-major
// matrix that is read as column-major is already its transpose. So the operands swap, M and N swap, and no data moves.
//
// Results have the same bits in every run. The algorithm is a pure function of the problem: the one that matmul_tuned.h
// names, otherwise the first in cuBLASLt's heuristic; nothing is timed at run time. With split-K, several CTAs compute
// parts of the same sum. Only one of cuBLASLt's schemes is used: it stores these parts in fp32 in the workspace and
// adds them in a fixed order. Other schemes add the parts to D, and would round them to D's bf16.
//
// Products of e4m3 (linear_fp8.h) exist in one form only, both operands with K along their rows, and multiply each sum
// by the scales of its row and column.
#include "kernels/ops/matmul.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <optional>

#include "kernels/common/launch.cuh"
#include "kernels/ops/linear_fp8.h"
#include "kernels/ops/matmul_tuned.h"

// Scales for each row came with CUDA 12.9.
#define TRIAD_CUBLASLT_HAS_ROW_SCALES (CUBLAS_VER_MAJOR > 12 || (CUBLAS_VER_MAJOR == 12 && CUBLAS_VER_MINOR >= 9))

namespace triad::cuda {

namespace {

// cuBLASLt's functions. Loading the library takes a tenth of a second. The first product or the first version query
// loads it, so that a program that needs neither, such as `triad plan`, starts without it.
struct CublasLtFunctions {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtGetStatusString) status_string;
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtMatrixLayoutInit_internal) layout_init;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatmulDescInit_internal) product_init;
  decltype(&cublasLtMatmulDescSetAttribute) product_set;
  decltype(&cublasLtMatmulPreferenceInit_internal) preference_init;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoInit) algorithm_init;
  decltype(&cublasLtMatmulAlgoConfigSetAttribute) algorithm_set;
  decltype(&cublasLtMatmulAlgoCheck) algorithm_check;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmul) matmul;
};

// Looks in the machine's library paths, then where the build found the library.
CublasLtFunctions load_cublaslt() {
  const std::string name = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
  if (dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    const std::string why = dlerror();
    if (dlopen(TRIAD_CUBLASLT_LIBRARY, RTLD_NOW | RTLD_GLOBAL) == nullptr)
      fail("{} (it comes with the CUDA Toolkit; its folder may have to be in LD_LIBRARY_PATH); {}", why, dlerror());
  }
  CublasLtFunctions lt{};
  const auto find = [&]<class F>(F& function, const char* symbol) {
    function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, symbol));
    if (function == nullptr) fail("{} has no {}", name, symbol);
  };
  find(lt.create, "cublasLtCreate");
  find(lt.destroy, "cublasLtDestroy");
  find(lt.status_string, "cublasLtGetStatusString");
  find(lt.version, "cublasLtGetVersion");
  find(lt.layout_init, "cublasLtMatrixLayoutInit_internal");
  find(lt.layout_set, "cublasLtMatrixLayoutSetAttribute");
  find(lt.product_init, "cublasLtMatmulDescInit_internal");
  find(lt.product_set, "cublasLtMatmulDescSetAttribute");
  find(lt.preference_init, "cublasLtMatmulPreferenceInit_internal");
  find(lt.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  find(lt.algorithm_init, "cublasLtMatmulAlgoInit");
  find(lt.algorithm_set, "cublasLtMatmulAlgoConfigSetAttribute");
  find(lt.algorithm_check, "cublasLtMatmulAlgoCheck");
  find(lt.heuristic, "cublasLtMatmulAlgoGetHeuristic");
  find(lt.matmul, "cublasLtMatmul");
  return lt;
}
const CublasLtFunctions& cublaslt() {
  static const CublasLtFunctions loaded = load_cublaslt();
  return loaded;
}

void check_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) fail("{}: {}", call, cublaslt().status_string(status));
}

// One operand as cuBLASLt describes it, column-major.
struct Operand {
  Operand(const ConstTensor& t)  // NOLINT: implicit, so that a tensor can be passed as an Operand
      : Operand(t.rank == 3 ? t[0] : t, t.rank == 3 ? t.size(0) : 1, t.rank == 3 && t.size(0) > 1 ? t.stride[0] : 0) {}
  Operand(const ConstTensor& matrix, int64_t count, int64_t distance)
      : rows(matrix.size(1)),
        cols(matrix.size(0)),
        ld(leading_dimension(matrix)),
        dtype(matrix.dtype),
        alignment(alignment_of(matrix.data)),
        batch(count),
        batch_stride(distance) {
    if (batch == 1) return;
    const int64_t bytes = batch_stride * size_of(dtype);  // every matrix has this alignment
    alignment = static_cast<int32_t>(std::min<int64_t>(alignment, bytes & -bytes));
  }
  static int32_t alignment_of(const void* p) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(p);
    return static_cast<int32_t>(std::min<uintptr_t>(address & ~(address - 1), kMemAlign));
  }
  auto operator<=>(const Operand&) const = default;

  int64_t rows, cols, ld;
  DType dtype;
  int32_t alignment;            // the first element's alignment in bytes, on which vector loads depend
  int64_t batch, batch_stride;  // matrix count; elements from one to the next
};

// A plan's key: everything on which the algorithm choice depends. beta is not in it, and C is D if there is no addend,
// or if the addend is a bias, which the epilogue adds.
struct Problem {
  bool may_be_tuned;  // whether the call may take an algorithm from matmul_tuned.h
  bool trans_a, trans_b;
  Operand a, b, c, d;
  int32_t bias_alignment;                // the bias's alignment in bytes; 0: no bias
  Fp8Sums fp8_sums = Fp8Sums::accurate;  // sums of e4m3 operands
  bool one_scale = false;                // e4m3 operands have one scale each, else one for each row
  auto operator<=>(const Problem&) const = default;
};

// What a call's plan points to besides the matrices. bias: one element per row of cuBLASLt's D, or nullptr. a_scale,
// b_scale: of e4m3 operands, one per column of cuBLASLt's A and B.
struct Pointers {
  const void* bias = nullptr;
  const float *a_scale = nullptr, *b_scale = nullptr;
};

// A cuBLASLt problem with its algorithm, as plain values without handles to release. `kind` tells how the algorithm was
// chosen.
struct Plan {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a, b, c, d;
  cublasLtMatmulAlgo_t algorithm;
  MatmulAlgorithm kind = MatmulAlgorithm::first;
};

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return CUDA_R_32F;
    case DType::bf16:
      return CUDA_R_16BF;
    case DType::u8:
      return CUDA_R_8F_E4M3;
    default:
      fail("matmul of {} does not run on the GPU: f32 and bf16 do", name_of(dtype));
  }
}

void init_layout(cublasLtMatrixLayoutOpaque_t& layout, const Operand& o) {
  check_cublas(cublaslt().layout_init(&layout, sizeof layout, cuda_type(o.dtype), o.rows, o.cols, o.ld), "a layout");
  if (o.batch == 1) return;
  const auto count = static_cast<int32_t>(o.batch);
  const auto set_layout = [&](cublasLtMatrixLayoutAttribute_t attribute, const auto& value) {
    check_cublas(cublaslt().layout_set(&layout, attribute, &value, sizeof(value)), "an attribute of a layout");
  };
  set_layout(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count);
  set_layout(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, o.batch_stride);
}

// The cuBLASLt handle, its workspace and the plans made so far. The workspace is allocated with the handle, outside the
// arena (see kMatmulWorkspaceBytes), and freed with it.
class CublasLt final : public BlasHandle {
 public:
  explicit CublasLt(Device device) : device_(device) {
    workspace_ = backend::allocate(device, kMatmulWorkspaceBytes);
    const cublasStatus_t status = cublaslt().create(&handle_);
    if (status == CUBLAS_STATUS_SUCCESS) return;
    backend::deallocate(device, workspace_);
    fail("cublasLtCreate on {}: {}", device.str(), cublaslt().status_string(status));
  }
  ~CublasLt() override {
    cublaslt().destroy(handle_);
    backend::deallocate(device_, workspace_);
  }
  CublasLt(const CublasLt&) = delete;

  static CublasLt& of(Context& ctx) {
    if (!ctx.blas) ctx.blas = std::make_unique<CublasLt>(ctx.device);
    return static_cast<CublasLt&>(*ctx.blas);
  }

  Plan& plan(const Problem& problem, const Pointers& pointers) {
    const auto found = plans_.find(problem);
    if (found == plans_.end()) return plans_.emplace(problem, make_plan(problem, pointers)).first->second;
    set_pointers(found->second, pointers);
    return found->second;
  }

  cublasLtHandle_t handle() const { return handle_; }
  void* workspace() const { return workspace_; }

 private:
  Plan make_plan(const Problem& problem, const Pointers&) const;
  static void set_pointers(Plan& plan, const Pointers&);
  static void set_fp8(Plan& plan, const Problem&);
  MatmulAlgorithm use_tuned(Plan& plan, const Problem& problem) const;

  Device device_;
  cublasLtHandle_t handle_ = nullptr;
  std::byte* workspace_ = nullptr;
  std::map<Problem, Plan> plans_;
};

template <class Value>
void set(cublasLtMatmulDescOpaque_t& desc, cublasLtMatmulDescAttributes_t attribute, Value value) {
  check_cublas(cublaslt().product_set(&desc, attribute, &value, sizeof(value)), "an attribute of a product");
}
template <class Value>
void set(cublasLtMatmulPreferenceOpaque_t& preference, cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
  check_cublas(cublaslt().preference_set(&preference, attribute, &value, sizeof(value)), "a preference");
}

template <class Value>
void set(cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute, Value value) {
  check_cublas(cublaslt().algorithm_set(&algorithm, attribute, &value, sizeof(value)), "an attribute of an algorithm");
}

// The algorithm that matmul_tuned.h names for this product, if it belongs to a linear layer in bf16 with 16-byte
// aligned operands, and if the call may take such an algorithm.
std::optional<TunedAlgorithm> find_tuned(const Problem& p) {
  if (!p.may_be_tuned) return {};
  if (p.a.dtype != DType::bf16 || p.bias_alignment != 0) return {};  // none was measured with a bias
  if (p.d.batch > 1) return {};
  for (const Operand* o : {&p.a, &p.b, &p.c, &p.d})
    if (o->alignment < 16 || o->ld % 8 != 0) return {};
  // cuBLASLt's A is this op's B, and its rows are this op's columns.
  if (p.d.dtype == DType::bf16 && !p.trans_b)
    return p.trans_a ? tuned_algorithm(LinearPass::forward, p.a.rows, p.d.rows, p.d.cols)  // x times w transposed
                     : tuned_algorithm(LinearPass::dx, p.d.rows, p.a.cols, p.d.cols);      // dy times w
  if (p.d.dtype == DType::f32 && !p.trans_a && p.trans_b)                                  // dy transposed times x
    return tuned_algorithm(LinearPass::dw, p.d.rows, p.d.cols, p.a.cols);
  return {};
}

// Sets plan.algorithm to find_tuned()'s and returns `measured`. If find_tuned() names none, returns `first`. If
// cuBLASLt rejects the algorithm, or the algorithm needs too large a workspace, returns `refused`. In both cases plan
// is unchanged.
MatmulAlgorithm CublasLt::use_tuned(Plan& plan, const Problem& p) const {
  const std::optional<TunedAlgorithm> t = find_tuned(p);
  if (!t) return MatmulAlgorithm::first;
  cublasLtMatmulAlgo_t algorithm;
  if (cublaslt().algorithm_init(handle_, CUBLAS_COMPUTE_32F, CUDA_R_32F, CUDA_R_16BF, CUDA_R_16BF, cuda_type(p.c.dtype),
                                cuda_type(p.d.dtype), kTunedAlgorithmId, &algorithm) != CUBLAS_STATUS_SUCCESS)
    return MatmulAlgorithm::refused;
  set<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID, t->tile);
  set<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID, CUBLASLT_MATMUL_STAGES_64xAUTO);
  set<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, t->schedule);
  set<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, t->cluster);
  set<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, t->split);
  set<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                t->split > 1 ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE);
  cublasLtMatmulHeuristicResult_t checked;
  if (cublaslt().algorithm_check(handle_, &plan.product, &plan.a, &plan.b, &plan.c, &plan.d, &algorithm, &checked) !=
          CUBLAS_STATUS_SUCCESS ||
      checked.workspaceSize > static_cast<size_t>(kMatmulWorkspaceBytes))
    return MatmulAlgorithm::refused;
  plan.algorithm = algorithm;
  return MatmulAlgorithm::measured;
}

void CublasLt::set_pointers(Plan& plan, const Pointers& pointers) {
  if (pointers.bias != nullptr) set<const void*>(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers.bias);
  if (pointers.a_scale == nullptr) return;
  set<const void*>(plan.product, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointers.a_scale);
  set<const void*>(plan.product, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointers.b_scale);
}

void CublasLt::set_fp8([[maybe_unused]] Plan& plan, [[maybe_unused]] const Problem& p) {
#if TRIAD_CUBLASLT_HAS_ROW_SCALES
  for (const auto mode : {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE})
    set<int32_t>(plan.product, mode,
                 p.one_scale ? CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F : CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
  set<int8_t>(plan.product, CUBLASLT_MATMUL_DESC_FAST_ACCUM, p.fp8_sums == Fp8Sums::fast ? 1 : 0);
#endif
}

Plan CublasLt::make_plan(const Problem& p, const Pointers& pointers) const {
  const void* const bias = pointers.bias;
  Plan plan;
  // CUBLAS_COMPUTE_32F_PEDANTIC forbids every substitute for fp32 arithmetic (TF32, bf16 product sums). bf16 operands
  // need CUBLAS_COMPUTE_32F, which allows tensor cores.
  const cublasComputeType_t compute = p.a.dtype == DType::f32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
  check_cublas(cublaslt().product_init(&plan.product, sizeof plan.product, compute, CUDA_R_32F), "a product");
  set<int32_t>(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, p.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set<int32_t>(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, p.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  if (bias != nullptr) set<uint32_t>(plan.product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
  if (p.a.dtype == DType::u8) set_fp8(plan, p);
  set_pointers(plan, pointers);
  init_layout(plan.a, p.a);
  init_layout(plan.b, p.b);
  init_layout(plan.c, p.c);
  init_layout(plan.d, p.d);
  plan.kind = use_tuned(plan, p);
  if (plan.kind == MatmulAlgorithm::measured) return plan;

  cublasLtMatmulPreferenceOpaque_t preference;
  check_cublas(cublaslt().preference_init(&preference, sizeof preference), "a preference");
  set<uint64_t>(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMatmulWorkspaceBytes);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.a.alignment);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.b.alignment);
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.c.alignment);
  // The preference has no separate alignment for the bias, which the epilogue loads as it stores D.
  set<uint32_t>(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                bias == nullptr ? p.d.alignment : std::min(p.d.alignment, p.bias_alignment));

  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t status =
      cublaslt().heuristic(handle_, &plan.product, &plan.a, &plan.b, &plan.c, &plan.d, &preference, 1, &best, &found);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0)
    fail(
        "cuBLASLt knows no algorithm for {} of {} [{},{}] <- {} [{},{}]{} x [{},{}]{}{} (column-major; alignments {}, "
        "{}, "
        "{}, {}): {}",
        p.d.batch, name_of(p.d.dtype), p.d.rows, p.d.cols, name_of(p.a.dtype), p.a.rows, p.a.cols,
        p.trans_a ? "^T" : "", p.b.rows, p.b.cols, p.trans_b ? "^T" : "", bias == nullptr ? "" : " + bias",
        p.a.alignment, p.b.alignment, p.c.alignment, p.d.alignment, cublaslt().status_string(status));
  plan.algorithm = best.algo;
  return plan;
}

}  // namespace

MatmulAlgorithm matmul(Context& ctx, Tensor d, ConstTensor a, ConstTensor b, const MatmulOptions& options,
                       ConstTensor addend) {
  TRIAD_CHECK(!ctx.is_side, "a product on {}, beside others: they share one workspace", ctx.stream.name());
  const void* const bias = is_repeated_row(addend) ? addend.data : nullptr;
  const bool has_c = !addend.empty() && bias == nullptr;
  const ConstTensor c = has_c ? addend : ConstTensor(d);
  // The operands are swapped: cuBLASLt's A is this op's B. So a D row is a column, and a bias one element per row.
  const Problem problem{.may_be_tuned = ctx.may_use_sm90() && ctx.num_sms == kTunedSms,
                        .trans_a = options.trans_b,
                        .trans_b = options.trans_a,
                        .a = b,
                        .b = a,
                        .c = c,
                        .d = ConstTensor(d),
                        .bias_alignment = bias == nullptr ? 0 : Operand::alignment_of(bias)};
  if (ctx.planning) return find_tuned(problem) ? MatmulAlgorithm::measured : MatmulAlgorithm::first;
  CublasLt& lt = CublasLt::of(ctx);
  Plan& plan = lt.plan(problem, {.bias = bias});
  const float alpha = static_cast<float>(options.alpha);
  const float beta = options.accumulate || has_c ? 1.0f : 0.0f;
  check_cublas(cublaslt().matmul(lt.handle(), &plan.product, &alpha, b.data, &plan.a, a.data, &plan.b, &beta, c.data,
                                 &plan.c, d.data, &plan.d, &plan.algorithm, lt.workspace(), kMatmulWorkspaceBytes,
                                 static_cast<cudaStream_t>(ctx.stream.handle())),
               "cublasLtMatmul");
  return plan.kind;
}

namespace {

// The problem d <- a b^T + c for e4m3 operands with K along their rows, without a bias. Operands are swapped as above.
Problem e4m3_problem(const ConstTensor& a, const ConstTensor& b, const ConstTensor& c, const ConstTensor& d,
                     Fp8Sums sums) {
  return {.may_be_tuned = false,
          .trans_a = true,
          .trans_b = false,
          .a = b,
          .b = a,
          .c = c,
          .d = d,
          .bias_alignment = 0,
          .fp8_sums = sums};
}

// d <- a b^T + beta c for such a problem.
void multiply_e4m3(Context& ctx, const Problem& problem, const Tensor& d, const ConstTensor& a, const ConstTensor& b,
                   const ConstTensor& c, float beta, const Pointers& pointers) {
  TRIAD_CHECK(!ctx.is_side, "a product on {}, beside others: they share one workspace", ctx.stream.name());
  CublasLt& lt = CublasLt::of(ctx);
  Plan& plan = lt.plan(problem, pointers);
  const float alpha = 1.0f;
  check_cublas(cublaslt().matmul(lt.handle(), &plan.product, &alpha, b.data, &plan.a, a.data, &plan.b, &beta, c.data,
                                 &plan.c, d.data, &plan.d, &plan.algorithm, lt.workspace(), kMatmulWorkspaceBytes,
                                 static_cast<cudaStream_t>(ctx.stream.handle())),
               "cublasLtMatmul of e4m3");
}

}  // namespace

void matmul_fp8(Context& ctx, Tensor d, const E4m3Rows& a, const E4m3Rows& b, Fp8Sums sums, ConstTensor addend) {
  if (ctx.planning) return;
  const void* const bias = is_repeated_row(addend) ? addend.data : nullptr;
  const bool has_c = !addend.empty() && bias == nullptr;
  const ConstTensor c = has_c ? addend : ConstTensor(d);
  Problem problem = e4m3_problem(a.q, b.q, c, d, sums);
  problem.bias_alignment = bias == nullptr ? 0 : Operand::alignment_of(bias);
  multiply_e4m3(ctx, problem, d, a.q, b.q, c, has_c ? 1.0f : 0.0f,
                {.bias = bias, .a_scale = b.scale.ptr<float>(), .b_scale = a.scale.ptr<float>()});
}

void matmul_fp8(Context& ctx, Tensor d, const E4m3Columns& a, const E4m3Columns& b, bool add) {
  if (ctx.planning) return;
  Problem problem = e4m3_problem(a.q, b.q, d, d, Fp8Sums::accurate);
  problem.one_scale = true;
  multiply_e4m3(ctx, problem, d, a.q, b.q, d, add ? 1.0f : 0.0f,
                {.a_scale = b.scale.ptr<float>(), .b_scale = a.scale.ptr<float>()});
}

bool built_with_fp8() { return TRIAD_CUBLASLT_HAS_ROW_SCALES; }

std::string matmul_library() { return "cuBLASLt " + std::to_string(cublaslt().version()); }

}  // namespace triad::cuda
