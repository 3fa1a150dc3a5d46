// Every key of a run's config, declared once with its help text and limits (model/config.h has those of the groups
// `model` and `nsa`). io/json_config.h reads, echoes and explains a group through its visit(). Only load_config.cpp
// includes this file, so a new help text recompiles no other.
#pragma once
#include <string>
#include <vector>

#include "io/json_config.h"
#include "train/config/config.h"

namespace triad {

template <class V>
void visit(DataComponent& c, V&& v) {
  v("path", c.path, "a string or a list of them", required());
  v("weight", c.weight,
    "share of the rows, relative to the other weights; all components have one, or none: then a share is that of the "
    "tokens",
    above(0));
  v("epochs", c.epochs, "the most epochs: a run that needs more ends at its start; not set: no limit", at_least(1));
  v("val_paths", c.val_paths, "as data.val_paths, for the component", Rule{});
}
// data.paths: a string, or a list of strings, which are one component together, and of objects. A component alone
// that only has a path is echoed as strings.
void read_value(const std::string& key, const Json& j, const Rule&, std::vector<DataComponent>& out);
Json objects_to_json(const std::vector<DataComponent>&);

template <class V>
void visit(DataConfig& c, V&& v) {
  v("kind", c.kind, "source of the tokens", required());
  v("paths", c.components,
    "files or globs of text or token shards, or a folder written by triad data. Objects in the list are components of "
    "a mixture, as all strings together: each row is drawn from one, in proportion to the weights",
    Rule{});
  v("format", c.format,
    "kind text: auto: content and name of a file decide whether it is text, one document, or JSONL, a record a line; "
    "text or jsonl: all files are",
    Rule{});
  v("val_paths", c.val_paths,
    "files of the validation split; not set: the validation shards listed in the shards' manifest.json, if any",
    Rule{});
  v("val_fraction", c.val_fraction, "fraction held out for validation if there are no val_paths",
    at_least(0).up_to(0.9));
  v("tokenizer", c.tokenizer,
    "byte, a tokenizer.json, or an encoder.json in the same folder as its vocab.bpe; none: tokens have no texts, as of "
    "a model imported without a tokenizer; not set: byte, or for shards the tokenizer named in their manifest.json",
    Rule{});
  v("separator", c.separator,
    "the token that precedes each document, such as <|doc|>; not set: the one that the tokenizer's file is known by, "
    "such as <|endoftext|>",
    Rule{});
  v("chat_template", c.chat_template,
    "kind text: how conversations (messages) are written: chatml, or a file with a chat template; not set: the "
    "template "
    "that train.init_from was trained with or imported with, or the one in the tokenizer's folder, else chatml",
    Rule{});
  v("learn", c.learn,
    "kind text: what is learned of conversations: assistant: all answers; last: the last answer; all: everything",
    Rule{});
  v("stall_s", c.stall_s, "seconds that a step waits for its tokens before the run fails", above(0).up_to(1 << 20));
  v("seed", c.seed, "seed of the split and of the order of sequences; -1: train.seed", at_least(-1));
  v("documents", c.documents,
    "attend_within: attention, positions and selection stay within a document, for text and for shards whose "
    "manifest.json names the separator; attend_across: a row is one sequence. Not set: attend_within if the documents "
    "are known, else attend_across; a resumed run keeps what it had",
    Rule{});
  v("packing", c.packing,
    "stream: rows are consecutive tokens, and a document that a row's end cuts continues in another row; best_fit: "
    "rows hold whole documents where one of a thousand fits; else the shortest is cut, and its rest is dropped. Not "
    "set: "
    "best_fit if the data begins with a conversation (messages) and all rows have one length, else stream; a resumed "
    "run "
    "keeps what it had",
    Rule{});
  v("max_documents", c.max_documents,
    "the most documents in a row. stream: a row with more is an error, only with attend_within; 0: as many as the data "
    "has. best_fit: a row that has as many is padded; 0: train.seq_len / 64, at least 8; -1: as many as the "
    "data's short documents need to fill a row, which is the default for conversations",
    at_least(-1).up_to(1 << 24));
  v("needle_task", c.needle_task,
    "kind needle: keys: the value of a key; queries: the values of several keys, one after the other at the end; "
    "variables: the value of a variable over a chain of assignments; counting: how often a key occurs; copy: a span "
    "of any tokens after a mark",
    Rule{});
  v("needle_pairs", c.needle_pairs,
    "kind needle: key-value pairs in a sequence, chains of variables, or keys that are counted; copy has one span",
    at_least(1).up_to(1 << 20));
  v("needle_questions", c.needle_questions,
    "kind needle: mean number of questions per key, where half of the keys have one question; of the other tasks: "
    "number of questions at the end, about different keys or chains; copy has one",
    at_least(1).up_to(1 << 20));
  v("needle_value_tokens", c.needle_value_tokens, "kind needle: tokens in a value, or in the span of copy",
    at_least(1).up_to(64));
  v("needle_hops", c.needle_hops,
    "kind needle, task variables: assignments of a variable to another, from the value to the question",
    at_least(1).up_to(1 << 10));
  v("needle_occurrences", c.needle_occurrences,
    "kind needle, task counting: a key occurs once to this many times, each equally likely",
    at_least(1).up_to(1 << 16));
  v("needle_depth", c.needle_depth,
    "kind needle: relative position, 0 to 1, of what is asked first, with its question at the end; -1: any position, "
    "and for task keys all pairs are queried",
    at_least(-1).up_to(1));
}

template <class V>
void visit(StageConfig& c, V&& v) {
  v("steps", c.steps, "optimizer steps of the stage", required(at_least(1)));
  v("seq_len", c.seq_len, "as train.seq_len, and its default; divides the longest of all stages",
    at_least(1).up_to(1 << 24));
  v("micro_batch_size", c.micro_batch_size, "as train.micro_batch_size, and its default", at_least(1).up_to(1 << 20));
  v("lr_factor", c.lr_factor, "multiplies the learning rate of the schedule", at_least(0));
  v("attention", c.attention,
    "dense: all layers of an NSA model have causal attention to the keys and values of the window branch, without "
    "gate; the parameters that this leaves out keep their values and moments. alternate: dense in odd steps, NSA in "
    "even ones. nsa, and the default: as the model is configured",
    Rule{});
}

template <class V>
void visit(LoraConfig& c, V&& v) {
  v("rank", c.rank, "rank of each adapter: rows of A, columns of B", required(at_least(1).up_to(1 << 16)));
  v("alpha", c.alpha, "an adapter's result is multiplied by alpha / rank; 0: rank", at_least(0));
  v("targets", c.targets,
    "the projections that have adapters: q_proj, k_proj and v_proj (of all branches), o_proj, gate_proj, up_proj and "
    "down_proj (mlp silu: fc1 and fc2), or all-linear for all of them",
    Rule{});
  v("rslora", c.rslora, "multiply by alpha / sqrt(rank) instead", Rule{});
  v("init_from", c.init_from,
    "a folder of PEFT (adapter_config.json, adapter_model.safetensors) with whose adapters this run starts; not set: A "
    "is drawn as PEFT draws it, and B is 0",
    Rule{});
}
template <>
inline constexpr bool json_config::is_object<LoraConfig> = true;

template <class V>
void visit(TrainConfig& c, V&& v) {
  v("steps", c.steps, "optimizer steps; may be absent with train.stages, as the sum of their steps",
    required(at_least(0)));
  v("seq_len", c.seq_len, "sequence length T, in tokens", required(at_least(1).up_to(1 << 24)));
  v("micro_batch_size", c.micro_batch_size, "sequences per rank (with dist.context per group of ranks) and micro-step",
    required(at_least(1).up_to(1 << 20)));
  v("accumulate_grad_batches", c.accumulate_grad_batches, "micro-steps (gradient accumulation) per optimizer step",
    at_least(1).up_to(1 << 20));
  v("stages", c.stages,
    "stages of the run, one after the other: a list of objects. Steps, moments and the position in the data continue "
    "from stage to stage; not set: one stage",
    Rule{});
  v("lr", c.lr, "peak learning rate", at_least(0));
  v("min_lr_fraction", c.min_lr_fraction, "learning rate at the end of the schedule, as a fraction of lr",
    at_least(0).up_to(1));
  v("warmup_steps", c.warmup_steps, "optimizer steps of linear warmup", at_least(0));
  v("schedule", c.schedule,
    "learning rate after the warmup: cosine and linear fall until train.steps; wsd (warmup, stable, decay) stays at lr "
    "and falls linearly in the last decay_fraction of the steps",
    Rule{});
  v("decay_fraction", c.decay_fraction,
    "schedule wsd: fraction of train.steps in which the learning rate falls; 0: it stays at lr", at_least(0).up_to(1));
  v("optimizer", c.optimizer,
    "adamw, or muon: Muon for the matrices of attention and MLP, each projection on its own, and AdamW for the rest "
    "(embedding, head, gate, phi, norms and biases); with the same lr and weight_decay",
    Rule{});
  v("beta1", c.beta1, "AdamW: decay rate of the first moment", at_least(0).up_to(0.999999));
  v("beta2", c.beta2, "AdamW: decay rate of the second moment", at_least(0).up_to(0.99999999));
  v("eps", c.eps, "AdamW: added to the denominator", above(0));
  v("weight_decay", c.weight_decay, "weight decay of tensors with two or more dimensions", at_least(0));
  v("grad_clip", c.grad_clip, "global gradient norm above which gradients are clipped; 0: no clipping", at_least(0));
  v("index_lr_factor", c.index_lr_factor,
    "nsa.selector index: multiplies the learning rate of the index, which AdamW updates and which is clipped by a norm "
    "of its own",
    at_least(0));
  v("seed", c.seed, "seed of the initial weights, and of the data unless data.seed is set", at_least(0));
  v("init_from", c.init_from,
    "path of a run or checkpoint whose weights this run starts from. Its parameters and tokenizer must be the same; "
    "any other key may differ. A dense model may begin an NSA model, whose gates, phi and index then start fresh, and "
    "three branches one softmax. Optimizer "
    "state, schedule and data start anew. A resumed run ignores this key, but with train.lora reads the frozen weights "
    "there again",
    Rule{});
  v("lora", c.lora,
    "train low-rank adapters (LoRA) of the layers' projections instead of the weights of train.init_from, which stay "
    "as they are; gates, phi and index are trained whole. An object, or null",
    Rule{});
  v("eval_every", c.eval_every, "optimizer steps between evaluations; 0: none", at_least(0));
  v("eval_batches", c.eval_batches, "micro-batches per evaluation", at_least(1).up_to(1 << 24));
  v("save_every", c.save_every, "optimizer steps between checkpoints; 0: none before the end", at_least(0));
  v("save_last", c.save_last, "also save a checkpoint at the end, so that a run with more steps can resume from it",
    Rule{});
  v("keep_last", c.keep_last, "number of newest checkpoints that are kept; 0: all", at_least(0));
  v("keep_every", c.keep_every, "also keep older checkpoints whose step is a multiple of this; 0: none", at_least(0));
  v("keep_best", c.keep_best,
    "save a checkpoint at each validation loss that is the lowest so far, and keep it until there is a lower one",
    Rule{});
  v("patience", c.patience,
    "end the run after this many evaluations in a row without a lower validation loss than before; 0: never",
    at_least(0));
  v("on_nonfinite", c.on_nonfinite, "what to do if the loss or the gradient norm is not finite: skip the step or stop",
    Rule{});
  v("allow_unsafe", c.allow_unsafe, "allow a long run without checkpoints, or in fp32 on a GPU", Rule{});
  v("moments_dtype", c.moments_dtype, "dtype in which AdamW's moments are stored; they are computed in fp32", Rule{});
  v("grads_dtype", c.grads_dtype,
    "dtype in which gradients are stored from their layer's backward to the update; bf16 needs runtime.precision bf16",
    Rule{});
  v("master_dtype", c.master_dtype,
    "fp32: the optimizer updates fp32 master weights; split: it gives the same bits in 1.875 bytes a parameter less, "
    "because of each master only what the bf16 weight lacks is stored (with dist.zero 3 the GPU saves nothing); none: "
    "it updates the bf16 weights, with stochastic rounding. split and none need runtime.precision bf16",
    Rule{});
  v("final_dtype", c.final_dtype, "dtype of the final weights' files; bf16 with train.master_dtype none", Rule{});
}

template <class V>
void visit(RuntimeConfig& c, V&& v) {
  v("device", c.device, "auto: a GPU if one is usable, else the CPU", Rule{});
  v("precision", c.precision,
    "dtype of weights and activations in the forward and backward; for the master weights see train.master_dtype",
    Rule{});
  v("deterministic", c.deterministic,
    "only true: results are always bitwise reproducible on the same machine with the same seed, and false is refused",
    Rule{});
  v("cuda_graph", c.cuda_graph,
    "on a GPU, capture a micro-step as a CUDA graph and replay it: same bits, less launch overhead", Rule{});
  v("asserts", c.asserts,
    "check on the device that tokens are in range, that selection lists are ascending, unique and causal, and that "
    "activations and their gradients are finite; the first violation ends the run, and the error names its layer, op "
    "and element",
    Rule{});
  v("kernels", c.kernels,
    "which kernels attention and matmul use: auto: the fastest ones for the shape and card; fused: the sm_90 kernels, "
    "and any other kernel counts as a fallback; general: kernels for any card and shape; reference: kernels in fp32. "
    "An object sets one of these values for each of cmp, sel, win (also used for dense attention) and matmul",
    Rule{});
  v("strict", c.strict, "fail, with op, shape and reason, if a call falls back from its fused kernel", Rule{});
  v("matmul_dtype", c.matmul_dtype,
    "fp8: the linear layers of attention and MLP multiply in e4m3, with a scale for each row, in forward and for all "
    "gradients; on a GPU that needs a Hopper card and runtime.precision bf16. bf16: all products are "
    "in runtime.precision, as those of head, gate, phi and index always are",
    Rule{});
  v("fp8_exclude", c.fp8_exclude, "with matmul_dtype fp8: layers that multiply in runtime.precision, as 0:1,15:16",
    Rule{});
  v("recompute", c.recompute,
    "activation recomputation in backward, to save memory: none, pointwise (norm and rotation of q and k, needs "
    "model.qk_norm), mlp, attention or block for all layers, or ranges of layers: 0:6=block,6:12=mlp",
    Rule{});
  v("offload", c.offload,
    "optimizer: master weights and moments are in pinned host memory, and pass through the GPU at each update", Rule{});
}

template <class V>
void visit(DistConfig& c, V&& v) {
  v("backend", c.backend, "auto: NCCL between GPUs; mpi: sums on the host, to rule out NCCL or the interconnect",
    Rule{});
  v("bucket_mb", c.bucket_mb, "MiB of gradients in a bucket, which is summed over the ranks as a unit",
    above(0).up_to(1 << 20));
  v("grad_dtype", c.grad_dtype, "dtype of gradients in the collectives; with dist.replicas, within a copy", Rule{});
  v("zero", c.zero,
    "what the ranks share instead of each having all (ZeRO's stages): 1: the optimizer's moments and master weights; "
    "2: the gradients too; 3: the weights too, which a layer gathers while it is in use",
    at_least(0).up_to(3));
  v("replicas", c.replicas,
    "copies of what dist.zero divides, each on as many adjacent ranks, such as those of a host: sums and gathers then "
    "stay within a copy, but for one sum of each rank's part of the gradients over the copies",
    at_least(1).up_to(1 << 20));
  v("replicas_grad_dtype", c.replicas_grad_dtype,
    "dtype of gradients in the sum over the copies of dist.replicas: bf16 halves what passes between hosts", Rule{});
  v("context", c.context,
    "number of adjacent ranks that share each sequence: each has a part of its tokens. It divides the number of ranks, "
    "and train.micro_batch_size counts the sequences of such a group.",
    at_least(1).up_to(1 << 16));
  v("timeout_s", c.timeout_s, "seconds that a collective may take before the run fails", at_least(1).up_to(1 << 20));
}

template <class V>
void visit(LogConfig& c, V&& v) {
  v("out_dir", c.out_dir, "the run's folder", required());
  v("every", c.every, "optimizer steps between rows of training.csv and progress lines", at_least(1));
  v("memory_every", c.memory_every,
    "optimizer steps between memory snapshots, in addition to those at the start; 0: none", at_least(0));
  v("heartbeat_every", c.heartbeat_every,
    "optimizer steps between heartbeats; 0: none; -1: each of the first 1,000 steps, then every 10th up to "
    "10,000, every 100th up to 100,000 and so on, and at least one per minute",
    at_least(-1));
  v("route_steps", c.route_steps, "number of first steps in which the log lists newly chosen kernels", at_least(0));
  v("csv", c.csv, "write the run's CSV files", Rule{});
  v("diagnostics", c.diagnostics,
    "list of what to record in addition: ledger: whether each gradient has arrived, its norm, and whether it is zero "
    "or not finite; layer_norms: the gradient norm of each layer; backward: the times of each layer's ops, in "
    "traces.log; buckets: times and checksums of the gradient buckets",
    Rule{});
  v("tensorboard", c.tensorboard, "write TensorBoard event files to tb/", Rule{});
  v("samples", c.samples,
    "list of prompts whose continuation the model writes at every evaluation, greedily, to samples.jsonl, the log and "
    "TensorBoard",
    Rule{});
  v("sample_tokens", c.sample_tokens, "most tokens of such a continuation", at_least(1).up_to(1 << 20));
  v("stats", c.stats,
    "statistics of gates, selection lists and a taught index by layer, and of casts to fp8: gates.csv, k_stats.csv, "
    "index.csv, fp8.csv, heartbeats, TensorBoard",
    Rule{});
  v("hang_s", c.hang_s, "seconds without progress after which a rank counts as hung", above(0).up_to(1 << 20));
  v("slow_s", c.slow_s, "a step counts as slow if it takes at least this many seconds", above(0).up_to(1 << 20));
  v("slow_factor", c.slow_factor,
    "a step counts as slow only if it also takes at least this many times the median step time",
    at_least(1).up_to(1 << 20));
  v("throughput_drop", c.throughput_drop, "anomaly: tokens/s below this fraction of the usual rate; 0: off",
    at_least(0).up_to(1));
  v("plateau_steps", c.plateau_steps,
    "anomaly: the mean loss of this many steps is not below that of as many steps before; 0: off",
    at_least(0).up_to(1 << 24));
  v("creep_mib", c.creep_mib, "anomaly: memory has grown by this many MiB in 500 steps, in every 100 of them",
    above(0));
  v("on_anomaly", c.on_anomaly,
    "report: log an anomaly; stop: also end the run, with a checkpoint, exit code 1 and .anomaly_type", Rule{});
}

// Calls v(name, group) for each group of a config file, in the order in which config.json lists them.
template <class V>
void visit_groups(Config& c, V&& v) {
  v("model", c.model);
  v("nsa", c.model.nsa);
  v("data", c.data);
  v("train", c.train);
  v("runtime", c.runtime);
  v("dist", c.dist);
  v("log", c.log);
}

}  // namespace triad
