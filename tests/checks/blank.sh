#!/usr/bin/env bash
# A tree whose path has a blank: its commands write where they should and nowhere else, and tests get paths without one.
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
# MPI is looked for by running its compiler: half of the time, and nothing here needs it.
cmake --preset cpu -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON >"$scratch.log" 2>&1 &&
  cmake --build --preset cpu --target revision triad_faults >>"$scratch.log" 2>&1 || { cat "$scratch.log"; exit 1; }
rm "$scratch.log"
grep -qE '^#define TRIAD_GIT "[0-9a-f]*"$' build/cpu/revision.h || { echo "revision.h: $(cat build/cpu/revision.h)"; exit 1; }
mv build "$scratch.build" && [ "$(ls "$tree" "$scratch")" = "$there" ] || { echo "not there before:"; ls "$tree" "$scratch"; exit 1; }
