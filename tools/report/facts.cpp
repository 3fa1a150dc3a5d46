#include "tools/report/facts.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/process/counted.h"
#include "model/params.h"
#include "train/config/load_config.h"

namespace triad {

namespace {

// The value object[group][key], or null if it does not exist.
Json value_of(const Json& object, const char* group, const char* key) {
  if (!object.is_object() || !object.contains(group) || !object[group].is_object()) return {};
  return object[group].value(key, Json());
}

std::string word(const Json& value) { return value.is_string() ? value.get<std::string>() : std::string(); }

std::string grouped(double x) {
  std::string digits = fmt::format("{:.0f}", std::abs(x));
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > 0; at -= 3)
    digits.insert(static_cast<size_t>(at), ",");
  return (x < 0 ? "-" : "") + digits;
}
std::string four_places(double x) { return fmt::format("{:.4f}", x); }
std::string duration(double s) {
  const auto t = static_cast<int64_t>(std::abs(s));
  const char* const sign = s < 0 ? "-" : "";
  if (t >= 3600) return fmt::format("{}{} h {:02} min", sign, t / 3600, t / 60 % 60);
  if (t >= 60) return fmt::format("{}{} min {:02} s", sign, t / 60, t % 60);
  return t > 0 ? fmt::format("{:.1f} s", s) : fmt::format("{:.0f} ms", 1e3 * s);
}

bool is_anomaly(const Json& event) {
  const std::string kind = event["kind"];
  return kind == "anomaly" || kind == "slow" || kind == "hung" || kind == "nonfinite" || kind == "divergence";
}

// An entry of data.paths: a string, or a component's object, of which the first path is taken.
std::string path_of(const Json& entry) {
  const Json path = entry.is_object() ? entry.value("path", Json()) : entry;
  return word(path.is_array() && !path.empty() ? path[0] : path);
}

// What a run has drawn from a mixture's components: "a.txt 70.0% of the rows, 0.35 epochs; ..."; empty without one.
std::string mixture_of(const Json& table) {
  std::string text;
  for (const Json& component : table.is_array() ? table : Json::array()) {
    if (!component.is_object()) continue;
    const auto number = [&](const char* key) {
      const Json value = component.value(key, Json());
      return value.is_number() ? value.get<double>() : NAN;
    };
    text += fmt::format("{}{} {:.1f}% of the rows, {:.2f} epochs", text.empty() ? "" : "; ",
                        word(component.value("data", Json())), 100 * number("share"), number("epochs"));
  }
  return text;
}

std::string data_of(const Json& config) {
  const std::string kind = word(value_of(config, "data", "kind"));
  if (kind != "text" && kind != "shards") return kind;
  const Json paths = value_of(config, "data", "paths"), tokenizer = value_of(config, "data", "tokenizer");
  std::string out = kind;
  if (paths.is_array() && !paths.empty()) {
    out += " " + path_of(paths[0]);
    if (paths.size() > 1) out += fmt::format(" and {} more", paths.size() - 1);
  }
  return tokenizer.is_string() && kind == "text" ? out + ", tokenizer " + word(tokenizer) : out;
}

std::string device_of(const Json& environment) {
  if (!environment.is_object()) return {};
  const std::string device = word(environment.value("device", Json())),
                    name = word(environment.value("device_name", Json()));
  const Json world = environment.value("world", Json());
  std::string out = name.empty() ? device : device == "cpu" ? "CPU, " + name : name;
  return world.is_number() && world.get<double>() > 1 ? fmt::format("{} x {}", world.get<int64_t>(), out) : out;
}

// The commit, which is in brackets in a build's description, such as "triad 1.2 (0123456789ab)".
std::string commit_of(const Json& environment) {
  if (!environment.is_object()) return {};
  const std::string build = word(environment.value("build", Json()));
  const size_t begin = build.find('('), end = build.find(')');
  return begin != std::string::npos && end > begin ? build.substr(begin + 1, end - begin - 1) : "";
}

// A config's parameter count; NaN if this program can't read the config, for example another version's.
double parameters_of(const Json& config) {
  try {
    return static_cast<double>(count_parameters(config_from_json(config).model));
  } catch (const std::exception&) { return NAN; }
}

double last_of(const Json& points) {
  return points.empty() || !points.back()[1].is_number() ? NAN : points.back()[1].get<double>();
}

void add_losses(std::vector<Fact>& facts, const ReportRun& run) {
  const auto number = [&](const char* name, double x) { facts.push_back({name, "", x, four_places}); };
  if (!run.losses.empty()) number("last loss", run.losses.back().second);
  const Json& validation = run.data["validation"];
  const double last = last_of(validation);
  number("validation loss", last);
  number("perplexity", std::exp(last));
  const double bits = last_of(run.data["bits_per_byte"]);
  number("bits per byte", std::isfinite(bits) ? bits : last * run.bits_per_nat);
  if (has_stages(run.config)) return;  // their evaluations' row lengths may differ
  double best = NAN;
  for (const Json& point : validation)
    if (point[1].is_number()) best = std::fmin(best, point[1].get<double>());
  if (validation.size() > 1) number("best validation loss", best);
}

void add_costs(std::vector<Fact>& facts, const ReportRun& run) {
  const Json& d = run.data;
  const auto number = [&](const char* name, double x, std::string (*write)(double)) {
    facts.push_back({name, "", x, write});
  };
  const auto metric = [&](const char* key) {
    const Json value = d["metrics"].is_null() ? Json() : d["metrics"].value(key, Json());
    return value.is_number() ? value.get<double>() : NAN;
  };
  const double steps = run.losses.empty() ? NAN : static_cast<double>(run.losses.back().first);
  const double counted = d["tokens_per_step"].is_number() ? steps * d["tokens_per_step"].get<double>() : NAN;
  number("tokens", std::isfinite(metric("tokens")) ? metric("tokens") : counted, grouped);
  number("wall time", last_of(d["clock"]), duration);
  number("tokens/s at the end", last_of(d["training"]["tokens_per_s"]), grouped);
  number("peak MiB", metric("peak_mib"), grouped);
}

// "nsa", "dense", or "nsa, win in layers 2:4, dense in layers 0:2".
std::string attention_of(const Json& config) {
  const std::string kind = word(value_of(config, "model", "attention"));
  const std::string dense = word(value_of(config, "model", "dense_layers")),
                    nope = word(value_of(config, "model", "nope_layers"));
  const std::string rotation = nope.empty() ? "" : ", no rotation in layers " + nope;
  if (kind != "nsa") return kind + rotation;
  std::string text = kind;
  const Json layers = value_of(config, "nsa", "layers");
  for (const Json& entry : layers.is_array() ? layers : Json::array())
    text += fmt::format(", {} in layers {}", entry.contains("branches") ? word(entry["branches"]) : "other options",
                        entry.contains("layers") ? word(entry["layers"]) : "?");
  return text + (dense.empty() ? "" : ", dense in layers " + dense) + rotation;
}

// train.stages as text: "100 steps, attention dense, then 50 steps, seq_len 8192"; empty without them.
std::string stages_of(const Json& config) {
  const Json stages = value_of(config, "train", "stages");
  std::string text;
  for (const Json& stage : stages.is_array() ? stages : Json::array()) {
    if (!stage.is_object() || !stage.contains("steps")) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : ", then ", brief(stage["steps"]),
                        stage["steps"] == 1 ? "step" : "steps");
    for (const auto& [key, value] : stage.items())
      if (key != "steps") text += fmt::format(", {} {}", key, value.is_string() ? word(value) : brief(value));
  }
  return text;
}

}  // namespace

bool tokens_are_bytes(const Json& config) {
  const std::string kind = word(value_of(config, "data", "kind"));
  if (value_of(config, "data", "tokenizer") != "byte") return false;
  return kind == "text" || (kind == "shards" && value_of(config, "model", "vocab_size") == 256);
}

std::vector<Fact> facts_of(const ReportRun& run) {
  const Json& d = run.data;
  std::vector<Fact> facts;
  const auto text = [&](const char* name, const std::string& value) { facts.push_back({name, value}); };
  if (!run.status.text.empty()) facts.push_back({"state", run.status.text, NAN, nullptr, run.status.failed});
  if (!run.losses.empty()) {
    const Json wanted = value_of(run.config, "train", "steps");
    text("steps", grouped(static_cast<double>(run.losses.back().first)) +
                      (wanted.is_number() ? " of " + grouped(wanted.get<double>()) : ""));
  }
  add_losses(facts, run);
  facts.push_back({"parameters", "", parameters_of(run.config), grouped});
  add_costs(facts, run);
  text("attention", attention_of(run.config));
  text("stages", stages_of(run.config));
  text("precision", word(value_of(run.config, "runtime", "precision")));
  text("device", device_of(run.environment));
  text("data", data_of(run.config));
  if (!d["metrics"].is_null()) text("mixture", mixture_of(d["metrics"].value("mixture", Json())));
  text("commit", commit_of(run.environment));
  const auto count = [&](const char* name, double n, bool always) {
    if (n > 0 || always) facts.push_back({name, "", n, grouped, n > 0 && !always});
  };
  count("anomalies", static_cast<double>(std::count_if(d["events"].begin(), d["events"].end(), is_anomaly)), false);
  double fallbacks = 0;
  for (const Json& f : d["fallbacks"]) fallbacks += f["count"].get<double>();
  count("calls of slower kernels", fallbacks, false);
  std::erase_if(facts, [](const Fact& f) { return f.text.empty() && !std::isfinite(f.number); });
  for (Fact& f : facts)
    if (f.text.empty()) f.text = f.write(f.number);
  return facts;
}

}  // namespace triad
