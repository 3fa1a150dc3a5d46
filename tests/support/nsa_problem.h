// Runs NSA on one sequence, with the same code on the CPU and on a GPU; tests read inputs and results as doubles.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "engine/rng.h"
#include "kernels/common/parallel.h"
#include "kernels/nsa/nsa.h"
#include "tests/support/test.h"

namespace triad::test {

using Values = std::vector<double>;

inline constexpr int kCmp = 0, kSel = 1, kWin = 2;

// A device and dtype to run on, and the relative error that this dtype may cause.
struct Setting {
  Device device;
  DType dtype;
  bool side_streams = true;
  double tolerance() const { return dtype == DType::bf16 ? 2e-2 : 2e-5; }
};

// A test's memory on one device, and copies between it and doubles on the host.
class Lab {
 public:
  explicit Lab(const Setting& s, int64_t arena_bytes = int64_t{3} << 30)
      : setting(s),
        rt_({.device = s.device,
             .arena_bytes = arena_bytes,
             .scratch_bytes = int64_t{2} << 30,
             .side_streams = s.side_streams}) {}
  Context& ctx() { return rt_.ctx(); }

  Tensor poisoned(const Shape& shape, DType dtype) {  // sets every float to NaN
    const Tensor t = rt_.arena().alloc(MemTag::io, "test", dtype, shape);
    if (t.numel() > 0) backend::fill(t.data, t.device, 0xff, t.bytes(), ctx().stream.handle());
    return t;
  }
  Tensor from(const Values& values, const Shape& shape, DType dtype) {
    const Tensor t = rt_.arena().alloc(MemTag::io, "test", dtype, shape);
    assign(t, values);
    return t;
  }
  void assign(const Tensor& t, const Values& values) {
    if (t.numel() == 0) return;  // there is no compressed block if T < l
    std::vector<std::byte> host(static_cast<size_t>(t.bytes()));
    if (t.dtype == DType::i32) {
      std::copy(values.begin(), values.end(), reinterpret_cast<int32_t*>(host.data()));
    } else {
      dispatch_float(t.dtype, [&]<class T>() {
        for (size_t i = 0; i < values.size(); ++i)
          reinterpret_cast<T*>(host.data())[i] = static_cast<T>(static_cast<acc_t<T>>(values[i]));
      });
    }
    write(ctx(), t, host.data());
  }
  Values values(const Tensor& t) {
    if (t.numel() == 0) return {};
    std::vector<std::byte> host(static_cast<size_t>(t.bytes()));
    read(ctx(), host.data(), t);
    Values out(static_cast<size_t>(t.numel()));
    if (t.dtype == DType::i32) {
      std::copy_n(reinterpret_cast<const int32_t*>(host.data()), out.size(), out.begin());
    } else {
      dispatch_float(t.dtype, [&]<class T>() {
        for (size_t i = 0; i < out.size(); ++i)
          out[i] = static_cast<acc_t<T>>(reinterpret_cast<const T*>(host.data())[i]);
      });
    }
    return out;
  }

  const Setting setting;

 private:
  Runtime rt_;
};

inline Values random_values(int64_t n, uint64_t stream) {  // uniform, with unit variance
  const Philox random(20250216, stream);
  Values v(static_cast<size_t>(n));
  for (size_t i = 0; i < v.size(); ++i) v[i] = std::sqrt(12.0) * (random.uniform(i) - 0.5);
  return v;
}

struct Sizes {
  int64_t T, Hkv, G, dk, dv;
  int64_t Hq() const { return Hkv * G; }
  std::string str() const {
    return "T " + std::to_string(T) + " Hkv " + std::to_string(Hkv) + " G " + std::to_string(G) + " dk " +
           std::to_string(dk) + " dv " + std::to_string(dv);
  }
};

inline NsaConfig config(int64_t l, int64_t d, int64_t l_sel, int64_t n_sel, int64_t w, Branch force = Branch::none) {
  NsaConfig c;
  c.l = l, c.d = d, c.l_sel = l_sel, c.n_sel = n_sel, c.w = w;
  c.gate.force = force;
  return c;
}

// Random NSA inputs for one sequence, whose compression is the mean (phi avg), and NSA's results.
struct Problem {
  Lab lab;
  Sizes n;
  NsaConfig c;
  Tensor q, out;
  std::array<Tensor, 3> k, v;
  NsaWeights weights;
  NsaSaved saved;

  Problem(const Setting& setting, const Sizes& n, const NsaConfig& c) : lab(setting), n(n), c(c) {
    const DType T = setting.dtype, acc = acc_dtype(T);
    uint64_t stream = 0;
    auto random = [&](const Shape& shape) { return lab.from(random_values(shape.numel(), stream++), shape, T); };
    q = random({1, n.T, n.Hq(), n.dk});
    for (int b = 0; b < 3; ++b) k[b] = random({1, n.T, n.Hkv, n.dk}), v[b] = random({1, n.T, n.Hkv, n.dv});
    weights.gate = {random({n.dk / 2, n.dk}), random({n.dk / 2}), random({3, n.dk / 2}), random({3})};
    const int64_t Tc = compressed_length(n.T, c.l, c.d);
    saved.k_cmp = lab.poisoned({1, Tc, n.Hkv, n.dk}, T);
    saved.v_cmp = lab.poisoned({1, Tc, n.Hkv, n.dv}, T);
    saved.block_index = lab.poisoned({1, n.T, n.Hkv, c.n_sel}, DType::i32);
    saved.gate = lab.poisoned({3, 1, n.T, n.Hkv}, acc);
    out = lab.poisoned({1, n.T, n.Hq(), n.dv}, T);
    for (int b = 0; b < 3; ++b) {
      saved.o[b] = lab.poisoned(out.shape(), T);
      saved.lse[b] = lab.poisoned({1, n.T, n.Hq()}, acc);
    }
  }
  void forward(bool keep_lists = false) {
    nsa_forward(lab.ctx(), out, saved, {q, {k[0], k[1], k[2]}, {v[0], v[1], v[2]}}, weights, c, keep_lists);
  }
  // The keys and values that branch b attends.
  Tensor keys(int b) const { return b == kCmp ? saved.k_cmp : k[b]; }
  Tensor vals(int b) const { return b == kCmp ? saved.v_cmp : v[b]; }

  // Branch b's keys that row t sees in group g.
  std::vector<int64_t> visible(int b, int64_t t, int64_t g, const Values& lists) const {
    std::vector<int64_t> keys;
    if (b == kCmp)
      for (int64_t j = 0; j * c.d + c.l <= t + 1; ++j) keys.push_back(j);
    if (b == kWin)
      for (int64_t s = std::max<int64_t>(0, t - c.w + 1); s <= t; ++s) keys.push_back(s);
    if (b == kSel)
      for (int64_t i = 0; i < c.n_sel; ++i) {
        const int64_t block = static_cast<int64_t>(lists[static_cast<size_t>((t * n.Hkv + g) * c.n_sel + i)]);
        for (int64_t s = block * c.l_sel; block >= 0 && s < (block + 1) * c.l_sel && s <= t; ++s) keys.push_back(s);
      }
    return keys;
  }
};

inline const Setting kCpu{Device::cpu(), DType::f32};
template <class Check>
void on_gpu(Check&& check) {
  if (!require_gpu()) return;
  for (const DType dtype : {DType::f32, DType::bf16}) check(Setting{Device::cuda(), dtype});
}

}  // namespace triad::test
