#include "tools/report/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <numbers>
#include <regex>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "engine/process/text.h"
#include "engine/units.h"
#include "io/data/position_losses.h"
#include "io/file.h"
#include "tools/csv_table.h"
#include "tools/report/evaluations.h"
#include "tools/report/facts.h"
#include "tools/report/index_tables.h"
#include "tools/report/series.h"
#include "train/checkpoint/run_files.h"
#include "train/config/load_config.h"
#include "train/monitor/document_lengths.h"
#include "train/monitor/selection_sample.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

constexpr int kKnownSampleSchema = 3, kKnownLengthsSchema = 1;

// Memory in MiB by category, from the run's memory snapshots, as [{label, step, categories}].
Json memory_of(const std::string& folder) {
  static const std::regex kName("mem_(boot|loader|oom|step(\\d+))\\.json");
  std::vector<std::pair<double, Json>> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    const std::optional<int64_t> step = parse_number<int64_t>(match[2].str());
    if (match[2].matched && !step) continue;  // skipped: the number in the file's name is too large for a step
    const Json file = parse_json(read_file(entry.path().string()), entry.path().string());
    if (!file.contains("triad") || !file["triad"].contains("category_bytes"))
      continue;  // skipped: the snapshot has no categories
    Json categories = Json::object();
    for (const auto& [category, bytes] : file["triad"]["category_bytes"].items())
      if (bytes.is_number()) categories[category] = bytes.get<double>() / kMiB;
    // How snapshots without a step are ordered: boot and loader precede the first step, oom (out of memory) follows the
    // last.
    const std::string when = match[1].str();
    const double order = when == "boot"     ? -2
                         : when == "loader" ? -1
                         : when == "oom"    ? 1e18
                                            : static_cast<double>(*step);
    found.push_back({order, {{"label", when}, {"step", std::max(0.0, order)}, {"categories", categories}}});
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  Json out = Json::array();
  for (const auto& [order, snapshot] : found) out.push_back(snapshot);
  return out;
}

Json json_or_null(const std::string& path) {
  if (!fs::exists(path)) return {};
  Json file = parse_json(read_file(path), path);
  TRIAD_CHECK(file.is_object(), "{} is no JSON object: {}", path, brief(file));
  return file;
}

Json fallbacks_of(const CsvTable& table) {
  std::map<std::string, double> counts;
  for (size_t i = 0; i < table.size(); ++i)
    counts[fmt::format("{}, {}: {}", table.text(i, "branch"), table.text(i, "kernel"), table.text(i, "reason"))] +=
        table.number(i, "count");
  Json out = Json::array();
  for (const auto& [what, count] : counts) out.push_back({{"what", what}, {"count", count}});
  return out;
}

// Gradient norms by layer and step, from the heartbeats or from grad_ledger.csv; null if the run recorded them in
// neither.
Json gradient_norms_of(const FirstRank& first, const CsvTable& ledger) {
  if (!first.gradient_norms.empty()) return heat_of(first.gradient_norms);
  std::map<std::pair<double, double>, double> squares;
  static const std::regex kLayer("blocks\\.(\\d{1,6})\\..*");
  for (size_t i = 0; i < ledger.size(); ++i) {
    std::smatch match;
    const double norm = ledger.number(i, "norm");
    const double step = ledger.number(i, "step");
    if (std::isfinite(step) && std::isfinite(norm) && std::regex_match(ledger.text(i, "parameter"), match, kLayer))
      squares[{step, std::stod(match[1].str())}] += norm * norm;
  }
  std::vector<LayerValue> all;
  for (const auto& [place, square] : squares) all.push_back({place.first, place.second, std::sqrt(square)});
  return all.empty() ? Json() : heat_of(all);
}

// Running time in seconds after each step: from the heartbeats, or else the step times summed from training.csv.
Points clock_of(const FirstRank& first, const CsvTable& training) {
  if (!first.clock.empty()) return first.clock;
  Points clock;
  double seconds = 0, before = 0;
  for (size_t i = 0; training.has("step_ms") && i < training.size(); ++i) {
    const double step = training.number(i, "step"), took = (step - before) * training.number(i, "step_ms") / 1e3;
    if (!std::isfinite(took)) continue;  // skipped: a damaged row; the next row also covers its steps
    seconds += took;
    before = step;
    clock.emplace_back(step, seconds);
  }
  return clock;
}

bool all_integers(const Json& list) {
  return list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& x) { return x.is_number_integer(); });
}

// Reads a selection list sample (train/monitor/selection_sample.h) and checks everything that the page's script uses.
Json sample_of(const std::string& path) {
  Json sample = json_or_null(path);
  if (sample.is_null()) return sample;
  const auto broken = [&](const char* what) { fail("{}: {}: no sample of selection lists", path, what); };
  for (const char* key : {"schema", "step", "seq_len"})
    if (!sample.contains(key) || !sample[key].is_number_integer()) broken(key);
  if (sample["schema"].get<int64_t>() > kKnownSampleSchema)
    fail("{}: its schema is {}, and this program knows those up to {}", path, sample["schema"].get<int64_t>(),
         kKnownSampleSchema);
  if (!sample.contains("queries") || !all_integers(sample["queries"]) || sample["queries"].empty()) broken("queries");
  const int64_t T = sample["seq_len"].get<int64_t>();
  if (T < 1) broken("seq_len");
  if (sample["schema"].get<int64_t>() == 1) sample["bounds"] = {0, T};  // the row is one sequence
  const Json& bounds = sample["bounds"];
  if (!all_integers(bounds) || bounds.size() < 2 || bounds.front() != 0 || bounds.back() != T ||
      std::adjacent_find(bounds.begin(), bounds.end(), std::greater_equal<>()) != bounds.end())
    broken("bounds");
  for (const Json& query : sample["queries"])
    if (query < 0 || query >= T) broken("queries");
  if (!sample.contains("lists") || !sample["lists"].is_array() || sample["lists"].empty()) broken("lists");
  if (sample.contains("layers") &&
      (!all_integers(sample["layers"]) || sample["layers"].size() != sample["lists"].size()))
    broken("layers");
  for (const char* key : {"l_sel", "init_blocks", "local_blocks"}) {
    Json& values = sample[key];
    if (sample["schema"].get<int64_t>() < 3) {  // one number for all layers
      const Json all = values;
      values = Json::array();
      for (size_t i = 0; i < sample["lists"].size(); ++i) values.push_back(all);
    }
    if (!all_integers(values) || values.size() != sample["lists"].size()) broken(key);
  }
  for (const Json& l_sel : sample["l_sel"])
    if (l_sel < 1) broken("l_sel");
  for (const Json& layer : sample["lists"]) {
    if (!layer.is_array() || layer.empty() || layer.size() != sample["lists"][0].size()) broken("lists");
    for (const Json& group : layer)
      if (!group.is_array() || group.size() != sample["queries"].size() ||
          !std::all_of(group.begin(), group.end(), all_integers))
        broken("lists");
  }
  return sample;
}

// Reads document_lengths.json (train/monitor/document_lengths.h) and checks everything that the page's script uses.
Json lengths_of(const std::string& path) {
  const Json lengths = json_or_null(path);
  if (lengths.is_null()) return lengths;
  const auto broken = [&](const char* what) { fail("{}: {}: no lengths of documents", path, what); };
  for (const char* key : {"schema", "documents", "tokens", "longest"})
    if (!lengths.contains(key) || !lengths[key].is_number_integer()) broken(key);
  if (lengths["schema"].get<int64_t>() > kKnownLengthsSchema)
    fail("{}: its schema is {}, and this program knows those up to {}", path, lengths["schema"].get<int64_t>(),
         kKnownLengthsSchema);
  for (const char* key : {"lengths", "row_parts"}) {
    const Json ranges = lengths.value(key, Json());
    if (ranges.is_null() && key == std::string("row_parts")) continue;  // the rows do not depend on documents
    if (!ranges.is_array()) broken(key);
    for (const Json& range : ranges)
      for (const char* number : {"from", "to", "documents", "tokens"})
        if (!range.is_object() || !range.contains(number) || !range[number].is_number_integer() ||
            range[number].get<int64_t>() < 0)
          broken(key);
  }
  return lengths;
}

// Tokens per step on all ranks; null if the run's files do not contain it, or it differs between stages.
Json tokens_per_step(const ReportRun& run) {
  double tokens = 1;
  if (!run.config.contains("train") || has_stages(run.config)) return {};
  for (const char* key : {"seq_len", "micro_batch_size", "accumulate_grad_batches"})
    tokens *= number_in(run.config["train"], key);
  const double world = run.environment.is_null() ? NAN : number_in(run.environment, "world");
  const double ranks_of_sequence = run.config.contains("dist") ? number_in(run.config["dist"], "context") : NAN;
  const auto or_one = [](double x) { return std::isfinite(x) ? x : 1; };
  return number_or_null(tokens * or_one(world) / or_one(ranks_of_sequence));
}

// The tables in a run's CSV files.
struct RunTables {
  CsvTable training, validation, gates, selection, fallbacks, ledger;
  explicit RunTables(const fs::path& folder)
      : training(folder / "training.csv", {"step", "loss"}),
        validation(folder / "val.csv", {"step", "val_loss"}),
        gates(folder / "gates.csv",
              {"step", "layer", "entropy_mean", "max_mean", "collapse_frac", "cmp", "sel", "win"}),
        selection(folder / "k_stats.csv", {"step", "layer", "k_mean", "pct_at_max"}),
        fallbacks(folder / "fallback_counters.csv", {"step", "branch", "kernel", "reason", "count"}),
        ledger(folder / "grad_ledger.csv", {"step", "parameter", "norm"}) {}
};

void add_lines_and_maps(Json& d, const RunTables& tables) {
  for (const char* column : {"loss", "lr", "tokens_per_s", "grad_norm", "step_ms", "mfu"})
    d["training"][column] = line_of(tables.training, column);
  d["validation"] = line_of(tables.validation, "val_loss");
  for (const char* column : {"entropy_mean", "max_mean", "collapse_frac", "cmp", "sel", "win"})
    d["gates"][column] = tables.gates.size() == 0 ? Json() : heat_of(tables.gates, column);
  d["selection"] = Json::object();
  for (const std::string column : {"k_mean", "k_max", "pct_at_max"})
    if (tables.selection.size() > 0 && tables.selection.has(column))
      d["selection"][column] = heat_of(tables.selection, column);
  d["fallbacks"] = fallbacks_of(tables.fallbacks);
}

}  // namespace

bool has_stages(const Json& config) {
  const Json train = config.is_object() ? config.value("train", Json()) : Json();
  return train.is_object() && train.contains("stages") && !train["stages"].is_null();
}

ReportRun read_run(const std::string& folder) {
  TRIAD_CHECK(fs::exists(folder), "{}: there is no such folder", folder);
  TRIAD_CHECK(fs::is_directory(folder), "{} is not a folder: a run's is needed", folder);
  const auto file = [&](const std::string& name) { return (fs::path(folder) / name).string(); };
  TRIAD_CHECK(fs::exists(file("config.json")), "{} holds no run: it has no config.json", folder);
  ReportRun run{.folder = folder,
                .status = {},
                .config = json_or_null(file("config.json")),
                .environment = json_or_null(file("env.json")),
                .losses = {},
                .losses_rounded = false,
                .validation = {},
                .clock = {},
                .bits_per_nat = NAN,
                .needle = {},
                .data = {}};
  for (const auto& [group, keys] : run.config.items())
    TRIAD_CHECK(keys.is_object(), "{}: its {} is {}: a group of keys is needed", file("config.json"), shortened(group),
                brief(keys));
  if (run.environment.contains("environment") && run.environment["environment"].is_object())
    // Secrets that an env.json may hold are hidden.
    for (auto& [name, value] : run.environment["environment"].items())
      if (value.is_string()) value = shown_value(name, value.get<std::string>());
  const RunTables tables(folder);
  Json& d = run.data;
  d["folder"] = folder;
  d["tokens_per_step"] = tokens_per_step(run);
  d["sample"] = sample_of(file(kSelectionSample));
  d["lengths"] = lengths_of(file(kDocumentLengths));
  d["positions"] = thinned(position_losses_of(file(kPositionsCsv)));
  add_lines_and_maps(d, tables);
  d["index"] = index_tables(folder);
  d["memory"] = memory_of(folder);
  d["metrics"] = json_or_null(file("metrics.json"));
  FirstRank first = add_ranks(d, folder);
  run.needle = needle_svgs(folder, run.config);
  if (fs::exists(file(".anomaly_type"))) d["stopped_by"] = read_file(file(".anomaly_type"));
  d["gradient_norms"] = gradient_norms_of(first, tables.ledger);
  run.clock = clock_of(first, tables.training);
  d["clock"] = thinned(run.clock);
  run.losses_rounded = first.steps["loss"].empty();
  run.losses = run.losses_rounded ? points_of(tables.training, "loss") : first.steps["loss"];
  run.validation = points_of(tables.validation, "val_loss");
  // training.csv has a row every log.every steps, and the heartbeats most steps.
  for (const auto& [key, points] : first.steps)
    if (!points.empty() && points.size() >= tables.training.size()) d["training"][key] = thinned(points);
  d["bits_per_byte"] = thinned(first.bits_per_byte);
  run.bits_per_nat = tokens_are_bytes(run.config) ? 1 / std::numbers::ln2 : NAN;
  if (std::isfinite(first.bits_per_nat)) run.bits_per_nat = first.bits_per_nat;
  d["bits_per_nat"] = has_stages(run.config) ? Json() : number_or_null(run.bits_per_nat);
  d["samples"] = samples_of(file(kSamplesFile));
  d["evaluations"] = evaluations_of(file(kEvaluationsFile));
  run.status = status_of(d, run.config, run.environment, folder);
  return run;
}

}  // namespace triad
