#include "tests/support/dist_run.h"

#include <fmt/format.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <thread>

#include "io/json_config.h"
#include "io/weight_index.h"
#include "tests/support/test.h"

namespace triad::test {

namespace fs = std::filesystem;

std::string train_args(const std::string& out, const std::string& more) { return train_on(out, "cpu", more); }

std::string run(const std::string& out, int ranks, const std::string& more) {
  const std::string args =
      train_args(out, "--set train.accumulate_grad_batches=" + std::to_string(4 / ranks) + " " + more);
  const Outcome outcome = ranks == 1 ? run_program(args) : run_ranks(ranks, args);
  INFO(ranks << " ranks: triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return out;
}

std::string as_torchrun_would(int rank) {
  return fmt::format(
      "export RANK={0} LOCAL_RANK={0} WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 OMP_NUM_THREADS=1 "
      "MASTER_PORT={1}; ",
      rank, reserved_port());
}

std::vector<int> pids_of(const std::string& run, int ranks, size_t steps) {
  std::vector<int> pids;
  for (int r = 0; r < ranks; ++r) {
    const std::string path = run + "/heartbeat_rank" + std::to_string(r) + ".jsonl";
    for (int i = 0; i < 180000 && lines(path).size() < steps + 1; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    REQUIRE(lines(path).size() > steps);
    pids.push_back(Json::parse(lines(path).front())["pid"].get<int>());
  }
  return pids;
}

bool all_gone(const std::vector<int>& pids) {
  for (int i = 0; i < 60000; ++i) {
    bool gone = true;
    for (const int pid : pids) gone = gone && (kill(pid, 0) != 0);
    if (gone) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

std::map<std::string, std::vector<float>> tensors(const std::string& path) {
  std::map<std::string, std::vector<float>> all;
  WeightIndex(path).for_each([&](const SafetensorsFile& file, const TensorEntry& entry) {
    const std::vector<std::byte> bytes = file.read(entry);
    std::vector<float>& values = all[entry.name];
    values.resize(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
  });
  return all;
}

Difference difference(const std::string& a_path, const std::string& b_path) {
  const auto a = tensors(a_path), b = tensors(b_path);
  double error = 0, size = 0, worst = 0;
  for (const auto& [name, values] : a) {
    double e = 0, s = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      e += std::pow(double{values[i]} - b.at(name).at(i), 2);
      s += std::pow(double{values[i]}, 2);
    }
    error += e, size += s;
    worst = std::max(worst, std::sqrt(e / std::max(s, 1e-30)));
  }
  return {std::sqrt(error / size), worst};
}

std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> all;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder))
    all[entry.path().lexically_relative(folder).string()] =
        fs::is_regular_file(entry.symlink_status()) ? read_text(entry.path().string()) : "";
  return all;
}

bool same_file(const std::string& a, const std::string& b) {
  const std::string text = read_text(a);
  return !text.empty() && text == read_text(b);
}

std::map<int, double> column(const std::string& path, const std::string& name) {
  const auto cells = [](const std::string& line) {
    std::vector<std::string> out;
    std::istringstream in(line);
    for (std::string cell; std::getline(in, cell, ',');) out.push_back(cell);
    return out;
  };
  const std::vector<std::string> rows = lines(path);
  REQUIRE(!rows.empty());
  const std::vector<std::string> names = cells(rows.front());
  const auto at = static_cast<size_t>(std::find(names.begin(), names.end(), name) - names.begin());
  REQUIRE(at < names.size());
  std::map<int, double> values;
  for (size_t i = 1; i < rows.size(); ++i) values[std::stoi(cells(rows[i]).at(0))] = std::stod(cells(rows[i]).at(at));
  return values;
}

}  // namespace triad::test
