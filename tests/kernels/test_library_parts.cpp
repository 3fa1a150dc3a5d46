// The C library's parts (compress, attend, select, combine, and their backwards) compose to its whole.
#include "tests/support/library_problem.h"

using namespace triad;
using namespace triad::test;

namespace {

// Compares the whole with its composed parts, as another framework's autograd would compose them.
void check_parts(const Setting& setting, const LibraryCase& n, double tolerance) {
  LibraryProblem p(setting, n);
  p.forward();
  p.backward();
  const std::map<std::string, Values> whole = p.results();
  std::map<std::string, Values> whole_saved;
  for (int b = 0; b < 3; ++b) whole_saved["o" + std::to_string(b)] = p.lab.values(p.o[b]);
  const DType T = setting.dtype, acc = acc_dtype(T);
  triad_nsa_context* const c = p.context.get();
  void* const stream = p.lab.ctx().stream.handle();
  const triad_nsa_options* const o = &p.options;
  const triad_nsa_documents documents = p.documents();
  const Tensor k_cmp = n.learned ? p.in["k_cmp"] : p.lab.poisoned(p.averages[0].shape(), T);
  const Tensor v_cmp = n.learned ? p.in["v_cmp"] : p.lab.poisoned(p.averages[1].shape(), T);
  const triad_nsa_tensor q = c_tensor(p.in["q"]), k_c = c_tensor(k_cmp), v_c = c_tensor(v_cmp);
  const Tensor index = p.lab.poisoned(p.block_index.shape(), DType::i32);
  const triad_nsa_tensor index_c = c_tensor(index);
  if (!n.learned)
    for (const auto& [name, to] : {std::pair{"k0", &k_c}, {"v0", &v_c}}) {
      const triad_nsa_tensor from = c_tensor(p.in[name]);
      p.call(std::string("compress ") + name,
             [&](void* w, size_t* bytes) { return triad_nsa_compress(c, stream, o, &documents, &from, to, w, bytes); });
    }
  std::array<triad_nsa_tensor, 3> k{k_c}, v{v_c}, out_b, lse_b;
  std::array<Tensor, 3> o_b, l_b;
  for (int b = 0; b < 3; ++b) {
    if (b > 0) k[b] = c_tensor(p.in["k" + std::to_string(b)]), v[b] = c_tensor(p.in["v" + std::to_string(b)]);
    o_b[b] = p.lab.poisoned(p.out.shape(), T), l_b[b] = p.lab.poisoned(p.lse[b].shape(), acc);
    out_b[b] = c_tensor(o_b[b]), lse_b[b] = c_tensor(l_b[b]);
    p.call("attend", [&](void* w, size_t* bytes) {
      return triad_nsa_attend(c, stream, o, &documents, b, &q, &k[b], &v[b], b == TRIAD_NSA_SEL ? &index_c : nullptr,
                              &out_b[b], &lse_b[b], w, bytes);
    });
    if (b == TRIAD_NSA_CMP)
      p.call("select", [&](void* w, size_t* bytes) {
        return triad_nsa_select(c, stream, o, &documents, &q, &k_c, &lse_b[0], &index_c, w, bytes);
      });
    CHECK(p.lab.values(o_b[b]) == whole_saved["o" + std::to_string(b)]);
  }
  CHECK(p.lab.values(index) == whole.at("block_index"));
  const Tensor out = p.lab.poisoned(p.out.shape(), T);
  const triad_nsa_tensor out_c = c_tensor(out), dout = c_tensor(p.dout),
                         gate = c_tensor(LibraryProblem::at(p.in, "gate"));
  const triad_nsa_tensor* const gates = gate.rank == 0 ? nullptr : &gate;
  p.call("combine", [&](void* w, size_t* bytes) {
    return triad_nsa_combine(c, stream, o, out_b.data(), gates, &out_c, w, bytes);
  });
  CHECK(relative_error(p.lab.values(out), whole.at("out")) <= tolerance);

  std::array<Tensor, 3> d_o;
  std::array<triad_nsa_tensor, 3> d_o_c;
  for (int b = 0; b < 3; ++b) d_o[b] = p.lab.poisoned(p.out.shape(), T), d_o_c[b] = c_tensor(d_o[b]);
  const Tensor dgate = gates == nullptr ? Tensor{} : p.lab.poisoned(p.in["gate"].shape(), acc);
  const triad_nsa_tensor dgate_c = c_tensor(dgate);
  p.call("combine backward", [&](void* w, size_t* bytes) {
    return triad_nsa_combine_backward(c, stream, o, &dout, out_b.data(), gates, d_o_c.data(),
                                      gates == nullptr ? nullptr : &dgate_c, w, bytes);
  });
  if (gates != nullptr) CHECK(relative_error(p.lab.values(dgate), whole.at("dgate")) <= tolerance);
  Values dq;
  for (int b = 0; b < 3; ++b) {
    const Tensor dq_b = p.lab.poisoned(p.in["q"].shape(), b == 0 ? acc : T);
    const Shape keys = b == 0 ? k_cmp.shape() : p.in["k1"].shape(),
                values = b == 0 ? v_cmp.shape() : p.in["v1"].shape();
    const Tensor dk = p.lab.poisoned(keys, T), dv = p.lab.poisoned(values, T);
    const triad_nsa_tensor dq_c = c_tensor(dq_b), dk_c = c_tensor(dk), dv_c = c_tensor(dv);
    p.call("attend backward", [&](void* w, size_t* bytes) {
      return triad_nsa_attend_backward(c, stream, o, &documents, b, &q, &k[b], &v[b],
                                       b == TRIAD_NSA_SEL ? &index_c : nullptr, &out_b[b], &lse_b[b], &d_o_c[b], &dq_c,
                                       &dk_c, &dv_c, w, bytes);
    });
    const Values part = p.lab.values(dq_b);
    dq.resize(part.size());
    for (size_t i = 0; i < part.size(); ++i) dq[i] += part[i];
    INFO("branch " << b);
    const std::string of = b == 0 ? "_cmp" : std::to_string(b);
    if (b > 0 || n.learned) {
      CHECK(relative_error(p.lab.values(dk), whole.at("dk" + of)) <= tolerance);
      CHECK(relative_error(p.lab.values(dv), whole.at("dv" + of)) <= tolerance);
      continue;
    }
    const Tensor dx = p.lab.poisoned(p.in["k0"].shape(), T);
    const triad_nsa_tensor dx_c = c_tensor(dx);
    p.call("compress backward", [&](void* w, size_t* bytes) {
      return triad_nsa_compress_backward(c, stream, o, &documents, &dk_c, &dx_c, w, bytes);
    });
    CHECK(relative_error(p.lab.values(dx), whole.at("dk0")) <= tolerance);
  }
  CHECK(relative_error(dq, whole.at("dq")) <= tolerance);
}

}  // namespace

TEST_CASE("library: the parts compose to the whole") {
  for (const Setting& setting : {Setting{Device::cpu(), DType::f64}, {Device::cpu(), DType::f32}})
    for (LibraryCase n : small_cases()) {
      if (n.shared) continue;
      INFO(n.name << " " << name_of(setting.dtype));
      check_parts(setting, n, setting.dtype == DType::f64 ? 1e-12 : 1e-5);
    }
}

TEST_CASE("library: the parts compose to the whole, on a GPU") {
  on_gpu([](const Setting& setting) {
    LibraryCase n{.name = "400", .B = 2, .T = 400, .Hkv = 2, .G = 4, .dk = 64, .dv = 64};
    n.options = {32, 16, 64, 4, 100};
    for (const int64_t d : {64, 128}) {
      n.dk = n.dv = d;
      for (const Gates gates : {Gates::none, Gates::per_group, Gates::per_head}) {
        n.gates = gates;
        INFO(d << " " << static_cast<int>(gates) << " " << name_of(setting.dtype));
        check_parts(setting, n, setting.tolerance());
      }
    }
  });
}
