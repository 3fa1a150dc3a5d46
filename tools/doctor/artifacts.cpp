#include "tools/doctor/artifacts.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "engine/check.h"
#include "io/file.h"
#include "io/weight_index.h"
#include "tools/csv_table.h"

namespace triad {

namespace {

std::vector<double> numbers_of(const SafetensorsFile& file, const TensorEntry& entry) {
  const std::vector<std::byte> bytes = file.read(entry);
  std::vector<double> numbers(static_cast<size_t>(entry.numel()));
  const auto copy = [&]<class T>(T value) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
      numbers[i] = static_cast<double>(value);
    }
  };
  if (entry.dtype == "F32")
    copy(float{});
  else if (entry.dtype == "F64")
    copy(double{});
  else if (entry.dtype == "I32")
    copy(int32_t{});
  else
    fail("{}: {} is {}: F32, F64 or I32 was expected", file.path(), entry.name, entry.str());
  // Searches for NaN and infinity before any comparison, so that the error names the element. A later sum or maximum
  // would not show which element was NaN.
  const auto odd = std::find_if(numbers.begin(), numbers.end(), [](double x) { return !std::isfinite(x); });
  TRIAD_CHECK(odd == numbers.end(), "{}: {} has {} at element {}", file.path(), entry.name, *odd,
              odd - numbers.begin());
  return numbers;
}

Json json_file(const std::string& path) { return parse_json(read_file(path), path); }

void read_heartbeats(TrainedRun& run, int rank, int64_t steps) {
  const std::string path = run.file(fmt::format("heartbeat_rank{}.jsonl", rank));
  std::string last;
  for (const std::string& line : whole_lines(path)) {
    const Json beat = parse_json(line, path);
    last = beat.value("msg", "");
    run.slow_steps += last == "slow";
    if (last != "step_end") continue;
    run.fallbacks = std::max(run.fallbacks, beat.value("fb_total", int64_t{0}));
    for (const auto& [key, value] : beat.items())
      if (key.starts_with("gpu_") && value.is_number()) run.gpu_fields[key] = value.get<double>();
    if (rank != 0) continue;
    TRIAD_CHECK(beat["loss"].is_number() && beat["grad_norm"].is_number(), "{}: step {} has loss {} and norm {}", path,
                brief(beat["step"]), brief(beat["loss"]), brief(beat["grad_norm"]));
    run.losses.push_back(beat["loss"]);
    run.norms.push_back(beat["grad_norm"]);
  }
  TRIAD_CHECK(last == "done", "{}: the last heartbeat is \"{}\", not \"done\"", path, last);
  if (rank == 0)
    TRIAD_CHECK(static_cast<int64_t>(run.losses.size()) == steps, "{}: {} of {} steps", path, run.losses.size(), steps);
}

}  // namespace

TrainedRun read_trained(const std::string& folder, int64_t steps, int ranks) {
  TrainedRun run;
  run.folder = folder;
  run.config = json_file(run.file("config.json"));
  run.env = json_file(run.file("env.json"));
  run.metrics = json_file(run.file("metrics.json"));
  TRIAD_CHECK(run.metrics["step"] == steps, "{}: step {}, not {}", run.file("metrics.json"), brief(run.metrics["step"]),
              steps);
  TRIAD_CHECK(run.env["world"] == ranks, "{}: world {}, not {}", run.file("env.json"), brief(run.env["world"]), ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    read_heartbeats(run, rank, steps);
    const std::string log = run.file(fmt::format("ranks/rank_{}.log", rank));
    TRIAD_CHECK(std::filesystem::exists(log), "{} is missing", log);
  }
  const CsvTable rows(run.file("training.csv"), {"step", "loss", "grad_norm"});
  TRIAD_CHECK(static_cast<int64_t>(rows.size()) == steps, "{}: {} rows for {} steps", run.file("training.csv"),
              rows.size(), steps);
  for (size_t i = 0; i < rows.size(); ++i) {
    constexpr double kPrinted = 1e-6;  // tolerance, because training.csv has six decimals
    const double loss = rows.number(i, "loss");
    TRIAD_CHECK(std::abs(loss - run.losses[i]) <= kPrinted, "{}: row {} has loss {}, its heartbeat {}",
                run.file("training.csv"), i + 1, loss, run.losses[i]);
  }
  WeightIndex(run.folder).for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
    numbers_of(file, entry);
    ++run.tensors;
  });
  return run;
}

WeightDifference compare_weights(const std::string& folder, const std::string& reference_folder) {
  const WeightIndex ours(folder), reference(reference_folder);
  TRIAD_CHECK(ours.count() == reference.count(), "{} has {} tensors, {} has {}", ours.path(), ours.count(),
              reference.path(), reference.count());
  WeightDifference found;
  double all_difference = 0, all = 0;
  ours.for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
    ++found.tensors;
    const SafetensorsFile& other_file = reference.file_of(entry.name);
    const TensorEntry& other = other_file.at(entry.name);
    if (file.read(entry) == other_file.read(other)) {
      for (const double x : numbers_of(other_file, other)) all += x * x;
      return;
    }
    if (found.unequal++ == 0) found.first = entry.name;
    const std::vector<double> values = numbers_of(file, entry), expected = numbers_of(other_file, other);
    const double difference = relative_difference(values, expected);
    double norm = 0;
    for (const double x : expected) norm += x * x;
    all += norm, all_difference += difference * difference * norm;
    if (difference > found.worst) found.worst = difference, found.worst_name = entry.name;
  });
  found.relative = all > 0 ? std::sqrt(all_difference / all) : 0;
  return found;
}

std::vector<double> numbers_of(const std::string& path, const std::string& tensor) {
  const WeightIndex index(path);
  return numbers_of(index.file_of(tensor), index.at(tensor));
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  TRIAD_CHECK(a.size() == b.size(), "{} numbers are compared with {}", a.size(), b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) difference += (a[i] - b[i]) * (a[i] - b[i]), norm += b[i] * b[i];
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

std::string final_message(const std::string& output_path) {
  const std::vector<std::string> lines = whole_lines(output_path);
  const auto is_message = [](const std::string& line) { return line.starts_with("triad:"); };
  auto line = std::find_if(lines.rbegin(), lines.rend(), is_message);
  if (line == lines.rend()) return lines.empty() ? "it printed nothing" : shortened(lines.back());
  while (std::next(line) != lines.rend() && is_message(*std::next(line))) ++line;  // advice follows the error
  return shortened(*line, 400);
}

std::string tail(const std::string& path, size_t lines) {
  if (!std::filesystem::exists(path)) return "";
  const std::vector<std::string> all = whole_lines(path);
  std::string text;
  for (size_t i = all.size() - std::min(lines, all.size()); i < all.size(); ++i) text += shortened(all[i], 300) + "\n";
  return text;
}

}  // namespace triad
