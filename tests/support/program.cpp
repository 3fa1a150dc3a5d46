#include "tests/support/program.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "engine/comm/link.h"

namespace triad::test {

namespace {
int exit_code_of(int status) {
  constexpr int kSignalBase = 128;
  return WIFEXITED(status) ? WEXITSTATUS(status) : kSignalBase + WTERMSIG(status);
}

#ifdef TRIAD_LINKED_SOURCE
// Creates a symbolic link to the source or build folder at a path without blanks; CMakeLists.txt explains when tests
// need one. Runs before each test, since a cleanup of the temporary folder may have removed the link.
void make_link(const std::string& link, const std::string& target) {
  std::error_code absent;
  if (std::filesystem::read_symlink(link, absent) == target) return;
  // A temporary name of this process's own, because many tests start concurrently.
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
  // waits for others gives up its core. Each test process has a folder of its own for Open MPI's session files: in the
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
  std::printf("SKIPPED: no MPI (%s)\n", there ? why_no_mpi().c_str() : "no mpirun");
  return false;
}

Outcome run_ranks(int ranks, const std::string& args) { return run_command(mpirun(ranks) + TRIAD_PROGRAM " " + args); }

std::string with_faults(const std::string& variables) {
  return "ASAN_OPTIONS=verify_asan_link_order=0 LD_PRELOAD=" TRIAD_FAULTS " " + variables + " ";
}

Outcome run_command(const std::string& line) {
  const std::string command = "(" + line + ") 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("cannot run " + command);
  Outcome outcome;
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) outcome.output.append(buffer, n);
  outcome.exit_code = exit_code_of(pclose(pipe));
  return outcome;
}

BackgroundProgram::BackgroundProgram(const std::string& args, const std::string& before, const std::string& output)
    : pid_(fork()) {
  if (pid_ < 0) throw std::runtime_error("cannot fork");
  if (pid_ > 0) return;
  const std::string command =
      before + (has(before, "exec ") ? "" : "exec ") + TRIAD_PROGRAM " " + args + " >" + output + " 2>&1";
  execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
  _exit(127);
}

void BackgroundProgram::send(int signal) const { kill(pid_, signal); }

BackgroundProgram::~BackgroundProgram() {
  if (waited_) return;
  // A suspended process needs SIGCONT first. On SIGTERM mpirun ends its ranks.
  for (const int signal : {SIGCONT, SIGTERM}) send(signal);
  for (int i = 0; i < 100; ++i) {
    if (waitpid(pid_, nullptr, WNOHANG) != 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  send(SIGKILL);
  wait();
}

int BackgroundProgram::wait() {
  waited_ = true;
  int status = 0;
  waitpid(pid_, &status, 0);
  return exit_code_of(status);
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
