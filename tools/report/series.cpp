#include "tools/report/series.h"

#include <algorithm>
#include <cmath>
#include <set>

namespace triad {

namespace {

constexpr size_t kMostPoints = 1500;  // most points in a line
constexpr size_t kMostColumns = 240;  // most columns in a heat map

Json thin(const Points& points, size_t most) {
  Json out = Json::array();
  const size_t stretches = most / 2, n = points.size();
  const auto put = [&](size_t i) { out.push_back({points[i].first, number_or_null(points[i].second)}); };
  if (n <= most) {
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

}  // namespace

Json thinned(const Points& points) { return thin(points, kMostPoints); }

Json thinned(const Json& line, size_t most) {
  Points points;
  for (const Json& point : line)
    points.emplace_back(point[0].get<double>(), point[1].is_number() ? point[1].get<double>() : NAN);
  return thin(points, most);
}

Points points_of(const CsvTable& table, const char* column) {
  Points points;
  if (table.has(column))
    for (size_t i = 0; i < table.size(); ++i) points.emplace_back(table.number(i, "step"), table.number(i, column));
  return points;
}

Json heat_of(const std::vector<LayerValue>& all) {
  std::set<double> steps, layers;
  const auto has_place = [](const LayerValue& v) { return std::isfinite(v.step) && std::isfinite(v.layer); };
  for (const LayerValue& v : all)
    if (has_place(v)) steps.insert(v.step), layers.insert(v.layer);
  const std::vector<double> step_list(steps.begin(), steps.end()), layer_list(layers.begin(), layers.end());
  const size_t columns = std::min(kMostColumns, step_list.size());
  const auto index = [](const std::vector<double>& list, double x) {
    return static_cast<size_t>(std::lower_bound(list.begin(), list.end(), x) - list.begin());
  };
  std::vector<std::vector<double>> sums(layer_list.size(), std::vector<double>(columns, 0)), counts = sums;
  for (const LayerValue& v : all) {
    if (!has_place(v) || !std::isfinite(v.value)) continue;
    const size_t layer = index(layer_list, v.layer), at = index(step_list, v.step) * columns / step_list.size();
    sums[layer][at] += v.value;
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
    // The first step that belongs to column c.
    firsts.push_back(step_list[(c * step_list.size() + columns - 1) / columns]);
  return {{"steps", firsts},
          {"last", step_list.empty() ? Json() : Json(step_list.back())},
          {"layers", layer_list},
          {"values", values}};
}

Json heat_of(const CsvTable& table, const std::string& column) {
  std::vector<LayerValue> all;
  for (size_t i = 0; i < table.size(); ++i)
    if (const double layer = table.number(i, "layer"); std::isfinite(layer))
      all.push_back({table.number(i, "step"), layer, table.number(i, column)});
  return heat_of(all);
}

double value_at(const Points& points, double x) {
  if (points.empty()) return NAN;
  if (points.size() == 1) return points.front().second;
  auto right = std::lower_bound(points.begin() + 1, points.end() - 1, x,
                                [](const auto& point, double at) { return point.first < at; });
  const auto& [x0, y0] = *(right - 1);
  const auto& [x1, y1] = *right;
  if (x == x0) return y0;
  return x1 > x0 ? y0 + (y1 - y0) * ((x - x0) / (x1 - x0)) : y1;
}

}  // namespace triad
