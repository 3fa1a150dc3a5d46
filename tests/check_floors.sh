#!/usr/bin/env bash
# The floors of the house: a file includes its own folder and the floors below, never up, never sideways.
#   4 tools/ tests/   3 train/   2 model/ (not io/)   1 kernels/ | io/   0 engine/
cd "${1:?the source folder}" || exit 1
declare -A allowed=(
  [engine]="engine" [kernels]="engine|kernels" [io]="engine|io" [model]="engine|kernels|model"
  [train]="engine|kernels|io|model|train" [tools]="engine|kernels|io|model|train|tools"
  [tests]="engine|kernels|io|model|train|tests")
status=0
for folder in "${!allowed[@]}"; do
  # Every quoted include has to start with an allowed folder: paths start at the root.
  bad=$(find "$folder" -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs -r grep -nE '^ *#include "' |
    grep -vE "#include \"(${allowed[$folder]})/")
  if [ -n "$bad" ]; then
    echo "$folder/ may include ${allowed[$folder]//|/, } only:"
    echo "$bad"
    status=1
  fi
done
[ "$status" -eq 0 ] && echo "every include keeps to its floor"
exit "$status"
