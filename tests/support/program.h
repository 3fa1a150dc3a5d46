// Runs the built program in a shell, as a user does, and returns exit code and output.
#pragma once
#include <string>
#include <vector>

namespace triad::test {

struct Outcome {
  int exit_code = 0;   // 128 + signal if a signal ended it
  std::string output;  // stdout and stderr
};

// Runs `ENVIRONMENT triad ARGS` in a shell; environment: "NAME=value ...".
Outcome run_program(const std::string& args, const std::string& environment = "");

// The beginning of a command that starts `ranks` processes with mpirun, for any user and number of cores; append the
// program.
std::string mpirun(int ranks);
// `if (!require_mpirun()) return;`: skips a test where mpirun or MPI is missing, as require_gpu() does without a GPU.
bool require_mpirun();
// Runs `triad ARGS` on that many ranks.
Outcome run_ranks(int ranks, const std::string& args);
// Runs any shell command.
Outcome run_command(const std::string& command);

// A prefix of a command that preloads the faults of tests/fault_injection/; variables: such as TRIAD_FAULTS="1 60".
std::string with_faults(const std::string& variables);

// `triad ARGS` in the background. before: variables, or a command that begins with `exec`; output: a file.
class BackgroundProgram {
 public:
  explicit BackgroundProgram(const std::string& args, const std::string& before = "",
                             const std::string& output = "/dev/null");
  ~BackgroundProgram();  // ends the program if wait() was not called, because a test failed
  BackgroundProgram(const BackgroundProgram&) = delete;
  void send(int signal) const;
  int wait();  // waits for the end; returns the exit code as in Outcome
  int pid() const { return pid_; }

 private:
  int pid_;
  bool waited_ = false;
};

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

size_t count_files(const std::string& folder);  // number of entries, folders and links included
void write_text(const std::string& path, const std::string& text);
std::string read_text(const std::string& path);
// Wait until another process has written the text or the file; throw after three minutes.
void wait_for_text(const std::string& path, const std::string& text);
void wait_for_file(const std::string& path);
inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace triad::test
