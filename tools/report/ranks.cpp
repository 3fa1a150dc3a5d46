#include "tools/report/ranks.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <regex>
#include <string_view>
#include <utility>

#include "engine/check.h"
#include "engine/comm/launch_env.h"
#include "engine/process/parse.h"
#include "engine/process/text.h"
#include "io/folder_lock.h"
#include "tools/csv_table.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

constexpr int kKnownHeartbeatSchema = 1;

// Heartbeat keys whose numbers the report draws as lines, one per rank.
constexpr const char* kHeartbeatLines[] = {"step_ms",           "compute_ms",     "update_ms",         "fetch_ms",
                                           "comm_wait_ms",      "tokens_per_s",   "host_mib",          "gpu_used_mib",
                                           "gpu_util_pct",      "power_w",        "gpu_mem_alloc_mib", "sel_overlap",
                                           "sel_forced_frac",   "gate_dead_frac", "docs_per_row",      "docs_cut_share",
                                           "docs_padded_share", "index_loss",     "index_grad_norm"};

// Those of each step that are drawn for the whole run, from the first rank.
constexpr const char* kStepLines[] = {"loss", "lr", "grad_norm", "tokens_per_s"};

// Removes points from this step on, because a resumed run repeats steps and the last repetition counts.
void forget_from(Points& points, int64_t step) {
  while (!points.empty() && points.back().first >= static_cast<double>(step)) points.pop_back();
}

void add_step(FirstRank& first, int64_t step, const Json& line, double seconds) {
  const auto at = static_cast<double>(step);
  for (const char* key : kStepLines) {
    Points& points = first.steps[key];
    forget_from(points, step);
    // A loss that is not a number leaves a gap; the other keys are younger than some runs.
    if (const double value = number_in(line, key); key == kStepLines[0] || std::isfinite(value))
      points.emplace_back(at, value);
  }
  forget_from(first.clock, step);
  if (seconds > 0) first.clock.emplace_back(at, seconds);
  std::vector<LayerValue>& norms = first.gradient_norms;
  while (!norms.empty() && norms.back().step >= at) norms.pop_back();
  if (const auto it = line.find("layer_grad_norms"); it != line.end() && it->is_array())
    for (size_t i = 0; i < it->size(); ++i)
      if ((*it)[i].is_number()) norms.push_back({at, static_cast<double>(i), (*it)[i].get<double>()});
}

void add_evaluation(FirstRank& first, int64_t step, const Json& line) {
  forget_from(first.bits_per_byte, step);
  const double bits = number_in(line, "bits_per_byte"), loss = number_in(line, "val_loss");
  if (!std::isfinite(bits)) return;
  first.bits_per_byte.emplace_back(static_cast<double>(step), bits);
  if (loss > 0) first.bits_per_nat = bits / loss;
}

std::string word_in(const Json& line, const char* key) {
  const auto it = line.find(key);
  return it != line.end() && it->is_string() ? it->get<std::string>() : std::string();
}

Json json_or_nothing(const std::string& text) {
  try {
    return parse_json(text, "a line");
  } catch (const Error&) { return {}; }
}

// Reads a rank's heartbeats and returns {rank, last, state, means, lines}. Appends the events to `events`; fills
// `first` if it is not null.
Json rank_of(const std::string& path, int64_t rank, FirstRank* first, Json& events) {
  std::map<std::string, Points> lines;
  Json last;
  std::string state;                 // the last heartbeat's message that describes the rank's state
  double seconds = 0, before = NAN;  // running time; the previous heartbeat's time stamp
  const std::vector<std::string> text = whole_lines(path);
  for (size_t i = 0; i < text.size(); ++i) {
    const Json line = json_or_nothing(text[i]);
    const bool whole = line.is_object() && line.contains("step") && line["step"].is_number_integer() &&
                       line.contains("msg") && line["msg"].is_string();
    if (!whole) {
      fmt::print(stderr, "triad: {} line {} is left out: \"{}\" is no heartbeat (an object with step and msg)\n",
                 printable(path), i + 1, shortened(text[i]));
      continue;
    }
    if (const double schema = number_in(line, "schema"); schema > kKnownHeartbeatSchema)
      fail("{} line {}: its schema is {}, and this program knows those up to {}", path, i + 1, schema,
           kKnownHeartbeatSchema);
    const auto step = line["step"].get<int64_t>();
    const auto msg = line["msg"].get<std::string>();
    last = line;
    const double now = number_in(line, "ts");
    if (msg != "boot" && now > before) seconds += now - before;
    before = now;
    if (msg != "stackdump" && msg != "progress" && msg != "checkpoint" && msg != "stage" && msg != "lr_jump" &&
        msg != "evaluation")
      state = msg;  // the other messages do not change a rank's state
    if (msg == "step_end") {
      for (auto& [key, points] : lines) forget_from(points, step);
      for (const char* key : kHeartbeatLines)
        if (const double value = number_in(line, key); std::isfinite(value))
          lines[key].emplace_back(static_cast<double>(step), value);
      if (first != nullptr) add_step(*first, step, line, seconds);
    } else if (msg == "evaluation") {
      if (first != nullptr) add_evaluation(*first, step, line);
    } else if (msg != "progress") {
      Json event = {
          {"rank", rank}, {"step", step}, {"kind", msg}, {"ts", number_or_null(now)}, {"time", word_in(line, "iso")}};
      std::string about;
      for (const auto& [key, value] : line.items())
        if (key == "type" || key == "text" || key == "at" || key == "why" || key == "folder" || key == "file" ||
            key == "step_s" || key == "still_s")
          about += fmt::format("{}{}: {}", about.empty() ? "" : "; ", key,
                               value.is_string() ? value.get<std::string>() : brief(value));
      event["text"] = about;
      events.push_back(event);
    }
  }
  Json out = {{"rank", rank}, {"last", last}, {"state", state}, {"means", Json::object()}, {"lines", Json::object()}};
  for (const auto& [key, points] : lines) {
    double sum = 0;
    for (const auto& point : points) sum += point.second;
    out["means"][key] = sum / static_cast<double>(points.size());
    out["lines"][key] = thinned(points);
  }
  return out;
}

}  // namespace

double number_in(const Json& line, const char* key) {
  const auto it = line.find(key);
  return it != line.end() && it->is_number() ? it->get<double>() : NAN;
}

FirstRank add_ranks(Json& d, const std::string& folder) {
  static const std::regex kHeartbeats("heartbeat_rank(\\d+)\\.jsonl");
  std::map<int64_t, std::string> ranks;
  Json dumps = Json::array();
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    std::smatch match;
    if (std::regex_match(name, match, kHeartbeats))
      if (const auto rank = parse_number<int64_t>(match[1].str())) ranks[*rank] = entry.path().string();
    if (name.starts_with("stackdump_rank")) dumps.push_back(name);
  }
  std::sort(dumps.begin(), dumps.end());
  d["stackdumps"] = dumps;
  d["events"] = d["ranks"] = Json::array();
  FirstRank first;
  for (const auto& [rank, path] : ranks)
    d["ranks"].push_back(rank_of(path, rank, rank == 0 ? &first : nullptr, d["events"]));
  // By time, those without a time first, by step.
  const auto time = [](const Json& event) { return event["ts"].is_number() ? event["ts"].get<double>() : -INFINITY; };
  std::stable_sort(d["events"].begin(), d["events"].end(), [&](const Json& a, const Json& b) {
    return std::pair(time(a), a["step"].get<int64_t>()) < std::pair(time(b), b["step"].get<int64_t>());
  });
  return first;
}

namespace {

// The text of the last event of a kind; empty if there is none.
std::string last_text(const Json& events, const std::string& kind) {
  std::string text;
  for (const Json& event : events)
    if (event["kind"] == kind) text = event["text"].get<std::string>();
  for (const std::string_view key : {"why: ", "text: "})
    if (text.starts_with(key)) text.erase(0, key.size());
  return text;
}

// Whether a process trains in the folder. One on another host may hold a lock that this one does not see.
bool is_held(const std::string& folder, const Json& environment, const Json& last) {
  if (!lock_holder(folder).empty()) return true;
  if (environment.is_object() && word_in(environment, "host") == host_name()) return false;
  constexpr double kFresh = 120;  // seconds; a run writes a heartbeat a minute
  const double now = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  return now - number_in(last, "ts") < kFresh;
}

}  // namespace

Status status_of(const Json& d, const Json& config, const Json& environment, const std::string& folder) {
  if (d.contains("stopped_by")) {
    const std::string type = d["stopped_by"].get<std::string>();
    const size_t line = type.find('\n');
    const std::string text = last_text(d["events"], "anomaly");
    return {"stopped: " + type.substr(0, line),
            line == std::string::npos || line + 1 >= type.size() ? text : type.substr(line + 1), true, false};
  }
  if (d["ranks"].empty()) return {d["metrics"].is_null() ? "" : "complete", "", false, false};
  for (const Json& rank : d["ranks"])
    if (rank["state"] == "failed") return {"failed", last_text(d["events"], "failed"), true, false};
  const Json& first = d["ranks"][0];
  const std::string state = first["state"];
  const Json train = config.is_object() ? config.value("train", Json()) : Json();
  const bool stops = train.is_object() && train.value("on_nonfinite", Json()) == "stop";
  if (state == "divergence" || state == "hung" || (state == "nonfinite" && stops))
    return {"failed: " + state, last_text(d["events"], state), true, is_held(folder, environment, first["last"])};
  if (state == "done") return {"complete", "", false, false};
  if (state == "stopped") return {"stopped", last_text(d["events"], "stopped"), false, false};
  if (is_held(folder, environment, first["last"])) return {"running", "", false, true};
  const std::string when = first["last"].is_object() ? word_in(first["last"], "iso") : "";
  return {"killed",
          fmt::format("no process trains here, and the last heartbeat{}, at step {}, is no end",
                      when.empty() ? "" : ", of " + when,
                      first["last"].is_object() ? first["last"]["step"].get<int64_t>() : 0),
          true, false};
}

}  // namespace triad
