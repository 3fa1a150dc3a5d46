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
#include "io/file.h"
#include "io/json_config.h"
#include "tools/csv_table.h"

extern char** environ;

namespace triad {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(50);

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// ---- processes ----

struct Process {
  pid_t pid = 0, parent = 0;
  long ticks = 0;                // on processors
  unsigned long long began = 0;  // in ticks since this machine's start: with the pid, it names a process for good
};

std::vector<Process> all_processes() {
  std::vector<Process> all;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    std::string text;
    if (pid <= 0 || !std::getline(std::ifstream(entry.path() / "stat"), text)) continue;  // it may just have gone
    const size_t name_end = text.rfind(')');
    if (name_end == std::string::npos) continue;
    std::istringstream fields(text.substr(name_end + 1));
    std::string skipped;
    Process p{.pid = pid};
    fields >> skipped >> p.parent;
    constexpr int kFieldsToUserTime = 9;  // of proc(5), behind the parent's
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

// What was started since this object was made: of this process, all the way down. What loses its parent becomes our own
// child (PR_SET_CHILD_SUBREAPER), so that nothing a launcher has started gets lost. But others may be, or become, our
// children too: those of a shell that made itself into this program (`server & exec triad doctor`), and, where we are a
// container's first process, all that lose their parent. So who was there before is a stranger, and so is whom a
// stranger has started; only who lost a stranger between two looks is taken for one of us.
class Family {
 public:
  Family() {
    for (const Process& p : all_processes()) strangers_[p.pid] = p.began;
    strangers_.erase(getpid());
  }

  std::vector<Process> members() {
    const std::vector<Process> all = all_processes();
    for (const Process& p : all)  // a pid that was given again
      if (const auto known = strangers_.find(p.pid); known != strangers_.end() && known->second != p.began)
        strangers_.erase(known);
    for (bool more = true; std::exchange(more, false);)
      for (const Process& p : all) {
        const bool outside = p.parent == 0 || strangers_.count(p.parent) > 0;  // 0: of no process in this container
        if (outside && p.pid != getpid()) more = strangers_.emplace(p.pid, p.began).second || more;
      }
    std::vector<Process> found;
    std::vector<pid_t> parents = {getpid()};
    while (!parents.empty()) {
      const pid_t parent = parents.back();
      parents.pop_back();
      for (const Process& p : all)
        if (p.parent == parent && strangers_.count(p.pid) == 0) found.push_back(p), parents.push_back(p.pid);
    }
    return found;
  }

 private:
  std::map<pid_t, unsigned long long> strangers_;  // and when each began
};

// The children's exit codes, as they end.
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

void end_all(Family& family, Reaper& reaper) {
  constexpr double kPatienceS = 10;  // a process within the kernel's own wait cannot be ended
  for (const auto begin = Clock::now(); seconds_since(begin) < kPatienceS; std::this_thread::sleep_for(kLook)) {
    reaper.reap();
    const std::vector<Process> left = family.members();
    if (left.empty()) return;
    for (const Process& p : left) kill(p.pid, SIGKILL);
  }
}

// A run that hangs is asked for its stacks before it is ended (train/monitor/watchdog.h); one that is stopped cannot
// answer. Who has no watchdog, and so no heartbeats, is not asked: the signal would end it.
void ask_for_stacks(Family& family, const std::string& folder) {
  const auto files = [&](const char* prefix) {
    int n = 0;
    for (const auto& entry : fs::directory_iterator(folder)) n += entry.path().filename().string().starts_with(prefix);
    return n;
  };
  if (files("heartbeat_rank") == 0) return;
  const std::string self = own_program();
  std::error_code gone;
  int asked = 0;
  for (const Process& p : family.members())
    if (fs::read_symlink(fmt::format("/proc/{}/exe", p.pid), gone) == self && kill(p.pid, SIGUSR1) == 0) ++asked;
  constexpr double kPatienceS = 1.5;
  for (const auto begin = Clock::now(); files("stackdump_") < asked && seconds_since(begin) < kPatienceS;)
    std::this_thread::sleep_for(kLook);
}

// ---- starting one ----

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
  // Who ends with the doctor: our own program at once; a launcher in order, so that its ranks end too.
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

// ---- signs of life ----

class Signs {
 public:
  Signs(Family& family, std::string folder, bool busy_is_alive)
      : family_(family), folder_(std::move(folder)), busy_is_alive_(busy_is_alive) {}

  // passed_s: since the last look.
  void look(double passed_s) {
    uintmax_t seen = 0;
    std::error_code gone;
    for (const auto& entry : fs::directory_iterator(folder_)) {
      const std::string name = entry.path().filename().string();
      if (name == "output.txt" || name.starts_with("heartbeat_rank")) seen += fs::file_size(entry.path(), gone);
    }
    const bool told = seen != std::exchange(seen_, seen);
    if (told) read_heartbeats();
    long ticks = 0;
    if (busy_is_alive_)
      for (const Process& p : family_.members()) ticks += p.ticks;
    silent_s_ = told || ticks > ticks_ ? 0 : silent_s_ + passed_s;
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
  // A stack dump that was asked for takes no verdict back.
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

  Family& family_;
  std::string folder_, beat_;
  bool busy_is_alive_, says_hung_ = false;
  uintmax_t seen_ = 0;
  long ticks_ = 0;
  double silent_s_ = 0;
};

}  // namespace

Ended run_commands(const std::vector<Command>& commands, Inherit inherit, const std::string& folder,
                   const Patience& patience) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const std::string path = folder + "/output.txt";
  const FileHandle output(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666));
  if (output.get() < 0) fail("{} cannot be written: {}", path, std::strerror(errno));
  Family family;
  Reaper reaper;
  std::vector<pid_t> children;
  for (const Command& command : commands) children.push_back(start(command, inherit, output.get()));

  Signs signs(family, folder, patience.busy_is_alive);
  Ended ended;
  Clock::time_point last = Clock::now();
  for (bool running = true; running; std::this_thread::sleep_for(kLook)) {
    reaper.reap();
    running = false;
    for (const pid_t child : children) running = running || !reaper.ended(child);
    // A machine that stood still meanwhile has waited for nobody: a look counts a second at most, as the watchdog's.
    const double real_s = seconds_since(std::exchange(last, Clock::now())), passed_s = std::min(1.0, real_s);
    signs.look(passed_s);
    ended.seconds += passed_s;
    ended.still_s += real_s - passed_s;
    if (!running) break;
    if (signs.says_hung())
      ended.how = Ended::How::hung;
    else if (signs.silent_s() >= patience.silent_s)
      ended.how = Ended::How::silent;
    else if (ended.seconds - signs.silent_s() >= patience.limit_s)
      ended.how = Ended::How::late;
    if (ended.how != Ended::How::exited) {
      if (ended.how == Ended::How::silent) ask_for_stacks(family, folder);
      break;
    }
  }
  ended.last_sign = signs.last();
  end_all(family, reaper);
  if (ended.how == Ended::How::exited)
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
