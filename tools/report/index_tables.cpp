#include "tools/report/index_tables.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "tools/csv_table.h"
#include "tools/report/series.h"

namespace triad {

namespace {

// A column's heat map over the steps at which it has values; null if there are none.
Json known_heat(const CsvTable& table, const std::string& column) {
  std::vector<LayerValue> values;
  for (size_t i = 0; i < table.size(); ++i)
    if (const double value = table.number(i, column); std::isfinite(value))
      values.push_back({table.number(i, "step"), table.number(i, "layer"), value});
  return values.empty() ? Json() : heat_of(values);
}

Json last_distances(const CsvTable& table) {
  double last = -1;
  for (size_t i = 0; i < table.size(); ++i)
    if (std::isfinite(table.number(i, "distance"))) last = std::max(last, table.number(i, "step"));
  if (last < 0) return {};
  std::set<double> layers, distances;
  const auto is_last = [&](size_t i) {
    return table.number(i, "step") == last && std::isfinite(table.number(i, "layer")) &&
           std::isfinite(table.number(i, "distance"));
  };
  for (size_t i = 0; i < table.size(); ++i)
    if (is_last(i)) layers.insert(table.number(i, "layer")), distances.insert(table.number(i, "distance"));
  Json out = {{"step", last}, {"layers", layers}, {"distances", distances}};
  for (const char* column : {"mass", "recall"}) out[column] = Json(layers.size(), Json(distances.size(), Json()));
  for (size_t i = 0; i < table.size(); ++i) {
    if (!is_last(i)) continue;
    const auto row = static_cast<size_t>(std::distance(layers.begin(), layers.find(table.number(i, "layer")))),
               at = static_cast<size_t>(std::distance(distances.begin(), distances.find(table.number(i, "distance"))));
    for (const char* column : {"mass", "recall"}) out[column][row][at] = number_or_null(table.number(i, column));
  }
  return out;
}

}  // namespace

Json index_tables(const std::filesystem::path& folder) {
  const CsvTable layers(folder / "index.csv", {"step", "layer", "index_loss", "recall", "max_logit"});
  const CsvTable distances(folder / "index_recall.csv", {"step", "layer", "distance", "mass", "recall"});
  if (layers.size() == 0) return {};
  Json out;
  for (const char* column : {"index_loss", "recall", "max_logit"}) out[column] = known_heat(layers, column);
  out["distances"] = last_distances(distances);
  return out;
}

}  // namespace triad
