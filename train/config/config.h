// The config of a run: the fields of its groups. config_fields.h declares each as a key.
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/comm/comm.h"
#include "engine/fields.h"
#include "engine/routes.h"
#include "io/chat/chat_options.h"
#include "io/data/format/text_format.h"
#include "io/data/needle_task.h"
#include "io/data/rows.h"
#include "model/config.h"
#include "model/lora.h"
#include "model/recompute.h"

namespace triad {

enum class DataKind { synthetic, text, shards, needle };
enum class DocumentScope { unset, attend_within, attend_across };
enum class OnNonfinite { skip, stop };
enum class DeviceChoice { automatic, cpu, cuda };
enum class Precision { fp32, bf16 };
enum class MatmulDType { bf16, fp8 };
enum class OnAnomaly { report, stop };
enum class MasterDType { fp32, split, none };
enum class Offload { none, optimizer };
enum class Schedule { cosine, wsd, linear };
enum class OptimizerKind { adamw, muon };
enum class StageAttention { configured, nsa, dense, alternate };

// Data from which a share of the rows is drawn: an object in data.paths, or all its strings.
struct DataComponent {
  std::vector<std::string> path, val_paths;
  double weight = 0;         // 0: as many as the component has tokens
  int64_t epochs = 0;        // the most epochs; 0: no limit
  std::string name() const;  // name for messages
};

inline constexpr int64_t kFollowsData = -1;  // data.max_documents: as many as the data's short documents need

struct DataConfig {
  DataKind kind = DataKind::synthetic;
  std::vector<DataComponent> components;  // the key data.paths
  std::vector<std::string> val_paths;
  std::vector<std::string> paths() const;  // all components' paths
  double val_fraction = 0.1;
  TextFormat format = TextFormat::automatic;
  // Tokenizer name or path. If the config has none, resolve() sets "byte", and resolve_shards() the one that the
  // shards' manifest names; it stays empty if the shards' tokenizer is unknown.
  std::string tokenizer;
  std::string tokenizer_or_bytes() const { return tokenizer.empty() ? "byte" : tokenizer; }
  std::string chat_template;  // a choice for choose_chat_format()
  ChatLearn learn = ChatLearn::assistant;
  std::string separator;                           // token that precedes each document; "": the tokenizer's own
  int64_t seed = -1;                               // -1 means train.seed, which resolve() fills in
  DocumentScope documents = DocumentScope::unset;  // resolve_documents() replaces unset
  Packing packing = Packing::unset;                // resolve_documents() replaces unset
  int64_t max_documents = 0;
  double stall_s = 300;
  NeedleKind needle_task = NeedleKind::keys;
  int64_t needle_pairs = 64, needle_questions = 1, needle_value_tokens = 1, needle_hops = 2, needle_occurrences = 8;
  double needle_depth = -1;
};

// An entry of train.stages. stages_of() (schedule.h) fills in what is absent.
struct StageConfig {
  int64_t steps = 0, seq_len = 0, micro_batch_size = 0;  // seq_len, micro_batch_size: 0 if absent
  double lr_factor = 1;
  StageAttention attention = StageAttention::configured;
};

struct TrainConfig {
  int64_t steps = 0, seq_len = 0, micro_batch_size = 0, accumulate_grad_batches = 1;
  std::vector<StageConfig> stages;
  double lr = 3e-4, min_lr_fraction = 0.1;
  int64_t warmup_steps = 0;
  Schedule schedule = Schedule::cosine;
  double decay_fraction = 0.2;
  OptimizerKind optimizer = OptimizerKind::adamw;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, grad_clip = 1, index_lr_factor = 1;
  int64_t seed = 1337;
  std::string init_from;
  std::optional<LoraConfig> lora;
  int64_t eval_every = 0, eval_batches = 10, save_every = 0, keep_last = 3, keep_every = 0;
  bool save_last = true, keep_best = false;
  int64_t patience = 0;
  OnNonfinite on_nonfinite = OnNonfinite::stop;
  bool allow_unsafe = false;
  Precision moments_dtype = Precision::fp32, grads_dtype = Precision::fp32;
  MasterDType master_dtype = MasterDType::fp32;
  Precision final_dtype = Precision::fp32;

  // The longest sequence in any stage, in tokens.
  int64_t longest_seq_len() const;
  // Tokens per optimizer step on one rank, or on the ranks that share their sequences (dist.context). With
  // train.stages, ask a stage's config (in_stage() in schedule.h).
  int64_t tokens_per_step() const { return seq_len * micro_batch_size * accumulate_grad_batches; }
  // Steps at the end in which schedule wsd's learning rate falls.
  int64_t decay_steps() const { return std::llround(decay_fraction * static_cast<double>(steps)); }
};

struct RuntimeConfig {
  DeviceChoice device = DeviceChoice::automatic;
  Precision precision = Precision::fp32;
  bool deterministic = true;
  bool cuda_graph = false;
  bool asserts = false, strict = false;
  KernelChoices kernels;
  MatmulDType matmul_dtype = MatmulDType::bf16;
  std::string fp8_exclude;  // layers as ranges "0:1,15:16"
  std::string recompute = "none";
  Offload offload = Offload::none;
};

struct DistConfig {
  CommBackend backend = CommBackend::automatic;
  double bucket_mb = 25;
  Precision grad_dtype = Precision::fp32, replicas_grad_dtype = Precision::fp32;
  int64_t zero = 0, replicas = 1, context = 1;
  int64_t timeout_s = 600;
};

struct LogConfig {
  std::string out_dir;
  int64_t every = 10, memory_every = 0, heartbeat_every = -1, route_steps = 1;
  bool csv = true, tensorboard = true, stats = true;
  std::vector<std::string> samples;  // prompts
  int64_t sample_tokens = 64;
  std::vector<std::string> diagnostics;
  bool diagnoses(std::string_view what) const {
    return std::find(diagnostics.begin(), diagnostics.end(), what) != diagnostics.end();
  }
  double hang_s = 30, slow_s = 10, slow_factor = 5;  // watchdog thresholds (train/monitor/watchdog.h)
  double throughput_drop = 0.5, creep_mib = 256;     // anomaly rule thresholds (anomaly.h)
  int64_t plateau_steps = 1000;
  OnAnomaly on_anomaly = OnAnomaly::report;
};

struct Config {
  ModelConfig model;  // holds the config groups `model` and `nsa`
  DataConfig data;
  TrainConfig train;
  RuntimeConfig runtime;
  DistConfig dist;
  LogConfig log;

  // Tokens per optimizer step on all ranks.
  int64_t tokens_per_step(int64_t ranks) const { return train.tokens_per_step() * (ranks / dist.context); }

  RecomputePlan recompute;       // resolve() parses it from runtime.recompute
  std::vector<bool> fp8_layers;  // and this from runtime.matmul_dtype and fp8_exclude; empty: no layer's
  // Fills in what depends on other fields. Throws UsageError if the config describes an impossible model.
  void resolve();
  // Throws UsageError if a training run with this config is impossible or unsafe. Verbs that only use weights (init,
  // eval, ...) don't need this check.
  void check_run() const;
};

class Tokenizer;
// The tokenizer that the config names, with its separator. Throws a UsageError that names data.tokenizer.
std::unique_ptr<Tokenizer> open_tokenizer(const DataConfig&);

template <>
struct EnumWords<DataKind> {
  static constexpr std::pair<std::string_view, DataKind> words[] = {{"synthetic", DataKind::synthetic},
                                                                    {"text", DataKind::text},
                                                                    {"shards", DataKind::shards},
                                                                    {"needle", DataKind::needle}};
};
template <>
struct EnumWords<DocumentScope> {
  static constexpr std::pair<std::string_view, DocumentScope> words[] = {
      {"attend_within", DocumentScope::attend_within},
      {"attend_across", DocumentScope::attend_across},
      {"", DocumentScope::unset}};
};
template <>
struct EnumWords<Packing> {
  static constexpr std::pair<std::string_view, Packing> words[] = {
      {"stream", Packing::stream}, {"best_fit", Packing::best_fit}, {"", Packing::unset}};
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
struct EnumWords<MatmulDType> {
  static constexpr std::pair<std::string_view, MatmulDType> words[] = {{"bf16", MatmulDType::bf16},
                                                                       {"fp8", MatmulDType::fp8}};
};
template <>
struct EnumWords<OnAnomaly> {
  static constexpr std::pair<std::string_view, OnAnomaly> words[] = {{"report", OnAnomaly::report},
                                                                     {"stop", OnAnomaly::stop}};
};

template <>
struct EnumWords<MasterDType> {
  static constexpr std::pair<std::string_view, MasterDType> words[] = {
      {"fp32", MasterDType::fp32}, {"split", MasterDType::split}, {"none", MasterDType::none}};
};
template <>
struct EnumWords<Offload> {
  static constexpr std::pair<std::string_view, Offload> words[] = {{"none", Offload::none},
                                                                   {"optimizer", Offload::optimizer}};
};

template <>
struct EnumWords<Schedule> {
  static constexpr std::pair<std::string_view, Schedule> words[] = {
      {"cosine", Schedule::cosine}, {"wsd", Schedule::wsd}, {"linear", Schedule::linear}};
};
template <>
struct EnumWords<OptimizerKind> {
  static constexpr std::pair<std::string_view, OptimizerKind> words[] = {{"adamw", OptimizerKind::adamw},
                                                                         {"muon", OptimizerKind::muon}};
};

template <>
struct EnumWords<StageAttention> {
  static constexpr std::pair<std::string_view, StageAttention> words[] = {{"nsa", StageAttention::nsa},
                                                                          {"dense", StageAttention::dense},
                                                                          {"alternate", StageAttention::alternate},
                                                                          {"", StageAttention::configured}};
};

template <>
struct EnumWords<CommBackend> {
  static constexpr std::pair<std::string_view, CommBackend> words[] = {
      {"auto", CommBackend::automatic}, {"nccl", CommBackend::nccl}, {"mpi", CommBackend::mpi}};
};

}  // namespace triad
