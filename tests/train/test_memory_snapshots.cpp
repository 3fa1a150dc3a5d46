// Memory snapshots: the temporaries log, a pickle's bytes, the files that a run writes, and errors when memory is
// exhausted. check_memory_snapshot.py reads the files with Python's standard library only. PyTorch's tools read them
// too, if PyTorch is installed.
#include <filesystem>

#include "engine/memory_log.h"
#include "io/pickle.h"
#include "model/params.h"
#include "tests/support/program.h"
#include "tests/support/test.h"
#include "tests/support/train_run.h"
#include "train/config/load_config.h"
#include "train/monitor/memory_report.h"
#include "train/run/memory_plan.h"

using namespace triad;
using namespace triad::test;
namespace fs = std::filesystem;

namespace {

const std::string kM7cBytes = TRIAD_SOURCE_DIR "/configs/m7c_125m_cpu.json";
const std::string kChecker = TRIAD_SOURCE_DIR "/tests/train/check_memory_snapshot.py";

bool require_python() { return run_command("python3 -c 'import pickletools'").exit_code == 0 || skip("no python3"); }

Outcome run_tiny(const std::string& out, const std::string& more, const std::string& environment = "") {
  return run_program("train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + out + " " + more, environment);
}

void check_snapshot(const std::string& base, const std::string& tensors, const std::vector<std::string>& words = {}) {
  const Outcome outcome = run_command("python3 " + kChecker + " " + base + " " + tensors);
  INFO(base << "\n" << outcome.output);
  CHECK(outcome.exit_code == 0);
  CHECK(outcome.output.find("\nwhole\n") != std::string::npos);
  for (const std::string& text : words) {
    INFO("expected: " << text);
    CHECK(outcome.output.find(text) != std::string::npos);
  }
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

TEST_CASE("memory: the log has each temporary once, by layer, op and name, and drops the oldest", "[memory]") {
  Runtime runtime({.device = Device::cpu(), .arena_bytes = 1 << 20, .scratch_bytes = 1 << 20});
  Context& ctx = runtime.ctx();
  MemoryLog& log = *runtime.memory_log();
  {
    Scratch::Scope scope(ctx.scratch);
    scope.alloc(DType::f32, {100}, "outer");
    ctx.routes.set_layer(3);
    const OpScope op(ctx, "some_op");
    Scratch::Scope inner(ctx.scratch);
    inner.alloc(DType::u8, {1}, "inner");
    const MemoryLog::Contents now = log.read();
    REQUIRE(now.live.size() == 2);
    CHECK(now.live[0].name == std::string("outer"));
    CHECK(now.live[0].layer == -1);
    CHECK(now.live[0].op == nullptr);
    CHECK(now.live[1].op == std::string("some_op"));
    CHECK(now.live[1].layer == 3);
    CHECK(now.all.bytes.current == 512 + 256);  // bytes; each is padded to 256-byte multiples
    CHECK(now.all.requested.current == 401);
  }
  MemoryLog::Contents end = log.read();
  CHECK(end.live.empty());
  REQUIRE(end.events.size() == 4);
  CHECK(end.events[2].name == std::string("inner"));  // temporaries are freed in reverse order
  CHECK(end.events[2].kind == MemoryLog::Kind::free);
  CHECK(end.events[2].address == end.events[1].address);
  CHECK(end.all.bytes.peak == 768);
  CHECK(end.all.bytes.freed == 768);
  CHECK(end.small.count.allocated == 2);
  CHECK(end.large.count.allocated == 0);

  for (size_t i = 0; i < MemoryLog::kEvents; ++i) {
    Scratch::Scope scope(ctx.scratch);
    scope.alloc(DType::f32, {1}, "one of many");
  }
  end = log.read();
  CHECK(end.events.size() == MemoryLog::kEvents);
  CHECK(end.lost == static_cast<int64_t>(MemoryLog::kEvents) + 4);
  CHECK(end.events.front().kind == MemoryLog::Kind::alloc);
  CHECK(end.events.back().kind == MemoryLog::Kind::free);
  CHECK(end.all.count.allocated == static_cast<int64_t>(MemoryLog::kEvents) + 2);
}

TEST_CASE("memory: the error of exhausted scratch memory names the requested tensor", "[memory]") {
  Runtime runtime({.device = Device::cpu(), .arena_bytes = 1 << 16, .scratch_bytes = 1 << 12});
  Scratch::Scope scope(runtime.ctx().scratch);
  scope.alloc(DType::f32, {512});
  check_error([&] { scope.alloc(DType::f32, {1000}, "logits"); }, {"logits", "f32[1000]", "used up"});
  CHECK_THROWS_AS(scope.alloc(DType::f32, {1000}), OutOfMemory);
}

TEST_CASE("memory: Python reads what was pickled, and the viewer supports all opcodes", "[memory]") {
  if (!require_python()) return;
  PickleWriter w;
  w.begin_dict();
  w.text("integers");
  w.begin_list();
  for (const int64_t n : {int64_t{0}, int64_t{255}, int64_t{256}, int64_t{-1}, int64_t{2147483647}, int64_t{2147483648},
                          int64_t{-2147483648}, int64_t{-2147483649}, int64_t{1} << 47})
    w.integer(n);
  w.end_list();
  w.text("number");
  w.number(-0.1);
  w.flag("yes", true);
  w.flag("no", false);
  w.entry("text", "f\xc3\xbcr");
  w.text("pairs");
  w.begin_list();
  w.pair(1, 2);
  w.pair(3, -4);
  w.end_list();
  w.text("empty");
  w.begin_list();
  w.end_list();
  w.text("many");  // a list longer than one APPENDS batch, with more texts than one-byte memo indices
  w.begin_list();
  for (int i = 0; i < 2500; ++i) w.text("t" + std::to_string(i % 700));
  w.end_list();
  w.text("again");
  w.begin_list();
  for (int i = 0; i < 3; ++i)
    if (!w.again("this")) {
      w.begin_dict();
      w.entry("k", int64_t{7});
      w.end_dict();
      w.keep("this");
    }
  w.end_list();
  w.end_dict();
  const TemporaryFolder folder;
  write_text(folder.file("p"), w.finish());
  write_text(folder.file("check.py"), R"(
import pickle, pickletools, sys
raw = open(sys.argv[1], 'rb').read()
assert pickle.loads(raw) == {
    'integers': [0, 255, 256, -1, 2147483647, 2147483648, -2147483648, -2147483649, 1 << 47], 'number': -0.1,
    'yes': True, 'no': False, 'text': 'f\xfcr', 'pairs': [(1, 2), (3, -4)], 'empty': [],
    'many': ['t%d' % (i % 700) for i in range(2500)], 'again': [{'k': 7}] * 3}, pickle.loads(raw)
names = [op.name for op, _, _ in pickletools.genops(raw)]
assert names.count('APPENDS') == 6, names.count('APPENDS')  # batches of 1,000 at most
assert set(names) <= set('PROTO STOP MARK NEWTRUE NEWFALSE BININT BININT1 LONG1 BINFLOAT BINUNICODE EMPTY_LIST APPENDS '
                         'EMPTY_DICT SETITEMS TUPLE2 BINPUT LONG_BINPUT BINGET LONG_BINGET'.split()), set(names)
)");
  const Outcome outcome = run_command("python3 " + folder.file("check.py") + " " + folder.file("p"));
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
}

TEST_CASE("memory: a run writes snapshots at its start, after the loader, after step 1 and as configured", "[memory]") {
  if (!require_python()) return;
  const TemporaryFolder folder;
  const Outcome run = run_tiny(folder.path(), "--set train.steps=6", "NSA_MEM_DUMP_EVERY=3");
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  CHECK(run.output.find("NSA_MEM_DUMP_EVERY=3 -> log.memory_every") != std::string::npos);
  const std::string tensors =
      "embed.weight blocks.0.attn.q_proj.weight grad/blocks.1.mlp.fc2.weight exp_avg/lm_head.weight "
      "exp_avg_sq/norm_f.weight layer01.qkv layer00.mlp_pre tokens 'rope cos'";
  check_snapshot(folder.file("mem_boot"), tensors);
  check_snapshot(folder.file("mem_loader"), tensors);
  const std::string temporaries =
      " layer01.dnorm layer00.nsa_gate_backward.temporary classifier_forward_backward.logits dx";
  for (const char* when : {"mem_step1", "mem_step3", "mem_step6"})
    check_snapshot(folder.file(when), tensors + temporaries,
                   {"categories activations grads io optimizer params temporary workspace", "lost=0"});
  for (const char* when : {"mem_step2", "mem_step4", "mem_step5", "mem_oom"})
    CHECK(!fs::exists(folder.file(std::string(when) + ".pickle")));
  const std::string dtypes = read_text(folder.file("dtypes_report.txt"));
  for (const char* line :
       {"activations   i32     layer00.block_index [2,48,2,", "optimizer     f32     exp_avg/norm_f.weight [32]"})
    CHECK(dtypes.find(line) != std::string::npos);
}

TEST_CASE("memory: snapshots of bf16 runs have master weights, and each rank writes its own", "[memory][dist]") {
  if (!require_python() || !require_mpirun()) return;
  const TemporaryFolder folder;
  const Outcome run = run_ranks(2, "train " + kTiny + " --set runtime.device=cpu --set log.out_dir=" + folder.path() +
                                       " --set train.steps=2 --set runtime.precision=bf16 --set dist.zero=1");
  INFO(run.output);
  REQUIRE(run.exit_code == 0);
  const std::string tensors = "grad/embed.weight blocks.0.norm1.weight 'the ranks'\"'\"' numbers'";
  // The first rank's shards are larger than this model's segments, so the other rank's are padding.
  check_snapshot(folder.file("mem_step1"), tensors + " master/embed.weight", {"comm", "master", "optimizer"});
  check_snapshot(folder.file("mem_step1_rank1"), tensors, {"comm", "master", "optimizer"});
  CHECK(fs::exists(folder.file("mem_boot_rank1.txt")));
  CHECK(!fs::exists(folder.file("mem_boot_rank0.txt")));
  // In MiB: both moments for all 43,270 parameters, although each rank has only half.
  CHECK(first_line(read_text(folder.file("opt_state_mb.txt"))) == "0.33");
  CHECK(read_text(folder.file("dtypes_report.txt")).find("master        f32     master/") != std::string::npos);
}

TEST_CASE("memory: AdamW's moments of the M7C byte model are 597.35 MiB", "[memory]") {
  const Config config = load_config(kM7cBytes, {}).config;
  CHECK(first_line(optimizer_report(param_specs(config.model), OptimizerKind::adamw, DType::f32, 0, 1)) == "597.35");
}

TEST_CASE("memory: a tensor's layer, by its name", "[memory]") {
  CHECK(layer_of("layer07.qkv") == "layer 7");
  CHECK(layer_of("exp_avg/blocks.11.attn.gate.fc1.bias") == "layer 11");
  CHECK(layer_of("recomputed.qkv").empty());
  CHECK(layer_of("embed.weight").empty());
  CHECK(layer_of("layers").empty());
}

TEST_CASE("memory: a run that does not fit prints tensor, layer, the ten largest and a change that fits", "[memory]") {
  if (!require_python()) return;
#ifdef __SANITIZE_ADDRESS__
  return void(skip("the address sanitizer does not run under a limit of addresses"));
#endif
  const TemporaryFolder folder;
  // Address space in KiB. One arena, since each further one takes 64 MiB of it, as threads happen to allocate.
  const std::string limited = "ulimit -v 1000000; MALLOC_ARENA_MAX=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1";
  // With 2,000 sequences the scratch memory (190 MiB) fits into the limit, and the layers (340 MiB) do not.
  const auto attempt = [&](const std::string& more) {
    return run_tiny(folder.file("run"), "--set train.steps=1 --set train.micro_batch_size=2000 " + more, limited);
  };
  const Outcome refused = attempt("");
  INFO(refused.output);
  CHECK(refused.exit_code == 1);
  // Expected: "out of memory: layer01.o_win f32[...] of 12.3 MiB (activations, layer 1) finds 4.5 MiB left."
  for (const char* text : {"out of memory: layer0", "(activations, layer ", "MiB left", "largest tensors",
                           "activations", "train.micro_batch_size is 2000", "this fits: "})
    CHECK(refused.output.find(text) != std::string::npos);
  const size_t largest = refused.output.find("largest tensors");
  REQUIRE(largest != std::string::npos);
  CHECK(std::count(refused.output.begin() + static_cast<std::ptrdiff_t>(largest), refused.output.end(), '\n') == 11);
  check_snapshot(folder.file("run/mem_oom"), "layer01.mlp_pre embed.weight", {"oom layer0", "MiB left"});
  // A run that doesn't fit writes only its memory plan.
  CHECK(count_files(folder.file("run")) == 3);

  // What fits, fits: unless less memory is free than a moment ago, when the new advice counts.
  const auto free_mib = [](const Outcome& of) {
    INFO(of.output);
    const std::string before = "MiB on cpu, ";
    const size_t at = of.output.find(before);
    REQUIRE(at != std::string::npos);
    return std::stoll(of.output.substr(at + before.size()));
  };
  const auto advised_batch = [](const Outcome& of) {
    INFO(of.output);
    const std::string key = "train.micro_batch_size ", advice = of.output.substr(of.output.find("this fits: "));
    const size_t at = advice.find(key);
    REQUIRE(at != std::string::npos);
    return std::stoll(advice.substr(at + key.size()));
  };
  Outcome last = refused;
  for (int64_t free = free_mib(last) + 1, batch = 2000; last.exit_code != 0 && free_mib(last) < free;) {
    free = free_mib(last);
    CHECK(advised_batch(last) < batch);
    batch = advised_batch(last);
    CHECK(batch > 1);
    last = attempt("--set train.micro_batch_size=" + std::to_string(batch));
  }
  INFO(last.output);
  CHECK(last.exit_code == 0);
  CHECK(fs::exists(folder.file("run/mem_step1.pickle")));
  CHECK(!fs::exists(folder.file("run/mem_oom.pickle")));  // a new run removes the failed attempt's file
}

TEST_CASE("memory: too little address space for the BLAS buffers is an error, not a hang", "[memory]") {
#ifdef __SANITIZE_ADDRESS__
  return void(skip("the address sanitizer does not run under a limit of addresses"));
#endif
  const TemporaryFolder folder;
  const Outcome run = run_tiny(folder.file("run"), "--set train.steps=1",
                               "ulimit -v 2000000; OMP_NUM_THREADS=64 OPENBLAS_NUM_THREADS=1 timeout -s KILL 300");
  INFO(run.output);
  CHECK(run.exit_code == 1);
  CHECK(run.output.find("128 MiB of addresses for each of 64 threads") != std::string::npos);
}

TEST_CASE("memory: running out of memory during a run writes mem_oom", "[memory]") {
  if (!require_python()) return;
  const TemporaryFolder folder;
  const Config config = load_config(kTiny, {"log.out_dir=" + folder.path()}).config;
  const std::unique_ptr<Comm> comm = make_self_comm(Device::cpu());
  const OutsideMemory outside{Device::cpu()};
  const std::unique_ptr<Runtime> runtime = allocate_planned(config, Device::cpu());
  TrainStep step(*runtime, config);
  FolderLock lock;
  const RunFolder run(folder.path(), RunFolder::Start::fresh, lock);
  const MemoryReport report(*runtime, step, outside, run, *comm);
  report.write_oom(OutOfMemory("scratch memory of cpu is used up: logits", 1 << 20, 1 << 10));
  check_snapshot(folder.file("mem_oom"), "layer01.qkv", {"oom scratch memory of cpu is used up: logits", "oom=1"});
  CHECK(read_text(folder.file("mem_oom.txt")).find("CUDA OOMs: 1 ") != std::string::npos);
}

TEST_CASE("memory: PyTorch's own tools read a snapshot, and print the same table", "[memory]") {
  if (run_command("python3 -c 'import torch.cuda._memory_viz'").exit_code != 0) return void(skip("no PyTorch"));
  const TemporaryFolder folder;
  const Outcome run = run_tiny(folder.path(), "--set train.steps=2");
  REQUIRE(run.exit_code == 0);
  write_text(folder.file("check.py"), R"(
import json, pickle, sys
from torch.cuda import _memory_viz as viz, memory
base = sys.argv[1]
snapshot = pickle.load(open(base + '.pickle', 'rb'))
viz.segsum(snapshot); viz.trace(snapshot)
for page in (viz.trace_plot(snapshot), viz.trace_plot(snapshot, plot_segments=True), viz.segment_plot(snapshot)):
    assert 'MemoryViz.js' in page
stats = json.load(open(base + '.json'))
memory.memory_stats, memory._get_device_index = lambda device=None: stats, lambda device, optional=False: 0
assert open(base + '.txt').read().startswith(memory.memory_summary())
)");
  const Outcome outcome = run_command("python3 " + folder.file("check.py") + " " + folder.file("mem_step1"));
  INFO(outcome.output);
  CHECK(outcome.exit_code == 0);
}
