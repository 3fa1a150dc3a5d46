#include "engine/process/help_text.h"

#include <algorithm>
#include <sstream>

#include "engine/check.h"
#include "engine/process/text.h"

namespace triad {

namespace {

// The column at which a line's description begins; without a description, the column of its text plus two.
size_t description_column(const std::string& line) {
  const size_t name = line.find_first_not_of(' ');
  const size_t gap = name == std::string::npos ? name : line.find("  ", name);
  const size_t description = gap == std::string::npos ? gap : line.find_first_not_of(' ', gap);
  return description != std::string::npos ? description : (name == std::string::npos ? 0 : name) + 2;
}

// The name at the beginning of a line that names an option or a key, which is indented by at most 4; empty for others.
std::string name_on(const std::string& line) {
  const size_t begin = line.find_first_not_of(' ');
  if (begin == 0 || begin > 4) return "";
  return line.substr(begin, line.find("  ", begin) - begin);
}

}  // namespace

std::string wrapped(const std::string& help, size_t width) {
  std::string out;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    const size_t column = description_column(line),
                 indent = 2 * column < width ? column : std::min<size_t>(4, width / 2);
    while (line.size() > width) {
      size_t at = line.rfind(' ', width);
      if (at == std::string::npos || line.find_first_not_of(' ') > at) at = line.find(' ', width);  // a long word
      if (at == std::string::npos) break;
      out += line.substr(0, line.find_last_not_of(' ', at) + 1) + "\n";
      line = std::string(indent, ' ') + line.substr(std::min(line.find_first_not_of(' ', at), line.size()));
    }
    out += line + "\n";
  }
  return out;
}

std::string help_about(const std::string& help, const std::string& topic) {
  std::string out;
  std::istringstream lines(help);
  bool before = false;
  for (std::string line; std::getline(lines, line);) {
    const std::string name = name_on(line);
    const bool continues = before && name.empty() && line.starts_with("     ");  // of the line before
    before = continues || name.find(topic) != std::string::npos;
    if (before) out += line + "\n";
  }
  if (out.empty()) fail_usage("--help {}: no option or config key contains this", shortened(topic));
  return out;
}

}  // namespace triad
