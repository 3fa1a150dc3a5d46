// Runs a phase: starts its child processes, collects its check results, and decides the verdict.
#include <arpa/inet.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "engine/process/parse.h"
#include "io/file.h"
#include "tools/doctor/doctor.h"

namespace triad {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr double kSilentS = 20;  // seconds without progress after which a run counts as hung; multiplied by --budget
// Longest time, s, between a run's heartbeats in a long step (train/monitor/watchdog.cpp).
constexpr double kPulseS = 10;
constexpr double kLimitBudgets = 3;  // a phase that is still alive is killed after this many times its budget

// Returns a TCP port that is free now on this host.
int free_port() {
  const FileHandle probe(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof address;
  if (bind(probe.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0 ||
      getsockname(probe.get(), reinterpret_cast<sockaddr*>(&address), &bytes) != 0)
    fail("127.0.0.1 has no free port");
  return ntohs(address.sin_port);
}

// Environment variables that give each process half the cores, also if it runs alone: matrix libraries may round
// differently with another thread count, so runs that are compared must use the same number.
std::vector<std::pair<std::string, std::string>> threads_of(int ranks) {
  const char* chosen = std::getenv("OMP_NUM_THREADS");
  const int threads = std::max(1, usable_cores() / std::max(2, ranks));
  return {{"OMP_NUM_THREADS", chosen != nullptr ? chosen : std::to_string(threads)}};
}

// An mpirun command that works as root, with fewer cores than ranks, in a container and without a remote shell. Ranks
// that wait let other processes use their core.
Command mpirun(int ranks, const std::vector<std::string>& words) {
  Command command{
      .words = {find_program("mpirun"), "--oversubscribe", "--bind-to", "none", "-np", std::to_string(ranks)},
      .environment = {{"OMPI_MCA_plm_rsh_agent", "/bin/false"},
                      {"OMPI_MCA_btl_vader_single_copy_mechanism", "none"},
                      {"OMPI_MCA_mpi_yield_when_idle", "1"}}};
  if (geteuid() == 0)
    for (const char* name : {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"})
      command.environment.emplace_back(name, "1");
  command.words.insert(command.words.end(), words.begin(), words.end());
  return command;
}

// Returns why mpirun cannot start processes on this machine, or "" if it can. The first call tries it; later calls
// return the same answer.
const std::string& why_no_mpirun(const std::string& folder) {
  static std::optional<std::string> why;
  if (why) return *why;
  why = "";
  if (find_program("mpirun").empty()) {
    why = "no mpirun on PATH";
  } else {
    constexpr double kTrialS = 60;
    const Outcome ended =
        run_commands({mpirun(2, {"true"})}, Inherit::clean, folder, {.limit_s = kTrialS, .silent_s = kTrialS});
    if (ended.how != Outcome::How::exited)
      why = fmt::format("mpirun -np 2 true did not end within {} s", kTrialS);
    else if (ended.exit_code != 0)
      why = fmt::format("mpirun -np 2 true exits with {}: {}", ended.exit_code, ended.last_sign);
  }
  return *why;
}

Command as_rank(int rank, int ranks, int port, std::vector<std::string> words) {
  const std::string number = std::to_string(rank), count = std::to_string(ranks);
  Command command{.words = std::move(words), .environment = threads_of(ranks)};
  command.environment.insert(command.environment.end(), {{"RANK", number},
                                                         {"WORLD_SIZE", count},
                                                         {"LOCAL_RANK", number},
                                                         {"LOCAL_WORLD_SIZE", count},
                                                         {"MASTER_ADDR", "127.0.0.1"},
                                                         {"TORCHELASTIC_RUN_ID", fmt::format("doctor {}", getpid())},
                                                         {"MASTER_PORT", std::to_string(port)}});
  return command;
}

std::vector<std::string> own_command(const std::vector<std::string>& args) {
  std::vector<std::string> words = {own_program()};
  words.insert(words.end(), args.begin(), args.end());
  return words;
}

// A text for RESULTS.md that names the stack dumps and collective lists that the phase's runs wrote.
std::string post_mortem(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("stackdump_") || name.ends_with("_collectives.csv"))
      files.push_back(fs::relative(entry.path(), fs::path(folder).parent_path()).string());
  }
  std::sort(files.begin(), files.end());
  return files.empty() ? "" : fmt::format("; see {}", fmt::join(files, ", "));
}

bool says(const std::string& output_path, const char* words) {
  return read_file(output_path).find(words) != std::string::npos;
}

}  // namespace

const char* word_of(Verdict verdict) {
  constexpr const char* kWords[] = {"PASS", "FAIL", "SLOW", "HANG", "SKIPPED"};
  return kWords[static_cast<int>(verdict)];
}

PhaseRun::PhaseRun(const DoctorOptions& options, const Phase& phase, const std::vector<PhaseResult>& before)
    : options_(options), phase_(phase), before_(before), folder_(options.out + "/" + phase.name) {
  if (const std::string facts = folder_of("environment") + "/machine.json"; fs::exists(facts))
    machine_ = parse_json(read_file(facts), facts);
}

int PhaseRun::gpus() const {
  return machine_.is_null() || options_.device == "cpu" ? 0 : static_cast<int>(machine_["gpus"].size());
}

bool PhaseRun::holds(const std::string& phase) const {
  return std::any_of(before_.begin(), before_.end(), [&](const PhaseResult& earlier) {
    return earlier.phase->name == phase && earlier.finding.holds();
  });
}

void PhaseRun::run(const std::vector<Command>& commands, Prints prints, Inherit inherit) {
  // Seconds without a life sign after which the doctor kills a process: a little more than the run's own watchdog
  // takes, because that watchdog may not have started or may be stopped too.
  const double silent_s = std::max(kSilentS * options_.budget, kPulseS) + 2;
  const Outcome ended = run_commands(
      commands, inherit, folder_,
      {.limit_s = std::max(0.0, seconds_left_), .silent_s = silent_s, .busy_is_alive = prints == Prints::at_its_end});
  seconds_left_ -= ended.seconds;
  stopped_s_ += ended.stopped_s;
  const std::string output = file("output.txt"), in_output = phase_.name + "/output.txt";
  const auto stop = [&](Verdict verdict, const std::string& evidence) {
    const bool hung = verdict == Verdict::hang;
    throw Stop{verdict, evidence,
               (hung ? "find out what it was doing" + post_mortem(folder_) + ". " : "") + phase_.advice};
  };
  switch (ended.how) {
    case Outcome::How::hung:
      stop(Verdict::hang, fmt::format("its watchdog saw no progress; {}; killed by the doctor", ended.last_sign));
      break;
    case Outcome::How::silent:
      stop(Verdict::hang,
           fmt::format("no sign of life for {:.0f} s; the last: {}; killed by the doctor", silent_s, ended.last_sign));
      break;
    case Outcome::How::late:
      throw Stop{.verdict = Verdict::slow,
                 .evidence = fmt::format("alive, but not done at {:.0f} times its budget; last sign: {}; killed by the "
                                         "doctor",
                                         kLimitBudgets, ended.last_sign),
                 .next = fmt::format("give it more time (--budget {:g}), or a machine with less other work",
                                     10 * options_.budget),
                 .ended = true};
    case Outcome::How::exited:
      break;
  }
  if (ended.exit_code == 0) return;
  const std::string words = fmt::format("exit code {}: {} ({})", ended.exit_code, final_message(output), in_output);
  const bool waited = says(output, "was not finished within dist.timeout_s") || says(output, ": HUNG:");
  stop(waited ? Verdict::hang : Verdict::fail, words);
}

void PhaseRun::run_triad(const std::vector<std::string>& args, Prints prints, Inherit inherit,
                         const std::vector<std::pair<std::string, std::string>>& environment) {
  Command command{.words = own_command(args), .environment = threads_of(1)};
  command.environment.insert(command.environment.end(), environment.begin(), environment.end());
  run({command}, prints, inherit);
}

void PhaseRun::run_ranks(int ranks, Launch launch, const std::vector<std::string>& args, Prints prints) {
  std::vector<Command> commands;
  if (launch == Launch::mpirun) {
    commands = {mpirun(ranks, own_command(args))};
    for (const auto& variable : threads_of(ranks)) commands.back().environment.push_back(variable);
  } else {
    const int port = free_port();
    for (int rank = 0; rank < ranks; ++rank) commands.push_back(as_rank(rank, ranks, port, own_command(args)));
  }
  run(commands, prints, Inherit::clean);
}

std::vector<std::string> PhaseRun::train_args(const std::vector<std::string>& sets) const {
  const double hang_s = kSilentS * options_.budget;
  std::vector<std::string> args = {"train", options_.out + "/doctor.json"};
  const auto set = [&](const std::string& assignment) {
    args.emplace_back("--set");
    args.push_back(assignment);
  };
  set("runtime.device=" + device());
  set(fmt::format("log.hang_s={}", hang_s));
  set(fmt::format("dist.timeout_s={}", static_cast<int64_t>(std::ceil(hang_s))));
  set("log.out_dir=" + Json(folder_).dump());
  for (const std::string& each : sets) set(each);
  return args;
}

TrainedRun PhaseRun::read_back(const std::vector<std::string>& sets, int ranks) {
  int64_t steps = kDoctorSteps;
  constexpr std::string_view kSteps = "train.steps=";
  for (const std::string& each : sets)
    if (each.starts_with(kSteps)) steps = parse_number<int64_t>(each.substr(kSteps.size())).value();
  TrainedRun trained = read_trained(folder_, steps, ranks);
  slow_steps_ += trained.slow_steps;
  return trained;
}

TrainedRun PhaseRun::train(const std::vector<std::string>& sets) {
  run_triad(train_args(sets), Prints::as_it_goes);
  return read_back(sets, 1);
}

TrainedRun PhaseRun::train_ranks(int ranks, Launch launch, const std::vector<std::string>& sets) {
  run_ranks(ranks, launch, train_args(sets));
  return read_back(sets, ranks);
}

void PhaseRun::expect(bool holds, const std::string& if_so, const std::string& if_not) {
  if (!holds)
    wrong_.push_back(if_not);
  else if (!if_so.empty())
    notes_.push_back(if_so);
}

void PhaseRun::skip(const std::string& reason, const std::string& next) { throw Stop{Verdict::skipped, reason, next}; }

void PhaseRun::require(Launch launch) {
  if (launch == Launch::variables) return;
  const std::string no_library = machine_.value("why_no_mpi", "the phase environment did not complete");
  if (!no_library.empty())
    skip(no_library, "install Open MPI and build again, or train without it: TCP and NCCL do not need it");
  if (const std::string& why = why_no_mpirun(folder_); !why.empty())
    skip(why, "repair mpirun, or start ranks with torchrun or srun");
}

Finding PhaseRun::examine() {
  const auto began = Clock::now();
  const double budget_s = phase_.budget_s * options_.budget;
  seconds_left_ = kLimitBudgets * budget_s;
  Finding finding;
  try {
    phase_.examine(*this);
  } catch (const Stop& stop) {
    finding.verdict = stop.verdict;
    finding.ended = stop.ended;
    wrong_.push_back(stop.evidence);
    finding.next = stop.next;
  } catch (const std::exception& e) {  // the run lacks a file or has an invalid one
    finding.verdict = Verdict::fail;
    wrong_.emplace_back(e.what());
  }
  finding.seconds = std::chrono::duration<double>(Clock::now() - began).count() - stopped_s_;
  const bool late = finding.seconds > budget_s;
  if (finding.verdict == Verdict::pass && !wrong_.empty()) finding.verdict = Verdict::fail;
  if (finding.verdict == Verdict::pass && (late || slow_steps_ > 0)) {
    finding.verdict = Verdict::slow;
    finding.next = "look for other work on this machine; step times are in " + phase_.name + "/training.csv";
    if (slow_steps_ > 0) wrong_.push_back(fmt::format("its watchdog reported {} slow steps", slow_steps_));
    if (late) wrong_.push_back(fmt::format("{:.1f} s, budget {:.0f} s", finding.seconds, budget_s));
  }
  if (finding.verdict == Verdict::fail && finding.next.empty()) finding.next = phase_.advice;
  std::vector<std::string> all = wrong_;
  if (finding.verdict != Verdict::skipped) all.insert(all.end(), notes_.begin(), notes_.end());
  finding.evidence = fmt::format("{}", fmt::join(all, "; "));
  return finding;
}

}  // namespace triad
