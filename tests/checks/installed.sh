#!/usr/bin/env bash
# Installs a build into a temporary folder, builds the C example against it with pkg-config and with find_package, and
# runs both on the CPU. Checks which libraries libtriad_nsa.so needs and which names it exports.
#   tests/checks/installed.sh SOURCE_FOLDER BUILD_FOLDER [CMAKE]
set -euo pipefail
source=$(realpath "${1:?the source folder}") build=$(realpath "${2:?the build folder}") cmake=${3:-cmake}
if grep -qE 'TRIAD_SANITIZE:[A-Z]+=[a-z]' "$build/CMakeCache.txt"; then  # whose runtime a program has to link
  echo "SKIPPED: a build with sanitizers"
  exit 4  # kSkippedCode of tests/support/skip.h
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
prefix="$scratch/installed"
"$cmake" --install "$build" --prefix "$prefix" >"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
library=$(find "$prefix" -name libtriad_nsa.so)
"$prefix/bin/triad" --version

if command -v pkg-config >/dev/null; then
  pc=$(dirname "$(find "$prefix" -name triad_nsa.pc)")
  flags=$(PKG_CONFIG_PATH=$pc pkg-config --cflags --libs triad_nsa)
  echo "pkg-config: $flags"
  # shellcheck disable=SC2086  # the flags are words
  "${CC:-cc}" -std=c99 -Wall -Wextra -Werror "$source/kernels/library/example.c" -o "$scratch/by_pkg_config" $flags
  "$scratch/by_pkg_config"
else
  echo "this machine has no pkg-config: the example is built with find_package only"
fi

# By the build's own generator: CMake's default is make, which a machine that builds Triad need not have.
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
"$cmake" -G "$(cached CMAKE_GENERATOR)" -DCMAKE_MAKE_PROGRAM="$(cached CMAKE_MAKE_PROGRAM)" \
  -S "$source/tests/installed" -B "$scratch/build" -DCMAKE_PREFIX_PATH="$prefix" \
  -DEXAMPLE="$source/kernels/library/example.c" >"$scratch/log" 2>&1 &&
  "$cmake" --build "$scratch/build" >>"$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
"$scratch/build/example"

needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p')
more=$(grep -vE '^(libc|libm|ld-linux-x86-64)\.so' <<<"$needed" || true)
[ -z "$more" ] || { echo "libtriad_nsa.so needs more than libc:"; echo "$more"; exit 1; }
exported=$(nm -D --defined-only "$library" | awk '{print $3}' | sed 's/@.*//' | grep -vE '^(triad_nsa_|TRIAD_NSA_)' || true)
[ -z "$exported" ] || { echo "libtriad_nsa.so exports names that are not its own:"; echo "$exported"; exit 1; }
declared=$(grep -oE '\btriad_nsa_[a-z_]+\(' "$source/kernels/library/triad_nsa.h" | tr -d '(' | sort -u)
missing=$(comm -23 <(echo "$declared") <(nm -D --defined-only "$library" | awk '{print $3}' | sed 's/@.*//' | sort -u))
[ -z "$missing" ] || { echo "triad_nsa.h declares what libtriad_nsa.so lacks:"; echo "$missing"; exit 1; }
