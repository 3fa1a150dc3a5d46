#!/usr/bin/env bash
# Everything of tools/pytorch on a GPU, with a short summary: the tests with a wheel, then times.
#   tests/pytorch/on_gpu.sh [BUILD] [FOLDER FOR LOGS]          default: build/cuda, a new folder in /tmp
# PYTHON names the interpreter (default: python3), which needs torch. WHEEL names a wheel that exists; otherwise one is made
# of BUILD/libtriad_nsa.so. Without BUILD/triad, what compares with the engine is left out. With MEMCHECK=1 a few calls also
# run under compute-sanitizer, which takes minutes.
set -u
cd "$(dirname "$0")/../.."
build=$(realpath "${1:-build/cuda}") logs=${2:-$(mktemp -d)} python=${PYTHON:-python3} wheel=${WHEEL:-} failed=0
mkdir -p "$logs"
step() {
  local name=$1 begin=$SECONDS result=ok
  shift
  "$@" > "$logs/$name.log" 2>&1 || { result=FAILED; failed=1; }
  echo "$name: $result ($((SECONDS - begin)) s, $logs/$name.log)"
}
program=() triad=()
if [ -x "$build/triad" ]; then program=(--program "$build/triad") triad=(--triad "$build/triad"); fi

if [ -z "$wheel" ]; then
  step wheel env TRIAD_NSA_LIBRARY="$build/libtriad_nsa.so" "$python" tools/pytorch/build_wheel.py "$logs/dist"
  wheel=$(ls "$logs"/dist/*.whl) || exit 1
fi
rm -rf "$logs/site"
"$python" -m zipfile -e "$wheel" "$logs/site" || exit 1
export PYTHONPATH="$logs/site${PYTHONPATH:+:$PYTHONPATH}"
step tests timeout 300 "$python" tests/pytorch/test_pytorch.py --verbose ${program[@]+"${program[@]}"}
grep -E '^(FAIL|ERROR):|^Ran|^OK|^FAILED|times PyTorch|largest difference' "$logs/tests.log"
step bench timeout 300 "$python" tools/pytorch/bench.py ${triad[@]+"${triad[@]}"} --json "$logs/bench.jsonl"
cat "$logs/bench.log"
if [ "${MEMCHECK:-0}" = 1 ]; then
  step memcheck env PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 500 compute-sanitizer --tool memcheck --error-exitcode 9 "$python" \
    tests/pytorch/test_pytorch.py gpu_tests.Gpu.test_matches_cpu gpu_tests.Gpu.test_same_bits \
    block_sparse_gpu_tests.BlockSparseGpu.test_matches_cpu block_sparse_gpu_tests.BlockSparseGpu.test_same_bits
  grep -E 'ERROR SUMMARY|^Ran|^OK|^FAILED' "$logs/memcheck.log"
fi
exit $failed
