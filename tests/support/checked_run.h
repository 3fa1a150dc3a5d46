// Runs the built program as tests/support/program.h does, and checks how it ends.
#pragma once
#include <string>
#include <vector>

namespace triad::test {

// Runs `ENVIRONMENT triad ARGS`, requires exit code 0, and returns stdout and stderr, interleaved.
std::string run_ok(const std::string& args, const std::string& environment = "");
// Runs the program, and checks its exit code and that its output contains each word.
void refused(const std::string& args, int exit_code, const std::vector<std::string>& words,
             const std::string& environment = "");

}  // namespace triad::test
