// triad bench: its output, the comparison with kept rows (earlier runs' results), and errors in kept-row files. Also
// routes: which kernel ran how many calls, and the reason if it was not the fastest.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <regex>
#include <sstream>

#include "io/json_config.h"
#include "kernels/common/op_case.h"
#include "kernels/nsa/attend_window.h"
#include "kernels/step/traffic.h"
#include "model/flops.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/monitor/telemetry.h"
#include "train/step/train_step.h"

using namespace triad;
using triad::test::kTiny;
using triad::test::Outcome;
using triad::test::read_text;
using triad::test::run_program;
using triad::test::TemporaryFolder;
using triad::test::write_text;

namespace {

const std::string kAttention = "bench attention --device cpu --shapes 1x40x4x2x8 ";

void check(const std::string& args, int exit_code, const std::vector<std::string>& words) {
  const Outcome outcome = run_program(args);
  INFO("triad " << args << "\nexit code " << outcome.exit_code << "\n" << outcome.output);
  CHECK(outcome.exit_code == exit_code);
  for (const std::string& text : words) CHECK(outcome.output.find(text) != std::string::npos);
}

std::vector<Json> read_rows(const std::string& path) {
  std::vector<Json> rows;
  std::istringstream text(read_text(path));
  for (std::string line; std::getline(text, line);) rows.push_back(parse_json(line, path));
  return rows;
}
void write_rows(const std::string& path, const std::vector<Json>& rows) {
  std::string text;
  for (const Json& row : rows) text += dump_json(row, -1) + "\n";
  write_text(path, text);
}
bool is(const Json& row, const std::string& op, const std::string& pass) {
  return row.value("op", "") == op && row.value("pass", "") == pass;
}

}  // namespace

TEST_CASE("bench: rows are kept, and compared with the newest row of the same case", "[bench]") {
  const TemporaryFolder folder;
  const std::string kept = folder.file("kept.jsonl"), compare = kAttention + "--compare " + kept;
  check(kAttention + "--append " + kept, 0, {"selected", "of floor", "peak of both passes"});
  std::vector<Json> rows = read_rows(kept);
  REQUIRE(rows.size() == 16);  // one for the ceiling, eight forward parts, seven backward parts
  CHECK(rows[0]["what"] == "ceiling");
  for (const char* key : {"commit", "date", "gpu", "dtype", "op", "case", "pass", "us", "runs", "share_of_floor"})
    CHECK(rows[1].contains(key));

  // Other tests share the cores, so measured times vary. So times in the kept-row file are multiplied by 1e9, and no
  // row counts as slower. Then three kept rows are changed: one gets a short time, so that this run counts as slower;
  // one gets another key; and one gets an older duplicate.
  for (Json& row : rows)
    if (row.contains("us")) row["us"] = row["us"].get<double>() * 1e9;
  write_rows(kept, rows);
  check(compare, 0, {"15 rows compared, 0 without a kept row"});

  Json older;
  for (Json& row : rows) {
    if (is(row, "attention window", "forward")) row["us"] = 1e-3;
    if (is(row, "attention gate", "backward")) row["dtype"] = "bf16";
    if (is(row, "attention", "forward")) older = row;
  }
  older["us"] = 1e-3, older["date"] = "2020-01-01";
  rows.push_back(older);
  write_rows(kept, rows);
  check(compare, 1,
        {"attention window 1x40x4x2x8 randn forward", "% slower", "1 of 14 rows is more than 5% slower than " + kept,
         "14 rows compared, 1 without a kept row", "no kept row"});
}

TEST_CASE("bench: new rows are not compared with themselves, even if one file is read and appended to", "[bench]") {
  const TemporaryFolder folder;
  const std::string kept = folder.file("kept.jsonl");
  check(kAttention + "--append " + kept, 0, {});
  std::vector<Json> rows = read_rows(kept);
  for (Json& row : rows)
    if (row.contains("us")) row["us"] = row["us"].get<double>() / 1e9;
  write_rows(kept, rows);
  check(kAttention + "--append " + kept + " --compare " + kept, 1, {"15 of 15 rows are more than 5% slower"});
  CHECK(read_rows(kept).size() == 2 * rows.size());
}

TEST_CASE("bench: a missing or malformed file of kept rows is an error before anything is measured", "[bench]") {
  const TemporaryFolder folder;
  const std::string kept = folder.file("kept.jsonl"), compare = kAttention + "--compare " + kept;
  check(compare, 1, {kept, "cannot be read"});
  const std::string row =
      R"({"commit": "c", "date": "2026-01-01", "gpu": "g", "dtype": "f32", "op": "o", "case": "x", "pass": "forward", )";
  write_text(kept, row + "\"us\": 1}\n{\"us\": 1\n");
  check(compare, 1, {kept + ":2"});
  write_text(kept, row + "\"us\": \"fast\"}\n");
  check(compare, 1, {kept + ":1", "fast"});
  write_text(kept, row + "\"us\": -1}\n");
  check(compare, 1, {kept + ":1", "-1"});
  write_text(kept, "{\"us\": 1, \"commit\": \"c\"}\n");
  check(compare, 1, {kept + ":1", "date"});
  write_text(kept, "[1]\n");
  check(compare, 1, {kept + ":1", "an object"});
}

TEST_CASE("bench: attention is timed on random and on trained inputs, and invalid shapes are refused", "[bench]") {
  const TemporaryFolder folder;
  const std::string fresh = folder.file("init"), text = folder.file("a.txt");
  REQUIRE(run_program("init " + kTiny + " --out " + fresh).exit_code == 0);
  write_text(text, std::string(200, 'a'));
  const std::string trained = "bench attention --device cpu --data " + fresh + " --shapes ";
  const Outcome outcome = run_program(trained + "2x48x4x2x8,1x20x4x2x8 --json --text " + text);
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const Json results = parse_json(outcome.standard_output, "the output of bench")["results"];
  CHECK(results.size() == 30);
  CHECK(results[0]["case"] == "2x48x4x2x8 trained l8 d4 l'8 n4 w16");  // the options are the checkpoint's
  CHECK(results.back()["lists"]["shared_with_neighbour"] == 1.0);      // every list contains all blocks of 20 tokens
  check(trained + "1x48x4x1x8 --text " + text, 2, {"1x48x4x1x8", "4x2x8v8"});
  check(trained + "1x48x4x2x8", 2, {"--text"});
  check(trained + "9x48x4x2x8 --text " + text, 1, {"201 tokens"});
  // A wrong value is an error before another one is measured.
  for (const std::string& wrong : {std::string("nope"), fresh + " --shapes 1x40x4x1x8 --text " + text}) {
    const Outcome refused = run_program(kAttention + "--data randn," + wrong);
    INFO(refused.output);
    CHECK(refused.exit_code == 2);
    CHECK(refused.output.find("randn\n") == std::string::npos);
  }
  check(kAttention + "--data nope", 2, {"--data nope", "neither randn nor local", "no such folder"});
  for (const char* shape : {"8x2048", "1x2x3x4", "1x2x4x2x8x8", "1x2x4x2x8v8v8", "1x2x4x2v8", "0x2x4x2x8", "axbxcxdxe",
                            "1x2x4x2x512", "1x2x4x3x8", "-1x2x4x2x8"})
    check(std::string("bench attention --device cpu --shapes=") + shape, 2, {});
  check("bench attention --attention plain", 2, {"plain"});
  const std::string packed = "bench attention --device cpu --l 8 --d 4 --l-sel 8 --shapes 2x40x4x2x8 --documents ";
  check(packed + "1x30+2x25,lognormal:10:80", 0,
        {"2x40x4x2x8 randn documents 1x30+2x25", "2x40x4x2x8 randn documents lognormal:10:80", "\ndocuments "});
  check(packed + "3x10", 2, {"3x10 has 30 tokens", "80 in all"});
  for (const char* mix : {"80", "8x", "0x80", "8x10+", "lognormal:80", "lognormal:0:80", "lognormal:10:80:-1", "x"})
    check(packed + mix, 2, {"--documents", mix});
  check("bench attention --n-sel 0", 2, {"--n-sel"});
}

TEST_CASE("bench: dense attention and steps", "[bench]") {
  check("bench attention --device cpu --attention dense --shapes 1x64x4x2x8v16", 0, {"1x64x4x2x8v16 randn", "dense "});
  const TemporaryFolder folder;
  const std::string kept = folder.file("kept.jsonl");
  check("bench step " + kTiny + " --steps 2 --warm-up 0 --set runtime.device=cpu --append " + kept, 0,
        {"tiny 2x48 nsa", "tokens/s", "GB", "executed", "dense-equivalent", "that needs a GPU"});
  const std::vector<Json> rows = read_rows(kept);
  REQUIRE(rows.size() == 2);
  const Json& row = rows[1];
  CHECK(std::abs(row["tokens_per_s"].get<double>() * row["us"].get<double>() - 2 * 48e6) < 1);
  check("bench step " + kTiny +
            " --steps 1 --warm-up 0 --set runtime.device=cpu --set nsa.selector=index --set "
            "nsa.select_every=2 --set train.lora.rank=2 --append " +
            kept,
        0, {"tiny 2x48 nsa, index, select_every 2, lora 2: "});
  check("bench step " + kTiny +
            " --steps 1 --warm-up 0 --set runtime.device=cpu --set runtime.matmul_dtype=fp8 --append " + kept,
        0, {"tiny 2x48 nsa, fp8: "});
  const std::string named = folder.file("named.jsonl");  // CONFIG in the environment names the config
  for (const char* verb :
       {"step --steps 1 --warm-up 0", "prefill --lengths 20 --runs 1", "decode --lengths 20 --runs 1"}) {
    const Outcome outcome =
        run_program(std::string("bench ") + verb + " --set runtime.device=cpu --append " + named, "CONFIG=" + kTiny);
    INFO(outcome.output);
    CHECK(outcome.exit_code == 0);
    CHECK(read_rows(named).back()["case"].get<std::string>().starts_with("tiny "));
  }
  check("bench step " + kTiny + " --steps 0", 2, {"--steps"});
  check("bench step " + kTiny + " --set model.bogus=1", 2, {"bogus"});
}

TEST_CASE("bench: a memory-bound op is compared with a copy of the same number of bytes", "[bench]") {
  const Outcome outcome = run_program("bench rank_sum --device cpu --json");
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const Json results = parse_json(outcome.standard_output, "the output of bench")["results"];
  REQUIRE(results.size() == 1);
  const Json& row = results[0];
  REQUIRE(row["limited_by"] == "memory");
  CHECK(row["share_of_copy"].get<double>() > 0);
  CHECK(row["share_of_traffic"].get<double>() > 0);
  CHECK_FALSE(row.contains("us_clean"));  // measured on a GPU only, whose caches can be flushed
}

TEST_CASE("bench: a memory-bound op on the GPU is timed after each kind of cache flush", "[bench][gpu]") {
  if (!test::require_gpu()) return;
  const Outcome outcome = run_program("bench rope --device cuda --json");
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  const Json output = parse_json(outcome.standard_output, "the output of bench");
  for (const Json& row : output["results"]) {
    INFO(row.dump());
    REQUIRE(row["limited_by"] == "memory");
    // Times must exist; how long they are depends on other work on the GPU.
    for (const char* share : {"share_of_copy", "share_of_copy_clean", "share_of_traffic"}) {
      CHECK(row[share].get<double>() > 0);
      CHECK(std::isfinite(row[share].get<double>()));
    }
    CHECK(row["us_clean"].get<double>() > 0);
  }
}

TEST_CASE("bench: energy needs a GPU, and is refused before anything is measured", "[bench]") {
  for (const char* what : {"rope", "attention --shapes 1x64x4x2x16"}) {
    const Outcome outcome = run_program(fmt::format("bench {} --device cpu --energy", what));
    INFO(outcome.output);
    CHECK(outcome.exit_code == 2);
    CHECK(outcome.output.find("--energy: the device is cpu") != std::string::npos);
    CHECK(outcome.standard_output.empty());
  }
  const Outcome shared = run_program("bench attention --context 2 --energy");
  CHECK(shared.exit_code == 2);
  CHECK(shared.output.find("--context is 2: --energy") != std::string::npos);
}

TEST_CASE("bench: the energy of ops and of attention's parts on the GPU", "[bench][gpu]") {
  if (!test::require_gpu()) return;
  for (const char* what : {"argmax", "attention --shapes 1x256x4x2x64"}) {
    const Outcome outcome = run_program(fmt::format("bench {} --device cuda --energy --json", what));
    INFO(outcome.output);
    REQUIRE(outcome.exit_code == 0);
    for (const Json& row : parse_json(outcome.standard_output, "the output of bench")["results"]) {
      INFO(row.dump());
      const double joules = row["power"]["joules"], watts = row["power"]["watts"], limit = row["power"]["limit_w"];
      CHECK(joules > 0);
      CHECK(watts > 0);
      CHECK(watts < 2 * limit);
    }
  }
}

TEST_CASE("bench: the bytes that a case writes are part of those that it moves", "[bench]") {
  for (const OpCase& c : all_op_cases()) {
    INFO(c.op << " " << c.name);
    for (const auto& [written, bytes] :
         {std::pair(c.forward_written, c.forward_bytes), std::pair(c.backward_written, c.backward_bytes)})
      CHECK((written == OpCase::kHalf || (written >= 0 && written <= bytes)));
  }
}

// Checks that traffic() overwrites all of `to`, and, if both buffers are equally large, that every vector in `from` is
// in `to`.
void check_traffic(Device device) {
  constexpr int64_t kVector = 16;
  for (const int64_t reads : {0, 1, 1023, 1025, 70001})
    for (const int64_t writes : {0, 1, 1024, 5003, 70001}) {
      Runtime runtime({.device = device, .arena_bytes = align_up(reads * kVector) + align_up(writes * kVector)});
      Context& ctx = runtime.ctx();
      const auto alloc = [&](const char* name, int64_t vectors) {
        return vectors == 0 ? Tensor{} : runtime.arena().alloc(MemTag::io, name, DType::u8, {vectors * kVector});
      };
      const Tensor from = alloc("from", reads), to = alloc("to", writes);
      std::vector<std::byte> in(static_cast<size_t>(reads * kVector)), out(static_cast<size_t>(writes * kVector));
      for (const int64_t marked : {int64_t{0}, reads / 2, reads - 1}) {
        std::fill(in.begin(), in.end(), std::byte{0});
        std::fill(out.begin(), out.end(), std::byte{0xff});
        if (reads > 0) in[static_cast<size_t>(std::max(marked, int64_t{0}) * kVector + 5)] = std::byte{7};
        if (reads > 0) triad::write(ctx, from, in.data());
        if (writes > 0) triad::write(ctx, to, out.data());
        traffic(ctx, to, from);
        ctx.stream.synchronize();
        if (writes > 0) triad::read(ctx, out.data(), to);
        bool marks = false, others = false;
        for (size_t i = 0; i < out.size(); ++i) {
          marks |= i % kVector == 5 && out[i] == std::byte{7};
          others |= out[i] != std::byte{0} && (i % kVector != 5 || out[i] != std::byte{7});
        }
        INFO(reads << " read, " << writes << " written, vector " << marked << " marked");
        CHECK_FALSE(others);
        if (reads == writes && reads > 0) CHECK(marks);
      }
    }
}
TEST_CASE("bench: traffic() reads and writes its whole buffers", "[bench]") { check_traffic(Device::cpu()); }
TEST_CASE("bench: traffic() reads and writes its whole buffers, CUDA", "[bench]") {
  if (!test::require_gpu()) return;
  check_traffic(Device::cuda());
}

TEST_CASE("bench: FLOPs of the M7C model", "[bench]") {
  ModelConfig c;
  c.dim = 768, c.n_layers = c.n_heads = 12, c.n_kv_groups = 2, c.d_k = c.d_v = 64, c.vocab_size = 50257;
  c.resolve();
  const ProductFlops products = product_flops(c, 16, 2048);
  CHECK(products.head == 6.0 * 32768 * 50257 * 768);
  // Per layer: q and out have 768 x 768 weights, six products 128 x 768, and two 3072 x 768.
  CHECK(products.layers == 6.0 * 32768 * 12 * 768 * (2 * 768 + 6 * 128 + 2 * 3072));
  CHECK(dense_equivalent_flops(c, 16, 2048) ==
        products.layers + products.head + 16.0 * 12 * 12 * (2048.0 * 2049 / 2) * 768);
  // At 2048 tokens NSA has more FLOPs than dense attention.
  CHECK(training_flops(c, 16, 2048) > dense_equivalent_flops(c, 16, 2048));
  CHECK(training_flops(c, 1, 65536) < dense_equivalent_flops(c, 1, 65536));
}

TEST_CASE("routes: calls are counted by layer, op, kernel and reason", "[routes]") {
  Routes routes;
  CHECK(routes.summary() == "no fallbacks");
  routes.record("nsa_select", "sm90");
  CHECK(routes.summary() == "no fallbacks");
  for (const int64_t layer : {0, 1, 0}) {
    routes.set_layer(layer);
    routes.record("nsa_select", "general", "heads of 60");
  }
  CHECK(routes.counts().size() == 3);
  CHECK(routes.counts()[1].calls == 2);
  CHECK(routes.fallbacks() == 3);
  CHECK(routes.summary() == "3 fallbacks: nsa_select general (heads of 60) 3 times");
  CHECK(branch_of("nsa_attend_selected_backward") == "sel");
  CHECK(branch_of("nsa_select") == "select");
  CHECK(branch_of("dense_attention_forward") == "win");
  CHECK(branch_of("matmul") == "matmul");
  CHECK(branch_of("linear_silu_forward") == "matmul");
  CHECK(branch_of("linear_swiglu_forward") == "matmul");
  CHECK(branch_of("symmetric_product") == "matmul");
}

TEST_CASE("routes: each fallback is logged once in the run's folder", "[routes]") {
  const TemporaryFolder folder;
  Config config;
  config.log.out_dir = folder.file("run");
  FolderLock lock;
  const RunFolder run(config.log.out_dir, RunFolder::Start::fresh, lock);
  std::filesystem::create_directory(run.file("ranks"));  // the folder that the trainer creates in a run
  Routes routes;
  {
    Runtime runtime({.device = Device::cpu(), .planning = true});
    const std::unique_ptr<Comm> alone = make_self_comm(Device::cpu());
    Telemetry telemetry(config, run, Device::cpu(), *alone, runtime.arena(), Telemetry::Resume{}, 0, false);
    routes.set_layer(3);
    routes.record("nsa_attend_window_forward", "general", "w, or so");
    routes.record("nsa_attend_window_forward", "sm90");
    telemetry.fallbacks(1, routes);
    telemetry.fallbacks(2, routes);
    routes.record("nsa_attend_window_forward", "general", "w, or so");
    routes.record("nsa_attend_window_forward", "general", "w, or so");
    telemetry.fallbacks(3, routes);
  }
  CHECK(read_text(run.file("fallback_counters.csv")) ==
        "step,layer,branch,kernel,reason,count\n"
        "1,3,win,nsa_attend_window_forward general,w; or so,1\n"
        "3,3,win,nsa_attend_window_forward general,w; or so,2\n");
}

TEST_CASE("routes: a bf16 shape that the fused kernels refuse is a fallback, an fp32 one is not", "[routes]") {
  if (!test::require_hopper_plan()) return;
  const auto routes_of = [](DType dtype, int64_t width) {
    Runtime plan({.device = Device::cuda(), .planning = true});
    const auto alloc = [&](DType type, const Shape& shape) { return plan.arena().alloc(MemTag::io, "x", type, shape); };
    const Tensor q = alloc(dtype, {1, 128, 4, width}), k = alloc(dtype, {1, 128, 2, width}),
                 v = alloc(dtype, k.shape());
    const Tensor dout = alloc(dtype, q.shape()), dq = alloc(DType::f32, q.shape());
    const Tensor lse = alloc(DType::f32, {1, 128, 4});
    const Tensor dk = alloc(dtype, k.shape()), dv = alloc(dtype, k.shape());
    nsa_attend_window_backward(plan.ctx(), {dq, dk, dv}, {dout, {}, lse, lse}, {q, k, v}, 64);
    return plan.ctx().routes;
  };
  CHECK(routes_of(DType::bf16, 64).fallbacks() == 0);
  CHECK(routes_of(DType::bf16, 64).counts()[0].kernel == "sm90");
  CHECK(routes_of(DType::bf16, 60).fallbacks() == 1);
  CHECK(routes_of(DType::f32, 64).fallbacks() == 0);
  CHECK(routes_of(DType::f32, 64).counts()[0].kernel == "general");
}

// Every op must have a fast (sm90) kernel for these shapes. A training step's dry run chooses the same kernels as the
// step itself.
TEST_CASE("routes: every shape that should be fused is fused", "[routes]") {
  if (!test::require_hopper_plan()) return;
  struct Widths {
    int64_t dk, dv;
  };
  for (const Widths w : {Widths{64, 64}, Widths{128, 128}, Widths{192, 128}})
    for (const int64_t G : {1, 2, 3, 4, 6, 8, 12, 15, 16, 32})
      for (const int64_t l_sel : {32, 64, 128})
        for (const int64_t n : {4, 16, 64})
          for (const int64_t T : {1, 63, 111, 2048}) {
            Config config;
            ModelConfig& m = config.model;
            m.dim = 64, m.n_layers = 1, m.n_kv_groups = 2, m.n_heads = 2 * G, m.d_k = w.dk, m.d_v = w.dv,
            m.vocab_size = 256;
            m.nsa.l_sel = l_sel, m.nsa.n_sel = n;
            m.resolve();
            config.train.seq_len = T, config.train.micro_batch_size = 2;
            config.runtime.precision = Precision::bf16;
            Runtime plan({.device = Device::cuda(), .planning = true});
            TrainStep step(plan, config);
            step.micro_step({}, {}, 1);
            INFO(w.dk << "v" << w.dv << " G " << G << " l' " << l_sel << " n " << n << " T " << T);
            const auto is_product = [](const Routes::Count& c) { return c.op == "matmul"; };
            const std::vector<Routes::Count>& counts = plan.ctx().routes.counts();
            // Besides other matrix products there are 9 calls: the selection, three branches forward and backward, and
            // two MLP products with SiLU.
            REQUIRE(std::count_if(counts.begin(), counts.end(), is_product) + 9 == std::ssize(counts));
            CHECK(plan.ctx().routes.summary() == "no fallbacks");
          }
}

TEST_CASE("bench: one step as a Chrome trace", "[bench]") {
  const TemporaryFolder folder;
  check("bench step " + kTiny + " --set runtime.device=cpu --steps 1 --warm-up 0 --chrome-trace " + folder.file("t"), 0,
        {});
  const Json trace = parse_json(read_text(folder.file("t")), "the trace");
  double end_us = 0;
  int64_t backwards = 0, named = 0;
  for (const Json& e : trace["traceEvents"]) {
    named += e["ph"] == "M";
    if (e["ph"] != "X") continue;
    CHECK(e["ts"].get<double>() >= end_us);  // ops run one after another
    end_us = e["ts"].get<double>() + e["dur"].get<double>();
    CHECK(e["dur"].get<double>() > 0);
    backwards += e["name"] == "nsa_attend_window_backward";
  }
  CHECK(backwards == 2);  // one for each layer
  CHECK(named == 2);
}

TEST_CASE("bench: an unwritable file is an error before anything is measured; measured rows are kept", "[bench]") {
  const TemporaryFolder folder;
  const std::string args = "bench step " + kTiny + " --set runtime.device=cpu --steps 1 --warm-up 0 ",
                    kept = folder.file("kept.jsonl");
  for (const char* option : {"--chrome-trace ", "--append "}) {
    const Outcome outcome = run_program(args + option + folder.file("none/file"));
    INFO(outcome.output);
    CHECK(outcome.exit_code == 1);
    CHECK(outcome.output.find(folder.file("none/file") + ": cannot be written") != std::string::npos);
    CHECK(outcome.output.find("tokens/s") == std::string::npos);
  }
  // With a folder by this name, the error occurs only when the finished file is renamed.
  std::filesystem::create_directory(folder.file("taken"));
  const Outcome late = run_program(args + "--append " + kept + " --chrome-trace " + folder.file("taken"));
  INFO(late.output);
  CHECK(late.exit_code == 1);
  CHECK(late.output.find("--chrome-trace: " + folder.file("taken") + ": cannot be put in place") != std::string::npos);
  CHECK(read_rows(kept).size() == 2);  // one row for the ceiling, one for the step
  CHECK(test::count_files(folder.path()) == 2);
}

TEST_CASE("bench: shares that are negative or above 100% are marked as noise", "[bench]") {
  // Both branches of the rule show in the line's own numbers, whatever this machine measures.
  const Outcome outcome = run_program("bench rank_sum --device cpu");
  INFO(outcome.output);
  REQUIRE(outcome.exit_code == 0);
  static const std::regex kShare("(-?[0-9.]+)%(~?)");
  bool any = false;
  for (std::sregex_iterator it(outcome.standard_output.begin(), outcome.standard_output.end(), kShare), end; it != end;
       ++it) {
    const double share = std::stod((*it)[1]);
    INFO(it->str());
    if (share > 100) CHECK((*it)[2] == "~");
    if (share >= 0 && share < 100) CHECK((*it)[2] == "");
    any = any || (*it)[2] == "~";
  }
  CHECK(test::has(outcome.standard_output, "~: noise of the measurement") == any);
}
