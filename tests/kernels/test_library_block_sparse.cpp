// The C library's block-sparse attention with one softmax, the selection by an index, and the index's loss: against the
// library's parts, the engine's ops, central differences, and each other.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "engine/with_cuda.h"
#include "kernels/library/library.h"
#include "kernels/nsa/attend_selected.h"
#include "kernels/nsa/dense_attention.h"
#include "kernels/nsa/select_index.h"
#include "tests/support/sparse_problem.h"

using namespace triad;
using namespace triad::test;

namespace {

const Setting kCpu64{Device::cpu(), DType::f64};

// Compares directional derivatives of value() with `gradient`.
void check_differences(Lab& lab, const Tensor& at, const Values& gradient, const std::function<double()>& value) {
  const Values values = lab.values(at), step = random_values(at.numel(), 200);
  const auto moved = [&](double by) {
    Values to = values;
    for (size_t i = 0; i < to.size(); ++i) to[i] += by * step[i];
    lab.assign(at, to);
    return value();
  };
  constexpr double kStep = 2e-6;
  const double difference = (moved(kStep) - moved(-kStep)) / (2 * kStep);
  lab.assign(at, values);
  double expected = 0, size = 0;
  for (size_t i = 0; i < step.size(); ++i) expected += gradient[i] * step[i], size += std::abs(gradient[i] * step[i]);
  CHECK(std::abs(expected - difference) <= 1e-7 * (1 + size));
}

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// The same by the parts of three-branch NSA: with lists the selected branch, without the window that holds all tokens.
void check_against_parts(const Setting& setting, const SparseCase& n) {
  Sparse s(setting, n);
  LibraryProblem& p = s.p;
  s.select();
  s.forward();
  s.backward(/*through_lse=*/false);
  const auto mine = s.results();
  triad_nsa_options options = p.options;
  options.window = n.base.T;
  const int branch = n.dense ? TRIAD_NSA_WIN : TRIAD_NSA_SEL;
  const triad_nsa_documents documents = p.documents();
  const triad_nsa_tensor q = c_tensor(p.in["q"]), k = c_tensor(p.in["k0"]), v = c_tensor(p.in["v0"]),
                         lists = c_tensor(s.lists), o = c_tensor(s.o), lse = c_tensor(s.lse), d_o = c_tensor(s.d_o),
                         dq = c_tensor(s.dq), dk = c_tensor(s.dk), dv = c_tensor(s.dv);
  for (const Tensor& t : {s.o, s.lse, s.dq, s.dk, s.dv})
    backend::fill(t.data, t.device, 0xff, t.bytes(), p.lab.ctx().stream.handle());
  p.call("attend", [&](void* w, size_t* bytes) {
    return triad_nsa_attend(p.context.get(), s.stream(), &options, &documents, branch, &q, &k, &v, s.or_dense(lists),
                            &o, &lse, w, bytes);
  });
  p.call("attend backward", [&](void* w, size_t* bytes) {
    return triad_nsa_attend_backward(p.context.get(), s.stream(), &options, &documents, branch, &q, &k, &v,
                                     s.or_dense(lists), &o, &lse, &d_o, &dq, &dk, &dv, w, bytes);
  });
  for (const auto& [name, values] : s.results()) {
    INFO(name);
    if (name != "loss" && name != "diq" && name != "dik") CHECK(values == mine.at(name));
  }
}

// The index's loss and gradients as the engine computes them along with a branch's backward.
void check_loss_against_engine(const Setting& setting, const SparseCase& n) {
  Sparse s(setting, n);
  Lab& lab = s.p.lab;
  Context& ctx = lab.ctx();
  s.select();
  s.forward();
  const double loss = s.learn(0.25);
  const Values diq = lab.values(s.diq), dik = lab.values(s.dik);
  const IndexIn index{s.iq, s.ik};
  const AttendIn in{s.p.in["q"], s.p.in["k0"], s.p.in["v0"]};
  const Tensor student = lab.poisoned({n.base.B, n.base.T, n.base.Hkv}, s.acc);
  const IndexForward forward{index, student};
  const Tensor sum = lab.from({0}, {1}, DType::f64);
  const IndexBackward backward{index, student, lab.poisoned(s.iq.shape(), s.acc), lab.poisoned(s.ik.shape(), s.T),
                               sum,   0.25};
  const DenseGrad grad{s.dq, s.dk, s.dv};
  if (n.dense) {
    dense_attention_forward(ctx, {s.o, s.lse}, in, &forward);
    dense_attention_backward(ctx, grad, s.d_o, in, {s.o, s.lse}, &backward);
  } else {
    nsa_attend_selected_forward(ctx, {s.o, s.lse}, in, s.lists, n.base.options[2], nullptr, &forward);
    const Tensor delta = lab.poisoned(s.lse.shape(), s.acc);
    attention_delta(ctx, delta, s.d_o, s.o);
    zero(ctx, s.dq);
    nsa_attend_selected_backward(ctx, {s.dq, s.dk, s.dv}, {s.d_o, {}, delta, s.lse}, in, s.lists, n.base.options[2],
                                 &backward);
  }
  CHECK(lab.values(sum)[0] == loss);
  CHECK(lab.values(backward.dq) == diq);
  CHECK(lab.values(backward.dk) == dik);
}

}  // namespace

TEST_CASE("library: block-sparse attention has the bits of the parts of NSA") {
  for (const SparseCase& n : sparse_cases()) {
    INFO(n.base.name << (n.dense ? ", dense" : ""));
    check_against_parts(kCpu64, n);
    check_against_parts(kCpu, n);
  }
}

TEST_CASE("library: gradients of block-sparse attention, through lse too, are central differences") {
  for (const SparseCase& n : sparse_cases()) {
    Sparse s(kCpu64, n);
    Lab& lab = s.p.lab;
    s.select();
    if (!n.dense) {  // lists from elsewhere: shorter ones, and empty ones
      Values lists = lab.values(s.lists);
      const size_t entries = static_cast<size_t>(n.base.options[3]);
      for (size_t i = 0; i < lists.size(); i += entries)
        std::fill(lists.begin() + static_cast<int64_t>(i + i / entries % (entries + 1)),
                  lists.begin() + static_cast<int64_t>(i + entries), -1);
      lab.assign(s.lists, lists);
    }
    const Values d_o = lab.values(s.d_o), dlse = lab.values(s.dlse);
    bool empty = false;
    const auto value = [&] {
      s.forward();
      const Values o = lab.values(s.o), lse = lab.values(s.lse);
      double sum = dot(o, d_o);
      for (size_t i = 0; i < lse.size(); ++i) {
        if (std::isfinite(lse[i]))
          sum += lse[i] * dlse[i];
        else
          empty = true;
      }
      return sum;
    };
    value();
    CHECK(empty == !n.dense);
    s.backward();
    for (const auto& [name, gradient] : {std::pair{"q", s.dq}, {"k0", s.dk}, {"v0", s.dv}}) {
      INFO(n.base.name << (n.dense ? ", dense: d" : ": d") << name);
      check_differences(lab, s.p.in[name], lab.values(gradient), value);
    }
  }
}

TEST_CASE("library: an index's loss has the engine's bits, and its gradients are central differences") {
  for (const SparseCase& n : sparse_cases()) {
    INFO(n.base.name << (n.dense ? ", dense" : ""));
    if (n.base.scale == 0 && n.base.bounds.empty()) check_loss_against_engine(kCpu64, n);
    Sparse s(kCpu64, n);
    Lab& lab = s.p.lab;
    s.select();
    s.forward();
    CHECK(s.learn(2) > 0);
    const Values diq = lab.values(s.diq), dik = lab.values(s.dik);
    const auto value = [&] { return 2 * s.learn(2); };
    check_differences(lab, s.iq, diq, value);
    check_differences(lab, s.ik, dik, value);
  }
}

TEST_CASE("library: an index's loss leaves out padding, whose rows teach nothing") {
  for (const SparseCase& n : sparse_cases()) {
    INFO(n.base.name << (n.dense ? ", dense" : ""));
    Sparse s(kCpu64, n);
    Lab& lab = s.p.lab;
    s.select();
    s.forward();
    const double whole = s.learn();
    Values begins(static_cast<size_t>(n.base.B), static_cast<double>(n.base.T));
    s.padding_begin = lab.from(begins, {n.base.B}, DType::i32);
    CHECK(s.learn() == whole);
    begins[0] = 20;
    lab.assign(s.padding_begin, begins);
    const double loss = s.learn(2);
    CHECK((loss > 0 && loss < whole));
    const Values diq = lab.values(s.diq), dik = lab.values(s.dik);
    const size_t row = static_cast<size_t>(n.base.Hkv * n.di), end = row * static_cast<size_t>(n.base.T);
    for (size_t i = 20 * row; i < end; ++i) REQUIRE(diq[i] == 0);
    const auto value = [&] { return 2 * s.learn(2); };
    check_differences(lab, s.iq, diq, value);
    check_differences(lab, s.ik, dik, value);
    begins.assign(begins.size(), 0);
    lab.assign(s.padding_begin, begins);
    CHECK(s.learn() == 0);
  }
}

TEST_CASE("library: lists by an index are the engine's, and documents have those that they have alone") {
  SparseCase packed = sparse_cases()[3];
  Sparse s(kCpu64, packed);
  s.all();
  const std::map<std::string, Values> together = s.results();
  const std::vector<int32_t> bounds = packed.base.bounds;
  double loss = 0;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    SparseCase one = packed;
    one.base.bounds.clear();
    one.base.T = bounds[i + 1] - bounds[i];
    Sparse alone(kCpu64, one);
    const auto rows = [&](const Values& values) {
      const int64_t row = static_cast<int64_t>(values.size()) / packed.base.T;
      return Values(values.begin() + bounds[i] * row, values.begin() + bounds[i + 1] * row);
    };
    for (const std::string name : {"q", "k0", "v0"})
      alone.p.lab.assign(alone.p.in[name], rows(s.p.lab.values(s.p.in[name])));
    for (const auto& [to, from] :
         {std::pair{alone.iq, s.iq}, {alone.ik, s.ik}, {alone.d_o, s.d_o}, {alone.dlse, s.dlse}})
      alone.p.lab.assign(to, rows(s.p.lab.values(from)));
    alone.all();
    const Tensor expected = alone.p.lab.poisoned(alone.lists.shape(), DType::i32);
    SelectOptions o;
    o.l_sel = one.base.options[2], o.n_sel = one.base.options[3];
    nsa_select_index(alone.p.lab.ctx(), expected, alone.iq, alone.ik, o);
    CHECK(alone.p.lab.values(expected) == alone.p.lab.values(alone.lists));
    std::map<std::string, Values> results = alone.results();
    const double first = static_cast<double>(bounds[i] / o.l_sel + static_cast<int64_t>(i));
    for (double& entry : results["lists"])
      if (entry >= 0) entry += first;
    CHECK(rows(together.at("lists")) == results["lists"]);
    loss += results["loss"][0];
    for (const auto& [name, values] : results) {
      INFO("document " << i << ", " << name);
      if (name != "loss" && name != "lists") CHECK(relative_error(rows(together.at(name)), values) <= 1e-12);
    }
  }
  CHECK(together.at("loss")[0] == Approx(loss).epsilon(1e-12));
}

TEST_CASE("library: block-sparse attention on a GPU") {
  on_gpu([](const Setting& setting) {
    for (const int64_t block : {64, 128})
      for (const int64_t width : {64, 128})
        for (const int64_t G : {1, 2, 4, 6, 8, 16})
          for (const bool dense : {false, true}) {
            SparseCase n{{.name = "gpu", .B = 1, .T = 500, .Hkv = 2, .G = G, .dk = width, .dv = width}, dense, 64};
            n.base.options = {32, 16, block, 3, 12};
            INFO(block << " " << width << " " << G << (dense ? " dense" : ""));
            check_against_parts(setting, n);
            Sparse here(setting, n), there({Device::cpu(), setting.dtype}, n);
            here.all();
            const std::map<std::string, Values> first = here.results();
            // On the CPU with the GPU's lists: scores that are nearly equal may be ranked otherwise.
            there.p.lab.assign(there.lists, first.at("lists"));
            there.forward();
            there.backward();
            there.learn(0.5);
            for (const auto& [name, values] : there.results())
              if (name != "lists") {
                INFO(name);
                CHECK(relative_error(first.at(name), values) <= setting.tolerance());
              }
            here.all();
            CHECK(here.results() == first);
          }
  });
}

namespace {

void check_status(triad_nsa_status status, triad_nsa_status expected, const std::string& words) {
  const std::string message = status == TRIAD_NSA_OK ? "" : triad_nsa_last_error();
  INFO(triad_nsa_status_name(status) << ": " << message << "\nexpected: " << words);
  CHECK(status == expected);
  CHECK(message.find(words) != std::string::npos);
}

void check_lists_of(const Setting& setting) {
  constexpr auto kLists = TRIAD_NSA_ERROR_LISTS;
  struct Bad {
    std::vector<int32_t> bounds;
    size_t list;  // the number of the list, of 2 rows with 35 tokens, or 1 with 70, and 2 groups
    Values entries;
    std::string words;
  };
  const std::vector<Bad> cases = {
      {{}, 35 * 2 + 33 * 2 + 1, {1, 0, -1}, "[1,33,1,1] is 0, which is less than the entry before it"},
      {{}, 33 * 2, {1, 1, -1}, "[0,33,0,1] is 1, which stands twice"},
      {{},
       31 * 2,
       {0, 2, -1},
       "[0,31,0,1] is 2, which is a block after the token's own; token 31 has the blocks 0 to 1"},
      {{}, 33 * 2, {-1, 2, -1}, "[0,33,0,1] is 2, which follows a -1"},
      {{}, 33 * 2, {0, 2, -7}, "[0,33,0,2] is -7, which is no block"},
      {{0, 3, 33, 70}, 20 * 2, {0, 1, -1}, "[0,20,0,0] is 0, which is a block before the token's document"},
      {{0, 3, 33, 70},
       69 * 2,
       {4, 5, 7},
       "[0,69,0,2] is 7, which is a block after the token's own; token 69 has the blocks 4 to 6"},
      {{0, 20, 35, 70}, 40 * 2, {1, -1, -1}, "[1,5,0,0] is 1, which is a block after the token's own"},  // of two rows
  };
  for (const Bad& bad : cases) {
    INFO(bad.words);
    SparseCase n{{.name = "lists", .B = 2, .T = 35, .Hkv = 2, .G = 1, .dk = 8, .dv = 8, .bounds = bad.bounds}};
    if (!bad.bounds.empty() && bad.bounds[2] != n.base.T) n.base.B = 1, n.base.T = 70;
    Sparse s(setting, n);
    s.select();
    const triad_nsa_documents documents = s.p.documents();
    const triad_nsa_tensor lists = c_tensor(s.lists);
    const auto check = [&] {
      return triad_nsa_check_lists(s.p.context.get(), s.stream(), &s.p.options, &documents, &lists);
    };
    check_status(check(), TRIAD_NSA_OK, "");
    Values values = s.p.lab.values(s.lists);
    std::copy(bad.entries.begin(), bad.entries.end(), values.begin() + static_cast<int64_t>(bad.list * 3));
    s.p.lab.assign(s.lists, values);
    check_status(check(), kLists, bad.words);
  }
}

}  // namespace

TEST_CASE("library errors: wrong lists") { check_lists_of(kCpu); }

TEST_CASE("library errors: wrong lists, on a GPU") {
  if (require_gpu()) check_lists_of({Device::cuda(), DType::f32});
}

TEST_CASE("library errors: arguments of block-sparse attention and of an index") {
  Sparse s(kCpu, sparse_cases()[0]);
  s.all();
  LibraryProblem& p = s.p;
  const triad_nsa_options* const options = &p.options;
  triad_nsa_context* const c = p.context.get();
  const triad_nsa_tensor q = c_tensor(p.in["q"]), k = c_tensor(p.in["k0"]), v = c_tensor(p.in["v0"]), o = c_tensor(s.o),
                         lse = c_tensor(s.lse), d_o = c_tensor(s.d_o), dq = c_tensor(s.dq), dk = c_tensor(s.dk),
                         dv = c_tensor(s.dv), ik = c_tensor(s.ik), loss = c_tensor(s.loss);
  triad_nsa_tensor lists = c_tensor(s.lists), iq = c_tensor(s.iq), dlse = c_tensor(s.dlse);
  size_t bytes = 0;
  constexpr auto kArgument = TRIAD_NSA_ERROR_ARGUMENT;
  const auto forward = [&] {
    return triad_nsa_block_sparse_forward(c, nullptr, options, nullptr, &q, &k, &v, &lists, &o, &lse, nullptr, &bytes);
  };
  const auto select = [&] {
    return triad_nsa_select_by_index(c, nullptr, options, nullptr, &iq, &ik, &lists, nullptr, &bytes);
  };
  const Tensor begins = p.lab.from({7, 33}, {2}, DType::i32);
  triad_nsa_tensor padding = c_tensor(begins);
  const auto index_loss = [&](triad_nsa_context* with, const triad_nsa_tensor& to) {
    return triad_nsa_index_loss(with, nullptr, options, nullptr, &q, &k, &lse, &lists, &iq, &ik, &padding, 1, &to,
                                nullptr, nullptr, nullptr, &bytes);
  };
  lists.size[0] = 1;
  check_status(forward(), kArgument, "block_index is i32[1,33,2,3] on cpu, not i32[2,33,2,3]");
  lists.size[0] = 2, lists.size[3] = 0;
  check_status(forward(), kArgument, "block_index has lists of 0 entries");
  lists.size[3] = 3, lists.dtype = TRIAD_NSA_F32;
  check_status(forward(), kArgument, "block_index is f32");
  lists.dtype = TRIAD_NSA_I32, lists.stride[2] = 4;
  check_status(forward(), TRIAD_NSA_ERROR_STRIDE, "block_index: strides");
  lists = c_tensor(s.lists);
  dlse.size[0] = 1;
  check_status(triad_nsa_block_sparse_backward(c, nullptr, options, nullptr, &q, &k, &v, &lists, &o, &lse, &d_o, &dlse,
                                               &dq, &dk, &dv, nullptr, &bytes),
               kArgument, "dlse is f32[1,33,4] on cpu, not f32[2,33,4]");
  iq.size[3] = 3;
  check_status(select(), kArgument, "iq is f32[2,33,2,3] on cpu: its width has to be even, 2 to 256");
  iq.size[3] = 2;
  check_status(select(), kArgument, "ik is f32[2,33,1,4] on cpu, not f32[2,33,1,2]");
  iq = c_tensor(s.iq), iq.size[2] = 1;
  check_status(select(), kArgument, "block_index is i32[2,33,2,3] on cpu, not i32[2,33,1,3]");
  check_status(index_loss(c, loss), kArgument, "iq is f32[2,33,1,4] on cpu, not f32[2,33,2,4]");
  iq = c_tensor(s.iq);
  check_status(index_loss(c, o), kArgument, "loss has 4 axes, not 1");
  check_status(index_loss(nullptr, loss), kArgument, "context is NULL");
  padding.size[0] = 1;
  check_status(index_loss(c, loss), kArgument, "padding_begin is i32[1] on cpu, not i32[2]");
}

TEST_CASE("library errors: random bytes as arguments of block-sparse attention are refused or planned", "[build]") {
  Sparse s(kCpu, sparse_cases()[0]);
  LibraryProblem& p = s.p;
  const Philox random(8, 0);
  uint64_t at = 0, planned = 0;
  const Tensor begins = p.lab.from({7, 33}, {2}, DType::i32);
  triad_nsa_context gpu(Device::cuda(), false);  // plans for Hopper, with or without a GPU
  gpu.traits = {132, 90};
  for (int run = 0; run < 4000; ++run) {
    triad_nsa_options options = p.options;
    std::vector<triad_nsa_tensor> t;
    for (const Tensor& each : {p.in["q"], p.in["k0"], p.in["v0"], s.lists, s.o, s.lse, s.d_o, s.dlse, s.dq, s.dk, s.dv,
                               s.iq, s.ik, s.loss, s.diq, s.dik, begins})
      t.push_back(c_tensor(each));
    for (int i = 0; i < 2; ++i) {  // overwrites 8-byte words with small, large or negative numbers
      const bool in_options = random.uniform(at++) < 0.2;
      void* const chosen =
          in_options ? static_cast<void*>(&options) : &t[static_cast<size_t>(random.uniform(at++) * 17)];
      const double words = (in_options ? sizeof options : sizeof t[0]) / 8.0, kind = random.uniform(at++),
                   x = random.uniform(at++);
      const auto number = static_cast<int64_t>(kind < 0.6 ? x * 70 : kind < 0.8 ? x * 0x1p62 : -x * 100);
      std::memcpy(static_cast<char*>(chosen) + 8 * static_cast<size_t>(random.uniform(at++) * words), &number, 8);
    }
    triad_nsa_context* const c = run % 2 == 0 || !backend::built_with_cuda() ? p.context.get() : &gpu;
    const auto* const o = &options;
    size_t bytes = 0;
    for (const triad_nsa_status status :
         {triad_nsa_block_sparse_forward(c, nullptr, o, nullptr, &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], nullptr,
                                         &bytes),
          triad_nsa_block_sparse_backward(c, nullptr, o, nullptr, &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6],
                                          &t[7], &t[8], &t[9], &t[10], nullptr, &bytes),
          triad_nsa_select_by_index(c, nullptr, o, nullptr, &t[11], &t[12], &t[3], nullptr, &bytes),
          triad_nsa_index_loss(c, nullptr, o, nullptr, &t[0], &t[1], &t[5], &t[3], &t[11], &t[12],
                               run % 3 == 0 ? nullptr : &t[16], 1, &t[13], &t[14], &t[15], nullptr, &bytes)}) {
      INFO(run << ": " << triad_nsa_status_name(status) << ", " << triad_nsa_last_error());
      planned += status == TRIAD_NSA_OK;
      REQUIRE(status != TRIAD_NSA_ERROR_INTERNAL);
    }
  }
  CHECK(planned > 1000);
}
