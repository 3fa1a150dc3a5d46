// Runs the built program as a user would: exit code and output.
#pragma once
#include <string>
#include <vector>

namespace triad::test {

struct Outcome {
  int exit_code = 0;      // 128 + signal where one ended it
  std::string output;     // stdout and stderr
};

// `triad ARGS`, through a shell; environment "NAME=value ..." in front.
Outcome run_program(const std::string& args, const std::string& environment = "");

// `triad ARGS` in the background, its output dropped; to be killed or waited for.
class BackgroundProgram {
 public:
  explicit BackgroundProgram(const std::string& args);
  void send(int signal) const;
  int wait();  // exit code, as in Outcome

 private:
  int pid_;
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

void write_text(const std::string& path, const std::string& text);
std::string read_text(const std::string& path);

}  // namespace triad::test
