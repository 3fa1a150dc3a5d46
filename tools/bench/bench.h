// What `triad bench` and its verbs attention, step, prefill and decode share: options, and the rows that they measure.
// A row is a JSON object that holds at least op, case, pass and us; a kept row, a line of a file, has commit, date,
// gpu, dtype and what in front.
#pragma once
#include <string>
#include <vector>

#include "io/json_config.h"
#include "tools/bench/measure.h"

namespace CLI {
class App;
}

namespace triad {

// What every bench takes.
struct BenchOptions {
  std::string device = "auto", dtype;
  bool json = false;
  std::string compare;  // a file of kept rows
  std::string append;   // a file that this run's rows are added to

  void add_to(CLI::App& verb);
  void add_output_to(CLI::App& verb);  // without --device and --dtype
  void add_files_to(CLI::App& verb);   // --compare and --append alone
  void check_files() const;            // what is wrong with them is said before the measuring, not after
  Device chosen_device() const;
  DType chosen_dtype(Device) const;  // bf16 on a GPU, f32 on the CPU, unless said otherwise
};

struct BenchRows {
  std::string what;  // op, attention, step, prefill, decode
  Device device;
  DType dtype = DType::bf16;
  Ceiling ceiling;
  std::vector<Json> rows = {};
  bool csv = false;  // standard output is CSV: what --compare says goes to standard error

  // The JSON, where asked for; then keeps the rows and compares them with those of a file, as asked. Throws an Error if
  // one is more than 5% slower than the newest kept row of the same GPU, dtype, op, case and pass. Rows that have none
  // are named.
  void finish(const BenchOptions&) const;
};

// "NVIDIA H200 (cuda:0), bf16: copies 4225 GB/s, multiplies matrices at 788.00 TFLOP/s"
std::string describe(const BenchRows&);

// The subcommands of `triad bench`.
CLI::App* add_bench_attention(CLI::App& bench);
CLI::App* add_bench_step(CLI::App& bench);
CLI::App* add_bench_prefill(CLI::App& bench);
CLI::App* add_bench_decode(CLI::App& bench);

}  // namespace triad
