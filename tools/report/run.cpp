#include "tools/report/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "io/data/needle_grid.h"
#include "io/file.h"
#include "io/tokenizer/unicode.h"
#include "tools/csv_table.h"
#include "tools/report/facts.h"
#include "tools/report/series.h"
#include "train/load_config.h"
#include "train/monitor/selection_sample.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

constexpr double kMiB = 1024.0 * 1024.0;
constexpr int kKnownHeartbeatSchema = 1, kKnownSampleSchema = 1;

// The numbers of a rank's steps that are drawn, as a heartbeat names them.
constexpr const char* kHeartbeatLines[] = {"step_ms",         "compute_ms",    "update_ms",         "fetch_ms",
                                           "comm_wait_ms",    "tokens_per_s",  "host_mib",          "gpu_used_mib",
                                           "gpu_util_pct",    "power_w",       "gpu_mem_alloc_mib", "sel_overlap",
                                           "sel_forced_frac", "gate_dead_frac"};

double number_in(const Json& line, const char* key) {
  const auto it = line.find(key);
  return it != line.end() && it->is_number() ? it->get<double>() : NAN;
}

// What the first rank's heartbeats alone are read for.
struct FirstRank {
  Points losses,
      clock;  // by step: the loss; the seconds that the run had taken, the time between a stop and a resume left out
  std::vector<LayerValue> gradient_norms;
};

// A run that was resumed tells some steps again: the last time counts.
void forget_from(Points& points, int64_t step) {
  while (!points.empty() && points.back().first >= static_cast<double>(step)) points.pop_back();
}

void add_step(FirstRank& first, int64_t step, const Json& line, double seconds) {
  const auto at = static_cast<double>(step);
  forget_from(first.losses, step);
  forget_from(first.clock, step);
  first.losses.emplace_back(at, number_in(line, "loss"));
  if (seconds > 0) first.clock.emplace_back(at, seconds);
  std::vector<LayerValue>& norms = first.gradient_norms;
  while (!norms.empty() && norms.back().step >= at) norms.pop_back();
  if (const auto it = line.find("layer_grad_norms"); it != line.end() && it->is_array())
    for (size_t i = 0; i < it->size(); ++i)
      if ((*it)[i].is_number()) norms.push_back({at, static_cast<double>(i), (*it)[i].get<double>()});
}

Json json_or_nothing(const std::string& text) {
  try {
    return parse_json(text, "a line");
  } catch (const Error&) { return {}; }
}

// What is told of a rank, and what happened to it.
Json rank_of(const std::string& path, int64_t rank, FirstRank* first, Json& events) {
  std::map<std::string, Points> lines;
  Json last;
  std::string state;                 // the newest message that tells of one
  double seconds = 0, before = NAN;  // that the run has taken; the time of the line before
  const std::vector<std::string> text = whole_lines(path);
  for (size_t i = 0; i < text.size(); ++i) {
    const Json line = json_or_nothing(text[i]);
    const bool whole = line.is_object() && line.contains("step") && line["step"].is_number_integer() &&
                       line.contains("msg") && line["msg"].is_string();
    if (!whole) {
      fmt::print(stderr, "triad: {} line {} is left out: \"{}\" is no heartbeat: an object with step and msg is one\n",
                 printable(path), i + 1, shortened(text[i]));
      continue;
    }
    if (const double schema = number_in(line, "schema"); schema > kKnownHeartbeatSchema)
      fail("{} line {}: its schema is {}, and this program knows those up to {}", path, i + 1, schema,
           kKnownHeartbeatSchema);
    const auto step = line["step"].get<int64_t>();
    const auto msg = line["msg"].get<std::string>();
    last = line;
    const double now = number_in(line, "ts");
    if (msg != "boot" && now > before) seconds += now - before;
    before = now;
    if (msg != "stackdump" && msg != "progress" && msg != "checkpoint") state = msg;  // none takes a verdict back
    if (msg == "step_end") {
      for (auto& [key, points] : lines) forget_from(points, step);
      for (const char* key : kHeartbeatLines)
        if (const double value = number_in(line, key); std::isfinite(value))
          lines[key].emplace_back(static_cast<double>(step), value);
      if (first != nullptr) add_step(*first, step, line, seconds);
    } else if (msg != "progress") {
      Json event = {{"rank", rank}, {"step", step}, {"kind", msg}, {"time", line.value("iso", std::string())}};
      std::string about;
      for (const auto& [key, value] : line.items())
        if (key == "type" || key == "text" || key == "at" || key == "why" || key == "folder" || key == "file" ||
            key == "step_s" || key == "still_s")
          about += fmt::format("{}{}: {}", about.empty() ? "" : "; ", key,
                               value.is_string() ? value.get<std::string>() : brief(value));
      event["text"] = about;
      events.push_back(event);
    }
  }
  Json out = {{"rank", rank}, {"last", last}, {"state", state}, {"means", Json::object()}, {"lines", Json::object()}};
  for (const auto& [key, points] : lines) {
    double sum = 0;
    for (const auto& point : points) sum += point.second;
    out["means"][key] = sum / static_cast<double>(points.size());
    out["lines"][key] = thinned(points);
  }
  return out;
}

// Memory by category, MiB, from the snapshots that a run has left: [{label, step, categories}].
Json memory_of(const std::string& folder) {
  static const std::regex kName("mem_(boot|loader|oom|step(\\d+))\\.json");
  std::vector<std::pair<double, Json>> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    std::smatch match;
    if (!std::regex_match(name, match, kName)) continue;
    const std::optional<int64_t> step = parse_number<int64_t>(match[2].str());
    if (match[2].matched && !step) continue;  // no step of a run
    const Json file = parse_json(read_file(entry.path().string()), entry.path().string());
    if (!file.contains("triad") || !file["triad"].contains("category_bytes")) continue;  // memory_stats alone
    Json categories = Json::object();
    for (const auto& [category, bytes] : file["triad"]["category_bytes"].items())
      if (bytes.is_number()) categories[category] = bytes.get<double>() / kMiB;
    // Of the snapshots without a step, boot and the loader's come before the first, and running out after the last.
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

// What `triad eval --needle` has left; no lengths: nothing.
NeedleGrid needle_grid_of(const std::string& path) {
  const CsvTable table(path, {"length", "depth", "samples", "right"});
  NeedleGrid grid;
  std::set<int64_t> lengths;
  std::set<double> depths;
  for (size_t i = 0; i < table.size(); ++i) {
    lengths.insert(static_cast<int64_t>(table.number(i, "length")));
    depths.insert(table.number(i, "depth"));
    grid.samples = static_cast<int64_t>(table.number(i, "samples"));
  }
  grid.lengths.assign(lengths.begin(), lengths.end());
  grid.depths.assign(depths.begin(), depths.end());
  grid.right.assign(lengths.size() * depths.size(), -1);
  const auto place = [](const auto& sorted, auto value) {
    return static_cast<size_t>(std::lower_bound(sorted.begin(), sorted.end(), value) - sorted.begin());
  };
  for (size_t i = 0; i < table.size(); ++i) {
    const double right = table.number(i, "right");
    TRIAD_CHECK(right >= 0 && right <= table.number(i, "samples") && table.number(i, "samples") == grid.samples,
                "{} line {}: {} of {} samples", path, i + 2, right, table.number(i, "samples"));
    const size_t length = place(grid.lengths, static_cast<int64_t>(table.number(i, "length"))),
                 depth = place(grid.depths, table.number(i, "depth"));
    grid.right[depth * grid.lengths.size() + length] = static_cast<int64_t>(right);
  }
  const auto missing = std::find(grid.right.begin(), grid.right.end(), -1) - grid.right.begin();
  TRIAD_CHECK(missing == static_cast<std::ptrdiff_t>(grid.right.size()), "{}: no row for length {} at depth {}", path,
              grid.lengths[missing % grid.lengths.size()], grid.depths[missing / grid.lengths.size()]);
  return grid;
}

// By layer; none where log.diagnostics asked for neither.
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

// [[step, seconds], ..]: as heartbeats have it, else as training.csv's steps add up.
Points clock_of(const FirstRank& first, const CsvTable& training) {
  if (!first.clock.empty()) return first.clock;
  Points clock;
  double seconds = 0, before = 0;
  for (size_t i = 0; training.has("step_ms") && i < training.size(); ++i) {
    const double step = training.number(i, "step"), took = (step - before) * training.number(i, "step_ms") / 1e3;
    if (!std::isfinite(took)) continue;  // a damaged row: the next one's steps cover it
    seconds += took;
    before = step;
    clock.emplace_back(step, seconds);
  }
  return clock;
}

bool all_integers(const Json& list) {
  return list.is_array() && std::all_of(list.begin(), list.end(), [](const Json& x) { return x.is_number_integer(); });
}

// What an evaluation has left of the selection (train/monitor/selection_sample.h), as the page's script relies on it.
Json sample_of(const std::string& path) {
  const Json sample = json_or_null(path);
  if (sample.is_null()) return sample;
  const auto broken = [&](const char* what) { fail("{}: {}: no sample of selection lists", path, what); };
  for (const char* key : {"schema", "step", "seq_len", "l_sel", "init_blocks", "local_blocks"})
    if (!sample.contains(key) || !sample[key].is_number_integer()) broken(key);
  if (sample["schema"].get<int64_t>() > kKnownSampleSchema)
    fail("{}: its schema is {}, and this program knows those up to {}", path, sample["schema"].get<int64_t>(),
         kKnownSampleSchema);
  if (!sample.contains("queries") || !all_integers(sample["queries"]) || sample["queries"].empty()) broken("queries");
  if (sample["l_sel"].get<int64_t>() < 1 || sample["seq_len"].get<int64_t>() < 1) broken("l_sel, seq_len");
  if (!sample.contains("lists") || !sample["lists"].is_array() || sample["lists"].empty()) broken("lists");
  for (const Json& layer : sample["lists"]) {
    if (!layer.is_array() || layer.empty() || layer.size() != sample["lists"][0].size()) broken("lists");
    for (const Json& group : layer)
      if (!group.is_array() || group.size() != sample["queries"].size() ||
          !std::all_of(group.begin(), group.end(), all_integers))
        broken("lists");
  }
  return sample;
}

// Positions that a step counts over all ranks; null where the files do not tell.
Json tokens_per_step(const ReportRun& run) {
  double tokens = 1;
  if (!run.config.contains("train")) return {};
  for (const char* key : {"seq_len", "micro_batch_size", "accumulate_grad_batches"})
    tokens *= number_in(run.config["train"], key);
  const double world = run.environment.is_null() ? NAN : number_in(run.environment, "world");
  return number_or_null(tokens * (std::isfinite(world) ? world : 1));
}

}  // namespace

ReportRun read_run(const std::string& folder) {
  TRIAD_CHECK(fs::exists(folder), "{}: there is no such folder", folder);
  TRIAD_CHECK(fs::is_directory(folder), "{} is not a folder: a run's is needed", folder);
  const auto file = [&](const std::string& name) { return (fs::path(folder) / name).string(); };
  TRIAD_CHECK(fs::exists(file("config.json")), "{} holds no run: it has no config.json", folder);
  ReportRun run{.folder = folder,
                .config = json_or_null(file("config.json")),
                .environment = json_or_null(file("env.json")),
                .losses = {},
                .losses_rounded = false,
                .validation = {},
                .clock = {},
                .needle = {},
                .data = {}};
  if (run.environment.contains("environment") && run.environment["environment"].is_object())
    for (auto& [name, value] : run.environment["environment"].items())  // of a run whose env.json shows secrets
      if (value.is_string()) value = shown_value(name, value.get<std::string>());
  const CsvTable training(file("training.csv"), {"step", "loss"}), validation(file("val.csv"), {"step", "val_loss"}),
      gates(file("gates.csv"), {"step", "layer", "entropy_mean", "max_mean", "collapse_frac", "cmp", "sel", "win"}),
      selection(file("k_stats.csv"), {"step", "layer", "k_mean", "pct_at_max"}),
      fallbacks(file("fallback_counters.csv"), {"step", "branch", "kernel", "reason", "count"});
  const CsvTable ledger(file("grad_ledger.csv"), {"step", "parameter", "norm"});
  Json& d = run.data;
  d["folder"] = folder;
  d["tokens_per_step"] = tokens_per_step(run);
  d["tokens_are_bytes"] = tokens_are_bytes(run.config);
  d["sample"] = sample_of(file(kSelectionSample));
  for (const char* column : {"loss", "lr", "tokens_per_s", "grad_norm", "step_ms", "mfu"})
    d["training"][column] = line_of(training, column);
  d["validation"] = line_of(validation, "val_loss");
  for (const char* column : {"entropy_mean", "max_mean", "collapse_frac", "cmp", "sel", "win"})
    d["gates"][column] = gates.size() == 0 ? Json() : heat_of(gates, column);
  for (const std::string column : {"k_mean", "k_max", "pct_at_max"})
    if (selection.size() > 0 && selection.has(column)) d["selection"][column] = heat_of(selection, column);
  if (!d.contains("selection")) d["selection"] = Json::object();
  d["fallbacks"] = fallbacks_of(fallbacks);
  d["memory"] = memory_of(folder);
  d["metrics"] = json_or_null(file("metrics.json"));
  d["events"] = d["ranks"] = Json::array();

  static const std::regex kHeartbeats("heartbeat_rank(\\d+)\\.jsonl");
  std::map<int64_t, std::string> ranks;
  Json dumps = Json::array();
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    std::smatch match;
    if (std::regex_match(name, match, kHeartbeats))
      if (const auto rank = parse_number<int64_t>(match[1].str())) ranks[*rank] = entry.path().string();
    if (name.starts_with("stackdump_rank")) dumps.push_back(name);
  }
  FirstRank first;
  for (const auto& [rank, path] : ranks)
    d["ranks"].push_back(rank_of(path, rank, rank == 0 ? &first : nullptr, d["events"]));
  std::stable_sort(d["events"].begin(), d["events"].end(),
                   [](const Json& a, const Json& b) { return a["step"] < b["step"]; });
  std::sort(dumps.begin(), dumps.end());
  d["stackdumps"] = dumps;
  if (const NeedleGrid grid = needle_grid_of(file(kNeedleCsv)); !grid.lengths.empty()) {
    const Json attention = run.config.contains("model") ? run.config["model"].value("attention", Json("nsa")) : Json();
    run.needle =
        grid.svg("Needles recalled, attention: " + (attention.is_string() ? attention.get<std::string>() : "?"));
  }
  if (fs::exists(file(".anomaly_type"))) d["stopped_by"] = read_file(file(".anomaly_type"));
  d["gradient_norms"] = gradient_norms_of(first, ledger);
  run.clock = clock_of(first, training);
  d["clock"] = thinned(run.clock);
  run.losses_rounded = first.losses.empty();
  run.losses = run.losses_rounded ? points_of(training, "loss") : first.losses;
  run.validation = points_of(validation, "val_loss");
  if (!run.losses_rounded && run.losses.size() >= training.size()) d["training"]["loss"] = thinned(run.losses);
  return run;
}

}  // namespace triad
