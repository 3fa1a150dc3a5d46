// The helpers by which tests run programs: outputs, limits, ports.
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "io/file.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

using namespace triad;
using namespace triad::test;

namespace {

// The error message with which f ends, after the limit in seconds; "" if it ends in time.
template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const std::runtime_error& e) { return e.what(); }
  return "";
}

// Waits until a process has ended; its parent need not have reaped it (Z).
bool has_ended(int pid) {
  for (int i = 0; i < 60000; ++i) {
    const std::string stat = read_text("/proc/" + std::to_string(pid) + "/stat");
    if (stat.empty() || stat.at(stat.rfind(')') + 2) == 'Z') return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

}  // namespace

TEST_CASE("program: output for programs is standard output alone", "[tools]") {
  const Outcome outcome = run_command("echo first; echo noise >&2; echo second");
  CHECK(outcome.standard_output == "first\nsecond\n");
  for (const char* line : {"first\n", "noise\n", "second\n"}) CHECK(has(outcome.output, line));
  CHECK(run_command("exit 3").exit_code == 3);
  CHECK(run_command("kill -s KILL $$").exit_code == 128 + SIGKILL);
}

TEST_CASE("program: a command that hangs is killed with its children, and its output is in the error",
          "[tools][waits]") {
  const TemporaryFolder folder;
  const std::string pids = folder.file("pids"),
                    line = "sh -c 'trap \"\" TERM; echo $$ >" + pids +
                           "; echo to both; sleep 1000; sleep 1000' & echo to both >&2; wait";
  std::string error;
  for (double limit_s = 0.25; !has(error, "to both\nto both\n"); limit_s *= 2) {  // a slow machine needs more
    error = error_of([&] { run_command(line, limit_s); });
    INFO(error);
    REQUIRE(has(error, "killed after "));
    REQUIRE(has(error, line));
  }
  CHECK(has_ended(std::stoi(read_text(pids))));
}

TEST_CASE("program: a background program that hangs is killed, and its output is in the error", "[tools]") {
  const TemporaryFolder folder;
  const std::string started = folder.file("started");
  int pid = 0;
  {
    BackgroundProgram program("", "echo reads nothing; echo > " + started + "; sleep 1000; exec ");
    wait_for_file(started);
    pid = program.pid();
    const std::string error = error_of([&] { program.wait(0); });
    INFO(error);
    CHECK(has(error, "still runs after 0 s"));
  }
  CHECK(has_ended(pid));
}

TEST_CASE("program: a reserved port is free to listen at, and no other process gets it", "[tools]") {
  CHECK(reserved_port(0) == reserved_port(0));
  CHECK(reserved_port(0) != reserved_port(1));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(reserved_port(0)));
  const FileHandle socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto bind_socket = [&] {
    return bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  };
  CHECK(!bind_socket());  // same as if a process listened there
  CHECK(errno == EADDRINUSE);
  const int on = 1;
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  CHECK(bind_socket());
  CHECK(listen(socket.get(), 1) == 0);
}
