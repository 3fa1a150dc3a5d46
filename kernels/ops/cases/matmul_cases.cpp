// Cases for matmul with all transpose combinations, for batches, and for the linear layer.
#include <fmt/format.h>

#include "kernels/common/op_case.h"
#include "kernels/ops/matmul.h"

namespace triad {

namespace {

struct Product {
  std::string name;
  int64_t M, N, K;
  MatmulOptions options;
  bool addend = false;
  int64_t row_pad = 0;
};

// The gradient of D = alpha op(A) op(B): two more products, which also check the other transposes.
void matmul_gradient(Context& ctx, const Args& t, const MatmulOptions& o) {
  const Tensor dd = t["dd"], a = t["a"], b = t["b"];
  if (o.trans_a) {
    matmul(ctx, t["da"], b, dd, {.trans_a = o.trans_b, .trans_b = true, .alpha = o.alpha});
  } else {
    matmul(ctx, t["da"], dd, b, {.trans_b = !o.trans_b, .alpha = o.alpha});
  }
  if (o.trans_b) {
    matmul(ctx, t["db"], dd, a, {.trans_a = true, .trans_b = o.trans_a, .alpha = o.alpha});
  } else {
    matmul(ctx, t["db"], a, dd, {.trans_a = !o.trans_a, .alpha = o.alpha});
  }
  if (!t["daddend"].empty()) copy(ctx, t["daddend"], dd);
}

OpCase product_case(const Product& p) {
  const MatmulOptions o = p.options;
  const Shape a = o.trans_a ? Shape{p.K, p.M} : Shape{p.M, p.K}, b = o.trans_b ? Shape{p.N, p.K} : Shape{p.K, p.N};
  OpCase c{.op = "matmul", .name = p.name};
  c.args = {{.name = "a", .role = ArgRole::input, .shape = a, .row_pad = p.row_pad},
            {.name = "b", .role = ArgRole::input, .shape = b, .row_pad = 2 * p.row_pad},
            {.name = "d", .role = ArgRole::output, .shape = {p.M, p.N}, .row_pad = p.row_pad}};
  if (p.addend)
    c.args.push_back({.name = "addend", .role = ArgRole::input, .shape = {p.M, p.N}, .row_pad = 3 * p.row_pad});
  c.forward = [o](Context& ctx, const Args& t) { matmul(ctx, t["d"], t["a"], t["b"], o, t["addend"]); };
  c.backward = [o](Context& ctx, const Args& t) { matmul_gradient(ctx, t, o); };
  return c;
}

// A case for D += A B with D in the accumulator type.
OpCase accumulate_case(const std::string& name, int64_t M, int64_t N, int64_t K, bool trans_a) {
  OpCase c{.op = "matmul", .name = name};
  c.args = {{.name = "a", .role = ArgRole::input, .shape = trans_a ? Shape{K, M} : Shape{M, K}},
            {.name = "b", .role = ArgRole::input, .shape = {K, N}},
            {.name = "before", .role = ArgRole::constant, .shape = {M, N}, .type = ArgType::acc},
            {.name = "d", .role = ArgRole::output, .shape = {M, N}, .type = ArgType::acc}};
  c.forward = [trans_a](Context& ctx, const Args& t) {
    copy(ctx, t["d"], t["before"]);
    matmul(ctx, t["d"], t["a"], t["b"], {.trans_a = trans_a, .accumulate = true});
  };
  return c;
}

// A matmul_batched case, which has no backward.
OpCase batched_case(int64_t n, int64_t M, int64_t N, int64_t K, const MatmulOptions& o, bool addend) {
  OpCase c{.op = "matmul",
           .name = fmt::format("batch of {}, {}{} {}x{}x{}", n, o.trans_a ? 'T' : 'N', o.trans_b ? 'T' : 'N', M, N, K)};
  c.args = {{.name = "a", .role = ArgRole::constant, .shape = o.trans_a ? Shape{n, K, M} : Shape{n, M, K}},
            {.name = "b", .role = ArgRole::constant, .shape = o.trans_b ? Shape{n, N, K} : Shape{n, K, N}},
            {.name = "d", .role = ArgRole::output, .shape = {n, M, N}}};
  if (addend) c.args.push_back({.name = "addend", .role = ArgRole::constant, .shape = {n, M, N}});
  c.forward = [o](Context& ctx, const Args& t) { matmul_batched(ctx, t["d"], t["a"], t["b"], o, t["addend"]); };
  return c;
}

OpCase linear_case(const std::string& name, int64_t rows, int64_t in, int64_t out, int64_t row_pad, bool addend) {
  OpCase c{.op = "matmul", .name = name};
  c.args = {{.name = "x", .role = ArgRole::input, .shape = {rows, in}, .row_pad = row_pad},
            {.name = "w", .role = ArgRole::param, .shape = {out, in}, .std = 0.5},
            {.name = "y", .role = ArgRole::output, .shape = {rows, out}, .row_pad = row_pad}};
  if (addend) c.args.push_back({.name = "residual", .role = ArgRole::input, .shape = {rows, out}});
  c.forward = [](Context& ctx, const Args& t) { linear_forward(ctx, t["y"], t["x"], t["w"], t["residual"]); };
  c.backward = [](Context& ctx, const Args& t) {
    linear_backward(ctx, t["dx"], t["dw"], t["dy"], t["x"], t["w"]);
    if (!t["dresidual"].empty()) copy(ctx, t["dresidual"], t["dy"]);
  };
  return c;
}

OpCase linear_bench(const std::string& name, int64_t rows, int64_t in, int64_t out) {
  OpCase c = linear_case(name, rows, in, out, 0, false);
  c.bench = true;
  c.args[1].std = 0.02;
  const double x = static_cast<double>(rows * in), w = static_cast<double>(in * out),
               y = static_cast<double>(rows * out);
  c.forward_flops = 2 * x * static_cast<double>(out);
  c.forward_bytes = 2 * (x + w + y);
  c.backward_flops = 2 * c.forward_flops;
  c.backward_bytes = 2 * (y + x + w) + 2 * x + 8 * w;  // dw has 4 bytes an element and is read and written
  return c;
}

}  // namespace

std::vector<OpCase> matmul_cases() {
  std::vector<OpCase> cases;
  for (const bool ta : {false, true})
    for (const bool tb : {false, true}) {
      const std::string transposes = std::string(ta ? "T" : "N") + (tb ? "T" : "N");
      cases.push_back(product_case({transposes + " 7x33x5", 7, 33, 5, {.trans_a = ta, .trans_b = tb}}));
      cases.push_back(
          product_case({transposes + " 65x130x67 strided", 65, 130, 67, {.trans_a = ta, .trans_b = tb}, true, 3}));
    }
  cases.push_back(product_case({"64x128x256", 64, 128, 256, {.trans_b = true, .alpha = -0.5}, true}));
  cases.push_back(product_case({"1x1x1", 1, 1, 1, {.alpha = 2.0}}));
  cases.push_back(product_case({"1x96x64", 1, 96, 64, {.trans_b = true}}));
  cases.push_back(product_case({"5x4x0 with addend", 5, 4, 0, {}, true}));
  cases.push_back(product_case({"5x4x0", 5, 4, 0, {}}));
  cases.push_back(product_case({"0x4x3", 0, 4, 3, {}}));
  cases.push_back(accumulate_case("accumulate 9x31x3000", 9, 31, 3000, true));
  cases.push_back(accumulate_case("accumulate 128x64x48", 128, 64, 48, false));
  cases.push_back(batched_case(3, 7, 33, 5, {.trans_b = true, .alpha = -0.5}, true));
  cases.push_back(batched_case(4, 64, 48, 72, {.trans_a = true}, false));
  cases.push_back(batched_case(2, 40, 64, 64, {.alpha = 2}, true));
  cases.push_back(batched_case(1, 64, 64, 32, {}, true));
  cases.push_back(linear_case("linear 33x17x9 strided", 33, 17, 9, 5, true));
  cases.push_back(linear_case("linear 127x64x96", 127, 64, 96, 0, false));
  cases.push_back(linear_bench("linear 32768x768x3072", 32768, 768, 3072));
  cases.push_back(linear_bench("linear 32768x768x1536", 32768, 768, 1536));
  cases.push_back(linear_bench("linear 32768x768x768", 32768, 768, 768));
  cases.push_back(linear_bench("linear 32768x3072x768", 32768, 3072, 768));
  cases.push_back(linear_bench("linear 65536x768x3072", 65536, 768, 3072));
  cases.push_back(linear_bench("linear 65536x3072x768", 65536, 3072, 768));
  return cases;
}

}  // namespace triad
