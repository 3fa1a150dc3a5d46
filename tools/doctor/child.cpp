#include "tools/doctor/child.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <system_error>
#include <thread>

#include "engine/check.h"
#include "engine/process/seconds_since.h"
#include "io/file.h"
#include "io/json_config.h"
#include "tools/csv_table.h"

extern char** environ;

namespace triad {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr auto kPollInterval = std::chrono::milliseconds(50);

// ---- processes ----

struct Process {
  pid_t pid = 0, parent = 0;
  long ticks = 0;                // CPU time, user and system, in clock ticks
  unsigned long long began = 0;  // start time in ticks since boot; together with the pid it identifies a process
};

std::vector<Process> all_processes() {
  std::vector<Process> all;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    std::string text;
    // Skipped: the process may just have ended.
    if (pid <= 0 || !std::getline(std::ifstream(entry.path() / "stat"), text)) continue;
    const size_t name_end = text.rfind(')');
    if (name_end == std::string::npos) continue;
    std::istringstream fields(text.substr(name_end + 1));
    std::string skipped;
    Process p{.pid = pid};
    fields >> skipped >> p.parent;
    // Fields in /proc/PID/stat between the parent's pid and the user time.
    constexpr int kFieldsToUserTime = 9;
    for (int i = 0; i < kFieldsToUserTime; ++i) fields >> skipped;
    long user = 0, system = 0;
    fields >> user >> system;
    p.ticks = user + system;
    constexpr int kFieldsToStart = 6;
    for (int i = 0; i < kFieldsToStart; ++i) fields >> skipped;
    fields >> p.began;
    all.push_back(p);
  }
  return all;
}

// Descendants: processes that descend from this one and were started after this object was made. A descendant that
// loses its parent becomes our child (PR_SET_CHILD_SUBREAPER), so a launcher's processes aren't lost. Other programs'
// processes can be our children too: a shell's that replaced itself by this program (`server & exec triad doctor`), and
// every orphan if we are a container's first process. Therefore processes that exist already, and all that these start,
// count as foreign. Only a foreign orphan whose parent started and ended between two members() calls is mistaken for
// ours.
class Descendants {
 public:
  Descendants() {
    for (const Process& p : all_processes()) foreign_[p.pid] = p.began;
    foreign_.erase(getpid());
  }

  std::vector<Process> members() {
    const std::vector<Process> all = all_processes();
    for (const Process& p : all)  // if another process has the pid now, the foreign one has ended
      if (const auto known = foreign_.find(p.pid); known != foreign_.end() && known->second != p.began)
        foreign_.erase(known);
    for (bool more = true; std::exchange(more, false);)
      for (const Process& p : all) {
        // Parent 0: the parent is outside this container.
        const bool outside = p.parent == 0 || foreign_.count(p.parent) > 0;
        if (outside && p.pid != getpid()) more = foreign_.emplace(p.pid, p.began).second || more;
      }
    std::vector<Process> found;
    std::vector<pid_t> parents = {getpid()};
    while (!parents.empty()) {
      const pid_t parent = parents.back();
      parents.pop_back();
      for (const Process& p : all)
        if (p.parent == parent && foreign_.count(p.pid) == 0) found.push_back(p), parents.push_back(p.pid);
    }
    return found;
  }

 private:
  std::map<pid_t, unsigned long long> foreign_;  // pid -> the foreign process's start time
};

// Collects ended children's exit codes.
class Reaper {
 public:
  void reap() {
    int status = 0;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;)
      codes_[pid] = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  bool ended(pid_t pid) const { return codes_.count(pid) > 0; }
  int code(pid_t pid) const { return codes_.at(pid); }

 private:
  std::map<pid_t, int> codes_;
};

// Kills all descendants and waits, at most kMostS seconds, until they have ended.
void end_all(Descendants& descendants, Reaper& reaper) {
  constexpr double kMostS = 10;  // a process in an uninterruptible wait may not end when it is killed
  for (const auto begin = Clock::now(); seconds_since(begin) < kMostS; std::this_thread::sleep_for(kPollInterval)) {
    reaper.reap();
    const std::vector<Process> left = descendants.members();
    if (left.empty()) return;
    for (const Process& p : left) kill(p.pid, SIGKILL);
  }
}

// Sends SIGUSR1 to the training processes, so that their watchdogs write stack dumps (train/monitor/watchdog.h), and
// waits for the files. A stopped process writes none. A run without heartbeats has no watchdog, so it gets no signal,
// which would end the program.
void request_stack_dumps(Descendants& descendants, const std::string& folder) {
  const auto files = [&](const char* prefix) {
    int n = 0;
    for (const auto& entry : fs::directory_iterator(folder)) n += entry.path().filename().string().starts_with(prefix);
    return n;
  };
  if (files("heartbeat_rank") == 0) return;
  const std::string self = own_program();
  std::error_code gone;
  int requested = 0;
  for (const Process& p : descendants.members())
    if (fs::read_symlink(fmt::format("/proc/{}/exe", p.pid), gone) == self && kill(p.pid, SIGUSR1) == 0) ++requested;
  constexpr double kMostS = 1.5;
  for (const auto begin = Clock::now(); files("stackdump_") < requested && seconds_since(begin) < kMostS;)
    std::this_thread::sleep_for(kPollInterval);
}

// ---- starting a command ----

bool is_left_out(const std::string& variable) {
  constexpr const char* kPrefixes[] = {
      "NSA_",  "OMPI_COMM_WORLD_", "OMPI_UNIVERSE", "OMPI_APP_CTX",  "OMPI_FILE_LOCATION", "PMIX_", "PMI_", "PRTE_",
      "ORTE_", "TORCHELASTIC_",    "OMPI_MCA_ess",  "OMPI_MCA_orte", "OMPI_MCA_ompi"};
  constexpr const char* kNames[] = {"CONFIG",          "TORCH_BACKEND",    "RANK",         "WORLD_SIZE",
                                    "LOCAL_RANK",      "LOCAL_WORLD_SIZE", "MASTER_ADDR",  "MASTER_PORT",
                                    "MPI_LOCALRANKID", "MPI_LOCALNRANKS",  "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
                                    "SLURM_LOCALID"};
  for (const char* prefix : kPrefixes)
    if (variable.starts_with(prefix)) return true;
  for (const char* name : kNames)
    if (variable == name) return true;
  return false;
}

std::vector<std::string> variables_for(const Command& command, Inherit inherit) {
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry), name = text.substr(0, text.find('='));
    bool replaced = false;
    for (const auto& [own, value] : command.environment) replaced = replaced || own == name;
    if (!replaced && (inherit == Inherit::all || !is_left_out(name))) variables.push_back(text);
  }
  for (const auto& [name, value] : command.environment) variables.push_back(name + "=" + value);
  return variables;
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

pid_t start(const Command& command, Inherit inherit, int output) {
  std::vector<std::string> words = command.words, variables = variables_for(command, inherit);
  const std::vector<char*> argv = pointers_to(words), envp = pointers_to(variables);
  // The signal that the child receives if the doctor ends: SIGKILL for triad, SIGTERM for a launcher, which then ends
  // its ranks.
  const int at_our_end = words.front() == own_program() ? SIGKILL : SIGTERM;
  const pid_t pid = fork();
  if (pid < 0) fail("{} cannot be started: {}", words.front(), std::strerror(errno));
  if (pid > 0) return pid;
  prctl(PR_SET_PDEATHSIG, at_our_end);
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(nothing, STDIN_FILENO), dup2(output, STDOUT_FILENO), dup2(output, STDERR_FILENO);
  signal(SIGPIPE, SIG_DFL), signal(SIGXFSZ, SIG_DFL);
  execve(argv[0], argv.data(), envp.data());
  constexpr int kCannotRun = 127;
  _exit(kCannotRun);
}

// ---- life signs ----

// Watches a folder for life signs: growing output, new heartbeats, CPU time.
class LifeSigns {
 public:
  LifeSigns(Descendants& descendants, std::string folder, bool busy_is_alive)
      : descendants_(descendants), folder_(std::move(folder)), busy_is_alive_(busy_is_alive) {}

  // Looks for life signs. passed_s: seconds since the last call.
  void poll(double passed_s) {
    uintmax_t seen = 0;
    std::error_code gone;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      const std::string name = entry.path().filename().string();
      if (name == "output.txt" || name.starts_with("heartbeat_rank")) seen += fs::file_size(entry.path(), gone);
    }
    const bool grew = seen != std::exchange(seen_, seen);
    if (grew) read_heartbeats();
    long ticks = 0;
    if (busy_is_alive_)
      for (const Process& p : descendants_.members()) ticks += p.ticks;
    silent_s_ = grew || ticks > ticks_ ? 0 : silent_s_ + passed_s;
    ticks_ = std::max(ticks_, ticks);
  }
  double silent_s() const { return silent_s_; }
  bool says_hung() const { return says_hung_; }
  std::string last() const {
    if (!beat_.empty()) return beat_;
    const std::vector<std::string> lines = whole_lines(folder_ + "/output.txt");
    return lines.empty() ? "nothing was printed" : shortened(lines.back());
  }

 private:
  // The last heartbeat in a file that isn't "stackdump", because the dump that the doctor requests must not hide an
  // earlier "hung".
  static Json newest_in(const std::string& path) {
    const std::vector<std::string> lines = whole_lines(path);
    for (auto line = lines.rbegin(); line != lines.rend(); ++line)
      if (const Json beat = Json::parse(*line, nullptr, /*allow_exceptions=*/false);
          !beat.is_object() || beat.value("msg", "") != "stackdump")
        return beat;
    return {};
  }
  void read_heartbeats() {
    says_hung_ = false;
    double newest = 0;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      if (!entry.path().filename().string().starts_with("heartbeat_rank")) continue;
      const Json beat = newest_in(entry.path().string());
      if (!beat.is_object()) continue;
      const bool hung = beat.value("msg", "") == "hung";
      if (!hung && (says_hung_ || beat.value("ts", 0.0) < newest)) continue;
      says_hung_ = says_hung_ || hung;
      newest = beat.value("ts", 0.0);
      beat_ = fmt::format("rank {} \"{}\" at step {}{}", beat.value("rank", 0), beat.value("msg", "?"),
                          beat.value("step", 0), beat.contains("at") ? ", " + beat["at"].get<std::string>() : "");
    }
  }

  Descendants& descendants_;
  std::string folder_, beat_;
  bool busy_is_alive_, says_hung_ = false;
  uintmax_t seen_ = 0;
  long ticks_ = 0;
  double silent_s_ = 0;
};

}  // namespace

Outcome run_commands(const std::vector<Command>& commands, Inherit inherit, const std::string& folder,
                     const TimeLimits& limits) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const std::string path = folder + "/output.txt";
  const FileHandle output(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666));
  if (output.get() < 0) fail("{} cannot be written: {}", path, std::strerror(errno));
  Descendants descendants;
  Reaper reaper;
  std::vector<pid_t> children;
  for (const Command& command : commands) children.push_back(start(command, inherit, output.get()));

  LifeSigns signs(descendants, folder, limits.busy_is_alive);
  Outcome ended;
  Clock::time_point last = Clock::now();
  for (bool running = true; running; std::this_thread::sleep_for(kPollInterval)) {
    reaper.reap();
    running = false;
    for (const pid_t child : children) running = running || !reaper.ended(child);
    // One iteration adds at most one second to the doctor's clock, because the machine may have been suspended in
    // between; the watchdog counts in the same way.
    const double real_s = seconds_since(std::exchange(last, Clock::now())), passed_s = std::min(1.0, real_s);
    signs.poll(passed_s);
    ended.seconds += passed_s;
    ended.stopped_s += real_s - passed_s;
    if (!running) break;
    if (signs.says_hung())
      ended.how = Outcome::How::hung;
    else if (signs.silent_s() >= limits.silent_s)
      ended.how = Outcome::How::silent;
    else if (ended.seconds - signs.silent_s() >= limits.limit_s)
      ended.how = Outcome::How::late;
    if (ended.how != Outcome::How::exited) {
      if (ended.how == Outcome::How::silent) request_stack_dumps(descendants, folder);
      break;
    }
  }
  ended.last_sign = signs.last();
  end_all(descendants, reaper);
  if (ended.how == Outcome::How::exited)
    for (auto child = children.rbegin(); child != children.rend(); ++child)
      if (reaper.code(*child) != 0) ended.exit_code = reaper.code(*child);
  return ended;
}

std::string find_program(const std::string& name) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');)
    if (const std::string file = folder + "/" + name; !folder.empty() && access(file.c_str(), X_OK) == 0) return file;
  return "";
}

std::string own_program() { return fs::read_symlink("/proc/self/exe").string(); }

}  // namespace triad
