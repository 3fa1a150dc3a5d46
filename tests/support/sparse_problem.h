// Block-sparse attention and its index through the C functions in kernels/library/triad_nsa.h, on any device.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "tests/support/library_problem.h"

namespace triad::test {

struct SparseCase {
  LibraryCase base;
  bool dense = false;  // no lists
  int64_t di = 4;
};

// Inputs, lists by the index, and results of every function.
class Sparse {
 public:
  Sparse(const Setting& setting, const SparseCase& n) : p(setting, shared(n.base)), n(n), T(setting.dtype) {
    const LibraryCase& c = n.base;
    acc = acc_dtype(T);
    iq = random({c.B, c.T, c.Hkv, n.di}, 70), ik = random({c.B, c.T, 1, n.di}, 71);
    const Tensor& q = p.in["q"];
    const Shape o_shape{c.B, c.T, c.Hq(), c.dv}, lse_shape{c.B, c.T, c.Hq()};
    lists = p.lab.poisoned({c.B, c.T, c.Hkv, c.options[3]}, DType::i32);
    o = p.lab.poisoned(o_shape, T), lse = p.lab.poisoned(lse_shape, acc);
    d_o = random(o_shape, 72);
    dlse = p.lab.from(random_values(lse_shape.numel(), 73), lse_shape, acc);
    dq = p.lab.poisoned(q.shape(), acc), dk = p.lab.poisoned(p.in["k0"].shape(), T);
    dv = p.lab.poisoned(p.in["v0"].shape(), T);
    loss = p.lab.poisoned({1}, DType::f64);
    diq = p.lab.poisoned(iq.shape(), acc), dik = p.lab.poisoned(ik.shape(), T);
  }
  void select() {
    const triad_nsa_documents documents = p.documents();
    const triad_nsa_tensor q_c = c_tensor(iq), k_c = c_tensor(ik), to = c_tensor(lists);
    p.call("select", [&](void* w, size_t* bytes) {
      return triad_nsa_select_by_index(p.context.get(), stream(), &p.options, &documents, &q_c, &k_c, &to, w, bytes);
    });
  }
  void forward() {
    const triad_nsa_documents documents = p.documents();
    const triad_nsa_tensor q = c_tensor(p.in["q"]), k = c_tensor(p.in["k0"]), v = c_tensor(p.in["v0"]),
                           to = c_tensor(o), to_lse = c_tensor(lse), given = c_tensor(lists);
    p.call("forward", [&](void* w, size_t* bytes) {
      return triad_nsa_block_sparse_forward(p.context.get(), stream(), &p.options, &documents, &q, &k, &v,
                                            or_dense(given), &to, &to_lse, w, bytes);
    });
  }
  void backward(bool through_lse = true) {
    const triad_nsa_documents documents = p.documents();
    const triad_nsa_tensor q = c_tensor(p.in["q"]), k = c_tensor(p.in["k0"]), v = c_tensor(p.in["v0"]),
                           from = c_tensor(o), from_lse = c_tensor(lse), given = c_tensor(lists), up = c_tensor(d_o),
                           up_lse = c_tensor(dlse), q_to = c_tensor(dq), k_to = c_tensor(dk), v_to = c_tensor(dv);
    p.call("backward", [&](void* w, size_t* bytes) {
      return triad_nsa_block_sparse_backward(p.context.get(), stream(), &p.options, &documents, &q, &k, &v,
                                             or_dense(given), &from, &from_lse, &up, through_lse ? &up_lse : nullptr,
                                             &q_to, &k_to, &v_to, w, bytes);
    });
  }
  // Returns the loss.
  double learn(double weight = 1) {
    const triad_nsa_documents documents = p.documents();
    const triad_nsa_tensor q = c_tensor(p.in["q"]), k = c_tensor(p.in["k0"]), from_lse = c_tensor(lse),
                           given = c_tensor(lists), q_c = c_tensor(iq), k_c = c_tensor(ik), to = c_tensor(loss),
                           padding = c_tensor(padding_begin), q_to = c_tensor(diq), k_to = c_tensor(dik);
    p.call("index loss", [&](void* w, size_t* bytes) {
      return triad_nsa_index_loss(p.context.get(), stream(), &p.options, &documents, &q, &k, &from_lse, or_dense(given),
                                  &q_c, &k_c, padding_begin.empty() ? nullptr : &padding, weight, &to, &q_to, &k_to, w,
                                  bytes);
    });
    return p.lab.values(loss)[0];
  }
  void all() {
    select();
    forward();
    backward();
    learn(0.5);
  }
  std::map<std::string, Values> results() {
    std::map<std::string, Values> to;
    for (const auto& [name, t] : std::map<std::string, Tensor>{{"o", o},
                                                               {"lse", lse},
                                                               {"lists", lists},
                                                               {"dq", dq},
                                                               {"dk", dk},
                                                               {"dv", dv},
                                                               {"loss", loss},
                                                               {"diq", diq},
                                                               {"dik", dik}})
      to[name] = p.lab.values(t);
    return to;
  }
  const triad_nsa_tensor* or_dense(const triad_nsa_tensor& given) const { return n.dense ? nullptr : &given; }
  void* stream() { return p.lab.ctx().stream.handle(); }

  LibraryProblem p;
  const SparseCase n;
  const DType T;
  DType acc;
  Tensor iq, ik, lists, o, lse, d_o, dlse, dq, dk, dv, loss, diq, dik;
  Tensor padding_begin;  // absent: all rows count

 private:
  static LibraryCase shared(LibraryCase c) {
    c.shared = true;
    return c;
  }
  Tensor random(const Shape& shape, uint64_t number) {
    return p.lab.from(random_values(shape.numel(), number), shape, T);
  }
};

inline std::vector<SparseCase> sparse_cases() {
  const LibraryCase two{.name = "2x33", .B = 2, .T = 33, .Hkv = 2, .G = 2, .dk = 8, .dv = 6};
  LibraryCase scaled = two, documents = two, wide{.name = "G 6", .B = 1, .T = 70, .Hkv = 1, .G = 6, .dk = 8, .dv = 8};
  scaled.name = "scale", scaled.scale = 0.5;
  documents.name = "documents", documents.B = 1, documents.T = 70, documents.bounds = {0, 3, 33, 70};
  return {{two}, {two, true}, {scaled}, {documents}, {documents, true}, {wide, false, 6}, {wide, true, 6}};
}

}  // namespace triad::test
