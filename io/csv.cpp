#include "io/csv.h"

#include <charconv>
#include <filesystem>

#include "engine/check.h"

namespace triad {

namespace {

size_t count_columns(std::string_view line) {
  size_t columns = 1;
  bool quoted = false;
  for (const char c : line) {
    if (c == '"') quoted = !quoted;
    if (c == ',' && !quoted) ++columns;
  }
  return columns;
}

int64_t step_of(const std::string& path, size_t number, std::string_view line) {
  int64_t step = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), step);
  TRIAD_CHECK(error == std::errc() && (end == line.data() + line.size() || *end == ','),
              "{} line {}: \"{}\" does not begin with a step", path, number, line);
  return step;
}

// The file's text without the rows past a step and without an unfinished last line; an empty header stands for any.
std::string cut(const std::string& path, std::string_view text, const std::string& header, int64_t resume_step) {
  std::string kept;
  size_t number = 0;
  for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1)) {
    const std::string_view line = text.substr(0, end);
    if (++number == 1)
      TRIAD_CHECK(header.empty() || line == header,
                  "{}: this is another table: expected the header \"{}\", found \"{}\"", path, header, line);
    else if (step_of(path, number, line) > resume_step)
      continue;
    kept.append(line) += '\n';
  }
  return number == 0 && !header.empty() ? header + "\n" : kept;
}

// Makes the file as rows will be appended to it.
const std::string& prepare(const std::string& path, const std::string& header, int64_t resume_step) {
  const bool resume = resume_step >= 0 && std::filesystem::exists(path);
  write_file_atomically(path, resume ? cut(path, read_file(path), header, resume_step) : header + "\n");
  return path;
}

}  // namespace

CsvFile::CsvFile(const std::string& path, const std::string& header, int64_t resume_step)
    : columns_(count_columns(header)), file_(prepare(path, header, resume_step)) {}

void cut_csv(const std::string& path, int64_t step) {
  if (std::filesystem::exists(path)) write_file_atomically(path, cut(path, read_file(path), "", step));
}

void CsvFile::row(std::string_view text) {
  TRIAD_CHECK(count_columns(text) == columns_ && text.find('\n') == std::string_view::npos,
              "{}: the row \"{}\" has not the header's {} columns on one line", file_.path(), text, columns_);
  file_.append(std::string(text) + "\n");
}

}  // namespace triad
