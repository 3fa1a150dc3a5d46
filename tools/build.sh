#!/usr/bin/env bash
# Builds one preset (default: cuda where nvcc is found, else cpu) and prints its name on the last line.
#   tools/build.sh [PRESET] [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/.."

preset=${1:-}
shift || true
if [ -z "$preset" ]; then
  if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
    preset=cuda
  else
    preset=cpu
    echo "no nvcc: building without CUDA, the .cu files are left out" >&2
  fi
fi
cmake --preset "$preset" >&2
cmake --build --preset "$preset" ${@:+--target "$@"} >&2
echo "$preset"
