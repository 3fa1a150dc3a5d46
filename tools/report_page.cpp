#include "tools/report_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace triad {

namespace {

// Text of files and names of folders, as HTML's text and attributes.
std::string html(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// JSON inside a script element, which nothing in it may end.
std::string script_json(const Json& value) {
  std::string out;
  for (const char c : dump_json(value, -1)) {
    if (c == '<' || c == '>' || c == '&')
      out += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      out += c;
  }
  return out;
}

std::string text_of(const Json& value) {
  if (value.is_null()) return "–";
  return value.is_string() ? value.get<std::string>() : dump_json(value, -1);
}

std::string number(const Json& value, const char* form = "{:.4g}") {
  return value.is_number() ? fmt::format(fmt::runtime(form), value.get<double>()) : "–";
}

// kind: a class of page.css; "keys": a key and its value, either of any length; "events": its last column is of words.
std::string table(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows,
                  const char* kind = "") {
  std::string out = fmt::format("<div class=\"scroll\"><table class=\"{}\"><thead><tr>", kind);
  for (const std::string& name : header) out += "<th scope=\"col\">" + html(name) + "</th>";
  out += "</tr></thead><tbody>\n";
  for (const auto& row : rows) {
    out += "<tr>";
    for (const std::string& field : row) out += "<td>" + html(field) + "</td>";
    out += "</tr>\n";
  }
  return out + "</tbody></table></div>\n";
}

std::string card(const std::string& title, const std::string& body, bool wide = true) {
  return fmt::format("<section class=\"card{}\"><h3>{}</h3>{}</section>\n", wide ? " wide" : "", html(title), body);
}

std::string tile(const std::string& value, const std::string& name, bool warn = false) {
  return fmt::format("<div class=\"tile\"><b{}>{}</b><span>{}</span></div>", warn ? " class=\"warn\"" : "", html(value),
                     html(name));
}

Json last_value(const Json& points) { return points.empty() ? Json() : points.back()[1]; }

bool is_anomaly(const Json& event) {
  const std::string kind = event["kind"];
  return kind == "anomaly" || kind == "slow" || kind == "hung" || kind == "nonfinite" || kind == "divergence";
}

std::string state_of(const ReportRun& run) {
  const Json& d = run.data;
  if (d.contains("stopped_by"))
    return "stopped: " + d["stopped_by"].get<std::string>().substr(0, d["stopped_by"].get<std::string>().find('\n'));
  if (d["ranks"].empty()) return d["metrics"].is_null() ? "no heartbeats" : "complete";
  const std::string msg = d["ranks"][0]["state"];
  const bool stops = run.config.contains("train") && run.config["train"].value("on_nonfinite", Json()) == "stop";
  if (msg == "divergence" || msg == "hung" || (msg == "nonfinite" && stops)) return "failed: " + msg;
  return msg == "done" ? "complete" : msg == "stopped" ? "stopped" : "running, or killed";
}

std::string tiles(const ReportRun& run) {
  const Json& d = run.data;
  int64_t anomalies = 0;
  for (const Json& event : d["events"]) anomalies += is_anomaly(event);
  const Json steps = run.losses.empty() ? Json() : Json(run.losses.back().first);
  const Json loss = run.losses.empty() ? Json() : Json(run.losses.back().second);
  const Json wanted = run.config.contains("train") ? run.config["train"].value("steps", Json()) : Json();
  std::string out = "<div class=\"tiles\">";
  out += tile(state_of(run), "state");
  out += tile(text_of(steps) + " / " + text_of(wanted), "steps");
  out += tile(number(loss, "{:.4f}"), "last loss");
  out += tile(number(last_value(d["validation"]), "{:.4f}"), "last validation loss");
  out += tile(number(last_value(d["training"]["tokens_per_s"]), "{:.0f}"), "tokens/s at the end");
  out += tile(number(d["metrics"].is_null() ? Json() : d["metrics"].value("peak_mib", Json()), "{:.0f}"), "peak MiB");
  out += tile(std::to_string(d["ranks"].size()), "ranks with heartbeats");
  out += tile(std::to_string(anomalies), "anomalies", anomalies > 0);
  return out + "</div>\n";
}

std::string events_table(const Json& d) {
  std::vector<std::vector<std::string>> rows;
  for (const Json& e : d["events"]) {
    std::string when = text_of(e["time"]);
    std::replace(when.begin(), when.end(), 'T', ' ');  // a narrow window breaks it there
    rows.push_back({text_of(e["step"]), text_of(e["rank"]), text_of(e["kind"]), when, text_of(e["text"])});
  }
  constexpr size_t kMostRows = 400;
  std::string more;
  if (rows.size() > kMostRows) {
    more = fmt::format("<p class=\"faint\">The last {} of {}.</p>", kMostRows, rows.size());
    rows.erase(rows.begin(), rows.end() - kMostRows);
  }
  if (rows.empty()) return "<p class=\"none\">No heartbeat tells of one.</p>";
  return more + table({"step", "rank", "what", "when", "about"}, rows, "events");
}

std::string ranks_table(const Json& d) {
  if (d["ranks"].empty()) return "<p class=\"none\">This run has no heartbeats (log.heartbeat_every).</p>";
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
  return table({"rank", "last step", "last word", "step ms", "compute ms", "comm wait ms", "fetch ms", "host MiB",
                "GPU MiB", "GPU %", "W"},
               rows);
}

std::string fallbacks_table(const Json& d) {
  if (d["fallbacks"].empty()) return "<p class=\"none\">None was counted.</p>";
  std::vector<std::vector<std::string>> rows;
  for (const Json& f : d["fallbacks"]) rows.push_back({text_of(f["what"]), number(f["count"], "{:.0f}")});
  return table({"kernel and reason", "calls"}, rows);
}

// Every value of an object under its key, group by group.
std::string object_table(const Json& object) {
  if (object.is_null()) return "<p class=\"none\">This run has no such file.</p>";
  std::vector<std::vector<std::string>> rows;
  for (const Difference& d : differences_of(object, Json::object())) rows.push_back({d.key, text_of(d.a)});
  return table({"key", "value"}, rows, "keys");
}

std::string differences_card(const char* title, const Json& a, const Json& b) {
  std::vector<std::vector<std::string>> rows;
  for (const Difference& d : differences_of(a, b)) rows.push_back({d.key, text_of(d.a), text_of(d.b)});
  return card(title, rows.empty() ? "<p class=\"none\">Nothing.</p>" : table({"key", "A", "B"}, rows, "keys"));
}

std::string parting_text(const Parting& p) {
  if (p.common == 0) return "The runs have no step in common, so their losses cannot be compared.";
  if (!p.first) return fmt::format("The losses are the same at all {} steps that both runs have.", p.common);
  std::string text = fmt::format("The losses part at step {}", *p.first);
  text += p.by_a_percent ? fmt::format(", and differ by more than 1% first at step {}.", *p.by_a_percent)
                         : ", and never differ by more than 1%.";
  return text + fmt::format(" {} steps are common to both.", p.common);
}

std::string part(const ReportRun& run, const std::string& tag) {
  const Json& d = run.data;
  std::string out = card("Events" + tag, events_table(d));
  out += card("Ranks side by side" + tag, ranks_table(d));
  out += card("Fallbacks" + tag, fallbacks_table(d));
  if (!d["stackdumps"].empty()) {
    std::vector<std::vector<std::string>> rows;
    for (const Json& name : d["stackdumps"]) rows.push_back({text_of(name)});
    out += card("Stack dumps" + tag, table({"file"}, rows));
  }
  return out;
}

}  // namespace

std::string report_page(const std::vector<ReportRun>& runs) {
  const bool both = runs.size() == 2;
  const auto tag = [&](size_t i) { return both ? std::string(i == 0 ? " A" : " B") : ""; };
  const Parting parting = both ? parting_of(runs[0], runs[1]) : Parting{};
  std::string title = runs[0].folder + (both ? " and " + runs[1].folder : "");
  std::string out =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
      html(title) + " · triad report</title>\n<style>\n" + kReportStyle + "</style></head><body>\n<main>\n";
  for (size_t i = 0; i < runs.size(); ++i)
    out += fmt::format("<h1>{}{}</h1>\n", both ? (i == 0 ? "A: " : "B: ") : "", html(runs[i].folder)) + tiles(runs[i]);
  if (both) {
    out += "<h2>What differs</h2><div class=\"grid\">\n" + card("Losses", "<p>" + html(parting_text(parting)) + "</p>");
    out += differences_card("config.json", runs[0].config, runs[1].config);
    out += differences_card("env.json", runs[0].environment, runs[1].environment) + "</div>\n";
  }
  out += "<noscript><p class=\"warn\">The charts need JavaScript; the tables below do not.</p></noscript>\n";
  out += "<div id=\"charts\"></div>\n";
  if (std::any_of(runs.begin(), runs.end(), [](const ReportRun& run) { return !run.needle.empty(); })) {
    out += "<h2>What it recalls, by depth and length</h2><div class=\"grid halves\">\n";
    for (size_t i = 0; i < runs.size(); ++i)
      out += card("triad eval --needle" + tag(i),
                  runs[i].needle.empty() ? "<p class=\"none\">This run has no needle.csv.</p>" : runs[i].needle, false);
    out += "</div>\n";
  }
  out += "<h2>What happened</h2><div class=\"grid\">\n";
  for (size_t i = 0; i < runs.size(); ++i) out += part(runs[i], tag(i));
  out += "</div>\n<h2>Config and environment</h2><div class=\"grid halves\">\n";
  for (size_t i = 0; i < runs.size(); ++i) {
    out += card("config.json" + tag(i), object_table(runs[i].config), false);
    out += card("env.json" + tag(i), object_table(runs[i].environment), false);
  }
  out += "</div>\n</main>\n";
  Json data = Json::array();
  for (const ReportRun& run : runs) data.push_back(run.data);
  const auto step = [](const std::optional<int64_t>& s) { return s ? Json(*s) : Json(); };
  out += "<script type=\"application/json\" id=\"data\">" + script_json(data) + "</script>\n";
  out += "<script type=\"application/json\" id=\"parting\">" +
         script_json({{"first", step(parting.first)}, {"by_a_percent", step(parting.by_a_percent)}}) + "</script>\n";
  return out + "<script>\n" + kReportScript + "</script>\n</body></html>\n";
}

}  // namespace triad
