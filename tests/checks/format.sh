#!/usr/bin/env bash
# Checks that every source is formatted by .clang-format of the tree. Versions of clang-format differ in details, so this
# needs version 14 (Debian 12, Ubuntu 22.04) and is skipped without it. Guides (*.md) are never formatted by it.
#   tests/checks/format.sh SOURCE_FOLDER        lists what differs
#   tests/checks/format.sh SOURCE_FOLDER --fix  formats it
cd "${1:?the source folder}" || exit 1
format=$(command -v clang-format-14 || command -v clang-format)
version=$("${format:-false}" --version 2>/dev/null | sed -nE 's/.*version ([0-9]+).*/\1/p')
if [ "$version" != 14 ]; then
  echo "SKIPPED: clang-format 14 formats this tree; this machine has ${version:-none}"
  exit 4
fi
mode=(--dry-run -Werror)
[ "${2-}" = --fix ] && mode=(-i)
find engine io kernels model train tools tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 -n 16 -P "$(nproc)" "$format" "${mode[@]}" && echo "every source is formatted"
