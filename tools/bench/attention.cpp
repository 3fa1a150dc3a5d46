// triad bench attention: times NSA or dense causal attention as a layer calls it (q, k and v are slices of the fused
// projection's rows), forward and backward, as a whole and by part. Each time is compared with a floor: the least FLOPs
// and bytes of the work over the rates of a large matrix product and of a device copy, both measured in the same run.
//
// The selected branch is faster where neighbouring tokens select the same blocks, so there are three kinds of input:
//   randn         every element N(0, 1): neighbouring selections overlap as little as they can
//   local         q and k drift along each head (attention_input.h)
//   a checkpoint  q, k and v that one of its layers computes for --text
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "kernels/common/op_case_args.h"
#include "tools/bench/attention_parts.h"
#include "tools/bench/bench.h"
#include "tools/bench/document_mix.h"
#include "tools/options.h"

namespace triad {

namespace {

struct AttentionOptions {
  std::vector<std::string> shapes = {"8x2048x12x2x64", "1x8192x64x4x128", "1x65536x12x2x64", "1x65536x64x4x128"};
  std::vector<std::string> documents = {""}, data = {"randn"}, text;
  int64_t layer = -1;
  AttentionKind attention = AttentionKind::nsa;
  bool nondeterministic = false;
  NsaConfig nsa;
  BenchOptions common;
};

// Parses BxTxHqxHkvxd: batch, tokens, query heads, key/value heads, head width. d may have the form 192v128: the width
// of query and key heads, then that of value heads.
AttentionProblem parse_shape(const std::string& text, const AttentionOptions& o) {
  std::vector<int64_t> sizes;
  std::string digits;
  bool widths_differ = false, valid = true;
  for (const char c : text + 'x') {
    if (c >= '0' && c <= '9' && digits.size() < 9) {
      digits += c;
    } else {
      valid = valid && !digits.empty() && (c == 'x' || (c == 'v' && sizes.size() == 4));
      sizes.push_back(parse_number<int64_t>(digits).value_or(0));
      widths_differ = widths_differ || c == 'v';
      digits.clear();
    }
  }
  valid = valid && sizes.size() == (widths_differ ? 6u : 5u);
  for (const int64_t size : sizes) valid = valid && size > 0;
  valid = valid && sizes[4] <= kMaxHeadWidth && sizes.back() <= kMaxHeadWidth;
  if (!valid)
    fail_usage("--shapes: {} is not BxTxHqxHkvxd with heads of at most 256, as 8x2048x12x2x64 or 1x4096x16x4x192v128",
               text);
  AttentionProblem p{.name = text, .B = sizes[0], .T = sizes[1], .config = {}};
  p.config.n_heads = sizes[2], p.config.n_kv_groups = sizes[3];
  p.config.d_k = sizes[4], p.config.d_v = sizes.back();
  p.config.attention = o.attention;
  p.config.nsa = o.nsa;
  p.config.resolve();
  return p;
}

// Device memory that a problem needs, in bytes, found by a dry run.
struct Memory {
  int64_t arena = 0;  // total size of the arena
  int64_t saved = 0, scratch_forward = 0, scratch_backward = 0;
  int64_t peak = 0;  // peak over forward and backward without q, k and v, as PyTorch's peak is counted
};
Memory plan(const AttentionProblem& p, Device device, DType dtype, bool deterministic) {
  Memory m;
  for (const bool forward : {true, false}) {
    Runtime runtime({.device = device, .planning = true, .deterministic = deterministic});
    const AttentionTensors t = allocate_attention(runtime.arena(), p, dtype);
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
  m.arena += align_up(std::max(m.scratch_forward, m.scratch_backward));
  return m;
}

struct AttentionBench {
  Device device;
  DType dtype;
  bool json;
  Stopwatch stopwatch{device};
  BenchRows rows{
      .what = "attention", .device = device, .dtype = dtype, .ceiling = measure_ceiling(device, dtype, stopwatch)};
};

// Random numbers for a weight, distributed as fresh weights are: N(0, 0.02).
std::vector<std::byte> random_weight(const Tensor& w) {
  constexpr double kStd = 0.02;
  const Philox random(1, 1);
  std::vector<std::byte> host(static_cast<size_t>(w.bytes()));
  for (int64_t i = 0; i < w.numel(); ++i)
    store_element(host.data(), i, w.dtype, kStd * random.normal(static_cast<uint64_t>(i)));
  return host;
}

std::string case_name(const AttentionProblem& p, const std::string& data, bool nondeterministic) {
  std::string name = p.name + " " + data;
  const NsaConfig &n = p.config.nsa, usual;
  if (!p.documents.empty()) name += " documents " + p.documents;
  if (p.config.has_nsa() &&
      (n.l != usual.l || n.d != usual.d || n.l_sel != usual.l_sel || n.n_sel != usual.n_sel || n.w != usual.w))
    name += fmt::format(" l{} d{} l'{} n{} w{}", n.l, n.d, n.l_sel, n.n_sel, n.w);
  if (nondeterministic) name += " nondeterministic";
  return name;
}

Json overlap_json(Context& ctx, const Tensor& lists) {
  std::vector<int32_t> host(static_cast<size_t>(lists.numel()));
  read(ctx, host.data(), lists);
  const Overlap o = overlap_of(host, lists.size(0), lists.size(1), lists.size(2), lists.size(3));
  return {{"shared_with_neighbour", o.neighbours}, {"union_of_4", o.union4}, {"union_of_10", o.union10}};
}

double gigabytes(int64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

void print_case(const std::string& name, const std::vector<Json>& rows, const Memory& m, const Json& overlap) {
  fmt::print("\n{}\n{:<12} {:>11} {:>9} {:>9} {:>14} {:>9} {:>9}\n", name, "part", "forward ms", "TFLOP/s", "of floor",
             "backward ms", "TFLOP/s", "of floor");
  const auto number = [](const Json* row, const char* key, double scale, const char* unit, int decimals) {
    return row == nullptr ? std::string("-")
                          : fmt::format("{:.{}f}{}", (*row)[key].get<double>() * scale, decimals, unit);
  };
  std::vector<std::string> parts;
  for (const Json& row : rows) {
    const std::string part = row["part"];
    if (std::find(parts.begin(), parts.end(), part) == parts.end()) parts.push_back(part);
  }
  for (const std::string& part : parts) {
    const Json *forward = nullptr, *backward = nullptr;
    for (const Json& row : rows)
      if (row["part"] == part) (row["pass"] == "forward" ? forward : backward) = &row;
    fmt::print("{:<12} {:>11} {:>9} {:>9} {:>14} {:>9} {:>9}\n", part, number(forward, "us", 1e-3, "", 3),
               number(forward, "tflop_per_s", 1, "", 1), number(forward, "share_of_floor", 100, "%", 1),
               number(backward, "us", 1e-3, "", 3), number(backward, "tflop_per_s", 1, "", 1),
               number(backward, "share_of_floor", 100, "%", 1));
  }
  fmt::print(
      "memory: kept for backward {:.3f} GB, scratch {:.3f} GB forward and {:.3f} GB backward, peak of both passes "
      "without q, k, v {:.3f} GB\n",
      gigabytes(m.saved), gigabytes(m.scratch_forward), gigabytes(m.scratch_backward), gigabytes(m.peak));
  if (!overlap.is_null())
    fmt::print(
        "selected blocks: a token shares {:.1f}% with the previous token; 4 consecutive tokens select {:.2f} times as "
        "many distinct blocks as one, 10 tokens {:.2f} times\n",
        100 * overlap["shared_with_neighbour"].get<double>(), overlap["union_of_4"].get<double>(),
        overlap["union_of_10"].get<double>());
}

void bench_problem(AttentionBench& bench, AttentionProblem p, const std::string& data, const AttentionOptions& o) {
  const bool drawn = data == "randn" || data == "local";
  const Normals normals(2);
  const std::vector<std::byte> qkv = drawn ? random_qkv(p, bench.dtype, data == "local" ? kLocalDrift : 0, normals)
                                           : trained_qkv(p, data, {o.text, o.layer}, bench.device, bench.dtype);
  const std::string name = case_name(p, drawn ? data : "trained", o.nondeterministic),
                    op = p.config.has_nsa() ? "attention" : "dense";
  const Memory memory = plan(p, bench.device, bench.dtype, !o.nondeterministic);
  const int64_t free = backend::info(bench.device).free_bytes;
  if (memory.arena > free) {
    const std::string why =
        fmt::format("needs {:.1f} GB, {:.1f} GB are free", gigabytes(memory.arena), gigabytes(free));
    bench.rows.rows.push_back({{"op", op}, {"case", name}, {"skipped", why}});
    if (!bench.json) fmt::print("\n{}\nskipped: {}\n", name, why);
    return;
  }
  Runtime runtime({.device = bench.device,
                   .arena_bytes = memory.arena,
                   .scratch_bytes = align_up(std::max(memory.scratch_forward, memory.scratch_backward)),
                   .deterministic = !o.nondeterministic});
  Context& ctx = runtime.ctx();
  const AttentionTensors t = allocate_attention(runtime.arena(), p, bench.dtype);
  write(ctx, t.qkv, qkv.data());
  write(ctx, t.dout.view({p.B * p.T, p.config.n_heads * p.config.d_v}),
        random_rows(p.B * p.T, p.config.n_heads, p.config.d_v, bench.dtype, Normals(3)).data());
  zero(ctx, t.dq);
  for (const Tensor& w : t.drawn_weights) write(ctx, w, random_weight(w).data());
  if (!p.bounds.empty()) write(ctx, t.bounds, p.bounds.data());

  const AttentionParts parts(bench.device, p, t, bench.dtype);
  for (const AttentionPart& part : parts.all()) part.work(ctx);
  std::vector<Json> rows;
  for (const AttentionPart& part : parts.all()) {
    const Timing timing = bench.stopwatch(ctx, [&] { part.work(ctx); });
    const bool whole = part.name == "nsa" || part.name == "dense";
    rows.push_back({{"op", whole ? op : op + " " + part.name},
                    {"part", part.name},
                    {"case", name},
                    {"pass", part.forward ? "forward" : "backward"},
                    {"us", timing.us},
                    {"runs", timing.runs},
                    {"tflop_per_s", part.flops / timing.us * 1e-6},
                    {"share_of_floor", bench.rows.ceiling.floor_us(part.flops, part.bytes) / timing.us}});
    if (whole && !part.forward) {
      rows.back()["saved_bytes"] = memory.saved;
      rows.back()["scratch_bytes"] = memory.scratch_backward;
      rows.back()["peak_bytes"] = memory.peak;
    }
  }
  const Json overlap = p.config.has_nsa() ? overlap_json(ctx, t.saved.nsa.block_index) : Json();
  if (!overlap.is_null()) rows.back()["lists"] = overlap;
  if (!bench.json) print_case(name, rows, memory, overlap);
  if (!bench.json && bench.device.is_cuda()) fmt::print("{}\n", ctx.routes.summary());
  bench.rows.rows.insert(bench.rows.rows.end(), rows.begin(), rows.end());
}

void run_attention(const AttentionOptions& o) {
  std::vector<AttentionProblem> problems;
  for (const std::string& shape : o.shapes)
    for (const std::string& mix : o.documents) {
      AttentionProblem& p = problems.emplace_back(parse_shape(shape, o));
      if (mix.empty()) continue;
      p.documents = mix;
      p.bounds = mixed_bounds(mix, p.B, p.T);
    }
  o.common.check_files();
  const Device device = o.common.chosen_device();
  AttentionBench bench{.device = device, .dtype = o.common.chosen_dtype(device), .json = o.common.json};
  if (!bench.json) fmt::print("{}\n", describe(bench.rows));
  for (const AttentionProblem& p : problems)
    for (const std::string& data : o.data) bench_problem(bench, p, data, o);
  bench.rows.finish(o.common);
}

}  // namespace

CLI::App* add_bench_attention(CLI::App& bench) {
  CLI::App* verb = bench.add_subcommand("attention", "time NSA, its branches and parts, or dense attention");
  const auto o = std::make_shared<AttentionOptions>();
  verb->add_option(
          "--shapes", o->shapes,
          "problems BxTxHqxHkvxd, comma-separated: sequences, tokens, query heads, key and value heads, width of "
          "a head (192v128: keys of 192, values of 128)")
      ->delimiter(',')
      ->capture_default_str();
  verb->add_option(
          "--documents", o->documents,
          "lengths of the documents that are packed into the rows: comma-separated mixes, each with as many tokens as "
          "the shape: 8x16384 (8 documents of 16,384 tokens), 1x60000+5000x1, or lognormal:MEAN:TOTAL[:SIGMA] "
          "(default: every row is one document)")
      ->delimiter(',');
  verb->add_option(
          "--data", o->data,
          "inputs, comma-separated: randn (independent normal numbers), local (q and k change slowly from token "
          "to token, as in trained models), or a checkpoint, whose nsa options are used")
      ->delimiter(',')
      ->capture_default_str();
  verb->add_option("--text", o->text, "input of a checkpoint: text files or token shards, globs");
  verb->add_option("--layer", o->layer, "layer of the checkpoint to time (default: the middle one)")
      ->check(within(at_least(0).up_to(10000)));
  verb->add_option_function<std::string>(
          "--attention",
          [o](const std::string& word) { o->attention = word == "dense" ? AttentionKind::dense : AttentionKind::nsa; },
          "nsa or dense (default: nsa)")
      ->check(CLI::IsMember({"nsa", "dense"}));
  const auto size = [&](const char* name, int64_t& value, const char* what) {
    verb->add_option(name, value, what)->check(within(at_least(1).up_to(1 << 20)))->capture_default_str();
  };
  size("--l", o->nsa.l, "compression block, tokens");
  size("--d", o->nsa.d, "compression stride, tokens");
  size("--l-sel", o->nsa.l_sel, "selection block, tokens");
  size("--n-sel", o->nsa.n_sel, "selected blocks for each query");
  size("--w", o->nsa.w, "sliding window, tokens");
  verb->add_flag("--nondeterministic", o->nondeterministic,
                 "allow sums in any order, as runtime.deterministic=false does");
  o->common.add_to(*verb);
  verb->callback([o] { run_attention(*o); });
  return verb;
}

}  // namespace triad
