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
  preset=cuda
  if problem=$(nvcc_problem) && [ -n "$problem" ]; then
    preset=cpu
    echo "building for the CPU, without the .cu files: $problem" >&2
  fi
fi
for program in cmake ninja g++; do
  command -v "$program" >/dev/null || fail "$program is missing: tools/install.sh installs it"
done
# need PROGRAM VERSION FOUND: fails if the version that was found is below; empty if it is not known.
need() { at_least "${3:-$2}" "$2" || fail "$(command -v "$1") is $3, and $2 or newer is needed"; }
need cmake 3.25 "$(cmake --version | sed -n 's/^cmake version \([0-9.]*\).*/\1/p')"
[ -n "${CXX:-}" ] || need g++ 12 "$(g++ -dumpfullversion | grep -xE '[0-9.]+')"
check_checkout
cache=build/$preset/CMakeCache.txt
if [ -f "$cache" ]; then
  home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$cache")
  [ "$(realpath -m -- "$home")" = "$(pwd -P)" ] ||
    fail "build/$preset was made for $home, and this checkout is at $(pwd -P) now: rm -r build/$preset, then build again"
fi
options=()
if [ "$preset" = cuda ]; then
  problem=$(nvcc_problem)
  [ -z "$problem" ] || fail "$problem"
  CUDACXX=$(find_nvcc)
  export CUDACXX
fi
if [ "$(uname -m)" = x86_64 ] && ! grep -qw avx2 /proc/cpuinfo; then
  echo "this CPU has no AVX2: the program is built without it, and is slower" >&2
  options=(-DTRIAD_MARCH=x86-64)
fi
cmake --preset "$preset" "${options[@]}" >&2
cmake --build --preset "$preset" ${@:+--target "$@"} >&2
echo "$preset"
