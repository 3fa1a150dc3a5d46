#!/usr/bin/env bash
# Installs missing packages, builds everything (the .cu files if nvcc is found), and runs every test. Tests that need a GPU
# are counted as skipped if there is none. The last line is "N passed, N failed, N skipped".
#   tools/test.sh [CTEST OPTION...]      for example -R tokenizers
set -euo pipefail
source "$(dirname -- "$0")/common.sh"
cd "$(dirname -- "$script")/.."
case ${1:-} in --help | -h) print_help; exit 0 ;; esac

check_checkout
echo "1/3 install what is missing"
tools/install.sh
echo "2/3 build"
preset=$(tools/build.sh "" | tail -n 1)
echo "3/3 test"
log=build/$preset/ctest.log
status=0
# Runs one more test at a time than there are cores; a test counts as 4, and one that mostly waits as 2.
ctest --test-dir "build/$preset" --output-on-failure -j "$((4 * ($(nproc) + 1)))" "$@" 2>&1 | tee "$log" || status=$?

passed=$(grep -cE '^ *[0-9]+/[0-9]+ Test .* Passed ' "$log" || true)
skipped=$(grep -cE '^ *[0-9]+/[0-9]+ Test .*\*\*\*Skipped ' "$log" || true)
total=$(grep -cE '^ *[0-9]+/[0-9]+ Test ' "$log" || true)
failed=$((total - passed - skipped))
[ "$total" -gt 0 ] || { echo "no test was run" >&2; status=1; }
echo "$passed passed, $failed failed, $skipped skipped"
exit "$status"
