// Decoding cache cases: appending a token, and filling the cache from a forward pass. Cache content that the op must
// not change is checked too: every tensor starts as a copy of its "_before" tensor. There is no backward.
#include <algorithm>
#include <cmath>

#include "kernels/common/op_case.h"
#include "kernels/decode/cache.h"

namespace triad {

namespace {

struct CacheSizes {
  int64_t B, S, Hq, Hkv, dk, dv;
};

constexpr const char* kBranches[] = {"cmp", "sel", "win"};

class CacheCase {
 public:
  // begun: the cache starts as a copy of the "_before" tensors; otherwise the op must write everything.
  CacheCase(std::string name, const CacheSizes& n, const NsaConfig& config, bool dense, bool begun)
      : n_(n),
        c_(config),
        dense_(dense),
        begun_(begun),
        case_{.op = dense ? "dense_cache" : "nsa_cache", .name = std::move(name)} {
    if (dense) {
      cache("dense", n.S);
      return;
    }
    cache("win", std::min(config.w, n.S));
    cache("sel", n.S);
    cache("cmp", compressed_length(n.S, config.l, config.d));
    cache("raw", config.l);
  }

  // A case for nsa_cache_append(). positions: the B new tokens' positions.
  OpCase append(std::vector<int> positions) && {
    const auto [B, S, Hq, Hkv, dk, dv] = n_;
    constant("q_before", {B, 1, Hq, dk});
    case_.args.push_back({.name = "q", .role = ArgRole::saved, .shape = {B, 1, Hq, dk}});
    rows("row_", B, 1, 8);
    constant("cos", {S, dk / 2}, 1, ArgType::acc);
    constant("sin", {S, dk / 2}, 1, ArgType::acc);
    constant("position", {B}, 1, ArgType::i32);
    case_.args.back().fill = [positions](int64_t i, uint64_t) { return double(positions[static_cast<size_t>(i)]); };
    for (const bool key : {true, false}) {
      const std::string of = key ? "_k" : "_v";
      const int64_t D = key ? dk : dv;
      if (c_.phi == Phi::conv) constant("w" + of, {c_.l, D}, 0.3);
      if (c_.phi != Phi::mlp) continue;
      constant("pos" + of, {c_.l, D}, 0.3);
      constant("fc1" + of, {2 * D, c_.l * D}, 0.2);
      constant("fc2" + of, {D, 2 * D}, 0.2);
    }
    case_.forward = [*this](Context& ctx, const Args& a) {
      begin(ctx, a);
      copy(ctx, a["q"], a["q_before"]);
      const auto phi = [&](const std::string& of) {
        return PhiWeights{a["w" + of], a["pos" + of], a["fc1" + of], a["fc2" + of]};
      };
      if (dense_)
        dense_cache_append(ctx, {a["k_dense"], a["v_dense"]}, a["q"], a["row_in_k_dense"], a["row_in_v_dense"],
                           a["position"], a["cos"], a["sin"]);
      else
        nsa_cache_append(ctx, cache_of(a), a["q"], in(a, "row_"), a["position"], a["cos"], a["sin"],
                         {phi("_k"), phi("_v"), {}}, c_);
    };
    // Rows of k (and as many of v) per token and group. Each of the `pairs` new rows is read and written. Every d
    // tokens a compressed block reads l rows and writes one: `block` is how many that is per token.
    const double pairs = dense_ ? 1 : 3;
    const double block = dense_ ? 0 : static_cast<double>(c_.l + 1) / static_cast<double>(c_.d);
    case_.forward_bytes =
        2 * static_cast<double>(B) *
        (2 * static_cast<double>(Hq * dk) + (2 * pairs + block) * static_cast<double>(Hkv * (dk + dv)));
    return case_;
  }

  // A case for nsa_cache_fill(): fills the caches of these texts' sequences from a forward pass over T tokens.
  OpCase fill(const std::vector<CachedText>& texts, int64_t T) && {
    rows("", 1, T, 0);
    if (!dense_) {
      constant("pass_k_cmp", {1, compressed_length(T, c_.l, c_.d), n_.Hkv, n_.dk});
      constant("pass_v_cmp", {1, compressed_length(T, c_.l, c_.d), n_.Hkv, n_.dv});
    }
    case_.forward = [*this, texts](Context& ctx, const Args& a) {
      begin(ctx, a);
      if (dense_)
        dense_cache_fill(ctx, {a["k_dense"], a["v_dense"]}, texts, a["in_k_dense"], a["in_v_dense"]);
      else
        nsa_cache_fill(ctx, cache_of(a), texts, in(a, ""), a["pass_k_cmp"], a["pass_v_cmp"], c_);
    };
    double stored = 0;
    for (const auto& [b, begin, n] : texts) {
      stored += static_cast<double>(std::min(dense_ ? n_.S : c_.w, n));
      if (!dense_) stored += static_cast<double>(n + std::min(c_.l, n) + compressed_length(n, c_.l, c_.d));
    }
    case_.forward_bytes = 4 * stored * static_cast<double>(n_.Hkv * (n_.dk + n_.dv));
    return case_;
  }

 private:
  void constant(std::string name, Shape shape, double std = 1, ArgType type = ArgType::element, int64_t pad = 0) {
    case_.args.push_back(
        {.name = std::move(name), .role = ArgRole::constant, .shape = shape, .type = type, .std = std, .row_pad = pad});
  }
  void cache(const std::string& what, int64_t count) {
    for (const bool key : {true, false}) {
      const std::string name = (key ? "k_" : "v_") + what;
      const Shape shape{n_.B, count, n_.Hkv, key ? n_.dk : n_.dv};
      if (begun_) constant(name + "_before", shape);
      case_.args.push_back({.name = name, .role = ArgRole::saved, .shape = shape});
    }
  }
  // Adds the input rows of a step ("row_in_k_sel") or a forward pass ("in_k_sel") for each branch. They are strided,
  // like slices of a projection's rows.
  void rows(const std::string& front, int64_t B, int64_t T, int64_t pad) {
    for (const char* branch : dense_ ? std::vector{"dense"} : std::vector(std::begin(kBranches), std::end(kBranches))) {
      constant(front + "in_k_" + branch, {B, T, n_.Hkv, n_.dk}, 1, ArgType::element, pad);
      constant(front + "in_v_" + branch, {B, T, n_.Hkv, n_.dv}, 1, ArgType::element, pad);
    }
  }
  NsaIn in(const Args& a, const std::string& front) const {
    NsaIn in{};
    for (int b = 0; b < 3; ++b)
      in.k[b] = a[front + "in_k_" + kBranches[b]], in.v[b] = a[front + "in_v_" + kBranches[b]];
    return in;
  }
  static NsaCache cache_of(const Args& a) {
    return {a["k_sel"], a["v_sel"], a["k_win"], a["v_win"], a["k_cmp"], a["v_cmp"], a["k_raw"], a["v_raw"]};
  }
  void begin(Context& ctx, const Args& a) const {
    if (!begun_) return;
    for (const char* name :
         {"k_dense", "v_dense", "k_win", "v_win", "k_sel", "v_sel", "k_cmp", "v_cmp", "k_raw", "v_raw"})
      if (!a[name].empty()) copy(ctx, a[name], a[name + std::string("_before")]);
  }

  CacheSizes n_;
  NsaConfig c_;
  bool dense_, begun_;
  OpCase case_;
};

OpCase append_case(std::string name, const CacheSizes& n, std::vector<int> positions, const NsaConfig& c,
                   bool dense = false) {
  return CacheCase("append_" + name, n, c, dense, true).append(std::move(positions));
}
OpCase fill_case(std::string name, const CacheSizes& n, const std::vector<CachedText>& texts, int64_t T,
                 const NsaConfig& c, bool dense = false) {
  return CacheCase("fill_" + name, n, c, dense, true).fill(texts, T);
}
// 70 texts of 1 to 7 tokens, more than a launch takes, in the reverse order of their sequences.
std::vector<CachedText> many_texts() {
  std::vector<CachedText> texts;
  for (int64_t i = 0; i < 70; ++i) texts.push_back({.b = 69 - i, .begin = 8 * i, .n = 1 + i % 7});
  return texts;
}

// The keys of a taught index: one head, appended to a cache of S rows.
OpCase append_index_case(std::string name, int64_t S, int64_t Hkv, int64_t di, const std::vector<int>& positions) {
  OpCase c{.op = "index_cache", .name = "append_" + std::move(name)};
  const auto B = static_cast<int64_t>(positions.size());
  const auto constant = [&](std::string arg, Shape shape, ArgType type = ArgType::element, int64_t row_pad = 0) {
    c.args.push_back(
        {.name = std::move(arg), .role = ArgRole::constant, .shape = shape, .type = type, .row_pad = row_pad});
  };
  constant("k_before", {B, S, 1, di});
  constant("q_before", {B, 1, Hkv, di});
  constant("row", {B, 1, 1, di}, ArgType::element, 8);
  constant("cos", {S, di / 2}, ArgType::acc);
  constant("sin", {S, di / 2}, ArgType::acc);
  constant("position", {B}, ArgType::i32);
  c.args.back().fill = [positions](int64_t i, uint64_t) { return double(positions[static_cast<size_t>(i)]); };
  c.args.push_back({.name = "k", .role = ArgRole::saved, .shape = {B, S, 1, di}});
  c.args.push_back({.name = "q", .role = ArgRole::saved, .shape = {B, 1, Hkv, di}});
  c.forward = [](Context& ctx, const Args& a) {
    copy(ctx, a["k"], a["k_before"]);
    copy(ctx, a["q"], a["q_before"]);
    index_cache_append(ctx, a["k"], a["q"], a["row"], a["position"], a["cos"], a["sin"]);
  };
  c.forward_bytes = 4 * static_cast<double>(B * (Hkv + 1) * di);
  return c;
}
OpCase fill_index_case(std::string name, int64_t B, int64_t S, int64_t di, const std::vector<CachedText>& texts,
                       int64_t T) {
  OpCase c{.op = "index_cache", .name = "fill_" + std::move(name)};
  c.args.push_back({.name = "k_before", .role = ArgRole::constant, .shape = {B, S, 1, di}});
  c.args.push_back({.name = "pass_k", .role = ArgRole::constant, .shape = {1, T, 1, di}, .row_pad = 8});
  c.args.push_back({.name = "k", .role = ArgRole::saved, .shape = {B, S, 1, di}});
  c.forward = [texts](Context& ctx, const Args& a) {
    copy(ctx, a["k"], a["k_before"]);
    index_cache_fill(ctx, a["k"], texts, a["pass_k"]);
  };
  for (const CachedText& text : texts) c.forward_bytes += 4 * static_cast<double>(text.n * di);
  return c;
}

}  // namespace

std::vector<OpCase> cache_cases() {
  const auto config = [](Phi phi, int64_t l, int64_t d, int64_t w) {
    NsaConfig c;
    c.phi = phi, c.l = l, c.d = d, c.w = w;
    return c;
  };
  // Positions: the first, one before a block's end, block ends, one after the ring has wrapped around, the last.
  std::vector<OpCase> cases = {
      append_case("avg", {5, 40, 6, 2, 10, 6}, {0, 6, 7, 11, 39}, config(Phi::avg, 8, 4, 12)),
      append_case("conv", {4, 40, 3, 3, 8, 8}, {7, 12, 35, 38}, config(Phi::conv, 8, 4, 12)),
      append_case("mlp", {3, 40, 4, 2, 8, 8}, {6, 7, 39}, config(Phi::mlp, 8, 4, 12)),
      append_case("mlp_9_groups", {3, 20, 3, 3, 8, 6}, {9, 12, 19}, config(Phi::mlp, 6, 3, 7)),
      append_case("avg_64", {2, 200, 12, 2, 64, 64}, {47, 175}, config(Phi::avg, 32, 16, 100)),
      append_case("conv_128_G16", {2, 100, 16, 1, 128, 128}, {31, 95}, config(Phi::conv, 32, 16, 64)),
      append_case("mlp_64", {2, 100, 6, 1, 64, 64}, {47, 95}, config(Phi::mlp, 32, 16, 64)),
      append_case("l1_d1", {2, 9, 2, 1, 16, 16}, {0, 8}, config(Phi::conv, 1, 1, 1)),
      append_case("no_block", {2, 6, 2, 2, 8, 8}, {0, 5}, config(Phi::avg, 8, 4, 12)),
      append_case("dense", {3, 50, 6, 2, 60, 100}, {0, 7, 49}, NsaConfig{}, true),
      fill_case("first_token", {2, 40, 2, 2, 10, 6}, {{1, 0, 1}}, 40, config(Phi::avg, 8, 4, 12)),
      fill_case("one_short", {2, 40, 2, 2, 10, 6}, {{0, 0, 7}}, 40, config(Phi::avg, 8, 4, 12)),
      fill_case("a_ring_around", {3, 40, 2, 2, 8, 8}, {{1, 0, 29}}, 33, config(Phi::avg, 8, 4, 12)),
      fill_case("all", {2, 100, 2, 2, 64, 64}, {{1, 0, 100}}, 100, config(Phi::avg, 32, 16, 64)),
      fill_case("dense", {2, 50, 2, 2, 60, 100}, {{1, 0, 31}}, 40, NsaConfig{}, true),
      // Texts of one pass, not all from a block's first token on: shorter than a block, as long as the cache, one
      // token.
      fill_case("texts", {5, 40, 2, 2, 10, 6}, {{3, 0, 7}, {0, 7, 40}, {4, 50, 1}, {1, 53, 21}}, 80,
                config(Phi::avg, 8, 4, 12)),
      fill_case("texts_64", {3, 200, 4, 2, 64, 64}, {{2, 0, 130}, {1, 256, 70}, {0, 384, 200}}, 584,
                config(Phi::avg, 32, 16, 100)),
      fill_case("many_texts", {70, 8, 2, 2, 10, 6}, many_texts(), 560, config(Phi::avg, 4, 2, 3)),
      fill_case("dense_texts", {4, 50, 2, 2, 60, 100}, {{2, 3, 31}, {3, 40, 50}, {0, 93, 1}}, 100, NsaConfig{}, true),
      fill_case("ring_texts", {3, 12, 2, 2, 64, 64}, {{2, 0, 31}, {1, 32, 5}}, 40, NsaConfig{}, true),
      fill_index_case("16", 2, 40, 16, {{1, 0, 29}}, 33),
      fill_index_case("texts_6", 4, 9, 6, {{3, 0, 9}, {0, 11, 1}, {2, 12, 8}}, 24),
      fill_index_case("texts_128", 3, 150, 128, {{2, 0, 70}, {0, 128, 150}}, 300),
      append_index_case("16", 40, 2, 16, {0, 7, 39}),
      append_index_case("6_G3", 9, 3, 6, {8, 0}),
      append_index_case("128", 200, 1, 128, {170}),
      // A one-token cache, so that one step writes everything.
      CacheCase("append_m7c", {1, 1, 12, 2, 64, 64}, config(Phi::avg, 1, 1, 1), false, false).append({0}),
      CacheCase("fill_m7c_64k", {1, 65536, 12, 2, 64, 64}, NsaConfig{}, false, false).fill({{0, 0, 65536}}, 65536),
  };
  for (size_t i = cases.size() - 2; i < cases.size(); ++i) cases[i].bench = true;
  return cases;
}

}  // namespace triad
