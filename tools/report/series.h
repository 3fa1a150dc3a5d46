// Reduces a run's numbers to what a screen can show: lines with at most 1,500 points, heat maps with at most 240
// columns.
#pragma once
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "io/json_config.h"
#include "tools/csv_table.h"

namespace triad {

// (x, value) pairs with ascending x; the value is NaN where there is none.
using Points = std::vector<std::pair<double, double>>;

inline Json number_or_null(double x) { return std::isfinite(x) ? Json(x) : Json(); }

// Thins a line to [[x, y], ...]. It keeps the lowest and the highest point in each stretch, so no spike is lost.
Json thinned(const Points&);
Json thinned(const Json& line, size_t most);  // the same for such a line, to at most so many points

// A table's column over its column "step": all points, or thinned ones. No points if the table has no such column.
Points points_of(const CsvTable&, const char* column);
inline Json line_of(const CsvTable& table, const char* column) { return thinned(points_of(table, column)); }

// heat_of() returns a heat map {steps, last, layers, values}: values[layer][column] is the mean over a column's steps,
// steps holds each column's first step, and last the last step. Values whose step or layer is not a number are left
// out.
struct LayerValue {
  double step, layer, value;
};
Json heat_of(const std::vector<LayerValue>&);
Json heat_of(const CsvTable&, const std::string& column);  // the table has columns named step and layer

// A line's value at x, interpolated linearly, also beyond its ends; NaN if the line has no points.
double value_at(const Points&, double x);

}  // namespace triad
