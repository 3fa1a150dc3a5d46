#!/usr/bin/env bash
# Trains NSA and dense attention on the same text, seed and steps, at T = 2,048 and 8,192, for the curves of this folder.
#   tests/baselines/curves/run.sh FOLDER_OF_TEXT OUT      (README.md in this folder describes the text)
# With two GPUs NSA uses the first and dense the second. CONFIG is another config, which both sides take, each with its own
# model.attention; an empty STEPS leaves the config's steps; MORE adds arguments. The script ends within LIMIT seconds; OUT
# then holds the finished runs, and the losses by position of a pair that is complete. A later call skips runs that are
# complete, regardless of their number of steps.
set -u
text=$(realpath "$1"); mkdir -p "$2"; out=$(realpath "$2")
cd "$(dirname "$0")/../../.."
triad=$(realpath "${TRIAD:-build/cuda/triad}")
config=${CONFIG:-configs/m7c_bytes.json} steps=${STEPS-3200} limit=${LIMIT:-525}
# Each entry: T:sequences a step[:steps[:F]]. With F the run starts from the weights of the run at F tokens, warms up for
# 100 steps and is named T_from_F.
read -ra lengths <<< "${LENGTHS:-2048:16 8192:4:3600:2048}"
read -ra more <<< "${MORE:-}"  # further arguments of triad train
deadline=$(($(date +%s) + limit))
left() { echo $(($1 + deadline - $(date +%s))); }

if [ ! -e "$out/shards/manifest.json" ]; then
  mapfile -t files < <(cd "$text" && LC_ALL=C find . -type f -size +0 -printf '%P\n' | LC_ALL=C sort)
  (cd "$text" && timeout 60 "$triad" data --input "${files[@]}" --val-fraction 0.02 --out "$out/shards" --save-seconds 1000) || exit
fi

chain() {  # attention, GPU
  for length in "${lengths[@]}"; do
    IFS=: read -r t sequences n from <<< "$length"
    n=${n:-$steps}
    name=$1_$t${from:+_from_$from} run=$out/$1_$t${from:+_from_$from}
    [ -e "$run/metrics.json" ] && continue
    seconds=$(left -15)  # a run that is stopped needs time to write a checkpoint; timeout 0 would mean no limit
    [ "$seconds" -gt 5 ] || { echo "$name: no time is left"; continue; }
    CUDA_VISIBLE_DEVICES=$2 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} timeout -k 8 "$seconds" "$triad" train \
      "$config" --overwrite --set model.attention="$1" --set train.seq_len="$t" \
      --set train.micro_batch_size="$sequences" --set train.eval_batches=$((2621440 / t / sequences)) \
      ${n:+--set train.steps="$n"} --set log.out_dir="$run" \
      ${from:+--set train.init_from="$out/$1_$from" --set train.warmup_steps=100} \
      --set "data.paths=[\"$out/shards/train_*.bin\"]" --set "data.val_paths=[\"$out/shards/val_*.bin\"]" \
      --set train.save_every=0 --set train.allow_unsafe=true --set log.heartbeat_every=1 "${more[@]}" > "$out/$name.log" 2>&1
    echo "$name: exit code $?, $(left 0) s left"
  done
}
IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | paste -sd,)}"
chain nsa "${gpus[0]-}" &
[ ${#gpus[@]} -lt 2 ] && wait  # one GPU: one after the other
chain dense "${gpus[1]-${gpus[0]-}}" &
wait

# The difference of a pair's losses by position, on all held-out bytes.
against() {  # name, GPU
  CUDA_VISIBLE_DEVICES=$2 timeout 60 "$triad" eval --checkpoint "$out/nsa_$1" --against "$out/dense_$1" --seq "${1%%_*}" \
    --batch 4 --data "$out/shards/val_*.bin" --dtype bf16 | tee "$out/against_$1.txt"
}
names=()
for length in "${lengths[@]}"; do
  IFS=: read -r t _ _ from <<< "$length"
  t=$t${from:+_from_$from}
  names+=("$t")
  [ -e "$out/nsa_$t/model.safetensors" ] && [ -e "$out/dense_$t/model.safetensors" ] && against "$t" "${gpus[0]-}"
  [ -e "$out/nsa_$t/val.csv" ] && [ -e "$out/dense_$t/val.csv" ] &&
    timeout 10 "$triad" report "$out/nsa_$t" --vs "$out/dense_$t" --out "$out/report_$t.html"
done
python3 tests/baselines/curves/summary.py "$out" "${names[@]}"
