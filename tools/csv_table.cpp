#include "tools/csv_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <utility>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "engine/process/text.h"
#include "io/file.h"

namespace triad {

namespace {

std::vector<std::string> split(const std::string& line) {
  std::vector<std::string> fields;
  for (size_t begin = 0, end; begin <= line.size(); begin = end + 1) {
    end = std::min(line.find(',', begin), line.size());
    fields.push_back(line.substr(begin, end - begin));
  }
  return fields;
}

}  // namespace

std::vector<std::string> whole_lines(const std::string& path) {
  const std::string text = read_file(path);
  std::vector<std::string> lines;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines.push_back(text.substr(begin, end - begin));
  return lines;
}

CsvTable::CsvTable(const std::string& path, const std::vector<std::string>& needed) : path_(path) {
  if (!std::filesystem::exists(path)) return;
  const std::vector<std::string> lines = whole_lines(path);
  TRIAD_CHECK(!lines.empty(), "{} has no header", path);
  const std::vector<std::string> header = split(lines[0]);
  for (size_t i = 0; i < header.size(); ++i) columns_[header[i]] = i;
  for (const std::string& name : needed)
    TRIAD_CHECK(columns_.count(name) > 0, "{}: its header \"{}\" has no column {}", path, shortened(lines[0]), name);
  for (size_t i = 1; i < lines.size(); ++i) {
    std::vector<std::string> row = split(lines[i]);
    std::string why;
    if (row.size() != header.size())
      why = fmt::format("{} fields under a header of {}", row.size(), header.size());
    else if (has("step") && !parse_number<int64_t>(row[columns_.at("step")]))
      why = "its step is no number";
    if (!why.empty()) {
      fmt::print(stderr, "triad: {} line {} is left out: {}: \"{}\"\n", printable(path), i + 1, why,
                 shortened(lines[i]));
      continue;
    }
    rows_.push_back(std::move(row));
    lines_.push_back(i + 1);
  }
}

double CsvTable::number(size_t row, const std::string& column) const {
  const std::string& field = text(row, column);
  if (field.empty()) return NAN;
  const std::optional<double> value = parse_number<double>(field);
  if (!value && reported_.insert(lines_[row]).second)
    fmt::print(stderr, "triad: {} line {}: {} is \"{}\", which is no number\n", printable(path_), lines_[row], column,
               shortened(field));
  return value.value_or(NAN);
}

}  // namespace triad
