// triad doctor: examines this machine and build in phases (tools/doctor/phases.cpp), one after another. Each phase runs
// programs in its own folder and evaluates the files that they write. RESULTS.md lists the verdicts.
#include "tools/doctor/doctor.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "engine/comm/launch_env.h"
#include "io/file.h"
#include "tools/options.h"
#include "tools/verbs.h"
#include "train/config/config.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

std::string phase_names() {
  std::string text;
  for (const Phase& phase : doctor_phases()) text += (text.empty() ? "" : ", ") + phase.name;
  return text;
}

const Phase& phase_named(const std::string& name) {
  for (const Phase& phase : doctor_phases())
    if (phase.name == name) return phase;
  fail_usage("--only {}: the phases are {}", shortened(name), phase_names());
}

// The phases to run, in doctor_phases() order. With --only: the named phases and those that they need. Otherwise all
// phases; those that are `full` only with --full.
std::vector<const Phase*> chosen_phases(const DoctorOptions& o) {
  std::vector<std::string> wanted = o.only;
  for (size_t i = 0; i < wanted.size(); ++i)
    for (const std::string& needed : phase_named(wanted[i]).needs)
      if (std::find(wanted.begin(), wanted.end(), needed) == wanted.end()) wanted.push_back(needed);
  std::vector<const Phase*> phases;
  for (const Phase& phase : doctor_phases()) {
    const bool named = std::find(wanted.begin(), wanted.end(), phase.name) != wanted.end();
    if (o.only.empty() ? o.full || !phase.full : named) phases.push_back(&phase);
  }
  return phases;
}

// Creates the doctor's output folder, or removes the phases' old results from it, so no old file is evaluated. Refuses
// a folder that holds other files.
void prepare_folder(const std::string& out, const std::vector<const Phase*>& phases) {
  const std::string results = out + "/" + kResultsFile;
  if (fs::exists(out) && !fs::is_directory(out)) fail_usage("--out {} is not a folder", out);
  if (fs::exists(out) && !fs::is_empty(out) && !(fs::exists(results) && read_file(results).starts_with(kResultsTitle)))
    fail_usage("--out {} is not empty, and `triad doctor` did not write it: choose another folder", out);
  make_folders(out);
  write_file_atomically(results, fmt::format("{}\n\nunder way\n", kResultsTitle));
  for (const Phase* phase : phases) {
    remove_tree(out + "/" + phase->name);
    make_folders(out + "/" + phase->name);
  }
}

// The result of an earlier, incomplete phase that this phase needs; nullptr if there is none.
const PhaseResult* missing_need(const Phase& phase, const std::vector<PhaseResult>& before, bool machine_known) {
  for (const std::string& needed : phase.needs)
    for (const PhaseResult& earlier : before)
      // The phase `environment` is different: if it failed but its facts exist, it blocks no other phase, because a
      // machine with a fault may still be able to train.
      if (earlier.phase->name == needed && !earlier.finding.holds() && !(needed == "environment" && machine_known))
        return &earlier;
  return nullptr;
}

Finding skipped_for(const PhaseResult& missing) {
  const auto& [phase, finding] = missing;
  if (finding.ended)
    return {.verdict = Verdict::skipped,
            .evidence = fmt::format("{} was ended before it was done", phase->name),
            .next = finding.next};
  return {.verdict = Verdict::skipped,
          .evidence = fmt::format("{} is {}", phase->name, word_of(finding.verdict)),
          .next = fmt::format("see {} first", phase->name)};
}

void examine(const DoctorOptions& o) {
  const LaunchEnv launch = read_launch_env();
  if (launch.world > 1)
    fail_usage("triad doctor is rank {} of {} ({}): it starts ranks itself, start it once", launch.rank, launch.world,
               launch.launcher);
  const std::vector<const Phase*> phases = chosen_phases(o);
  prepare_folder(o.out, phases);
  std::vector<PhaseResult> all;
  Json machine;
  bool bad = false;
  for (const Phase* phase : phases) {
    fmt::print("{:<18} ", phase->name);
    std::fflush(stdout);
    Finding finding;
    if (const PhaseResult* missing = missing_need(*phase, all, !machine.is_null())) {
      finding = skipped_for(*missing);
    } else {
      PhaseRun visit(o, *phase, all);
      finding = visit.examine();
      if (phase->name == "environment") {
        // PhaseRun's constructor reads machine.json, which exists only after this phase has run.
        const PhaseRun after(o, *phase, all);
        machine = after.machine();
        write_doctor_config(o.out, after.on_gpu());
      }
    }
    fmt::print("{:<8} {:>6.1f} s  {}\n", word_of(finding.verdict), finding.seconds, finding.evidence);
    std::fflush(stdout);
    bad = bad || finding.verdict == Verdict::fail || finding.verdict == Verdict::hang;
    all.push_back({phase, std::move(finding)});
    write_results(o, all, machine);
  }
  fmt::print("{}/{}\n", o.out, kResultsFile);
  if (bad) fail("at least one phase is FAIL or HANG: see {}/{}", o.out, kResultsFile);
}

}  // namespace

void add_doctor(CLI::App& app) {
  struct Options : DoctorOptions {
    std::string probe, backend = "auto";
    double timeout_s = 30;
  };
  auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("doctor", "examine this machine and this build; with --full, also train on it");
  verb->add_flag("--full", o->full, "also train a small model in two dozen short runs and check their results");
  verb->add_option("--out", o->out, "folder for RESULTS.md and for one folder of each phase")->capture_default_str();
  verb->add_option("--only", o->only, "run only these phases and those they need: " + phase_names())->delimiter(',');
  verb->add_option("--device", o->device, "auto (GPUs if there are any), cpu or cuda")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  verb->add_option("--budget", o->budget, "factor on every phase's time budget: raise it on a slow machine")
      ->capture_default_str()
      ->check(within(above(0).up_to(1000)));
  const char* const kOwn = "Options of the processes that the doctor starts";
  verb->add_option("--probe", o->probe, "examine only this part, and write JSON files into --out")
      ->check(CLI::IsMember({"machine", "products", "topology", "collectives"}))
      ->group(kOwn);
  verb->add_option("--backend", o->backend, "transport of --probe collectives")
      ->check(CLI::IsMember({"auto", "nccl", "mpi"}))
      ->group(kOwn);
  verb->footer(
      "Verdicts: PASS: every check holds. FAIL: a check does not hold. SLOW: every check holds, but the phase took\n"
      "longer than its budget. HANG: the phase showed no sign of life and was killed. SKIPPED: the phase is not\n"
      "possible on this machine. The exit code is 1 if a phase is FAIL or HANG.");
  verb->callback([o] {
    if (o->probe.empty()) return examine(*o);
    make_folders(o->out);
    if (o->probe == "machine") return probe_machine(o->out);
    if (o->probe == "products") return probe_products(o->out);
    if (o->probe == "topology") return probe_topology(o->out);
    probe_collectives(o->out, o->device, o->backend, o->timeout_s);
  });
}

}  // namespace triad
