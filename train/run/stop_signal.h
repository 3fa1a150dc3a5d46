// SIGTERM, SIGINT, SIGHUP, SIGUSR2 and SIGXCPU request a checkpoint and an orderly stop when the current step ends. A
// second SIGINT (Ctrl-C) ends the process immediately. A second of the others does so only after a SIGINT in between,
// because launchers often send SIGTERM to the process and again to its group, a closed terminal sends several SIGHUP,
// and SIGXCPU comes every second. A process that ignores SIGHUP at its start (nohup) goes on ignoring it.
#pragma once
#include <cstdint>
#include <optional>
#include <string>

namespace triad {

// Installs the handlers. acknowledge: this process acknowledges a signal on stderr immediately; set it on one rank
// only. launcher: LaunchEnv's. A process without one promises the checkpoint; under a launcher, which may kill it after
// a time that it cannot know, it says so, and how to stop in time.
void await_stop_signals(bool acknowledge, const std::string& launcher, const std::string& run_folder);
int stop_signal();                  // the last signal received; 0: none
int stopped_exit_code(int signal);  // 128 + signal, as in a shell: for a process whose steps a signal loses
// For the messages: the step that is under way, and the newest checkpoint's step that is whole on disk.
void step_begins(int64_t step);
void checkpoint_is_whole(int64_t step);
int64_t last_begun_step();  // 0: none has begun
std::optional<int64_t> last_whole_checkpoint();

}  // namespace triad
