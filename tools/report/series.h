// Reduces a run's numbers to what a screen can show: lines of at most 1,500 points, heat maps of at most 240 columns.
#pragma once
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "io/json_config.h"
#include "tools/csv_table.h"

namespace triad {

using Points = std::vector<std::pair<double, double>>;  // (x, value), x ascending; NaN if there is no value

inline Json number_or_null(double x) { return std::isfinite(x) ? Json(x) : Json(); }

// Thins a line to [[x, y], ...]: keeps the lowest and the highest point of each stretch, so that no spike is lost.
Json thinned(const Points&);

// A column of a table over its column "step": all points, and thinned. No points if there is no such column.
Points points_of(const CsvTable&, const char* column);
inline Json line_of(const CsvTable& table, const char* column) { return thinned(points_of(table, column)); }

// A heat map {steps, last, layers, values}: values[layer][column] is the mean over the steps of a column; steps holds
// the first step of each column, last the last step. Values whose step or layer is not a number are left out.
struct LayerValue {
  double step, layer, value;
};
Json heat_of(const std::vector<LayerValue>&);
Json heat_of(const CsvTable&, const std::string& column);  // the table has columns step and layer

// Linear interpolation, extrapolated beyond the ends; NaN without points.
double value_at(const Points&, double x);

}  // namespace triad
