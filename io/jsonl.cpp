#include "io/jsonl.h"

#include <filesystem>

#include "engine/check.h"

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

void cut_jsonl(const std::string& path, int64_t step) {
  if (!std::filesystem::exists(path)) return;
  const std::string text = read_file(path);
  std::string kept;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = text.substr(begin, end - begin);
    try {
      const Json json = parse_json(line, path);
      const auto at = json.is_object() ? json.find("step") : json.end();
      if (at != json.end() && at->is_number_integer() && at->get<int64_t>() > step) continue;
    } catch (const Error&) {}  // a damaged line stays, because its step is not known
    kept += line + "\n";
  }
  if (kept.size() != text.size()) write_file_atomically(path, kept);
}

void JsonLines::append(const Json& object) { file_.append(dump_json(object, -1) + "\n"); }

}  // namespace triad
