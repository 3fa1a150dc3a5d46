// Whole runs of the program: same bits twice, resume to the exact bit, what a run's folder holds, how a run is stopped.
#include <signal.h>

#include <chrono>
#include <cmath>
#include <filesystem>
#include <thread>

#include "io/json_config.h"
#include "io/safetensors.h"
#include "model/flops.h"
#include "model/params.h"
#include "tests/program.h"
#include "tests/test.h"
#include "train/load_config.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kTiny = TRIAD_SOURCE_DIR "/configs/tiny.json";

std::string train_args(const std::string& out, const std::string& device, const std::string& more = "") {
  return "train " + kTiny + " --set log.out_dir=" + out + " --set runtime.device=" + device + " " + more;
}

void run(const std::string& args, const std::string& environment = "") {
  const Outcome outcome = run_program(args, environment);
  INFO("triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
}

std::string weights(const std::string& folder) { return read_text(folder + "/model.safetensors"); }

std::vector<std::string> lines(const std::string& path) {
  std::vector<std::string> out;
  std::istringstream in(read_text(path));
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

// Until training.csv has that many rows, for a minute at most.
void wait_for_rows(const std::string& folder, size_t rows) {
  for (int i = 0; i < 60000 && lines(folder + "/training.csv").size() < rows + 1; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void check_same_bits_and_resume(const std::string& device, const std::string& precision) {
  const TemporaryFolder folder;
  const std::string more = "--set train.accumulate_grad_batches=2 --set runtime.precision=" + precision + " ";
  run(train_args(folder.file("a"), device, more));
  run(train_args(folder.file("b"), device, more));
  REQUIRE(!weights(folder.file("a")).empty());
  CHECK(weights(folder.file("a")) == weights(folder.file("b")));
  // A run that went further is taken back to its checkpoint of step 7 and resumed from there.
  run(train_args(folder.file("c"), device, more + "--set train.save_every=7"));
  run(train_args(folder.file("c"), device,
                 more + "--set train.save_every=7 --resume " + folder.file("c/checkpoints/step_7")));
  CHECK(weights(folder.file("a")) == weights(folder.file("c")));
  CHECK(lines(folder.file("a/training.csv")).size() == 21);
  CHECK(lines(folder.file("c/training.csv")).size() == 21);  // rows past the checkpoint were cut, then written again
}

}  // namespace

TEST_CASE("train: same seed, same bits, and resume to the exact bit", "[train]") {
  check_same_bits_and_resume("cpu", "fp32");
  check_same_bits_and_resume("cpu", "bf16");
}

TEST_CASE("train: same seed, same bits, and resume to the exact bit on the GPU", "[train][gpu]") {
  if (!require_gpu()) return;
  check_same_bits_and_resume("cuda", "fp32");
  check_same_bits_and_resume("cuda", "bf16");
}

TEST_CASE("train: killed at any moment, a resume ends in the same bits", "[train]") {
  const TemporaryFolder folder;
  const std::string more = "--set train.steps=60 --set train.save_every=1 ";
  run(train_args(folder.file("whole"), "cpu", more));
  for (const size_t rows : {1, 9, 30}) {
    const std::string out = folder.file("killed" + std::to_string(rows));
    BackgroundProgram program(train_args(out, "cpu", more));
    wait_for_rows(out, rows);
    program.send(SIGKILL);
    program.wait();
    const bool has_checkpoint = fs::exists(out + "/checkpoints/latest");
    run(train_args(out, "cpu", more + (has_checkpoint ? "--resume latest" : "--overwrite")));
    CHECK(weights(out) == weights(folder.file("whole")));
    CHECK(lines(out + "/training.csv").size() == 61);
  }
}

TEST_CASE("train: .HALT and SIGTERM stop after the current step with a checkpoint", "[train]") {
  const TemporaryFolder folder;
  const std::string more = "--set train.steps=900 ";
  for (const bool by_file : {true, false}) {
    const std::string out = folder.file(by_file ? "halt" : "term");
    BackgroundProgram program(train_args(out, "cpu", more));
    wait_for_rows(out, 2);
    if (by_file)
      write_text(out + "/.HALT", "");
    else
      program.send(SIGTERM);
    CHECK(program.wait() == 0);
    CHECK(fs::exists(out + "/checkpoints/latest/state.json"));
    CHECK(!fs::exists(out + "/.HALT"));
  }
}

TEST_CASE("train: a run's folder holds what SPEC.md names", "[train]") {
  const TemporaryFolder folder;
  const std::string out = folder.file("run");
  write_text(folder.file("text.txt"), read_text(TRIAD_SOURCE_DIR "/train/trainer.cpp"));
  run(train_args(out, "cpu",
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
  run("generate --device cpu --tokens 5 --prompt int --checkpoint " + out);
  run("eval --device cpu --checkpoint " + out + " --data " + folder.file("text.txt"));
  run("inspect " + out + "/model.safetensors");
}

TEST_CASE("train: a loss that is not finite stops the run or skips the step", "[train]") {
  const TemporaryFolder folder;
  const std::string explode = "--set train.lr=1e30 --set train.grad_clip=0 ";
  const Outcome stopped = run_program(train_args(folder.file("stop"), "cpu", explode));
  INFO(stopped.output);
  CHECK(stopped.exit_code == 1);
  CHECK(stopped.output.find("rank 0") != std::string::npos);
  CHECK(stopped.output.find("first bad tensor") != std::string::npos);
  run(train_args(folder.file("skip"), "cpu", explode + "--set train.on_nonfinite=skip"));
}

TEST_CASE("model: the M7C shape has 195 tensors and its parameter counts", "[model]") {
  const Config cpu = load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m_cpu.json", {}).config;
  CHECK(param_specs(cpu.model).size() == 195);
  CHECK(count_parameters(cpu.model) == 78295332);
  CHECK(count_parameters(load_config(TRIAD_SOURCE_DIR "/configs/m7c_125m.json", {}).config.model) == 155096868);
  // Mean selected tokens a row.
  for (const auto& [T, mean] : {std::pair{512, 256.5}, {2048, 752.5}, {4096, 872.5}})
    CHECK(attended_pairs(cpu.model, T).sel / T == mean);
}
