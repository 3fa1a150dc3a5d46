#!/usr/bin/env bash
# From a fresh machine to a trained model and a sample of its text: installs missing packages, builds, trains
# configs/quickstart.json on real text, and generates. Of the program it builds only the verbs train and generate, which
# takes half the time; tools/build.sh builds the whole one.
#   tools/quickstart.sh [--text FILE] [--cuda | --cpu]
# --text FILE   the text to train on; default: the headers of this compiler's C++ standard library
# --cuda        build the GPU kernels even without a GPU; needs nvcc
# --cpu         build for the CPU; default: --cuda if nvcc and a GPU that can be used are found, else --cpu
set -euo pipefail
source "$(dirname -- "$0")/common.sh"

text= preset=
while [ $# -gt 0 ]; do
  case $1 in
    --help | -h) print_help; exit 0 ;;
    --text) [ -n "${2:-}" ] || usage_error "--text needs a file"
            text=$2; shift 2 ;;
    --cuda | --cpu) preset=${1#--}; shift ;;
    *) usage_error "unknown argument $1" ;;
  esac
done
if [ -n "$text" ]; then
  [ -e "$text" ] || fail "--text: there is no file $text"
  [ -f "$text" ] || fail "--text: $text is no file"
  [ -r "$text" ] || fail "--text: $text cannot be read by $(id -un)"
  bytes=$(stat -L -c %s -- "$text")
  case $text in *.gz | *.zst) least=1 ;; *) least=4096 ;; esac
  [ "$bytes" -ge "$least" ] || fail "--text: $text has $bytes bytes, and at least $least are needed"
  text=$(realpath -- "$text")
fi
if [ "$preset" = cuda ]; then
  nvcc=$(nvcc_problem)
  [ -z "$nvcc" ] || fail "--cuda needs nvcc: $nvcc"
elif [ -z "$preset" ]; then
  preset=cpu nvcc=$(nvcc_problem) gpu=$(gpu_problem)
  if [ -z "$nvcc$gpu" ]; then
    preset=cuda
  elif [ -z "$nvcc" ]; then
    echo "no usable GPU ($gpu): building for the CPU (--cuda builds the GPU kernels all the same)"
  elif [ -z "$gpu" ]; then
    echo "there is a GPU, but the build is for the CPU: $nvcc"
  fi
fi

cd "$(dirname -- "$script")/.."
check_checkout
echo "1/4 install what is missing"
tools/install.sh
echo "2/4 build ($preset)"
tools/build.sh "$preset" triad_quickstart >/dev/null
triad=build/$preset/quickstart/triad

if [ -n "$text" ]; then
  paths=${text//\\/\\\\}
  paths=${paths//\"/\\\"}
  prompt=
else
  headers=$(g++ -x c++ -M -include vector /dev/null | tr ' ' '\n' | awk '/\/vector$/ && !found { found = $0 } END { print found }')
  [ -n "$headers" ] || fail "g++ finds no header <vector> to train on: give another text by --text FILE"
  paths="$(dirname -- "$headers")/bits/*.h"
  prompt="template<typename _Tp>"
fi
echo "3/4 train on $paths"
"$triad" train configs/quickstart.json --overwrite --set "data.paths=[\"$paths\"]"
echo "4/4 a sample"
"$triad" generate --checkpoint runs/quickstart --prompt "$prompt" --tokens 400 --temperature 0.7 --seed 1
echo "another: $triad generate --checkpoint runs/quickstart --prompt TEXT"
echo "the whole program, with eval, report, doctor and more: tools/build.sh $preset; then build/$preset/triad report runs/quickstart"
