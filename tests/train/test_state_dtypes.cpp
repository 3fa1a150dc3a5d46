// Runs whose state is smaller by choice: moments in bf16 (train.moments_dtype), split master weights or none
// (train.master_dtype).
#include <bit>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "io/safetensors.h"
#include "io/weight_index.h"
#include "model/params.h"
#include "tests/support/dist_run.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "train/config/load_config.h"
#include "train/run/memory_plan.h"

using namespace triad;
using namespace triad::test;

namespace {

const std::string kSmall = "--set train.moments_dtype=bf16 --set train.master_dtype=none ";

void train_dtypes(const std::string& out, const std::string& device, const std::string& more) {
  const std::string args = "train " + kTiny + " --set log.out_dir=" + out + " --set runtime.device=" + device +
                           " --set runtime.precision=bf16 --set train.keep_last=0 " + more;
  const Outcome outcome = run_program(args);
  INFO("triad " << args << "\n" << outcome.output);
  REQUIRE(outcome.exit_code == 0);
}

// A file's tensor dtypes.
std::set<std::string> dtypes(const std::string& path) {
  std::set<std::string> all;
  const SafetensorsFile file(path);
  for (const TensorEntry& entry : file.entries()) all.insert(entry.dtype);
  return all;
}

// Each tensor's bytes in one file, or in several with an index.
std::map<std::string, std::vector<std::byte>> tensor_bytes(const std::string& path) {
  std::map<std::string, std::vector<std::byte>> all;
  WeightIndex(path).for_each(
      [&](const SafetensorsFile& file, const TensorEntry& entry) { all[entry.name] = file.read(entry); });
  return all;
}

// The mean loss in a run's last five steps (of twenty).
double final_loss(const std::string& folder) {
  const std::map<int, double> losses = column(folder + "/training.csv", "loss");
  double sum = 0;
  for (int step = 16; step <= 20; ++step) sum += losses.at(step) / 5;
  return sum;
}

void check_bits_and_resume(const std::string& device) {
  const TemporaryFolder folder;
  const std::string a = folder.file("a"), b = folder.file("b"), c = folder.file("c"), wide = folder.file("wide");
  const std::string save = kSmall + "--set train.save_every=7 ";
  train_dtypes(a, device, kSmall);
  train_dtypes(b, device, kSmall);
  train_dtypes(c, device, save);
  const std::string step = c + "/checkpoints/step_7";
  CHECK(dtypes(step + "/model.safetensors") == std::set<std::string>{"BF16"});
  CHECK(dtypes(step + "/optimizer.safetensors") == std::set<std::string>{"BF16"});
  train_dtypes(c, device, save + "--overwrite --resume " + step);
  CHECK(same_file(a + "/model.safetensors", b + "/model.safetensors"));
  CHECK(same_file(a + "/model.safetensors", c + "/model.safetensors"));

  // The state in fp32 learns the same, within noise.
  train_dtypes(wide, device, "--set train.save_every=7 ");
  INFO("loss " << final_loss(a) << ", with the state in fp32 " << final_loss(wide));
  CHECK(std::abs(final_loss(a) - final_loss(wide)) < 0.05);

  // A resume may change the dtypes, in both directions.
  CHECK(dtypes(wide + "/checkpoints/step_7/optimizer.safetensors") == std::set<std::string>{"F32"});
  train_dtypes(folder.file("narrowed"), device, save + "--resume " + wide + "/checkpoints/step_7");
  train_dtypes(folder.file("widened"), device, "--set train.save_every=7 --resume " + step);
  for (const char* changed : {"narrowed", "widened"})
    CHECK(std::abs(final_loss(folder.file(changed)) - final_loss(wide)) < 0.05);
  CHECK(dtypes(folder.file("widened/checkpoints/step_14/model.safetensors")) == std::set<std::string>{"F32"});
  CHECK(dtypes(folder.file("narrowed/checkpoints/step_14/model.safetensors")) == std::set<std::string>{"BF16"});
}

// Writes fresh weights to a folder and moves each to halfway between two bf16 values, where rounding has a tie. Returns
// the folder, for train.init_from.
std::string halfway_weights(const std::string& folder) {
  const Outcome outcome = run_program("init " + kTiny + " --out " + folder);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const std::string path = folder + kWeights;
  std::map<std::string, std::vector<float>> values = tensors(path);
  std::vector<HostTensor> halfway;
  const SafetensorsFile file(path);
  for (const TensorEntry& entry : file.entries()) {
    std::vector<float>& of = values.at(entry.name);
    for (float& x : of) x = std::bit_cast<float>((std::bit_cast<uint32_t>(x) & 0xffff0000u) | 0x8000u);
    Shape shape;
    for (const int64_t size : entry.shape) shape.dim[static_cast<size_t>(shape.rank++)] = size;
    halfway.push_back({{.name = entry.name, .shape = shape}, of.data()});
  }
  write_safetensors(path, halfway);
  return folder;
}

const std::string kSplit = "--set train.master_dtype=split ";

void check_split(const std::string& device) {
  const TemporaryFolder folder;
  const std::string from = "--set train.init_from=" + halfway_weights(folder.file("init")) + " ";
  for (const std::string optimizer : {"adamw", "muon"}) {
    const std::string keys = "--set train.steps=4 --set train.save_every=2 --set train.optimizer=" + optimizer + " ";
    const std::string whole = folder.file(optimizer + "_fp32"), split = folder.file(optimizer + "_split"),
                      other = folder.file(optimizer + "_resumed"), back = folder.file(optimizer + "_back");
    INFO(optimizer);
    train_dtypes(whole, device, keys + from);
    train_dtypes(split, device, keys + kSplit + from);
    const auto check_end = [&](const std::string& run) { CHECK(same_file(whole + kWeights, run + kWeights)); };
    check_end(split);
    for (const char* file : {"/checkpoints/step_2/model.safetensors", "/checkpoints/step_2/optimizer.safetensors"})
      CHECK(same_file(whole + file, split + file));
    if (optimizer != "adamw") continue;
    train_dtypes(other, device, keys + kSplit + "--resume " + whole + "/checkpoints/step_2");
    check_end(other);
    train_dtypes(back, device, keys + "--resume " + split + "/checkpoints/step_2");
    check_end(back);
    const std::string host = folder.file("host");
    train_dtypes(host, device, keys + kSplit + from + "--set runtime.offload=optimizer ");
    check_end(host);
  }
}

}  // namespace

TEST_CASE("state dtypes: split masters give the bits of fp32 masters, and each resumes the other", "[train]") {
  check_split("cpu");
}

TEST_CASE("state dtypes: split masters give the bits of fp32 masters on the GPU", "[train][gpu]") {
  if (!require_gpu()) return;
  check_split("cuda");
}

TEST_CASE("state dtypes: split masters give the bits of fp32 masters on two ranks, whatever they share", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string keys =
      "--set runtime.precision=bf16 --set train.steps=3 --set train.accumulate_grad_batches=1 "
      "--set dist.bucket_mb=0.02 --set train.init_from=" +
      halfway_weights(folder.file("init")) + " ";
  int runs = 0;
  const auto train_two = [&](const std::string& more) {
    return tensor_bytes(tensors_path(run(folder.file(std::to_string(runs++)), 2, keys + more)));
  };
  const std::string muon = "--set train.optimizer=muon ";
  const auto with_muon = train_two(muon), with_adamw = train_two("");
  CHECK(train_two(muon + kSplit + "--set dist.zero=1") == with_muon);
  CHECK(train_two(muon + kSplit + "--set dist.zero=2") == with_muon);
  // With whole weights on no rank, masters are split only on the host.
  const char* saves_nothing = "train.master_dtype split saves nothing with dist.zero 3";
  const std::string windows = keys + kSplit + "--set dist.zero=3 ";
  const Outcome whole = run_ranks(2, train_args(folder.file("whole"), windows)),
                on_host = run_ranks(2, train_args(folder.file("host"), windows + "--set runtime.offload=optimizer"));
  CHECK(tensor_bytes(tensors_path(folder.file("whole"))) == with_adamw);
  CHECK(tensor_bytes(tensors_path(folder.file("host"))) == with_adamw);
  CHECK(has(whole.output, saves_nothing));
  CHECK_FALSE(has(on_host.output, saves_nothing));
}

TEST_CASE("state dtypes: runs with small state repeat and resume to the bit, and learn", "[train]") {
  check_bits_and_resume("cpu");
}

TEST_CASE("state dtypes: runs with small state repeat and resume to the bit on the GPU", "[train][gpu]") {
  if (!require_gpu()) return;
  check_bits_and_resume("cuda");
}

TEST_CASE("state dtypes: the memory plan counts 8 bytes a parameter less", "[train]") {
  const auto bytes = [](const std::vector<std::string>& sets) {
    std::vector<std::string> all = {"runtime.precision=bf16"};
    all.insert(all.end(), sets.begin(), sets.end());
    return plan_memory(load_config(kTiny, all).config, Device::cpu()).arena_bytes;
  };
  const auto parameters = static_cast<double>(count_parameters(load_config(kTiny, {}).config.model));
  const auto saved = [&](const std::vector<std::string>& sets) {
    return static_cast<double>(bytes({}) - bytes(sets)) / parameters;
  };
  CHECK(saved({"train.moments_dtype=bf16"}) == Approx(4).epsilon(0.1));
  CHECK(saved({"train.master_dtype=none"}) == Approx(4).epsilon(0.1));
  CHECK(saved({"train.moments_dtype=bf16", "train.master_dtype=none"}) == Approx(8).epsilon(0.1));
}

TEST_CASE("state dtypes: the memory plan counts 1.875 bytes a parameter less with split masters", "[train]") {
  // The model is large, so that the buffer in which masters are joined, whose size is fixed, hardly counts.
  std::vector<std::string> sets = {"runtime.precision=bf16", "model.dim=1024", "model.vocab_size=65536"};
  const Config whole = load_config(kTiny, sets).config;
  sets.push_back("train.master_dtype=split");
  const Config split = load_config(kTiny, sets).config;
  const int64_t less = plan_memory(whole, Device::cpu()).arena_bytes - plan_memory(split, Device::cpu()).arena_bytes;
  CHECK(static_cast<double>(less) / static_cast<double>(count_parameters(whole.model)) == Approx(1.875).epsilon(0.03));
}

TEST_CASE("state dtypes: two ranks with small state give the same bits, whatever they share", "[dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string keys = "--set runtime.precision=bf16 --set train.save_every=10 " + kSmall;
  std::vector<std::string> runs;
  for (const std::string zero : {"0", "1", "2", "3"})
    runs.push_back(run(folder.file(zero), 2, keys + "--set dist.bucket_mb=0.02 --set dist.zero=" + zero));
  // Sums over the ranks are taken after the last micro-step with 0 and 1, after each with 2 and 3.
  for (const auto& [a, b] : {std::pair{0, 1}, {2, 3}})
    for (const auto& [folder_of, stem] : {std::pair{"", kWeightsStem},
                                          {"/checkpoints/step_10", kWeightsStem},
                                          {"/checkpoints/step_10", kMomentsStem}}) {
      INFO(folder_of << "/" << stem << ", dist.zero " << a << " and " << b);
      const auto bytes = [&](int i) {
        return tensor_bytes(tensors_path(runs.at(static_cast<size_t>(i)) + folder_of, stem));
      };
      CHECK(bytes(a) == bytes(b));
    }
}
