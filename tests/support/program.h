// Runs the built program as a user would: exit code and output.
#pragma once
#include <string>
#include <vector>

namespace triad::test {

struct Outcome {
  int exit_code = 0;   // 128 + signal where one ended it
  std::string output;  // stdout and stderr
};

// `triad ARGS`, through a shell; environment "NAME=value ..." in front.
Outcome run_program(const std::string& args, const std::string& environment = "");

// The beginning of a command that starts `ranks` processes under mpirun, here, whoever we are and however few cores
// there are; what follows is the program.
std::string mpirun(int ranks);
// `if (!require_mpirun()) return;`: as require_gpu(), for several ranks.
bool require_mpirun();
// `triad ARGS` on that many ranks.
Outcome run_ranks(int ranks, const std::string& args);
// Any command of the shell.
Outcome run_command(const std::string& command);

// In front of a command: a fault of tests/plant/, as TRIAD_FAULTS="1 60" asks for it.
std::string with_faults(const std::string& variables);

// `triad ARGS` in the background, its output dropped; to be killed or waited for. Variables may stand before, and a
// command that `exec` begins.
class BackgroundProgram {
 public:
  explicit BackgroundProgram(const std::string& args, const std::string& before = "",
                             const std::string& output = "/dev/null");
  ~BackgroundProgram();  // one that nobody waited for, because a test failed, is ended
  BackgroundProgram(const BackgroundProgram&) = delete;
  void send(int signal) const;
  int wait();  // exit code, as in Outcome
  int pid() const { return pid_; }

 private:
  int pid_;
  bool waited_ = false;
};

// A fresh empty folder under the system's temporary one, removed at the end of the scope.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

size_t count_files(const std::string& folder);  // in it, folders and links too
void write_text(const std::string& path, const std::string& text);
std::string read_text(const std::string& path);
// Until another process has written it there; throws after three minutes, which only what hangs takes.
void wait_for_text(const std::string& path, const std::string& text);
void wait_for_file(const std::string& path);
inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace triad::test
