#include "tests/support/report_page.h"

#include <cstdio>
#include <filesystem>

#include "tests/support/test.h"

namespace triad::test {

std::string report(const std::string& args) {
  const Outcome outcome = run_program("report " + args);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  // The last line is the report's path; warnings precede it.
  const std::string lines = outcome.standard_output.substr(0, outcome.standard_output.size() - 1);
  return read_text(lines.substr(lines.rfind('\n') + 1));
}

Json data_of(const std::string& page, const std::string& id) {
  const std::string begin = "<script type=\"application/json\" id=\"" + id + "\">";
  const size_t at = page.find(begin);
  REQUIRE(at != std::string::npos);
  const size_t from = at + begin.size();
  return Json::parse(page.substr(from, page.find("</script>", from) - from));
}

void check_report_refused(const std::string& folder, const std::string& file, const std::string& content) {
  write_text(folder + "/" + file, content);
  const Outcome outcome = run_program("report " + folder);
  INFO(content << "\n" << outcome.output);
  CHECK(outcome.exit_code == 1);
  CHECK(has(outcome.output, file));
  CHECK_FALSE(std::filesystem::exists(folder + "/report.html"));
}

size_t count(const std::string& text, const std::string& part) {
  size_t n = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) ++n;
  return n;
}

bool require_browser() { return run_command("command -v chromium").exit_code == 0 || skip("no chromium"); }

std::string drawn(const TemporaryFolder& folder, const std::string& page, const std::string& reader) {
  const std::string file = folder.file("page.html");
  write_text(file, page + "<script>setTimeout(() => {" + reader + "}, 500)</script>");
  const Outcome outcome = run_command(
      "timeout 300 chromium --headless --no-sandbox --disable-gpu --enable-logging=stderr --virtual-time-budget=5000 "
      "--dump-dom file://" +
      file);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  CHECK_FALSE(has(outcome.output, "Uncaught"));
  const size_t end = outcome.standard_output.find("<script type=\"application/json\"");
  const std::string dom = outcome.standard_output.substr(0, end);
  for (const char* nothing : {"NaN", "Infinity", "undefined"})
    CHECK_FALSE(has(dom, nothing));  // an SVG path with such a number would be an empty chart
  return dom;
}

}  // namespace triad::test
