#!/usr/bin/env bash
# Checks what ctest makes of tests that skip, fail or both, with the properties that CMakeLists.txt gives to tests.
#   tests/checks/skips.sh CTEST PROPERTIES TRIAD_TESTS      PROPERTIES: a list of CMake, separated by semicolons
set -euo pipefail
ctest=$1 properties=$2 tests=$(realpath "$3")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
words=()
IFS=';' read -ra list <<<"$properties"
for word in "${list[@]}"; do words+=("[==[$word]==]"); done
# expect RESULT NAME COMMAND ARGS...: adds a test, and what ctest shall print of it.
expect() {
  echo "add_test([==[$2]==] $(printf '[==[%s]==] ' "${@:3}"))" >>"$scratch/CTestTestfile.cmake"
  echo "set_tests_properties([==[$2]==] PROPERTIES ${words[*]})" >>"$scratch/CTestTestfile.cmake"
  expected+=("$2 $1")
}
expected=()
expect Passed passed "$tests" "skip example: passed"
expect Skipped skipped "$tests" "skip example: skipped"
expect Failed failed "$tests" "skip example: failed"
expect Failed failed_and_skipped "$tests" "skip example: failed and skipped"
expect Failed checked_and_skipped "$tests" "skip example: checked and skipped"
expect Failed says_so_and_passes sh -c 'echo "SKIPPED: an example"'
expect Failed says_so_and_fails sh -c 'echo "SKIPPED: an example"; exit 1'
expect Skipped script_skips sh -c 'echo "SKIPPED: an example"; exit 4'
found=$({ "$ctest" --test-dir "$scratch" 2>&1 || true; } | sed -nE 's/^ *[0-9]+\/[0-9]+ Test +#[0-9]+: ([a-z_]+) \.*[ *]*(Passed|Skipped|Failed).*/\1 \2/p')
diff <(printf '%s\n' "${expected[@]}") <(echo "$found") || { echo "> as ctest counts, < as it should"; exit 1; }
