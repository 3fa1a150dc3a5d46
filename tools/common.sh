# Functions that the scripts of this folder share. Source it, do not run it. An error is one line on stderr that says what
# to do.
script=$(realpath -- "$0")

fail() {
  echo "$(basename -- "$script"): $*" >&2
  exit 1
}

usage_error() {
  echo "$(basename -- "$script"): $*; --help lists the options" >&2
  exit 2
}

# Prints the comment at the head of the calling script, which is its help text.
print_help() { sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$script"; }

# at_least VERSION WANTED: whether a version such as 3.25.1 is not below another.
at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

# Prints the path of the nvcc that builds: $CUDACXX, that of $CUDA_PATH (default /usr/local/cuda), or the one on PATH.
find_nvcc() {
  local of_toolkit=${CUDA_PATH:-/usr/local/cuda}/bin/nvcc
  if [ -n "${CUDACXX:-}" ]; then
    echo "$CUDACXX"
  elif [ -x "$of_toolkit" ]; then
    echo "$of_toolkit"
  else
    command -v nvcc
  fi
}

# Prints why nvcc cannot build the GPU kernels; nothing if it can.
nvcc_problem() {
  local nvcc release
  nvcc=$(find_nvcc) || { echo "no nvcc (CUDA Toolkit 13) on PATH or in ${CUDA_PATH:-/usr/local/cuda}/bin"; return; }
  release=$("$nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p') || true
  at_least "${release:-0}" 13 || echo "CUDA Toolkit 13 is needed, and $nvcc is of ${release:-an unknown release}"
}

# Prints why a CUDA program could not use a GPU here; nothing if it could: the driver is loaded, runs programs of CUDA 13
# or does not say what it runs, and lists a GPU whose compute capability is 8.0 or more, or not known.
gpu_problem() {
  if ! command -v nvidia-smi >/dev/null; then
    [ -n "$(ls /proc/driver/nvidia/gpus 2>/dev/null)" ] || echo "no NVIDIA driver is loaded"
    return
  fi
  [[ $'\n'$(nvidia-smi -L 2>/dev/null) == *$'\nGPU '* ]] || { echo "nvidia-smi lists none"; return; }
  local runs most
  runs=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' | head -n 1) || true
  at_least "${runs:-13}" 13 || { echo "its driver runs programs up to CUDA $runs, and 13 is needed: update the driver"; return; }
  most=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -xE '[0-9]+\.[0-9]+' |
    sort -V | tail -n 1) || true
  at_least "${most:-8.0}" 8.0 || echo "its compute capability is $most, and 8.0 is needed"
}

# Fails if this user cannot write to the checkout, which is the working folder, or to its build/.
check_checkout() {
  local owner
  owner=$(stat -c %U .)
  [ -w . ] || [ -w build ] ||
    fail "$PWD belongs to $owner and cannot be written to: clone or copy it to a folder of yours (cp -r), and run it there"
  if [[ $(git rev-parse HEAD 2>&1 || true) == *"dubious ownership"* ]]; then
    echo "$(basename -- "$script"): this checkout belongs to $owner, so git does not say its revision and the build records none;" \
      "git config --global --add safe.directory '$PWD' lets it" >&2
  fi
}
