#!/usr/bin/env bash
# Builds the CPU preset and runs every test on another Linux distribution, in a root folder of its own.
#   tools/other_systems.sh trixie [CTEST ARGUMENT...]
#   tools/other_systems.sh trixie --deb    builds the program alone, and its Debian package into build/packages
# trixie is a minimal Debian 13 (gcc 14, Catch2 3, Open MPI 5), installed by debootstrap from the archive that apt is
# configured for. tools/test.sh runs inside it and installs what it needs there. Needs root and some 3 GB in
# ${XDG_CACHE_HOME:-~/.cache}/triad, which keeps the root folder, its build and its ccache for the next call; delete it to
# start from nothing. This system and this checkout's build/ are not changed.
set -euo pipefail
source "$(dirname -- "$0")/common.sh"
system=${1:-}
case $system in
  --help | -h) print_help; exit 0 ;;
  trixie) shift ;;
  *) usage_error "the systems are: trixie" ;;
esac
[ "$(id -u)" -eq 0 ] || fail "mounting needs root: sudo tools/other_systems.sh $system"
command -v debootstrap >/dev/null || fail "debootstrap is missing: apt-get install debootstrap"

# Runs in a namespace of its own for mounts and processes, so that none of them outlives this script. unshare ignores other
# signals than SIGKILL, which ends everything in the namespace.
if [ "${TRIAD_IN_NAMESPACE:-}" != yes ]; then
  TRIAD_IN_NAMESPACE=yes unshare --mount --pid --fork --kill-child "$(realpath -- "$0")" "$system" "$@" &
  trap 'kill -KILL $!; exit 130' INT TERM HUP
  wait $! && exit 0 || exit $?
fi
tree=$(realpath -- "$(dirname -- "$0")/..")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/triad
root=$cache/$system
mkdir -p "$cache"
exec 9>"$cache/$system.lock"
flock --nonblock 9 || fail "another call is at work in $root"

if [ ! -e "$root" ]; then
  # The distribution's own archive, of all archives in apt's configuration.
  archive=$(apt-get indextargets --format '$(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
    awk '$1 == "main" && $2 ~ /\/debian\/?$/ { print $2; exit }')
  [ -n "$archive" ] || fail "apt is configured for no Debian archive to take $system from"
  echo "making a minimal $system in $root from $archive"
  rm -rf "$root.new"
  debootstrap --variant=minbase "$system" "$root.new" "$archive" |
    awk '!/^I: (Retrieving|Validating|Extracting|Unpacking|Configuring) [a-z]/ { print "  " $0; fflush() }'
  mv "$root.new" "$root"
fi

# The files of another checkout may be older than the objects and differ all the same.
checkout=$(stat -c '%n %i' -- "$tree")
[ "$(cat "$cache/$system-build/checkout" 2>/dev/null)" = "$checkout" ] || rm -rf "$cache/$system-build"
mkdir -p "$root/triad" "$root/ccache" "$cache/ccache" "$cache/$system-build/packages" "$tree/build/packages"
echo "$checkout" >"$cache/$system-build/checkout"
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs -o ro sysfs "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount --bind "$tree" "$root/triad"
mount -o remount,bind,ro "$root/triad"
mount --bind "$cache/$system-build" "$root/triad/build"
mount --bind "$tree/build/packages" "$root/triad/build/packages"
mount --bind "$cache/ccache" "$root/ccache"
cp --remove-destination /etc/resolv.conf "$root/etc/resolv.conf"
printf '127.0.0.1\tlocalhost\n::1\tlocalhost\n' >"$root/etc/hosts"  # debootstrap writes none, and ranks connect to localhost

# pivot_root instead of chroot: tests create user namespaces, which is not allowed inside a chroot.
cd "$root"
pivot_root . mnt
exec env -u TMPDIR -u XDG_CACHE_HOME -u TRIAD_IN_NAMESPACE HOME=/root LC_ALL=C.UTF-8 \
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0=/triad \
  CCACHE_DIR=/ccache CCACHE_SLOPPINESS=pch_defines,time_macros CMAKE_CXX_COMPILER_LAUNCHER=ccache chroot . /bin/bash -euc '
    umount --lazy /mnt
    cd /triad
    command -v ccache >/dev/null || { apt-get update -qq; apt-get install -y -qq --no-install-recommends ccache >/dev/null; }
    [ "${1:-}" = --deb ] || exec tools/test.sh "$@"
    tools/install.sh
    command -v dpkg-shlibdeps >/dev/null || apt-get install -y -qq --no-install-recommends dpkg-dev >/dev/null
    tools/build.sh cpu triad >/dev/null
    tools/package.sh deb' other_systems "$@"
