#!/usr/bin/env bash
# Checks the order of the folders: a file may include headers of its own folder and of those below it in this order.
#   4 tools/ tests/   3 train/   2 model/ (not io/)   1 kernels/ | io/   0 engine/
# The same holds for the rooms of kernels/. Portable CUDA includes no Hopper code, and decode/ and library/ are included by no other room.
#   tests/checks/floors.sh SOURCE_FOLDER
cd "${1:?the source folder}" || exit 1
status=0

# check NAME ALLOWED FILES: fails unless every quoted include in FILES (one path a line) starts with a folder of ALLOWED.
check() {
  local bad
  bad=$(xargs -r grep -HnE '^ *#include "' <<<"$3" | grep -vE "#include \"($2)")
  [ -z "$bad" ] && return
  echo "$1 may include ${2//|/, } only:"
  echo "$bad"
  status=1
}
sources() { find "$@" -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh'; }

declare -A folders=(
  [engine]="engine/" [kernels]="engine/|kernels/" [io]="engine/|io/" [model]="engine/|kernels/|model/"
  [train]="engine/|kernels/|io/|model/|train/" [tools]="engine/|kernels/|io/|model/|train/|tools/"
  [tests]="engine/|kernels/|io/|model/|train/|tests/")
for folder in "${!folders[@]}"; do check "$folder/" "${folders[$folder]}" "$(sources "$folder")"; done

# The rooms of kernels/. The pattern nsa/[^/]*" allows the headers of nsa/ itself, which are contracts.
k=kernels
declare -A rooms=(
  [common]="engine/|$k/common/"
  [hopper]="engine/|$k/common/|$k/hopper/"
  [ops]="engine/|$k/common/|$k/ops/"
  [step]="engine/|$k/common/|$k/ops/|$k/step/"
  [update]="engine/|$k/common/|$k/ops/|$k/update/"
  [nsa]="engine/|$k/common/|$k/ops/|$k/nsa/[^/]*\"|$k/nsa/cpu/"
  [nsa/cpu]="engine/|$k/common/|$k/ops/|$k/nsa/[^/]*\"|$k/nsa/cpu/"
  [nsa/gpu]="engine/|$k/common/|$k/ops/|$k/nsa/[^/]*\"|$k/nsa/gpu/"
  [nsa/sm90]="engine/|$k/common/|$k/hopper/|$k/ops/|$k/nsa/[^/]*\"|$k/nsa/gpu/|$k/nsa/sm90/"
  [nsa/dispatch]="engine/|$k/common/|$k/ops/|$k/nsa/"
  [decode]="engine/|$k/common/|$k/ops/|$k/nsa/[^/]*\"|$k/nsa/cpu/|$k/nsa/gpu/|$k/decode/"
  [library]="engine/|$k/common/|$k/ops/|$k/nsa/[^/]*\"|$k/library/")
for room in ops step update nsa library decode; do  # the op cases of a room; decode takes random lists from those of nsa
  rooms[$room/cases]="${rooms[$room]}|$k/$room/cases/|$k/nsa/cases/nsa_cases.h"
done
for room in "${!rooms[@]}"; do
  files=$(sources "$k/$room" -maxdepth 1)
  # Hopper kernels of ops/ and update/ are in files whose names end in _sm90.
  case $room in ops | update)
    check "$k/$room (Hopper)" "${rooms[$room]}|$k/hopper/" "$(grep _sm90 <<<"$files")"
    files=$(grep -v _sm90 <<<"$files") ;;
  esac
  check "$k/$room" "${rooms[$room]}" "$files"
done
unknown=$(sources $k | xargs -n1 dirname | sort -u | sed "s#^$k/##" | grep -vxE "$(IFS='|'; echo "${!rooms[*]}")")
[ -z "$unknown" ] || { echo "folders of $k/ that this check does not know:"; echo "$unknown"; status=1; }
# CMakeLists.txt defines TRIAD_WITH_CUDA for the sources of kernels/ alone, and compiles those that use kBuiltWithCuda twice.
others=$(grep -rlw kBuiltWithCuda engine io kernels model train tools tests --include='*.h' --include='*.cuh' --include='*.cpp' --include='*.cu' |
  grep -vE '^kernels/.*\.cpp$|^engine/backend\.h$')
[ -z "$others" ] || { echo "kBuiltWithCuda may be used in kernels/*.cpp only; elsewhere use backend::built_with_cuda():"; echo "$others"; status=1; }
[ "$status" -eq 0 ] && echo "every include follows the order of the folders"
exit "$status"
