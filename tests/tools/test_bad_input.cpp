// Every kind of bad input: the program ends with exit code 2 (usage) or 1 (failure), prints a message that names the
// cause, and writes no incomplete file.
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "engine/with_cuda.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad::test;
namespace fs = std::filesystem;

namespace {

// A command that must be refused: its arguments, its exit code, and words in its message.
struct Refusal {
  const char* name;
  std::string args;
  int exit_code;
  std::vector<std::string> words;
  std::string environment;
};

void check_refusal(const Refusal& r) {
  const Outcome outcome = run_program(r.args, r.environment);
  INFO(r.name << ": triad " << r.args << "\nexit code " << outcome.exit_code << "\n" << outcome.output);
  CHECK(outcome.exit_code == r.exit_code);
  for (const std::string& text : r.words) CHECK(outcome.output.find(text) != std::string::npos);
}

std::string shard_bytes(int32_t magic, int32_t version, int32_t count, const std::vector<uint16_t>& tokens) {
  std::vector<int32_t> header(256, 0);
  header[0] = magic, header[1] = version, header[2] = count;
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 2);
  return bytes;
}

}  // namespace

TEST_CASE("bad input: a GPU is requested, but no NVIDIA driver is loaded", "[bad-input]") {
  if (fs::exists("/proc/driver/nvidia/version")) return void(skip("a driver is loaded"));
  const TemporaryFolder folder;
  check_refusal({"no driver",
                 "train " + kTiny + " --set runtime.device=cuda --set log.out_dir=" + folder.file("run"),
                 1,
                 {triad::backend::built_with_cuda() ? "no NVIDIA driver is loaded" : "this build has no CUDA"},
                 ""});
}

TEST_CASE("bad input: a build without CUDA plans no GPU's memory", "[bad-input]") {
  const std::string plan = "plan " + kTiny + " --json --set runtime.device=";
  for (const char* device : {"cpu", "auto"}) {
    const Outcome outcome = run_program(plan + device);
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    const bool on_gpu = triad::backend::built_with_cuda() && device == std::string("auto");
    CHECK(has(outcome.output, on_gpu ? "\"device\": \"cuda" : "\"device\": \"cpu"));
  }
  if (triad::backend::built_with_cuda())
    return check_refusal({"a plan for a GPU", plan + "cuda", 0, {"\"device\": \"cuda"}, ""});
  check_refusal({"no plan for a GPU", plan + "cuda", 2, {"runtime.device is cuda", "this build has no CUDA"}, ""});
}

TEST_CASE("bad input: configs and options", "[bad-input]") {
  const TemporaryFolder folder;
  const std::string out = " --set log.out_dir=" + folder.file("run");
  auto config = [&](const std::string& name, const std::string& text) {
    write_text(folder.file(name), text);
    return folder.file(name);
  };
  auto set = [&](const std::string& assignment) { return "train " + kTiny + out + " --set '" + assignment + "'"; };
  const Refusal refusals[] = {
      {"missing config", "train " + folder.file("none.json"), 2, {"none.json"}, ""},
      {"empty config", "train " + config("empty.json", ""), 2, {"empty.json", "empty"}, ""},
      {"cut config", "train " + config("cut.json", "{\"model\": {\"dim\": 3"), 2, {"cut.json"}, ""},
      {"a folder for a config", "train " + folder.path(), 2, {folder.path(), "is a folder"}, ""},
      {"no object", "train " + config("list.json", "[1, 2]"), 2, {"list.json", "array"}, ""},
      {"a group twice",
       "train " + config("twice.json", "{\"model\": {\"dim\": 3}, \"model\": {}}"),
       2,
       {"twice.json", "model twice"},
       ""},
      {"no config at all", "train", 2, {"CONFIG"}, "env -u CONFIG"},
      {"unknown group",
       "train " + config("group.json", "{\"modle\": {}}"),
       2,
       {"unknown group modle", "\"model\"?"},
       ""},
      {"group is no object", "train " + config("flat.json", "{\"model\": 3}"), 2, {"model", "3"}, ""},
      {"required keys absent", "train " + config("bare.json", "{\"model\": {\"dim\": 8}}"), 2, {"model.n_layers"}, ""},
      {"unknown key", set("train.lrr=1"), 2, {"train.lrr", "did you mean \"train.lr\"?"}, ""},
      {"a key's prefix", set("train.micro_batch=1"), 2, {"did you mean \"train.micro_batch_size\"?"}, ""},
      {"a key of another group", set("train.every=1"), 2, {"did you mean \"log.every\"?"}, ""},
      {"another trainer's name", set("train.learning_rate=1"), 2, {"did you mean \"train.lr\"?"}, ""},
      {"another trainer's name in another group", set("train.hidden_size=64"), 2, {"did you mean \"model.dim\"?"}, ""},
      {"a key as an option",
       "train " + config("tiny.json", "{}") + " --max-steps 3",
       2,
       {"--max-steps; did you mean --set train.steps=VALUE?"},
       ""},
      {"a key within a key", set("runtime.kernels={\"wim\": \"auto\"}"), 2, {"\"runtime.kernels.win\"?"}, ""},
      {"unknown group by --set", set("trian.lr=1"), 2, {"trian"}, ""},
      {"--set without value", set("train.lr"), 2, {"train.lr"}, ""},
      {"broken JSON by --set",
       set("train.stages=[{\"steps\":4}"),
       2,
       {"train.stages is", "it is a string, because it is not valid JSON"},
       ""},
      {"an integer that is too large", set("train.steps=1e17"), 2, {"train.steps is 1e+17", "at most 2^53"}, ""},
      {"wrong type: string for integer", set("train.steps=many"), 2, {"train.steps", "many", "integer"}, ""},
      {"wrong type: fraction for integer", set("train.steps=1.5"), 2, {"train.steps", "1.5", "integer"}, ""},
      {"wrong type: number for bool", set("model.tie_embeddings=1"), 2, {"model.tie_embeddings", "true or false"}, ""},
      {"wrong type: bool for number", set("train.lr=true"), 2, {"train.lr", "true"}, ""},
      {"NaN", set("train.lr=NaN"), 2, {"train.lr", "NaN"}, ""},
      {"infinite", set("train.lr=1e999"), 2, {"train.lr"}, ""},
      {"out of range: negative", set("train.lr=-1"), 2, {"train.lr", "-1", "at least 0"}, ""},
      {"out of range: zero", set("train.seq_len=0"), 2, {"train.seq_len", "0"}, ""},
      {"out of range: fraction", set("train.min_lr_fraction=2"), 2, {"train.min_lr_fraction", "2"}, ""},
      {"unknown schedule", set("train.schedule=step"), 2, {"train.schedule", "step", "cosine|wsd|linear"}, ""},
      {"a decay of more than all steps", set("train.decay_fraction=1.5"), 2, {"train.decay_fraction", "1.5"}, ""},
      {"warmup and decay of more than all steps",
       set("train.schedule=wsd") + " --set train.decay_fraction=0.95",
       2,
       {"train.decay_fraction is 0.95", "19 steps", "train.warmup_steps 2", "train.steps 20"},
       ""},
      {"unknown optimizer", set("train.optimizer=sgd"), 2, {"train.optimizer", "sgd", "adamw|muon"}, ""},
      {"muon on the host",
       set("train.optimizer=muon") + " --set runtime.offload=optimizer",
       2,
       {"train.optimizer is muon", "runtime.offload none"},
       ""},
      {"runtime.deterministic false",
       set("runtime.deterministic=false"),
       2,
       {"runtime.deterministic is false", "always bitwise reproducible"},
       ""},
      {"0 in fp32: eps", set("train.eps=1e-50"), 2, {"train.eps is 1e-50", "fp32"}, ""},
      {"0 in fp32: norm_eps", set("model.norm_eps=1e-50"), 2, {"model.norm_eps is 1e-50", "fp32"}, ""},
      {"0 in fp32: init_std", set("model.init_std=1e-46"), 2, {"model.init_std is 1e-46", "fp32"}, ""},
      {"0 in fp32: clip", set("train.grad_clip=1e-60"), 2, {"train.grad_clip is 1e-60", "fp32"}, ""},
      {"infinite in fp32: lr", set("train.lr=1e300"), 2, {"train.lr is 1e+300", "fp32"}, ""},
      {"infinite in fp32: decay", set("train.weight_decay=1e39"), 2, {"train.weight_decay is 1e+39", "fp32"}, ""},
      {"infinite in fp32: temperature", set("nsa.gate_temperature=1e40"), 2, {"nsa.gate_temperature is 1e+40"}, ""},
      {"0 in fp32: temperature", set("nsa.gate_temperature=1e-39"), 2, {"nsa.gate_temperature is 1e-39"}, ""},
      {"unknown word", set("model.mlp=relu"), 2, {"model.mlp", "relu", "silu|swiglu"}, ""},
      {"Hq % Hkv", set("model.n_kv_groups=3"), 2, {"model.n_kv_groups", "3", "4"}, ""},
      {"odd d_k", set("model.d_k=7"), 2, {"model.d_k", "7"}, ""},
      {"l % d", set("nsa.d=3"), 2, {"nsa.d", "3"}, ""},
      {"l_sel % d", set("nsa.l_sel=6"), 2, {"nsa.d", "nsa.l_sel", "6"}, ""},
      {"n_sel too small", set("nsa.n_sel=2"), 2, {"nsa.n_sel", "2"}, ""},
      {"local_blocks 0", set("nsa.local_blocks=0"), 2, {"nsa.local_blocks", "0"}, ""},
      {"w 0", set("nsa.w=0"), 2, {"nsa.w", "0"}, ""},
      {"vocabulary below the tokenizer's",
       set("data.kind=text") + " --set model.vocab_size=100 --set data.paths=x",
       2,
       {"model.vocab_size", "100", "256"},
       ""},
      {"unknown tokenizer", set("data.tokenizer=gpt5"), 2, {"data.tokenizer", "gpt5"}, ""},
      {"text without paths", set("data.kind=text"), 2, {"data.paths"}, ""},
      {"unknown scope of documents",
       set("data.documents=within"),
       2,
       {"data.documents", "within", "attend_within|attend_across"},
       ""},
      {"documents of synthetic tokens",
       set("data.documents=attend_within"),
       2,
       {"data.documents is attend_within", "kind synthetic", "data.documents=attend_across"},
       ""},
      {"unknown packing", set("data.packing=first_fit"), 2, {"data.packing", "first_fit", "stream|best_fit"}, ""},
      {"packing of synthetic tokens",
       set("data.packing=best_fit"),
       2,
       {"data.packing is best_fit", "kind synthetic", "data.packing=stream"},
       ""},
      {"negative number of documents", set("data.max_documents=-2"), 2, {"data.max_documents", "-2"}, ""},
      {"a fraction of documents", set("data.max_documents=2.5"), 2, {"data.max_documents", "2.5", "integer"}, ""},
      {"a number for a switch", set("log.stats=3"), 2, {"log.stats", "3"}, ""},
      {"unsafe long run", set("train.steps=5000"), 2, {"train.save_every", "5000", "allow_unsafe"}, ""},
      {"no master weights in fp32",
       set("train.master_dtype=none"),
       2,
       {"train.master_dtype is none", "runtime.precision bf16"},
       ""},
      {"split master weights in fp32",
       set("train.master_dtype=split"),
       2,
       {"train.master_dtype is split", "runtime.precision bf16"},
       ""},
      {"bf16 gradients in fp32",
       set("train.grads_dtype=bf16"),
       2,
       {"train.grads_dtype is bf16", "runtime.precision bf16"},
       ""},
      {"unknown NSA_ variable",
       set("train.lr=1e-3"),
       2,
       {"NSA_SEQLEN", "did you mean \"NSA_SEQ_LEN\"?"},
       "NSA_SEQLEN=5"},
      {"a word for a flag", set("train.lr=1e-3"), 2, {"NSA_DISABLE_AUX_STATS", "yes"}, "NSA_DISABLE_AUX_STATS=yes"},
      {"bad value in a variable", set("train.lr=1e-3"), 2, {"train.seq_len", "long"}, "NSA_SEQ_LEN=long"},
      {"unknown option", "train " + kTiny + " --fast", 2, {"--fast"}, ""},
      {"an option's typo", "train " + kTiny + " --overwite", 2, {"did you mean \"--overwrite\"?"}, ""},
      {"a required option's typo", "eval --chekpoint=x", 2, {"did you mean \"--checkpoint\"?"}, ""},
      {"unknown verb", "trian", 2, {"trian", "did you mean \"train\"?"}, ""},
      {"no verb", "", 2, {"subcommand"}, ""},
      {"--resume latest without a config", "train --resume latest", 2, {"--resume RUN"}, "env -u CONFIG"},
      {"init without --out", "init " + kTiny, 2, {"--out"}, ""},
      {"unknown dtype",
       "grads --checkpoint x --tokens x --batch 1 --seq 1 --out x --device cpu --dtype f16",
       2,
       {"f16"},
       ""},
      {"unknown device", "grads --checkpoint x --tokens x --batch 1 --seq 1 --out x --device tpu", 2, {"tpu"}, ""},
  };
  for (const Refusal& r : refusals) check_refusal(r);
  CHECK(!fs::exists(folder.file("run")));
}

TEST_CASE("bad input: data", "[bad-input]") {
  const TemporaryFolder folder;
  const std::string out = " --set log.out_dir=" + folder.file("run");
  auto data = [&](const std::string& kind, const std::string& path, const std::string& more = "") {
    return "train " + kTiny + out + " --set data.kind=" + kind + " --set 'data.paths=[\"" + path + "\"]' " + more;
  };
  const std::vector<uint16_t> tokens(2000, 7);
  write_text(folder.file("good.bin"), shard_bytes(20240520, 1, 2000, tokens));
  write_text(folder.file("short.bin"), shard_bytes(20240520, 1, 3000, tokens));
  write_text(folder.file("long.bin"), shard_bytes(20240520, 1, 1000, tokens));
  write_text(folder.file("foreign.bin"), std::string(5000, 'x'));
  write_text(folder.file("version.bin"), shard_bytes(20240520, 9, 2000, tokens));
  write_text(folder.file("header.bin"), std::string("abc"));
  std::vector<uint16_t> large = tokens;
  large[1234] = 300;
  write_text(folder.file("large.bin"), shard_bytes(20240520, 1, 2000, large));
  std::string masked("BIN.TOK\n\2\0\0\0\4\0\0\0\x10\0\0\0\0\1\0\0\1\0\0\0", 28);  // 16 tokens, 2 mask bytes
  masked.resize(1024 + 64, '\0');
  write_text(folder.file("masked.bin"), masked + "m");
  std::string lines;
  for (int i = 0; i < 40; ++i) lines += "{\"text\":\"ab\"}\n";
  write_text(folder.file("short.jsonl"), lines);
  write_text(folder.file("half.jsonl"), lines + "{\"prompt\":\"ab\"}\n");
  write_text(folder.file("tiny.txt"), "short");
  write_text(folder.file("empty.txt"), "");
  const Refusal refusals[] = {
      {"no file matches", data("text", folder.file("*.none")), 1, {"*.none"}, ""},
      {"missing shard", data("shards", folder.file("none.bin")), 1, {"none.bin"}, ""},
      {"truncated shard", data("shards", folder.file("short.bin")), 1, {"short.bin", "3000"}, ""},
      {"shard with a tail", data("shards", folder.file("long.bin")), 1, {"long.bin", "1000"}, ""},
      {"foreign shard", data("shards", folder.file("foreign.bin")), 1, {"foreign.bin"}, ""},
      {"shard of another version", data("shards", folder.file("version.bin")), 1, {"version.bin", "9"}, ""},
      {"shard without a header", data("shards", folder.file("header.bin")), 1, {"header.bin"}, ""},
      {"token >= V", data("shards", folder.file("large.bin")), 1, {"large.bin", "300", "255"}, ""},
      {"cut mask", data("shards", folder.file("masked.bin")), 1, {"masked.bin", "mask", "1088", "offset 1089"}, ""},
      {"half a record", data("text", folder.file("half.jsonl")), 1, {"half.jsonl: line 41", "`completion`"}, ""},
      {"documents of shards without a manifest",
       data("shards", folder.file("good.bin"), "--set data.documents=attend_within"),
       2,
       {"data.documents is attend_within", "good.bin", "manifest.json"},
       ""},
      {"packing of shards without a manifest",
       data("shards", folder.file("good.bin"), "--set data.packing=best_fit"),
       2,
       {"data.packing is best_fit", "good.bin", "data.packing=stream"},
       ""},
      {"too many documents in a row",
       data("text", folder.file("short.jsonl"), "--set data.max_documents=3"),
       2,
       {"row 0 (tokens 0 to 48) has 16 documents", "data.max_documents allows 3"},
       ""},
      {"shard given as text", data("text", folder.file("good.bin")), 1, {"good.bin"}, ""},
      {"too little text", data("text", folder.file("tiny.txt")), 1, {"49"}, ""},
      {"empty text", data("text", folder.file("empty.txt")), 1, {"text"}, ""},
      {"file in training and validation",
       data("shards", folder.file("good.bin"), "--set 'data.val_paths=[\"" + folder.file("good.bin") + "\"]'"),
       1,
       {"good.bin"},
       ""},
      {"no validation tokens",
       data("shards", folder.file("good.bin"), "--set data.val_fraction=0 --set train.eval_every=5"),
       1,
       {"data.val_fraction", "49"},
       ""},
  };
  for (const Refusal& r : refusals) check_refusal(r);
  CHECK(!fs::exists(folder.file("run")));
}

TEST_CASE("bad input: checkpoints and folders", "[bad-input]") {
  const TemporaryFolder folder;
  const std::string init = folder.file("init"), weights = init + "/model.safetensors";
  REQUIRE(run_program("init " + kTiny + " --out " + init).exit_code == 0);
  const std::string good = read_text(weights);
  auto variant = [&](const std::string& name, const std::string& bytes) {
    fs::copy(init, folder.file(name));
    write_text(folder.file(name) + "/model.safetensors", bytes);
    return "generate --device cpu --prompt x --tokens 1 --checkpoint " + folder.file(name);
  };
  auto replaced = [&](const std::string& from, const std::string& to) {
    std::string bytes = good;
    bytes.replace(bytes.find(from), from.size(), to);
    return bytes;
  };
  std::string flipped = good;
  flipped[flipped.size() - 5] ^= 1;
  write_text(folder.file("tokens.bin"), shard_bytes(20240520, 1, 40, std::vector<uint16_t>(40, 1)));
  const std::string run = folder.file("run");
  const std::string train = "train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + run;
  REQUIRE(run_program(train + " --set train.steps=4 --set train.save_every=2").exit_code == 0);
  write_text(folder.file("file"), "in the way");

  const std::string grads =
      "grads --device cpu --batch 1 --out " + folder.file("g.safetensors") + " --tokens " + folder.file("tokens.bin");
  const Refusal refusals[] = {
      {"no checkpoint there", "generate --device cpu --prompt x --checkpoint " + folder.file("none"), 1, {"none"}, ""},
      {"truncated weights", variant("cut", good.substr(0, good.size() / 2)), 1, {"cut/model.safetensors"}, ""},
      {"corrupt weights", variant("flipped", flipped), 1, {"flipped/model.safetensors", "CRC"}, ""},
      {"foreign weights",
       variant("foreign", "hello, world, this is no safetensors file"),
       1,
       {"foreign/model.safetensors"},
       ""},
      {"empty weights", variant("empty", ""), 1, {"empty/model.safetensors"}, ""},
      {"renamed tensor", variant("renamed", replaced("\"norm_f.weight\"", "\"norm_g.weight\"")), 1, {"norm_"}, ""},
      {"checkpoint of another model",
       train + " --resume latest --set model.dim=64 --set train.steps=8",
       1,
       {"model.dim", "32", "64"},
       ""},
      {"run folder in use", train, 1, {run, "--resume", "--overwrite"}, ""},
      {"nothing to resume",
       "train " + kTiny + " --resume latest --set log.out_dir=" + folder.file("new"),
       1,
       {"new"},
       ""},
      {"out_dir is a file",
       "train " + kTiny + " --set log.out_dir=" + folder.file("file"),
       1,
       {folder.file("file"), "folder"},
       ""},
      {"out_dir under a file",
       "train " + kTiny + " --set log.out_dir=" + folder.file("file/run"),
       1,
       {folder.file("file")},
       ""},
      {"init into a file", "init " + kTiny + " --out " + folder.file("file"), 1, {folder.file("file")}, ""},
      {"too few tokens", grads + " --seq 40 --checkpoint " + init, 1, {"tokens.bin", "40", "41"}, ""},
      {"inspect a text file", "inspect " + folder.file("file"), 0, {folder.file("file"), "text: 1 document"}, ""},
  };
  for (const Refusal& r : refusals) check_refusal(r);
  CHECK(read_text(folder.file("file")) == "in the way");
  CHECK(!fs::exists(folder.file("g.safetensors")));

  write_text(run + "/.HALT", "");
  check_refusal({"stale .HALT", train + " --resume latest --set train.steps=8", 1, {".HALT"}, ""});
  fs::remove(run + "/.HALT");
  // A folder with a truncated state.json is not accepted as a checkpoint; the message names the file.
  write_text(run + "/checkpoints/step_4/state.json", "{\"step\": ");
  check_refusal({"cut state.json",
                 train + " --resume " + run + "/checkpoints/step_4 --set train.steps=8",
                 1,
                 {"state.json"},
                 ""});
}

TEST_CASE("bad input: sizes that are valid individually, and whose product overflows", "[bad-input]") {
  const TemporaryFolder folder;
  const std::string tokens = kTiny + " --set train.micro_batch_size=1048576 --set train.seq_len=16777216 ",
                    parameters = kTiny + " --set model.dim=1048576 --set model.vocab_size=100000000 ",
                    steps = kTiny +
                            " --set train.micro_batch_size=127 --set train.seq_len=16777216 --set "
                            "train.accumulate_grad_batches=1048576 --ranks 1048576",
                    run = " --set runtime.device=cpu --set log.out_dir=" + folder.file("run");
  const std::vector<std::string> too_many = {"micro_batch_size is 1048576", "seq_len 16777216",
                                             "17592186044416 tokens"};
  check_refusal({"tokens, plan", "plan " + tokens, 2, too_many, ""});
  check_refusal({"tokens, train", "train " + tokens + run, 2, too_many, ""});
  check_refusal({"parameters, plan", "plan " + parameters, 2, {"model.dim is 1048576", "vocab_size 100000000"}, ""});
  check_refusal({"parameters, train", "train " + parameters + run, 2, {"model.dim is 1048576"}, ""});
  check_refusal(
      {"tokens of a step", "plan " + steps, 2, {"accumulate_grad_batches 1048576 on 1048576 ranks", "2^63"}, ""});
  CHECK(!fs::exists(folder.file("run")));
  triad::Arena arena = triad::Arena::planned(triad::Device::cpu());
  check_error([&] { arena.alloc(triad::MemTag::io, "vast", triad::DType::f32, {int64_t{1} << 61}); },
              {"vast f32[2305843009213693952]", "2^62 bytes"});
  triad::Scratch scratch(arena, 0);
  triad::Scratch::Scope scope(scratch);
  scope.alloc(triad::DType::u8, {int64_t{1} << 62});
  check_error([&] { scope.alloc(triad::DType::u8, {int64_t{1} << 62}); }, {"u8[4611686018427387904]"});
}

TEST_CASE("bad input: full disk and unwritable folder", "[bad-input]") {
  const TemporaryFolder folder;
  // A limit on file sizes simulates a full disk, which would otherwise need a mount.
  const Outcome limited = run_program("init " + kTiny + " --out " + folder.file("init"), "ulimit -f 8; ");
  INFO(limited.output);
  CHECK(limited.exit_code != 0);
  CHECK(limited.output.find("model.safetensors") != std::string::npos);
  CHECK(!fs::exists(folder.file("init/model.safetensors")));
  check_refusal({"unwritable folder", "init " + kTiny + " --out /proc/triad", 1, {"/proc/triad"}, ""});
}

TEST_CASE("bad input: a GPU is requested, but there is none", "[bad-input]") {
  check_refusal({"no GPU",
                 "train " + kTiny + " --set runtime.device=cuda --set log.out_dir=/tmp/triad-no-gpu",
                 1,
                 {"runtime.device", "cuda"},
                 "CUDA_VISIBLE_DEVICES=''"});
}
