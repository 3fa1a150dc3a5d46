#include "tools/report_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

#include "engine/check.h"
#include "engine/parse.h"
#include "io/file.h"
#include "io/needle_grid.h"
#include "io/unicode.h"
#include "tools/csv_table.h"
#include "train/load_config.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

constexpr double kMiB = 1024.0 * 1024.0;
constexpr size_t kMostPoints = 1500, kMostColumns = 240;  // of a line; of a heat map
constexpr int kKnownHeartbeatSchema = 1;

Json number_or_null(double x) { return std::isfinite(x) ? Json(x) : Json(); }

using Points = std::vector<std::pair<double, double>>;

// [[x, y], ...] of at most kMostPoints: of each stretch the lowest and the highest, so that no spike gets lost.
Json thinned(const Points& points) {
  Json out = Json::array();
  const size_t stretches = kMostPoints / 2, n = points.size();
  const auto put = [&](size_t i) { out.push_back({points[i].first, number_or_null(points[i].second)}); };
  if (n <= kMostPoints) {
    for (size_t i = 0; i < n; ++i) put(i);
    return out;
  }
  for (size_t s = 0; s < stretches; ++s) {
    const size_t begin = s * n / stretches, end = (s + 1) * n / stretches;
    size_t low = begin, high = begin;
    for (size_t i = begin; i < end; ++i) {
      if (!(points[i].second >= points[low].second)) low = i;
      if (!(points[i].second <= points[high].second)) high = i;
    }
    put(std::min(low, high));
    if (low != high) put(std::max(low, high));
  }
  return out;
}

Json line_of(const CsvTable& table, const char* column) {
  Points points;
  if (table.has(column))
    for (size_t i = 0; i < table.size(); ++i)
      if (const double step = table.number(i, "step"); std::isfinite(step))
        points.emplace_back(step, table.number(i, column));
  return thinned(points);
}

// {steps, layers, values}: values[layer][column], each the mean over the steps that share a column.
Json heat_of(const CsvTable& table, const std::string& column) {
  std::set<double> steps, layers;
  const auto is_placed = [&](size_t i) {
    return std::isfinite(table.number(i, "step")) && std::isfinite(table.number(i, "layer"));
  };
  for (size_t i = 0; i < table.size(); ++i)
    if (is_placed(i)) steps.insert(table.number(i, "step")), layers.insert(table.number(i, "layer"));
  const std::vector<double> step_list(steps.begin(), steps.end()), layer_list(layers.begin(), layers.end());
  const size_t columns = std::min(kMostColumns, step_list.size());
  const auto index = [](const std::vector<double>& list, double x) {
    return static_cast<size_t>(std::lower_bound(list.begin(), list.end(), x) - list.begin());
  };
  std::vector<std::vector<double>> sums(layer_list.size(), std::vector<double>(columns, 0)), counts = sums;
  for (size_t i = 0; i < table.size(); ++i) {
    const double value = table.number(i, column);
    if (!is_placed(i) || !std::isfinite(value)) continue;
    const size_t layer = index(layer_list, table.number(i, "layer")),
                 at = index(step_list, table.number(i, "step")) * columns / step_list.size();
    sums[layer][at] += value;
    ++counts[layer][at];
  }
  Json values = Json::array(), firsts = Json::array();
  for (size_t layer = 0; layer < layer_list.size(); ++layer) {
    Json row = Json::array();
    for (size_t c = 0; c < columns; ++c)
      row.push_back(counts[layer][c] == 0 ? Json() : Json(sums[layer][c] / counts[layer][c]));
    values.push_back(row);
  }
  for (size_t c = 0; c < columns; ++c)
    firsts.push_back(step_list[(c * step_list.size() + columns - 1) / columns]);  // the first that falls into it
  return {{"steps", firsts},
          {"last", step_list.empty() ? Json() : Json(step_list.back())},
          {"layers", layer_list},
          {"values", values}};
}

// The numbers of a rank's steps that are drawn, as a heartbeat names them.
constexpr const char* kHeartbeatLines[] = {"step_ms",         "compute_ms",    "update_ms",         "fetch_ms",
                                           "comm_wait_ms",    "tokens_per_s",  "host_mib",          "gpu_used_mib",
                                           "gpu_util_pct",    "power_w",       "gpu_mem_alloc_mib", "sel_overlap",
                                           "sel_forced_frac", "gate_dead_frac"};

double number_in(const Json& line, const char* key) {
  const auto it = line.find(key);
  return it != line.end() && it->is_number() ? it->get<double>() : NAN;
}

Json json_or_nothing(const std::string& text) {
  try {
    return parse_json(text, "a line");
  } catch (const Error&) { return {}; }
}

// What is told of a rank, and what happened to it.
Json rank_of(const std::string& path, int64_t rank, std::vector<std::pair<int64_t, double>>* losses, Json& events) {
  std::map<std::string, Points> lines;
  Json last;
  std::string state;  // the newest message that tells of one
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
    if (msg != "stackdump" && msg != "progress" && msg != "checkpoint") state = msg;  // none takes a verdict back
    if (msg == "step_end") {
      // A run that was resumed tells some steps again: the last time counts.
      for (auto& [key, points] : lines)
        while (!points.empty() && points.back().first >= static_cast<double>(step)) points.pop_back();
      for (const char* key : kHeartbeatLines)
        if (const double value = number_in(line, key); std::isfinite(value))
          lines[key].emplace_back(static_cast<double>(step), value);
      if (losses != nullptr) {
        while (!losses->empty() && losses->back().first >= step) losses->pop_back();
        losses->emplace_back(step, number_in(line, "loss"));
      }
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
    const Json file = parse_json(read_file(entry.path().string()), entry.path().string());
    if (!file.contains("triad") || !file["triad"].contains("category_bytes")) continue;  // memory_stats alone
    Json categories = Json::object();
    for (const auto& [category, bytes] : file["triad"]["category_bytes"].items())
      if (bytes.is_number()) categories[category] = bytes.get<double>() / kMiB;
    // Of the snapshots without a step, boot and the loader's come before the first, and running out after the last.
    const std::string when = match[1].str();
    const std::optional<int64_t> step = parse_number<int64_t>(match[2].str());
    if (match[2].matched && !step) continue;  // no step of a run
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

// Lists of plain values stay whole.
void flatten(const Json& value, const std::string& key, std::map<std::string, Json>& out) {
  if (key.empty() && value.empty()) return;  // nothing at all
  const bool plain = std::none_of(value.begin(), value.end(), [](const Json& part) { return part.is_structured(); });
  if (!value.is_structured() || value.empty() || (value.is_array() && plain)) {
    out[key] = value;
    return;
  }
  size_t index = 0;
  for (const auto& [name, part] : value.items()) {
    const std::string own = value.is_array() ? std::to_string(index++) : name;
    flatten(part, key.empty() ? own : key + "." + own, out);
  }
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
                .needle = {},
                .data = {}};
  if (run.environment.contains("environment") && run.environment["environment"].is_object())
    for (auto& [name, value] : run.environment["environment"].items())  // of a run whose env.json shows secrets
      if (value.is_string()) value = shown_value(name, value.get<std::string>());
  const CsvTable training(file("training.csv"), {"step", "loss"}), validation(file("val.csv"), {"step", "val_loss"}),
      gates(file("gates.csv"), {"step", "layer", "entropy_mean", "max_mean", "collapse_frac", "cmp", "sel", "win"}),
      selection(file("k_stats.csv"), {"step", "layer", "k_mean", "pct_at_max"}),
      fallbacks(file("fallback_counters.csv"), {"step", "branch", "kernel", "reason", "count"});
  Json& d = run.data;
  d["folder"] = folder;
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
  for (const auto& [rank, path] : ranks)
    d["ranks"].push_back(rank_of(path, rank, rank == 0 ? &run.losses : nullptr, d["events"]));
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
  run.losses_rounded = run.losses.empty();
  if (run.losses_rounded)
    for (size_t i = 0; i < training.size(); ++i)
      if (const double step = training.number(i, "step"); std::isfinite(step))
        run.losses.emplace_back(static_cast<int64_t>(step), training.number(i, "loss"));
  return run;
}

std::vector<Difference> differences_of(const Json& a, const Json& b) {
  std::map<std::string, Json> left, right;
  flatten(a, "", left);
  flatten(b, "", right);
  std::set<std::string> keys;
  for (const auto& [key, value] : left) keys.insert(key);
  for (const auto& [key, value] : right) keys.insert(key);
  std::vector<Difference> out;
  for (const std::string& key : keys) {
    const auto l = left.find(key), r = right.find(key);
    if (l == left.end() || r == right.end() || l->second != r->second)
      out.push_back({key, l == left.end() ? Json() : l->second, r == right.end() ? Json() : r->second});
  }
  return out;
}

Parting parting_of(const ReportRun& a, const ReportRun& b) {
  Parting parting;
  // Where one run's losses are known as training.csv has them alone, the other's count as it would have them.
  const bool rounded = a.losses_rounded || b.losses_rounded;
  const auto as_known = [&](double x) { return rounded ? std::stod(fmt::format("{:.6f}", x)) : x; };
  auto other = b.losses.begin();
  for (const auto& [step, own] : a.losses) {
    while (other != b.losses.end() && other->first < step) ++other;
    if (other == b.losses.end()) break;
    if (other->first != step) continue;
    ++parting.common;
    const double loss = as_known(own), its = as_known(other->second);
    if (loss == its || (std::isnan(loss) && std::isnan(its))) continue;
    if (!parting.first) parting.first = step;
    constexpr double kPercent = 0.01;
    const bool near = std::isfinite(loss) && std::isfinite(its) && std::abs(loss - its) <= kPercent * std::abs(loss);
    if (!parting.by_a_percent && !near) parting.by_a_percent = step;
  }
  return parting;
}

}  // namespace triad
