// What evaluations record beside the loss: continuations of prompts (log.samples) and bits per byte.
#include <cmath>
#include <filesystem>
#include <numbers>
#include <span>
#include <vector>

#include "io/json_config.h"
#include "io/jsonl.h"
#include "io/tokenizer/tokenizer.h"
#include "tests/support/dist_run.h"
#include "tests/support/heartbeats.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

std::string text(int sentences) {
  std::string all;
  for (int i = 0; i < sentences; ++i) all += fmt::format("Line {} says \u4e2d\u6587 twice.\n", i * 7919 % 1009);
  return all;
}

std::vector<Json> samples(const std::string& out) {
  std::vector<Json> all;
  for (const std::string& line : lines(out + "/samples.jsonl")) all.push_back(parse_json(line, line));
  return all;
}

}  // namespace

TEST_CASE("samples: what `triad generate` writes from the same checkpoint, and no weight changes", "[train][samples]") {
  const TemporaryFolder folder;
  write_text(folder.file("a.txt"), text(500));
  const std::string keys = "--set data.kind=text --set 'data.paths=[\"" + folder.file("a.txt") +
                           "\"]' --set train.eval_every=10 --set train.save_every=10 --set train.keep_last=9 ";
  const std::string prompts = "--set 'log.samples=[\"Line 1\",\"<b>\\n\",\"\"]' --set log.sample_tokens=12 ";
  const std::vector<std::string> asked = {"Line 1", "<b>\n", ""};
  for (const std::string model : {"", "--set model.attention=dense --set runtime.precision=bf16 "}) {
    INFO(model);
    const std::string out = folder.file("with"), without = folder.file("without");
    const Outcome outcome = run_program(train_on(out, "cpu", keys + prompts + model + "--overwrite"));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    REQUIRE(run_program(train_on(without, "cpu", keys + model + "--overwrite")).exit_code == 0);
    CHECK(read_text(out + "/model.safetensors") == read_text(without + "/model.safetensors"));
    CHECK(read_text(out + "/val.csv") == read_text(without + "/val.csv"));
    CHECK_FALSE(fs::exists(without + "/samples.jsonl"));
    CHECK(has(outcome.output, "\nsample: Line 1"));
    CHECK(has(outcome.output, "\nsample: <b>\\x0a"));
    const std::vector<Json> all = samples(out);
    REQUIRE(all.size() == 6);
    for (size_t i = 0; i < 6; ++i) {
      INFO(i);
      const std::string step = i < 3 ? "10" : "20";
      CHECK(all[i]["step"] == std::stoi(step));
      CHECK(all[i]["prompt"] == asked[i % 3]);
      write_text(folder.file("prompt"), asked[i % 3] + "\n");
      const Outcome generated = run_program(
          "generate --device cpu --temperature 0 --tokens 12 --json --checkpoint " + out + "/checkpoints/step_" + step +
          " --dtype " + (model.empty() ? "f32" : "bf16") + " --prompt-file " + folder.file("prompt"));
      REQUIRE(generated.exit_code == 0);
      const Json same = parse_json(generated.standard_output, "generate");
      CHECK(all[i]["text"] == same["text"]);
      CHECK(all[i]["tokens"] == same["tokens"].size());
      CHECK(all[i]["stopped"] == same["stopped"]);
    }
    // A resume repeats the lines of later steps, and a new run begins the file anew.
    const std::string before = read_text(out + "/samples.jsonl");
    REQUIRE(run_program(
                train_on(out, "cpu", keys + prompts + model + "--overwrite --resume " + out + "/checkpoints/step_10"))
                .exit_code == 0);
    CHECK(read_text(out + "/samples.jsonl") == before);
  }
  REQUIRE(run_program(train_on(folder.file("with"), "cpu", keys + "--overwrite")).exit_code == 0);
  CHECK_FALSE(fs::exists(folder.file("with/samples.jsonl")));
}

TEST_CASE("samples: lines of later steps are cut, damaged ones stay", "[samples]") {
  const TemporaryFolder folder;
  const std::string path = folder.file("a.jsonl"), kept = "{\"step\":3}\nno JSON\n[7]\n{\"step\":\"9\"}\n";
  write_text(path, "{\"step\":3}\nno JSON\n{\"step\":4}\n[7]\n{\"step\":\"9\"}\n{\"step\":5}\n{\"st");
  cut_jsonl(path, 3);
  CHECK(read_text(path) == kept);
  cut_jsonl(folder.file("absent"), 3);
  CHECK_FALSE(fs::exists(folder.file("absent")));
}

TEST_CASE("samples: prompts that cannot be continued are refused before a file is written", "[samples]") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& more, const std::string& why) {
    const Outcome outcome = run_program(
        train_on(folder.file("run"), "cpu", "--set 'log.samples=[\"a prompt\"]' --set log.sample_tokens=8 " + more));
    INFO(outcome.output);
    CHECK(outcome.exit_code == 2);
    CHECK(has(outcome.output, why));
    CHECK_FALSE(fs::exists(folder.file("run/config.json")));
  };
  refused("--set train.eval_every=0",
          "log.samples has 1 prompt: they are continued at evaluations, and train.eval_every");
  const std::string evaluates = "--set train.eval_every=5 ";
  refused(evaluates + "--set dist.zero=3", "one rank needs all weights and whole sequences, and dist.zero is 3");
  refused(evaluates + "--set data.tokenizer=none", "log.samples: prompts need a tokenizer, and data.tokenizer is none");
  refused(evaluates + "--set log.sample_tokens=40", "\"a prompt\" has 9 tokens, and log.sample_tokens is 40: together");
  refused(evaluates + "--set model.vocab_size=64",
          "log.samples: token 97 of \"a prompt\" is outside of the vocabulary");
}

TEST_CASE("samples: several ranks write those of the first", "[samples][dist]") {
  if (!require_mpirun()) return;
  const TemporaryFolder folder;
  const std::string keys = "--set train.eval_every=10 --set log.sample_tokens=8 ",
                    prompts = "--set 'log.samples=[\"a\",\"bc\"]' ";
  const auto run = [&](const std::string& name, const std::string& more) {
    const Outcome outcome = run_ranks(2, train_on(folder.file(name), "cpu", keys + more));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
  };
  run("with", prompts + "--set dist.zero=2");
  run("without", "--set dist.zero=2");
  CHECK(read_text(folder.file("with/model.safetensors")) == read_text(folder.file("without/model.safetensors")));
  CHECK(samples(folder.file("with")).size() == 4);
}

TEST_CASE("bits per byte: a run's are those of `triad eval` on the same text and on its shards", "[train][eval]") {
  const TemporaryFolder folder;
  const auto ok = [&](const std::string& args) {
    const Outcome outcome = run_program(args);
    INFO(args << "\n" << outcome.output);
    REQUIRE(outcome.exit_code == 0);
    return outcome;
  };
  write_text(folder.file("a.txt"), text(900));
  ok("tokenizer train --vocab-size 300 --input " + folder.file("a.txt") + " --out " + folder.file("bpe"));
  // 20 rows of 48 tokens predict the whole validation data but for its first token: two documents and the end-of-text
  // token between them, which has no bytes.
  const std::unique_ptr<Tokenizer> bpe = make_tokenizer(folder.file("bpe"));
  std::string ascii;
  for (int i = 0; i < 300; ++i) ascii += fmt::format("Line {} says it twice.\n", i * 7919 % 1009);
  const std::vector<int32_t> tokens = bpe->encode(ascii);
  const auto document = [&](size_t n) {
    std::string cut;
    for (size_t begin = 0; cut.empty() || bpe->encode(cut).size() != n; ++begin)
      cut = bpe->decode(std::span(tokens).subspan(begin, n));
    return cut;
  };
  const std::string first = document(480), second = document(479);
  const auto bytes = static_cast<double>(first.size() + second.size());
  write_text(folder.file("val.jsonl"), Json({{"text", first}}).dump() + "\n" + Json({{"text", second}}).dump() + "\n");
  for (const std::string& tokenizer : {folder.file("bpe"), std::string("byte")}) {
    INFO(tokenizer);
    const std::string out = folder.file("run");
    const std::string name = tokenizer == "byte" ? "_byte" : "_bpe";
    for (const std::string& file : {std::string("a.txt"), std::string("val.jsonl")})
      ok(fmt::format("data --tokenizer {} --val-fraction 0 --input {} --out {}{}", tokenizer, folder.file(file),
                     folder.file(file), name));
    std::vector<double> bits;
    for (const bool shards : {false, true}) {
      INFO(shards);
      const auto files = [&](const std::string& split) {
        return "=[\"" + folder.file(shards ? split + name + "/train_*.bin" : split) + "\"]'";
      };
      ok(train_on(out, "cpu",
                  "--overwrite --set model.vocab_size=300 --set train.steps=4 --set train.eval_every=4 --set "
                  "train.eval_batches=500 --set data.kind=" +
                      std::string(shards ? "shards" : "text") + " --set data.tokenizer=" + tokenizer +
                      " --set 'data.paths" + files("a.txt") + " --set 'data.val_paths" + files("val.jsonl")));
      const Json beat = heartbeats(out, 0, "evaluation").back();
      const Json evaluated =
          parse_json(ok("eval --device cpu --json --seq 48 --checkpoint " + out + " --data " + folder.file("val.jsonl"))
                         .standard_output,
                     "eval");
      bits.push_back(beat["bits_per_byte"].get<double>());
      if (tokenizer != "byte") {
        CHECK(bits.back() == Approx(evaluated["bits_per_byte"].get<double>()).epsilon(1e-5));
        CHECK(beat["val_loss"].get<double>() == Approx(evaluated["loss"].get<double>()).epsilon(1e-5));
        CHECK(bits.back() == Approx(beat["val_loss"].get<double>() * 960 / bytes / std::numbers::ln2));
      } else {
        const double as_if_all = beat["val_loss"].get<double>() / std::numbers::ln2;  // tokens that are all bytes
        CHECK(bits.back() > as_if_all);
        CHECK(bits.back() < 1.001 * as_if_all);
      }
      CHECK(read_json_file(out + "/metrics.json")["bits_per_byte"] == beat["bits_per_byte"]);
      CHECK(has(read_text(out + "/ranks/rank_0.log"), fmt::format("  bits per byte {:.4f}", bits.back())));
    }
    CHECK(bits[0] == bits[1]);
  }
  ok(train_on(folder.file("synthetic"), "cpu", "--set train.eval_every=20"));
  CHECK(heartbeats(folder.file("synthetic"), 0, "evaluation").back()["bits_per_byte"].is_null());
  CHECK_FALSE(has(read_text(folder.file("synthetic/ranks/rank_0.log")), "bits per byte"));
}
