#!/usr/bin/env bash
# Installs the packages that building and testing Triad needs and that this machine lacks (Debian, Ubuntu). Needs root or
# sudo only if a package is missing. Does not install the CUDA toolkit.
#   tools/install.sh [--help]
set -euo pipefail
source "$(dirname -- "$0")/common.sh"
case ${1:-} in
  "") ;;
  --help | -h) print_help; exit 0 ;;
  *) usage_error "unknown argument $1" ;;
esac

packages=(g++ cmake ninja-build git catch2 libfmt-dev nlohmann-json3-dev libcli11-dev libopenblas-openmp-dev zlib1g-dev
          libzstd-dev libpcre2-dev libutf8proc-dev libssl-dev libopenmpi-dev openmpi-bin)

command -v dpkg-query >/dev/null && command -v apt-get >/dev/null ||
  fail "this machine has no apt-get: install what the packages ${packages[*]} hold, then run tools/build.sh"
missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing+=("$package")
done
# A cmake, ninja, g++ or git from elsewhere replaces the package.
wanted=()
for package in "${missing[@]}"; do
  case $package in
    cmake) command -v cmake >/dev/null || wanted+=(cmake) ;;
    ninja-build) command -v ninja >/dev/null || wanted+=(ninja-build) ;;
    g++) command -v g++ >/dev/null || wanted+=(g++) ;;
    git) command -v git >/dev/null || wanted+=(git) ;;
    *) wanted+=("$package") ;;
  esac
done
[ ${#wanted[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || fail "missing ${wanted[*]}: run as root, or install sudo"
  as_root=(sudo)
fi
# Shows one line for each package; apt-get prints many.
show_progress() { awk '/^(Setting up|E:|W:)/ { print "  " $0; fflush() }'; }
not_fetched="the packages ${wanted[*]} could not be installed: see the lines above. Without a network, install them by hand"
echo "installing ${wanted[*]}"
"${as_root[@]}" apt-get update -q 2>&1 | show_progress || fail "$not_fetched"
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${wanted[@]}" 2>&1 |
  show_progress || fail "$not_fetched"
