#include "io/jsonl.h"

#include <filesystem>

namespace triad {

namespace {

const std::string& without_unfinished_line(const std::string& path) {
  if (!std::filesystem::exists(path)) return path;
  const std::string text = read_file(path);
  const size_t last = text.rfind('\n');
  const size_t whole = last == std::string::npos ? 0 : last + 1;
  if (whole < text.size()) truncate_file(path, static_cast<int64_t>(whole));
  return path;
}

}  // namespace

JsonLines::JsonLines(const std::string& path) : file_(without_unfinished_line(path)) {}

void JsonLines::append(const Json& object) { file_.append(dump_json(object, -1) + "\n"); }

}  // namespace triad
