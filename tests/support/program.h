// Runs the built program in a shell, as a user does, and returns its exit code and output.
#pragma once
#include <string>
#include <vector>

namespace triad::test {

struct Outcome {
  int exit_code = 0;            // 128 + the signal number if a signal ended the program
  std::string output;           // stdout and stderr, interleaved: for words that a user must see
  std::string standard_output;  // stdout alone: for output that programs read (launchers write to stderr as they like)
};

// The time after which a program that still runs is killed, with its children, and fails its test. No test depends on
// the limit: it ends what hangs, and is below a whole test's TIMEOUT in CMakeLists.txt.
inline constexpr double kProgramLimitS = 400;

// Runs `ENVIRONMENT triad ARGS` in a shell; environment: "NAME=value ...".
Outcome run_program(const std::string& args, const std::string& environment = "");

// Returns how a shell command begins that runs `ranks` processes with mpirun; the caller appends the program. It works
// for any user, root included, and with fewer cores than ranks.
std::string mpirun(int ranks);
// Returns false, and marks the test as skipped, if mpirun or MPI is missing: `if (!require_mpirun()) return;`.
bool require_mpirun();
// Runs `triad ARGS` on this many ranks, with mpirun.
Outcome run_ranks(int ranks, const std::string& args);
// Runs any shell command. Throws, with the output so far, if it runs longer than the limit.
Outcome run_command(const std::string& command, double limit_s = kProgramLimitS);

// Returns a shell command prefix that preloads tests/fault_injection/'s faults. The variables choose the faults, for
// example TRIAD_FAULTS="1 60".
std::string with_faults(const std::string& variables);

// A new empty folder in the system's temporary folder, removed by the destructor.
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

// Runs `triad ARGS` in the background, with its output in the file `output`, or in a temporary file if that is empty.
// `before` precedes the program in the shell command: variables, or another command that begins with `exec`.
class BackgroundProgram {
 public:
  explicit BackgroundProgram(const std::string& args, const std::string& before = "", const std::string& output = "");
  ~BackgroundProgram();  // kills a program that is still running because a test failed before wait()
  BackgroundProgram(const BackgroundProgram&) = delete;
  void send(int signal) const;
  // Waits until the program ends, and returns its exit code as in Outcome. Throws, with the program's output, if it
  // runs longer than the limit from now on.
  int wait(double limit_s = kProgramLimitS);
  int pid() const { return pid_; }
  const std::string& output_file() const { return output_; }

 private:
  TemporaryFolder folder_;
  std::string output_;
  int pid_;
  bool waited_ = false;
};

// Returns a free TCP port on this host, and reserves it until this process ends: meanwhile no process gets it as a free
// port, but a program that is started with this number can listen at it. The same number for the same `index`.
int reserved_port(int index = 0);

size_t count_files(const std::string& folder);  // directory entries: files, folders and links
void write_text(const std::string& path, const std::string& text);
std::string read_text(const std::string& path);
// Return as soon as another process has written the text or the file; throw after three minutes.
void wait_for_text(const std::string& path, const std::string& text);
void wait_for_file(const std::string& path);
inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace triad::test
