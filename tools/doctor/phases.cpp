// `triad doctor`'s phases, in running order: the question that each one answers, its time budget, and what to do if it
// fails. Budgets are some ten times what a phase takes on two cores, and twice what it takes on an H200.
#include "tools/doctor/doctor.h"

namespace triad {

namespace {

constexpr bool kAlways = false, kFull = true;
constexpr const char* kSeeBuckets = "ddp_buckets.txt has each gradient bucket's checksums";

std::vector<Phase> machine_phases() {
  return {
      {.name = "environment",
       .full = kAlways,
       .budget_s = 20,
       .question = "Does this machine have what this build needs?",
       .advice = "correct what the evidence names; environment/machine.json lists everything that was found",
       .examine = examine_environment},
      {.name = "topology",
       .full = kAlways,
       .budget_s = 30,
       .needs = {"environment"},
       .question = "Do copies between the GPUs of this host arrive intact?",
       .advice =
           "run `nvidia-smi topo -m` and search dmesg for Xid errors; take a GPU with wrong copies out of service",
       .examine = examine_topology},
      {.name = "collectives_nccl",
       .full = kAlways,
       .budget_s = 40,
       .needs = {"environment"},
       .question = "Are NCCL's sums over all GPUs of this host correct?",
       .advice =
           "repeat with NCCL_DEBUG=INFO; then with NCCL_P2P_DISABLE=1 or NCCL_SHM_DISABLE=1 to find the transport "
           "that fails; dist.backend=mpi trains without NCCL",
       .examine = examine_collectives_nccl},
      {.name = "collectives_mpi",
       .full = kAlways,
       .budget_s = 20,
       .needs = {"environment"},
       .question = "Are MPI's sums over two ranks correct?",
       .advice = "try `mpirun -np 2 hostname`; OMPI_MCA_btl=self,tcp disables MPI's shared memory; ranks started by "
                 "torchrun need no MPI",
       .examine = examine_collectives_mpi},
      {.name = "collectives_tcp",
       .full = kAlways,
       .budget_s = 20,
       .needs = {"environment"},
       .question = "Do ranks without MPI connect over TCP, and are their sums correct?",
       .advice = "check that a firewall or container does not block connections to 127.0.0.1",
       .examine = examine_collectives_tcp}};
}

std::vector<Phase> training_phases() {
  return {
      {.name = "baseline",
       .full = kFull,
       .budget_s = 30,
       .needs = {"environment"},
       .question = "Does a small NSA model train?",
       .advice = "read baseline/output.txt; --set runtime.asserts=true names the first bad value by layer and op",
       .examine = examine_baseline},
      {.name = "health",
       .full = kFull,
       .budget_s = 10,
       .needs = {"baseline"},
       .question = "Are its gates and selection lists healthy?",
       .advice = "`triad report OUT/baseline` plots them over time; nsa.uniform_gate=true and nsa.stopgrad_gates=true "
                 "train without the gates' influence",
       .examine = examine_health},
      {.name = "repeat",
       .full = kFull,
       .budget_s = 30,
       .needs = {"baseline"},
       .question = "Does the same run give the same bits again?",
       .advice = "a difference means a race or a faulty card: try compute-sanitizer --tool racecheck and another GPU",
       .examine = examine_repeat},
      {.name = "gradient_trace",
       .full = kFull,
       .budget_s = 20,
       .needs = {"environment"},
       .question = "Does one step give every parameter its gradient?",
       .advice = "gradient_trace/all_missing_params.txt, grad_ledger.csv and traces.log name the parameter and the op",
       .examine = examine_gradient_trace}};
}

std::vector<Phase> backend_phases() {
  return {{.name = "backend_nccl",
           .full = kFull,
           .budget_s = 60,
           .needs = {"baseline"},
           .question = "Do two ranks over NCCL train to the same weights as one rank?",
           .advice = fmt::format("if backend_mpi fails too, the transport is not the cause; {}", kSeeBuckets),
           .examine = examine_backend_nccl},
          {.name = "backend_mpi",
           .full = kFull,
           .budget_s = 40,
           .needs = {"baseline"},
           .question = "Do two ranks over MPI train to the same weights as one rank?",
           .advice = fmt::format("compare with backend_nccl and backend_tcp; {}", kSeeBuckets),
           .examine = examine_backend_mpi},
          {.name = "backend_tcp",
           .full = kFull,
           .budget_s = 40,
           .needs = {"baseline"},
           .question = "Do two ranks without MPI train to the same weights as one rank?",
           .advice = fmt::format("compare with backend_mpi; {}", kSeeBuckets),
           .examine = examine_backend_tcp}};
}

Phase branch_phase(const std::string& branch, const char* name) {
  return {.name = "branch_" + branch,
          .full = kFull,
          .budget_s = 30,
          .needs = {"baseline"},
          .question = fmt::format("Does a model with only the {} branch learn?", name),
          .advice = fmt::format("grad_ledger.csv has the gradient norms of the branch's parameters; if "
                                "runtime.kernels={{\"{}\":\"reference\"}} passes, a kernel is at fault, not the model",
                                branch),
          .examine = [branch](PhaseRun& p) { examine_branch(p, branch); }};
}

Phase recompute_phase(const char* name, const char* question, const char* advice, const std::string& plan) {
  return {.name = name,
          .full = kFull,
          .budget_s = 30,
          .needs = {"baseline"},
          .question = question,
          .advice = advice,
          .examine = [plan](PhaseRun& p) { examine_recompute(p, plan); }};
}

// Phases whose runs differ from the baseline in how they compute, but not in what they compute.
std::vector<Phase> equivalence_phases() {
  constexpr int kHalf = kDoctorLayers / 2;
  return {{.name = "cuda_graph",
           .full = kFull,
           .budget_s = 30,
           .needs = {"baseline"},
           .question = "Does a step replayed as a CUDA graph give the same bits?",
           .advice = "train with runtime.cuda_graph=false until the cause is known",
           .examine = examine_cuda_graph},
          recompute_phase("recompute_all", "Does recomputing all layers give the same bits in less memory?",
                          "recompute_first and recompute_second narrow down the layers; train with "
                          "runtime.recompute=none until the cause is known",
                          "block"),
          recompute_phase("recompute_first", "... recomputing the first half of the layers?",
                          "bisect with runtime.recompute=FIRST:END=block", fmt::format("0:{}=block", kHalf)),
          recompute_phase("recompute_second", "... recomputing the second half?",
                          "bisect with runtime.recompute=FIRST:END=block",
                          fmt::format("{}:{}=block", kHalf, kDoctorLayers)),
          {.name = "kernel_routes",
           .full = kFull,
           .budget_s = 30,
           .needs = {"baseline"},
           .question = "Do the fast kernels train like the reference kernels?",
           .advice =
               "set runtime.kernels={\"cmp\":\"reference\"}, then sel, win and matmul: the one that brings the losses "
               "together has the faulty kernel",
           .examine = examine_kernel_routes}};
}

std::vector<Phase> number_phases() {
  return {{.name = "causality",
           .full = kFull,
           .budget_s = 30,
           .needs = {"baseline"},
           .question = "Does changing token s leave every output before s as it is?",
           .advice = "train with one branch (nsa.force_branch) to find the faulty mask; compare "
                     "causality/before.safetensors and after.safetensors",
           .examine = examine_causality},
          {.name = "selection_parity",
           .full = kFull,
           .budget_s = 60,
           .needs = {"baseline"},
           .question = "Do the selection lists obey their definition, and match those of the f64 reference?",
           .advice = "compare block_index/LAYER in selection_parity/exact.safetensors and here.safetensors",
           .examine = examine_selection_parity},
          {.name = "attention_parity",
           .full = kFull,
           .budget_s = 60,
           .needs = {"baseline"},
           .question = "Do logits and gradients match those of the f64 reference on the CPU?",
           .advice = "the worst tensor names the op; runtime.kernels=reference, branch by branch, finds the kernel",
           .examine = examine_attention_parity},
          {.name = "long_context",
           .full = kFull,
           .budget_s = 60,
           .needs = {"environment"},
           .question = "Does a long sequence train in the memory that was planned for it?",
           .advice = "`triad plan` lists the planned memory, long_context/mem_step1.txt the memory in use",
           .examine = examine_long_context}};
}

std::vector<Phase> all_phases() {
  std::vector<Phase> all;
  const auto append = [&](const std::vector<Phase>& phases) { all.insert(all.end(), phases.begin(), phases.end()); };
  append(machine_phases());
  append(training_phases());
  append(backend_phases());
  append({branch_phase("cmp", "compressed"), branch_phase("sel", "selected"), branch_phase("win", "window")});
  append(equivalence_phases());
  append(number_phases());
  return all;
}

}  // namespace

const std::vector<Phase>& doctor_phases() {
  static const std::vector<Phase> phases = all_phases();
  return phases;
}

}  // namespace triad
