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

has_nvcc() { command -v nvcc >/dev/null || [ -x "${CUDA_PATH:-/usr/local/cuda}/bin/nvcc" ]; }

# Whether a CUDA program would find a GPU: the driver is loaded and lists one.
has_gpu() {
  if command -v nvidia-smi >/dev/null; then
    [[ $'\n'$(nvidia-smi -L 2>/dev/null) == *$'\nGPU '* ]]
  else
    [ -n "$(ls /proc/driver/nvidia/gpus 2>/dev/null)" ]
  fi
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
