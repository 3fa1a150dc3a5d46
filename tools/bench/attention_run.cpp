#include "tools/bench/attention_run.h"

#include <algorithm>

#include "engine/rng.h"
#include "kernels/common/op_case_args.h"

namespace triad {

AttentionMemory plan_attention(const AttentionProblem& p, Device device, DType dtype) {
  AttentionMemory m;
  for (const bool forward : {true, false}) {
    Runtime runtime({.device = device, .planning = true});
    const AttentionTensors t = allocate_attention(runtime.arena(), p, dtype, p.T);
    m.arena = runtime.arena().used_bytes();
    const AttentionParts parts(device, p, t, dtype);
    for (const AttentionPart& part : parts.all())
      if (part.forward == forward) part.work(runtime.ctx());
    (forward ? m.scratch_forward : m.scratch_backward) = runtime.scratch().peak_bytes();
    m.saved = saved_bytes(t.saved);
    m.peak = m.saved + t.dqkv.bytes() + t.dout.bytes() + t.dq.bytes() + m.scratch_backward;
    if (!t.dq_group.empty()) m.peak += t.dq_group.bytes();
    if (!t.out.empty()) m.peak += t.out.bytes();
  }
  m.arena += m.scratch();
  return m;
}

namespace {

// Random numbers for a weight, distributed as fresh weights are: N(0, 0.02).
std::vector<std::byte> random_weight(const Tensor& w) {
  constexpr double kStd = 0.02;
  const Philox random(1, 1);
  std::vector<std::byte> host(static_cast<size_t>(w.bytes()));
  for (int64_t i = 0; i < w.numel(); ++i)
    store_element(host.data(), i, w.dtype, kStd * random.normal(static_cast<uint64_t>(i)));
  return host;
}

}  // namespace

void fill_attention(Context& ctx, const AttentionTensors& t, const AttentionProblem& p,
                    const std::vector<std::byte>& qkv, uint64_t stream) {
  write(ctx, t.qkv, qkv.data());
  write(ctx, t.dout.view({p.B * p.T, p.config.n_heads * p.config.d_v}),
        random_rows(p.B * p.T, p.config.n_heads, p.config.d_v, t.dout.dtype, Normals(stream)).data());
  zero(ctx, t.dq);
  if (!t.index.empty()) {
    write(
        ctx, t.index,
        random_rows(p.B * p.T, p.config.n_kv_groups + 1, p.config.nsa.d_index, t.index.dtype, Normals(stream)).data());
    zero(ctx, t.index_loss);
  }
  for (const Tensor& w : t.drawn_weights) write(ctx, w, random_weight(w).data());
  if (!p.bounds.empty()) write(ctx, t.bounds, p.bounds.data());
}

AttentionRun::AttentionRun(const AttentionProblem& p, const AttentionMemory& memory, const std::vector<std::byte>& qkv,
                           Device device, DType dtype)
    : runtime_({.device = device, .arena_bytes = memory.arena, .scratch_bytes = memory.scratch()}),
      tensors_(allocate_attention(runtime_.arena(), p, dtype, p.T)),
      parts_(device, p, tensors_, dtype) {
  fill_attention(ctx(), tensors_, p, qkv, /*stream=*/3);
}

}  // namespace triad
