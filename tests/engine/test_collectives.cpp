// Collectives between ranks, gradient buckets, steps in which one rank has non-finite values, and memory plans for
// several ranks. Two ranks are two threads here, connected over TCP.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <thread>
#include <type_traits>

#include "engine/comm/comm.h"
#include "engine/comm/link.h"
#include "io/json_config.h"
#include "kernels/step/rank_sum.h"
#include "kernels/step/reduce.h"
#include "tests/support/dist_run.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/run/memory_plan.h"
#include "train/run/startup.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;

namespace {

LaunchEnv one_of_two(int rank) {
  LaunchEnv env{.launcher = "torchrun",
                .rank = rank,
                .world = 2,
                .local_rank = rank,
                .local_world = 2,
                .master_host = "127.0.0.1"};
  env.master_port = reserved_port();
  return env;
}

void on_two_ranks(const std::function<void(Comm&)>& body) {
  const auto rank = [&](int r) {
    const std::unique_ptr<Comm> comm = open_comm(one_of_two(r), Device::cpu(), CommBackend::automatic, 30);
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

// Element i in rank r's test data; magnitudes differ between ranks, so that sums depend on their order.
float value(int64_t r, int64_t i) {
  return static_cast<float>(std::sin(static_cast<double>(i * 7 + r * 3)) * std::pow(10.0, r));
}

}  // namespace

TEST_CASE("dist: over TCP rank 0 relays an all-to-all in bounded memory, for any number of ranks", "[dist]") {
  constexpr int kWorld = 12;
  constexpr size_t kPart = 256 << 10, kWhole = kWorld * kPart;
  // Memory growth limit, in MiB. All parts together are 36 MiB.
  constexpr int64_t kLimitMib = 16;
  // The buffers are written before the link is opened, so that any later memory growth belongs to the link.
  std::vector<std::vector<uint8_t>> to(kWorld), from(kWorld, std::vector<uint8_t>(kWhole));
  const auto byte = [](int source, int destination) { return static_cast<uint8_t>(source * 16 + destination + 1); };
  for (int r = 0; r < kWorld; ++r)
    for (int d = 0; d < kWorld; ++d) to[r].insert(to[r].end(), kPart, byte(r, d));
  const auto mib_of = [](const std::string& name) {
    const std::string status = read_text("/proc/self/status");
    return std::stoll(status.substr(status.find(name) + name.size())) / 1024;
  };
  write_text("/proc/self/clear_refs", "5");  // resets peak resident memory (VmHWM)
  const int64_t before = mib_of("VmRSS:");
  std::vector<std::thread> ranks;
  std::vector<std::string> errors(kWorld);
  for (int r = 0; r < kWorld; ++r)
    ranks.emplace_back([&, r] {
      LaunchEnv env = one_of_two(r);
      env.world = env.local_world = kWorld;
      try {
        const std::unique_ptr<Link> link = open_tcp_link(env, 60);
        link->all_to_all(to[r].data(), from[r].data(), kPart);
        link->all_to_all(to[r].data(), from[r].data(), 1);  // differently sized calls match in order
        link->all_to_all(to[r].data(), from[r].data(), kPart);
        link->finish();
      } catch (const Error& e) { errors[r] = e.what(); }
    });
  for (std::thread& rank : ranks) rank.join();
  CHECK(mib_of("VmHWM:") - before < kLimitMib);
  CHECK(errors == std::vector<std::string>(kWorld));
  for (int r = 0; r < kWorld; ++r) {
    std::vector<uint8_t> expected;
    for (int s = 0; s < kWorld; ++s) expected.insert(expected.end(), kPart, byte(s, r));
    CHECK((from[r] == expected));
  }
}

TEST_CASE("dist: ranks that differ in a fact all get an error with two ranks and their values", "[dist]") {
  static_assert(std::is_abstract_v<Comm>);  // each backend implements each collective
  std::string errors[2];
  on_two_ranks([&](Comm& comm) {
    const std::string own = comm.rank() == 0 ? "4000" : "5000";
    require_alike(comm, {{"the step is", "7"}, {"the tokens are", "many"}}, "advice");
    try {
      require_alike(comm, {{"the step is", "7"}, {"the tokens are", own}, {"the rest is", own}}, "advice");
    } catch (const Error& e) { errors[comm.rank()] = e.what(); }
  });
  for (const std::string& error : errors) CHECK(error == "the tokens are 4000 on rank 0, but 5000 on rank 1: advice");
}

TEST_CASE("dist: ranks of two builds do not connect", "[dist]") {
  const Config config = load_config(kTiny, {}).config;
  for (const bool alike : {true, false}) {
    std::string errors[2];
    const auto rank = [&](int r) {
      try {
        const std::string build = r == 0 || alike ? "triad 1 (0123)\nbuild: Release" : "triad 1 (4567)\nbuild: Release";
        connect_ranks(one_of_two(r), Device::cpu(), config, build)->finish();
      } catch (const Error& e) { errors[r] = e.what(); }
    };
    std::thread other(rank, 1);
    rank(0);
    other.join();
    for (const std::string& error : errors)
      CHECK(error == (alike ? ""
                            : "the program is triad 1 (0123), build: Release on rank 0, but triad 1 (4567), build: "
                              "Release on rank 1: ranks of two builds do not train together"));
  }
}

TEST_CASE("dist: ranks exchange pieces of different sizes, or none", "[dist]") {
  constexpr int64_t kLong = 600'000, kShort = 5;  // the long piece is sent in several parts
  std::vector<std::string> failures[2];
  on_two_ranks([&](Comm& comm) {
    const std::unique_ptr<Runtime> runtime = small_runtime();
    const bool first = comm.rank() == 0;
    const Tensor to = runtime->arena().alloc(MemTag::io, "to", DType::f32, {first ? kLong : kShort}),
                 from = runtime->arena().alloc(MemTag::io, "from", DType::f32, {first ? kShort : kLong});
    for (int64_t i = 0; i < to.numel(); ++i) to.ptr<float>()[i] = value(comm.rank(), i);
    const int other = 1 - comm.rank();
    const Comm::ConstPiece sent{other, to};
    const Comm::Piece received{other, from};
    const int64_t cut = kLong * 2 / 5;  // rank 0 sends two pieces, which rank 1 receives in their order
    if (first) {
      const Comm::ConstPiece both[] = {{other, to.slice(0, 0, cut)}, {other, to.slice(0, cut, kLong)}};
      comm.exchange(both, {&received, 1}, kLong * 4, "pieces");
    } else {
      const Comm::Piece both[] = {{other, from.slice(0, 0, cut)}, {other, from.slice(0, cut, kLong)}};
      comm.exchange({&sent, 1}, both, kLong * 4, "pieces");
    }
    for (int64_t i = 0; i < from.numel(); ++i)
      if (from.ptr<float>()[i] != value(other, i)) failures[comm.rank()].push_back("element " + std::to_string(i));
    zero(runtime->ctx(), from);
    if (first)  // only rank 0 sends
      comm.exchange({&sent, 1}, {}, kLong * 4, "a piece");
    else
      comm.exchange({}, {&received, 1}, kLong * 4, "a piece");
    if (from.ptr<float>()[kShort - 1] != (first ? 0.0f : value(0, kShort - 1)))
      failures[comm.rank()].push_back("one way");
    const Comm::ConstPiece too_long{other, to};
    if (first) {
      try {
        comm.exchange({&too_long, 1}, {}, 4, "a piece");
        failures[0].push_back("a piece beyond the most bytes");
      } catch (const Error&) {}
    }
  });
  CHECK(failures[0] == std::vector<std::string>());
  CHECK(failures[1] == std::vector<std::string>());
}

TEST_CASE("dist: collectives add in the order of ranks, at any size", "[dist]") {
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
      const Tensor staging = runtime->arena().alloc(MemTag::io, "staging", DType::f32, {2, half});
      fill();
      comm.all_to_all(x, staging.view({n}), "x");
      expect(wrong(0, n, [&](int64_t i) { return value(comm.rank(), i); }) == 0, "all_to_all leaves what is sent");
      rank_sum(runtime->ctx(), x.slice(0, own, own + half), x.slice(0, own, own + half), staging, comm.rank());
      expect(wrong(own, own + half, sum) == 0, "all_to_all and rank_sum");
      fill();
      comm.all_gather(x, "x");
      expect(wrong(0, n, [&](int64_t i) { return value(i / half, i); }) == 0, "all_gather");
    }
    std::vector<double> numbers = {comm.rank() == 0 ? 1.5 : 0.0, comm.rank() == 1 ? 2.5 : 0.0};
    comm.add(numbers, "numbers");
    expect(numbers == std::vector<double>{1.5, 2.5}, "add");
    expect(comm.all_gather_host_text(std::string(static_cast<size_t>(comm.rank()) * 5, 'x'), "text") ==
               std::vector<std::string>{"", "xxxxx"},
           "all_gather_host_text");
  });
  for (const auto& rank_text : failures) CHECK(rank_text == std::vector<std::string>{});
}

namespace {

// Opens `world` ranks in threads, and in each group (`count` ranks, `stride` apart) gathers rank numbers and sums a
// tensor of them. Returns what each rank has gathered and summed.
std::vector<std::string> in_groups(int world, bool on_gpus, int count, int stride) {
  std::vector<std::string> rank_text(static_cast<size_t>(world));
  std::vector<std::thread> ranks;
  for (int r = 0; r < world; ++r)
    ranks.emplace_back([&, r] {
      LaunchEnv env = one_of_two(r);
      env.world = env.local_world = world;
      const Device device = on_gpus ? Device::cuda(r) : Device::cpu();
      try {
        const std::unique_ptr<Comm> comm = open_comm(env, device, CommBackend::automatic, 60);
        {
          Comm& group = comm->group(count, stride);
          Runtime runtime({.device = device, .arena_bytes = 2 << 20, .scratch_bytes = 1 << 20});
          const Tensor x = runtime.arena().alloc(MemTag::io, "x", DType::f32, {2 * group.world()});
          const std::vector<float> own(static_cast<size_t>(x.numel()), static_cast<float>(1 << r));
          write(runtime.ctx(), x, own.data());
          runtime.stream().synchronize();
          group.all_reduce(x, "x");
          group.reduce_scatter(x, "x");
          group.all_gather(x, "x");
          group.stream().synchronize();
          std::vector<float> sums(own.size());
          read(runtime.ctx(), sums.data(), x);
          rank_text[static_cast<size_t>(r)] =
              fmt::format("{} of {}: ranks {}, sums {}", group.rank(), group.world(),
                          fmt::join(group.all_gather_host(r, "r"), " "), fmt::join(sums, " "));
          if (&comm->group(count, stride) != &group) rank_text[static_cast<size_t>(r)] = "made twice";
        }
        comm->finish();
      } catch (const std::exception& e) { rank_text[static_cast<size_t>(r)] = e.what(); }
    });
  for (std::thread& rank : ranks) rank.join();
  return rank_text;
}

}  // namespace

TEST_CASE("dist: groups of ranks gather and sum within the group", "[dist]") {
  // 2^rank summed over the group, and once more by the reduce-scatter.
  CHECK(in_groups(4, false, 2, 1) ==
        std::vector<std::string>{"0 of 2: ranks 0 1, sums 6 6 6 6", "1 of 2: ranks 0 1, sums 6 6 6 6",
                                 "0 of 2: ranks 2 3, sums 24 24 24 24", "1 of 2: ranks 2 3, sums 24 24 24 24"});
  CHECK(in_groups(4, false, 2, 2) ==
        std::vector<std::string>{"0 of 2: ranks 0 2, sums 10 10 10 10", "0 of 2: ranks 1 3, sums 20 20 20 20",
                                 "1 of 2: ranks 0 2, sums 10 10 10 10", "1 of 2: ranks 1 3, sums 20 20 20 20"});
}

TEST_CASE("dist: groups of ranks by NCCL", "[dist][gpu2]") {
  if (!require_gpus(2)) return;
  CHECK(in_groups(2, true, 1, 2) == std::vector<std::string>{"0 of 1: ranks 0, sums 1 1", "0 of 1: ranks 1, sums 2 2"});
  if (backend::cuda_device_count() < 4) return;
  CHECK(in_groups(4, true, 2, 2) ==
        std::vector<std::string>{"0 of 2: ranks 0 2, sums 10 10 10 10", "0 of 2: ranks 1 3, sums 20 20 20 20",
                                 "1 of 2: ranks 0 2, sums 10 10 10 10", "1 of 2: ranks 1 3, sums 20 20 20 20"});
}

TEST_CASE("dist: a gradient that is missing or reported twice is an error that names it", "[dist]") {
  std::string missing[2], twice[2];
  int64_t collectives[2] = {};
  on_two_ranks([&](Comm& comm) {
    const Config config = load_config(kTiny, {"dist.bucket_mb=0.02"}).config;
    const std::unique_ptr<Runtime> runtime = small_runtime();
    Params params(runtime->arena(), config.model, {.grads = true, .shard_elements = segment_unit(2)});
    zero(runtime->ctx(), params.grads());
    const Tensor probe = runtime->arena().alloc(MemTag::io, "probe", DType::f64, {1});
    GradReducer reducer(runtime->ctx(), runtime->arena(), params, RankGroups(comm, config), config, probe);
    GradLedger ledger(runtime->ctx(), runtime->arena(), params);
    const int64_t before = comm.collectives();
    reducer.begin();
    ledger.begin(&reducer);
    for (int64_t i = params.count() - 1; i > 0; --i)
      if (i != 5) ledger.ready(params.part(params.grads(), i), runtime->stream());
    try {
      ledger.require_all();
    } catch (const Error& e) { missing[comm.rank()] = e.what(); }
    collectives[comm.rank()] = comm.collectives() - before;
    try {
      ledger.ready(params.part(params.grads(), 7), runtime->stream());
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

TEST_CASE("dist: a step with too few micro-steps, whose gradients would not be summed, is an error", "[dist]") {
  std::string message[2];
  on_two_ranks([&](Comm& comm) {
    const Config config = load_config(kTiny, {"train.accumulate_grad_batches=2"}).config;
    const std::unique_ptr<Runtime> runtime = allocate_planned(config, Device::cpu(), &comm);
    TrainStep step(*runtime, config, &comm);
    step.model().params().init(runtime->ctx(), 7);
    const std::vector<int32_t> tokens(static_cast<size_t>(config.train.micro_batch_size * config.train.seq_len), 1);
    step.begin();
    step.micro_step(tokens, tokens, 1);
    try {
      step.update(0, 1);
    } catch (const Error& e) { message[comm.rank()] = e.what(); }
  });
  for (const std::string& rank_text : message)
    CHECK(rank_text.find("1 micro-steps in a step of 2") != std::string::npos);
}

TEST_CASE("dist: buckets cover every element once, in backward order, and large gradients are split", "[dist]") {
  const Config m7c = load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m.json", {}).config;
  for (const int64_t world : {2, 8})
    for (const char* mb : {"0.001", "25", "64"})
      for (const char* tie : {"false", "true"}) {
        const Config tiny = load_config(kTiny, {std::string("model.tie_embeddings=") + tie}).config;
        const Config& c = std::string(mb) == "25" ? m7c : tiny;
        const int64_t unit = segment_unit(world), elements = static_cast<int64_t>(std::stod(mb) * (1 << 18));
        Arena arena = Arena::planned(Device::cpu());
        const Params params(arena, c.model, {.grads = true, .shard_elements = segment_unit(world)});
        const std::vector<GradBucket> buckets = plan_buckets(params, elements, unit);
        std::map<int64_t, int64_t> ranges;
        for (const GradBucket& b : buckets) {
          ranges[b.elements.begin] = b.elements.end;
          CHECK(b.elements.begin % unit == 0);
          CHECK(!b.params.empty());
          CHECK(b.elements.size() <= std::max(unit, elements) * (b.late ? 8 : 1));
        }
        CHECK(buckets.back().late);
        int64_t at = 0;
        for (const auto& [begin, end] : ranges) {
          CHECK(begin == at);
          at = end;
        }
        CHECK(at == params.stored_elements());
        CHECK(params.specs()[static_cast<size_t>(buckets.back().params.front())].name == "embed.weight");
        if (&c == &m7c && world == 8) {
          Config apart = m7c;
          apart.dist.replicas = 4;  // late buckets pass between replicas, one beside the next one's sum
          CHECK(BucketPlan(params, m7c, /*rank=*/0, world).largest() > elements);
          CHECK(BucketPlan(params, apart, /*rank=*/0, world).largest() <= elements);
        }
        if (&c == &m7c) {
          CHECK(params.specs()[static_cast<size_t>(buckets.front().params.front())].name == "lm_head.weight");
          CHECK((buckets.size() == 19 || buckets.size() == 20));
          // The first bucket's collective overlaps with backward's rest.
          CHECK(!buckets.front().late);
          // Late buckets: the first layer's, the embedding's, and the small parameters' if they have their own bucket.
          const auto late = std::count_if(buckets.begin(), buckets.end(), [](const GradBucket& b) { return b.late; });
          CHECK((late == 2 || late == 3));
        }
      }
}

TEST_CASE("dist: a value that is not finite on one rank skips the step on all, and the rank is named", "[dist]") {
  for (const char* zero : {"0", "1", "2"}) {
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
      const Tensor gain = params.part(params.weights(), params.count() - 2);  // norm_f, on which all gradients depend
      for (int64_t i = 0; i < 3; ++i) {
        for (size_t t = 0; t < tokens.size(); ++t) tokens[t] = static_cast<int32_t>((t * 7 + i + comm.rank()) % 256);
        const bool inject = i == 1 && comm.rank() == 1;
        if (i == 1) before[comm.rank()] = weights();
        const float good = gain.ptr<float>()[3];
        if (inject) gain.ptr<float>()[3] = std::numeric_limits<float>::quiet_NaN();
        step.begin();
        step.micro_step(tokens, tokens, positions);
        if (inject) gain.ptr<float>()[3] = good;
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

TEST_CASE("dist: a memory plan for several ranks is what each of them allocates", "[dist]") {
  std::string wrong[2];
  on_two_ranks([&](Comm& comm) {
    for (const char* zero : {"0", "1", "2", "3"})
      for (const char* dtype : {"fp32", "bf16"}) {
        const Config config = load_config(kTiny, {std::string("dist.zero=") + zero, "runtime.precision=bf16",
                                                  std::string("train.grads_dtype=") + dtype,
                                                  std::string("dist.grad_dtype=") + dtype, "dist.bucket_mb=0.02"})
                                  .config;
        const MemoryPlan plan = plan_memory(config, Device::cpu(), make_planned_comm(2).get());
        const std::unique_ptr<Runtime> runtime = allocate_planned(config, Device::cpu(), &comm);
        const TrainStep step(*runtime, config, &comm);
        if (runtime->arena().used_bytes() != plan.arena_bytes)
          wrong[comm.rank()] += fmt::format("zero {}, gradients in {}: planned {}, allocated {}\n", zero, dtype,
                                            plan.arena_bytes, runtime->arena().used_bytes());
      }
  });
  for (const std::string& text : wrong) CHECK(text == "");
}

TEST_CASE("dist: buffers for copies between GPUs are planned for ranks on one host only", "[dist][build]") {
  struct TwoHosts final : Comm {  // two ranks on different hosts, which cannot copy between their GPUs
    TwoHosts() : Comm(2, Device::cpu()) {}
    std::string name() const override { return "two_hosts"; }
    void do_all_reduce(Tensor, CommCtas) override {}
    void do_reduce_scatter(Tensor, CommCtas) override {}
    void do_all_gather(Tensor) override {}
    void do_all_to_all(Tensor, Tensor) override {}
    void do_exchange(std::span<const ConstPiece>, std::span<const Piece>, int64_t) override {}
    void do_finish() override {}
  } two_hosts;
  const auto bytes = [](Comm& comm, const std::string& zero) {
    const Config config = load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m_2gpu.json", {"dist.zero=" + zero}).config;
    return plan_memory(config, Device::cuda(), &comm).arena_bytes;
  };
  const std::unique_ptr<Comm> one_host = make_planned_comm(2);
  constexpr int64_t kBucket = 4 * 38'633'472,
                    kBarrierCounts = 256;  // bytes: embedding bucket, padded barrier counts
  CHECK(bytes(*one_host, "0") - bytes(two_hosts, "0") == kBucket + kBarrierCounts);
  CHECK(bytes(*one_host, "1") == bytes(two_hosts, "1"));  // both plans, if sharded, include the bucket's buffer
}

TEST_CASE("dist: triad plan --ranks counts buckets and shards", "[dist][build]") {
  const auto plan = [](const std::string& more) {
    const Outcome outcome =
        run_program("plan " TRIAD_SOURCE_DIR "/configs/m7c_125m_2gpu.json --set runtime.device=auto --json " + more);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return Json::parse(outcome.standard_output);
  };
  const auto bytes = [](const Json& planned) { return planned["peak_bytes"].get<int64_t>(); };
  const Json one = plan("--ranks 1"), two = plan("--ranks 2 --set dist.zero=0"), shards = plan("--ranks 2"),
             eight = plan("--ranks 8"), half = plan("--ranks 2 --set dist.zero=0 --set dist.grad_dtype=bf16");
  CHECK(one == plan(""));
  CHECK(two["tokens_per_step"] == 2 * one["tokens_per_step"].get<int64_t>());
  // A rank has whole weights in bf16 and gradients in fp32, and with shards a part of AdamW's moments and master
  // weights in fp32, all padded for that rank count.
  const auto stored = [&](int64_t world) {
    Arena arena = Arena::planned(Device::cpu());
    const Config config = load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m_2gpu.json", {}).config;
    return Params(arena, config.model, {.shard_elements = segment_unit(world)}).stored_elements();
  };
  constexpr int64_t kWhole = 2 + 4, kState = 3 * 4;  // bytes per element
  const int64_t bucket = 4 * 38'633'472;
  // On a GPU there is always a staging buffer for other ranks' parts of the largest bucket (the embedding's), on the
  // CPU only with sharding.
  const int64_t staging = two["device"] == "cpu" ? 0 : bucket;
  CHECK(std::abs(double(bytes(two) - staging - bytes(one))) < 1e6);
  CHECK(std::abs(double(bytes(two) - staging - (bytes(shards) - bucket) - kState * stored(2) / 2)) < 2e6);
  CHECK(std::abs(double(bytes(two) - staging - (bytes(eight) - bucket) - kWhole * (stored(2) - stored(8)) -
                        kState * (stored(2) - stored(8) / 8))) < 4e6);
  // With gradients in bf16 the CPU has one too.
  CHECK(std::abs(double(bytes(half) - bytes(two) - bucket / 2 - (bucket - staging))) < 1e5);
  for (const char* bad : {"0", "-2", "many"}) CHECK(run_program("plan " + kTiny + " --ranks " + bad).exit_code == 2);
}
