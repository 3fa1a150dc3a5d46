#!/usr/bin/env bash
# Trains the runs of a list on all GPUs of this machine, each run on one GPU, in the list's order.
#   tests/baselines/curves/queue.sh FOLDER_OF_SHARDS OUT LIST      (README.md in this folder describes the shards)
# A line of LIST is: NAME CONFIG [ARGUMENT of triad train]...; lines that begin with # are comments. A run goes to OUT/NAME,
# one that is complete is skipped, and none begins that would end after LIMIT seconds (it is said to take SECONDS_EACH). At
# the end OUT/results.tar has the logs and tables, without weights, and a table of validation losses is printed.
set -u
shards=$(realpath "$1"); mkdir -p "$2"; out=$(realpath "$2") list=$(realpath "$3")
cd "$(dirname "$0")/../../.." || exit
triad=$(realpath "${TRIAD:-build/cuda/triad}")
limit=${LIMIT:-525} each=${SECONDS_EACH:-130} begin=$(date +%s)
mapfile -t runs < <(grep -v -e '^ *#' -e '^ *$' "$list")
echo 0 > "$out/next"

worker() {  # GPU
  while exec 9>> "$out/lock" && flock 9 && i=$(< "$out/next") && [ "$i" -lt ${#runs[@]} ]; do
    echo $((i + 1)) > "$out/next"
    exec 9>&-
    read -ra run <<< "${runs[i]}"
    name=${run[0]}
    [ -e "$out/$name/metrics.json" ] && continue
    left=$((begin + limit - $(date +%s)))
    [ "$left" -ge "$each" ] || { echo "$name: no time is left"; continue; }
    CUDA_VISIBLE_DEVICES=$1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} timeout -k 8 $((left - 8)) "$triad" train "${run[@]:1}" \
      --overwrite --set log.out_dir="$out/$name" --set "data.paths=[\"$shards/train_*.bin\"]" \
      --set "data.val_paths=[\"$shards/val_*.bin\"]" --set train.save_every=0 --set train.allow_unsafe=true \
      > "$out/$name.log" 2>&1
    code=$?
    [ $code = 0 ] || tail -n 1 "$out/$name.log"
    echo "$name: exit code $code, $((begin + limit - $(date +%s))) s left"
  done
}
IFS=, read -ra gpus <<< "${CUDA_VISIBLE_DEVICES-$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null | paste -sd,)}"
for gpu in "${gpus[@]:-}"; do worker "$gpu" & done
wait
rm -f "$out/next" "$out/lock"
(cd "$out" && find . -name '*.csv' -o -name '*.log' -o -name 'heartbeat_*.jsonl' -o -name 'config.json' | tar cf results.tar -T -)
for line in "${runs[@]}"; do
  read -ra run <<< "$line"
  losses=$(tail -q -n +2 "$out/${run[0]}/val.csv" 2> /dev/null | awk -F, '{ printf "  %s: %.4f", $1, $2 }')
  printf '%-24s%s\n' "${run[0]}" "$losses"
done
