#include "io/csv.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <vector>

#include "engine/check.h"
#include "engine/process/parse.h"
#include "engine/process/text.h"

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

// A text's lines. An unfinished last line, which does not end in a newline, is left out.
std::vector<std::string_view> whole_lines(std::string_view text) {
  std::vector<std::string_view> lines;
  for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1))
    lines.push_back(text.substr(0, end));
  return lines;
}

// The lines' most frequent column count, so that one damaged line, even the header, does not decide for the others.
size_t usual_columns(const std::vector<std::string_view>& lines) {
  std::map<size_t, size_t> votes;
  for (const std::string_view line : lines) ++votes[count_columns(line)];
  return std::max_element(votes.begin(), votes.end(), [](const auto& a, const auto& b) { return a.second < b.second; })
      ->first;
}

// Whether a file's first line, which is not `header`, may be that header in damaged form: it contains more than half
// the header's names, or a character that no header has.
bool is_damaged_header(std::string_view line, std::string_view header) {
  if (line.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_,") != std::string_view::npos) return true;
  const auto names = [](std::string_view text) {
    std::vector<std::string_view> all;
    for (size_t end; (end = text.find(',')) != std::string_view::npos; text.remove_prefix(end + 1))
      all.push_back(text.substr(0, end));
    all.push_back(text);
    return all;
  };
  const std::vector<std::string_view> found = names(line), expected = names(header);
  const auto same = std::count_if(expected.begin(), expected.end(), [&](std::string_view name) {
    return std::find(found.begin(), found.end(), name) != found.end();
  });
  return 2 * static_cast<size_t>(same) > expected.size();
}

void warn(const std::string& path, size_t index, std::string_view line, const std::string& what) {
  fmt::print(stderr, "triad: {} line {} is damaged: \"{}\" {}\n", printable(path), index + 1, shortened(line), what);
}

// The text of the file at `path` without rows for steps after resume_step, damaged lines and an unfinished last line.
// header "": any header is accepted.
std::string cut(const std::string& path, std::string_view text, const std::string& header, int64_t resume_step) {
  const std::vector<std::string_view> lines = whole_lines(text);
  if (lines.empty()) return header.empty() ? "" : header + "\n";
  const size_t columns = usual_columns(lines);
  std::string kept(lines[0]);
  if (!header.empty() && kept != header) {
    TRIAD_CHECK(lines.size() > 1 && columns == count_columns(header) && is_damaged_header(kept, header),
                "{}: this is another table: expected the header \"{}\", found \"{}\"", path, header, shortened(kept));
    warn(path, 0, lines[0], "is written anew");
    kept = header;
  }
  kept += '\n';
  for (size_t i = 1; i < lines.size(); ++i) {
    const std::optional<int64_t> step = parse_number<int64_t>(lines[i].substr(0, lines[i].find(',')));
    if (!step || count_columns(lines[i]) != columns)
      warn(path, i, lines[i], "is left out");
    else if (*step <= resume_step)
      kept.append(lines[i]) += '\n';
  }
  return kept;
}

// Creates the file with its header. On a resume, keeps the file and removes the rows for steps after resume_step.
// Returns the path.
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
