// triad report on runs with packed rows: document lengths, per-step counts, and selected-block maps, which count from
// each document's beginning.
#include <fmt/format.h>

#include <filesystem>
#include <string>

#include "io/file.h"
#include "tests/support/dist_run.h"
#include "tests/support/report_page.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// A run on documents with 1 to `longest` bytes, with attention within them.
std::string train_on_documents(const TemporaryFolder& folder, const std::string& name, int longest,
                               const std::string& more = "") {
  std::string text;
  for (int i = 0; i < 300; ++i)
    text += fmt::format("{{\"text\":\"{}\"}}\n", std::string(1 + i * i % longest, static_cast<char>('a' + i % 26)));
  write_text(folder.file(name + ".jsonl"), text);
  return run(folder.file(name), 1,
             "--set data.kind=text --set data.paths=" + folder.file(name + ".jsonl") +
                 " --set data.documents=attend_within --set train.eval_every=10 " + more);
}

}  // namespace

TEST_CASE("report: the page of a run on packed rows has lengths, counts and the documents' bounds", "[report]") {
  const TemporaryFolder folder;
  const std::string out = train_on_documents(folder, "run", 60);
  const Json data = data_of(report(out)).at(0);
  CHECK(data["lengths"] == parse_json(read_file(out + "/document_lengths.json"), "lengths"));
  for (const char* key : {"docs_per_row", "docs_cut_share", "docs_padded_share"})
    CHECK(data["ranks"][0]["lines"][key].size() == 20);
  CHECK(data["sample"]["bounds"].size() > 2);
}

TEST_CASE("report: an invalid file of lengths is refused", "[report]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run"), file = out + "/document_lengths.json";
  fs::create_directory(out);
  write_text(out + "/config.json", "{}");
  const Json range = {{"from", 1}, {"to", 2}, {"documents", 3}, {"tokens", 3}};
  const Json whole = {
      {"schema", 1},         {"documents", 3}, {"tokens", 3}, {"longest", 1}, {"lengths", Json::array({range})},
      {"row_parts", nullptr}};
  write_text(file, whole.dump());
  CHECK(data_of(report(out)).at(0)["lengths"] == whole);
  fs::remove(out + "/report.html");
  const auto refused = [&](const char* key, const Json& value) {
    Json broken = whole;
    broken[key] = value;
    check_report_refused(out, "document_lengths.json", broken.dump());
  };
  refused("schema", 2);
  refused("documents", "3");
  refused("lengths", nullptr);
  refused("lengths", Json::array({1}));
  refused("row_parts", Json::array({{{"from", 1}}}));
  Json negative = range;
  negative["tokens"] = -1;
  refused("lengths", Json::array({negative}));
  negative["tokens"] = "<b>";
  refused("lengths", Json::array({negative}));
}

TEST_CASE("report: a browser draws the charts of packed rows, for one run and for two", "[report]") {
  if (!require_browser()) return;
  const TemporaryFolder folder;
  const std::string out = train_on_documents(folder, "run", 60),
                    other = train_on_documents(folder, "other", 13, "--set data.packing=best_fit ");
  const std::string page = report(out);
  // The pointer over a block map, in the last query's row, at a token in the first document.
  const std::string one = drawn(folder, page, R"(
    const map = [...document.querySelectorAll('.maps .chart')].at(-1), box = map.getBoundingClientRect();
    map.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 60, clientY: box.top + 20}));)");
  for (const char* text : {"Documents</h2>", "Tokens by length of their document", "Documents by length",
                           "Documents a row", "Tokens cut from their document", "Padding", "as the rows hold them",
                           "counted from the beginning of each of its"})
    CHECK(has(one, text));
  const auto documents = data_of(page).at(0)["lengths"]["documents"].get<int64_t>();
  CHECK(has(one, fmt::format("{} documents, ", documents)));
  // A browser under load may print the page before its first frame: the charts do not wait for observers.
  const std::string frameless = "<script>ResizeObserver = class { observe() {} }</script>" + page;
  CHECK(count(one, "<svg ") > 20);
  CHECK(count(one, "<svg ") == count(drawn(folder, frameless), "<svg "));
  const std::string two = drawn(folder, report(out + " --vs " + other));
  for (const char* text : {"tokens A", "tokens B", "documents A", "documents B"}) CHECK(has(two, text));
  CHECK(has(two, fmt::format("A: {} documents, ", documents)));
  CHECK(has(two, "B: "));
  // Runs without documents have no such section.
  const std::string synthetic = run(folder.file("synthetic"), 1, "--set train.eval_every=10 ");
  const std::string none = drawn(folder, report(synthetic));
  CHECK_FALSE(has(none, "Documents</h2>"));
  CHECK(has(none, "Which blocks are selected"));
}
