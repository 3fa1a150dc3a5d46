// triad doctor: types for a phase and its result, and the phases' functions. tools/doctor/phases.cpp lists the phases,
// doctor.cpp runs them in order.
#pragma once
#include <fmt/format.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "engine/check.h"
#include "io/json_config.h"
#include "tools/doctor/artifacts.h"
#include "tools/doctor/child.h"

namespace triad {

// A phase's verdict. pass: every expectation holds, within the time budget. slow: every expectation holds but the phase
// took longer than its budget, or the phase was alive at three times the budget and was killed (Finding::ended). hang:
// no life sign. skipped: this machine or build lacks what the phase needs, or a phase whose files it reads did not
// complete.
enum class Verdict { pass, fail, slow, hang, skipped };
const char* word_of(Verdict);

struct DoctorOptions {
  bool full = false;
  std::string out = "runs/doctor", device = "auto";
  std::vector<std::string> only;  // phases to run, by name; empty: all
  double budget = 1;              // factor by which every phase's time budget is multiplied
};

class PhaseRun;

struct Phase {
  std::string name;  // name of the phase and its folder
  bool full;         // true: the phase runs only with --full
  double budget_s;
  std::vector<std::string> needs = {};  // phases whose files this one reads
  std::string question;
  std::string advice;  // what the user can do if the phase fails
  std::function<void(PhaseRun&)> examine;
};
const std::vector<Phase>& doctor_phases();

struct Finding {
  Verdict verdict = Verdict::pass;
  double seconds = 0;
  std::string evidence, next;
  bool ended = false;  // if slow: the phase was killed at its time limit, so its files are incomplete

  bool holds() const { return verdict == Verdict::pass || (verdict == Verdict::slow && !ended); }
};

struct PhaseResult {
  const Phase* phase;
  Finding finding;
};

// PhaseRun: a phase while it runs. It has the phase's folder, facts about this machine, functions that run programs and
// that record what was found, and earlier phases' results.
class PhaseRun {
 public:
  PhaseRun(const DoctorOptions&, const Phase&, const std::vector<PhaseResult>& before);

  const std::string& folder() const { return folder_; }
  std::string file(const std::string& name) const { return folder_ + "/" + name; }
  std::string folder_of(const std::string& phase) const { return options_.out + "/" + phase; }
  const DoctorOptions& options() const { return options_; }
  // Whether the named phase passed in this doctor run; an earlier run's files don't count.
  bool holds(const std::string& phase) const;

  const Json& machine() const { return machine_; }  // environment/machine.json's content; null before that phase
  int gpus() const;                                 // GPUs that the phases use; 0 with --device cpu
  bool on_gpu() const { return gpus() > 0; }
  std::string device() const { return on_gpu() ? "cuda" : "cpu"; }

  // Runs `triad ARGS` as one process. If the process fails, hangs or exceeds its time, the phase ends as FAIL, HANG or
  // SLOW with the process's final message. Prints: whether the process prints while it works, so that silence means a
  // hang.
  enum class Prints { as_it_goes, at_its_end };
  void run_triad(const std::vector<std::string>& args, Prints = Prints::at_its_end, Inherit = Inherit::clean,
                 const std::vector<std::pair<std::string, std::string>>& environment = {});
  // Runs `triad ARGS` on several ranks, started by mpirun or by launch variables such as RANK (the ranks then connect
  // over TCP).
  enum class Launch { mpirun, variables };
  void run_ranks(int ranks, Launch, const std::vector<std::string>& args, Prints = Prints::as_it_goes);
  // Trains the doctor's own model (config OUT/doctor.json with these changes) in this phase's folder, and reads the
  // run's files.
  TrainedRun train(const std::vector<std::string>& sets = {});
  TrainedRun train_ranks(int ranks, Launch, const std::vector<std::string>& sets);

  // note() and expect() record evidence for RESULTS.md. An expectation that does not hold makes the phase FAIL.
  void note(const std::string& text) { notes_.push_back(text); }
  void expect(bool holds, const std::string& if_so, const std::string& if_not);
  [[noreturn]] void skip(const std::string& reason, const std::string& next);
  // Skips the phase if ranks cannot be started in this way on this machine.
  void require(Launch);

  Finding examine();  // runs the phase and decides its verdict

 private:
  struct Stop {  // an exception that ends the phase
    Verdict verdict;
    std::string evidence, next;
    bool ended = false;
  };
  void run(const std::vector<Command>&, Prints, Inherit);
  std::vector<std::string> train_args(const std::vector<std::string>& sets) const;
  TrainedRun read_back(const std::vector<std::string>& sets, int ranks);

  const DoctorOptions& options_;
  const Phase& phase_;
  const std::vector<PhaseResult>& before_;
  std::string folder_;
  Json machine_;
  std::vector<std::string> notes_, wrong_;
  int64_t slow_steps_ = 0;
  double seconds_left_ = 0;  // time left until the limit, which is three times the budget
  double stopped_s_ = 0;     // time for which the machine or the doctor was suspended
};

// Writes training text and config (OUT/doctor.json) for the doctor's own model, a small NSA model. on_gpu: chooses
// shapes that the fast (sm90) kernels accept.
void write_doctor_config(const std::string& out, bool on_gpu);
inline constexpr int kDoctorSteps = 8, kDoctorLayers = 4;

// Writes RESULTS.md, a table with a row for each phase.
void write_results(const DoctorOptions&, const std::vector<PhaseResult>&, const Json& machine);
inline constexpr const char* kResultsFile = "RESULTS.md";
inline constexpr const char* kResultsTitle = "# triad doctor";

// How many cores this process may use; fewer than the machine's in a container or a job.
int usable_cores();

// What the doctor's child processes other than training do (`triad doctor --probe ...`). Each writes JSON files into
// the folder.
void probe_machine(const std::string& folder);   // writes machine.json and env.json
void probe_products(const std::string& folder);  // writes products.json
void probe_topology(const std::string& folder);  // writes topology.json and env.json
void probe_collectives(const std::string& folder, const std::string& device, const std::string& backend,
                       double timeout_s);  // writes collectives.json and env.json

// The phases' functions, which are in machine.cpp, collectives.cpp, runs.cpp and numbers.cpp.
void examine_environment(PhaseRun&);
void examine_topology(PhaseRun&);
void examine_collectives_nccl(PhaseRun&);
void examine_collectives_mpi(PhaseRun&);
void examine_collectives_tcp(PhaseRun&);
void examine_baseline(PhaseRun&);
void examine_health(PhaseRun&);
void examine_repeat(PhaseRun&);
void examine_gradient_trace(PhaseRun&);
void examine_backend_nccl(PhaseRun&);
void examine_backend_mpi(PhaseRun&);
void examine_backend_tcp(PhaseRun&);
void examine_branch(PhaseRun&, const std::string& branch);
void examine_cuda_graph(PhaseRun&);
void examine_recompute(PhaseRun&, const std::string& plan);
void examine_kernel_routes(PhaseRun&);
void examine_causality(PhaseRun&);
void examine_selection_parity(PhaseRun&);
void examine_attention_parity(PhaseRun&);
void examine_long_context(PhaseRun&);

}  // namespace triad
