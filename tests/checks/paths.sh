#!/usr/bin/env bash
# Configures a checkout whose path holds words that also choose sources (scale, sm90, ...), and checks that its targets
# have the sources that they have in a build.
#   tests/checks/paths.sh SOURCE_FOLDER BUILD_FOLDER [CMAKE]
set -euo pipefail
source=$(realpath "${1:?the source folder}") build=$(realpath "${2:?the build folder}") cmake=${3:-cmake}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tree="$scratch/scale/sm90/fmt_code/fault_injection/backend_cuda/tree"
mkdir -p "$tree"
for entry in "$source"/[!.]* "$source/.git"; do
  [ "${entry##*/}" = build ] || ln -s "$entry" "$tree"
done
options=()
while IFS= read -r line; do options+=("-D$line"); done < <(grep -E '^(TRIAD_[A-Z]+|CMAKE_(BUILD_TYPE|MAKE_PROGRAM|(CXX|CUDA)_COMPILER)):' "$build/CMakeCache.txt")
"$cmake" -G "$(sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' "$build/CMakeCache.txt")" "${options[@]}" -S "$tree" -B "$scratch/build" \
  >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
# The objects, each of which names its target and its source.
objects() { sed -n 's/.* -o \([^ ]*\).*/\1/p' "$1/compile_commands.json" | sort; }
[ "$(objects "$build" | wc -l)" -gt 300 ] || { echo "$build/compile_commands.json lists too few objects"; exit 1; }
diff <(objects "$build") <(objects "$scratch/build") || { echo "> at $tree, < at $source"; exit 1; }
