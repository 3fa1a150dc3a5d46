// Several ranks: the same weights as one, to the bit where bits are promised; what a run does when one of them fails.
// Whole runs go through mpirun; collectives and the reducer also run as two threads of this process, over TCP.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <thread>

#include "engine/comm.h"
#include "io/json_config.h"
#include "io/safetensors.h"
#include "kernels/reduce.h"
#include "tests/program.h"
#include "tests/test.h"
#include "train/load_config.h"
#include "train/memory_plan.h"
#include "train/train_step.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kTiny = TRIAD_SOURCE_DIR "/configs/tiny.json";
constexpr const char* kWeights = "/model.safetensors";

std::string train_args(const std::string& out, const std::string& more = "") {
  return "train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + out + " " + more;
}

// A run of four micro-batches a step, shared out among the ranks. Returns its folder.
std::string run(const std::string& out, int ranks, const std::string& more = "") {
  const std::string args =
      train_args(out, "--set train.accumulate_grad_batches=" + std::to_string(4 / ranks) + " " + more);
  const Outcome outcome = ranks == 1 ? run_program(args) : run_ranks(ranks, args);
  INFO(ranks << " ranks: triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return out;
}

std::map<std::string, std::vector<float>> tensors(const std::string& path) {
  const SafetensorsFile file(path);
  std::map<std::string, std::vector<float>> all;
  for (const TensorEntry& entry : file.entries()) {
    const std::span<const std::byte> bytes = file.bytes(entry);
    std::vector<float>& values = all[entry.name];
    values.resize(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
  }
  return all;
}

// |a - b| / |a|, over everything and of the worst tensor.
struct Difference {
  double all = 0, worst = 0;
};
Difference difference(const std::string& a_path, const std::string& b_path) {
  const auto a = tensors(a_path), b = tensors(b_path);
  double error = 0, size = 0, worst = 0;
  for (const auto& [name, values] : a) {
    double e = 0, s = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      e += std::pow(double{values[i]} - b.at(name).at(i), 2);
      s += std::pow(double{values[i]}, 2);
    }
    error += e, size += s;
    worst = std::max(worst, std::sqrt(e / std::max(s, 1e-30)));
  }
  return {std::sqrt(error / size), worst};
}

bool same_file(const std::string& a, const std::string& b) {
  const std::string text = read_text(a);
  return !text.empty() && text == read_text(b);
}

std::vector<std::string> lines(const std::string& path) {
  std::vector<std::string> out;
  std::istringstream in(read_text(path));
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

}  // namespace

TEST_CASE("dist: 1 and 2 and 4 ranks give the same weights, whatever the bucket size and sharding", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string one = run(folder.file("1"), 1), two = run(folder.file("2"), 2), four = run(folder.file("4"), 4);
  for (const std::string& ranks : {two, four}) {
    const Difference d = difference(one + kWeights, ranks + kWeights);
    CHECK(d.all < 1e-6);
    CHECK(d.worst < 1e-5);
  }
  int i = 0;
  for (const char* more : {"", "--set dist.bucket_mb=0.0009765625", "--set dist.bucket_mb=0.02",
                           "--set dist.bucket_mb=64", "--set dist.zero=1", "--set runtime.recompute=block"}) {
    INFO(more);
    CHECK(same_file(two + kWeights, run(folder.file("other" + std::to_string(i++)), 2, more) + kWeights));
  }
  CHECK(same_file(four + kWeights,
                  run(folder.file("four_zero"), 4, "--set dist.zero=1 --set dist.bucket_mb=0.02") + kWeights));
  const Difference half =
      difference(two + kWeights, run(folder.file("half"), 2, "--set dist.grad_dtype=bf16") + kWeights);
  CHECK(half.all > 0);
  CHECK(half.all < 1e-2);

  CHECK(lines(two + "/ddp_buckets.txt")
            .front()
            .starts_with("3 buckets, 4 collectives a step on 2 ranks: all_reduce f32"));
  CHECK(fs::exists(two + "/ranks/rank_1.log"));
  CHECK(Json::parse(lines(two + "/heartbeat_rank1.jsonl").back())["rank"] == 1);
  CHECK(Json::parse(read_text(two + "/env.json"))["ranks"].size() == 2);
  CHECK(lines(two + "/training.csv").size() == 21);
  CHECK(Json::parse(read_text(two + "/metrics.json"))["tokens"] ==
        Json::parse(read_text(one + "/metrics.json"))["tokens"]);
}

TEST_CASE("dist: a resume on another number of ranks has the same state, and an evaluation the same number", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  for (const char* precision : {"fp32", "bf16"}) {
    const std::string more =
        std::string("--set train.save_every=10 --set train.eval_every=10 --set train.eval_batches=3 ") +
        "--set runtime.precision=" + precision + " ";
    const std::string whole = run(folder.file(std::string("whole_") + precision), 2, more);
    const std::string shards = run(folder.file(std::string("shards_") + precision), 2, more + "--set dist.zero=1");
    const std::string from = shards + "/checkpoints/step_10";
    for (const char* file : {"/model.safetensors", "/optimizer.safetensors"})
      CHECK(same_file(whole + "/checkpoints/step_10" + file, from + file));
    for (const int ranks : {1, 2, 4}) {
      const std::string to = folder.file(precision + std::to_string(ranks));
      run(to, ranks, more + "--resume '" + from + "'" + (ranks == 4 ? " --set dist.zero=1" : ""));
      INFO(precision << " on " << ranks);
      const Difference d = difference(whole + kWeights, to + kWeights);
      CHECK(d.all < (ranks == 2 ? 1e-30 : std::string(precision) == "fp32" ? 1e-6 : 1e-3));
      CHECK(lines(to + "/training.csv").size() == 11);
      const auto loss = [](const std::string& run) {
        return Json::parse(read_text(run + "/metrics.json"))["val_loss"].get<double>();
      };
      CHECK(std::abs(loss(to) - loss(whole)) < 1e-4);
    }
  }
}

TEST_CASE("dist: two GPUs give the weights of one, with NCCL and with MPI the same bits", "[dist][gpu2]") {
  if (!require_gpus(2) || !require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string gpu = "--set runtime.device=cuda ";
  const std::string one = run(folder.file("1"), 1, gpu), two = run(folder.file("2"), 2, gpu);
  const Difference d = difference(one + kWeights, two + kWeights);
  CHECK(d.all < 1e-6);
  CHECK(d.worst < 1e-5);
  int i = 0;
  for (const char* more : {"", "--set dist.bucket_mb=0.0009765625", "--set dist.bucket_mb=64", "--set dist.zero=1",
                           "--set dist.backend=mpi", "--set runtime.cuda_graph=true"}) {
    INFO(more);
    CHECK(same_file(two + kWeights, run(folder.file("other" + std::to_string(i++)), 2, gpu + more) + kWeights));
  }
}

namespace {

// The processes of a run's ranks, from their heartbeats; waits for all of them to have trained some steps.
std::vector<int> pids_of(const std::string& run, int ranks, size_t steps) {
  std::vector<int> pids;
  for (int r = 0; r < ranks; ++r) {
    const std::string path = run + "/heartbeat_rank" + std::to_string(r) + ".jsonl";
    for (int i = 0; i < 60000 && lines(path).size() < steps + 1; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    REQUIRE(lines(path).size() > steps);
    pids.push_back(Json::parse(lines(path).front())["pid"].get<int>());
  }
  return pids;
}

bool all_gone(const std::vector<int>& pids) {
  for (int i = 0; i < 5000; ++i) {
    bool gone = true;
    for (const int pid : pids) gone = gone && (kill(pid, 0) != 0);
    if (gone) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

double seconds_since(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

const std::string kLong = "--set train.steps=1000000 --set train.allow_unsafe=true --set dist.timeout_s=3 ";

}  // namespace

TEST_CASE("dist: a rank that dies or stops ends all, with a message that says where", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  for (const int signal : {SIGKILL, SIGSTOP}) {
    const std::string out = folder.file("run" + std::to_string(signal)),
                      log = folder.file("log" + std::to_string(signal));
    BackgroundProgram program(train_args(out, kLong + "--set dist.bucket_mb=0.02"), mpirun(2), log);
    const std::vector<int> pids = pids_of(out, 2, 3);
    const auto began = std::chrono::steady_clock::now();
    kill(pids[1], signal);
    CHECK(program.wait() != 0);
    CHECK(seconds_since(began) < 3 + 15);
    CHECK(all_gone(pids));
    const std::string text = read_text(log);
    INFO(text);
    for (const char* part : {"rank 0: ", "rank 1 (pid ", "collective ", " bytes"})
      CHECK(text.find(part) != std::string::npos);
    if (signal == SIGSTOP) CHECK(text.find("dist.timeout_s = 3 s") != std::string::npos);
    if (signal == SIGSTOP) CHECK(text.find("is stopped") != std::string::npos);
  }
}

TEST_CASE("dist: a rank that throws ends all, and its message is told", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  // A limit on the size of files, for rank 1 alone: it runs full in the midst of training.
  const std::string args = train_args(folder.file("run"), kLong), log = folder.file("log");
  const auto began = std::chrono::steady_clock::now();
  const Outcome outcome = run_command("export OMPI_MCA_btl=tcp,self; " + mpirun(1) + TRIAD_PROGRAM " " + args +
                                      " : -np 1 sh -c 'ulimit -f 20; exec " TRIAD_PROGRAM " " + args + "'");
  INFO(outcome.output.substr(outcome.output.size() > 2000 ? outcome.output.size() - 2000 : 0));
  CHECK(outcome.exit_code != 0);
  CHECK(seconds_since(began) < 60);
  CHECK(outcome.output.find("triad: rank 1: ") != std::string::npos);
  CHECK(outcome.output.find("_rank") != std::string::npos);  // the file it could not write
  CHECK(lines(folder.file("run") + "/training.csv").size() > 2);
  CHECK(all_gone(pids_of(folder.file("run"), 2, 1)));
}

TEST_CASE("dist: ranks of different minds do not begin", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string args = train_args(folder.file("run"));
  const Outcome outcome =
      run_command(mpirun(1) + TRIAD_PROGRAM " " + args + " : -np 1 " TRIAD_PROGRAM " " + args + "--set train.lr=2e-3");
  INFO(outcome.output);
  CHECK(outcome.exit_code != 0);
  CHECK(outcome.output.find("rank 1: its config differs from rank 0's: train.lr 0.001 -> 0.002") != std::string::npos);
  CHECK(!fs::exists(folder.file("run") + "/training.csv"));
  const auto refused = [&](const std::string& environment, const std::string& words) {
    const Outcome o = run_program(args, environment);
    INFO(environment << "\n" << o.output);
    CHECK(o.exit_code == 2);
    CHECK(o.output.find(words) != std::string::npos);
  };
  refused("RANK=3 WORLD_SIZE=2 LOCAL_RANK=0", "RANK is 3, but WORLD_SIZE is 2");
  refused("RANK=x WORLD_SIZE=2 LOCAL_RANK=0", "RANK is \"x\"");
  refused("RANK=0 WORLD_SIZE=2", "LOCAL_RANK is not set");
  refused("RANK=0 WORLD_SIZE=2 LOCAL_RANK=0", "MASTER_ADDR:MASTER_PORT");
  refused("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=1",
          "MPI_LOCALRANKID is 1, but MPI_LOCALNRANKS is 1");
}

TEST_CASE("dist: SIGTERM to one rank, or .HALT, stops all after one step, with a checkpoint", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  for (const bool by_file : {true, false}) {
    const std::string out = folder.file(by_file ? "halt" : "term"), log = folder.file("log");
    BackgroundProgram program(train_args(out, kLong), mpirun(2), log);
    const std::vector<int> pids = pids_of(out, 2, 3);
    if (by_file)
      write_text(out + "/.HALT", "");
    else
      kill(pids[1], SIGTERM);
    CHECK(program.wait() == 0);
    INFO(read_text(log));
    const Json state = Json::parse(read_text(out + "/checkpoints/latest/state.json"));
    CHECK(static_cast<size_t>(state["step"].get<int64_t>()) + 1 == lines(out + "/training.csv").size());
    for (const char* rank : {"0", "1"}) {
      const std::string last = lines(out + "/ranks/rank_" + rank + ".log").back();
      CHECK(last.find("after step " + std::to_string(state["step"].get<int64_t>())) != std::string::npos);
    }
  }
}

TEST_CASE("dist: killed at any moment, a resume on 2 ranks ends in the same bits", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string more = "--set train.steps=30 --set train.save_every=1 ";
  const std::string whole = run(folder.file("whole"), 2, more);
  int trial = 0;
  for (const size_t steps : {3, 9, 20}) {  // a save runs beside the next step: after three the first one is in place
    const std::string out = folder.file("killed" + std::to_string(trial));
    BackgroundProgram program(train_args(out, "--set train.accumulate_grad_batches=2 " + more), mpirun(2));
    kill(pids_of(out, 2, steps)[static_cast<size_t>(trial++ % 2)], SIGKILL);
    CHECK(program.wait() != 0);
    REQUIRE(fs::exists(out + "/checkpoints/latest/state.json"));
    run(out, 2, more + "--resume latest");
    CHECK(same_file(whole + kWeights, out + kWeights));
    CHECK(lines(out + "/training.csv").size() == 31);
  }
}

namespace {

// Two ranks, as threads of this process, over TCP.
void on_two_ranks(const std::function<void(Comm&)>& body) {
  const auto rank = [&](int r) {
    LaunchEnv env{
        .launcher = "torchrun", .rank = r, .world = 2, .local_rank = r, .local_world = 2, .master_host = "127.0.0.1"};
    env.master_port = 20000 + getpid() % 20000;
    const std::unique_ptr<Comm> comm = open_comm(env, Device::cpu(), CommBackend::automatic, 30);
    body(*comm);
    comm->finish();
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
}

std::unique_ptr<Runtime> small_runtime() {
  return std::make_unique<Runtime>(
      Runtime::Options{.device = Device::cpu(), .arena_bytes = int64_t{64} << 20, .scratch_bytes = int64_t{8} << 20});
}

// Of rank r, in the place i.
float value(int64_t r, int64_t i) {
  return static_cast<float>(std::sin(static_cast<double>(i * 7 + r * 3)) * std::pow(10.0, r));
}

}  // namespace

TEST_CASE("dist: collectives add in the order of ranks, whatever the size", "[dist]") {
  std::vector<std::string> failures[2];
  on_two_ranks([&](Comm& comm) {
    const std::unique_ptr<Runtime> runtime = small_runtime();
    const auto expect = [&](bool holds, const std::string& what) {
      if (!holds) failures[comm.rank()].push_back(what);
    };
    for (const int64_t n : {2, 6, 300000, 1200002}) {
      const Tensor x = runtime->arena().alloc(MemTag::io, "x", DType::f32, {n});
      const auto fill = [&] {
        for (int64_t i = 0; i < n; ++i) x.ptr<float>()[i] = value(comm.rank(), i);
      };
      const auto wrong = [&](int64_t begin, int64_t end, const std::function<float(int64_t)>& expected) {
        int64_t count = 0;
        for (int64_t i = begin; i < end; ++i) count += x.ptr<float>()[i] != expected(i);
        return count;
      };
      const auto sum = [](int64_t i) { return value(0, i) + value(1, i); };
      const int64_t half = n / 2, own = comm.rank() * half;
      fill();
      comm.all_reduce(x, "x");
      expect(wrong(0, n, sum) == 0, "all_reduce");
      fill();
      comm.reduce_scatter(x, "x");
      expect(wrong(own, own + half, sum) == 0, "reduce_scatter");
      fill();
      comm.all_gather(x, "x");
      expect(wrong(0, n, [&](int64_t i) { return value(i / half, i); }) == 0, "all_gather");
    }
    std::vector<double> numbers = {comm.rank() == 0 ? 1.5 : 0.0, comm.rank() == 1 ? 2.5 : 0.0};
    comm.add(numbers, "numbers");
    expect(numbers == std::vector<double>{1.5, 2.5}, "add");
    expect(comm.exchange_text(std::string(static_cast<size_t>(comm.rank()) * 5, 'x'), "text") ==
               std::vector<std::string>{"", "xxxxx"},
           "exchange_text");
  });
  for (const auto& of_rank : failures) CHECK(of_rank == std::vector<std::string>{});
}

TEST_CASE("dist: a gradient that never comes, or comes twice, is an error that names it", "[dist]") {
  std::string missing[2], twice[2];
  int64_t collectives[2] = {};
  on_two_ranks([&](Comm& comm) {
    const Config config = load_config(kTiny, {"dist.bucket_mb=0.02"}).config;
    const std::unique_ptr<Runtime> runtime = small_runtime();
    Params params(runtime->arena(), config.model, {.grads = true});
    zero(runtime->ctx(), params.grads());
    const Tensor probe = runtime->arena().alloc(MemTag::io, "probe", DType::f64, {1});
    GradReducer reducer(runtime->ctx(), runtime->arena(), params, comm, config.dist, probe);
    const int64_t before = comm.collectives();
    reducer.begin();
    for (int64_t i = params.count() - 1; i > 0; --i)
      if (i != 5) reducer.ready(params.part(params.grads(), i), runtime->stream());
    try {
      reducer.finish();
    } catch (const Error& e) { missing[comm.rank()] = e.what(); }
    collectives[comm.rank()] = comm.collectives() - before;
    try {
      reducer.ready(params.part(params.grads(), 7), runtime->stream());
    } catch (const Error& e) { twice[comm.rank()] = e.what(); }
  });
  const std::vector<ParamSpec> specs = param_specs(load_config(kTiny, {}).config.model);
  for (const int r : {0, 1}) {
    CHECK(missing[r].find(fmt::format("2 of {} gradients never came", specs.size())) != std::string::npos);
    CHECK(missing[r].find("embed.weight") != std::string::npos);
    CHECK(missing[r].find(specs[5].name) != std::string::npos);
    CHECK(twice[r].find(specs[7].name + " came twice") != std::string::npos);
    CHECK(collectives[r] > 0);
  }
}

TEST_CASE("dist: buckets cover every element once, in backward order, large gradients cut", "[dist]") {
  const Config m7c = load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m.json", {}).config;
  for (const int64_t world : {2, 8})
    for (const char* zero : {"0", "1"})
      for (const char* mb : {"0.001", "25", "64"})
        for (const char* tie : {"false", "true"}) {
          const Config tiny =
              load_config(kTiny, {std::string("dist.zero=") + zero, std::string("model.tie_embeddings=") + tie}).config;
          const Config& c = std::string(mb) == "25" ? m7c : tiny;
          DistConfig dist = tiny.dist;
          const int64_t unit = bucket_unit(dist, world), elements = static_cast<int64_t>(std::stod(mb) * (1 << 18));
          Arena arena = Arena::planned(Device::cpu());
          const Params params(arena, c.model, {.grads = true, .shard_elements = unit});
          const std::vector<GradBucket> buckets = plan_buckets(params, elements, unit);
          std::map<int64_t, int64_t> ranges;
          for (const GradBucket& b : buckets) {
            ranges[b.elements.begin] = b.elements.end;
            CHECK(b.elements.begin % unit == 0);
            CHECK(b.elements.size() <= std::max(unit, elements));
          }
          int64_t at = 0;
          for (const auto& [begin, end] : ranges) {
            CHECK(begin == at);
            at = end;
          }
          CHECK(at == params.stored_elements());
          CHECK(params.specs()[static_cast<size_t>(buckets.back().params.front())].name == "embed.weight");
          if (&c == &m7c) {
            CHECK(params.specs()[static_cast<size_t>(buckets.front().params.front())].name == "lm_head.weight");
            CHECK((buckets.size() == 24 || buckets.size() == 25));
          }
        }
}

TEST_CASE("dist: what is not finite on one rank skips the step on all, and the rank is named", "[dist]") {
  for (const char* zero : {"0", "1"}) {
    TrainStep::Result results[2][3];
    std::vector<float> before[2], after[2];
    on_two_ranks([&](Comm& comm) {
      const Config config = load_config(kTiny, {"train.on_nonfinite=skip", std::string("dist.zero=") + zero}).config;
      const std::unique_ptr<Runtime> runtime = allocate_planned(config, Device::cpu(), &comm);
      Context& ctx = runtime->ctx();
      TrainStep step(*runtime, config, &comm);
      Params& params = step.model().params();
      params.init(ctx, 7);
      const auto weights = [&] {
        std::vector<float> host(static_cast<size_t>(params.stored_elements()));
        read(ctx, host.data(), params.master());
        return host;
      };
      const int64_t positions = config.train.tokens_per_step() * 2;
      std::vector<int32_t> tokens(static_cast<size_t>(config.train.tokens_per_step()));
      const Tensor gain = params.part(params.weights(), params.count() - 2);  // norm_f's: of every gradient
      for (int64_t i = 0; i < 3; ++i) {
        for (size_t t = 0; t < tokens.size(); ++t) tokens[t] = static_cast<int32_t>((t * 7 + i + comm.rank()) % 256);
        const bool plant = i == 1 && comm.rank() == 1;
        if (i == 1) before[comm.rank()] = weights();
        const float good = gain.ptr<float>()[3];
        if (plant) gain.ptr<float>()[3] = std::numeric_limits<float>::quiet_NaN();
        step.begin();
        step.micro_step(tokens, tokens, positions);
        if (plant) gain.ptr<float>()[3] = good;
        results[comm.rank()][i] = step.finish(i, positions);
        if (i == 1) after[comm.rank()] = weights();
      }
    });
    for (const int r : {0, 1}) {
      INFO("zero " << zero << ", rank " << r);
      CHECK(results[r][0].finite);
      CHECK(!results[r][1].finite);
      CHECK(results[r][1].bad_rank == 1);
      CHECK(results[r][1].bad_tensor == "the gradient of embed.weight");
      CHECK(results[r][2].finite);
      CHECK(before[r] == after[r]);
      CHECK(results[r][2].loss == results[0][2].loss);
      CHECK(results[r][2].grad_norm == results[0][2].grad_norm);
    }
  }
}

TEST_CASE("dist: the variables that users of PyTorch know", "[dist]") {
  const TemporaryFolder folder;
  const Outcome outcome = run_program(train_args(folder.file("run"), "--set train.steps=1"),
                                      "NSA_DDP_BUCKET_MB=3.5 NSA_PG_TIMEOUT_MIN=0.5 TORCH_BACKEND=gloo");
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const Json dist = Json::parse(read_text(folder.file("run") + "/config.json"))["dist"];
  CHECK(dist["bucket_mb"] == 3.5);
  CHECK(dist["timeout_s"] == 30);
  CHECK(dist["backend"] == "mpi");
  for (const char* bad : {"NSA_DDP_BUCKET_MB=0", "NSA_PG_TIMEOUT_MIN=long", "TORCH_BACKEND=smoke"})
    CHECK(run_program(train_args(folder.file("run")), bad).exit_code == 2);
}

TEST_CASE("dist: processes that torchrun's variables describe need no MPI", "[dist]") {
  const TemporaryFolder folder;
  const auto launch = [&](int rank) {
    return "export RANK=" + std::to_string(rank) + " LOCAL_RANK=" + std::to_string(rank) +
           " WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost OMP_NUM_THREADS=1 TORCHELASTIC_USE_AGENT_STORE=True "
           "MASTER_PORT=" +
           std::to_string(20000 + getpid() % 20000) + "; exec ";
  };
  const std::string two = folder.file("two"), args = train_args(two, "--set train.accumulate_grad_batches=2");
  BackgroundProgram other(args, launch(1));
  BackgroundProgram first(args, launch(0));
  CHECK(first.wait() == 0);
  CHECK(other.wait() == 0);
  const Difference d = difference(run(folder.file("one"), 1) + kWeights, two + kWeights);
  CHECK(d.all < 1e-6);
}
