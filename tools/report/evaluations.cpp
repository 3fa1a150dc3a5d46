#include "tools/report/evaluations.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <set>

#include "engine/check.h"
#include "engine/process/text.h"
#include "io/data/needle_grid.h"
#include "io/data/position_losses.h"
#include "tools/csv_table.h"
#include "tools/report/ranks.h"
#include "train/run/data_source.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

// Reads a CSV file that `triad eval --needle` writes; a grid without lengths if the file does not exist.
NeedleGrid needle_grid_of(const std::string& path) {
  const CsvTable table(path, {"length", "depth", "samples", "right"});
  std::vector<std::string> numbers = {"length", "depth", "samples"};
  if (table.has("pairs")) numbers.emplace_back("pairs");  // older files lack it
  NeedleGrid grid;
  std::set<int64_t> lengths;
  std::set<double> depths;
  for (size_t i = 0; i < table.size(); ++i) {
    for (const std::string& column : numbers)
      TRIAD_CHECK(std::isfinite(table.number(i, column)), "{} line {}: {} is no number", path, i + 2, column);
    lengths.insert(static_cast<int64_t>(table.number(i, "length")));
    depths.insert(table.number(i, "depth"));
    grid.samples = static_cast<int64_t>(table.number(i, "samples"));
    if (table.has("pairs")) grid.pairs = static_cast<int64_t>(table.number(i, "pairs"));
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

// Calls use(line) for each line of a JSONL file that is an object with these keys, and warns of others.
void each_line(const std::string& path, std::initializer_list<const char*> keys,
               const std::function<void(const Json&)>& use) {
  if (!fs::exists(path)) return;
  const std::vector<std::string> text = whole_lines(path);
  for (size_t i = 0; i < text.size(); ++i) {
    Json line;
    try {
      line = parse_json(text[i], "a line");
    } catch (const Error&) {}  // left out below
    const auto has = [&](const char* key) { return line.is_object() && line.contains(key); };
    if (std::all_of(keys.begin(), keys.end(), has))
      use(line);
    else
      fmt::print(stderr, "triad: {} line {} is left out: \"{}\" is no object with {}\n", printable(path), i + 1,
                 shortened(text[i]), fmt::join(keys, ", "));
  }
}

}  // namespace

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

Json samples_of(const std::string& path) {
  std::map<int64_t, Json> steps;
  each_line(path, {"step", "prompt", "text"}, [&](const Json& line) {
    if (!line["step"].is_number_integer() || !line["prompt"].is_string() || !line["text"].is_string()) return;
    Json& samples = steps[line["step"].get<int64_t>()];
    // A resume at this step has repeated the evaluation: its samples count.
    if (std::any_of(samples.begin(), samples.end(), [&](const Json& s) { return s["prompt"] == line["prompt"]; }))
      samples = Json::array();
    samples.push_back({{"prompt", line["prompt"]}, {"text", line["text"]}, {"stopped", line.value("stopped", false)}});
  });
  Json out = Json::array();
  for (const auto& [step, samples] : steps) out.push_back({{"step", step}, {"samples", samples}});
  return out;
}

Json evaluations_of(const std::string& path) {
  Json out = Json::array();
  each_line(path, {"time", "data", "loss"}, [&](const Json& line) { out.push_back(line); });
  return out;
}

}  // namespace triad
