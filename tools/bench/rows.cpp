#include "engine/process/counted.h"
#include "tools/bench/bench.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <fstream>

#include "engine/check.h"
#include "io/jsonl.h"
#include "tools/version.h"
#include "train/inference.h"

namespace triad {

namespace {

constexpr double kAllowedLoss = 1.05;
constexpr const char* kKey[] = {"gpu", "dtype", "op", "case", "pass"};

Json in_front_of_row(const BenchRows& b, const std::string& what) {
  std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char date[16];
  std::strftime(date, sizeof date, "%Y-%m-%d", &utc);
  return {{"commit", git_revision()},
          {"date", date},
          {"gpu", backend::info(b.device).name},
          {"dtype", name_of(b.dtype)},
          {"what", what}};
}

void append_rows(const BenchRows& b, const std::string& path) {
  JsonLines file(path);
  const auto append = [&](const std::string& what, const Json& row) {
    Json line = in_front_of_row(b, what);
    line.update(row);
    file.append(line);
  };
  append("ceiling", {{"copy_gb_per_s", b.ceiling.gb_per_s}, {"matmul_tflop_per_s", b.ceiling.tflop_per_s}});
  for (const Json& row : b.rows)
    if (row.contains("us")) append(b.what, row);
}

// The key that identifies what a row measures; it is equal for a row and its kept rows.
std::string key_of(const Json& row) {
  std::string key;
  for (const char* name : kKey) key += row.at(name).get<std::string>() + '\n';
  return key;
}

struct Kept {
  std::string date, commit;
  double us;
};

// The newest row per key: the latest date, and among equal dates the last line.
std::map<std::string, Kept> read_kept(const std::string& path) {
  std::ifstream file(path);
  if (!file) fail("--compare: {} cannot be read", path);
  std::map<std::string, Kept> kept;
  std::string text;
  for (int64_t number = 1; std::getline(file, text); ++number) {
    const std::string where = fmt::format("{}:{}", path, number);
    const Json row = parse_json(text, where);
    if (!row.is_object()) fail("{}: a kept row is an object, not {}", where, brief(row));
    if (!row.contains("us")) continue;  // skipped: the row is a ceiling, not a time
    for (const char* name : {"commit", "date", "gpu", "dtype", "op", "case", "pass"})
      if (!row.contains(name) || !row[name].is_string()) fail("{}: a kept row lacks the text \"{}\"", where, name);
    if (!row["us"].is_number() || !(row["us"].get<double>() > 0))
      fail("{}: us is {}, not a time", where, brief(row["us"]));
    const auto [it, fresh] = kept.try_emplace(key_of(row));
    if (fresh || it->second.date <= row["date"].get<std::string>())
      it->second = {row["date"], row["commit"], row["us"]};
  }
  return kept;
}

void compare_rows(const BenchRows& b, const std::map<std::string, Kept>& kept, const BenchOptions& o) {
  std::string table, slower;
  int64_t compared = 0, lost = 0, unknown = 0;
  for (const Json& row : b.rows) {
    if (!row.contains("us")) continue;
    Json whole = in_front_of_row(b, b.what);
    whole.update(row);
    const std::string name = fmt::format("{} {} {}", row["op"].get<std::string>(), row["case"].get<std::string>(),
                                         row["pass"].get<std::string>());
    const double us = row["us"];
    const auto found = kept.find(key_of(whole));
    if (found == kept.end()) {
      ++unknown;
      table += fmt::format("{:<80} {:>12.1f} us: no kept row\n", name, us);
      continue;
    }
    ++compared;
    const Kept& k = found->second;
    const double ratio = us / k.us;
    table += fmt::format("{:<80} {:>12.1f} us, kept {:>12.1f} ({} {}): {:.3f}{}\n", name, us, k.us, k.date, k.commit,
                         ratio, ratio > kAllowedLoss ? "  SLOWER" : "");
    if (ratio <= kAllowedLoss) continue;
    ++lost;
    slower += fmt::format("\n  {}: {:.1f} us, kept {:.1f} us ({} {}): {:.1f}% slower", name, us, k.us, k.date, k.commit,
                          100 * (ratio - 1));
  }
  // The table goes to stderr if standard output is JSON or CSV, because other programs read that.
  std::fprintf(o.json || b.csv ? stderr : stdout, "\ncompared with %s on %s:\n%s%s compared, %lld without a kept row\n",
               o.compare.c_str(), backend::info(b.device).name.c_str(), table.c_str(), counted(compared, "row").c_str(),
               static_cast<long long>(unknown));
  if (lost > 0)
    fail("{} of {} {} more than 5% slower than {} says:{}", lost, counted(compared, "row"), lost == 1 ? "is" : "are",
         o.compare, slower);
}

}  // namespace

void BenchOptions::add_output_to(CLI::App& verb) {
  verb.add_flag("--json", json, "print JSON instead of tables");
  add_files_to(verb);
}

void BenchOptions::add_files_to(CLI::App& verb) {
  verb.add_option(
      "--compare", compare,
      "a file of earlier results (from --append): exit with 1 if a result of this run is more than 5% slower "
      "than the newest earlier one");
  verb.add_option("--append", append, "add this run's results to this file, one line of JSON each");
}

void BenchOptions::add_energy_to(CLI::App& verb) {
  verb.add_flag(
      "--energy", energy,
      "also measure the energy of each pass on a GPU: it is repeated for 3.5 s, with what the pass before leaves "
      "in L2");
}

void BenchOptions::add_to(CLI::App& verb) {
  add_output_to(verb);
  verb.add_option("--device", device, "auto (a GPU if there is one), cpu or cuda")->capture_default_str();
  verb.add_option("--dtype", dtype, "bf16 or f32 (default: bf16 on a GPU, f32 on the CPU)")
      ->transform(CLI::Transformer(
          std::map<std::string, std::string>{{"fp32", "f32"}, {"float32", "f32"}, {"bfloat16", "bf16"}}))
      ->check(CLI::IsMember({"bf16", "f32"}));
}

void BenchOptions::check_files() const {
  if (!compare.empty()) read_kept(compare);
  if (!append.empty()) AppendFile{append};
}

Device BenchOptions::chosen_device(const LaunchEnv& launch) const { return parse_device(device, launch); }

DType BenchOptions::chosen_dtype(Device on) const {
  return dtype == "f32" || (dtype.empty() && !on.is_cuda()) ? DType::f32 : DType::bf16;
}

std::string describe(const BenchRows& b) {
  return fmt::format("{} ({}), {}: device copy {:.0f} GB/s, matrix product {:.2f} TFLOP/s",
                     backend::info(b.device).name, b.device.str(), name_of(b.dtype), b.ceiling.gb_per_s,
                     b.ceiling.tflop_per_s);
}

void BenchRows::finish(const BenchOptions& o) const {
  if (o.json) {
    const Json out = {{"device", {{"name", backend::info(device).name}, {"kind", device.str()}}},
                      {"dtype", name_of(dtype)},
                      {"ceiling", {{"gb_per_s", ceiling.gb_per_s}, {"tflop_per_s", ceiling.tflop_per_s}}},
                      {"results", rows}};
    fmt::print("{}\n", dump_json(out, 2));
  }
  // The kept rows are read before new ones are appended, because --compare and --append may name the same file.
  const auto kept = o.compare.empty() ? std::map<std::string, Kept>() : read_kept(o.compare);
  if (!o.append.empty()) append_rows(*this, o.append);
  if (!o.compare.empty()) compare_rows(*this, kept, o);
}

}  // namespace triad
