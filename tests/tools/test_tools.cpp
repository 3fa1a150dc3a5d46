// The verbs on the command line: their output, refusals, and failures that must not end with exit code 0 (a closed
// pipe, a full disk, weights that are not finite).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <numbers>
#include <regex>
#include <span>
#include <sstream>

#include "io/data/shards.h"
#include "io/json_config.h"
#include "io/safetensors.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kOnCpu = " --device cpu --dtype f64 ";

void check_run(const std::string& args, int exit_code, const std::vector<std::string>& words,
               const std::string& with = "") {
  const Outcome outcome = run_program(args, with);
  INFO(with << " triad " << args << "\nexit code " << outcome.exit_code << "\n" << outcome.output);
  CHECK(outcome.exit_code == exit_code);
  for (const std::string& text : words) CHECK(outcome.output.find(text) != std::string::npos);
}

std::string init(const TemporaryFolder& folder, const std::string& name, const std::string& more = "") {
  REQUIRE(run_program("init " + kTiny + " --out " + folder.file(name) + more).exit_code == 0);
  return folder.file(name);
}

Json evaluated(const std::string& checkpoint, const std::string& data, const std::string& environment = "") {
  const Outcome outcome =
      run_program("eval --json --checkpoint " + checkpoint + kOnCpu + "--data '" + data + "'", environment);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  return parse_json(outcome.standard_output, "the output of eval");
}

// Copies an init folder and sets a last-norm weight to NaN; the checksums are right. Returns the new folder.
std::string with_nan(const std::string& init, const std::string& folder) {
  fs::copy(init, folder);
  const SafetensorsFile good(init + "/model.safetensors");
  std::vector<TensorSpec> specs;
  for (const TensorEntry& e : good.entries()) {
    Shape shape;
    for (const int64_t axis : e.shape) shape.dim[static_cast<size_t>(shape.rank++)] = axis;
    specs.push_back({e.name, DType::f32, shape});
  }
  SafetensorsWriter bad(folder + "/model.safetensors", specs);
  for (const TensorEntry& e : good.entries()) {
    std::vector<std::byte> bytes = good.read(e);
    const float nan = std::nanf("");
    if (e.name == "norm_f.weight") std::memcpy(bytes.data(), &nan, sizeof nan);
    bad.write(e.name, bytes);
  }
  bad.finish();
  return folder;
}

}  // namespace

TEST_CASE("tools: inspect shows a checkpoint's folder", "[tools]") {
  const TemporaryFolder folder;
  const std::string fresh = init(folder, "init");
  check_run("inspect " + fresh, 0, {"format: \"triad checkpoint\"", "step: 0", "norm_f.weight"});
  write_text(fresh + "/state.json", std::string(300'000, '['));
  check_run("inspect " + fresh, 1, {"state.json", "64 deep"});
  check_run("generate --prompt x --checkpoint " + fresh + kOnCpu, 1, {"state.json", "64 deep"});
}

TEST_CASE("tools: bits per byte counts bytes", "[tools]") {
  const TemporaryFolder folder;
  const std::string bytes = init(folder, "bytes"), words = init(folder, "words", " --set model.vocab_size=300");
  write_text(folder.file("a.txt"), "the first text");
  write_text(folder.file("b.txt"), "the second");
  ShardWriter shard(folder.file("s.bin"), TokenWidth::u16);
  shard.append(std::vector<int32_t>{7, 7, 7, 0, 7});
  shard.finish();
  // In a text the first token (end of text) is no target, and the end-of-text token between two texts has no bytes.
  const auto is_over = [](const Json& r, double text_bytes) {
    const double bits = r["loss"].get<double>() * r["positions"].get<double>() / std::numbers::ln2;
    return std::abs(r["bits_per_byte"].get<double>() * text_bytes - bits) < 1e-9;
  };
  const Json one = evaluated(bytes, folder.file("a.txt")), both = evaluated(words, folder.file("?.txt"));
  CHECK(one["positions"] == 14);
  CHECK(is_over(one, 14));
  CHECK(both["positions"] == 25);
  CHECK(is_over(both, 24));
  // A shard holds no text. Its tokens count as bytes if the vocabulary has 256 tokens; else there are no bits per byte.
  const Json in_bytes = evaluated(bytes, folder.file("s.bin"));
  CHECK(is_over(in_bytes, 3));
  CHECK(evaluated(words, folder.file("s.bin"))["bits_per_byte"].is_null());
}

TEST_CASE("tools: weights that are not finite give an error, not a result", "[tools]") {
  const TemporaryFolder folder;
  const std::string bad = with_nan(init(folder, "init"), folder.file("bad"));
  write_text(folder.file("a.txt"), "some text");
  check_run("eval --checkpoint " + bad + kOnCpu + "--data " + folder.file("a.txt"), 1, {bad, "nan"});
  check_run("generate --prompt x --checkpoint " + bad + kOnCpu, 1, {bad, "nan"});
}

TEST_CASE("tools: help VERB is VERB --help", "[tools]") {
  for (const std::string verb : {"", "eval", "bench attention"}) {
    INFO(verb);
    const Outcome help = run_program("help " + verb), option = run_program(verb + " --help");
    CHECK(help.exit_code == 0);
    CHECK(help.output == option.output);
    CHECK(help.output.find("Usage:") != std::string::npos);
  }
  check_run("help trian", 2, {"unknown verb \"trian\"", "\"train\"?"});
}

TEST_CASE("tools: output that cannot be written is a failure, except that of a training run", "[tools]") {
  const TemporaryFolder folder;
  const std::string fresh = init(folder, "init"), run = folder.file("run");
  check_run("inspect " + fresh + " >/dev/full", 1, {});
  check_run("--help >/dev/full", 1, {});
  check_run("generate --prompt x --checkpoint " + fresh + kOnCpu + ">/dev/full", 1, {});
  const std::string train = "train " + kTiny + " --set runtime.device=cpu --set train.steps=3 --set log.out_dir=" + run;
  check_run(train + " | head -1", 0, {"model "});
  CHECK(fs::exists(run + "/metrics.json"));
}

TEST_CASE("tools: a pipe without a reader ends a verb silently, and does not end a training run", "[tools][build]") {
  const TemporaryFolder folder;
  const std::string fresh = init(folder, "init"), gone = folder.file("gone"), code = folder.file("code");
  write_text(folder.file("a.txt"), "some text");
  // Runs a verb whose output goes to a pipe that the reader has closed already; returns the exit code.
  const auto exit_code_with_closed_pipe = [&](const std::string& args) {
    fs::remove(gone);
    const Outcome outcome =
        triad::test::run_command("(until [ -e " + gone + " ]; do sleep 0.01; done; " + TRIAD_PROGRAM " " + args +
                                 "; echo $? > " + code + ") | (exec <&-; : > " + gone + ")");
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.output.empty());
    return triad::test::read_text(code);
  };
  const std::string out = folder.file("run"), config = kTiny + " --set runtime.device=cpu --set train.steps=3 ";
  CHECK(exit_code_with_closed_pipe("train " + config + "--set log.out_dir=" + out) ==
        "0\n");  // a run writes its results to files
  CHECK(fs::exists(out + "/metrics.json"));
  for (const std::string& args : {"inspect " + fresh, "plan " + config, "report " + out, std::string("bench --list"),
                                  "generate --prompt x --tokens 2 --checkpoint " + fresh + kOnCpu,
                                  "eval --checkpoint " + fresh + kOnCpu + "--data " + folder.file("a.txt")})
    CHECK(exit_code_with_closed_pipe(args) == "141\n");
}

TEST_CASE("tools: one of a thing is not named by a plural", "[tools][build]") {
  const TemporaryFolder folder;
  const std::string text = folder.file("a.txt"), run = folder.file("run"), shards = folder.file("shards");
  write_text(text, std::string(200, 'a'));
  const std::string small =
      kTiny + " --set model.n_layers=1 --set model.n_heads=1 --set model.n_kv_groups=1 --set runtime.device=cpu ";
  const std::string one_step = "--set train.steps=1 --set train.warmup_steps=0 ",
                    text_args = small + "--set data.kind=text --set 'data.paths=[\"" + text +
                                "\"]' --set log.out_dir=" + run + " --set train.save_every=1 --set train.seq_len=100 ";
  const std::string needle_args = small + one_step + "--set data.kind=needle --set data.needle_value_tokens=1 " +
                                  "--set log.out_dir=" + run + "2 --set 'train.stages=[{\"steps\":1,\"seq_len\":24}]' ";
  const std::string two_stages =
      "--set train.steps=null --set train.warmup_steps=0 --set 'train.stages=[{\"steps\":1},{\"steps\":2}]'";
  const std::regex wrong("(^|[ (\n])1 (?!loss)[a-z]{2,}s\\b");
  for (const auto& [args, expected] : std::vector<std::pair<std::string, std::string>>{
           {"train " + text_args + one_step, "done: 1 step,"},
           {"train " + needle_args + "--set train.seq_len=24 --set data.needle_pairs=1",
            "stage 1 of 1: step 1 of 2 x 24"},
           {"train " + needle_args + "--set train.seq_len=24 --overwrite",
            "a key and 1 value token, and 1 question for each"},
           {"plan " + text_args + one_step, "1 layer with NSA"},
           {"plan " + small + two_stages, "stage 1 of 2: step 1 of 2 x 48 tokens"},
           {"eval --device cpu --checkpoint " + run + " --data " + text + " --seq 300 --against " + run,
            "1 document: "},
           {"data --input " + text + " --tokenizer byte --val-fraction 0 --out " + shards, "1 document of 1 file; "},
           {"inspect " + shards, "1 document, 201 tokens, 1 shard"},
           {"export " + run + " --out " + folder.file("hf"), "in 1 file"}}) {
    const Outcome outcome = run_program(args);
    INFO(args << "\n" << outcome.output);
    CHECK(outcome.output.find(expected) != std::string::npos);
    CHECK_FALSE(std::regex_search(outcome.output, wrong));
  }
}

TEST_CASE("tools: control characters of names in a file are escaped on the terminal", "[tools]") {
  const TemporaryFolder folder;
  const std::string fresh = init(folder, "init"), path = fresh + "/model.safetensors";
  const std::string evil = "a\x1b]0;title\x07\x1b[2J\nb\u202e\xc2\x9b";
  SafetensorsWriter weights(path, {{evil, DType::f32, Shape{1}}});
  weights.write(evil, std::vector<std::byte>(4));
  weights.finish();
  const std::string shown = "a\\x1b]0;title\\x07\\x1b[2J\\x0ab\\xe2\\x80\\xae\\xc2\\x9b";
  Json state = parse_json(triad::test::read_text(fresh + "/state.json"), "state.json");
  state["\x1b[31mred\x7f"] = "\x1b[31m\xc2\x9b";
  write_text(fresh + "/state.json", state.dump());
  for (const std::string& args :
       {"inspect " + path, "inspect " + fresh, "generate --prompt x --checkpoint " + fresh + kOnCpu,
        "generate --prompt x --checkpoint '" + folder.file(evil) + "'"}) {
    const Outcome outcome = run_program(args);
    INFO(args << "\n" << outcome.output);
    CHECK(triad::test::has(outcome.output, shown) == (args.find(evil) == std::string::npos));
    CHECK(outcome.output.find_first_of("\x1b\x07\x7f") == std::string::npos);
    CHECK_FALSE(triad::test::has(outcome.output, "\u202e"));
    CHECK_FALSE(triad::test::has(outcome.output, "\xc2\x9b"));
  }
}

TEST_CASE("tools: fp32 and f32 are the same dtype, and so are bf16 and bfloat16", "[tools][build]") {
  const TemporaryFolder folder;
  const std::string fresh = init(folder, "init");
  write_text(folder.file("a.txt"), "some text, and more of it");
  const std::string eval =
      "eval --json --device cpu --checkpoint " + fresh + " --data " + folder.file("a.txt") + " --dtype ";
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"f32", "fp32", "float32"}, {"bf16", "bfloat16"}, {"f64", "fp64", "float64"}}) {
    const Outcome first = run_program(eval + words[0]);
    REQUIRE(first.exit_code == 0);
    for (const std::string& word : words) {
      const Json loss = parse_json(run_program(eval + word).standard_output, "the output of eval")["loss"];
      CHECK(loss == parse_json(first.standard_output, "the output of eval")["loss"]);
    }
  }
  check_run(eval + "f8", 2, {"f8", "fp32", "bf16"});
  const std::string plan = "plan " + kTiny + " --set runtime.precision=";
  for (const char* word : {"fp32", "f32", "float32"})
    CHECK(run_program(plan + word).standard_output == run_program(plan + "fp32").standard_output);
  check_run(plan + "bfloat16", 0, {});
  check_run(
      "init " + kTiny + " --out " + folder.file("other") + " --set runtime.precision=f32 --set dist.grad_dtype=f32", 0,
      {});
  const Json config = parse_json(triad::test::read_text(folder.file("other/state.json")), "state.json")["config"];
  CHECK(config["runtime"]["precision"] == "fp32");
  CHECK(config["dist"]["grad_dtype"] == "fp32");
  for (const char* word : {"f32", "fp32", "float32"})
    check_run("bench cast --list --dtype " + std::string(word), 0, {});
  check_run("bench cast --list --dtype f64", 2, {"f64"});
}

TEST_CASE("tools: init replaces fresh weights, never trained ones", "[tools]") {
  const TemporaryFolder folder;
  const std::string fresh = init(folder, "init"), run = folder.file("run"), into = "init " + kTiny + " --out ";
  check_run(into + fresh, 0, {});
  REQUIRE(run_program("train " + kTiny + " --set runtime.device=cpu --set train.steps=2 --set train.save_every=1" +
                      " --set log.out_dir=" + run)
              .exit_code == 0);
  check_run(into + run, 1, {run, "env.json"});
  check_run(into + run + "/checkpoints/step_1", 1, {"step_1", "optimizer.safetensors"});
  fs::remove(run + "/checkpoints/step_1/optimizer.safetensors");
  check_run(into + run + "/checkpoints/step_1", 1, {"model.safetensors, state.json", "fresh weights would replace it"});
  // What a killed init leaves, weights without state.json, may be repeated: by the same weights alone.
  const std::string weights = triad::test::read_text(fresh + "/model.safetensors"),
                    state = triad::test::read_text(fresh + "/state.json");
  fs::remove(fresh + "/state.json");
  check_run(into + fresh + " --set train.seed=77", 1, {fresh, "(model.safetensors)"});
  CHECK(triad::test::count_files(fresh) == 1);
  CHECK(triad::test::read_text(fresh + "/model.safetensors") == weights);
  check_run(into + fresh, 0, {});
  CHECK(triad::test::read_text(fresh + "/model.safetensors") == weights);
  CHECK(triad::test::read_text(fresh + "/state.json") == state);
  // Others' weights: in place of the fresh ones, and in folders of other programs.
  fs::copy_file(run + "/model.safetensors", fresh + "/model.safetensors", fs::copy_options::overwrite_existing);
  check_run(into + fresh, 1, {fresh, "(model.safetensors)"});
  for (const char* name : {"model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
                           "adapter_model.safetensors", "pytorch_model.bin", "state.json", "tokenizer.json"}) {
    const std::string other = folder.file(std::string("of_") + name);
    fs::create_directory(other);
    write_text(other + "/" + name, "{}");
    check_run(into + other, 1, {other, name});
    CHECK(triad::test::count_files(other) == 1);
    CHECK(triad::test::read_text(other + "/" + name) == "{}");
  }
  fs::create_directory(folder.file("hf"));
  write_text(folder.file("hf/config.json"), R"({"model_type": "llama"})");
  check_run(into + folder.file("hf"), 1, {"(config.json)"});
}

TEST_CASE("tools: every verb that runs a model reads the environment", "[tools]") {
  const TemporaryFolder folder;
  const std::string fresh = init(folder, "init"), text = folder.file("a.txt");
  write_text(text, "a text that is longer than one window of sixteen tokens");
  for (const std::string& verb : {"eval --data " + text, std::string("generate --prompt x"),
                                  "grads --batch 1 --seq 1 --tokens x --out " + folder.file("g.safetensors")})
    for (const char* variable : {"NSA_BOGUS=1", "NSA_FORCE_UNIFORM_GATE=2"})
      check_run(verb + kOnCpu + "--checkpoint " + fresh, 2, {"NSA_"}, variable);
  check_run("init " + kTiny + " --out " + folder.file("new"), 2, {"NSA_BOGUS"}, "NSA_BOGUS=1");
  CHECK(evaluated(fresh, text)["loss"] != evaluated(fresh, text, "NSA_FORCE_BRANCH=win")["loss"]);
}

namespace {

void write_u32_shard(const std::string& path, const std::vector<uint32_t>& tokens) {
  std::vector<uint32_t> words(256, 0);
  words[0] = 20240801, words[1] = 7, words[2] = static_cast<uint32_t>(tokens.size());
  words.insert(words.end(), tokens.begin(), tokens.end());
  write_text(path, {reinterpret_cast<const char*>(words.data()), 4 * words.size()});
}

std::vector<double> doubles(const SafetensorsFile& file, const std::string& name) {
  for (const TensorEntry& e : file.entries()) {
    if (e.name != name) continue;
    std::vector<double> values(static_cast<size_t>(e.bytes()) / sizeof(double));
    file.read(e, std::as_writable_bytes(std::span(values)));
    return values;
  }
  return {};
}

}  // namespace

TEST_CASE("tools: grads accepts -1 for no target, and refuses other ids outside of the vocabulary", "[tools]") {
  const TemporaryFolder folder;
  const std::string tokens = folder.file("tokens.bin"), out = folder.file("g.safetensors"),
                    grads = "grads --checkpoint " + init(folder, "init") + kOnCpu + "--tokens " + tokens + " --out " +
                            out + " --batch 1 --seq ";
  const auto with = [&](size_t at, uint32_t id) {
    std::vector<uint32_t> ids = {5, 200, 7, 7, 90, 31, 8, 64, 3};
    ids[at] = id;
    write_u32_shard(tokens, ids);
  };
  for (const uint32_t id : {256u, 0x7fffffffu, 0x80000000u, 3000000000u, 0xfffffffeu, 0xffffffffu})
    for (const size_t at : {0, 3, 8}) {
      with(at, id);
      if (at == 8 && id == 0xffffffffu) continue;
      check_run(grads + "8", 1,
                {tokens, "token " + std::to_string(id) + " at position " + std::to_string(at) + " of row 0",
                 "expected 0..255"});
      CHECK_FALSE(fs::exists(out));
    }
  // A position without a target does not count: loss and gradients equal those over the positions before it.
  with(8, 0xffffffffu);
  check_run(grads + "8", 0, {});
  const SafetensorsFile none(out);
  const std::vector<double> loss = doubles(none, "loss"), head = doubles(none, "grad/lm_head.weight");
  check_run(grads + "7", 0, {});
  const SafetensorsFile shorter(out);
  REQUIRE(loss.size() == 1);
  CHECK(loss[0] == Approx(doubles(shorter, "loss").at(0)).epsilon(1e-12));
  const std::vector<double> expected = doubles(shorter, "grad/lm_head.weight");
  REQUIRE(head.size() == expected.size());
  double apart = 0, largest = 0;
  for (size_t i = 0; i < head.size(); ++i) {
    apart = std::max(apart, std::abs(head[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  CHECK(apart <= 1e-12 * largest);
  with(1, 0xffffffffu);
  check_run(grads + "1", 1, {"no position of the 1 rows has a target"});
}

TEST_CASE("tools: options outside of their bounds are refused", "[tools]") {
  struct Refused {
    const char *verb, *option, *value;
  };
  const Refused refused[] = {{"eval", "--batch", "0"},
                             {"eval", "--batch", "1e300"},
                             {"eval", "--batch", "2000000"},
                             {"eval", "--seq", "-1"},
                             {"eval", "--seq", "4294967296"},
                             {"eval", "--seq", "1.5"},
                             {"grads", "--batch", "0"},
                             {"grads", "--seq", "99999999999"},
                             {"generate", "--tokens", "-1"},
                             {"generate", "--context", "1e300"},
                             {"generate", "--top-p", "nan"},
                             {"generate", "--top-p", "1.1"},
                             {"generate", "--top-k", "-3"},
                             {"generate", "--seed", "-1"},
                             {"generate", "--temperature", "nan"},
                             {"generate", "--temperature", "inf"},
                             {"generate", "--temperature", "1e999"},
                             {"data", "--seed", "-1"},
                             {"data", "--val-fraction", "nan"},
                             {"data", "--shard-tokens", "1e10"}};
  for (const Refused& r : refused) {
    const Outcome outcome = run_program(std::string(r.verb) + " " + r.option + " " + r.value);
    INFO(r.verb << " " << r.option << " " << r.value << "\n" << outcome.output);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.output.find(r.option) != std::string::npos);
    CHECK(outcome.output.find(r.value) != std::string::npos);
    CHECK(outcome.output.size() < 200);
  }
  check_run("train " + kTiny + " --resume ''", 2, {"--resume"});
}

TEST_CASE("tools: inspect begins with what a run and a checkpoint are", "[tools]") {
  const TemporaryFolder folder;
  const std::string run = folder.file("run");
  REQUIRE(run_program("train " + kTiny +
                      " --set runtime.device=cpu --set train.steps=4 --set train.eval_every=2 "
                      "--set train.save_every=2 --set log.out_dir=" +
                      run)
              .exit_code == 0);
  for (const auto& [path, step] : {std::pair{run, "4"}, {run + "/checkpoints/step_2", "2"}}) {
    const Outcome outcome = run_program("inspect " + path);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 0);
    std::istringstream in(outcome.standard_output);
    std::vector<std::string> head(6);
    for (std::string& line : head) std::getline(in, line);
    CHECK(head[1].starts_with(fmt::format("  step {} of 4, loss ", step)));
    CHECK(has(head[1], fmt::format("(step {}), validation loss ", step)));
    CHECK(head[1].ends_with(fmt::format("(step {})", step)));
    CHECK(has(head[2], "2 layers with NSA of width 32"));
    CHECK(head[3] == "  data: synthetic");
    CHECK(has(head[4], "2 x 48 tokens, adamw 0.001, fp32"));
    CHECK(head[5] == "  run: " + run);
  }
  // A config of another version.
  const std::string state = run + "/checkpoints/step_2/state.json";
  Json other = read_json_file(state);
  other["config"]["model"].erase("dim");
  write_text(state, other.dump());
  CHECK(run_program("inspect " + run + "/checkpoints/step_2").exit_code == 0);
}
