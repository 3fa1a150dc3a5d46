#include "tools/report/overview.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <system_error>

#include "engine/process/counted.h"
#include "tools/report/facts.h"
#include "tools/report/html.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

constexpr size_t kMostKeys = 6;  // most columns of differing keys; the card below the charts has all

// A path as a link's address: bytes that are not plain are written %xx.
std::string address(const std::string& path) {
  std::string out;
  for (const char c : path) {
    const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '/' ||
                       c == '.' || c == '-' || c == '_';
    out += plain ? std::string(1, c) : fmt::format("%{:02X}", static_cast<unsigned char>(c));
  }
  return out;
}

// The run's name, as a link to its report if it has one.
std::string linked_name(const ReportRun& run, const std::string& page) {
  const std::string name = html(run.data["label"].get<std::string>());
  const fs::path report = fs::path(run.folder) / "report.html";
  std::error_code unknown;
  if (!fs::exists(report, unknown)) return name;
  const fs::path from = fs::absolute(page).parent_path();
  const fs::path to = fs::proximate(fs::absolute(report), from, unknown);
  return fmt::format("<a href=\"{}\">{}</a>", address(to.string()), name);
}

struct Cell {
  std::string text;
  double sorted = NAN;  // what the column is sorted by; NaN: its text
};

std::string cell(const std::string& column, const Cell& c, bool warns = false) {
  return fmt::format("<td data-name=\"{}\"{}{}>{}</td>", html(column),
                     std::isfinite(c.sorted) ? fmt::format(" data-sorted=\"{:.17g}\"", c.sorted) : "",
                     warns ? " class=\"warn\"" : "", html(c.text.empty() ? "–" : c.text));
}

// A heading that may be broken after the parts of its name.
std::string heading(const std::string& name) {
  std::string out;
  for (const char c : name) out += html(std::string(1, c)) + (c == '.' || c == '_' ? "<wbr>" : "");
  return "<th scope=\"col\">" + out + "</th>";
}

// Whether a key may change what a run learns or how fast; the others need no column.
bool changes_results(const std::string& key) {
  for (const char* other : {"log.", "train.save_", "train.keep_", "train.eval_", "train.allow_unsafe", "data.stall_s"})
    if (key.starts_with(other)) return false;
  return true;
}

std::string short_value(const Json& value) {
  const std::string text = text_of(value);
  constexpr size_t kLongest = 40;
  return text.size() > kLongest ? shortened(text, kLongest) : text;
}

}  // namespace

void name_runs(Page& page) {
  std::vector<ReportRun>& runs = page.runs;
  const bool named = page.folder.empty();
  for (size_t i = 0; i < runs.size(); ++i) {
    std::string label;
    if (named && runs.size() == 2) label = i == 0 ? "A" : "B";
    if (!named || runs.size() > 2) {
      const auto end_of = [](const ReportRun& run, size_t parts) {
        fs::path rest = fs::weakly_canonical(run.folder), end;
        for (; parts > 0 && rest.has_filename(); --parts, rest = rest.parent_path())
          end = end.empty() ? rest.filename() : rest.filename() / end;
        return end.string();
      };
      size_t parts = 1;
      const auto is_taken = [&](const ReportRun& other) {
        return &other != &runs[i] && end_of(other, parts) == end_of(runs[i], parts);
      };
      constexpr size_t kMost = 8;  // a run that is given twice keeps its name
      while (parts < kMost && std::any_of(runs.begin(), runs.end(), is_taken)) ++parts;
      label = end_of(runs[i], parts);
    }
    runs[i].data["label"] = label;
  }
}

std::string runs_table(const Page& page) {
  std::vector<DifferingKey> keys = differing_keys(page.runs);
  const auto shown = [](const DifferingKey& key) { return changes_results(key.key); };
  std::stable_partition(keys.begin(), keys.end(), shown);
  keys.resize(std::min(kMostKeys, static_cast<size_t>(std::count_if(keys.begin(), keys.end(), shown))));
  constexpr const char* kFacts[] = {"last loss", "validation loss", "bits per byte", "tokens/s at the end",
                                    "wall time"};
  std::vector<std::vector<Fact>> facts;
  for (const ReportRun& run : page.runs) facts.push_back(facts_of(run));
  const auto find = [&](size_t i, const std::string& name) {
    const auto at = std::find_if(facts[i].begin(), facts[i].end(), [&](const Fact& f) { return f.name == name; });
    return at == facts[i].end() ? Cell{} : Cell{at->text, at->number};
  };
  std::vector<std::string> columns = {"state", "steps", "loss by step"};
  for (const char* fact : kFacts) {
    bool any = false;
    for (size_t i = 0; i < facts.size(); ++i) any = any || !find(i, fact).text.empty();
    if (any) columns.emplace_back(fact);
  }
  std::string out =
      "<div class=\"card scroll\" tabindex=\"0\"><table class=\"runs\"><thead><tr><th scope=\"col\">run</th>";
  for (const std::string& name : columns) out += heading(name);
  for (const DifferingKey& key : keys) out += heading(key.key);
  out += "</tr></thead><tbody>\n";
  for (size_t i = 0; i < page.runs.size(); ++i) {
    const ReportRun& run = page.runs[i];
    out += fmt::format("<tr data-run=\"{}\"><th scope=\"row\">{}</th>", i, linked_name(run, page.file));
    for (const std::string& name : columns) {
      if (name == "loss by step") {
        out += fmt::format("<td data-name=\"{}\" class=\"spark\"></td>", name);
        continue;
      }
      Cell c = find(i, name);
      if (name == "state" && !run.status.reason.empty()) c.text += ": " + shortened(run.status.reason, 120);
      if (name == "steps" && !run.losses.empty()) c.sorted = run.losses.back().first;
      out += cell(name, c, name == "state" && run.status.failed);
    }
    for (const DifferingKey& key : keys) {
      const Json& value = key.values[i];
      out += cell(key.key, {short_value(value), value.is_number() ? value.get<double>() : NAN});
    }
    out += "</tr>\n";
  }
  for (const auto& [folder, why] : page.unread)
    out += fmt::format(
        "<tr><th scope=\"row\">{}</th><td data-name=\"state\" class=\"warn\" colspan=\"{}\">not read: {}</td></tr>\n",
        html(fs::path(folder).filename().string()), columns.size() + keys.size(), html(why));
  return out + "</tbody></table></div>\n";
}

std::string differing_keys_card(const std::vector<ReportRun>& runs) {
  std::vector<std::vector<std::string>> rows;
  for (const DifferingKey& key : differing_keys(runs)) {
    std::vector<std::pair<Json, std::vector<std::string>>> values;  // each value, and the runs that have it
    for (size_t i = 0; i < runs.size(); ++i) {
      const auto same = [&](const auto& entry) { return entry.first == key.values[i]; };
      auto at = std::find_if(values.begin(), values.end(), same);
      if (at == values.end()) at = values.emplace(at, key.values[i], std::vector<std::string>());
      at->second.push_back(runs[i].data["label"].get<std::string>());
    }
    for (size_t v = 0; v < values.size(); ++v)
      rows.push_back(
          {v == 0 ? key.key : "", text_of(values[v].first), fmt::format("{}", fmt::join(values[v].second, ", "))});
  }
  return rows.empty() ? "" : card("config.json: keys that differ", table({"key", "value", "runs"}, rows, "keys"));
}

void make_lean(ReportRun& run, size_t runs) {
  constexpr size_t kAllPoints = 12000, kFewest = 100, kMost = 1500;
  const size_t most = std::clamp(kAllPoints / std::max<size_t>(1, runs), kFewest, kMost);
  Json& d = run.data;
  for (const char* key : {"loss", "lr", "tokens_per_s", "grad_norm", "step_ms", "mfu"})
    d["training"][key] = thinned(d["training"][key], most);
  for (const char* key : {"validation", "clock", "bits_per_byte"}) d[key] = thinned(d[key], most);
  for (const char* key : {"ranks", "memory", "samples", "evaluations", "positions", "stackdumps", "fallbacks"})
    d[key] = Json::array();
  for (const char* key : {"gates", "selection"}) d[key] = Json::object();
  for (const char* key : {"sample", "lengths", "index", "gradient_norms"}) d[key] = nullptr;
}

}  // namespace triad
