#include "tools/report/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>

#include "engine/process/counted.h"
#include "tools/report/facts.h"
#include "tools/report/html.h"
#include "tools/report/overview.h"

namespace triad {

namespace {

// The script fills it with links to the page's sections.
constexpr const char* kContents = "<nav id=\"contents\" aria-label=\"contents\"></nav>\n";

std::string time_text() {
  char text[32];
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%SZ", gmtime_r(&now, &utc));
  return text;
}

// HTML for facts as tiles; long values get wider tiles.
std::string tiles(const std::vector<Fact>& facts) {
  constexpr size_t kShort = 11;
  std::string out = "<div class=\"tiles\">";
  for (const Fact& f : facts)
    out += fmt::format("<div class=\"tile{}\"><b{}>{}</b><span>{}</span></div>", f.text.size() > kShort ? " words" : "",
                       f.warns ? " class=\"warn\"" : "", html(f.text), html(f.name));
  return out + "</div>\n";
}

// The HTML table that compares two runs' facts, with differences B - A for numbers.
std::string facts_table(const std::vector<Fact>& a, const std::vector<Fact>& b) {
  const auto find = [](const std::vector<Fact>& facts, const std::string& name) {
    const auto at = std::find_if(facts.begin(), facts.end(), [&](const Fact& f) { return f.name == name; });
    return at == facts.end() ? Fact{name, "–"} : *at;
  };
  std::vector<std::vector<std::string>> rows;
  const auto row = [&](const std::string& name) {
    const Fact left = find(a, name), right = find(b, name);
    std::string more;
    if (const double by = right.number - left.number; std::isfinite(by)) {
      more = by == 0 ? "none" : (by > 0 ? "+" : "") + left.write(by);
      if (by != 0 && left.number != 0) more += fmt::format(" ({:+.2f}%)", 100 * by / std::abs(left.number));
    }
    rows.push_back({name, left.text, right.text, more});
  };
  for (const Fact& f : a) row(f.name);
  for (const Fact& f : b)
    if (find(a, f.name).text == "–") row(f.name);
  return table({"result", "A", "B", "B less A"}, rows, "keys results");
}

std::string events_table(const Json& d) {
  std::vector<std::vector<std::string>> rows;
  for (const Json& e : d["events"]) {
    std::string when = text_of(e["time"]);
    std::replace(when.begin(), when.end(), 'T', ' ');  // lets the line break on a narrow screen
    rows.push_back({text_of(e["step"]), text_of(e["rank"]), text_of(e["kind"]), when, text_of(e["text"])});
  }
  constexpr size_t kMostRows = 400;
  std::string more;
  if (rows.size() > kMostRows) {
    more = fmt::format("<p class=\"faint\">The last {} of {}.</p>", kMostRows, rows.size());
    rows.erase(rows.begin(), rows.end() - kMostRows);
  }
  return more + table({"step", "rank", "event", "time", "details"}, rows, "events");
}

std::string ranks_table(const Json& d) {
  std::vector<std::vector<std::string>> rows;
  for (const Json& r : d["ranks"]) {
    const auto mean = [&](const char* key) { return number(r["means"].value(key, Json())); };
    const auto last = [&](const char* key) {
      if (const Json line = r["lines"].value(key, Json()); !line.empty()) return number(line.back()[1]);
      return number(r["last"].is_null() ? Json() : r["last"].value(key, Json()));
    };
    rows.push_back({text_of(r["rank"]), r["last"].is_null() ? "–" : text_of(r["last"]["step"]),
                    r["last"].is_null() ? "–" : text_of(r["last"]["msg"]), mean("step_ms"), mean("compute_ms"),
                    mean("comm_wait_ms"), mean("fetch_ms"), last("host_mib"), last("gpu_used_mib"),
                    mean("gpu_util_pct"), mean("power_w")});
  }
  return table({"rank", "last step", "last message", "step ms", "compute ms", "comm wait ms", "fetch ms", "host MiB",
                "GPU MiB", "GPU %", "W"},
               rows);
}

std::string fallbacks_table(const Json& d) {
  std::vector<std::vector<std::string>> rows;
  for (const Json& f : d["fallbacks"]) rows.push_back({text_of(f["what"]), number(f["count"], "{:.0f}")});
  return table({"kernel and reason", "calls"}, rows);
}

// A card on the page that shows all keys and values in an object when clicked open.
std::string object_card(const std::string& title, const Json& object) {
  if (object.is_null()) return "";
  std::vector<std::vector<std::string>> rows;
  for (const Difference& d : differences_of(object, Json::object())) rows.push_back({d.key, text_of(d.a)});
  if (rows.empty()) return "";
  return fmt::format("<details class=\"card wide\"><summary>{}</summary>{}</details>\n", html(title),
                     table({"key", "value"}, rows, "keys"));
}

std::string differences_card(const char* file, const Json& a, const Json& b) {
  std::vector<std::vector<std::string>> rows;
  for (const Difference& d : differences_of(a, b)) rows.push_back({d.key, text_of(d.a), text_of(d.b)});
  return card(file, rows.empty() ? "<p>The same in both runs.</p>" : table({"key", "A", "B"}, rows, "keys"));
}

std::string first_difference_text(const FirstDifference& p) {
  if (p.common == 0) return "The runs have no step in common, so their losses cannot be compared.";
  if (!p.first)
    return p.common == 1 ? "The losses are the same at the one step that both runs have."
                         : fmt::format("The losses are the same at all {} steps that both runs have.", p.common);
  std::string text = fmt::format("The losses first differ at step {}", *p.first);
  text += p.by_one_percent ? fmt::format(", and first by more than 1% at step {}.", *p.by_one_percent)
                           : ", and never differ by more than 1%.";
  return text + fmt::format(" {} {} common to both.", counted(p.common, "step"), p.common == 1 ? "is" : "are");
}

// One run's cards with tables for events, ranks, fallbacks and stack dumps; empty tables are left out.
std::string part(const ReportRun& run, const std::string& tag) {
  const Json& d = run.data;
  std::string out;
  if (!d["events"].empty()) out += card("Events" + tag, events_table(d));
  if (!d["ranks"].empty()) out += card("Ranks" + tag, ranks_table(d));
  if (!d["fallbacks"].empty()) out += card("Fallbacks: calls that no fast kernel could take" + tag, fallbacks_table(d));
  if (!d["stackdumps"].empty()) {
    std::vector<std::vector<std::string>> rows;
    for (const Json& name : d["stackdumps"]) rows.push_back({text_of(name)});
    out += card("Stack dumps" + tag, table({"file"}, rows));
  }
  return out;
}

// Why runs have failed, at the page's top.
std::string failures(const std::vector<ReportRun>& runs) {
  std::string out;
  for (const ReportRun& run : runs) {
    if (!run.status.failed) continue;
    const std::string& label = run.data["label"].get_ref<const std::string&>();
    out += fmt::format("<p class=\"failed\" role=\"alert\"><b>{}{}</b>{}</p>\n", label.empty() ? "" : html(label) + " ",
                       html(run.status.text), run.status.reason.empty() ? "" : ": " + html(run.status.reason));
  }
  return out;
}

std::string head(const Page& page) {
  const std::vector<ReportRun>& runs = page.runs;
  if (runs.size() == 1 && page.folder.empty())
    return fmt::format("<h1>{}</h1>\n", html(runs[0].folder)) + failures(runs) + kContents + tiles(facts_of(runs[0]));
  if (runs.size() != 2 || !page.folder.empty())
    return fmt::format("<h1>{}</h1>\n", page.folder.empty() ? counted(runs.size(), "run")
                                                            : html(page.folder) + ", " + counted(runs.size(), "run")) +
           kContents + runs_table(page);
  const ReportRun &a = runs[0], &b = runs[1];
  std::string out = "<h1>Two runs</h1>\n";
  for (size_t i = 0; i < runs.size(); ++i)
    out += fmt::format("<p class=\"run\"><i class=\"s{}\"></i><b>{}</b> {}</p>\n", i, "AB"[i], html(runs[i].folder));
  out += failures(runs) + kContents;
  std::string cards = card("Results", facts_table(facts_of(a), facts_of(b)) + "<p>" +
                                          html(first_difference_text(first_difference_of(a, b))) + "</p>");
  cards += differences_card("config.json", a.config, b.config);
  return out + group("What differs", cards + differences_card("env.json", a.environment, b.environment));
}

// The results of `triad eval` on a run's weights, the newest first.
std::string evaluations_table(const Json& evaluations) {
  std::vector<std::vector<std::string>> rows;
  for (const Json& e : evaluations) {
    const Json data = e["data"];
    std::string files;
    for (const Json& file : data.is_array() ? data : Json::array({data}))
      files += (files.empty() ? "" : ", ") + text_of(file);
    rows.insert(rows.begin(),
                {text_of(e["time"]), text_of(e.value("step", Json())), files, number(e["loss"], "{:.4f}"),
                 number(e.value("ppl", Json()), "{:.3f}"), number(e.value("bits_per_byte", Json()), "{:.4f}"),
                 number(e.value("positions", Json()), "{:.0f}")});
  }
  return table({"time", "step", "data", "loss", "perplexity", "bits per byte", "positions"}, rows, "evaluations");
}

}  // namespace

std::string report_page(Page& page) {
  std::vector<ReportRun>& runs = page.runs;
  name_runs(page);
  const bool both = runs.size() == 2 && page.folder.empty();
  const auto tag = [&](size_t i) {
    const std::string label = runs[i].data["label"];
    return label.empty() ? label : " " + label;
  };
  std::string title = !page.folder.empty() ? page.folder : runs[0].folder;
  if (page.folder.empty() && runs.size() > 1)
    title += both ? " and " + runs[1].folder : fmt::format(" and {} more", runs.size() - 1);
  std::string out =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
      html(title) + " · triad report</title>\n<style>\n" + kReportStyle + "</style></head><body>\n<main>\n" +
      head(page);
  out += "<noscript><p class=\"warn\">The charts need JavaScript; the tables do not.</p></noscript>\n";
  out += "<div id=\"charts\"></div>\n";
  std::string evaluations, needles, events, files;
  if (runs.size() > 2 || !page.folder.empty()) files += differing_keys_card(runs);
  for (size_t i = 0; i < runs.size() && page.folder.empty(); ++i) {
    const Json& results = runs[i].data["evaluations"];
    if (!results.empty()) evaluations += card("triad eval" + tag(i), evaluations_table(results));
    if (!runs[i].needle.empty()) needles += card("triad eval --needle" + tag(i), runs[i].needle, false);
    events += part(runs[i], tag(i));
    files += object_card("config.json" + tag(i), runs[i].config);
    files += object_card("env.json" + tag(i), runs[i].environment);
  }
  out += group("Evaluations", evaluations) + group("Needle recall by depth and length", needles, "halves") +
         group("What happened", events) + group(page.folder.empty() ? "Config and environment" : "Config", files) +
         "</main>\n";
  Json data = Json::array();
  for (const ReportRun& run : runs) data.push_back(run.data);
  const FirstDifference first_difference = both ? first_difference_of(runs[0], runs[1]) : FirstDifference{};
  const auto step = [](const std::optional<int64_t>& s) { return s ? Json(*s) : Json(); };
  out += data_element("data", data);
  out += data_element("first_difference", {{"first", step(first_difference.first)},
                                           {"by_one_percent", step(first_difference.by_one_percent)}});
  out += data_element("difference", both ? loss_difference(runs[0], runs[1]) : Json());
  out += data_element("page", {{"refresh_s", page.refresh_s}, {"written", page.refresh_s > 0 ? time_text() : ""}});
  return out + "<script>\n" + kReportScript + "</script>\n</body></html>\n";
}

}  // namespace triad
