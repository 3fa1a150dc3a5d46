#include "tests/support/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/comm/link.h"
#include "io/file.h"
#include "tests/support/skip.h"

namespace triad::test {

namespace {
using Clock = std::chrono::steady_clock;
constexpr double kKillAfterS = 10;  // seconds that a program has to end after SIGTERM

int exit_code_of(int status) {
  constexpr int kSignalBase = 128;
  return WIFEXITED(status) ? WEXITSTATUS(status) : kSignalBase + WTERMSIG(status);
}

// The command with this build's program. The bare tests (CMakeLists.txt) share the others' objects, in which
// TRIAD_PROGRAM is the whole build's program; the bare one is in their own folder.
std::string with_own_program(std::string command) {
  namespace fs = std::filesystem;
  static const bool is_bare = fs::read_symlink("/proc/self/exe").parent_path().filename() == "bare";
  if (!is_bare) return command;
  const std::string whole = TRIAD_PROGRAM, bare = (fs::path(whole).parent_path() / "bare/triad").string();
  for (size_t at = 0; (at = command.find(whole, at)) != std::string::npos; at += bare.size())
    command.replace(at, whole.size(), bare);
  return command;
}

// When a program's time ends.
class Deadline {
 public:
  explicit Deadline(double seconds) : end_(Clock::now() + std::chrono::duration<double>(seconds)) {}
  bool passed() const { return Clock::now() >= end_; }
  int left_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
  }

 private:
  std::chrono::time_point<Clock, std::chrono::duration<double>> end_;
};

// Starts a shell command as the leader of its own process group, so a signal reaches its children too. `redirect` is
// called in the new process.
template <class Redirect>
int start_shell(const std::string& line, Redirect&& redirect) {
  const std::string command = with_own_program(line);
  const int pid = fork();
  if (pid < 0) throw std::runtime_error("cannot fork");
  if (pid == 0) {
    setpgid(0, 0);
    redirect();
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  setpgid(pid, pid);  // here too: a signal may be sent before the new process has come so far
  return pid;
}

// Waits until a process ends or the deadline passes. Returns its status; nullopt if it still runs.
std::optional<int> wait_until(int pid, const Deadline& deadline) {
  for (int status = 0;;) {
    if (waitpid(pid, &status, WNOHANG) != 0) return status;
    if (deadline.passed()) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// A pipe from a program: its reading end, and what was read.
struct PipeFrom {
  FileHandle read_end, write_end;
  PipeFrom() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("cannot make a pipe");
    read_end = FileHandle(ends[0]), write_end = FileHandle(ends[1]);
  }
};

// Appends what the program writes, until it closes both pipes. Returns false if the deadline is earlier.
bool read_outputs(PipeFrom& out, PipeFrom& err, Outcome& outcome, const Deadline& deadline) {
  while (out.read_end.get() >= 0 || err.read_end.get() >= 0) {
    pollfd ready[] = {{.fd = out.read_end.get(), .events = POLLIN, .revents = 0},
                      {.fd = err.read_end.get(), .events = POLLIN, .revents = 0}};
    poll(ready, 2, deadline.left_ms());
    for (PipeFrom* pipe : {&out, &err}) {
      if (ready[pipe == &err].revents == 0) continue;
      char buffer[4096];
      const ssize_t n = ::read(pipe->read_end.get(), buffer, sizeof buffer);
      if (n <= 0) {
        pipe->read_end.reset();
        continue;
      }
      outcome.output.append(buffer, static_cast<size_t>(n));
      if (pipe == &out) outcome.standard_output.append(buffer, static_cast<size_t>(n));
    }
    if (deadline.passed()) return false;
  }
  return true;
}

// Ends a process group: SIGTERM, on which mpirun ends its ranks, then SIGKILL. `wait` waits until a deadline, and
// returns whether the group has ended.
template <class Wait>
void end_group(int pid, Wait&& wait) {
  for (const int signal : {SIGCONT, SIGTERM}) kill(-pid, signal);  // a suspended process needs SIGCONT first
  if (!wait(Deadline(kKillAfterS))) {
    kill(-pid, SIGKILL);
    wait(Deadline(kKillAfterS));
  }
}

#ifdef TRIAD_LINKED_SOURCE
// Creates a symbolic link to the source or build folder at a path without blanks; CMakeLists.txt explains when tests
// need one. Runs before each test, since cleaning the temporary folder may have removed the link.
void make_link(const std::string& link, const std::string& target) {
  std::error_code absent;
  if (std::filesystem::read_symlink(link, absent) == target) return;
  // A temporary name unique to this process, because many tests start concurrently.
  const std::string own = link + "-" + std::to_string(getpid());
  std::filesystem::create_symlink(target, own);
  std::filesystem::rename(own, link);
}
[[maybe_unused]] const bool links_made = [] {
  make_link(TRIAD_SOURCE_DIR, TRIAD_LINKED_SOURCE);
  make_link(TRIAD_BUILD_DIR, TRIAD_LINKED_BUILD);
  return true;
}();
#endif
}  // namespace

Outcome run_program(const std::string& args, const std::string& environment) {
  return run_command(environment + " " TRIAD_PROGRAM " " + args);
}

std::string mpirun(int ranks) {
  // Open MPI's options allow root, more ranks than cores, containers without ptrace, and hosts without ssh. A rank that
  // waits for others gives up its core. Each test process has its own folder for Open MPI's session files: in the
  // common folder, mpirun fails if another test's mpirun creates the same subfolder at the same moment.
  static const TemporaryFolder sessions;
  return "OMPI_MCA_orte_tmpdir_base=" + sessions.path() +
         " OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_plm_rsh_agent=/bin/false "
         "OMPI_MCA_btl_vader_single_copy_mechanism=none OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1 "
         "exec mpirun --oversubscribe --bind-to none -np " +
         std::to_string(ranks) + " ";
}

bool require_mpirun() {
  const bool there = run_command("command -v mpirun").exit_code == 0;
  if (there && why_no_mpi().empty()) return true;
  return skip("no MPI (" + (there ? why_no_mpi() : "no mpirun") + ")");
}

Outcome run_ranks(int ranks, const std::string& args) { return run_command(mpirun(ranks) + TRIAD_PROGRAM " " + args); }

std::string with_faults(const std::string& variables) {
  return "ASAN_OPTIONS=verify_asan_link_order=0 LD_PRELOAD=" TRIAD_FAULTS " " + variables + " ";
}

Outcome run_command(const std::string& line, double limit_s) {
  PipeFrom out, err;
  const Deadline deadline(limit_s);
  const int pid = start_shell(line, [&] {
    dup2(out.write_end.get(), STDOUT_FILENO);
    dup2(err.write_end.get(), STDERR_FILENO);
  });
  out.write_end.reset(), err.write_end.reset();
  Outcome outcome;
  std::optional<int> status;
  const auto ends_until = [&](const Deadline& end) {
    if (!read_outputs(out, err, outcome, end)) return false;
    if (!status) status = wait_until(pid, end);
    return status.has_value();
  };
  if (!ends_until(deadline)) {
    end_group(pid, ends_until);
    throw std::runtime_error(fmt::format("killed after {} s: {}\nIts output was:\n{}", limit_s, line, outcome.output));
  }
  outcome.exit_code = exit_code_of(*status);
  return outcome;
}

BackgroundProgram::BackgroundProgram(const std::string& args, const std::string& before, const std::string& output)
    : output_(output.empty() ? folder_.file("output") : output),
      pid_(start_shell(
          before + (has(before, "exec ") ? "" : "exec ") + TRIAD_PROGRAM " " + args + " >" + output_ + " 2>&1",
          [] {})) {}

void BackgroundProgram::send(int signal) const { kill(pid_, signal); }

BackgroundProgram::~BackgroundProgram() {
  if (!waited_) end_group(pid_, [&](const Deadline& end) { return wait_until(pid_, end).has_value(); });
}

int BackgroundProgram::wait(double limit_s) {
  const std::optional<int> status = wait_until(pid_, Deadline(limit_s));
  if (!status)
    throw std::runtime_error(
        fmt::format("process {} still runs after {} s. Its output is:\n{}", pid_, limit_s, read_text(output_)));
  waited_ = true;
  return exit_code_of(*status);
}

namespace {

// A socket bound to a free port on all addresses that doesn't listen. Linux lets another process bind to the port if
// both set SO_REUSEADDR, as rank 0 does, and gives it to no process as a free one.
template <class Address>
FileHandle bind_free_port(int family, Address address, in_port_t Address::*port, int* number) {
  FileHandle socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1, off = 0;
  if (family == AF_INET6) setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);  // IPv4 too
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  generic->sa_family = static_cast<sa_family_t>(family);
  if (socket.get() < 0 || setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(socket.get(), generic, size) != 0 || getsockname(socket.get(), generic, &size) != 0)
    return FileHandle(-1);
  *number = ntohs(address.*port);
  return socket;
}

}  // namespace

int reserved_port(int index) {
  static std::mutex mutex;
  static std::map<int, std::pair<FileHandle, int>> ports;
  const std::lock_guard lock(mutex);
  auto& [socket, number] = ports[index];
  if (socket.get() < 0) socket = bind_free_port(AF_INET6, sockaddr_in6{}, &sockaddr_in6::sin6_port, &number);
  if (socket.get() < 0) socket = bind_free_port(AF_INET, sockaddr_in{}, &sockaddr_in::sin_port, &number);
  if (socket.get() < 0) throw std::runtime_error("this host has no free port");
  return number;
}

TemporaryFolder::TemporaryFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "triad-test-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
  path_ = pattern;
}
TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

size_t count_files(const std::string& folder) {
  namespace fs = std::filesystem;
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

void write_text(const std::string& path, const std::string& text) { std::ofstream(path, std::ios::binary) << text; }
std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void wait_for_text(const std::string& path, const std::string& text) {
  for (int i = 0; i < 180000; ++i) {
    if (has(read_text(path), text)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw std::runtime_error(path + " never had \"" + text + "\": " + read_text(path));
}
void wait_for_file(const std::string& path) {
  for (int i = 0; i < 180000; ++i) {
    if (std::filesystem::exists(path)) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  throw std::runtime_error(path + " was not written");
}

}  // namespace triad::test
