"""The build backend of the wheel triad-nsa (PEP 517): packs the Python files and a libtriad_nsa.so that CMake has built.

The library is, in this order: $TRIAD_NSA_LIBRARY; the newest build/*/libtriad_nsa.so of this repository, with CUDA if a
GPU can be used here, else the CPU's; or the target triad_nsa, built here once by tools/build.sh (preset `cuda` only where
nvcc and a GPU can be used). pip shows nothing of a build, so its progress goes to the terminal itself. The wheel holds
no compiled Python module, so it serves every version of Python and of torch (py3-none-linux_x86_64).

  python3 tools/pytorch/build_wheel.py DIR     the wheel without pip
"""
import os
import pathlib
import re
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tools/package"))
import wheel_file  # noqa: E402

LIBRARY = "libtriad_nsa.so"
TAG = "py3-none-linux_x86_64"


class Progress:
    """Writes to stderr, which pip shows only with -v, and to the terminal, if there is one behind pip."""

    def __init__(self):
        self.began = time.monotonic()
        self.terminal = None
        if not sys.stderr.isatty():
            try:
                self.terminal = open("/dev/tty", "w")  # noqa: SIM115
            except OSError:
                pass

    def say(self, text, passing=False):
        """passing: the next text takes the line's place."""
        if not passing:
            print(text, file=sys.stderr, flush=True)
        if self.terminal:
            self.terminal.write(f"\r\033[K  {text}" + ("" if passing else "\n"))
            self.terminal.flush()

    def show_build(self, line):
        step = re.match(r"\[(\d+)/(\d+)\]", line)
        if step:
            self.say(f"triad-nsa: built {step[1]} of {step[2]} files, {time.monotonic() - self.began:.0f} s", passing=True)
        print(line, end="", file=sys.stderr, flush=True)


def in_common(function):
    """What a function of tools/common.sh prints: the reason against something, or nothing."""
    return subprocess.run(["bash", "-c", f"source '{ROOT}/tools/common.sh'; {function}"], capture_output=True, text=True).stdout.strip()


def cached(library, name):
    """A variable of the build that made the library; empty if there is none."""
    cache = next((folder / "CMakeCache.txt" for folder in library.parents if (folder / "CMakeCache.txt").is_file()), None)
    found = re.search(rf"^{name}:\w+=(.*)$", cache.read_text(), re.M) if cache else None
    return found[1] if found and not found[1].endswith("NOTFOUND") else ""


def newest_build(gpu):
    """Returns the newest build of the library that suits this machine, or None. gpu: whether a GPU can be used. A build
    for the CPU serves a machine with a GPU, too, if it is the only one, and a build with CUDA a machine without."""
    found = [path for path in ROOT.glob(f"build/*/**/{LIBRARY}")
             if cached(path, "TRIAD_SANITIZE") in ("", "OFF") and cached(path, "CMAKE_BUILD_TYPE") in ("", "Release")]
    return max(found, key=lambda path: (bool(cached(path, "CMAKE_CUDA_COMPILER")) == gpu, path.stat().st_mtime), default=None)


def build_library(gpu, progress):
    preset = "cuda" if gpu and not in_common("nvcc_problem") else "cpu"
    progress.say(f"triad-nsa: there is no {LIBRARY} in {ROOT}/build: building it once (preset {preset})")
    command = [str(ROOT / "tools/build.sh"), preset, "triad_nsa"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as build:
        lines = []
        for line in build.stderr:
            lines.append(line)
            progress.show_build(line)
    if build.returncode != 0:
        raise SystemExit(f"triad-nsa: there is no {LIBRARY} in {ROOT}/build, and building it failed: " + "".join(lines[-20:]))
    return newest_build(gpu)


def library(progress):
    chosen = os.environ.get("TRIAD_NSA_LIBRARY")
    if chosen:
        if not pathlib.Path(chosen).is_file():
            raise SystemExit(f"triad-nsa: TRIAD_NSA_LIBRARY is {chosen}, which is no file")
        return pathlib.Path(chosen)
    gpu = not in_common("gpu_problem")
    path = newest_build(gpu) or build_library(gpu, progress)
    if path is None:
        raise SystemExit(f"triad-nsa: the target triad_nsa made no {LIBRARY} in {ROOT}/build")
    if gpu and not cached(path, "CMAKE_CUDA_COMPILER"):
        progress.say("triad-nsa: this machine has a GPU, but the build is for the CPU; for the GPU: tools/build.sh cuda triad_nsa, "
                     "then install again")
    return path


def metadata():
    text = (HERE / "pyproject.toml").read_text()
    field = lambda name: re.search(rf'^{name} = "(.*)"$', text, re.M).group(1)  # noqa: E731
    needs = re.search(r"^dependencies = \[(.*)\]$", text, re.M).group(1)
    lines = [f"Summary: {field('description')}", f"Requires-Python: {field('requires-python')}"]
    lines += [f"Requires-Dist: {need}" for need in re.findall(r'"(.*?)"', needs)]
    return [*lines, "Description-Content-Type: text/markdown", "", (HERE / "README.md").read_text()]


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    progress = Progress()
    source = library(progress).resolve()
    progress.say(f"triad-nsa: packs {source}")
    files = {f"triad_nsa/{path.name}": path.read_bytes() for path in sorted((HERE / "src/triad_nsa").glob("*.py"))}
    files[f"triad_nsa/{LIBRARY}"] = source.read_bytes()
    return wheel_file.write_wheel(wheel_directory, "triad-nsa", TAG, metadata(), files)


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("triad-nsa has no source distribution: its library is built by CMake from the whole repository")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    print(pathlib.Path(sys.argv[1]) / build_wheel(sys.argv[1]))
