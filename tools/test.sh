#!/usr/bin/env bash
# Installs what is missing, builds everything (the .cu files where nvcc is found), and runs every test. Tests that need a GPU
# are skipped, and counted as skipped, where there is none. Ends in the line "N passed, N failed, N skipped".
set -euo pipefail
cd "$(dirname "$0")/.."

tools/install.sh
preset=$(tools/build.sh "" | tail -n 1)
log=build/$preset/ctest.log
status=0
# One more at a time than there are cores: some tests wait more than they compute.
ctest --test-dir "build/$preset" --output-on-failure -j "$(($(nproc) + 1))" "$@" 2>&1 | tee "$log" || status=$?

passed=$(grep -cE '^ *[0-9]+/[0-9]+ Test .* Passed ' "$log" || true)
skipped=$(grep -cE '^ *[0-9]+/[0-9]+ Test .*\*\*\*Skipped ' "$log" || true)
total=$(grep -cE '^ *[0-9]+/[0-9]+ Test ' "$log" || true)
failed=$((total - passed - skipped))
[ "$total" -gt 0 ] || { echo "no test was run" >&2; status=1; }
echo "$passed passed, $failed failed, $skipped skipped"
exit "$status"
