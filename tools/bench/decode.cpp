// triad bench prefill and triad bench decode: write CSV with times for an S-token prompt, and for the decoding step
// that appends token S; with the attention branches' times; and with how many keys the kernels read, next to the
// expected number. decode: ms_total is a step that also chooses the next token (greedy); ms_cmp, ms_sel and ms_win are
// what one branch, in all layers, adds to a step without branches; ms_sel with a taught index, if there is one. The
// step's kernels count the keys that they read.
// prefill: ms_total is the forward pass, or with --batch the passes into which the prompts are packed; ms_cmp (with
// phi), ms_sel (with the selection) and ms_win are those ops' times for one prompt on the last layer's rows, times the
// layer and prompt counts. Keys are counted by a pass with q = 0 and the selected lists: all scores are 0, so a row's
// lse is the log of how many keys the kernel read for it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <span>
#include <tuple>

#include "engine/check.h"
#include "engine/process/tone.h"
#include "engine/rng.h"
#include "kernels/nsa/select_index.h"
#include "model/decoding/decode_session.h"
#include "tools/bench/bench.h"
#include "tools/options.h"
#include "train/config/device_choice.h"
#include "train/config/load_config.h"
#include "train/step/train_step.h"

namespace triad {

namespace {

constexpr int kCmpBranch = static_cast<int>(Branch::cmp), kSel = static_cast<int>(Branch::sel),
              kWin = static_cast<int>(Branch::win);

struct DecodeBenchOptions {
  std::string config, csv;
  std::vector<std::string> sets;
  std::vector<int64_t> lengths = {512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
  bool prefill = false;
  int64_t batch = 1, runs = 31;
  BenchOptions kept;  // only its fields for --compare and --append are used
};

struct Row {
  int64_t S = 0;
  double ms_total = 0;
  std::array<double, 3> ms{};  // branch times, ms; dense attention: its time is at kWin
  // Keys that the last token reads, mean over groups and layers, in a prefill and in a step.
  double reads = 0, reads_decode = 0;
};

// How many keys the last of S tokens reads in one group of a layer, all branches together.
int64_t expected_reads(const ModelConfig& c, int64_t layer, int64_t S) {
  const AttentionKind kind = c.attention_of(layer);
  if (kind == AttentionKind::dense) return S;
  const NsaConfig& n = c.nsa_at(layer);
  if (kind == AttentionKind::window) return std::min(n.w, S);
  const int64_t selected = S >= n.n_sel * n.l_sel ? (n.n_sel - 1) * n.l_sel + (S - 1) % n.l_sel + 1 : S;
  if (kind == AttentionKind::selected) return selected;
  return compressed_length(S, n.l, n.d) + selected + std::min(n.w, S);
}
// The mean over the layers.
double expected_reads(const ModelConfig& c, int64_t S) {
  double sum = 0;
  for (int64_t i = 0; i < c.n_layers; ++i) sum += static_cast<double>(expected_reads(c, i, S));
  return sum / static_cast<double>(c.n_layers);
}

// A model's layers with the same attention: the last one's index, and how many there are.
struct LayersOfKind {
  AttentionKind kind;
  int64_t last = -1;
  double count = 0;
};
std::vector<LayersOfKind> layers_by_kind(const ModelConfig& c) {
  using Options =
      std::tuple<AttentionKind, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, Selector, int64_t>;
  std::map<Options, LayersOfKind> found;
  for (int64_t i = 0; i < c.n_layers; ++i) {
    const AttentionKind kind = c.attention_of(i);
    const NsaConfig n = kind == AttentionKind::dense ? NsaConfig() : c.nsa_at(i);
    LayersOfKind& layers =
        found[{kind, n.l, n.d, n.l_sel, n.n_sel, n.w, n.init_blocks, n.local_blocks, n.selector, n.d_index}];
    layers.kind = kind, layers.last = i, ++layers.count;
  }
  std::vector<LayersOfKind> kinds;
  for (const auto& [options, layers] : found) kinds.push_back(layers);
  return kinds;
}

// Returns the median time over `runs` runs, measured by events after one warm-up run, ms.
template <class Work>
double median_ms(Context& ctx, int64_t runs, Work&& work) {
  std::vector<double> ms;
  for (int64_t i = 0; i <= runs; ++i) {
    ctx.stream.synchronize();
    Event begin(ctx.device, true), end(ctx.device, true);
    begin.record(ctx.stream);
    work();
    end.record(ctx.stream);
    if (ctx.device.is_cuda()) end.synchronize();
    if (i > 0) ms.push_back(end.ms_since(begin));
  }
  return median(std::move(ms));
}

// Times a model with fresh weights on random tokens: prompts, and steps that use the cache that a prompt has filled.
class DecodeBench {
 public:
  DecodeBench(const Config& config, Device device, const DecodeBenchOptions& o)
      : o_(o), c_(config.model), dtype_(compute_dtype(config.runtime.precision)) {
    session_ = std::make_unique<DecodeSession>(
        c_, DecodeSession::Options{.device = device,
                                   .dtype = dtype_,
                                   .batch = o.batch,
                                   .context = *std::max_element(o.lengths.begin(), o.lengths.end()),
                                   .prefills = o.lengths,
                                   .starts = starts_together(),
                                   .kernels = config.runtime.kernels});
    session_->model().params().init(ctx(), static_cast<uint64_t>(config.train.seed));
    counters_ = std::make_unique<Arena>(device, kMemAlign);
    counted_ = counters_->alloc(MemTag::workspace, "keys read", DType::i64, {3});
  }

  Row row(int64_t S) {
    int64_t bytes = 0;
    {
      Arena planned = Arena::planned(ctx().device);
      build(planned, S);
      bytes = planned.used_bytes();
    }
    Arena arena(ctx().device, bytes);
    build(arena, S);
    const Philox random(1, 0);
    std::vector<int32_t> text;
    for (int64_t i = 0; i < S; ++i)
      text.push_back(
          static_cast<int32_t>(random.below(static_cast<uint64_t>(i), static_cast<uint64_t>(c_.vocab_size))));
    write(ctx(), act_->tokens, text.data());
    write(ctx(), act_->targets, text.data());
    for (int64_t b = 0; b < o_.batch; ++b) {
      const Decoder::Prompt prompt = {b, 0, S};
      session_->decoder().prefill(ctx(), *act_, {&prompt, 1});
    }
    session_->choose_greedy();

    Row row{.S = S, .reads = reads_of_prefill(), .reads_decode = reads_of_step(S)};
    if (o_.prefill)
      measure_prefill(row, text);
    else
      measure_step(row);
    ctx().stream.synchronize();
    act_.reset();
    return row;
  }

 private:
  Context& ctx() { return session_->ctx(); }
  bool starts_together() const { return o_.prefill && o_.batch > 1; }
  double a_group(double reads, int64_t sequences) const {
    return reads / static_cast<double>(sequences * c_.n_kv_groups);
  }
  void build(Arena& arena, int64_t S) {
    act_ = std::make_unique<Activations>(arena, c_, 1, S, dtype_, /*keep=*/false);
    q_zero_ = arena.alloc(MemTag::activations, "q of zeros", dtype_, {1, S, c_.n_heads, c_.d_k});
    out_ = arena.alloc(MemTag::activations, "out", dtype_, {1, S, c_.n_heads, c_.d_v});
  }
  QkvViews views(const LayersOfKind& l) { return attended_qkv(act_->layer(l.last), c_, l.kind, 1, act_->T()); }

  // ---- prefill ----

  void measure_prefill(Row& row, std::span<const int32_t> text) {
    Model& model = session_->model();
    std::vector<DecodeSession::Start> starts;
    for (int64_t b = 0; b < o_.batch; ++b) starts.push_back({b, text});
    row.ms_total = median_ms(ctx(), o_.runs, [&] {
      if (starts_together())
        session_->start(starts);
      else
        model.forward(ctx(), *act_);
    });
    for (const LayersOfKind& kind_layers : layers_by_kind(c_)) measure_prefill(row, kind_layers);
    for (double& ms : row.ms) ms *= static_cast<double>(o_.batch);
  }

  // Adds the attention time of all layers of one kind, measured on the last one.
  void measure_prefill(Row& row, const LayersOfKind& kind_layers) {
    const AttentionSaved& saved = act_->layer(kind_layers.last).attention;
    const auto layers = [&](auto&& work) { return median_ms(ctx(), o_.runs, work) * kind_layers.count; };
    if (kind_layers.kind == AttentionKind::dense) {  // goes into the window branch's column
      row.ms[kWin] += layers([&] { dense_attention_forward(ctx(), saved.dense, dense_in(views(kind_layers))); });
      return;
    }
    const NsaConfig& n = c_.nsa_at(kind_layers.last);
    if (kind_layers.kind == AttentionKind::window) {
      row.ms[kWin] += layers([&] { window_attention_forward(ctx(), saved.dense, dense_in(views(kind_layers)), n.w); });
      return;
    }
    if (kind_layers.kind == AttentionKind::selected) {
      row.ms[kSel] += layers([&] {
        const QkvViews from = views(kind_layers);
        selected_attention_forward(ctx(), {saved.nsa.block_index, saved.dense.o, saved.dense.lse}, dense_in(from),
                                   {from.index_q, from.index_k}, n);
      });
      return;
    }
    const NsaWeights& w = session_->model().weights().layers[static_cast<size_t>(kind_layers.last)].nsa;
    const NsaIn from = nsa_in(views(kind_layers));
    const NsaSaved& s = saved.nsa;
    const auto out = [&](int b) { return AttendOut{s.o[b], s.lse[b]}; };
    row.ms[kWin] += layers([&] {
      nsa_attend_window_forward(ctx(), out(kWin), {from.q, from.k[kWin], from.v[kWin]}, n.w);
    });
    row.ms[kCmpBranch] += layers([&] {
      nsa_compress_forward(ctx(), s.k_cmp, from.k[kCmpBranch], w.phi_k, n.phi_options());
      nsa_compress_forward(ctx(), s.v_cmp, from.v[kCmpBranch], w.phi_v, n.phi_options());
      nsa_attend_compressed_forward(ctx(), out(kCmpBranch), {from.q, s.k_cmp, s.v_cmp}, n);
    });
    row.ms[kSel] += layers([&] {
      if (from.index.q.empty())
        nsa_select(ctx(), s.block_index, from.q, s.k_cmp, s.lse[kCmpBranch], n);
      else
        nsa_select_index(ctx(), s.block_index, from.index.q, from.index.k, n);
      nsa_attend_selected_forward(ctx(), out(kSel), {from.q, from.k[kSel], from.v[kSel]}, s.block_index, n.l_sel);
    });
  }

  double reads_of_prefill() {
    double reads = 0;
    for (const LayersOfKind& kind_layers : layers_by_kind(c_))
      reads += kind_layers.count * reads_of_prefill(kind_layers);
    return reads / static_cast<double>(c_.n_layers);
  }

  // With zero queries, lse is the log of the key count.
  double reads_of_prefill(const LayersOfKind& kind_layers) {
    zero(ctx(), q_zero_);
    QkvViews from = views(kind_layers);
    from.q = q_zero_;
    const AttentionSaved& saved = act_->layer(kind_layers.last).attention;
    const NsaConfig& n = c_.nsa_at(kind_layers.last);
    std::vector<Tensor> all_lse;  // lse per branch, or that of one softmax
    switch (kind_layers.kind) {
      case AttentionKind::dense:
        dense_attention_forward(ctx(), {out_, saved.dense.lse}, dense_in(from));
        all_lse = {saved.dense.lse};
        break;
      case AttentionKind::selected:
        selected_attention_forward(ctx(), {saved.nsa.block_index, out_, saved.dense.lse}, dense_in(from), {}, n,
                                   /*keep_block_index=*/true);
        all_lse = {saved.dense.lse};
        break;
      case AttentionKind::window:
        window_attention_forward(ctx(), {out_, saved.dense.lse}, dense_in(from), n.w);
        all_lse = {saved.dense.lse};
        break;
      case AttentionKind::nsa:
        nsa_forward(ctx(), out_, saved.nsa, nsa_in(from),
                    session_->model().weights().layers[static_cast<size_t>(kind_layers.last)].nsa, n,
                    /*keep_block_index=*/true);
        all_lse.assign(saved.nsa.lse.begin(), saved.nsa.lse.end());
        break;
    }
    double reads = 0;
    for (const Tensor& branch_lse : all_lse) {
      const Tensor last_row = branch_lse[0][act_->T() - 1];  // [Hq]
      std::vector<float> lse(static_cast<size_t>(c_.n_heads));
      read(ctx(), lse.data(), last_row);
      for (int64_t g = 0; g < c_.n_kv_groups; ++g) reads += std::round(std::exp(lse[g * c_.group_size()]));
    }
    return a_group(reads, 1);
  }

  // ---- the step that appends token S; repeating it overwrites the same cache rows ----

  void set_position_before(int64_t S) {
    const std::vector<int32_t> position(static_cast<size_t>(o_.batch), static_cast<int32_t>(S - 1));
    write(ctx(), session_->decoder().position, position.data());
  }

  double reads_of_step(int64_t S) {
    zero(ctx(), counted_);
    set_position_before(S);
    session_->decoder().queue(ctx(), {.reads = counted_});
    std::array<int64_t, 3> reads{};
    read(ctx(), reads.data(), counted_);
    return a_group(static_cast<double>(reads[kCmpBranch] + reads[kSel] + reads[kWin]), o_.batch * c_.n_layers);
  }

  void measure_step(Row& row) {
    const double without = step_ms(row.S, {false, false, false});
    row.ms_total = step_ms(row.S, {true, true, true});
    // Dense attention is in the window branch's column, and DecodeProbe treats it so too.
    for (int b = c_.has_lists() ? 0 : kWin; b < 3; ++b)
      row.ms[b] = step_ms(row.S, {b == kCmpBranch, b == kSel, b == kWin}) - without;
  }

  double step_ms(int64_t S, const std::array<bool, 3>& branches) {
    Decoder& decoder = session_->decoder();
    const auto work = [&] {
      decoder.queue(ctx(), {.reads = {}, .run = branches});
      if (branches == std::array{true, true, true}) decoder.choose_greedy(ctx());
    };
    std::vector<double> ms;
    Graph graph(ctx().device);
    for (int64_t i = 0; i <= o_.runs + 1; ++i) {
      set_position_before(S);
      if (i == 1 && ctx().device.is_cuda()) graph.record(ctx(), work);
      Event begin(ctx().device, true), end(ctx().device, true);
      begin.record(ctx().stream);
      if (graph.recorded())
        graph.launch(ctx().stream);
      else
        work();
      end.record(ctx().stream);
      if (ctx().device.is_cuda()) end.synchronize();
      if (i > 1) ms.push_back(end.ms_since(begin));
    }
    return median(std::move(ms));
  }

  const DecodeBenchOptions& o_;
  ModelConfig c_;
  DType dtype_;
  std::unique_ptr<DecodeSession> session_;
  std::unique_ptr<Arena> counters_;
  Tensor counted_;
  std::unique_ptr<Activations> act_;
  Tensor q_zero_, out_;
};

// A result as a row in the common kept-row format (tools/bench/bench.h).
Json kept_row(const DecodeBenchOptions& o, const std::string& config, const Row& r, bool dense) {
  return {{"op", o.prefill ? "prefill" : "decode"},
          {"case", fmt::format("{} {}x{}{}", config, o.batch, r.S, dense ? " dense" : "")},
          {"pass", o.prefill ? "forward" : "step"},
          {"us", 1e3 * r.ms_total},
          {"runs", o.runs},
          {"us_cmp", 1e3 * r.ms[kCmpBranch]},
          {"us_sel", 1e3 * r.ms[kSel]},
          {"us_win", 1e3 * r.ms[kWin]},
          {"reads", o.prefill ? r.reads : r.reads_decode}};
}

void run_decode_bench(const DecodeBenchOptions& o) {
  o.kept.check_files();
  const LoadedConfig loaded = load_config(o.config, o.sets);
  const Config& config = loaded.config;
  const Device device = choose_device(config.runtime.device);
  BenchRows rows{.what = o.prefill ? "prefill" : "decode",
                 .device = device,
                 .dtype = compute_dtype(config.runtime.precision),
                 .ceiling = {},
                 .csv = o.csv.empty()};
  if (!o.kept.append.empty()) {
    Stopwatch stopwatch(device);  // this block ends before the model is allocated, so that the memory is free again
    rows.ceiling = measure_ceiling(device, rows.dtype, stopwatch);
  }
  DecodeBench bench(config, device, o);
  std::FILE* const file = o.csv.empty() ? stdout : std::fopen(o.csv.c_str(), "w");
  TRIAD_CHECK(file != nullptr, "{} cannot be written", o.csv);
  fmt::print(file,
             "S,ms_total,ms_cmp,ms_sel,ms_win,reads_actual,reads_expected,reads_actual_decode,reads_expected_decode\n");
  bool as_expected = true;
  for (const int64_t S : o.lengths) {
    const Row r = bench.row(S);
    const double expected = expected_reads(config.model, S);
    fmt::print(file, "{},{:.4f},{:.4f},{:.4f},{:.4f},{},{},{},{}\n", S, r.ms_total, r.ms[kCmpBranch], r.ms[kSel],
               r.ms[kWin], r.reads, expected, r.reads_decode, expected);
    TRIAD_CHECK(std::fflush(file) == 0, "{} cannot be written", o.csv.empty() ? "standard output" : o.csv);
    for (const auto& [branch, name] : {std::pair{kCmpBranch, "cmp"}, {kSel, "sel"}, {kWin, "win"}})
      if (is_noise(r.ms[branch] / r.ms_total))
        print_warning(fmt::format("S {}: ms_{} is noise of the measurement, {}: more --runs show more", S, name,
                                  r.ms[branch] < 0 ? "less than nothing" : "more than the whole"));
    constexpr double kLeastDifference = 1e-6;  // means over layers are rounded
    for (const double reads : {r.reads, r.reads_decode})
      as_expected = as_expected && std::abs(reads - expected) < kLeastDifference;
    rows.rows.push_back(kept_row(o, loaded.name, r, !config.model.has_nsa()));
  }
  if (file != stdout) TRIAD_CHECK(std::fclose(file) == 0, "{} cannot be written", o.csv);
  TRIAD_CHECK(as_expected, "the kernels read more or fewer keys than expected: compare the columns reads_* of the CSV");
  rows.finish(o.kept);
}

CLI::App* add(CLI::App& bench, const char* name, const char* what, bool prefill) {
  CLI::App* verb = bench.add_subcommand(name, what);
  const auto o = std::make_shared<DecodeBenchOptions>();
  o->prefill = prefill;
  if (prefill) o->runs = 5;
  verb->add_option("CONFIG", o->config, "config file (default: the environment variable CONFIG names it)");
  verb->add_option("--set", o->sets, "group.key=value: overrides the config file and the environment")
      ->take_all()
      ->expected(1);
  verb->add_option("--lengths", o->lengths, "lengths S in tokens, the new token included")
      ->delimiter(',')
      ->check(within(at_least(1).up_to(kMaxSeqLen)))
      ->capture_default_str();
  verb->add_option(
          "--batch", o->batch,
          prefill ? "prompts of S tokens that begin together, packed as `triad generate --prompts` packs them: passes, "
                    "caches and logits are timed; the branches' times are those of one prompt, times this"
                  : "sequences that a step decodes together")
      ->check(within(at_least(1).up_to(kMaxBatch)))
      ->capture_default_str();
  verb->add_option("--runs", o->runs, "timed runs; the result is their median")
      ->check(within(at_least(1).up_to(100000)))
      ->capture_default_str();
  verb->add_option("--csv", o->csv, "write the CSV to this file (default: standard output)");
  verb->footer(
      "Columns of the CSV: S: length of the prompt in tokens. ms_total: time of the prefill or of a decoding step.\n"
      "ms_cmp, ms_sel, ms_win: the part of the compressed, selected and window branch. With dense attention ms_win is\n"
      "its part, and the other two are 0. reads_actual: keys that the prompt's last token reads, counted by the\n"
      "kernels; reads_actual_decode: the same for a decoding step.\n"
      "reads_expected, reads_expected_decode: both as computed from the config. The exit code is 1 if they differ.");
  o->kept.add_files_to(*verb);
  verb->callback([o] { run_decode_bench(*o); });
  return verb;
}

}  // namespace

CLI::App* add_bench_prefill(CLI::App& bench) {
  return add(bench, "prefill", "time the forward pass over a prompt, and count the keys that its last token reads",
             true);
}
CLI::App* add_bench_decode(CLI::App& bench) {
  return add(bench, "decode", "time a decoding step, and count the keys that it reads", false);
}

}  // namespace triad
