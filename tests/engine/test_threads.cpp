// The CPU loops' thread pool: waiting without CPU time, nested loops and exceptions, and how many threads a process
// gets.
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <stdexcept>
#include <thread>
#include <vector>

#include "engine/process/cpu_threads.h"
#include "kernels/common/parallel.h"
#include "tests/support/program.h"
#include "tests/support/test.h"

namespace triad::test {

namespace {

// A context whose loops use this many threads.
struct LoopContext {
  explicit LoopContext(int threads) : runtime({.device = Device::cpu()}) { ctx().threads = threads; }
  Context& ctx() { return runtime.ctx(); }
  Runtime runtime;
};

double seconds_of(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// Keeps the calling thread busy until it has used this much CPU time.
void work_for(double seconds) {
  for (const double begin = seconds_of(CLOCK_THREAD_CPUTIME_ID);
       seconds_of(CLOCK_THREAD_CPUTIME_ID) - begin < seconds;) {}
}

void write_file(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  write_text(path, text);
}

}  // namespace

// This test measures CPU time, which doesn't depend on the machine's other load. Threads that spun would use
// milliseconds after each loop.
TEST_CASE("threads: waiting threads use no CPU time", "[threads]") {
  LoopContext c(2);
  constexpr int kLoops = 100;
  const auto loop = [&] { parallel_for(c.ctx(), 2, [](int64_t) { work_for(100e-6); }); };
  // The first loop starts the threads.
  loop();
  // Library threads, such as OpenBLAS's, may spin for a moment after the process has started.
  for (double before = -1, now = seconds_of(CLOCK_PROCESS_CPUTIME_ID); now - before > 1e-3;
       before = now, now = seconds_of(CLOCK_PROCESS_CPUTIME_ID))
    usleep(50000);
  const double process = seconds_of(CLOCK_PROCESS_CPUTIME_ID), own = seconds_of(CLOCK_THREAD_CPUTIME_ID);
  for (int i = 0; i < kLoops; ++i) {
    loop();
    usleep(5000);
  }
  const double other_seconds =
      seconds_of(CLOCK_PROCESS_CPUTIME_ID) - process - (seconds_of(CLOCK_THREAD_CPUTIME_ID) - own);
  INFO("the other threads took " << other_seconds << " s of CPU time");
  CHECK(other_seconds < 0.1);  // seconds; their share in the loops takes 0.01 s
}

TEST_CASE("threads: a loop runs each iteration once, on any number of threads", "[threads]") {
  for (const int threads : {1, 2, 7, 64}) {
    LoopContext c(threads);
    for (const int64_t n : {0, 1, 2, 63, 1000, 100000}) {
      std::vector<std::atomic<int>> times(static_cast<size_t>(n));
      for (int repeat = 0; repeat < 3; ++repeat)
        parallel_for(c.ctx(), n, [&](int64_t i) { ++times[static_cast<size_t>(i)]; });
      bool thrice = true;
      for (const auto& t : times) thrice = thrice && t == 3;
      INFO(threads << " threads, " << n << " iterations");
      CHECK(thrice);
    }
  }
}

TEST_CASE("threads: nested loops, and concurrent loops of several threads", "[threads]") {
  std::atomic<int64_t> count = 0;
  const auto loops = [&] {
    LoopContext c(3);
    for (int repeat = 0; repeat < 20; ++repeat)
      parallel_for(c.ctx(), 10, [&](int64_t) {
        work_for(50e-6);
        parallel_for(c.ctx(), 10, [&](int64_t) { ++count; });
      });
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) callers.emplace_back(loops);
  for (std::thread& caller : callers) caller.join();
  CHECK(count == 3 * 20 * 10 * 10);
}

TEST_CASE("threads: an exception of an iteration arrives at the caller, and the next loop runs", "[threads]") {
  LoopContext c(4);
  for (const int64_t bad : {0, 37, 99}) {
    const auto loop = [&](bool throws) {
      parallel_for(c.ctx(), 100, [&](int64_t i) {
        work_for(20e-6);
        if (throws && i == bad) throw std::runtime_error("iteration " + std::to_string(i));
      });
    };
    // After this loop the duration is known, so the next one is split over threads from its first iteration.
    loop(false);
    CHECK_THROWS_AS(loop(true), std::runtime_error);
    CHECK_NOTHROW(loop(false));
  }
}

TEST_CASE("threads: cores, CPU quota and ranks determine the number of threads", "[threads]") {
  CHECK(choose_threads({.cores = 8, .machine_cores = 8}) == 8);
  CHECK(choose_threads({.cores = 4, .machine_cores = 64}) == 4);
  CHECK(choose_threads({.cores = 64, .machine_cores = 64, .quota = 4}) == 4);
  CHECK(choose_threads({.cores = 64, .machine_cores = 64, .quota = 0.5}) == 1);
  CHECK(choose_threads({.cores = 64, .machine_cores = 64, .quota = 16, .local_ranks = 4}) == 4);
  // Ranks on a host share its visible cores. A launcher that binds ranks may still leave all cores visible.
  CHECK(choose_threads({.cores = 64, .machine_cores = 64, .local_ranks = 4, .launcher_binds = true}) == 16);
  CHECK(choose_threads({.cores = 8, .machine_cores = 64, .local_ranks = 4}) == 2);
  // A launcher that binds ranks may give each its own core, or a whole 32-core socket to several ranks.
  CHECK(choose_threads({.cores = 1, .machine_cores = 64, .local_ranks = 4, .launcher_binds = true}) == 1);
  CHECK(choose_threads({.cores = 32, .machine_cores = 64, .local_ranks = 4, .launcher_binds = true}) == 16);
  CHECK(choose_threads({.cores = 2, .machine_cores = 2, .local_ranks = 4}) == 1);
  // 0: unknown local rank count.
  CHECK(choose_threads({.cores = 2, .machine_cores = 2, .local_ranks = 0}) == 2);
}

TEST_CASE("threads: the CPU quota is the lowest of the process's control groups, in versions 1 and 2", "[threads]") {
  const TemporaryFolder folder;
  const std::string root = folder.path();
  CHECK(cpu_quota(root) == 0);
  write_file(root + "/proc/self/cgroup", "0::/job/step\n");
  CHECK(cpu_quota(root) == 0);
  write_file(root + "/sys/fs/cgroup/job/step/cpu.max", "max 100000\n");
  CHECK(cpu_quota(root) == 0);
  write_file(root + "/sys/fs/cgroup/job/cpu.max", "250000 100000\n");
  CHECK(cpu_quota(root) == 2.5);
  write_file(root + "/sys/fs/cgroup/cpu.max", "400000 100000\n");
  CHECK(cpu_quota(root) == 2.5);

  write_file(root + "/proc/self/cgroup", "7:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n");
  write_file(root + "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  write_file(root + "/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  CHECK(cpu_quota(root) == 0);
  write_file(root + "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "300000\n");
  CHECK(cpu_quota(root) == 3);
}

// CUDA_VISIBLE_DEVICES is empty, so that there is no GPU on any machine.
TEST_CASE("CPU: the error of a config for a GPU names the config for a CPU", "[threads]") {
  const TemporaryFolder folder;
  const std::string before = "CUDA_VISIBLE_DEVICES=", out = " --set log.out_dir=" + folder.file("run");
  for (const char* config : {"m7c_125m", "m7c_125m_8k"}) {
    const Outcome o = run_program("train " TRIAD_SOURCE_DIR "/configs/" + std::string(config) + ".json" + out, before);
    INFO(o.output);
    CHECK(o.exit_code == 1);
    CHECK(o.output.find("device cuda was asked for") != std::string::npos);
    CHECK(o.output.find("configs/m7c_125m_cpu.json is made for a CPU") != std::string::npos);
  }
  const Outcome alone =
      run_program("train " TRIAD_SOURCE_DIR "/configs/tiny.json --set runtime.device=cuda" + out, before);
  INFO(alone.output);
  CHECK(alone.exit_code == 1);
  CHECK(alone.output.find("--set runtime.device=cpu --set runtime.precision=fp32") != std::string::npos);
}

TEST_CASE("CPU: training in bf16 works, with a warning that gives the time of a step", "[threads]") {
  const TemporaryFolder folder;
  const auto train = [&](const std::string& precision) {
    return run_program("train " TRIAD_SOURCE_DIR
                       "/configs/tiny.json --overwrite --set runtime.device=cpu --set train.steps=2"
                       " --set log.out_dir=" +
                       folder.file("run") + " --set runtime.precision=" + precision);
  };
  const Outcome bf16 = train("bf16"), fp32 = train("fp32");
  INFO(bf16.output);
  CHECK(bf16.exit_code == 0);
  CHECK(bf16.output.find("warning: runtime.precision is bf16 on a CPU") != std::string::npos);
  CHECK(bf16.output.find("A step takes about ") != std::string::npos);
  CHECK(fp32.exit_code == 0);
  CHECK(fp32.output.find("warning") == std::string::npos);
}

}  // namespace triad::test
