#include "tools/csv_table.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>

#include "engine/check.h"
#include "io/file.h"
#include "io/json_config.h"

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
    rows_.push_back(split(lines[i]));
    TRIAD_CHECK(rows_.back().size() == header.size(), "{} line {}: {} fields under a header of {}: \"{}\"", path, i + 1,
                rows_.back().size(), header.size(), shortened(lines[i]));
  }
}

double CsvTable::number(size_t row, const std::string& column) const {
  const std::string& field = text(row, column);
  if (field.empty()) return NAN;
  double value = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  TRIAD_CHECK(error == std::errc() && end == field.data() + field.size(),
              "{} line {}: {} is \"{}\", which is no number", path_, row + 2, column, shortened(field));
  return value;
}

}  // namespace triad
