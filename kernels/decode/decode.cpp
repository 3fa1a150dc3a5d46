// Decoding on the CPU with the forward pass's code: attention uses its loops over the cache's visible rows, the
// selection uses its function at the new token's position, and gate and gated sum are its ops.
#include "kernels/decode/decode.h"

#include <algorithm>

#include "engine/op_scope.h"
#include "kernels/nsa/cpu/attend_forward.h"
#include "kernels/nsa/cpu/select_index.h"

namespace triad {

namespace {

constexpr int kCmp = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

// A branch's visible cache rows for sequence b's new token: the first count(b). In a ring that is not yet full these
// are all tokens; in a full ring, all rows.
struct FirstRows {
  std::vector<int64_t> count;
  template <class Visit>
  void keys(int64_t b, int64_t, int64_t, Visit&& visit) const {
    if (count[b] > 0) visit(int64_t{0}, count[b]);
  }
  int64_t keys(int64_t b, int64_t) const { return count[b]; }
};

// The selected branch's visible rows: tokens up to the new one in the listed blocks.
struct ListedRows {
  const int32_t* lists;  // [B,1,Hkv,n]
  const int32_t* position;
  int64_t Hkv, n, l_sel;
  template <class Visit>
  void keys(int64_t b, int64_t, int64_t g, Visit&& visit) const {
    const int32_t* list = lists + (b * Hkv + g) * n;
    const int64_t end = int64_t{position[b]} + 1;
    for (int64_t i = 0; i < n && list[i] >= 0; ++i) visit(list[i] * l_sel, std::min((list[i] + 1) * l_sel, end));
  }
};

// k, v: the cache's keys and values.
void check_decode(const char* op, const Tensor& out, const ConstTensor& q, const ConstTensor& position, const Tensor& k,
                  const Tensor& v) {
  TRIAD_CHECK(q.rank == 4 && q.size(1) == 1 && is_float(q.dtype), "{}: q is {}, not one row a sequence", op, q.str());
  const int64_t Hkv = k.size(2);
  TRIAD_CHECK(Hkv > 0 && q.size(2) % Hkv == 0, "{}: {} query heads are not a multiple of {} groups", op, q.size(2),
              Hkv);
  check_tensor("decode: out", out, {q.size(0), 1, q.size(2), v.size(3)}, q.dtype);
  check_tensor("decode: position", position, {q.size(0)}, DType::i32);
}

template <class T>
class DecodeCpu {
 public:
  DecodeCpu(Context& ctx, const ConstTensor& q, const ConstTensor& position, int64_t Hkv, const DecodeProbe& probe)
      : ctx_(ctx), q_(q), position_(position), probe_(probe), B_(q.size(0)), Hkv_(Hkv) {}

  void dense(Tensor out, const DenseCache& cache) {
    Scratch::Scope scope(ctx_.scratch);
    const Tensor lse = scope.alloc(dtype_of<acc_t<T>>, {B_, 1, q_.size(2)}, "lse");
    attend(kWin, {out, lse}, cache.k, cache.v, tokens_up_to(cache.k));
  }

  // kSel: the branch whose reads are counted.
  void selected(Tensor out, const DenseCache& cache, const ConstTensor& lists, int64_t l_sel) {
    Scratch::Scope scope(ctx_.scratch);
    const Tensor lse = scope.alloc(dtype_of<acc_t<T>>, {B_, 1, q_.size(2)}, "lse");
    attend_listed({out, lse}, cache.k, cache.v, lists, l_sel);
  }

  void nsa(Tensor out, const DecodeIn& in, const GateWeights& gate_weights, const NsaConfig& c) {
    const NsaCache& cache = in.cache;
    const DType acc = dtype_of<acc_t<T>>;
    Scratch::Scope scope(ctx_.scratch);
    const Tensor lse = scope.alloc(acc, {3, B_, 1, q_.size(2)}, "lse");
    std::array<Tensor, 3> o;
    for (Tensor& branch : o) branch = scope.alloc(out.dtype, out.shape(), "o");
    const Tensor gate = scope.alloc(acc, {3, B_, 1, Hkv_}, "gate");
    const Tensor lists =
        in.shared_lists.empty() ? scope.alloc(DType::i32, {B_, 1, Hkv_, c.n_sel}, "block_index") : in.shared_lists;
    FirstRows blocks = tokens_up_to(cache.k_sel);
    for (int64_t& count : blocks.count) count = compressed_length(count, c.l, c.d);
    attend(kCmp, {o[kCmp], lse[kCmp]}, cache.k_cmp, cache.v_cmp, blocks);
    const int64_t most = *std::max_element(blocks.count.begin(), blocks.count.end());
    const int32_t* const position = position_.ptr<int32_t>();
    if (in.lists.empty())
      select_cpu::select<T>(ctx_, lists, q_, cache.k_cmp.slice(1, 0, most), lse[kCmp], c,
                            [&](int64_t b, int64_t) { return select_cpu::Position{position[b]}; });
    attend_listed({o[kSel], lse[kSel]}, cache.k_sel, cache.v_sel, in.lists.empty() ? ConstTensor(lists) : in.lists,
                  c.l_sel);
    attend(kWin, {o[kWin], lse[kWin]}, cache.k_win, cache.v_win, tokens_up_to(cache.k_win));
    nsa_gate_forward(ctx_, gate, q_, gate_weights, c.gate);
    nsa_combine_forward(ctx_, out, {o[kCmp], o[kSel], o[kWin]}, gate);
  }

 private:
  // Visible rows in a cache with token s in row s or s % rows; a plan assumes a full cache.
  FirstRows tokens_up_to(const Tensor& rows) const {
    FirstRows r;
    for (int64_t b = 0; b < B_; ++b)
      r.count.push_back(ctx_.planning ? rows.size(1)
                                      : std::min<int64_t>(position_.ptr<int32_t>()[b] + 1, rows.size(1)));
    return r;
  }
  static int64_t used(const FirstRows& r) { return *std::max_element(r.count.begin(), r.count.end()); }

  void attend_listed(const AttendOut& out, const Tensor& k, const Tensor& v, const ConstTensor& lists, int64_t l_sel) {
    const ListedRows listed{lists.ptr<int32_t>(), position_.ptr<int32_t>(), Hkv_, lists.size(3), l_sel};
    const int64_t tokens = used(tokens_up_to(k));
    attend(kSel, out, k.slice(1, 0, tokens), v.slice(1, 0, tokens), listed);
  }

  template <class Pattern>
  void attend(int branch, const AttendOut& out, Tensor k, Tensor v, const Pattern& pattern) {
    if constexpr (std::is_same_v<Pattern, FirstRows>)  // the loops copy their keys, so pass only the visible rows
      k = k.slice(1, 0, used(pattern)), v = v.slice(1, 0, used(pattern));
    if (!probe_.run[branch]) return;
    attend_cpu::forward<T>(ctx_, out, {q_, k, v}, pattern);
    if (probe_.reads.empty() || ctx_.planning) return;
    int64_t& reads = probe_.reads.ptr<int64_t>()[branch];
    for (int64_t b = 0; b < B_; ++b)
      for (int64_t g = 0; g < Hkv_; ++g)
        pattern.keys(b, 0, g, [&](int64_t begin, int64_t end) { reads += end - begin; });
  }

  Context& ctx_;
  const ConstTensor &q_, &position_;
  const DecodeProbe& probe_;
  int64_t B_, Hkv_;
};

}  // namespace

void nsa_decode(Context& ctx, Tensor out, const DecodeIn& in, const GateWeights& gate, const NsaConfig& c,
                const DecodeProbe& probe) {
  const OpScope op_scope(ctx, "nsa_decode");
  check_decode("nsa_decode", out, in.q, in.position, in.cache.k_win, in.cache.v_win);
  if (!in.lists.empty())
    check_tensor("nsa_decode: lists", in.lists, {in.q.size(0), 1, in.cache.k_win.size(2), c.n_sel}, DType::i32);
  check_every("nsa_decode", c);
  TRIAD_CHECK(c.every == 1 || !in.lists.empty() || !in.shared_lists.empty(),
              "nsa_decode: tokens share lists, and there is no memory for them");
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::nsa_decode(ctx, out, in, gate, c, probe);
  }
  dispatch_float(in.q.dtype, [&]<class T>() {
    DecodeCpu<T>(ctx, in.q, in.position, in.cache.k_win.size(2), probe).nsa(out, in, gate, c);
  });
}

void dense_decode(Context& ctx, Tensor out, const DenseDecodeIn& in, const DecodeProbe& probe) {
  const OpScope op_scope(ctx, "dense_decode");
  check_decode("dense_decode", out, in.q, in.position, in.cache.k, in.cache.v);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::dense_decode(ctx, out, in, probe);
  }
  dispatch_float(in.q.dtype, [&]<class T>() {
    DecodeCpu<T>(ctx, in.q, in.position, in.cache.k.size(2), probe).dense(out, in.cache);
  });
}

void selected_decode(Context& ctx, Tensor out, const DenseDecodeIn& in, ConstTensor lists, int64_t l_sel,
                     const DecodeProbe& probe) {
  const OpScope op_scope(ctx, "selected_decode");
  check_decode("selected_decode", out, in.q, in.position, in.cache.k, in.cache.v);
  const int64_t Hkv = in.cache.k.size(2);
  check_tensor("selected_decode: lists", lists, {in.q.size(0), 1, Hkv, lists.size(3)}, DType::i32);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::selected_decode(ctx, out, in, lists, l_sel, probe);
  }
  dispatch_float(in.q.dtype, [&]<class T>() {
    DecodeCpu<T>(ctx, in.q, in.position, Hkv, probe).selected(out, in.cache, lists, l_sel);
  });
}

void index_decode(Context& ctx, Tensor lists, ConstTensor iq, ConstTensor ik, ConstTensor position,
                  const SelectOptions& o) {
  const OpScope op_scope(ctx, "index_decode");
  TRIAD_CHECK(iq.rank == 4 && iq.size(1) == 1 && is_float(iq.dtype), "index_decode: iq is {}, not one row a sequence",
              iq.str());
  const int64_t B = iq.size(0);
  check_tensor("index_decode: ik", ik, {B, ik.size(1), 1, iq.size(3)}, iq.dtype);
  check_tensor("index_decode: lists", lists, {B, 1, iq.size(2), o.n_sel}, DType::i32);
  check_tensor("index_decode: position", position, {B}, DType::i32);
  check_every("index_decode", o);
  if (ctx.device.is_cuda()) {
    if constexpr (kBuiltWithCuda) return cuda::index_decode(ctx, lists, iq, ik, position, o);
  }
  const int32_t* const at = position.ptr<int32_t>();
  const int64_t tokens = ctx.planning ? ik.size(1) : std::min<int64_t>(*std::max_element(at, at + B) + 1, ik.size(1));
  dispatch_float(iq.dtype, [&]<class T>() {
    select_cpu::select_by_index<T>(ctx, lists, iq, ik.slice(1, 0, tokens), o,
                                   [&](int64_t b, int64_t) { return select_cpu::IndexPosition{at[b]}; });
  });
}

}  // namespace triad
