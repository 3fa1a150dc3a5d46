// Ops on row parts, as ranks that share a sequence compute them (dist.context), against the same ops on whole rows:
// NSA's branches, the selection and dense attention, forward and backward.
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "kernels/nsa/attend_compressed.h"
#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/attend_window.h"
#include "kernels/nsa/dense_attention.h"
#include "kernels/nsa/document_tables.h"
#include "kernels/nsa/gate.h"
#include "kernels/nsa/select.h"
#include "kernels/nsa/select_index.h"
#include "model/sequence/layout.h"
#include "tests/support/nsa_problem.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

constexpr int64_t kRanks = 2, kRows = 2, kArenaBytes = int64_t{6} << 30;

struct PartsCase {
  Sizes n;
  NsaConfig c;
  std::vector<int32_t> bounds = {};  // document bounds in both rows; empty: each row is one document
  int64_t most = 0;                  // most documents in a row
  bool portable = false;             // portable kernels only
};

// The rows' documents, with tables in `lab`.
Documents documents_of(Lab& lab, const PartsCase& p) {
  if (p.bounds.empty()) return {};
  const int64_t ids = block_ids(p.n.T, p.c.l_sel, p.most);
  const auto table = [&](int64_t entries) { return lab.poisoned({kRows, entries}, DType::i32); };
  const DocumentTables tables{table(p.n.T), table(p.n.T), table(p.n.T), table(ids)};
  const Tensor bounds =
      lab.from(Values(p.bounds.begin(), p.bounds.end()), {static_cast<int64_t>(p.bounds.size())}, DType::i32);
  nsa_document_tables(lab.ctx(), tables, bounds, p.c.l_sel);
  return tables;
}

// One attention kind: which keys a run needs, and its ops.
struct Kind {
  std::string name;
  Tensor k, v;  // whole row's keys and values
  int64_t d;    // tokens from one key to the next
  bool prefix;  // whether a run needs all keys up to its end, or else those from `before` tokens before it
  int64_t before;
  std::function<void(const AttendOut&, const AttendIn&, const Tensor& lists)> forward;
  std::function<void(const AttendGradOut&, const AttendGradIn&, const AttendIn&, const AttendOut&, const Tensor& lists)>
      backward;
};

double distance(const Values& a, const Values& b) {
  REQUIRE(a.size() == b.size());
  double error = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) error += (a[i] - b[i]) * (a[i] - b[i]), size += a[i] * a[i];
  return std::sqrt(error / std::max(size, 1e-300));
}

// Shape of this rank's tokens in t [B,T,...].
Shape shape_of_rank(const Tensor& t, const SequenceLayout& layout) {
  Shape shape = t.shape();
  shape.dim[1] = layout.local_tokens();
  return shape;
}
Tensor copy_of_rank(Context& ctx, const Tensor& to, const Tensor& t, const SequenceLayout& layout) {
  for (int64_t i = 0; i < layout.chunks(); ++i)
    copy(ctx, to.slice(1, i * layout.chunk_tokens, (i + 1) * layout.chunk_tokens),
         t.slice(1, layout.chunk(i).begin, layout.chunk(i).end));
  return to;
}

// Tensors for the results of a rank's tokens, with memory before and after them that no op may write.
class Outputs {
 public:
  explicit Outputs(Lab& lab) : lab_(lab) {}
  Tensor alloc(const Shape& shape, DType dtype) {
    guard();
    return lab_.poisoned(shape, dtype);
  }
  void check() {
    guard();
    for (const Tensor& t : guards_) {
      const Values values = lab_.values(t);
      CHECK(std::all_of(values.begin(), values.end(), [](double x) { return x == -1; }));
    }
  }

 private:
  void guard() {
    constexpr int64_t kGuard = 1 << 14;
    guards_.push_back(lab_.poisoned({kGuard}, DType::i32));
  }
  Lab& lab_;
  std::vector<Tensor> guards_;
};

void check_parts(const Setting& setting, const PartsCase& p) {
  const Sizes& n = p.n;
  Lab lab(setting, kArenaBytes);
  Context& ctx = lab.ctx();
  ctx.portable_only = p.portable;
  const DType T = setting.dtype, acc = acc_dtype(T);
  const int64_t Tc = compressed_length(n.T, p.c.l, p.c.d);
  uint64_t stream = 100;
  const auto random = [&](const Shape& shape) { return lab.from(random_values(shape.numel(), stream++), shape, T); };
  const Shape lse_shape = {kRows, n.T, n.Hq()};
  const Documents documents = documents_of(lab, p);
  const Tensor q = random({kRows, n.T, n.Hq(), n.dk}), dout = random({kRows, n.T, n.Hq(), n.dv});
  const Tensor k = random({kRows, n.T, n.Hkv, n.dk}), v = random({kRows, n.T, n.Hkv, n.dv});
  const Tensor k_cmp = random({kRows, Tc, n.Hkv, n.dk}), v_cmp = random({kRows, Tc, n.Hkv, n.dv});
  const Tensor gate = lab.from(Values(static_cast<size_t>(kRows * n.T * n.Hkv), 0.5), {kRows, n.T, n.Hkv}, acc);
  const Tensor half_dout = lab.poisoned(dout.shape(), T);
  Values halves = lab.values(dout);
  for (double& x : halves) x /= 2;
  lab.assign(half_dout, halves);
  const Tensor lists = lab.poisoned({kRows, n.T, n.Hkv, p.c.n_sel}, DType::i32);
  const Shape out_shape = {kRows, n.T, n.Hq(), n.dv};
  INFO(n.str() << ", q " << q.str());

  const std::vector<Kind> kinds = {
      {"compressed", k_cmp, v_cmp, p.c.d, true, 0,
       [&](auto& out, auto& in, auto&) { nsa_attend_compressed_forward(ctx, out, in, p.c); },
       [&](auto& out, auto& grad, auto& in, auto&, auto&) { nsa_attend_compressed_backward(ctx, out, grad, in, p.c); }},
      {"selected", k, v, 1, true, 0,
       [&](auto& out, auto& in, auto& row_lists) { nsa_attend_selected_forward(ctx, out, in, row_lists, p.c.l_sel); },
       [&](auto& out, auto& grad, auto& in, auto&, auto& row_lists) {
         nsa_attend_selected_backward(ctx, out, grad, in, row_lists, p.c.l_sel);
       }},
      {"window", k, v, 1, false, p.c.w - 1,
       [&](auto& out, auto& in, auto&) { nsa_attend_window_forward(ctx, out, in, p.c.w); },
       [&](auto& out, auto& grad, auto& in, auto&, auto&) { nsa_attend_window_backward(ctx, out, grad, in, p.c.w); }},
      {"dense", k, v, 1, true, 0,
       [&](auto& out, auto& in, auto&) {
         dense_attention_forward(ctx, {out.o, out.lse}, in);
       },
       // Dense attention has no gate: with dout / 2 it has the gradients that a branch with gate 1/2 has with dout.
       [&](auto& out, auto& grad, auto& in, auto& saved, auto&) {
         Scratch::Scope scope(ctx.scratch);
         const Tensor half = scope.alloc(T, grad.dout.shape());
         const bool whole = in.documents.part.whole();
         const int64_t first = in.documents.part.first_query;
         copy(ctx, half, whole ? half_dout : half_dout.slice(1, first, first + in.q.size(1)));
         dense_attention_backward(ctx, {out.dq, out.dk, out.dv}, half, in, {saved.o, saved.lse});
       }}};

  for (const Kind& kind : kinds) {
    INFO(kind.name);
    const AttendIn in{q, kind.k, kind.v, documents};
    const AttendOut out{lab.poisoned(out_shape, T), lab.poisoned(lse_shape, acc)};
    // The compressed branch comes first; the selection needs its lse.
    kind.forward(out, in, lists);
    if (kind.d > 1) nsa_select(ctx, lists, q, k_cmp, out.lse, p.c, documents);

    const Tensor delta = lab.poisoned(lse_shape, acc), norm = lab.poisoned(lse_shape, acc);
    attention_delta(ctx, delta, dout, out.o, norm);
    // The gate is 1/2 everywhere, so delta is dout . o / 2.
    Values half = lab.values(delta);
    for (double& x : half) x /= 2;
    lab.assign(delta, half);
    const std::vector<RoundingUnitBranch> branches = {{kind.k, kind.v, gate, delta, kind.d}};
    const AttendGradOut whole{lab.poisoned(q.shape(), acc), lab.poisoned(kind.k.shape(), acc),
                              lab.poisoned(kind.v.shape(), acc)};
    zero(ctx, whole.dq);
    Scratch::Scope scope(ctx.scratch);
    Tensor unit = attend_rounding_unit(ctx, scope, whole.dq, dout, q, branches, norm);
    kind.backward(whole, {dout, gate, delta, out.lse, unit}, in, out, lists);

    const double bound = setting.dtype == DType::f64 ? 1e-13 : setting.dtype == DType::f32 ? 1e-5 : 1e-2;
    Values dk(static_cast<size_t>(kind.k.numel())), dv(static_cast<size_t>(kind.v.numel()));
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      const SequenceLayout layout = SequenceLayout::of(n.T, kRanks, rank, setting.device);
      REQUIRE(layout.tokens() == n.T);
      // A rank's tokens have their own memory.
      const auto mine = [&](const Tensor& t) {
        return t.empty() ? t : copy_of_rank(ctx, lab.poisoned(shape_of_rank(t, layout), t.dtype), t, layout);
      };
      const auto expected = [&](const Tensor& t) {
        Scratch::Scope inner(ctx.scratch);
        return lab.values(copy_of_rank(ctx, inner.alloc(t.dtype, shape_of_rank(t, layout)), t, layout));
      };
      Outputs outputs(lab);
      const auto result_like = [&](const Tensor& t) { return outputs.alloc(shape_of_rank(t, layout), t.dtype); };
      const Tensor rank_q = mine(q), rank_dout = mine(dout), rank_gate = mine(gate), rank_delta = mine(delta),
                   rank_unit = mine(unit), rank_lists = mine(lists), whole_lse = mine(out.lse);
      const AttendOut part_out{result_like(out.o), result_like(out.lse)};
      const Tensor part_dq = result_like(whole.dq), part_lists = result_like(lists);
      zero(ctx, part_dq);
      for (int64_t i = 0; i < layout.chunks(); ++i) {
        const RowRange run = layout.chunk(i);
        INFO("queries " << run.begin << " to " << run.end);
        const int64_t first = kind.prefix ? 0 : std::max<int64_t>(run.begin - kind.before, 0);
        const int64_t end = kind.d > 1 ? Tc : run.end;
        const auto chunk_rows = [&](const Tensor& t) {
          return t.empty() ? t : t.slice(1, i * layout.chunk_tokens, (i + 1) * layout.chunk_tokens);
        };
        AttendIn its{chunk_rows(rank_q), kind.k.slice(1, first, end), kind.v.slice(1, first, end),
                     cut_documents(ctx, scope, documents, first, run.end)};
        its.documents.part = layout.chunk_part(i, first);
        const AttendOut chunk_out{chunk_rows(part_out.o), chunk_rows(part_out.lse)};
        kind.forward(chunk_out, its, chunk_rows(rank_lists));
        if (kind.d > 1)
          nsa_select(ctx, chunk_rows(part_lists), its.q, k_cmp, chunk_rows(whole_lse), p.c, its.documents);
        const AttendGradOut grad{chunk_rows(part_dq), outputs.alloc(its.k.shape(), acc),
                                 outputs.alloc(its.v.shape(), acc)};
        kind.backward(grad,
                      {chunk_rows(rank_dout), chunk_rows(rank_gate), chunk_rows(rank_delta), chunk_rows(whole_lse),
                       chunk_rows(rank_unit)},
                      its, chunk_out, chunk_rows(rank_lists));
        const auto add = [&](Values& sum, const Tensor& addend) {
          const Values x = lab.values(addend);
          const int64_t row = addend.size(2) * addend.size(3), keys = addend.size(1), all = kind.k.size(1);
          for (int64_t b = 0; b < kRows; ++b)
            for (int64_t j = 0; j < keys * row; ++j)
              sum[static_cast<size_t>((b * all + first) * row + j)] += x[static_cast<size_t>(b * keys * row + j)];
        };
        add(dk, grad.dk), add(dv, grad.dv);
      }
      INFO("rank " << rank);
      if (kind.d > 1) CHECK((lab.values(part_lists) == lab.values(rank_lists)));
      CHECK(distance(expected(out.o), lab.values(part_out.o)) < bound);
      CHECK(distance(expected(whole.dq), lab.values(part_dq)) < bound);
      outputs.check();
    }
    CHECK(distance(lab.values(whole.dk), dk) < bound);
    CHECK(distance(lab.values(whole.dv), dv) < bound);
  }
}

// Compresses the blocks that begin in each run, against compressing the whole row.
void check_compression(const Setting& setting, const PartsCase& p, Phi kind) {
  const Sizes& n = p.n;
  INFO("compression, phi " << static_cast<int>(kind) << ", " << n.str() << ", " << p.bounds.size() << " bounds");
  Lab lab(setting, kArenaBytes);
  Context& ctx = lab.ctx();
  const DType T = setting.dtype, acc = acc_dtype(T);
  NsaConfig c = p.c;
  c.phi = kind;
  const PhiOptions phi = c.phi_options();
  uint64_t stream = 500;
  const auto random = [&](const Shape& shape) { return lab.from(random_values(shape.numel(), stream++), shape, T); };
  const int64_t Tc = compressed_length(n.T, c.l, c.d);
  const Documents documents = documents_of(lab, p);
  const Tensor x = random({kRows, n.T, n.Hkv, n.dk}), y = lab.poisoned({kRows, Tc, n.Hkv, n.dk}, T);
  const Tensor dy = lab.from(random_values(y.numel(), stream++), y.shape(), acc);
  PhiWeights w;
  PhiGrads dw, part_dw;
  if (kind == Phi::conv) {
    w.w = random({c.l, n.dk});
    for (PhiGrads* grads : {&dw, &part_dw}) zero(ctx, grads->w = lab.poisoned({c.l, n.dk}, acc));
  }
  const Tensor dx = lab.poisoned(x.shape(), T);
  nsa_compress_forward(ctx, y, x, w, phi, documents);
  nsa_compress_backward(ctx, dx, dw, dy, x, w, phi, documents);
  Values part_y(static_cast<size_t>(y.numel())), part_dx(static_cast<size_t>(x.numel()));
  const int64_t row = n.Hkv * n.dk;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const SequenceLayout layout = SequenceLayout::of(n.T, kRanks, rank, setting.device);
    const auto rank_index = static_cast<size_t>(rank);
    const RowList edges = layout.block_tokens(c.l, c.d)[rank_index], blocks = layout.blocks(c.l, c.d)[rank_index];
    for (size_t i = 0; i < edges.size(); ++i) {
      const RowRange edge = edges[i], chunk_rows = blocks[i];
      if (chunk_rows.size() == 0) continue;
      Scratch::Scope scope(ctx.scratch);
      Documents its = cut_documents(ctx, scope, documents, edge.begin, edge.end);
      its.part = layout.chunk_part(static_cast<int64_t>(i), edge.begin);
      const auto own = [&](const Tensor& t, const RowRange& rows) {
        const Tensor copied = lab.poisoned({kRows, rows.size(), n.Hkv, n.dk}, t.dtype);
        copy(ctx, copied, t.slice(1, rows.begin, rows.end));
        return copied;
      };
      const Tensor run_x = own(x, edge);
      const Tensor run_y = lab.poisoned({kRows, chunk_rows.size(), n.Hkv, n.dk}, T),
                   run_dx = lab.poisoned(run_x.shape(), T);
      nsa_compress_forward(ctx, run_y, run_x, w, phi, its);
      nsa_compress_backward(ctx, run_dx, part_dw, own(dy, chunk_rows), run_x, w, phi, its);
      const auto add = [&](Values& sum, const Tensor& addend, int64_t first, int64_t all) {
        const Values values = lab.values(addend);
        const int64_t rows = addend.size(1);
        for (int64_t b = 0; b < kRows; ++b)
          for (int64_t j = 0; j < rows * row; ++j)
            sum[static_cast<size_t>((b * all + first) * row + j)] += values[static_cast<size_t>(b * rows * row + j)];
      };
      add(part_y, run_y, chunk_rows.begin, Tc), add(part_dx, run_dx, edge.begin, n.T);
    }
  }
  const double bound = T == DType::f64 ? 1e-13 : T == DType::f32 ? 1e-5 : 1e-2;
  CHECK(distance(lab.values(y), part_y) < bound);
  CHECK(distance(lab.values(dx), part_dx) < bound);
  if (kind == Phi::conv) CHECK(distance(lab.values(dw.w), lab.values(part_dw.w)) < bound);
}

// The case, and the same with several documents: their bounds do and don't coincide with runs, blocks and strides, and
// some begin long before a run.
void check(const Setting& setting, PartsCase p) {
  const int64_t T = p.n.T;
  for (const bool packed : {false, true}) {
    if (packed) {
      const std::vector<int64_t> first = {0, 1, 7, T / 4, T / 4 + 3, T * 5 / 12, T * 11 / 16 + 1, T - 9, T},
                                 second = {T + 3, T + T * 5 / 8 + 2, 2 * T};
      p.most = static_cast<int64_t>(first.size()) - 1;
      p.bounds.assign(first.begin(), first.end());
      p.bounds.insert(p.bounds.end(), second.begin(), second.end());
    }
    check_parts(setting, p);
    for (const Phi kind : {Phi::avg, Phi::conv}) check_compression(setting, p, kind);
  }
}

// An index's lists, in rows of one document.
void check_index_parts(const Setting& setting, const PartsCase& p) {
  constexpr int64_t kWidth = 64;
  const Sizes& n = p.n;
  Lab lab(setting, kArenaBytes);
  Context& ctx = lab.ctx();
  const auto random = [&](const Shape& shape, uint64_t stream) {
    return lab.from(random_values(shape.numel(), stream), shape, setting.dtype);
  };
  const Tensor iq = random({kRows, n.T, n.Hkv, kWidth}, 700), ik = random({kRows, n.T, 1, kWidth}, 701),
               lists = lab.poisoned({kRows, n.T, n.Hkv, p.c.n_sel}, DType::i32);
  nsa_select_index(ctx, lists, iq, ik, p.c);
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    const SequenceLayout layout = SequenceLayout::of(n.T, kRanks, rank, setting.device, p.c.every);
    for (int64_t i = 0; i < layout.chunks(); ++i) {
      const RowRange run = layout.chunk(i);
      Documents its;
      its.part = layout.chunk_part(i);
      const Shape shape = {kRows, run.size(), n.Hkv, p.c.n_sel};
      const Tensor part = lab.poisoned(shape, DType::i32), want = lab.poisoned(shape, DType::i32);
      nsa_select_index(ctx, part, iq.slice(1, run.begin, run.end), ik.slice(1, 0, run.end), p.c, its);
      copy(ctx, want, lists.slice(1, run.begin, run.end));
      INFO("index, queries " << run.begin << " to " << run.end);
      CHECK((lab.values(part) == lab.values(want)));
    }
  }
}

// The case with lists that four tokens share, in rows of one document.
void check_shared_lists(const Setting& setting, PartsCase p) {
  p.c.every = 4;
  check_parts(setting, p);
  check_index_parts(setting, p);
}

}  // namespace

TEST_CASE("context: parts of a row have the results of the whole row (CPU)", "[nsa]") {
  check({Device::cpu(), DType::f64}, {{96, 2, 3, 8, 6}, config(8, 4, 8, 4, 21)});
  check({Device::cpu(), DType::f32}, {{96, 1, 2, 16, 16}, config(8, 8, 16, 3, 30)});
  check_shared_lists({Device::cpu(), DType::f64}, {{96, 2, 3, 8, 6}, config(8, 4, 8, 4, 21)});
}

TEST_CASE("context: parts of a row have the results of the whole row (GPU)", "[nsa][gpu]") {
  if (!require_gpu()) return;
  const Device gpu = Device::cuda();
  check({gpu, DType::f32}, {{1024, 2, 3, 32, 48}, config(32, 16, 64, 8, 200)});
  check_shared_lists({gpu, DType::f32}, {{1024, 2, 3, 32, 48}, config(32, 16, 64, 8, 200)});
  check_shared_lists({gpu, DType::bf16}, {{1088, 2, 6, 64, 64}, config(32, 16, 64, 8, 512)});
  for (const int64_t d : {64, 128}) {
    check({gpu, DType::bf16}, {{1088, 2, 6, d, d}, config(32, 16, 64, 16, 512)});
    check({gpu, DType::bf16}, {{16384, 1, 6, d, d}, config(32, 16, 64, 16, 512)});
    // Here a group has one head. The forward with resident rows (nsa/sm90/resident_rows.cu) then has its longest tiles:
    // 384 tokens at head width 64, 192 at 128.
    check({gpu, DType::bf16}, {{8192, 1, 1, d, d}, config(32, 16, 64, 16, 512)});
    // The portable kernels run these two cases. In the first one find_part() cuts a run's tokens into one part, in the
    // second one into several.
    for (const int64_t T : {1088, 4352})
      check({gpu, DType::bf16}, {.n = {T, 2, 3, d, d}, .c = config(32, 16, 64, 8, 200), .portable = true});
  }
  check({gpu, DType::bf16}, {{4160, 1, 16, 192, 128}, config(32, 16, 64, 16, 300)});
}
