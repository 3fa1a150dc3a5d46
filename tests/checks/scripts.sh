#!/usr/bin/env bash
# Tests the scripts of tools/ on simulated machines: without a GPU, nvcc, cmake, a network or write permission. Each case
# runs in a checkout whose path contains a space, with stand-ins for the programs that the scripts call.
#   tests/checks/scripts.sh SOURCE_FOLDER
set -u
unset CXX CUDACXX  # the scripts read them
source_folder=$(realpath -- "${1:?the source folder}")
root=$(mktemp -d)
trap 'rm -rf -- "$root"' EXIT
tree="$root/my checkout"
calls="$root/calls"
status=0

# machine [NAME | NAME=SCRIPT]...: sets up a machine with the shell's basic tools and these stand-ins.
machine() {
  rm -rf -- "$root/bin" "$tree"
  mkdir -p "$root/bin" "$tree/configs"
  cp -r "$source_folder/tools" "$tree/tools"
  : >"$calls"
  local tool
  for tool in bash sh env sed grep awk head tail sort dirname basename realpath mkdir rm cat tr tee nproc ls stat id cut uname; do
    ln -s "$(command -v "$tool")" "$root/bin/$tool"
  done
  stand_in dpkg-query 'printf installed'
  stand_in apt-get
  stand_in cmake
  stand_in ninja
  stand_in g++ 'echo "x.o: /inc/vector"'
  local wanted
  for wanted in "$@"; do stand_in "${wanted%%=*}" "$([[ $wanted == *=* ]] && printf %s "${wanted#*=}")"; done
  local preset
  for preset in cpu cuda; do  # stand-ins for the built programs
    mkdir -p "$tree/build/$preset/quickstart"
    printf '#!/bin/sh\necho "triad of %s: $*"\n' $preset >"$tree/build/$preset/quickstart/triad"
    chmod +x "$tree/build/$preset/quickstart/triad"
  done
  chmod -R go+rX "$root"
  chmod 777 "$calls"
}
stand_in() {
  rm -f -- "$root/bin/$1"  # may be a link to the machine's own program
  printf '#!%s\necho "%s $*" >>"%s"\n%s\n' "$(command -v bash)" "$1" "$calls" "${2:-}" >"$root/bin/$1"
  chmod +x "$root/bin/$1"
}
without() { rm -- "$root/bin/$1"; }

# run CODE SCRIPT ARGS...: runs a script, sets $output to what it prints, and expects the exit code CODE.
run() {
  local code=$1
  shift
  output=$(cd / && CUDA_PATH=/nowhere PATH="$root/bin" "${as[@]}" "$tree/tools/$1" "${@:2}" 2>&1)
  local got=$?
  [ $got -eq "$code" ] || wrong "$* ended with $got, not $code"
}
as=()
wrong() {
  echo "$1; it printed:"
  echo "$output" | sed 's/^/  | /'
  status=1
}
prints() { [[ $output == *"$1"* ]] || wrong "\"$1\" was expected"; }
calls_has() { grep -qF -- "$1" "$calls" || wrong "no call \"$1\" in: $(tr '\n' ';' <"$calls")"; }
calls_lack() { ! grep -qF -- "$1" "$calls" || wrong "a call \"$1\" in: $(tr '\n' ';' <"$calls")"; }

for script in install.sh build.sh quickstart.sh test.sh package.sh; do
  machine
  run 0 $script --help
  prints "tools/$script"
  [ -s "$calls" ] && wrong "$script --help called $(cat "$calls")"
done

# The quickstart builds GPU kernels only if a GPU can run them.
gpu='nvidia-smi=echo "GPU 0: a card (UUID: GPU-1)"'
old_gpu='nvidia-smi=case $* in *compute_cap*) echo 6.1; echo 7.5 ;; *) echo "GPU 0: a card (UUID: GPU-1)" ;; esac'
old_driver='nvidia-smi=[ $# -gt 0 ] && { echo "GPU 0: a card (UUID: GPU-1)"; exit; }; echo "| NVIDIA-SMI 550.54.14   Driver Version: 550.54.14   CUDA Version: 12.4     |"'
nvcc='nvcc=echo "Cuda compilation tools, release 13.0, V13.0.88"'
old_nvcc='nvcc=echo "Cuda compilation tools, release 12.8, V12.8.93"'
no_gpu='nvidia-smi=echo "has failed because it could not communicate with the NVIDIA driver"; exit 9'
machine "$nvcc" "$no_gpu"
run 0 quickstart.sh
calls_has "cmake --preset cpu"
calls_has "cmake --build --preset cpu --target triad_quickstart"  # of the program what it needs, and no more
prints "no usable GPU"
prints "triad of cpu: train"
prints "tools/build.sh cpu"
machine "$nvcc" "$no_gpu"
run 0 quickstart.sh
calls_has "cmake --preset cpu"
machine "$nvcc" "$gpu"
run 0 quickstart.sh
calls_has "cmake --preset cuda"
prints "triad of cuda: train"
machine "$nvcc" "$gpu"
run 0 quickstart.sh --cpu
calls_has "cmake --preset cpu"
machine "$nvcc" "$no_gpu"
run 0 quickstart.sh --cuda
calls_has "cmake --preset cuda"
machine "$gpu"
run 0 quickstart.sh
calls_has "cmake --preset cpu"
prints "no nvcc"
machine
run 1 quickstart.sh --cuda
prints "--cuda needs nvcc"
machine "$nvcc" "$old_gpu"  # no kernel runs on such a card
run 0 quickstart.sh
calls_has "cmake --preset cpu"
prints "its compute capability is 7.5, and 8.0 is needed"
machine "$nvcc" "$old_driver"
run 0 quickstart.sh
calls_has "cmake --preset cpu"
prints "its driver runs programs up to CUDA 12.4, and 13 is needed"
machine "$old_nvcc" "$gpu"
run 0 quickstart.sh
calls_has "cmake --preset cpu"
prints "there is a GPU, but the build is for the CPU: CUDA Toolkit 13 is needed, and $root/bin/nvcc is of 12.8"
run 1 quickstart.sh --cuda
prints "is of 12.8"
run 1 build.sh cuda
prints "is of 12.8"
run 0 build.sh
calls_has "cmake --preset cpu"
machine "$nvcc"  # test.sh compiles the GPU kernels even without a GPU
stand_in ctest 'echo "1/1 Test #1: a ... Passed 0.1 sec"'
run 0 test.sh
calls_has "cmake --preset cuda"
prints "1 passed, 0 failed, 0 skipped"
machine "$nvcc"  # a test that says SKIPPED and fails has failed: ctest decides by the exit code
stand_in ctest 'echo "1/4 Test  #1: a: SKIPPED, with the reason ...   Passed    0.01 sec"
echo "2/4 Test  #2: b ...***Skipped   0.01 sec"
echo "SKIPPED: no GPU"
echo "3/4 Test  #3: c ...***Failed    0.01 sec"
echo "SKIPPED: no GPU"
echo "4/4 Test #44: d ...***Timeout 900.00 sec"
exit 8'
run 8 test.sh
prints "1 passed, 2 failed, 1 skipped"

# A text that cannot be used is reported before anything is installed.
for text in nothing.txt "$root" "$root/empty.txt" "$root/short.txt"; do
  machine
  : >"$root/empty.txt"
  printf '%04000d' 0 >"$root/short.txt"
  run 1 quickstart.sh --text "$text"
  prints "--text: "
  [ -s "$calls" ] && wrong "--text $text called $(cat "$calls")"
done
machine
printf '%05000d' 0 >"$root/a text.txt"
run 0 quickstart.sh --text "$root/a text.txt"
prints "data.paths=[\"$root/a text.txt\"]"
prints "--prompt  --tokens"  # not C++, which the text may not be
machine
run 2 quickstart.sh --txt a
prints "unknown argument --txt; --help"

# Missing packages and programs.
machine dpkg-query='exit 1' apt-get='[ "$1" = update ] || { echo "E: Failed to fetch"; exit 100; }'
run 1 install.sh
prints "E: Failed to fetch"
prints "Without a network"
machine dpkg-query='exit 1' apt-get='echo "Setting up libfmt-dev"; echo noise'
run 0 install.sh
prints "  Setting up libfmt-dev"
[[ $output != *noise* ]] || wrong "noise"
machine
without apt-get
run 1 install.sh
prints "has no apt-get"
machine
without cmake
run 1 build.sh cpu
prints "cmake is missing: tools/install.sh installs it"
machine cmake='echo "cmake version 3.22.1"'
run 1 build.sh cpu
prints "cmake is 3.22.1, and 3.25 or newer is needed"
machine cmake='echo "cmake version 3.25.1"' g++='echo 11.4.0'
run 1 build.sh cpu
prints "g++ is 11.4.0, and 12 or newer is needed"
machine cmake='echo "cmake version 4.0.2"' g++='echo 12.2.0' grep='[[ $* == *avx2* ]] && exit 1; exec '"$(command -v grep)"' "$@"' \
  uname='echo x86_64'
run 0 build.sh cpu
prints "this CPU has no AVX2"
calls_has "cmake --preset cpu -DTRIAD_MARCH=x86-64"

# A package holds the build of the commit that is checked out, or nothing is packed.
commit=0123456789ab
git_of_commit='git=case $* in *rev-parse*) echo '$commit' ;; *status*) cat "${0%/bin/git}/changed" ;; esac'
: >"$root/changed"
# program_of COMMIT: build/cpu/triad, as built from this commit.
program_of() {
  printf '#!/bin/sh\necho "triad 0.1.0 (%s)"\n' "$1" >"$tree/build/cpu/triad"
  chmod +x "$tree/build/cpu/triad"
}
machine "$git_of_commit"
run 2 package.sh
run 2 package.sh rpm
prints "unknown argument rpm"
run 1 package.sh wheel
prints "there is no build/cpu/triad to pack: tools/build.sh cpu builds it"
program_of 999999999999
run 1 package.sh deb
prints "build/cpu/triad is of commit 999999999999, and the checkout is at $commit"
program_of $commit
run 1 package.sh wheel deb
prints "is missing: python3 writes wheels, dpkg-dev packages for Debian"
for tool in python3 dpkg-deb dpkg-shlibdeps; do stand_in $tool; done
stand_in cmake 'echo "no space left" >&2; exit 1'
run 1 package.sh deb
prints "no space left"
calls_has "cmake --build build/cpu --target triad"  # the sources may be newer than a build with the same commit
echo " M model/layer.cpp" >"$root/changed"
run 1 package.sh wheel
prints "the checkout has changes that no commit holds ( M model/layer.cpp)"
calls_lack "cmake --install"

# A checkout that was moved, is not writable, or belongs to another user.
machine
echo "CMAKE_HOME_DIRECTORY:INTERNAL=/somewhere/else" >"$tree/build/cpu/CMakeCache.txt"
run 1 build.sh cpu
prints "build/cpu was made for /somewhere/else"
calls_lack "cmake --preset"
machine git='echo "fatal: detected dubious ownership in repository" >&2; exit 128'
run 0 build.sh cpu
prints "git config --global --add safe.directory '$tree'"
if [ "$(id -u)" -eq 0 ] && command -v setpriv >/dev/null; then
  machine
  rm -r "$tree/build"
  chmod 755 "$root"
  as=("$(command -v setpriv)" --reuid=65534 --regid=65534 --clear-groups)
  run 1 quickstart.sh
  as=()
  prints "cannot be written to"
  calls_lack "cmake"
fi

[ $status -eq 0 ] && echo "the scripts of tools/ do what their help says"
exit $status
