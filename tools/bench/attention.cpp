// triad bench attention: times NSA or dense causal attention as a layer calls it (q, k and v are slices of the fused
// projection's rows), forward and backward, as a whole and by part. Each time is compared with a floor: the work's
// least FLOPs and bytes over the rates of a large matrix product and a device copy, both measured in the same run.
//
// The selected branch is faster where neighbouring tokens select the same blocks, so there are three input kinds:
//   randn         every element N(0, 1): neighbouring selections overlap as little as they can
//   local         q and k drift along each head (attention_input.h)
//   a checkpoint  q, k and v that one of its layers computes for --text
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <optional>

#include "engine/check.h"
#include "engine/comm/comm.h"
#include "engine/process/parse.h"
#include "tools/bench/attention_context.h"
#include "tools/bench/attention_run.h"
#include "tools/bench/bench.h"
#include "tools/bench/document_mix.h"
#include "tools/bench/ranks.h"
#include "tools/options.h"

namespace triad {

namespace {

struct AttentionOptions {
  std::vector<std::string> shapes = {"8x2048x12x2x64", "1x8192x64x4x128", "1x65536x12x2x64", "1x65536x64x4x128"};
  std::vector<std::string> documents = {""}, data = {"randn"}, text;
  int64_t layer = -1;
  AttentionKind attention = AttentionKind::nsa;
  NsaConfig nsa;
  int64_t context = 1;
  BenchOptions common;
};

// Parses BxTxHqxHkvxd: batch, tokens, query heads, key/value heads, head width. d may have the form 192v128: the query
// and key head width, then the value head width.
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

struct AttentionBench {
  Device device;
  DType dtype;
  bool json;
  std::optional<EnergyMeter> energy;  // absent without --energy
  Stopwatch stopwatch{device};
  BenchRows rows{
      .what = "attention", .device = device, .dtype = dtype, .ceiling = measure_ceiling(device, dtype, stopwatch)};
};

std::string op_name(const AttentionProblem& p) { return p.config.has_nsa() ? "attention" : "dense"; }

std::string case_name(const AttentionProblem& p, const std::string& data) {
  std::string name = p.name + " " + data;
  const NsaConfig &n = p.config.nsa, usual;
  if (!p.documents.empty()) name += " documents " + p.documents;
  if (p.config.has_nsa() &&
      (n.l != usual.l || n.d != usual.d || n.l_sel != usual.l_sel || n.n_sel != usual.n_sel || n.w != usual.w))
    name += fmt::format(" l{} d{} l'{} n{} w{}", n.l, n.d, n.l_sel, n.n_sel, n.w);
  if (n.init_blocks != usual.init_blocks || n.local_blocks != usual.local_blocks)
    name += fmt::format(" init{} local{}", n.init_blocks, n.local_blocks);
  if (n.branches == Branches::window) name += " win";
  if (p.config.has_index()) name += fmt::format(" {}index{}", n.branches == Branches::all ? "" : "sel ", n.d_index);
  return name;
}

Json overlap_json(Context& ctx, const Tensor& lists) {
  std::vector<int32_t> host(static_cast<size_t>(lists.numel()));
  read(ctx, host.data(), lists);
  const Overlap o = overlap_of(host, lists.size(0), lists.size(1), lists.size(2), lists.size(3));
  return {{"shared_with_neighbour", o.neighbours}, {"union_of_4", o.union4}, {"union_of_10", o.union10}};
}

double gigabytes(int64_t bytes) { return static_cast<double>(bytes) * 1e-9; }

void print_case(const std::string& name, const std::vector<Json>& rows, const AttentionMemory& m, const Json& overlap) {
  fmt::print("\n{}\n{:<12} {:>11} {:>9} {:>9} {:>14} {:>9} {:>9}\n", name, "part", "forward ms", "TFLOP/s", "of floor",
             "backward ms", "TFLOP/s", "of floor");
  const auto number = [](const Json* row, const char* key, double scale, int decimals) {
    return row == nullptr ? std::string("-") : fmt::format("{:.{}f}", (*row)[key].get<double>() * scale, decimals);
  };
  bool noise = false;  // some share is
  const auto share = [&](const Json* row) {
    if (row == nullptr) return std::string("-");
    noise = noise || is_noise((*row)["share_of_floor"].get<double>());
    return share_text((*row)["share_of_floor"].get<double>());
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
    fmt::print("{:<12} {:>11} {:>9} {:>9} {:>14} {:>9} {:>9}\n", part, number(forward, "us", 1e-3, 3),
               number(forward, "tflop_per_s", 1, 1), share(forward), number(backward, "us", 1e-3, 3),
               number(backward, "tflop_per_s", 1, 1), share(backward));
  }
  if (noise) fmt::print("{}", kNoiseNote);
  for (const Json& row : rows) {
    if (!row.contains("power") || !row["power"].contains("joules")) continue;
    const double joules = row["power"]["joules"], mflop = row["tflop_per_s"].get<double>() * row["us"].get<double>();
    fmt::print("energy: {} {} {:.4g} mJ, {:.0f} W{}\n", row["part"].get<std::string>(), row["pass"].get<std::string>(),
               1e3 * joules, row["power"]["watts"].get<double>(),
               mflop > 0 ? fmt::format(", {:.3g} pJ a FLOP", 1e6 * joules / mflop) : "");
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

// Whether a --data value names random inputs; others are checkpoints.
bool is_drawn(const std::string& data) { return data == "randn" || data == "local"; }

void bench_problem(AttentionBench& bench, AttentionProblem p, const std::string& data, const AttentionOptions& o) {
  const bool drawn = is_drawn(data);
  const Normals normals(2);
  const std::vector<std::byte> qkv = drawn ? random_qkv(p, bench.dtype, data == "local" ? kLocalDrift : 0, normals)
                                           : trained_qkv(p, data, {o.text, o.layer}, bench.device, bench.dtype);
  const std::string name = case_name(p, drawn ? data : "trained"), op = op_name(p);
  const AttentionMemory memory = plan_attention(p, bench.device, bench.dtype);
  const int64_t free = backend::info(bench.device).free_bytes;
  if (memory.arena > free) {
    const std::string why =
        fmt::format("needs {:.1f} GB, {:.1f} GB are free", gigabytes(memory.arena), gigabytes(free));
    bench.rows.rows.push_back({{"op", op}, {"case", name}, {"skipped", why}});
    if (!bench.json) fmt::print("\n{}\nskipped: {}\n", name, why);
    return;
  }
  AttentionRun run(p, memory, qkv, bench.device, bench.dtype);
  Context& ctx = run.ctx();
  run.all_parts();
  std::vector<Json> rows;
  for (const AttentionPart& part : run.parts().all()) {
    const Timing timing = bench.stopwatch(ctx, [&] { part.work(ctx); });
    rows.push_back({{"op", part.whole() ? op : op + " " + part.name},
                    {"part", part.name},
                    {"case", name},
                    {"pass", part.forward ? "forward" : "backward"},
                    {"us", timing.us},
                    {"runs", timing.runs},
                    {"tflop_per_s", part.flops / timing.us * 1e-6},
                    {"share_of_floor", bench.rows.ceiling.floor_us(part.flops, part.bytes) / timing.us}});
    if (bench.energy) rows.back()["power"] = to_json((*bench.energy)(ctx, timing.us, [&] { part.work(ctx); }));
    if (part.whole() && !part.forward) {
      rows.back()["saved_bytes"] = memory.saved;
      rows.back()["scratch_bytes"] = memory.scratch_backward;
      rows.back()["peak_bytes"] = memory.peak;
    }
  }
  const Json overlap = p.config.has_lists() ? overlap_json(ctx, run.tensors().saved.nsa.block_index) : Json();
  if (!overlap.is_null()) rows.back()["lists"] = overlap;
  if (!bench.json) print_case(name, rows, memory, overlap);
  if (!bench.json && bench.device.is_cuda()) fmt::print("{}\n", ctx.routes.summary());
  bench.rows.rows.insert(bench.rows.rows.end(), rows.begin(), rows.end());
}

// A case whose sequences all ranks share. Rank 0 keeps its rows and prints them. Collective.
void bench_shared(BenchRows& rows, SharedAttentionBench& bench, const AttentionProblem& p, const std::string& data,
                  const AttentionOptions& o, bool first) {
  const std::string name = fmt::format("{} context {}", case_name(p, data), o.context);
  SharedAttention shared = bench(p, data == "local" ? kLocalDrift : 0);
  if (!first) return;
  if (!o.common.json) bench.print(name, shared);
  if (!shared.skipped.empty()) shared.rows = {{{"skipped", shared.skipped}}};
  for (Json& row : shared.rows) {
    row["op"] = op_name(p);
    row["case"] = name;
    rows.rows.push_back(std::move(row));
  }
}

// The problems that --context times. Throws UsageError if another option or the rank count doesn't go with it.
std::vector<AttentionProblem> shared_problems(const AttentionOptions& o, const LaunchEnv& launch) {
  if (o.common.energy) fail_usage("--context is {}: --energy measures one card alone", o.context);
  for (const std::string& data : o.data)
    if (!is_drawn(data)) fail_usage("--context is {}: --data must be randn or local, not {}", o.context, data);
  for (const std::string& mix : o.documents)
    if (!mix.empty()) fail_usage("--context is {}: it must be 1 with --documents {}", o.context, mix);
  std::vector<AttentionProblem> problems;
  for (const std::string& shape : o.shapes) {
    problems.push_back(parse_shape(shape, o));
    if (problems.back().T < o.context)
      fail_usage("--context is {}: --shapes {} has {} tokens a sequence, and each rank needs one", o.context, shape,
                 problems.back().T);
  }
  if (launch.world != o.context)
    fail_usage("--context is {}, and the number of ranks is {}: start it with mpirun -np {}", o.context, launch.world,
               o.context);
  return problems;
}

void run_shared(const AttentionOptions& o) {
  const LaunchEnv launch = read_launch_env();
  const std::vector<AttentionProblem> problems = shared_problems(o, launch);
  if (launch.rank == 0) o.common.check_files();
  const Device device = o.common.chosen_device(launch);
  BenchRows rows{.what = "attention", .device = device, .dtype = o.common.chosen_dtype(device), .ceiling = {}};
  constexpr double kTimeoutS = 600;
  const std::unique_ptr<Comm> comm = open_comm(launch, device, CommBackend::automatic, kTimeoutS);
  run_on_ranks(*comm, [&] {
    if (comm->first()) {
      Stopwatch stopwatch(device);
      rows.ceiling = measure_ceiling(device, rows.dtype, stopwatch);
      if (!o.common.json) fmt::print("{}\n", describe(rows));
    }
    comm->barrier("the machine's ceilings");
    SharedAttentionBench bench(*comm, device, rows.dtype);
    for (const AttentionProblem& p : problems)
      for (const std::string& data : o.data) bench_shared(rows, bench, p, data, o, comm->first());
    comm->finish();
  });
  if (comm->first()) rows.finish(o.common);
}

void run_attention(const AttentionOptions& o) {
  if (o.context > 1) return run_shared(o);
  std::vector<AttentionProblem> problems;
  for (const std::string& shape : o.shapes)
    for (const std::string& mix : o.documents) {
      AttentionProblem& p = problems.emplace_back(parse_shape(shape, o));
      if (mix.empty()) continue;
      p.documents = mix;
      p.bounds = mixed_bounds(mix, p.B, p.T);
    }
  for (const std::string& data : o.data)
    for (const AttentionProblem& p : problems)
      if (!is_drawn(data)) check_trained(p, data, {o.text, o.layer});
  o.common.check_files();
  const Device device = o.common.chosen_device();
  AttentionBench bench{.device = device, .dtype = o.common.chosen_dtype(device), .json = o.common.json, .energy = {}};
  if (o.common.energy) bench.energy.emplace(device);
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
  verb->add_option_function<std::string>(
          "--branches",
          [o](const std::string& word) {
            if (word == "sel") o->nsa.branches = Branches::selected, o->nsa.selector = Selector::index;
            if (word == "win") o->nsa.branches = Branches::window;
          },
          "cmp,sel,win; sel: one softmax over blocks that a taught index selects; win: over the window (default: "
          "cmp,sel,win)")
      ->check(CLI::IsMember({"cmp,sel,win", "sel", "win"}));
  verb->add_option_function<std::string>(
          "--selector",
          [o](const std::string& word) {
            if (word == "index") o->nsa.selector = Selector::index;
          },
          "compressed or index (default: compressed; index with --branches sel)")
      ->check(CLI::IsMember({"compressed", "index"}));
  const auto size = [&](const char* name, int64_t& value, const char* what, int64_t least = 1) {
    verb->add_option(name, value, what)
        ->check(within(at_least(static_cast<double>(least)).up_to(1 << 20)))
        ->capture_default_str();
  };
  verb->add_option("--context", o->context,
                   "number of ranks that share each sequence, started by mpirun -np: times the whole attention alone, "
                   "beside what one card needs for whole sequences")
      ->check(within(at_least(1).up_to(1 << 16)))
      ->capture_default_str();
  size("--l", o->nsa.l, "compression block, tokens");
  size("--d", o->nsa.d, "compression stride, tokens");
  size("--l-sel", o->nsa.l_sel, "selection block, tokens");
  size("--n-sel", o->nsa.n_sel, "selected blocks for each query");
  size("--w", o->nsa.w, "sliding window, tokens");
  size("--init-blocks", o->nsa.init_blocks, "first blocks, always selected", 0);
  size("--local-blocks", o->nsa.local_blocks, "current and preceding blocks, always selected");
  size("--d-index", o->nsa.d_index, "width of a taught index's queries and key; even");
  o->common.add_to(*verb);
  o->common.add_energy_to(*verb);
  verb->callback([o] { run_attention(*o); });
  return verb;
}

}  // namespace triad
