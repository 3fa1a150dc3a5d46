// Attention with one softmax, over listed blocks or all tokens; the index that lists blocks, and its loss; the check of
// lists.
#include <algorithm>
#include <vector>

#include "kernels/library/branch.h"
#include "kernels/library/outputs.h"
#include "kernels/nsa/index_loss.h"
#include "kernels/nsa/select_index.h"

namespace triad::library {

namespace {

// The options of a call with these lists; without lists, of one in which all tokens up to its own are a row's window.
Options block_sparse_options(const triad_nsa_options* from, const triad_nsa_tensor* block_index) {
  Options options = read_options(from);
  options.w = int64_t{1} << 30;
  if (!present(block_index)) return options;
  options.n_sel = block_index->size[3];
  if (block_index->rank == 4 && options.n_sel < 1)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "block_index has lists of {} entries: at least 1 is needed", options.n_sel);
  return options;
}

int branch_with(const triad_nsa_tensor* block_index) { return present(block_index) ? TRIAD_NSA_SEL : TRIAD_NSA_WIN; }

// An index's inputs, checked, for `groups` groups in rows as long as those of iq.
IndexIn read_index(const Call& call, const triad_nsa_tensor* iq_from, const triad_nsa_tensor* ik_from) {
  const IndexIn index{call.tensor("iq", iq_from, 4), call.tensor("ik", ik_from, 4)};
  call.expect_element("iq", index.q);
  const int64_t width = index.q.size(3);
  if (width < 2 || width % 2 != 0 || width > 256)
    reject(TRIAD_NSA_ERROR_ARGUMENT, "iq is {}: its width has to be even, 2 to 256", index.q.str());
  call.expect("ik", index.k, {index.q.size(0), index.q.size(1), 1, width}, index.q.dtype);
  return index;
}

void select_by_index(Call& call, const triad_nsa_documents* documents, const IndexIn& index,
                     const triad_nsa_tensor* lists_from) {
  const Tensor lists = call.tensor("block_index", lists_from, 4, Call::Strides::contiguous, true);
  const int64_t B = index.q.size(0), T = index.q.size(1);
  call.expect_count(B, T, index.q.size(2), call.options.n_sel);
  call.expect("block_index", lists, {B, T, index.q.size(2), call.options.n_sel}, DType::i32);
  if (lists.numel() == 0) return;
  Scratch::Scope scope(call.ctx.scratch);
  nsa_select_index(call.ctx, lists, index.q, index.k, call.options, call.documents(documents, B, T, scope));
}

struct IndexLossArguments {
  const triad_nsa_tensor *q, *k, *lse, *block_index, *iq, *ik, *padding_begin, *loss, *diq, *dik;
  double weight;
};

void index_loss(Call& call, const triad_nsa_documents* documents, const IndexLossArguments& from) {
  Context& ctx = call.ctx;
  // The values take no part in the loss.
  const Branch b = read_branch(call, branch_with(from.block_index), from.q, from.k, from.k, from.block_index);
  const IndexIn index = read_index(call, from.iq, from.ik);
  const int64_t B = b.q.size(0), T = b.q.size(1);
  call.expect("iq", index.q, {B, T, b.k.size(2), index.q.size(3)}, b.type);
  const Tensor lse = call.tensor("lse", from.lse, 3, Call::Strides::contiguous);
  call.expect("lse", lse, b.lse_shape, b.acc);
  Tensor padding_begin;
  if (present(from.padding_begin)) {
    padding_begin = call.tensor("padding_begin", from.padding_begin, 1, Call::Strides::contiguous);
    call.expect("padding_begin", padding_begin, {B}, DType::i32);
  }
  const Tensor loss = call.tensor("loss", from.loss, 1, Call::Strides::contiguous, true);
  call.expect("loss", loss, {1}, DType::f64);
  const auto wanted = [&](const char* name, const triad_nsa_tensor* t, const Shape& shape) {
    if (!present(t)) return Tensor{};
    const Tensor to = call.tensor(name, t, 4, Call::Strides::heads, true);
    call.expect(name, to, shape, b.type, b.acc);
    return to;
  };
  const Tensor diq = wanted("diq", from.diq, index.q.shape()), dik = wanted("dik", from.dik, index.k.shape());
  zero(ctx, loss);
  if (b.q.numel() == 0) return;
  Scratch::Scope scope(ctx.scratch);
  Outputs to(call, scope);
  const DType key_type = dik.empty() ? b.type : dik.dtype;
  const IndexBackward backward{.in = index,
                               .lse = {},
                               .dq = to.target_dq(diq, b.acc, index.q.shape(), 1),
                               .dk = to.target(dik, key_type, index.k.shape()),
                               .loss = loss,
                               .scale = from.weight,
                               .padding_begin = padding_begin};
  const AttendIn in{scaled(call, b.q, scope), b.k, b.k, call.documents(documents, B, T, scope)};
  nsa_index_loss(ctx, backward, in, lse, b.block_index, call.options.l_sel);
  to.finish();
}

// Throws TRIAD_NSA_ERROR_LISTS, with the first entry that no list may have. lists and bounds are in host memory.
void check_host_lists(const int32_t* lists, const Shape& shape, int64_t block, const std::vector<int64_t>& bounds) {
  const int64_t T = shape[1], groups = shape[2], n = shape[3];
  int64_t in_row = 0, document = 0;  // the number of token i's document in its row, and in all rows
  for (int64_t i = 0; i < shape[0] * T; ++i) {
    if (i == bounds[static_cast<size_t>(document) + 1]) ++document, in_row = i % T == 0 ? 0 : in_row + 1;
    const int64_t begin = bounds[static_cast<size_t>(document)] - i / T * T, t = i % T;
    const int64_t first = begin / block + in_row, last = first + (t - begin) / block;
    for (int64_t g = 0; g < groups; ++g) {
      const int32_t* const list = lists + (i * groups + g) * n;
      for (int64_t j = 0; j < n; ++j) {
        const char* wrong = nullptr;
        if (list[j] < -1)
          wrong = "is no block";
        else if (list[j] >= 0 && j > 0 && list[j - 1] == -1)
          wrong = "follows a -1";
        else if (list[j] >= 0 && list[j] < first)
          wrong = "is a block before the token's document";
        else if (list[j] > last)
          wrong = "is a block after the token's own";
        else if (list[j] >= 0 && j > 0 && list[j] == list[j - 1])
          wrong = "stands twice";
        else if (list[j] >= 0 && j > 0 && list[j] < list[j - 1])
          wrong = "is less than the entry before it";
        if (wrong != nullptr)
          reject(TRIAD_NSA_ERROR_LISTS, "block_index[{},{},{},{}] is {}, which {}; token {} has the blocks {} to {}",
                 i / T, t, g, j, list[j], wrong, t, first, last);
      }
    }
  }
}

}  // namespace

}  // namespace triad::library

using namespace triad;
using namespace triad::library;

extern "C" {

triad_nsa_status triad_nsa_check_lists(triad_nsa_context* context, void* stream, const triad_nsa_options* options_from,
                                       const triad_nsa_documents* documents, const triad_nsa_tensor* block_index) {
  return guarded([&] {
    need(context, "context");
    const Options options = read_options(options_from);
    Tensor lists;
    planned_bytes(*context, options, [&](Call& call) {
      lists = call.tensor("block_index", block_index, 4, Call::Strides::contiguous);
      call.expect("block_index", lists, lists.shape(), DType::i32);
    });
    if (lists.numel() == 0) return;
    if (block_index->data == nullptr) reject(TRIAD_NSA_ERROR_ARGUMENT, "block_index: data is NULL");
    const int64_t B = lists.size(0), T = lists.size(1);
    std::vector<int64_t> bounds;
    if (documents != nullptr && documents->count > 0) {
      for (const int32_t bound : host_bounds(*context, stream, B, T, *documents)) bounds.push_back(bound);
    } else {
      for (int64_t b = 0; b <= B; ++b) bounds.push_back(b * T);
    }
    const std::vector<int32_t> host = on_host(*context, stream, block_index->data, lists.numel());
    check_host_lists(host.data(), lists.shape(), options.l_sel, bounds);
  });
}

triad_nsa_status triad_nsa_select_by_index(triad_nsa_context* context, void* stream,
                                           const triad_nsa_options* options_from, const triad_nsa_documents* documents,
                                           const triad_nsa_tensor* iq, const triad_nsa_tensor* ik,
                                           const triad_nsa_tensor* block_index, void* workspace,
                                           size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    const Options options = read_options(options_from);
    const Key key = Key("select_by_index").add(*options_from).add(documents).add(iq).add(ik).add(block_index);
    run(context, stream, options, key, workspace, workspace_bytes,
        [&](Call& call) { select_by_index(call, documents, read_index(call, iq, ik), block_index); });
  });
}

triad_nsa_status triad_nsa_block_sparse_forward(triad_nsa_context* context, void* stream,
                                                const triad_nsa_options* options_from,
                                                const triad_nsa_documents* documents, const triad_nsa_tensor* q,
                                                const triad_nsa_tensor* k, const triad_nsa_tensor* v,
                                                const triad_nsa_tensor* block_index, const triad_nsa_tensor* o,
                                                const triad_nsa_tensor* lse, void* workspace, size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    const Options options = block_sparse_options(options_from, block_index);
    Key key("block_sparse_forward");
    key.add(*options_from).add(documents).add(q).add(k).add(v).add(block_index).add(o).add(lse);
    run(context, stream, options, key, workspace, workspace_bytes, [&](Call& call) {
      attend(call, documents, read_branch(call, branch_with(block_index), q, k, v, block_index), o, lse);
    });
  });
}

triad_nsa_status triad_nsa_block_sparse_backward(
    triad_nsa_context* context, void* stream, const triad_nsa_options* options_from,
    const triad_nsa_documents* documents, const triad_nsa_tensor* q, const triad_nsa_tensor* k,
    const triad_nsa_tensor* v, const triad_nsa_tensor* block_index, const triad_nsa_tensor* o,
    const triad_nsa_tensor* lse, const triad_nsa_tensor* d_o, const triad_nsa_tensor* dlse, const triad_nsa_tensor* dq,
    const triad_nsa_tensor* dk, const triad_nsa_tensor* dv, void* workspace, size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    const Options options = block_sparse_options(options_from, block_index);
    Key key("block_sparse_backward");
    key.add(*options_from).add(documents).add(q).add(k).add(v).add(block_index).add(o).add(lse);
    key.add(d_o).add(dlse).add(dq).add(dk).add(dv);
    run(context, stream, options, key, workspace, workspace_bytes, [&](Call& call) {
      attend_backward(call, documents, read_branch(call, branch_with(block_index), q, k, v, block_index),
                      {o, lse, d_o, dq, dk, dv, dlse});
    });
  });
}

triad_nsa_status triad_nsa_index_loss(triad_nsa_context* context, void* stream, const triad_nsa_options* options_from,
                                      const triad_nsa_documents* documents, const triad_nsa_tensor* q,
                                      const triad_nsa_tensor* k, const triad_nsa_tensor* lse,
                                      const triad_nsa_tensor* block_index, const triad_nsa_tensor* iq,
                                      const triad_nsa_tensor* ik, const triad_nsa_tensor* padding_begin, double weight,
                                      const triad_nsa_tensor* loss, const triad_nsa_tensor* diq,
                                      const triad_nsa_tensor* dik, void* workspace, size_t* workspace_bytes) {
  return guarded([&] {
    need(context, "context");
    const Options options = block_sparse_options(options_from, block_index);
    Key key("index_loss");
    key.add(*options_from).add(documents).add(q).add(k).add(lse).add(block_index).add(iq).add(ik);
    key.add(padding_begin).add(loss).add(diq).add(dik);
    run(context, stream, options, key, workspace, workspace_bytes, [&](Call& call) {
      index_loss(call, documents, {q, k, lse, block_index, iq, ik, padding_begin, loss, diq, dik, weight});
    });
  });
}

}  // extern "C"
