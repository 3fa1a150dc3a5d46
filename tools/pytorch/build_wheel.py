"""The build backend of the wheel triad-nsa (PEP 517): packs the Python files and a libtriad_nsa.so that CMake has built.

The library is, in this order: $TRIAD_NSA_LIBRARY; the newest build/*/libtriad_nsa.so of this repository; or the target
triad_nsa, built here once by the preset `cuda` (`cpu` where there is no nvcc). The wheel holds no compiled Python
module, so it serves every version of Python and of torch (py3-none-linux_x86_64).

  python3 tools/pytorch/build_wheel.py DIR     the wheel without pip
"""
import base64
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARY = "libtriad_nsa.so"
TAG = "py3-none-linux_x86_64"


def version():
    return re.search(r"project\(triad\s+VERSION\s+([\d.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)


def newest_build():
    """Returns the newest build of the library, or None. A build with sanitizers needs their runtime before Python."""
    found = [path for path in ROOT.glob(f"build/*/**/{LIBRARY}") if "debug" not in path.parts[len(ROOT.parts) + 1]]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def build_library():
    preset = "cuda" if shutil.which("nvcc") or pathlib.Path("/usr/local/cuda/bin/nvcc").exists() else "cpu"
    for command in (["cmake", "--preset", preset], ["cmake", "--build", "--preset", preset, "--target", "triad_nsa"]):
        print("+", " ".join(command), file=sys.stderr, flush=True)
        try:
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"triad-nsa: there is no {LIBRARY} in {ROOT}/build, and building it failed: {error}") from error
    return newest_build()


def library():
    chosen = os.environ.get("TRIAD_NSA_LIBRARY")
    if chosen:
        if not pathlib.Path(chosen).is_file():
            raise SystemExit(f"triad-nsa: TRIAD_NSA_LIBRARY is {chosen}, which is no file")
        return pathlib.Path(chosen)
    path = newest_build() or build_library()
    if path is None:
        raise SystemExit(f"triad-nsa: the target triad_nsa made no {LIBRARY} in {ROOT}/build")
    return path


def metadata():
    text = (HERE / "pyproject.toml").read_text()
    field = lambda name: re.search(rf'^{name} = "(.*)"$', text, re.M).group(1)  # noqa: E731
    needs = re.search(r"^dependencies = \[(.*)\]$", text, re.M).group(1)
    lines = ["Metadata-Version: 2.1", "Name: triad-nsa", f"Version: {version()}", f"Summary: {field('description')}",
             f"Requires-Python: {field('requires-python')}"]
    lines += [f"Requires-Dist: {need}" for need in re.findall(r'"(.*?)"', needs)]
    return "\n".join([*lines, "Description-Content-Type: text/markdown", "", (HERE / "README.md").read_text()])


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    source = library().resolve()
    print(f"triad-nsa: packs {source}", file=sys.stderr)
    info = f"triad_nsa-{version()}.dist-info"
    files = {f"triad_nsa/{path.name}": path.read_bytes() for path in sorted((HERE / "src/triad_nsa").glob("*.py"))}
    files[f"triad_nsa/{LIBRARY}"] = source.read_bytes()
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: triad\nRoot-Is-Purelib: false\nTag: {TAG}\n".encode()
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    name = f"triad_nsa-{version()}-{TAG}.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))  # no time: equal files give an equal wheel
            entry.external_attr = (0o755 if path.endswith(".so") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return name


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit("triad-nsa has no source distribution: its library is built by CMake from the whole repository")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    pathlib.Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    print(pathlib.Path(sys.argv[1]) / build_wheel(sys.argv[1]))
