// Whole program runs: two runs give the same bits, a resume is exact to the bit, and what a run's folder contains.
#include <signal.h>

#include <limits>
#include <sstream>

#include "engine/rng.h"
#include "io/checkpoint.h"
#include "io/data/shards.h"
#include "io/json_config.h"
#include "io/safetensors.h"
#include "model/flops.h"
#include "model/params.h"
#include "tests/support/checked_run.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/config/load_config.h"
#include "train/run/memory_plan.h"
#include "train/step/train_step.h"

using namespace triad;
using namespace triad::test;

namespace {

std::string weights(const std::string& folder) { return read_text(folder + "/model.safetensors"); }

void check_same_bits_and_resume(const std::string& device, const std::string& precision) {
  const TemporaryFolder folder;
  const std::string more = "--set train.accumulate_grad_batches=2 --set runtime.precision=" + precision + " ";
  run_ok(train_on(folder.file("a"), device, more));
  run_ok(train_on(folder.file("b"), device, more));
  REQUIRE(!weights(folder.file("a")).empty());
  CHECK(weights(folder.file("a")) == weights(folder.file("b")));
  // Resumes a finished run from its step-7 checkpoint.
  run_ok(train_on(folder.file("c"), device, more + "--set train.save_every=7"));
  run_ok(train_on(folder.file("c"), device,
                  more + "--set train.save_every=7 --overwrite --resume " + folder.file("c/checkpoints/step_7")));
  CHECK(weights(folder.file("a")) == weights(folder.file("c")));
  CHECK(lines(folder.file("a/training.csv")).size() == 21);
  // The header and 20 steps: rows after the checkpoint were cut and written again.
  CHECK(lines(folder.file("c/training.csv")).size() == 21);
}

// Trains configs/tiny.json's model on a device, one step at a time, and gives access to its master weights.
struct SmallStep {
  SmallStep(Device device, const std::vector<std::string>& sets)
      : config(load_config(kTiny, sets).config), runtime(allocate_planned(config, device)), step(*runtime, config) {
    step.model().params().init(runtime->ctx(), 7);
  }
  std::vector<float> master() {
    std::vector<float> host(static_cast<size_t>(step.model().params().stored_elements()));
    read(runtime->ctx(), host.data(), step.model().params().master());
    return host;
  }
  std::vector<int32_t> tokens(int32_t first) const {
    std::vector<int32_t> out;
    for (int64_t i = 0; i < config.train.seq_len * config.train.micro_batch_size; ++i)
      out.push_back(static_cast<int32_t>((first + 7 * i) % config.model.vocab_size));
    return out;
  }
  // Queues a step whose tokens begin with `first`.
  void queue(int64_t number, int32_t first) {
    const int64_t positions = config.train.seq_len * config.train.micro_batch_size;
    step.begin();
    step.micro_step(tokens(first), tokens(first + 1), positions);
    step.update(number, positions);
  }
  Config config;
  std::unique_ptr<Runtime> runtime;
  TrainStep step;
};

// Queues three steps: the second reads a NaN weight, the third doesn't.
void check_bad_step(Device device, const std::string& on_nonfinite) {
  SmallStep small(device, {"train.on_nonfinite=" + on_nonfinite, "runtime.cuda_graph=true"});
  const Params& params = small.step.model().params();
  const Tensor gain = params.part(params.weights(), params.count() - 2);  // norm_f, on which all gradients depend
  REQUIRE(params.specs()[static_cast<size_t>(params.count() - 2)].name == "norm_f.weight");
  Context& ctx = small.runtime->ctx();
  small.queue(0, 1);
  CHECK(small.step.result().finite);
  const std::vector<float> before = small.master();
  std::vector<float> good(static_cast<size_t>(gain.numel())), bad = good;
  read(ctx, good.data(), gain);
  bad = good;
  bad[3] = std::numeric_limits<float>::quiet_NaN();
  write(ctx, gain, bad.data());
  small.queue(1, 2);
  write(ctx, gain, good.data());
  small.queue(2, 3);  // queued before the host reads the second step's result
  const TrainStep::Result second = small.step.result();
  CHECK(!second.finite);
  CHECK(second.bad_tensor == "the gradient of embed.weight");
  const TrainStep::Result third = small.step.result();
  CHECK(third.finite);
  CHECK(third.bad_tensor.empty());
  const bool stopped = on_nonfinite == "stop";
  CHECK((small.master() == before) == stopped);
  small.queue(3, 4);
  CHECK(small.step.result().finite);
  CHECK((small.master() == before) == stopped);
}

}  // namespace

TEST_CASE("train: a step that is not finite changes nothing, and with `stop` no later step does", "[train]") {
  for (const char* on_nonfinite : {"stop", "skip"}) check_bad_step(Device::cpu(), on_nonfinite);
}

TEST_CASE("train: a step that is not finite changes nothing on the GPU either", "[train][gpu]") {
  if (!require_gpu()) return;
  for (const char* on_nonfinite : {"stop", "skip"}) check_bad_step(Device::cuda(), on_nonfinite);
}

TEST_CASE("train: a micro-step replayed from a graph gives the bits of one that runs directly", "[train][gpu]") {
  if (!require_gpu()) return;
  for (const char* precision : {"fp32", "bf16"}) {
    std::vector<float> weights[2];
    for (const bool graph : {false, true}) {
      SmallStep small(Device::cuda(), {std::string("runtime.precision=") + precision,
                                       std::string("runtime.cuda_graph=") + (graph ? "true" : "false")});
      for (int32_t i = 0; i < 6; ++i) {
        small.queue(i, 3 * i);
        if (i > 0) CHECK(small.step.result().finite);
      }
      CHECK(small.step.result().finite);
      weights[graph] = small.master();
    }
    CHECK(weights[0] == weights[1]);
  }
}

TEST_CASE("train: same seed, same bits, and resume to the exact bit", "[train]") {
  check_same_bits_and_resume("cpu", "fp32");
  check_same_bits_and_resume("cpu", "bf16");
}

TEST_CASE("train: a resume in the third file of the second epoch ends with the same bits", "[train]") {
  constexpr int64_t T = 48, kSequences = 8, kStep = 2;  // values in configs/tiny.json
  const TemporaryFolder folder;
  const int64_t tokens[] = {100, 110, 180};  // chosen so that only the third file contains sequences 5, 6 and 7
  const Philox random(1, 0);
  for (uint64_t file = 0; file < 3; ++file) {
    ShardWriter writer(folder.file("part" + std::to_string(file) + ".bin"), TokenWidth::u16);
    for (int64_t i = 0; i < tokens[file]; ++i)
      writer.append(std::vector{static_cast<int32_t>(random.below(file << 32 | static_cast<uint64_t>(i), 256))});
    writer.finish();
  }
  const std::string more = "--set data.kind=shards --set 'data.paths=[\"" + folder.file("part*.bin") +
                           "\"]' --set data.val_fraction=0 --set train.save_every=1 --set train.keep_last=0 ";
  run_ok(train_on(folder.file("whole"), "cpu", more));
  const auto seed = static_cast<uint64_t>(load_config(kTiny, {}).config.data.seed);
  int resumes = 0;
  for (int64_t step = kSequences / kStep; step < 2 * kSequences / kStep; ++step) {  // second-epoch steps
    const int64_t next = sequence_position(step * kStep, kSequences, seed);
    if (next * T < tokens[0] + tokens[1]) continue;
    ++resumes;
    const std::string out = folder.file("from" + std::to_string(step));
    run_ok(train_on(out, "cpu", more + "--resume " + folder.file("whole/checkpoints/step_" + std::to_string(step))));
    CHECK(weights(out) == weights(folder.file("whole")));
  }
  CHECK(resumes >= 1);
}

TEST_CASE("train: same seed, same bits, and resume to the exact bit on the GPU", "[train][gpu]") {
  if (!require_gpu()) return;
  check_same_bits_and_resume("cuda", "fp32");
  check_same_bits_and_resume("cuda", "bf16");
  const TemporaryFolder folder;
  for (const char* graph : {"false", "true"})
    run_ok(train_on(folder.file(graph), "cuda",
                    std::string("--set train.accumulate_grad_batches=2 --set runtime.precision=bf16 --set "
                                "runtime.cuda_graph=") +
                        graph));
  CHECK(weights(folder.file("false")) == weights(folder.file("true")));
}

TEST_CASE("train: a resume after a kill at any moment ends with the same bits", "[train]") {
  const TemporaryFolder folder;
  const std::string more = "--set train.steps=60 --set train.save_every=1 ";
  run_ok(train_on(folder.file("whole"), "cpu", more));
  for (const size_t rows : {1, 9, 30}) {
    const std::string out = folder.file("killed" + std::to_string(rows));
    BackgroundProgram program(train_on(out, "cpu", more));
    wait_for_rows(out, rows);
    program.send(SIGKILL);
    program.wait();
    run_ok(train_on(out, "cpu", more + "--resume latest"));
    CHECK(weights(out) == weights(folder.file("whole")));
    CHECK(lines(out + "/training.csv").size() == 61);
  }
}

TEST_CASE("train: checkpoints are written concurrently with the steps, and old ones are removed", "[train]") {
  const TemporaryFolder folder;
  const std::string often = "--set train.steps=9 --set train.save_every=1 ";
  run_ok(train_on(folder.file("all"), "cpu", often + "--set train.keep_last=0"));
  run_ok(train_on(folder.file("few"), "cpu", often + "--set train.keep_last=2 --set train.keep_every=3"));
  CHECK(list_checkpoints(folder.file("all/checkpoints")).size() == 10);  // ten with step_0
  std::vector<int64_t> kept;
  for (const CheckpointFolder& c : list_checkpoints(folder.file("few/checkpoints"))) kept.push_back(c.step);
  CHECK(kept == std::vector<int64_t>{3, 6, 8, 9});
  run_ok(train_on(folder.file("usual"), "cpu", often));
  kept.clear();
  for (const CheckpointFolder& c : list_checkpoints(folder.file("usual/checkpoints"))) kept.push_back(c.step);
  CHECK(kept == std::vector<int64_t>{7, 8, 9});
  // The log names every checkpoint.
  const std::string log = read_text(folder.file("usual/ranks/rank_0.log"));
  for (int step = 0; step <= 9; ++step)
    CHECK(has(log, fmt::format("checkpoint {}/checkpoints/step_{}, written in ", folder.file("usual"), step)));
  // Each checkpoint contains its own step's state, although later steps run while it is being written.
  run_ok(train_on(folder.file("five"), "cpu", "--set train.steps=9 --set train.save_every=5"));
  for (const char* file : {"model.safetensors", "optimizer.safetensors"})
    CHECK(read_text(folder.file("all/checkpoints/step_5/") + file) ==
          read_text(folder.file("five/checkpoints/step_5/") + file));
  int written = 0;
  for (const std::string& line : lines(folder.file("all/heartbeat_rank0.jsonl"))) {
    const Json beat = parse_json(line, "a heartbeat");
    if (beat["msg"] != "checkpoint") continue;
    ++written;
    CHECK(beat.contains("stall_ms"));
    CHECK(beat["write_s"].get<double>() > 0);
  }
  CHECK(written == 10);
}

TEST_CASE("train: the time of the first checkpoint is not counted as the first step's", "[train][slow]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  // The disk is slowed down, so that a checkpoint takes seconds.
  run_ok(train_on(out, "cpu", "--set train.steps=1 --set train.save_every=1000"),
         with_faults("TRIAD_SLOW_SYNC='0.2 /checkpoints'"));
  std::istringstream row(lines(out + "/training.csv").at(1));
  std::string row_ms;
  for (int i = 0; i < 6; ++i) std::getline(row, row_ms, ',');
  double write_s = 0, step_ms = 0;
  for (const std::string& line : lines(out + "/heartbeat_rank0.jsonl")) {
    const Json beat = Json::parse(line);
    if (beat["msg"] == "checkpoint" && write_s == 0) write_s = beat["write_s"];
    if (beat["msg"] == "step_end") step_ms = beat["step_ms"];
  }
  CHECK(write_s > 1);
  INFO("the step took " << step_ms << " ms, the checkpoint " << write_s << " s");
  CHECK(std::stod(row_ms) < step_ms + 500 * write_s);
}

TEST_CASE("train: a run's folder contains its tables, config, metrics and weights", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  write_text(folder.file("text.txt"), read_text(TRIAD_SOURCE_DIR "/train/run/trainer.cpp"));
  run_ok(train_on(out, "cpu",
                  "--set data.kind=text --set 'data.paths=[\"" + folder.file("text.txt") +
                      "\"]' --set train.eval_every=10 "
                      "--set train.eval_batches=2"),
         "NSA_LR=2e-3 NSA_ENV_STATIC=1");
  CHECK(lines(out + "/training.csv").front() == "step,loss,lr,tokens_per_s,grad_norm,step_ms,mfu");
  CHECK(lines(out + "/val.csv").size() == 3);
  const Json config = Json::parse(read_text(out + "/config.json"));
  CHECK(config["train"]["lr"] == 2e-3);
  CHECK(config["model"]["mlp_hidden"] == 128);
  CHECK(config["data"]["seed"] == 1337);
  const Json metrics = Json::parse(read_text(out + "/metrics.json"));
  for (const char* key : {"step", "train_loss", "val_loss", "tokens", "seconds", "tokens_per_s", "peak_mib"})
    CHECK(metrics.contains(key));
  const Json environment = Json::parse(read_text(out + "/env.json"));
  CHECK(environment["environment"]["NSA_LR"] == "2e-3");
  CHECK(!environment["environment"].contains("PATH"));
  const std::vector<std::string> beats = lines(out + "/heartbeat_rank0.jsonl");
  REQUIRE(beats.size() >= 22);
  CHECK(Json::parse(beats.front())["msg"] == "boot");
  CHECK(Json::parse(beats[1])["msg"] == "step_end");
  const SafetensorsFile model(out + "/model.safetensors");
  CHECK(model.entries().size() == param_specs(config_from_json(config).model).size());
  run_ok("generate --device cpu --tokens 5 --prompt int --checkpoint " + out);
  run_ok("eval --device cpu --checkpoint " + out + " --data " + folder.file("text.txt"));
  run_ok("inspect " + out + "/model.safetensors");
}

namespace {

void check_explosion(const std::string& device) {
  const TemporaryFolder folder;
  const std::string explode = "--set train.lr=1e30 --set train.grad_clip=0 ";
  const Outcome stopped = run_program(train_on(folder.file("stop"), device, explode));
  INFO(stopped.output);
  CHECK(stopped.exit_code == 1);
  CHECK(stopped.output.find("rank 0") != std::string::npos);
  CHECK(stopped.output.find("first bad tensor") != std::string::npos);
  run_ok(train_on(folder.file("skip"), device, explode + "--set train.on_nonfinite=skip"));
  CHECK(lines(folder.file("skip/training.csv")).size() == 21);
}

}  // namespace

TEST_CASE("train: a loss that is not finite stops the run or skips the step", "[train]") { check_explosion("cpu"); }

TEST_CASE("train: a loss that is not finite stops a run on the GPU too", "[train][gpu]") {
  if (require_gpu()) check_explosion("cuda");
}

TEST_CASE("model: the M7C shape has 195 tensors and its parameter counts", "[model]") {
  const Config cpu = load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m_cpu.json", {}).config;
  CHECK(param_specs(cpu.model).size() == 195);
  CHECK(count_parameters(cpu.model) == 78295332);
  CHECK(count_parameters(load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m.json", {}).config.model) == 155096868);
  // The expected mean of selected tokens per row.
  for (const auto& [T, mean] : {std::pair{512, 256.5}, {2048, 752.5}, {4096, 872.5}})
    CHECK(attended_pairs(cpu.model, AttentionKind::nsa, T).sel / T == mean);
}
