#!/usr/bin/env bash
# Makes packages of the CPU build that is there (build/cpu), in build/packages, and prints their paths.
#   tools/package.sh wheel|deb...
# wheel   triad-train for pip: the program with its libraries linked in; needs glibc alone
# deb     triad-train for this Debian, with dependencies on its libraries; for another one: tools/other_systems.sh trixie --deb
set -euo pipefail
source "$(dirname -- "$0")/common.sh"
[ $# -gt 0 ] || usage_error "wheel or deb?"
for kind in "$@"; do
  case $kind in
    --help | -h) print_help; exit 0 ;;
    wheel | deb) ;;
    *) usage_error "unknown argument $kind" ;;
  esac
done
cd "$(dirname -- "$script")/.."

# A package names a commit, so it holds that commit's build.
build=build/cpu
[ -x $build/triad ] || fail "there is no $build/triad to pack: tools/build.sh cpu builds it"
commit=$(git rev-parse --short=12 HEAD) || fail "a package names the commit of its build, and git knows none here"
changed=$(git status --porcelain | head -n 3)
[ -z "$changed" ] || fail "the checkout has changes that no commit holds (${changed//$'\n'/,}): commit or stash them, and build again"
built=$($build/triad --version | sed -n '1s/.*(\(.*\))/\1/p')
[ "$built" = "$commit" ] || fail "$build/triad is of commit ${built:-unknown}, and the checkout is at $commit: tools/build.sh cpu builds it again"
for tool in $([[ " $* " != *" wheel "* ]] || echo python3) $([[ " $* " != *" deb "* ]] || echo dpkg-deb dpkg-shlibdeps); do
  command -v "$tool" >/dev/null || fail "$tool is missing: python3 writes wheels, dpkg-dev packages for Debian"
done
cmake --build $build --target triad >&2  # nothing to do, unless it was built before the last change was undone

version=$(sed -n 's/^project(triad VERSION \([0-9.]*\).*/\1/p' CMakeLists.txt)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)  # equal builds give equal packages
export SOURCE_DATE_EPOCH
umask 022
out=build/packages
mkdir -p $out
scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT

make_wheel() {
  cmake --build $build --target triad_static >&2
  DESTDIR=$scratch/wheel cmake --install $build --prefix /usr --component program >/dev/null
  strip -o "$scratch/triad" $build/static/triad
  python3 tools/package/wheel_file.py "$scratch/triad" "$scratch/wheel/usr/share" $out
}

make_deb() {
  local root=$scratch/debian/triad-train doc depends mpi release who name
  mkdir -p "$root/DEBIAN"
  DESTDIR=$root cmake --install $build --prefix /usr --component program --strip >/dev/null
  doc=$root/usr/share/doc/triad-train
  release=$(. /etc/os-release && echo "${ID/debian/deb}${VERSION_ID:-}")
  who="${DEBFULLNAME:-$(git log -1 --format=%an)} <${DEBEMAIL:-$(git log -1 --format=%ae)}>"
  printf '%s\n\n  * Commit %s; CHANGELOG.md lists what is new.\n\n -- %s  %s\n' "triad-train ($version~$release) unstable; urgency=medium" \
    "$commit" "$who" "$(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")" | gzip -9n >"$doc/changelog.gz"
  printf 'No licence has been chosen yet: nobody has been given the right to use, change or share this program.\n' >"$doc/copyright"
  printf 'Source: triad-train\n\nPackage: triad-train\nArchitecture: any\n' >"$scratch/debian/control"
  # shlibs FILE: the packages that have the libraries which a file needs, as "a (>= 1), b".
  shlibs() { (cd "$scratch" && dpkg-shlibdeps -O --ignore-missing-info "$1") | sed -n 's/^shlibs:Depends=//p'; }
  depends=$(shlibs "$root/usr/bin/triad")
  [ -n "$depends" ] || fail "dpkg-shlibdeps finds no packages for the libraries of $build/triad"
  mpi=
  [ ! -e "$root/usr/lib/triad/libtriad_mpi.so" ] ||
    mpi=", $(shlibs "$root/usr/lib/triad/libtriad_mpi.so" | tr ',' '\n' | sed -n 's/^ *\(.*mpi.*\)/\1/p')"
  {
    printf '%s\n' "Package: triad-train" "Version: $version~$release" "Architecture: $(dpkg --print-architecture)" \
      "Maintainer: $who" "Section: science" \
      "Priority: optional" "Installed-Size: $(du -sk "$root" | cut -f1)" "Depends: $depends"
    [ -z "$mpi" ] || echo "Suggests: openmpi-bin$mpi"
    printf '%s\n' "Description: trainer for language models with Native Sparse Attention" \
      " Trains decoder language models with Native Sparse Attention, from a config and" \
      " text to a model, and generates from it. This package runs on the CPU (x86-64" \
      " with AVX2), on several ranks by torchrun, srun or Open MPI." " ." " Commit $commit."
  } >"$root/DEBIAN/control"
  (cd "$root" && find usr -type f -print0 | sort -z | xargs -0 md5sum) >"$root/DEBIAN/md5sums"
  name=$out/triad-train_$version~${release}_$(dpkg --print-architecture).deb
  dpkg-deb --root-owner-group --build "$root" "$name" >/dev/null
  echo "$name"
}

for kind in "$@"; do make_$kind; done
