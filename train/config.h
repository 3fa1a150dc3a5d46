// The config of a run: every field of its seven groups, declared once. io/json_config.h reads, echoes and explains it.
#pragma once
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/fields.h"
#include "engine/routes.h"
#include "model/config.h"
#include "model/recompute.h"

namespace triad {

enum class DataKind { synthetic, text, shards, needle };
enum class OnNonfinite { skip, stop };
enum class DeviceChoice { automatic, cpu, cuda };
enum class Precision { fp32, bf16 };
enum class OnAnomaly { report, stop };

struct DataConfig {
  DataKind kind = DataKind::synthetic;
  std::vector<std::string> paths, val_paths;
  double val_fraction = 0.1;
  std::string tokenizer;  // resolve() makes it "byte", settle_shards() that of the shards; empty: theirs is not known
  std::string tokenizer_or_bytes() const { return tokenizer.empty() ? "byte" : tokenizer; }
  int64_t seed = -1;  // -1 until resolve(): train.seed
  double stall_s = 300;
  int64_t needle_pairs = 64, needle_questions = 1, needle_value_tokens = 1;
  double needle_depth = -1;
};

struct TrainConfig {
  int64_t steps = 0, seq_len = 0, micro_batch_size = 0, accumulate_grad_batches = 1;
  double lr = 3e-4, min_lr_fraction = 0.1;
  int64_t warmup_steps = 0;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, grad_clip = 1;
  int64_t seed = 1337;
  std::string init_from;
  int64_t eval_every = 0, eval_batches = 10, save_every = 0, keep_last = 3, keep_every = 0;
  bool save_last = true;
  OnNonfinite on_nonfinite = OnNonfinite::stop;
  bool allow_unsafe = false;

  int64_t tokens_per_step() const { return seq_len * micro_batch_size * accumulate_grad_batches; }  // of one rank
};

struct RuntimeConfig {
  DeviceChoice device = DeviceChoice::automatic;
  Precision precision = Precision::fp32;
  bool deterministic = true;
  bool cuda_graph = false;
  bool asserts = false, strict = false;
  KernelChoices kernels;
  std::string recompute = "none";
};

struct DistConfig {
  CommBackend backend = CommBackend::automatic;
  double bucket_mb = 25;
  Precision grad_dtype = Precision::fp32;
  int64_t zero = 0;
  int64_t timeout_s = 600;
};

struct LogConfig {
  std::string out_dir;
  int64_t every = 10, memory_every = 0, heartbeat_every = -1, route_steps = 1;
  bool csv = true, tensorboard = true, stats = true;
  std::vector<std::string> diagnostics;
  bool diagnoses(std::string_view what) const {
    return std::find(diagnostics.begin(), diagnostics.end(), what) != diagnostics.end();
  }
  double hang_s = 30, slow_s = 10, slow_factor = 5;  // train/monitor/watchdog.h
  double throughput_drop = 0.5, creep_mib = 256;     // train/monitor/anomaly.h
  int64_t plateau_steps = 1000;
  OnAnomaly on_anomaly = OnAnomaly::report;
};

struct Config {
  ModelConfig model;  // holds the group nsa too
  DataConfig data;
  TrainConfig train;
  RuntimeConfig runtime;
  DistConfig dist;
  LogConfig log;

  RecomputePlan recompute() const { return RecomputePlan::parse(runtime.recompute, model.n_layers); }
  // Fills in defaults that depend on other fields; throws UsageError for models that cannot be.
  void resolve();
  // Throws UsageError if a run of it could not be, or would be unsafe. Weights alone (init, eval, ...) need no such
  // check.
  void check_run() const;
};

template <>
struct EnumWords<DataKind> {
  static constexpr std::pair<std::string_view, DataKind> words[] = {{"synthetic", DataKind::synthetic},
                                                                    {"text", DataKind::text},
                                                                    {"shards", DataKind::shards},
                                                                    {"needle", DataKind::needle}};
};
template <>
struct EnumWords<OnNonfinite> {
  static constexpr std::pair<std::string_view, OnNonfinite> words[] = {{"skip", OnNonfinite::skip},
                                                                       {"stop", OnNonfinite::stop}};
};
template <>
struct EnumWords<DeviceChoice> {
  static constexpr std::pair<std::string_view, DeviceChoice> words[] = {
      {"auto", DeviceChoice::automatic}, {"cpu", DeviceChoice::cpu}, {"cuda", DeviceChoice::cuda}};
};
template <>
struct EnumWords<Precision> {
  static constexpr std::pair<std::string_view, Precision> words[] = {{"fp32", Precision::fp32},
                                                                     {"bf16", Precision::bf16},
                                                                     {"f32", Precision::fp32},
                                                                     {"float32", Precision::fp32},
                                                                     {"bfloat16", Precision::bf16}};
};
template <>
struct EnumWords<OnAnomaly> {
  static constexpr std::pair<std::string_view, OnAnomaly> words[] = {{"report", OnAnomaly::report},
                                                                     {"stop", OnAnomaly::stop}};
};

template <>
struct EnumWords<CommBackend> {
  static constexpr std::pair<std::string_view, CommBackend> words[] = {
      {"auto", CommBackend::automatic}, {"nccl", CommBackend::nccl}, {"mpi", CommBackend::mpi}};
};

template <class V>
void visit(DataConfig& c, V&& v) {
  v("kind", c.kind, "where tokens come from", required());
  v("paths", c.paths, "files or globs: text, or token shards; or a folder that triad data has filled", Rule{});
  v("val_paths", c.val_paths,
    "the validation split's own files; not set: those that manifest.json lists beside the shards, if it does", Rule{});
  v("val_fraction", c.val_fraction, "held out for validation where there are no val_paths", at_least(0).up_to(0.9));
  v("tokenizer", c.tokenizer,
    "byte, a tokenizer.json, or an encoder.json with its vocab.bpe beside it; not set: byte, for shards that of the "
    "manifest.json beside them",
    Rule{});
  v("stall_s", c.stall_s, "seconds that a step waits for its tokens at most; then the run ends",
    above(0).up_to(1 << 20));
  v("seed", c.seed, "of split and order; -1: train.seed", at_least(-1));
  v("needle_pairs", c.needle_pairs, "kind needle: keys with their values in a sequence", at_least(1).up_to(1 << 20));
  v("needle_questions", c.needle_questions, "kind needle: for each key on average; half of the keys have one",
    at_least(1).up_to(1 << 20));
  v("needle_value_tokens", c.needle_value_tokens, "kind needle: tokens of a value", at_least(1).up_to(64));
  v("needle_depth", c.needle_depth,
    "kind needle: 0 to 1, where the one pair lies that is asked for, at the end; -1: all are asked for, anywhere",
    at_least(-1).up_to(1));
}

template <class V>
void visit(TrainConfig& c, V&& v) {
  v("steps", c.steps, "optimizer steps", required(at_least(0)));
  v("seq_len", c.seq_len, "tokens a sequence T", required(at_least(1).up_to(1 << 24)));
  v("micro_batch_size", c.micro_batch_size, "sequences a rank and micro-step", required(at_least(1).up_to(1 << 20)));
  v("accumulate_grad_batches", c.accumulate_grad_batches, "micro-steps an optimizer step", at_least(1).up_to(1 << 20));
  v("lr", c.lr, "peak learning rate", at_least(0));
  v("min_lr_fraction", c.min_lr_fraction, "of lr, at the end of the cosine", at_least(0).up_to(1));
  v("warmup_steps", c.warmup_steps, "optimizer steps of linear warm-up", at_least(0));
  v("beta1", c.beta1, "AdamW, first moment", at_least(0).up_to(0.999999));
  v("beta2", c.beta2, "AdamW, second moment", at_least(0).up_to(0.99999999));
  v("eps", c.eps, "AdamW", above(0));
  v("weight_decay", c.weight_decay, "AdamW, tensors of two or more dimensions", at_least(0));
  v("grad_clip", c.grad_clip, "largest global gradient norm; 0: no clipping", at_least(0));
  v("seed", c.seed, "of the weights, and of the data unless data.seed is given", at_least(0));
  v("init_from", c.init_from,
    "a run or checkpoint whose weights this one begins with, of a model with the same parameters and tokenizer; any "
    "other key may differ, and all else begins anew. A resume does not read it",
    Rule{});
  v("eval_every", c.eval_every, "optimizer steps between evaluations; 0: none", at_least(0));
  v("eval_batches", c.eval_batches, "micro-batches an evaluation", at_least(1).up_to(1 << 24));
  v("save_every", c.save_every, "optimizer steps between checkpoints; 0: none before the end", at_least(0));
  v("save_last", c.save_last, "a checkpoint at the end too, which a run of more steps goes on from", Rule{});
  v("keep_last", c.keep_last, "checkpoints that stay, the newest ones; 0: all", at_least(0));
  v("keep_every", c.keep_every, "of those that keep_last lets go, steps that are multiples of this stay; 0: none",
    at_least(0));
  v("on_nonfinite", c.on_nonfinite, "at a loss or gradient norm that is not finite", Rule{});
  v("allow_unsafe", c.allow_unsafe, "allow a long run without checkpoints, or in fp32 on a GPU", Rule{});
}

template <class V>
void visit(RuntimeConfig& c, V&& v) {
  v("device", c.device, "auto: the GPU where one can be used", Rule{});
  v("precision", c.precision, "of weights and activations in compute; bf16 keeps fp32 master weights", Rule{});
  v("deterministic", c.deterministic,
    "same seed, same machine: same bits. false would permit faster sums whose order changes; no op has any today",
    Rule{});
  v("cuda_graph", c.cuda_graph,
    "on a GPU, record a micro-step once and replay it: same bits, fewer gaps where kernels are short", Rule{});
  v("asserts", c.asserts,
    "check on the device that tokens are in range, selection lists ascending, unique and causal, and all activations "
    "and their gradients finite; the first that is not ends the run, by layer, op and element",
    Rule{});
  v("kernels", c.kernels,
    "auto, fused, general or reference for all, or an object of them for cmp, sel, win, matmul: which kernels an op "
    "has (engine/routes.h says what each means)",
    Rule{});
  v("strict", c.strict, "a call that its fused kernel does not take is an error, with op, shape and reason", Rule{});
  v("recompute", c.recompute,
    "run again in backward, for memory: none, mlp, attention or block for all layers, or ranges: 0:6=block,6:12=mlp",
    Rule{});
}

template <class V>
void visit(DistConfig& c, V&& v) {
  v("backend", c.backend, "auto: NCCL between GPUs; mpi: sums on the host, which tells transport faults from ours",
    Rule{});
  v("bucket_mb", c.bucket_mb, "MiB of gradients summed over the ranks at a time", above(0).up_to(1 << 20));
  v("grad_dtype", c.grad_dtype, "in which gradients travel between ranks", Rule{});
  v("zero", c.zero, "1: each rank keeps its share of the optimizer's moments alone", at_least(0).up_to(1));
  v("timeout_s", c.timeout_s, "seconds a collective may take; then the run ends", at_least(1).up_to(1 << 20));
}

template <class V>
void visit(LogConfig& c, V&& v) {
  v("out_dir", c.out_dir, "the run's folder", required());
  v("every", c.every, "optimizer steps between rows of training.csv and progress lines", at_least(1));
  v("memory_every", c.memory_every, "optimizer steps between memory snapshots, beside those at the start; 0: none",
    at_least(0));
  v("heartbeat_every", c.heartbeat_every,
    "optimizer steps between heartbeats; 0: none; -1: each of the first 1,000 steps, then every 10th up to 10,000 and "
    "so on, and one a minute at least",
    at_least(-1));
  v("route_steps", c.route_steps, "steps whose choices of kernels the log lists, each once", at_least(0));
  v("csv", c.csv, "write the run's CSV files", Rule{});
  v("diagnostics", c.diagnostics,
    "a list of ledger (each gradient: arrived, norm, zero, not finite), layer_norms (the gradient's norm by layer), "
    "backward (times of each layer's ops, traces.log) and buckets (of gradients, between ranks: times and checksums)",
    Rule{});
  v("tensorboard", c.tensorboard, "write TensorBoard's event files, in tb/", Rule{});
  v("stats", c.stats,
    "how gates and selection lists are, layer by layer: gates.csv, k_stats.csv, heartbeats, TensorBoard", Rule{});
  v("hang_s", c.hang_s, "seconds without any progress, after which a rank counts as hung", above(0).up_to(1 << 20));
  v("slow_s", c.slow_s, "seconds that a step has to take at least to count as slow", above(0).up_to(1 << 20));
  v("slow_factor", c.slow_factor, "and times what steps usually take", at_least(1).up_to(1 << 20));
  v("throughput_drop", c.throughput_drop, "an anomaly: tokens/s below this part of what was usual; 0: never",
    at_least(0).up_to(1));
  v("plateau_steps", c.plateau_steps,
    "an anomaly: so many steps whose mean loss is not below that of as many before; 0: never",
    at_least(0).up_to(1 << 24));
  v("creep_mib", c.creep_mib, "an anomaly: MiB of memory that 500 steps have gained, hundred by hundred", above(0));
  v("on_anomaly", c.on_anomaly,
    "report it, or stop the run too (exit code 1), with a checkpoint and its type in .anomaly_type", Rule{});
}

// The groups of a config file, in the order of its echo.
template <class V>
void visit_groups(Config& c, V&& v) {
  v("model", c.model);
  v("nsa", c.model.nsa);
  v("data", c.data);
  v("train", c.train);
  v("runtime", c.runtime);
  v("dist", c.dist);
  v("log", c.log);
}

}  // namespace triad
