// The phases environment and topology: facts about this machine, and copies between its GPUs. A child process (`triad
// doctor --probe machine`) collects the facts, because a driver may hang.
#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>

#include "engine/comm/comm.h"
#include "engine/comm/peers.h"
#include "engine/context.h"
#include "engine/process/counted.h"
#include "engine/process/nvml.h"
#include "engine/units.h"
#include "engine/with_cuda.h"
#include "io/file.h"
#include "kernels/common/blas_core.h"
#include "kernels/ops/linear_fp8.h"
#include "kernels/ops/matmul.h"
#include "tools/doctor/doctor.h"
#include "tools/version.h"
#include "train/config/load_config.h"
#include "train/monitor/env_report.h"

namespace triad {

namespace {

namespace fs = std::filesystem;

double free_disk_mib(const std::string& path) {
  struct statvfs s {};
  return statvfs(path.c_str(), &s) == 0 ? static_cast<double>(s.f_bavail) * static_cast<double>(s.f_frsize) / kMiB : 0;
}

// The number in a /proc/meminfo line, converted to MiB; 0 if there is no such line.
double meminfo_mib(const std::string& name) {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(name + ":")) return std::stod(line.substr(name.size() + 1)) / 1024;
  return 0;
}

// This process's resource limits, each a number or "unlimited".
Json limits() {
  Json out;
  const auto put = [&](const char* name, __rlimit_resource what) {
    rlimit limit{};
    getrlimit(what, &limit);
    out[name] = limit.rlim_cur == RLIM_INFINITY ? Json("unlimited") : Json(limit.rlim_cur);
  };
  put("open_files", RLIMIT_NOFILE);
  put("locked_memory_bytes", RLIMIT_MEMLOCK);
  put("processes", RLIMIT_NPROC);
  put("stack_bytes", RLIMIT_STACK);
  put("address_space_bytes", RLIMIT_AS);
  put("file_bytes", RLIMIT_FSIZE);
  return out;
}

Json gpu_facts(int index) {
  const Device device = Device::cuda(index);
  const DeviceInfo info = backend::info(device);
  const std::string pci = backend::pci_address(device);
  const GpuUse use = Nvml(pci).sample();
  const auto known = [](const std::optional<double>& x) { return x ? Json(*x) : Json(); };
  return {{"index", index},
          {"name", info.name},
          {"pci", pci},
          {"compute_capability", info.compute_capability},
          {"fp8", info.compute_capability == kFp8Capability},
          {"num_sms", info.num_sms},
          {"memory_mib", static_cast<double>(info.memory_bytes) / kMiB},
          {"free_mib", static_cast<double>(info.free_bytes) / kMiB},
          {"used_mib", known(use.used_mib)},
          {"util_pct", known(use.util_pct)},
          {"power_w", known(use.power_w)}};
}

void write_env(const std::string& folder, const Comm& comm, Device device) {
  write_file_atomically(folder + "/env.json", dump_json(environment_report(device, comm, version_text()), 2) + "\n");
}

}  // namespace

int usable_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores)
                                                         : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

void probe_machine(const std::string& folder) {
  const int gpus = backend::cuda_device_count();
  const Device device = gpus > 0 ? Device::cuda(0) : Device::cpu();
  const std::unique_ptr<Comm> comm = make_self_comm(device);
  write_env(folder, *comm, device);
  Json facts = environment_report(device, *comm, version_text());
  facts["gpus"] = Json::array();
  for (int i = 0; i < gpus; ++i) facts["gpus"].push_back(gpu_facts(i));
  facts["built_with_cuda"] = backend::built_with_cuda();
  facts["why_no_cuda"] = gpus > 0 ? "" : backend::why_no_cuda();
  facts["nvidia_device_files"] = fs::exists("/dev/nvidia0") || fs::exists("/proc/driver/nvidia/version");
  facts["driver_version"] = nvml_driver_version();
  facts["why_no_nccl"] = gpus > 0 ? why_no_nccl() : "no GPU";
  facts["why_no_mpi"] = why_no_mpi();
  facts["mpirun"] = find_program("mpirun");
  facts["cores"] = usable_cores();
  facts["memory_mib"] = meminfo_mib("MemTotal");
  facts["memory_available_mib"] = meminfo_mib("MemAvailable");
  facts["disk_free_mib"] = free_disk_mib(folder);
  facts["shm_free_mib"] = free_disk_mib("/dev/shm");
  facts["limits"] = limits();
  try {
    check_environment();
    facts["wrong_variable"] = "";
  } catch (const UsageError& e) { facts["wrong_variable"] = e.what(); }
  write_file_atomically(folder + "/machine.json", dump_json(facts, 2) + "\n");
}

void probe_products(const std::string& folder) {
  constexpr int64_t kRows = 2048, kOut = 512, kIn = 128;  // the quickstart MLP's first layer
  constexpr int kRuns = 20;
  Runtime runtime({.device = Device::cpu(), .arena_bytes = int64_t{16} << 20, .side_streams = false});
  const Tensor y = runtime.arena().alloc(MemTag::workspace, "y", DType::f32, {kRows, kOut}),
               x = runtime.arena().alloc(MemTag::workspace, "x", DType::f32, {kRows, kIn}),
               w = runtime.arena().alloc(MemTag::workspace, "w", DType::f32, {kOut, kIn});
  std::fill_n(x.ptr<float>(), x.numel(), 0.5f);
  std::fill_n(w.ptr<float>(), w.numel(), 0.25f);
  double best_s = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kRuns; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    linear_forward(runtime.ctx(), y, x, w);
    best_s = std::min(best_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  const double flops = 2.0 * kRows * kOut * kIn;
  write_file_atomically(folder + "/products.json",
                        dump_json({{"kernels", blas_core()}, {"gflop_per_s", flops / best_s * 1e-9}}, 2) + "\n");
}

namespace {

// Times OpenBLAS's kernels for this CPU, in a process for each kind, beside those that a run uses.
void examine_products(PhaseRun& v) {
  const auto rate_of = [&](const std::vector<std::pair<std::string, std::string>>& environment) {
    v.run_triad({"doctor", "--probe", "products", "--out", v.folder()}, PhaseRun::Prints::at_its_end, Inherit::clean,
                environment);
    return parse_json(read_file(v.file("products.json")), v.file("products.json"));
  };
  const Json used = rate_of({});
  BlasRate in_use{used["kernels"], used["gflop_per_s"]};
  std::vector<BlasRate> others;
  for (const std::string& core : blas_cores_for(cpu_vectors()))
    others.push_back({core, rate_of({{"OPENBLAS_CORETYPE", core}})["gflop_per_s"]});
  v.note(blas_rates_text(in_use, others));
}

}  // namespace

void examine_environment(PhaseRun& v) {
  v.run_triad({"doctor", "--probe", "machine", "--out", v.folder()}, PhaseRun::Prints::at_its_end, Inherit::all);
  const Json m = parse_json(read_file(v.file("machine.json")), v.file("machine.json"));
  const std::string why_no_cuda = m["why_no_cuda"];
  const auto mib = [&](const char* name) { return m[name].get<double>(); };

  v.note(fmt::format("{}, {:.0f} MiB of memory available", counted(m["cores"].get<int>(), "core"),
                     mib("memory_available_mib")));
  v.expect(v.options().device != "cuda" || !m["gpus"].empty(), "", "--device cuda cannot be used: " + why_no_cuda);
  v.expect(!m["built_with_cuda"] || !m["nvidia_device_files"] || !m["gpus"].empty(), "",
           "there is an NVIDIA driver, but no GPU can be used: " + why_no_cuda);
  if (m["gpus"].empty()) v.note("no GPU (" + why_no_cuda + ")");
  constexpr double kLeastGpuMib = 2048, kLeastHostMib = 1024, kLeastDiskMib = 1024;
  for (const Json& gpu : m["gpus"]) {
    const double free_mib = gpu["free_mib"], all_mib = gpu["memory_mib"];
    v.expect(v.options().device == "cpu" || free_mib >= kLeastGpuMib,
             fmt::format("GPU {} {}: {:.0f} of {:.0f} MiB free", gpu["index"].get<int>(),
                         gpu["name"].get<std::string>(), free_mib, all_mib),
             fmt::format("GPU {} has {:.0f} of {:.0f} MiB free: another program holds the rest (nvidia-smi)",
                         gpu["index"].get<int>(), free_mib, all_mib));
  }
  if (!m["gpus"].empty())
    v.note(fmt::format("driver {}, CUDA {} on a driver for {}", m["driver_version"].get<std::string>(),
                       brief(m["cuda_runtime"]), brief(m["cuda_driver"])));
  v.expect(mib("memory_available_mib") >= kLeastHostMib, "",
           fmt::format("{:.0f} MiB of the host's memory are available: at least {:.0f} are needed",
                       mib("memory_available_mib"), kLeastHostMib));
  v.expect(mib("disk_free_mib") >= kLeastDiskMib, fmt::format("{:.0f} MiB of disk free", mib("disk_free_mib")),
           fmt::format("{:.0f} MiB of disk are free at {}: a checkpoint of 155M parameters takes 1,900 MiB",
                       mib("disk_free_mib"), v.options().out));
  const Json& files = m["limits"]["open_files"];
  constexpr int kLeastFiles = 256;
  v.expect(
      files.is_string() || files.get<int64_t>() >= kLeastFiles, "",
      fmt::format("{} files may be open at a time (ulimit -n): shards and ranks need {}", brief(files), kLeastFiles));
  const std::string wrong_variable = m["wrong_variable"];
  v.expect(wrong_variable.empty(), "", "`triad train` would refuse to start: " + wrong_variable);
  std::string variables;
  for (const auto& [name, value] : m["environment"].items())
    if (name.starts_with("NSA_")) variables += " " + name + "=" + value.get<std::string>();
  if (!variables.empty()) v.note("not passed on to later phases:" + variables);
  const std::string no_mpi = m["why_no_mpi"], no_nccl = m["why_no_nccl"], mpirun = m["mpirun"];
  v.note(no_mpi.empty() ? (mpirun.empty() ? "MPI, but no mpirun" : "MPI (" + mpirun + ")")
                        : "no MPI (torchrun and srun start ranks without it)");
  if (m["gpus"].empty() || v.options().device == "cpu") examine_products(v);
  if (!m["gpus"].empty()) v.note(no_nccl.empty() ? "NCCL" : "no NCCL (" + no_nccl + ")");
}

// For every ordered GPU pair: the connection type, and copies from the first one's memory to the second one's, which
// are timed and compared.
void probe_topology(const std::string& folder) {
  const int gpus = backend::cuda_device_count();
  write_env(folder, *make_self_comm(Device::cuda(0)), Device::cuda(0));
  constexpr int kCopies = 8;
  constexpr int64_t kBytes = 256 << 20, kWords = kBytes / static_cast<int64_t>(sizeof(int32_t));
  std::vector<std::unique_ptr<Runtime>> runtimes;
  std::vector<Tensor> buffers;
  for (int i = 0; i < gpus; ++i) {
    runtimes.push_back(std::make_unique<Runtime>(
        Runtime::Options{.device = Device::cuda(i), .arena_bytes = kBytes, .side_streams = false}));
    buffers.push_back(runtimes.back()->arena().alloc(MemTag::workspace, "copied", DType::i32, {kWords}));
  }
  for (int a = 0; a < gpus; ++a)
    for (int b = a + 1; b < gpus; ++b)
      if (backend::can_access_peer(a, b) && backend::can_access_peer(b, a)) backend::enable_peer_access(a, b);
  std::vector<int32_t> sent(static_cast<size_t>(kWords)), received(sent.size());
  Json pairs = Json::array();
  for (int from = 0; from < gpus; ++from) {
    std::iota(sent.begin(), sent.end(), 1'000'003 * (from + 1));
    write(runtimes[static_cast<size_t>(from)]->ctx(), buffers[static_cast<size_t>(from)], sent.data());
    runtimes[static_cast<size_t>(from)]->stream().synchronize();
    for (int to = 0; to < gpus; ++to) {
      if (to == from) continue;
      Context& ctx = runtimes[static_cast<size_t>(to)]->ctx();
      const Tensor& target = buffers[static_cast<size_t>(to)];
      zero(ctx, target);
      Event begin(ctx.device, /*timed=*/true), end(ctx.device, /*timed=*/true);
      copy(ctx, target, buffers[static_cast<size_t>(from)]);  // not timed: the first copy sets up the connection
      begin.record(ctx.stream);
      for (int i = 0; i < kCopies; ++i) copy(ctx, target, buffers[static_cast<size_t>(from)]);
      end.record(ctx.stream);
      read(ctx, received.data(), target);
      int64_t wrong = 0;
      for (size_t i = 0; i < sent.size(); ++i) wrong += sent[i] != received[i];
      const Device a = Device::cuda(from), b = Device::cuda(to);
      pairs.push_back({{"from", from},
                       {"to", to},
                       {"peer_access", backend::can_access_peer(from, to)},
                       {"joined_by", nvml_connection(backend::pci_address(a), backend::pci_address(b))},
                       {"gb_per_s", static_cast<double>(kCopies * kBytes) / end.ms_since(begin) * 1e-6},
                       {"wrong_words", wrong}});
    }
  }
  write_file_atomically(folder + "/topology.json", dump_json({{"gpus", gpus}, {"pairs", pairs}}, 2) + "\n");
}

void examine_topology(PhaseRun& v) {
  if (!v.on_gpu()) v.skip("no GPU is examined", "nothing");
  if (v.gpus() < 2) v.skip("this machine has one GPU", "nothing");
  v.run_triad({"doctor", "--probe", "topology", "--out", v.folder()});
  const Json found = parse_json(read_file(v.file("topology.json")), v.file("topology.json"));
  double slowest = 0;
  int without_peer_access = 0;
  std::string joined_by;
  for (const Json& pair : found["pairs"]) {
    const int64_t wrong = pair["wrong_words"];
    v.expect(wrong == 0, "",
             fmt::format("copies from GPU {} to {} arrive with {} wrong words (topology.json)", pair["from"].get<int>(),
                         pair["to"].get<int>(), wrong));
    const double rate = pair["gb_per_s"];
    slowest = slowest == 0 ? rate : std::min(slowest, rate);
    without_peer_access += !pair["peer_access"];
    if (const std::string text = pair["joined_by"]; joined_by.find(text) == std::string::npos)
      joined_by += (joined_by.empty() ? "" : " or ") + text;
  }
  v.expect(static_cast<int>(found["pairs"].size()) == v.gpus() * (v.gpus() - 1), "",
           fmt::format("topology.json has {} pairs of {} GPUs", found["pairs"].size(), v.gpus()));
  v.note(fmt::format("{} pairs, connected by {}; the slowest copies {:.0f} GB/s", found["pairs"].size(),
                     joined_by.empty() ? "an unknown link (NVML does not report it)" : joined_by, slowest));
  v.note(without_peer_access == 0
             ? "peer access between all"
             : fmt::format("no peer access in {} pairs: copies go through the host", without_peer_access));
}

}  // namespace triad
