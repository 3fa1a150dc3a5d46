#!/usr/bin/env bash
# Configures and builds one preset of CMakePresets.json, and prints the preset's name as the last line of standard output.
#   tools/build.sh [PRESET] [TARGET...]    default: preset cuda if nvcc is found, else cpu; all targets
set -euo pipefail
source "$(dirname -- "$0")/common.sh"
cd "$(dirname -- "$script")/.."

preset=${1:-}
case $preset in
  --help | -h) print_help; exit 0 ;;
  -*) usage_error "unknown option $preset" ;;
esac
shift || true
if [ -z "$preset" ]; then
  if has_nvcc; then
    preset=cuda
  else
    preset=cpu
    echo "no nvcc: building for the CPU, without the .cu files" >&2
  fi
fi
for program in cmake ninja g++; do
  command -v "$program" >/dev/null || fail "$program is missing: tools/install.sh installs it"
done
check_checkout
cache=build/$preset/CMakeCache.txt
if [ -f "$cache" ]; then
  home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$cache")
  [ "$(realpath -m -- "$home")" = "$(pwd -P)" ] ||
    fail "build/$preset was made for $home, and this checkout is at $(pwd -P) now: rm -r build/$preset, then build again"
fi
[ -z "${CUDA_PATH:-}" ] || export CUDACXX=${CUDACXX:-$CUDA_PATH/bin/nvcc}
cmake --preset "$preset" >&2
cmake --build --preset "$preset" ${@:+--target "$@"} >&2
echo "$preset"
