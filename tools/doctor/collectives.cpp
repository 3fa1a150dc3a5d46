// The phases collectives_*: a self-test for all-reduce, reduce-scatter and all-gather. Every rank contributes integers
// whose sums are known and exact, in each dtype and three sizes, and compares every result element.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "engine/comm/comm.h"
#include "engine/context.h"
#include "io/file.h"
#include "kernels/common/parallel.h"
#include "tools/doctor/doctor.h"
#include "tools/version.h"
#include "train/config/config.h"
#include "train/monitor/env_report.h"

namespace triad {

namespace {

// Element i in a rank's input, an integer. Sums over up to 8 ranks are exact in bf16, because 36 * 7 < 256.
double input(int rank, int64_t i) { return static_cast<double>((rank + 1) * (i % 7 + 1)); }

struct Case {
  std::string op;
  DType dtype;
  int64_t n;  // elements in the tensor (all_reduce), or in each rank's part
  int64_t wrong = 0;
  double ms = 0;
};

class SelfTest {
 public:
  SelfTest(Comm& comm, Device device)
      : comm_(comm), runtime_({.device = device, .arena_bytes = kMostBytes, .side_streams = false}) {
    arena_ = runtime_.arena().alloc(MemTag::comm, "collectives", DType::f32, {kMostBytes / 4});
  }

  void run(Case& c) {
    const int64_t total = c.op == "all_reduce" ? c.n : c.n * comm_.world();
    Tensor x(arena_.data, c.dtype, {total}, arena_.device);
    std::vector<double> values(static_cast<size_t>(total), -1.0);
    const int64_t part = comm_.rank() * c.n;
    for (int64_t i = 0; i < total; ++i)
      if (c.op != "all_gather" || (i >= part && i < part + c.n))
        values[static_cast<size_t>(i)] = input(comm_.rank(), i);
    put(x, values);
    comm_.barrier("the self-test");
    const auto began = std::chrono::steady_clock::now();
    const std::string what = fmt::format("{} of {} {}", c.op, total, name_of(c.dtype));
    if (c.op == "all_reduce")
      comm_.all_reduce(x, what);
    else if (c.op == "reduce_scatter")
      comm_.reduce_scatter(x, what);
    else
      comm_.all_gather(x, what);
    comm_.stream().synchronize();
    c.ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
    values = get(x);
    double ranks = 0;
    for (int r = 0; r < comm_.world(); ++r) ranks += r + 1;
    for (int64_t i = 0; i < total; ++i) {
      // Outside the rank's part the result is undefined.
      if (c.op == "reduce_scatter" && (i < part || i >= part + c.n)) continue;
      const double expected = c.op == "all_gather" ? input(static_cast<int>(i / c.n), i) : ranks * input(0, i);
      c.wrong += values[static_cast<size_t>(i)] != expected;
    }
  }

 private:
  static constexpr int64_t kMostBytes = 64 << 20;

  void put(const Tensor& x, const std::vector<double>& values) {
    std::vector<std::byte> bytes(static_cast<size_t>(x.bytes()));
    dispatch_float(x.dtype, [&]<class T>() {
      for (size_t i = 0; i < values.size(); ++i) {
        const T value = static_cast<T>(static_cast<float>(values[i]));
        std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
      }
    });
    write(runtime_.ctx(), x, bytes.data());
    runtime_.stream().synchronize();
  }
  std::vector<double> get(const Tensor& x) {
    std::vector<std::byte> bytes(static_cast<size_t>(x.bytes()));
    read(runtime_.ctx(), bytes.data(), x);
    std::vector<double> values(static_cast<size_t>(x.numel()));
    dispatch_float(x.dtype, [&]<class T>() {
      for (size_t i = 0; i < values.size(); ++i) {
        T value;
        std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
        values[i] = static_cast<double>(static_cast<float>(value));
      }
    });
    return values;
  }

  Comm& comm_;
  Runtime runtime_;
  Tensor arena_;
};

// Evaluates collectives.json, the result of a self-test with this many ranks.
void judge(PhaseRun& v, int ranks) {
  const Json found = parse_json(read_file(v.file("collectives.json")), v.file("collectives.json"));
  v.expect(found["ranks"] == ranks, "",
           fmt::format("{} ranks connected, {} were started", brief(found["ranks"]), ranks));
  size_t right = 0;
  double best = 0;
  for (const Json& c : found["cases"]) {
    const int64_t wrong = c["wrong"];
    right += wrong == 0;
    best = std::max(best, c["gb_per_s"].get<double>());
    v.expect(wrong == 0, "",
             fmt::format("{} of {} {}: {} elements are wrong over all ranks (collectives.json)",
                         c["op"].get<std::string>(), brief(c["elements"]), c["dtype"].get<std::string>(), wrong));
  }
  v.note(fmt::format("{} ranks over {}: {} sums and gathers correct in every element, up to {:.3g} GB/s", ranks,
                     found["comm"].get<std::string>(), right, best));
  v.expect(found["cases"].size() >= 12, "", fmt::format("collectives.json has {} cases", found["cases"].size()));
}

std::vector<std::string> self_test(const PhaseRun& v, const std::string& device, const std::string& backend) {
  return {"doctor", "--probe", "collectives", "--out", v.folder(), "--device", device, "--backend", backend};
}

}  // namespace

void probe_collectives(const std::string& folder, const std::string& device_word, const std::string& backend_word,
                       double timeout_s) {
  const LaunchEnv launch = read_launch_env();
  const Device device = device_word == "cuda" ? device_of(launch) : Device::cpu();
  CommBackend backend = CommBackend::automatic;
  for (const auto& [word, value] : EnumWords<CommBackend>::words)
    if (backend_word == word) backend = value;
  const std::unique_ptr<Comm> comm = open_comm(launch, device, backend, timeout_s);
  SelfTest test(*comm, device);
  std::vector<Case> cases;
  for (const char* op : {"all_reduce", "reduce_scatter", "all_gather"})
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const int64_t n : {128, 128 * 77, 1 << 20}) cases.push_back({op, dtype, n});
  // The first call sets up connections; the second one is timed.
  for (Case& c : cases) test.run(c), test.run(c);
  Json rows = Json::array();
  for (const Case& c : cases) {
    int64_t wrong = 0;
    for (const int64_t each : comm->all_gather_host(c.wrong, "wrong elements")) wrong += each;
    const double bytes = static_cast<double>(c.n * (c.op == "all_reduce" ? 1 : comm->world()) * size_of(c.dtype));
    rows.push_back({{"op", c.op},
                    {"dtype", name_of(c.dtype)},
                    {"elements", c.n},
                    {"wrong", wrong},
                    {"ms", c.ms},
                    {"gb_per_s", bytes / c.ms * 1e-6}});
  }
  if (comm->first()) {
    write_file_atomically(folder + "/env.json", dump_json(environment_report(device, *comm, version_text()), 2) + "\n");
    write_file_atomically(folder + "/collectives.json",
                          dump_json({{"ranks", comm->world()}, {"comm", comm->name()}, {"cases", rows}}, 2) + "\n");
  }
  comm->finish();
}

void examine_collectives_nccl(PhaseRun& v) {
  if (!v.on_gpu()) v.skip("no GPU: NCCL connects GPUs", "nothing");
  if (v.gpus() < 2) v.skip("this machine has one GPU: NCCL connects several", "nothing");
  if (const std::string why = v.machine()["why_no_nccl"]; !why.empty())
    v.skip(why, "install NCCL (libnccl.so.2), or use dist.backend=mpi");
  v.run_ranks(v.gpus(), PhaseRun::Launch::variables, self_test(v, "cuda", "nccl"), PhaseRun::Prints::at_its_end);
  judge(v, v.gpus());
}

void examine_collectives_mpi(PhaseRun& v) {
  v.require(PhaseRun::Launch::mpirun);
  v.run_ranks(2, PhaseRun::Launch::mpirun, self_test(v, v.gpus() < 2 ? "cpu" : "cuda", "mpi"),
              PhaseRun::Prints::at_its_end);
  judge(v, 2);
}

void examine_collectives_tcp(PhaseRun& v) {
  v.run_ranks(2, PhaseRun::Launch::variables, self_test(v, "cpu", "auto"), PhaseRun::Prints::at_its_end);
  judge(v, 2);
}

}  // namespace triad
