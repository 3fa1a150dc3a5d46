#!/usr/bin/env bash
# Everything of tools/pytorch on a GPU, with a short summary: the tests with a wheel of one build, then times.
#   tests/pytorch/on_gpu.sh [BUILD] [FOLDER FOR LOGS]          default: build/cuda, a new folder in /tmp
# PYTHON names the interpreter (default: python3), which needs torch. With MEMCHECK=1 a few calls also run under
# compute-sanitizer, which takes minutes.
set -u
cd "$(dirname "$0")/../.."
build=${1:-build/cuda} logs=${2:-$(mktemp -d)} python=${PYTHON:-python3} failed=0
mkdir -p "$logs"
step() { printf '%s: ' "$1"; shift; local begin=$SECONDS; if "$@" > "$log" 2>&1; then printf 'ok'; else printf 'FAILED'; failed=1; fi; echo " ($((SECONDS - begin)) s, $log)"; }

log=$logs/wheel.log
step "wheel" env TRIAD_NSA_LIBRARY="$PWD/$build/libtriad_nsa.so" "$python" tools/pytorch/build_wheel.py "$logs/dist"
log=$logs/tests.log
step "tests" timeout 170 "$python" tests/pytorch/test_pytorch.py --verbose --library "$build/libtriad_nsa.so" --program "$build/triad"
grep -E '^(FAIL|ERROR):|^Ran|^OK|^FAILED|times PyTorch|largest difference' "$log"
rm -rf "$logs/site" && "$python" -m zipfile -e "$logs"/dist/*.whl "$logs/site"
log=$logs/bench.log
step "bench" env PYTHONPATH="$logs/site${PYTHONPATH:+:$PYTHONPATH}" timeout 170 "$python" tools/pytorch/bench.py --triad "$build/triad" --json "$logs/bench.jsonl"
cat "$log"
if [ "${MEMCHECK:-0}" = 1 ]; then
  log=$logs/memcheck.log
  step "memcheck" env PYTHONPATH="$logs/site${PYTHONPATH:+:$PYTHONPATH}" PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 280 compute-sanitizer \
    --tool memcheck --error-exitcode 9 "$python" tests/pytorch/test_pytorch.py gpu_tests.Gpu.test_matches_cpu gpu_tests.Gpu.test_same_bits
  grep -E 'ERROR SUMMARY|^Ran|^OK|^FAILED' "$log"
fi
exit $failed
