// Decoding cases over caches with random rows. There is no backward.
#include "kernels/common/portable_case.h"
#include "kernels/decode/decode.h"
#include "kernels/nsa/cases/nsa_cases.h"
#include "kernels/nsa/route.h"

namespace triad {

namespace {

struct DecodeSizes {
  int64_t B, S, Hq, Hkv, dk, dv;
};

Arg positions_arg(const std::vector<int>& positions) {
  Arg a{.name = "position",
        .role = ArgRole::constant,
        .shape = {static_cast<int64_t>(positions.size())},
        .type = ArgType::i32};
  a.fill = [positions](int64_t i, uint64_t) { return static_cast<double>(positions[static_cast<size_t>(i)]); };
  return a;
}

// positions: the B new tokens' positions.
OpCase decode_case(std::string name, const DecodeSizes& n, const std::vector<int>& positions, const NsaConfig& c,
                   bool dense = false, double q_std = 1) {
  OpCase r{.op = dense ? "dense_decode" : "nsa_decode", .name = std::move(name)};
  const auto constant = [&](std::string arg, Shape shape, double std = 1) {
    r.args.push_back({.name = std::move(arg), .role = ArgRole::constant, .shape = shape, .std = std});
  };
  constant("q", {n.B, 1, n.Hq, n.dk}, q_std);
  const auto pair = [&](const std::string& branch, int64_t rows) {
    constant("k_" + branch, {n.B, rows, n.Hkv, n.dk});
    constant("v_" + branch, {n.B, rows, n.Hkv, n.dv});
  };
  if (dense) {
    pair("dense", n.S);
  } else {
    pair("win", std::min(c.w, n.S));
    pair("sel", n.S);
    pair("cmp", compressed_length(n.S, c.l, c.d));
    constant("fc1_w", {n.dk / 2, n.dk}, 0.3);
    constant("fc1_b", {n.dk / 2}, 0.3);
    constant("fc2_w", {3, n.dk / 2}, 0.5);
    constant("fc2_b", {3}, 0.5);
  }
  r.args.push_back(positions_arg(positions));
  r.args.push_back({.name = "out", .role = ArgRole::saved, .shape = {n.B, 1, n.Hq, n.dv}});
  r.forward = [c, dense](Context& ctx, const Args& a) {
    if (dense) return dense_decode(ctx, a["out"], {a["q"], {a["k_dense"], a["v_dense"]}, a["position"]});
    const NsaCache cache{a["k_sel"], a["v_sel"], a["k_win"], a["v_win"], a["k_cmp"], a["v_cmp"], {}, {}};
    nsa_decode(ctx, a["out"], {a["q"], cache, a["position"]}, {a["fc1_w"], a["fc1_b"], a["fc2_w"], a["fc2_b"]}, c);
  };
  double keys = 0;
  for (const int64_t at : positions) {
    keys += static_cast<double>(std::min(dense ? n.S : c.w, at + 1));
    if (!dense) keys += static_cast<double>(compressed_length(at + 1, c.l, c.d) + std::min(at + 1, c.n_sel * c.l_sel));
  }
  r.forward_flops = 2 * keys * static_cast<double>(n.Hq * (n.dk + n.dv));
  r.forward_bytes = 2 * keys * static_cast<double>(n.Hkv * (n.dk + n.dv)), r.forward_written = 0;
  return r;
}

OpCase dense_case(std::string name, const DecodeSizes& n, const std::vector<int>& positions) {
  return decode_case(std::move(name), n, positions, NsaConfig{}, true);
}

// One softmax over listed blocks of l_sel tokens: in even groups blocks all over the past, in odd ones the last blocks.
OpCase selected_case(std::string name, const DecodeSizes& n, const std::vector<int>& positions, int64_t n_sel,
                     int64_t l_sel) {
  OpCase r{.op = "selected_decode", .name = std::move(name)};
  Arg lists{.name = "lists", .role = ArgRole::constant, .shape = {n.B, 1, n.Hkv, n_sel}, .type = ArgType::i32};
  lists.fill = [=](int64_t i, uint64_t) -> double {
    const int64_t own = positions[static_cast<size_t>(i / (n.Hkv * n_sel))] / l_sel, entry = i % n_sel;
    const int64_t count = std::min(own + 1, n_sel);
    if (entry >= count) return -1;
    if (i / n_sel % n.Hkv % 2 == 1) return static_cast<double>(own + 1 - count + entry);
    return static_cast<double>(count == 1 ? own : own * entry / (count - 1));
  };
  r.args = {{.name = "q", .role = ArgRole::constant, .shape = {n.B, 1, n.Hq, n.dk}},
            {.name = "k", .role = ArgRole::constant, .shape = {n.B, n.S, n.Hkv, n.dk}},
            {.name = "v", .role = ArgRole::constant, .shape = {n.B, n.S, n.Hkv, n.dv}},
            positions_arg(positions),
            lists,
            {.name = "out", .role = ArgRole::saved, .shape = {n.B, 1, n.Hq, n.dv}}};
  r.forward = [l_sel](Context& ctx, const Args& a) {
    selected_decode(ctx, a["out"], {a["q"], {a["k"], a["v"]}, a["position"]}, a["lists"], l_sel);
  };
  double keys = 0;
  for (const int64_t at : positions) keys += static_cast<double>(std::min(at + 1, n_sel * l_sel));
  r.forward_flops = 2 * keys * static_cast<double>(n.Hq * (n.dk + n.dv));
  r.forward_bytes = 2 * keys * static_cast<double>(n.Hkv * (n.dk + n.dv)), r.forward_written = 0;
  return r;
}

// The lists that a taught index chooses. n: dk is the index's width.
OpCase index_case(std::string name, const DecodeSizes& n, const std::vector<int>& positions, const SelectOptions& o,
                  double std = 1) {
  OpCase r{.op = "index_decode", .name = std::move(name)};
  r.args = {{.name = "iq", .role = ArgRole::constant, .shape = {n.B, 1, n.Hkv, n.dk}, .std = std},
            {.name = "ik", .role = ArgRole::constant, .shape = {n.B, n.S, 1, n.dk}, .std = std},
            positions_arg(positions),
            {.name = "lists", .role = ArgRole::saved, .shape = {n.B, 1, n.Hkv, o.n_sel}, .type = ArgType::i32}};
  r.forward = [o](Context& ctx, const Args& a) { index_decode(ctx, a["lists"], a["iq"], a["ik"], a["position"], o); };
  double keys = 0;
  for (const int64_t at : positions) keys += static_cast<double>(at + 1);
  r.forward_flops = 2 * keys * static_cast<double>(n.Hkv * n.dk);
  r.forward_bytes = 2 * keys * static_cast<double>(n.dk), r.forward_written = 0;
  return r;
}

// Returns the same case on the portable kernels, without clusters and programmatic dependent launch.
OpCase any_card_case(OpCase c) {
  c.name += "_any_card";
  c.forward = [forward = c.forward](Context& ctx, const Args& a) {
    Context card = portable_context(ctx);
    forward(card, a);
  };
  return c;
}

// Returns the same case, compared on a GPU alone: it is too slow for the CPU-only tests.
OpCase on_gpu(OpCase c) {
  c.cpu = false;
  return c;
}

}  // namespace

std::vector<OpCase> decode_cases() {
  const auto config = [](int64_t l, int64_t d, int64_t l_sel, int64_t n_sel, int64_t w, GateOptions gate = {}) {
    NsaConfig c;
    c.l = l, c.d = d, c.l_sel = l_sel, c.n_sel = n_sel, c.w = w, c.gate = gate;
    return c;
  };
  const auto options = [](int64_t l_sel, int64_t n_sel, int64_t init_blocks = 0, int64_t local_blocks = 1) {
    SelectOptions o;
    o.l_sel = l_sel, o.n_sel = n_sel, o.init_blocks = init_blocks, o.local_blocks = local_blocks;
    return o;
  };
  // Positions for B sequences, from the first token to the last one that a cache of S tokens holds.
  const auto spread = [](int64_t B, int64_t S) {
    std::vector<int> positions;
    for (int64_t b = 0; b < B; ++b) positions.push_back(static_cast<int>(b * (S - 1) / (B - 1)));
    return positions;
  };
  NsaConfig no_init = config(16, 8, 32, 6, 90);
  no_init.init_blocks = 0, no_init.local_blocks = 1;
  std::vector<OpCase> cases = {
      decode_case("first_tokens", {3, 40, 4, 2, 8, 8}, {0, 6, 7}, config(8, 4, 8, 4, 12)),
      decode_case("ragged", {4, 90, 6, 2, 10, 6}, {31, 32, 77, 89},
                  config(8, 4, 8, 4, 12, {.kind = GateKind::sigmoid})),
      decode_case("700_G6", {2, 700, 12, 2, 64, 64}, {640, 699}, config(32, 16, 64, 5, 100)),
      decode_case("3000_G16_n16", {1, 3000, 16, 1, 64, 64}, {2999}, config(32, 16, 64, 16, 512)),
      decode_case("900_G1_l'32", {2, 900, 2, 2, 64, 64}, {300, 880}, config(32, 16, 32, 7, 70, {.temperature = 0.5})),
      decode_case("2000_128_G32_l'128", {1, 2000, 32, 1, 128, 128}, {1900}, config(32, 16, 128, 6, 200)),
      decode_case("600_192x128_G2", {1, 600, 4, 2, 192, 128}, {599}, config(32, 16, 64, 4, 64)),
      decode_case("800_no_init", {1, 800, 3, 1, 60, 100}, {750}, no_init),
      decode_case("l_of_1", {1, 100, 2, 1, 16, 16}, {99}, config(1, 1, 1, 20, 30)),
      decode_case("force_win", {1, 300, 6, 1, 64, 64}, {250}, config(32, 16, 64, 4, 70, {.force = Branch::win})),
      decode_case("uniform", {1, 300, 6, 1, 64, 64}, {250}, config(32, 16, 64, 4, 70, {.uniform = true})),
      decode_case("ties", {3, 1300, 6, 2, 64, 64}, {1299, 700, 60}, config(32, 16, 32, 9, 40), false, 0),
      decode_case("5000_blocks", {1, 20000, 3, 1, 16, 16}, {19990}, config(4, 2, 4, 13, 30)),
      // A key scores four blocks, so the best are neighbours, which a warp compares.
      decode_case("20000_best_side_by_side", {2, 20000, 4, 2, 64, 64}, {19990, 12345}, config(64, 16, 16, 6, 30)),
      decode_case("64_listed", {1, 9000, 4, 2, 32, 32}, {8999}, config(32, 16, 64, 64, 90)),
      any_card_case(decode_case("700_G6", {2, 700, 12, 2, 64, 64}, {640, 699}, config(32, 16, 64, 5, 100))),
      any_card_case(decode_case("3000_G16_n16", {1, 3000, 16, 1, 64, 64}, {2999}, config(32, 16, 64, 16, 512))),
      any_card_case(decode_case("first_tokens", {3, 40, 4, 2, 8, 8}, {0, 6, 7}, config(8, 4, 8, 4, 12))),
      any_card_case(decode_case("ragged", {4, 90, 6, 2, 10, 6}, {31, 32, 77, 89}, config(8, 4, 8, 4, 12))),
      any_card_case(decode_case("900_G1", {2, 900, 2, 2, 64, 64}, {300, 880}, config(32, 16, 32, 7, 70))),
      any_card_case(decode_case("5000_blocks", {1, 20000, 3, 1, 16, 16}, {19990}, config(4, 2, 4, 13, 30))),
      small_card_case(decode_case("300_256_G3", {1, 300, 3, 1, 256, 256}, {299}, config(32, 16, 64, 4, 70))),
      // On Hopper in bf16 clusters of 8 CTAs, which share so many candidates that one does not select among all; shares
      // that are empty or ragged; lists too long for that.
      decode_case("20000_l'16_shared", {2, 20000, 4, 2, 64, 64}, {19990, 5000}, config(8, 8, 16, 12, 60)),
      decode_case("9000_128_shared", {2, 9000, 8, 2, 128, 128}, {8999, 2300}, config(16, 16, 16, 16, 90)),
      decode_case("9000_128_n40", {1, 9000, 4, 1, 128, 128}, {8999}, config(16, 16, 16, 40, 90)),
      // More than 8192 compressed keys: clusters of 16 CTAs, if the lists are short enough.
      decode_case("20000_long", {2, 20000, 12, 2, 64, 64}, {19990, 3000}, config(2, 2, 16, 12, 60)),
      decode_case("17000_128_long", {1, 17000, 8, 2, 128, 128}, {16999}, config(2, 2, 16, 16, 90)),
      decode_case("17000_long_n64", {1, 17000, 4, 1, 64, 64}, {16999}, config(2, 2, 16, 64, 90)),
      // Many groups, more than 8 sequences, and more than 64: in bf16 one CTA for each sequence and group.
      decode_case("5_sequences_4_groups", {5, 700, 8, 4, 64, 64}, spread(5, 700), config(32, 16, 64, 5, 100)),
      decode_case("9_sequences_G6", {9, 700, 12, 2, 64, 64}, spread(9, 700), config(32, 16, 64, 5, 100)),
      on_gpu(decode_case("64_sequences_G16", {64, 400, 16, 1, 64, 64}, spread(64, 400), config(32, 16, 32, 5, 60))),
      on_gpu(decode_case("65_sequences_G1", {65, 400, 2, 2, 64, 64}, spread(65, 400),
                         config(32, 16, 32, 5, 60, {.kind = GateKind::sigmoid}))),
      on_gpu(decode_case("256_sequences_G3", {256, 130, 6, 2, 64, 64}, spread(256, 130), config(16, 8, 16, 4, 40))),
      on_gpu(
          decode_case("12_sequences_128_G4", {12, 900, 8, 2, 128, 128}, spread(12, 900), config(32, 16, 48, 6, 200))),
      on_gpu(decode_case("9_sequences_5000_blocks", {9, 20000, 2, 1, 64, 64}, spread(9, 20000),
                         config(4, 4, 16, 64, 30, {.force = Branch::sel}))),
      decode_case("9_sequences_uniform", {9, 300, 6, 1, 64, 64}, spread(9, 300),
                  config(32, 16, 64, 4, 70, {.uniform = true})),
      on_gpu(decode_case("9_sequences_ties", {9, 1300, 6, 2, 64, 64}, spread(9, 1300), config(32, 16, 32, 9, 40), false,
                         0)),
      decode_case("9_sequences_no_init", {9, 800, 6, 2, 64, 64}, spread(9, 800), no_init),
      any_card_case(decode_case("9_sequences_G6", {9, 700, 12, 2, 64, 64}, spread(9, 700), config(32, 16, 64, 5, 100))),
      on_gpu(dense_case("12_sequences", {12, 3000, 12, 2, 64, 64}, spread(12, 3000))),
      on_gpu(selected_case("12_sequences_l128", {12, 2000, 12, 2, 64, 64}, spread(12, 2000), 9, 128)),
      any_card_case(dense_case("500", {2, 500, 12, 2, 64, 64}, {3, 460})),
      dense_case("500", {2, 500, 12, 2, 64, 64}, {3, 460}),
      dense_case("20000_G16", {1, 20000, 16, 1, 64, 64}, {19976}),  // 256 keys per CTA
      dense_case("G1_128", {2, 700, 2, 2, 128, 128}, {699, 16}),
      dense_case("G16_128", {1, 600, 16, 1, 128, 128}, {599}),
      dense_case("G24", {1, 200, 24, 1, 64, 64}, {190}),
      dense_case("60x100", {1, 300, 3, 1, 60, 100}, {299}),
      selected_case("first_tokens", {3, 40, 4, 2, 8, 8}, {0, 7, 8}, 4, 8),
      selected_case("ragged", {3, 90, 6, 2, 10, 6}, {31, 77, 89}, 5, 8),
      selected_case("3000_G6_l128", {2, 3000, 12, 2, 64, 64}, {2999, 130}, 16, 128),
      selected_case("2000_128_G16_l128", {1, 2000, 16, 1, 128, 128}, {1900}, 4, 128),
      any_card_case(selected_case("3000_G6_l128", {2, 3000, 12, 2, 64, 64}, {2999, 130}, 16, 128)),
      index_case("first_tokens", {3, 40, 4, 2, 6, 0}, {0, 7, 8}, options(8, 4)),
      index_case("ragged_init", {3, 400, 6, 2, 16, 0}, {131, 277, 399}, options(24, 7, 1, 2)),
      index_case("3000_l128", {2, 3000, 12, 2, 64, 0}, {2999, 2100}, options(128, 4)),
      index_case("9000_l64_n33_di128", {1, 9000, 5, 5, 128, 0}, {8999}, options(64, 33)),
      index_case("3000_ties", {2, 3000, 3, 3, 32, 0}, {2999, 700}, options(64, 5), 0),
      // So many blocks that warps share a list's candidates; in the last sequence too few are visible for that. More
      // than a warp's 64 each, lists too long to collect candidates, lists too long to share, and lists of forced
      // blocks alone.
      index_case("20000_l16", {3, 20000, 3, 3, 64, 0}, {19999, 1100, 900}, options(16, 24, 1, 2)),
      index_case("40000_l16_n60", {2, 40000, 2, 2, 64, 0}, {39999, 12345}, options(16, 60)),
      index_case("40000_l16_n80", {1, 40000, 2, 2, 32, 0}, {39990}, options(16, 80)),
      index_case("20000_l16_n2", {1, 20000, 2, 2, 32, 0}, {19990}, options(16, 2, 1, 1)),
      index_case("20000_l16_ties", {1, 20000, 2, 2, 32, 0}, {19990}, options(16, 12), 0),
      any_card_case(index_case("3000_l128", {2, 3000, 12, 2, 64, 0}, {2999, 2100}, options(128, 4))),
      decode_case("m7c_4k", {1, 65536, 12, 2, 64, 64}, {4095}, NsaConfig{}),
      decode_case("m7c_64k", {1, 65536, 12, 2, 64, 64}, {65535}, NsaConfig{}),
      dense_case("m7c_64k", {1, 65536, 12, 2, 64, 64}, {65535}),
      selected_case("m7c_64k", {1, 65536, 12, 2, 64, 64}, {65535}, 16, 128),
      index_case("m7c_64k", {1, 65536, 12, 2, 64, 0}, {65535}, options(128, 16)),
  };
  for (size_t i = cases.size() - 5; i < cases.size(); ++i) cases[i].bench = true;
  return cases;
}

}  // namespace triad
