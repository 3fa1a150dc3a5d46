#!/usr/bin/env bash
# From a fresh machine to a trained model and a sample of its text: installs what is missing, builds, trains
# configs/quickstart.json on real text, generates. On a GPU where one can be used, else on the CPU.
#   tools/quickstart.sh [--text FILE]      default text: the C++ standard library's headers of this compiler
set -euo pipefail
text=
while [ $# -gt 0 ]; do
  case $1 in
    --text) text=$(realpath -- "${2:?--text needs a file}"); shift 2 ;;
    *) echo "usage: tools/quickstart.sh [--text FILE]" >&2; exit 2 ;;
  esac
done

cd "$(dirname "$0")/.."
tools/install.sh
preset=$(tools/build.sh "" triad | tail -n 1)
triad=build/$preset/triad

if [ -n "$text" ]; then
  [ -r "$text" ] || { echo "quickstart.sh: cannot read $text" >&2; exit 1; }
  paths=${text//\\/\\\\}
  paths=${paths//\"/\\\"}
else
  headers=$(echo '#include <vector>' | g++ -x c++ -M - | tr ' ' '\n' | grep '/vector$' | head -n 1)
  folder=$(dirname "$headers")
  paths="$folder/bits/*.h"
  echo "text: $paths"
fi

"$triad" train configs/quickstart.json --overwrite --set "data.paths=[\"$paths\"]"
echo
echo "A sample:"
"$triad" generate --checkpoint runs/quickstart --prompt "template<typename _Tp>" --tokens 400 --temperature 0.7 --seed 1
