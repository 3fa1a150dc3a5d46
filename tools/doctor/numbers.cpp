// The phases causality, selection_parity and attention_parity, which run `triad grads` on the baseline phase's weights
// and compare logits, gradients and selection lists, partly with an f64 reference on the CPU; and the phase
// long_context.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>
#include <set>

#include "io/data/shards.h"
#include "io/file.h"
#include "io/safetensors.h"
#include "tools/doctor/doctor.h"

namespace triad {

namespace {

constexpr int64_t kRows = 4;  // sequences in a batch

Json baseline_config(const PhaseRun& v) {
  const std::string path = v.folder_of("baseline") + "/config.json";
  return parse_json(read_file(path), path);
}

std::vector<int32_t> some_tokens(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % 256);
  return tokens;
}

// Runs forward and backward with the baseline's weights on `rows` rows with T + 1 tokens each. Returns the results'
// path, FOLDER/name.safetensors.
std::string run_grads(PhaseRun& v, const std::string& name, const std::vector<int32_t>& tokens, int64_t rows,
                      const std::string& device, const std::string& dtype) {
  const std::string shard = v.file(name + ".bin"), out = v.file(name + ".safetensors");
  ShardWriter writer(shard, TokenWidth::u16);
  writer.append(tokens);
  writer.finish();
  const int64_t T = static_cast<int64_t>(tokens.size()) / rows - 1;
  v.run_triad({"grads", "--checkpoint", v.folder_of("baseline"), "--tokens", shard, "--batch", std::to_string(rows),
               "--seq", std::to_string(T), "--device", device, "--dtype", dtype, "--out", out});
  return out;
}

std::string own_dtype(const PhaseRun& v) { return v.on_gpu() ? "bf16" : "f32"; }

// Copies env.json from the phase environment into this phase's folder, because no trainer writes one here.
void keep_environment(const PhaseRun& v) {
  namespace fs = std::filesystem;
  fs::copy_file(v.folder_of("environment") + "/env.json", v.file("env.json"), fs::copy_options::overwrite_existing);
}

// Two result files for the same batch: one computed on this machine's device and dtype, one on the CPU in f64.
struct Pair {
  std::string here, exact;
};
Pair run_pair(PhaseRun& v, unsigned seed) {
  keep_environment(v);
  const int64_t T = baseline_config(v)["train"]["seq_len"];
  const std::vector<int32_t> tokens = some_tokens(T + 1, seed);
  return {.here = run_grads(v, "here", tokens, 1, v.device(), own_dtype(v)),
          .exact = run_grads(v, "exact", tokens, 1, "cpu", "f64")};
}

}  // namespace

// Changes one token, s(r), in each batch row r: logits before s(r) must keep their bits, and those at s(r) must change.
// A row has the same index in both batches, so that sums are computed in the same order.
void examine_causality(PhaseRun& v) {
  keep_environment(v);
  const Json config = baseline_config(v);
  const int64_t T = config["train"]["seq_len"], V = config["model"]["vocab_size"], block = config["nsa"]["l_sel"];
  const int64_t changed_at[kRows] = {1, T / 2 - 1, T / 2 + block / 2, T - 1};
  std::vector<int32_t> tokens = some_tokens(kRows * (T + 1), 2);
  const std::string before = run_grads(v, "before", tokens, kRows, v.device(), own_dtype(v));
  for (int64_t r = 0; r < kRows; ++r) tokens[static_cast<size_t>(r * (T + 1) + changed_at[r])] ^= 1;
  const std::string after = run_grads(v, "after", tokens, kRows, v.device(), own_dtype(v));

  const std::vector<double> a = numbers_of(before, "logits"), b = numbers_of(after, "logits");
  int64_t compared = 0, leaks = 0, unchanged = 0;
  std::string first;
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t t = 0; t <= changed_at[r]; ++t) {
      const auto row = (r * T + t) * V;
      const bool same = std::equal(a.begin() + row, a.begin() + row + V, b.begin() + row);
      unchanged += t == changed_at[r] && same;
      if (t == changed_at[r]) continue;
      ++compared;
      if (!same && leaks++ == 0)
        first = fmt::format("row {}: changing token {} changed the logits of token {}", r, changed_at[r], t);
    }
  v.expect(leaks == 0, fmt::format("{} rows of logits before a changed token have the same bits", compared),
           fmt::format("{} of {} rows of logits before a changed token differ; first {}", leaks, compared, first));
  v.expect(unchanged == 0, "the logits of the token itself differ",
           fmt::format("the logits of {} changed tokens did not change", unchanged));
}

// Checks selection lists against their definition (kernels/nsa/select.h): ascending, unique, causal; each contains the
// initial and the local blocks; each has min(n_sel, current block + 1) entries, then -1.
void examine_selection_parity(PhaseRun& v) {
  const Pair pair = run_pair(v, 3);
  const Json config = baseline_config(v), nsa = config["nsa"];
  const int64_t T = config["train"]["seq_len"], groups = config["model"]["n_kv_groups"], n = nsa["n_sel"],
                block = nsa["l_sel"], first_blocks = nsa["init_blocks"], local = nsa["local_blocks"];
  int64_t lists = 0, wrong = 0, slots = 0, shared = 0;
  std::string first;
  for (int64_t layer = 0; layer < kDoctorLayers; ++layer) {
    const std::string name = fmt::format("block_index/{}", layer);
    const std::vector<double> here = numbers_of(pair.here, name), exact = numbers_of(pair.exact, name);
    for (int64_t row = 0; row < T * groups; ++row, ++lists) {
      const int64_t t = row / groups, current = t / block, expected = std::min(n, current + 1);
      const auto list_of = [&](const std::vector<double>& all) {
        return std::vector<double>(all.begin() + row * n, all.begin() + (row + 1) * n);
      };
      const std::vector<double> list = list_of(here), other = list_of(exact);
      const std::set<double> chosen(list.begin(), list.begin() + expected);
      bool right = static_cast<int64_t>(chosen.size()) == expected && *chosen.begin() >= 0 &&
                   *chosen.rbegin() <= static_cast<double>(current) &&
                   std::is_sorted(list.begin(), list.begin() + expected) &&
                   std::all_of(list.begin() + expected, list.end(), [](double j) { return j == -1; });
      for (int64_t j = 0; j < std::min(first_blocks, current + 1); ++j)
        right = right && chosen.count(static_cast<double>(j));
      for (int64_t j = std::max<int64_t>(0, current - local + 1); j <= current; ++j)
        right = right && chosen.count(static_cast<double>(j));
      if (!right && wrong++ == 0) {
        std::string text;
        for (const double j : list) text += fmt::format(" {}", j);
        first = fmt::format("layer {}, token {}, group {}:{}", layer, t, row % groups, text);
      }
      slots += expected;
      for (int64_t i = 0; i < expected; ++i) shared += chosen.count(other[static_cast<size_t>(i)]);
    }
  }
  v.expect(wrong == 0, fmt::format("{} lists are ascending, causal and hold their forced blocks", lists),
           fmt::format("{} of {} lists break their definition; first {}", wrong, lists, first));
  const double share = static_cast<double>(shared) / static_cast<double>(slots), least = v.on_gpu() ? 0.95 : 0.999;
  v.expect(share >= least, fmt::format("{:.2f}% of their blocks are those of f64", 100 * share),
           fmt::format("only {:.2f}% of the blocks are those of f64; at least {:.1f}% are expected with rounding",
                       100 * share, 100 * least));
}

void examine_attention_parity(PhaseRun& v) {
  const Pair pair = run_pair(v, 4);
  const double most_logits = v.on_gpu() ? 3e-2 : 1e-5, most_gradients = v.on_gpu() ? 1e-1 : 1e-4;
  const double logits = relative_difference(numbers_of(pair.here, "logits"), numbers_of(pair.exact, "logits"));
  v.expect(logits <= most_logits, fmt::format("logits {:.1e} from f64 (limit {:.0e})", logits, most_logits),
           fmt::format("logits differ by {:.2e} from f64, more than rounding explains ({:.0e})", logits, most_logits));
  // Relative errors by tensor. A tiny gradient is mostly rounding error, so its error is taken relative to the mean
  // norm.
  const SafetensorsFile names(pair.exact);
  double all = 0, worst = 0;
  int64_t count = 0;
  std::string worst_name;
  const auto gradients = [&](auto&& each) {
    for (const TensorEntry& entry : names.entries())
      if (entry.name.starts_with("grad/")) each(entry.name);
  };
  const auto norm_of = [](const std::vector<double>& x) {
    double sum = 0;
    for (const double value : x) sum += value * value;
    return std::sqrt(sum);
  };
  gradients([&](const std::string& name) { all += norm_of(numbers_of(pair.exact, name)), ++count; });
  const double mean = all / static_cast<double>(count);
  TRIAD_CHECK(mean > 0, "{}: {} gradients, of mean norm {}", pair.exact, count, mean);
  gradients([&](const std::string& name) {
    const std::vector<double> exact = numbers_of(pair.exact, name);
    const double norm = norm_of(exact), difference = relative_difference(numbers_of(pair.here, name), exact);
    constexpr double kLeastNorm = 0.05;
    const double weighed = norm > 0 ? difference * norm / std::max(norm, kLeastNorm * mean) : difference / mean;
    if (weighed > worst) worst = weighed, worst_name = name.substr(5);
  });
  v.expect(worst <= most_gradients,
           fmt::format("{} gradients within {:.1e} of f64 (limit {:.0e}; the largest in {})", count, worst,
                       most_gradients, worst_name),
           fmt::format("the gradient of {} differs by {:.2e} from f64, more than rounding explains ({:.0e})",
                       worst_name, worst, most_gradients));
}

// Trains on the longest sequence whose planned memory is at most half the free memory, but at most 65,536 tokens (on a
// CPU 4,096).
void examine_long_context(PhaseRun& v) {
  const double free_mib = v.on_gpu() ? v.machine()["gpus"][0]["free_mib"] : v.machine()["memory_available_mib"];
  double planned_mib = 0;
  int64_t T = v.on_gpu() ? 65536 : 4096;
  const auto sets_for = [&] {
    return std::vector<std::string>{fmt::format("train.seq_len={}", T), "train.micro_batch_size=1",
                                    "train.accumulate_grad_batches=1", "train.steps=2", "data.kind=synthetic"};
  };
  for (;; T /= 2) {
    std::vector<std::string> args = {"plan", v.options().out + "/doctor.json", "--json", "--set",
                                     "runtime.device=" + v.device()};
    for (const std::string& each : sets_for()) args.insert(args.end(), {"--set", each});
    v.run_triad(args);
    const Json plan = parse_json(read_file(v.file("output.txt")), v.file("output.txt"));
    planned_mib = plan["peak_bytes"].get<double>() / (1 << 20);
    if (planned_mib <= free_mib / 2) break;
    if (T == 1024)
      v.skip(fmt::format("{:.0f} MiB are free: too little for 1,024 tokens", free_mib), "free some memory");
  }
  const TrainedRun run = v.train(sets_for());
  const double peak_mib = run.metrics["peak_mib"];
  constexpr double kNear = 0.01;
  v.expect(std::abs(peak_mib - planned_mib) <= kNear * planned_mib + 1,
           fmt::format("T = {}: peak {:.0f} MiB, {:.0f} planned", T, peak_mib, planned_mib),
           fmt::format("T = {}: peak {:.0f} MiB, but {:.0f} were planned (metrics.json, `triad plan`)", T, peak_mib,
                       planned_mib));
  v.expect(std::filesystem::exists(run.file("mem_step1.json")), "", "mem_step1.json is missing");
  const auto used = run.gpu_fields.find("gpu_used_mib");
  if (used == run.gpu_fields.end()) return;
  // The driver's number includes the run's tensors, the CUDA context with its kernels, and other programs' memory.
  const Json& gpu = v.machine()["gpus"][0];
  const double others = gpu["memory_mib"].get<double>() - free_mib, most = planned_mib + others + 1024;
  v.expect(used->second <= most, fmt::format("the driver counts {:.0f} MiB", used->second),
           fmt::format("the driver counts {:.0f} MiB in use, {:.0f} is the most expected", used->second, most));
}

}  // namespace triad
