#!/usr/bin/env bash
# Configures and partly builds a checkout whose path contains a blank, and checks that nothing is written outside of build/.
#   tests/checks/blank.sh SOURCE_FOLDER
set -euo pipefail
source=$(realpath "${1:?the source folder}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tree="$scratch/my tree"
mkdir "$tree"
for entry in "$source"/[!.]* "$source/.git"; do
  [ "${entry##*/}" = build ] || ln -s "$entry" "$tree"
done
there=$(ls "$tree" "$scratch")
cd "$tree"
# Without MPI, whose detection runs a compiler and takes half of the time.
cmake --preset cpu -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON >"$scratch.log" 2>&1 &&
  cmake --build --preset cpu --target revision triad_faults >>"$scratch.log" 2>&1 || { cat "$scratch.log"; exit 1; }
rm "$scratch.log"
grep -qE '^#define TRIAD_GIT "[0-9a-f]*"$' build/cpu/tools/revision.h || { echo "revision.h: $(cat build/cpu/tools/revision.h)"; exit 1; }
mv build "$scratch.build" && [ "$(ls "$tree" "$scratch")" = "$there" ] || { echo "not there before:"; ls "$tree" "$scratch"; exit 1; }
