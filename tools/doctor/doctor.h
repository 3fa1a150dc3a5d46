// triad doctor: what a phase of the examination is, and what it says. doctor.cpp runs the phases in order; the table is
// in tools/doctor/phases.cpp.
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

// pass: all that was expected holds, within the budget. slow: it holds, but took longer; or it still went on at three
// times the budget, and was ended (Finding::ended). hang: no sign of life. skipped: this machine or build has not what
// it takes, or a phase whose files this one reads has none.
enum class Verdict { pass, fail, slow, hang, skipped };
const char* word_of(Verdict);

struct DoctorOptions {
  bool full = false;
  std::string out = "runs/doctor", device = "auto";
  std::vector<std::string> only;  // phases; empty: all
  double budget = 1;              // times each phase's
};

class Visit;

struct Phase {
  std::string name;  // its folder's too
  bool full;         // of --full alone
  double budget_s;
  std::vector<std::string> needs;  // phases whose files this one reads
  std::string question;            // that it answers
  std::string if_not;              // what to do next
  std::function<void(Visit&)> examine;
};
const std::vector<Phase>& doctor_phases();

struct Finding {
  Verdict verdict = Verdict::pass;
  double seconds = 0;
  std::string evidence, next;
  bool ended = false;  // slow, and its time was over before it was done: its files are not whole

  bool holds() const { return verdict == Verdict::pass || (verdict == Verdict::slow && !ended); }
};

struct Diagnosis {
  const Phase* phase;
  Finding finding;
};

// What a phase is given: its folder, this machine, a way to run things, and to say what was found; and what was found
// before, of other phases.
class Visit {
 public:
  Visit(const DoctorOptions&, const Phase&, const std::vector<Diagnosis>& before);

  const std::string& folder() const { return folder_; }
  std::string file(const std::string& name) const { return folder_ + "/" + name; }
  std::string folder_of(const std::string& phase) const { return options_.out + "/" + phase; }
  const DoctorOptions& options() const { return options_; }
  // In this examination: an earlier one may have left its files too.
  bool holds(const std::string& phase) const;

  const Json& machine() const { return machine_; }  // environment/machine.json; null before that phase
  int gpus() const;                                 // that the phases use: 0 where the CPU is examined
  bool on_gpu() const { return gpus() > 0; }
  std::string device() const { return on_gpu() ? "cuda" : "cpu"; }

  // `triad ARGS`, alone. One that does not end well ends the phase, as FAIL, HANG or SLOW, with its last words.
  enum class Prints { as_it_goes, at_its_end };
  void run_triad(const std::vector<std::string>& args, Prints = Prints::at_its_end, Inherit = Inherit::clean);
  // The same as several ranks: under mpirun, or by launch variables (ranks meet over TCP).
  enum class Launch { mpirun, variables };
  void run_ranks(int ranks, Launch, const std::vector<std::string>& args, Prints = Prints::as_it_goes);
  // A run of the trainer on the doctor's own model (OUT/doctor.json), into this phase's folder; read back.
  TrainedRun train(const std::vector<std::string>& sets = {});
  TrainedRun train_ranks(int ranks, Launch, const std::vector<std::string>& sets);

  // What was found. A claim that does not hold makes the phase FAIL.
  void note(const std::string& text) { notes_.push_back(text); }
  void expect(bool holds, const std::string& if_so, const std::string& if_not);
  [[noreturn]] void skip(const std::string& reason, const std::string& next);
  // Skips where `ranks` cannot be started that way.
  void require(Launch);

  Finding examine();  // runs the phase

 private:
  struct Stop {  // thrown: the phase ends here
    Verdict verdict;
    std::string evidence, next;
    bool ended = false;
  };
  void run(const std::vector<Command>&, Prints, Inherit);
  std::vector<std::string> train_args(const std::vector<std::string>& sets) const;
  TrainedRun read_back(const std::vector<std::string>& sets, int ranks);

  const DoctorOptions& options_;
  const Phase& phase_;
  const std::vector<Diagnosis>& before_;
  std::string folder_;
  Json machine_;
  std::vector<std::string> notes_, wrong_;
  int64_t slow_steps_ = 0;
  double seconds_left_ = 0;  // of three times the budget, for what is still to be run
  double still_s_ = 0;       // that the machine, or the doctor, stood still while its runs went on
};

// The doctor's own model and text, as the config file OUT/doctor.json: NSA in small, of the shapes that the fused
// kernels take where there is a GPU.
void write_doctor_config(const std::string& out, bool on_gpu);
inline constexpr int kDoctorSteps = 8, kDoctorLayers = 4;

// RESULTS.md.
void write_results(const DoctorOptions&, const std::vector<Diagnosis>&, const Json& machine);
inline constexpr const char* kResultsFile = "RESULTS.md";
inline constexpr const char* kResultsTitle = "# triad doctor";

int usable_cores();  // by this process: of a container or a job, fewer than the machine's

// What the doctor's own children do besides training: each writes a JSON file into the folder.
void probe_machine(const std::string& folder);   // machine.json, env.json
void probe_topology(const std::string& folder);  // topology.json, env.json
void probe_collectives(const std::string& folder, const std::string& device, const std::string& backend,
                       double timeout_s);  // collectives.json, env.json

// The phases, by what they need: tools/doctor/machine.cpp, tools/doctor/collectives.cpp, tools/doctor/runs.cpp,
// tools/doctor/numbers.cpp.
void examine_environment(Visit&);
void examine_topology(Visit&);
void examine_collectives_nccl(Visit&);
void examine_collectives_mpi(Visit&);
void examine_collectives_tcp(Visit&);
void examine_baseline(Visit&);
void examine_health(Visit&);
void examine_repeat(Visit&);
void examine_gradient_trace(Visit&);
void examine_backend_nccl(Visit&);
void examine_backend_mpi(Visit&);
void examine_backend_tcp(Visit&);
void examine_branch(Visit&, const std::string& branch);
void examine_cuda_graph(Visit&);
void examine_recompute(Visit&, const std::string& plan);
void examine_kernel_routes(Visit&);
void examine_causality(Visit&);
void examine_selection_parity(Visit&);
void examine_attention_parity(Visit&);
void examine_long_context(Visit&);

}  // namespace triad
