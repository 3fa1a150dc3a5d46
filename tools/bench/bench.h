// Options and result rows that `triad bench` and its verbs attention, step, prefill and decode share. A row is a JSON
// object with at least op, case, pass and us (microseconds). A kept row is a row that was saved earlier, as a line of a
// JSONL file; it begins with commit, date, gpu, dtype and what.
#pragma once
#include <string>
#include <vector>

#include "engine/comm/launch_env.h"
#include "io/json_config.h"
#include "tools/bench/measure.h"

namespace CLI {
class App;
}

namespace triad {

struct BenchOptions {
  std::string device = "auto", dtype;
  bool json = false, energy = false;
  std::string compare;  // path to kept rows to compare with
  std::string append;   // path of a file that this run's rows are appended to

  void add_to(CLI::App& verb);
  void add_energy_to(CLI::App& verb);  // adds only the option --energy
  void add_output_to(CLI::App& verb);  // adds only the options --json, --compare and --append
  void add_files_to(CLI::App& verb);   // adds only the options --compare and --append
  void check_files() const;            // throws if a file cannot be used; call it before the measuring
  Device chosen_device(const LaunchEnv& launch = {}) const;
  DType chosen_dtype(Device) const;  // --dtype's dtype; default: bf16 on a GPU, f32 on the CPU
};

struct BenchRows {
  std::string what;  // what was measured: op, attention, step, prefill or decode
  Device device;
  DType dtype = DType::bf16;
  Ceiling ceiling;
  std::vector<Json> rows = {};
  bool csv = false;  // true: standard output is CSV, so --compare's table goes to standard error

  // Prints the rows as JSON (--json), appends them to a file (--append) and compares them with kept rows (--compare).
  // Throws an Error if a row is more than 5% slower than the newest kept row with the same GPU, dtype, op, case and
  // pass. Rows without a kept row are listed.
  void finish(const BenchOptions&) const;
};

// The machine, the dtype and the ceilings as one line: "NVIDIA H200 (cuda:0), bf16: device copy 4225 GB/s, matrix
// product 788.00 TFLOP/s".
std::string describe(const BenchRows&);

// Each adds a `triad bench` subcommand.
CLI::App* add_bench_attention(CLI::App& bench);
CLI::App* add_bench_step(CLI::App& bench);
CLI::App* add_bench_prefill(CLI::App& bench);
CLI::App* add_bench_decode(CLI::App& bench);

}  // namespace triad
