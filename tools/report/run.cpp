#include "tools/report/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>
#include <regex>
#include <set>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "engine/process/text.h"
#include "io/data/needle_grid.h"
#include "io/data/position_losses.h"
#include "io/file.h"
#include "tools/csv_table.h"
#include "tools/report/facts.h"
#include "tools/report/index_tables.h"
#include "tools/report/series.h"
#include "train/config/load_config.h"
#include "train/monitor/document_lengths.h"
#include "train/monitor/selection_sample.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

constexpr double kMiB = 1024.0 * 1024.0;
constexpr int kKnownHeartbeatSchema = 1, kKnownSampleSchema = 3, kKnownLengthsSchema = 1;

// Heartbeat keys whose numbers the report draws as lines, one per rank.
constexpr const char* kHeartbeatLines[] = {"step_ms",           "compute_ms",     "update_ms",         "fetch_ms",
                                           "comm_wait_ms",      "tokens_per_s",   "host_mib",          "gpu_used_mib",
                                           "gpu_util_pct",      "power_w",        "gpu_mem_alloc_mib", "sel_overlap",
                                           "sel_forced_frac",   "gate_dead_frac", "docs_per_row",      "docs_cut_share",
                                           "docs_padded_share", "index_loss",     "index_grad_norm"};

double number_in(const Json& line, const char* key) {
  const auto it = line.find(key);
  return it != line.end() && it->is_number() ? it->get<double>() : NAN;
}

// What the report reads only from rank 0's heartbeats.
struct FirstRank {
  Points losses;
  // Running time in seconds after each step, without the time between a stop and the resume.
  Points clock;
  std::vector<LayerValue> gradient_norms;
};

// Removes points from this step on, because a resumed run repeats steps and the last repetition counts.
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

// Reads a rank's heartbeats and returns {rank, last, state, means, lines}. Appends the events to `events`; fills
// `first` if it is not null.
Json rank_of(const std::string& path, int64_t rank, FirstRank* first, Json& events) {
  std::map<std::string, Points> lines;
  Json last;
  std::string state;                 // the last heartbeat's message that describes the rank's state
  double seconds = 0, before = NAN;  // running time; the previous heartbeat's time stamp
  const std::vector<std::string> text = whole_lines(path);
  for (size_t i = 0; i < text.size(); ++i) {
    const Json line = json_or_nothing(text[i]);
    const bool whole = line.is_object() && line.contains("step") && line["step"].is_number_integer() &&
                       line.contains("msg") && line["msg"].is_string();
    if (!whole) {
      fmt::print(stderr, "triad: {} line {} is left out: \"{}\" is no heartbeat (an object with step and msg)\n",
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
    if (msg != "stackdump" && msg != "progress" && msg != "checkpoint" && msg != "stage" && msg != "lr_jump" &&
        msg != "evaluation")
      state = msg;  // the other messages do not change a rank's state
    if (msg == "step_end") {
      for (auto& [key, points] : lines) forget_from(points, step);
      for (const char* key : kHeartbeatLines)
        if (const double value = number_in(line, key); std::isfinite(value))
          lines[key].emplace_back(static_cast<double>(step), value);
      if (first != nullptr) add_step(*first, step, line, seconds);
    } else if (msg != "progress" && msg != "evaluation") {
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

// Reads a CSV file that `triad eval --needle` writes; a grid without lengths if the file does not exist.
NeedleGrid needle_grid_of(const std::string& path) {
  const CsvTable table(path, {"length", "depth", "samples", "right"});
  NeedleGrid grid;
  std::set<int64_t> lengths;
  std::set<double> depths;
  for (size_t i = 0; i < table.size(); ++i) {
    for (const char* column : {"length", "depth", "samples"})
      TRIAD_CHECK(std::isfinite(table.number(i, column)), "{} line {}: {} is no number", path, i + 2, column);
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

// Reads positions.csv, which `triad eval --per-position` writes: {to, loss} for each position range; empty if the file
// does not exist.
Points position_losses_of(const std::string& path) {
  const CsvTable table(path, {"to", "loss"});
  Points points;
  for (size_t i = 0; i < table.size(); ++i) {
    const double to = table.number(i, "to");
    TRIAD_CHECK(to >= 1 && (points.empty() || to > points.back().first), "{} line {}: a range of positions ends at {}",
                path, i + 2, to);
    points.emplace_back(to, table.number(i, "loss"));
  }
  return points;
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

// Adds the ranks, their events sorted by step, and stack dump names to d. Returns what only rank 0's heartbeats hold.
FirstRank add_ranks(Json& d, const std::string& folder) {
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
  std::sort(dumps.begin(), dumps.end());
  d["stackdumps"] = dumps;
  d["events"] = d["ranks"] = Json::array();
  FirstRank first;
  for (const auto& [rank, path] : ranks)
    d["ranks"].push_back(rank_of(path, rank, rank == 0 ? &first : nullptr, d["events"]));
  std::stable_sort(d["events"].begin(), d["events"].end(),
                   [](const Json& a, const Json& b) { return a["step"] < b["step"]; });
  return first;
}

// Pictures for the measured tasks, one below the other.
std::string needle_svgs(const fs::path& folder, const Json& config) {
  const Json attention = config.contains("model") ? config["model"].value("attention", Json("nsa")) : Json();
  std::string out;
  for (const auto& [word, kind] : EnumWords<NeedleKind>::words) {
    const NeedleGrid grid = needle_grid_of((folder / needle_file(kind, "csv")).string());
    if (grid.lengths.empty()) continue;
    out += grid.svg(needle_title(kind, attention.is_string() ? attention.get<std::string>() : "?"));
  }
  return out;
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
                .config = json_or_null(file("config.json")),
                .environment = json_or_null(file("env.json")),
                .losses = {},
                .losses_rounded = false,
                .validation = {},
                .clock = {},
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
  d["tokens_are_bytes"] = tokens_are_bytes(run.config);
  d["sample"] = sample_of(file(kSelectionSample));
  d["lengths"] = lengths_of(file(kDocumentLengths));
  d["positions"] = thinned(position_losses_of(file(kPositionsCsv)));
  add_lines_and_maps(d, tables);
  d["index"] = index_tables(folder);
  d["memory"] = memory_of(folder);
  d["metrics"] = json_or_null(file("metrics.json"));
  const FirstRank first = add_ranks(d, folder);
  run.needle = needle_svgs(folder, run.config);
  if (fs::exists(file(".anomaly_type"))) d["stopped_by"] = read_file(file(".anomaly_type"));
  d["gradient_norms"] = gradient_norms_of(first, tables.ledger);
  run.clock = clock_of(first, tables.training);
  d["clock"] = thinned(run.clock);
  run.losses_rounded = first.losses.empty();
  run.losses = run.losses_rounded ? points_of(tables.training, "loss") : first.losses;
  run.validation = points_of(tables.validation, "val_loss");
  if (!run.losses_rounded && run.losses.size() >= tables.training.size()) d["training"]["loss"] = thinned(run.losses);
  return run;
}

}  // namespace triad
