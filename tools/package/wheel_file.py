"""Writes wheels: those of triad-train (the program, for tools/package.sh) and of triad-nsa (tools/pytorch).

  tools/package/wheel_file.py PROGRAM SHARE DIR    the wheel triad-train of a program and of the files for PREFIX/share, in DIR
"""
import base64
import hashlib
import pathlib
import re
import stat
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM_SUMMARY = "Triad: trains language models with Native Sparse Attention (this wheel: on the CPU)"


def version():
    return re.search(r"project\(triad\s+VERSION\s+([\d.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)


def glibc_needed(program):
    """The newest glibc, as (2, 36), whose symbols a program or library refers to; fails if it needs another library."""
    def binutils(*command):
        return subprocess.run([*command, program], check=True, capture_output=True, text=True).stdout
    libraries = re.findall(r"\(NEEDED\).*\[(.*)\]", binutils("readelf", "-d"))
    others = [name for name in libraries if not re.match(r"(libc|libm|libdl|libpthread|ld-linux-x86-64)\.so\.\d+$", name)]
    if others:
        raise SystemExit(f"{program} needs {', '.join(others)}: the wheel's program (target triad_static) needs glibc alone")
    return max((tuple(map(int, number.split("."))) for number in re.findall(r"GLIBC_([\d.]+)", binutils("objdump", "-T"))),
               default=(2, 17))


def write_wheel(folder, name, tag, metadata, files):
    """Writes NAME-VERSION-TAG.whl with `files` (path: bytes) and returns its name. Equal files give an equal wheel."""
    distribution = f"{name.replace('-', '_')}-{version()}"
    info = f"{distribution}.dist-info"
    files = {path.replace("{distribution}", distribution): data for path, data in files.items()}
    header = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version()}"]
    files[f"{info}/METADATA"] = "\n".join(header + metadata).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: triad\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for path, data in files.items())
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    wheel_name = f"{distribution}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / wheel_name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            executable = path.endswith(".so") or ".data/scripts/" in path
            entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16  # pip makes only regular files executable
            entry.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return wheel_name


def program_wheel(program, share, folder):
    """pip puts {distribution}.data/scripts into bin/, without a Python start in front of the program, and data into PREFIX."""
    major, minor = glibc_needed(program)
    files = {"{distribution}.data/scripts/triad": pathlib.Path(program).read_bytes()}
    files |= {"{distribution}.data/data/share/" + path.relative_to(share).as_posix(): path.read_bytes()
              for path in sorted(pathlib.Path(share).rglob("*")) if path.is_file()}
    metadata = [f"Summary: {PROGRAM_SUMMARY}", "Requires-Python: >=3.8", "Description-Content-Type: text/markdown", "",
                (ROOT / "tools/package/README.md").read_text()]
    return write_wheel(folder, "triad-train", f"py3-none-manylinux_{major}_{minor}_x86_64", metadata, files)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    pathlib.Path(sys.argv[3]).mkdir(parents=True, exist_ok=True)
    print(pathlib.Path(sys.argv[3]) / program_wheel(*sys.argv[1:]))
