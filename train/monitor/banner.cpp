#include "train/monitor/banner.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>

#include "engine/backend.h"
#include "engine/process/counted.h"
#include "model/flops.h"
#include "train/config/load_config.h"
#include "train/config/schedule.h"
#include "train/dist/bucket_plan.h"

namespace triad {

namespace {

// The fraction of a GPU's peak FLOP/s that a step is expected to reach, to estimate the run's duration.
constexpr double kExpectedShare = 0.35;

// What the layers attend with, by kind: "NSA attention", "NSA attention, dense in layers 0:2".
std::string attention_text(const ModelConfig& m) {
  if (!m.has_nsa()) return "dense attention" + m.rotation_text();
  std::string text = m.nsa.branches == Branches::selected ? "selected attention"
                     : m.nsa.branches == Branches::window ? "window attention"
                                                          : "NSA attention";
  for (const NsaLayers& entry : m.nsa.layers)
    text += fmt::format(", {} in layers {}", entry.branches ? word_of(*entry.branches) : "other options", entry.layers);
  if (!m.dense_layers.empty()) text += ", dense in layers " + m.dense_layers;
  text += m.rotation_text();
  std::set<int64_t> widths;
  for (int64_t i = 0; i < m.n_layers; ++i)
    if (m.has_index(i)) widths.insert(m.nsa_at(i).d_index);
  if (!widths.empty()) text += fmt::format(", an index of width {}", fmt::join(widths, " or "));
  return text;
}

// "1 step", "12,000 steps".
std::string grouped_count(int64_t n, std::string_view noun) { return grouped(n) + " " + plural(n, noun); }

std::string model_text(const Config& c, int64_t parameters) {
  const ModelConfig& m = c.model;
  return fmt::format("{}: {} of width {}, {} in {}, {}", grouped_count(parameters, "parameter"),
                     counted(m.n_layers, "layer"), m.dim, counted(m.n_heads, "head"), counted(m.n_kv_groups, "group"),
                     attention_text(m));
}

std::string steps_text(const Config& c, int world, int64_t first_step) {
  const TrainConfig& t = c.train;
  if (!t.stages.empty()) {
    int64_t tokens = 0;
    for (const TrainStage& stage : stages_of(t))
      tokens += std::max<int64_t>(0, stage.end - std::max(stage.begin, first_step)) *
                in_stage(c, stage).tokens_per_step(world);
    return fmt::format("{} in {}{}: {}, {}", grouped_count(t.steps - first_step, "step"),
                       counted(t.stages.size(), "stage"), world > 1 ? fmt::format(" on {} ranks", world) : "",
                       grouped_count(tokens, "token"), word_of(c.runtime.precision));
  }
  const int64_t tokens = c.tokens_per_step(world), groups = world / c.dist.context;
  return fmt::format("{} of {} ({} x {}{}{}): {}, {}", grouped_count(t.steps - first_step, "step"),
                     grouped_count(tokens, "token"), t.micro_batch_size, t.seq_len,
                     t.accumulate_grad_batches > 1 ? fmt::format(" x {} micro-steps", t.accumulate_grad_batches) : "",
                     c.dist.context > 1 ? fmt::format(" x {} of {} ranks", counted(groups, "group"), c.dist.context)
                     : world > 1        ? fmt::format(" x {} ranks", world)
                                        : "",
                     grouped_count(tokens * (t.steps - first_step), "token"), word_of(c.runtime.precision));
}

std::string flops_text(double flops) {
  const char* const prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
  size_t i = 0;
  for (; flops >= 1000 && i + 1 < std::size(prefixes); ++i) flops /= 1000;
  return fmt::format("{:.3g} {}FLOP", flops, prefixes[i]);
}

// The run's estimated duration as text. If the device's peak FLOP/s is unknown, the text refers to the progress lines.
// flops: FLOPs per step on one rank.
std::string time_text(const Config& c, Device device, int world, int64_t steps, double flops) {
  const std::string work = flops_text(flops * world) + " a step";
  const double peak = device.is_cuda() ? peak_bf16_flops(backend::info(device).name) : 0;
  if (peak <= 0 || c.runtime.precision != Precision::bf16) return fmt::format("known after the first step ({})", work);
  return fmt::format("about {} ({} at {:.0f}% of this card's peak)",
                     duration_text(flops / (kExpectedShare * peak) * static_cast<double>(steps)), work,
                     100 * kExpectedShare);
}

std::string folder_text(const Config& c) {
  const TrainConfig& t = c.train;
  std::string saves = t.save_last ? "a checkpoint at the end" : "no checkpoints";
  if (t.save_every > 0)
    saves =
        fmt::format("a checkpoint every {}, {}{}", t.save_every == 1 ? "step" : fmt::format("{} steps", t.save_every),
                    t.keep_last == 0 ? "all stay" : fmt::format("the newest {} stay", t.keep_last),
                    t.keep_last > 0 && t.keep_every > 0 ? fmt::format(" and every {}th", t.keep_every) : "");
  if (t.keep_best) saves += ", and at each lower validation loss, of which the newest stays";
  return fmt::format("{}; {}", c.log.out_dir, saves);
}

std::string ranks_text(const Config& c, const Comm& comm) {
  std::set<std::string> hosts;
  for (const Peer& p : comm.peers()) hosts.insert(p.host);
  const std::string replicas = c.dist.replicas > 1 ? fmt::format(", {} replicas", c.dist.replicas) : "";
  return fmt::format("{} ranks on {}{}, {}", comm.world(), counted(hosts.size(), "host"), replicas, comm.name());
}

// How many CPU cores this process may use if they are fewer than a rank's threads (step, loader, comm guard, NCCL),
// else 0.
int too_few_cores(Device device, const Comm& comm) {
  constexpr int kFewCores = 4;
  cpu_set_t cores;
  const bool known = sched_getaffinity(0, sizeof cores, &cores) == 0;
  return comm.world() > 1 && device.is_cuda() && known && CPU_COUNT(&cores) < kFewCores ? CPU_COUNT(&cores) : 0;
}

}  // namespace

std::vector<std::string> banner_lines(const Config& c, Device device, const Comm& comm, const RunSummary& run) {
  std::vector<std::string> lines;
  const auto add = [&](const char* word, const std::string& text) {
    lines.push_back(fmt::format("{:<9}{}", word, text));
  };
  add("model", model_text(c, run.parameters));
  add("train", steps_text(c, comm.world(), run.first_step));
  for (size_t i = 0; i < c.train.stages.size(); ++i) add("", stage_text(c, stages_of(c.train)[i]));
  add("data", run.data);
  if (!run.documents.empty()) add("docs", run.documents);
  add("device", fmt::format("{}: {}", device.str(), backend::info(device).name));
  if (comm.world() > 1) add("ranks", ranks_text(c, comm));
  add("memory", fmt::format("{:.0f} MiB planned", run.planned_mib));
  add("time", !run.time.empty() ? run.time
                                : time_text(c, device, comm.world(), c.train.steps - run.first_step, run.step_flops));
  add("start", run.start);
  add("folder", folder_text(c));
  if (!run.environment.empty()) add("environ", fmt::format("{}", fmt::join(run.environment, "; ")));
  if (const int cores = too_few_cores(device, comm); cores > 0)
    add("note", fmt::format("this process may use {} only, which is few beside a GPU: mpirun --bind-to none",
                            counted(cores, "CPU core")));
  if (!c.model.has_nsa() && !c.model.dense_layers.empty())
    add("note", fmt::format("model.dense_layers {} has no effect: model.attention is dense", c.model.dense_layers));
  if (c.train.master_dtype == MasterDType::split && has_weight_windows(c, comm.world()) &&
      c.runtime.offload != Offload::optimizer)
    add("note", "train.master_dtype split saves nothing with dist.zero 3, unless runtime.offload is optimizer");
  if (c.runtime.cuda_graph && !device.is_cuda()) add("note", "runtime.cuda_graph has no effect on the CPU");
  if (c.runtime.cuda_graph && device.is_cuda() && has_grad_windows(c, comm.world()))
    add("note", "runtime.cuda_graph has no effect with dist.zero 2 or 3, or with train.grads_dtype bf16");
  return lines;
}

std::vector<std::string> banner_details(const Config& c, const Comm& comm,
                                        const std::vector<std::string>& environment) {
  std::vector<std::string> lines;
  for (const Peer& p : comm.peers())
    lines.push_back(fmt::format("rank {}  host {}  local rank {}  pid {}  {} {}", p.rank, p.host, p.local_rank, p.pid,
                                p.device, p.pci));
  const Json resolved = config_to_json(c);
  for (const auto& [group, fields] : resolved.items())
    lines.push_back(fmt::format("{:<8}{}", group, dump_json(fields, -1)));
  for (const std::string& line : environment) lines.push_back("environment: " + line);
  return lines;
}

namespace {

// "370 J", "88.4 kJ", "1.2 GJ".
std::string joules_text(double joules) {
  const char* const prefixes[] = {"", "k", "M", "G", "T"};
  size_t i = 0;
  for (; joules >= 1000 && i + 1 < std::size(prefixes); ++i) joules /= 1000;
  return fmt::format("{:.3g} {}J", joules, prefixes[i]);
}

}  // namespace

std::string run_time_text(const RunTime& time, const Card& card, bool in_parts) {
  constexpr double kMs = 1e3;
  const StepTime& step = time.last_step;
  const std::string parts =
      !in_parts ? ""
                : fmt::format(
                      " (products {:.1f}, attention {:.1f}, kernels bound by memory {:.1f}, update {:.1f}, launches "
                      "{:.1f}, communication {:.1f})",
                      step.products * kMs, step.attention * kMs, step.memory * kMs, step.update * kMs,
                      step.launches * kMs, step.communication * kMs);
  return fmt::format("about {}, {} tokens/s, {:.1f} ms a step{}, {}; {}", duration_text(time.seconds),
                     grouped(std::llround(time.tokens_per_s())), step.total() * kMs, parts, joules_text(time.joules),
                     card.measured
                         ? fmt::format("by a model of measured steps on {}s", card.name)
                         : fmt::format("by a model with {}'s data sheet, on which no step was measured", card.name));
}

std::string estimate_error_text(double estimated, double measured) {
  const double off = 100 * (measured / estimated - 1);
  return fmt::format("estimated {} tokens/s, measured {}: {:.1f}% {}", grouped(std::llround(estimated)),
                     grouped(std::llround(measured)), std::abs(off), off < 0 ? "slower" : "faster");
}

std::string grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (size_t at = text.size(); at > 3 + (number < 0); at -= 3) text.insert(at - 3, ",");
  return text;
}

std::string duration_text(double seconds) {
  constexpr double kMost = 1e15;  // most seconds shown; fits into int64_t
  const auto s = static_cast<int64_t>(seconds > 0 ? std::min(seconds, kMost) : 0);
  constexpr int64_t kMinute = 60, kHour = 3600, kDay = 86400;
  if (s >= 3 * kDay) return fmt::format("{}d{:02}h", s / kDay, s % kDay / kHour);
  if (s >= kHour) return fmt::format("{}h{:02}m", s / kHour, s / kMinute % kMinute);
  return s >= kMinute ? fmt::format("{}m{:02}s", s / kMinute, s % kMinute) : fmt::format("{}s", s);
}

}  // namespace triad
