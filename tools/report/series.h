// What a screen can show of a run's numbers: lines of at most so many points, heat maps of at most so many columns.
#pragma once
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "io/json_config.h"
#include "tools/csv_table.h"

namespace triad {

using Points = std::vector<std::pair<double, double>>;  // x, ascending, and a value; NaN: there is none

inline Json number_or_null(double x) { return std::isfinite(x) ? Json(x) : Json(); }

// [[x, y], ...] of few points: of each stretch the lowest and the highest, so that no spike gets lost.
Json thinned(const Points&);

// A column of a table by its column "step"; all of its points, and the same thinned out. No such column: none.
Points points_of(const CsvTable&, const char* column);
inline Json line_of(const CsvTable& table, const char* column) { return thinned(points_of(table, column)); }

// {steps, last, layers, values}: values[layer][column], each the mean over the steps that share a column.
// A value whose step or layer is no number, of a damaged row, counts nowhere.
struct LayerValue {
  double step, layer, value;
};
Json heat_of(const std::vector<LayerValue>&);
Json heat_of(const CsvTable&, const std::string& column);  // of a table with columns step and layer

// Straight between the points, and as far outside of them as their ends go on; NaN without any.
double value_at(const Points&, double x);

}  // namespace triad
