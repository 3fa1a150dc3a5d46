#!/usr/bin/env bash
# Installs what building and testing Triad needs and this machine lacks, from the distribution's packages (Debian 12,
# Ubuntu 24.04), and does nothing else. Needs root or sudo only if something is missing. No CUDA toolkit is installed.
set -euo pipefail

packages=(g++ cmake ninja-build git catch2 libfmt-dev nlohmann-json3-dev libcli11-dev libopenblas-openmp-dev zlib1g-dev
          libzstd-dev libpcre2-dev libutf8proc-dev libssl-dev libopenmpi-dev openmpi-bin)

missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)" = installed ] || missing+=("$package")
done
# A cmake or ninja from elsewhere does as well as the package.
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
  command -v sudo >/dev/null || { echo "install.sh: missing ${wanted[*]}; run as root or install sudo" >&2; exit 1; }
  as_root=(sudo)
fi
echo "install.sh: installing ${wanted[*]}"
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null
