#!/usr/bin/env bash
# Measures and tests a build on all GPUs of this machine, of which there should be four or eight, in three calls of ten
# minutes at most:
#   tests/baselines/many_gpus.sh tests|scale|context OUT      (PRINT=1: prints the commands only)
# tests: the tests that need several GPUs, the sanitizer on a step with replicas, gradients of a shared sequence.
# scale: M7C on 1, 2, 4 and 8 GPUs, Llama 8B in shards, its plans beside it. context: attention and M7C on long sequences.
# Each command's output goes to OUT/NAME.log, measured rows to OUT/rows.jsonl; the end codes are in OUT/codes.txt.
set -u
part=${1:?tests, scale or context} out=${2:?a folder for the results}
mkdir -p "$out" && out=$(realpath "$out")
cd "$(dirname "$0")/../.." || exit
triad=${TRIAD:-build/cuda/triad} checks=${TRIAD_TESTS:-build/cuda/triad_tests}
gpus=${GPUS:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | wc -l)}
[ "$gpus" -ge 1 ] || { echo "many_gpus.sh: no GPU is found (nvidia-smi); GPUS=8 PRINT=1 prints the commands for eight" >&2; exit 2; }
failed=0

run() {  # NAME COMMAND...
  local name=$1 begin=$SECONDS code=0
  shift
  [ -z "${PRINT:-}" ] || { printf '%s: %s\n' "$name" "$*"; return; }
  timeout -k 10 "${LIMIT:-300}" "$@" > "$out/$name.log" 2>&1 || code=$?
  [ $code = 0 ] || failed=1
  printf '%s: exit code %d, %d s\n' "$name" $code $((SECONDS - begin)) | tee -a "$out/codes.txt"
}
ranks() {  # NAME RANKS COMMAND...
  local name=$1 n=$2
  shift 2
  run "$name" mpirun --allow-run-as-root --oversubscribe --bind-to none -np "$n" "$@"
}
counts() { for n in 1 2 4 8; do [ "$n" -gt "$gpus" ] || echo "$n"; done; }
# Largest relative L2 difference between the gradients in two files of triad grads; fails above 5e-5.
compare='
import json, sys, numpy
def tensors(path):
    data = open(path, "rb").read()
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = {n: e for n, e in json.loads(data[8:begin]).items() if n.startswith("grad") and e["dtype"] == "F32"}
    return {n: numpy.frombuffer(data[begin + e["data_offsets"][0]:begin + e["data_offsets"][1]], "<f4") for n, e in entries.items()}
a, b = tensors(sys.argv[1]), tensors(sys.argv[2])
assert a and a.keys() == b.keys()
worst = max((float(numpy.linalg.norm(a[n] - b[n]) / numpy.linalg.norm(a[n])), n) for n in a if a[n].any())
print(len(a), "gradients, largest difference", *worst)
sys.exit(worst[0] > 5e-5)
'
rows=(--append "$out/rows.jsonl")

case $part in
tests)
  for n in $(counts | tail -n +2); do run "gpu$n" "$checks" "[gpu$n]"; done
  # NCCL asks the driver for kernels that it lacks: such errors of calls are not reported.
  [ "$gpus" -lt 4 ] ||
    ranks memcheck 4 compute-sanitizer --target-processes all --report-api-errors no --error-exitcode 9 \
      "$triad" train configs/tiny.json --overwrite --set runtime.device=cuda --set dist.zero=2 --set dist.replicas=2 --set train.steps=2 \
      --set log.out_dir="$out/memcheck"
  # Gradients in f32 of one sequence on one GPU and on four that share it, the latter twice.
  text=$out/text.txt
  [ -n "${PRINT:-}" ] || find kernels model train -name '*.cpp' -print0 | sort -z | xargs -0 cat > "$text"
  run shards "$triad" data --input "$text" --tokenizer byte --val-fraction 0.01 --out "$out/shards"
  run trained "$triad" train configs/m7c_125m.json --overwrite --set train.steps=150 --set train.seq_len=8192 \
    --set train.micro_batch_size=1 --set data.kind=shards --set "data.paths=[\"$out/shards/train_*.bin\"]" \
    --set model.vocab_size=256 --set log.out_dir="$out/trained"
  grads=("$triad" grads --checkpoint "$out/trained" --tokens "$out/shards/train_000000.bin" --batch 1 --seq 65536 --device cuda)
  run grads_one "${grads[@]}" --out "$out/one.safetensors"
  [ "$gpus" -lt 4 ] || for again in a b; do
    ranks "grads_four_$again" 4 "${grads[@]}" --context 4 --out "$out/four_$again.safetensors"
  done
  [ "$gpus" -lt 4 ] || run gradients_of_one python3 -c "$compare" "$out/one.safetensors" "$out/four_a.safetensors"
  [ "$gpus" -lt 4 ] || run same_bits cmp "$out/four_a.safetensors" "$out/four_b.safetensors"
  ;;
scale)
  for n in $(counts); do
    for graph in true false; do
      ranks "m7c_${n}_graph_$graph" "$n" "$triad" bench step configs/m7c_125m.json --no-split \
        --set runtime.cuda_graph=$graph "${rows[@]}"
    done
  done
  eight_b=(configs/llama_8b.json --set train.seq_len=8192 --set train.micro_batch_size=1
    --set train.accumulate_grad_batches=1 --set runtime.recompute=block --set dist.zero=3)
  for n in $(counts | tail -n +2); do
    ranks "llama_8b_$n" "$n" "$triad" bench step "${eight_b[@]}" --steps 8 --warm-up 2 "${rows[@]}"
    run "llama_8b_plan_$n" "$triad" plan "${eight_b[@]}" --ranks "$n"
  done
  [ "$gpus" -lt 8 ] || ranks llama_8b_replicas 8 "$triad" bench step "${eight_b[@]}" --set dist.replicas=2 \
    --set dist.grad_dtype=bf16 --steps 8 --warm-up 2 "${rows[@]}"
  ;;
context)
  n=$(counts | tail -n 1)
  ranks "attention_1m_context_$n" "$n" "$triad" bench attention --shapes 1x1048576x64x4x128 --context "$n" "${rows[@]}"
  for tokens in 1048576 4194304; do
    ranks "m7c_${tokens}_context_$n" "$n" "$triad" bench step configs/m7c_1m.json --no-split --steps 3 --warm-up 1 \
      --set train.seq_len=$tokens --set dist.context="$n" --set dist.zero=1 "${rows[@]}"
  done
  ;;
*) echo "many_gpus.sh: $part: expected tests, scale or context" >&2; exit 2 ;;
esac
exit $failed
