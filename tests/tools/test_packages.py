#!/usr/bin/env python3
"""The wheels triad-train and triad-nsa: names, metadata, contents, and which build is packed. tests/checks/scripts.sh has the
refusals of tools/package.sh.

  test_packages.py TRIAD      the build's program, which needs more libraries than a wheel may"""
import base64
import hashlib
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools/package"), str(ROOT / "tools/pytorch")]
import build_wheel  # noqa: E402
import wheel_file  # noqa: E402

TRIAD = None


def wheel_of(folder, program):
    share = folder / "share/triad/configs"
    share.mkdir(parents=True)
    (share / "tiny.json").write_text("{}")
    name = wheel_file.program_wheel(program, folder / "share", folder)
    return name, zipfile.ZipFile(folder / name)


@unittest.skipUnless(shutil.which("objdump") and shutil.which("readelf"), "no binutils")
class ProgramWheel(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def test_contents_and_tag(self):
        program = shutil.which("true")
        name, wheel = wheel_of(self.folder, program)
        symbols = subprocess.run(["objdump", "-T", program], capture_output=True, text=True, check=True).stdout
        newest = max(tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", symbols))[:2]
        version = re.search(r"VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text().split("project(", 1)[1])[1]
        self.assertEqual(name, f"triad_train-{version}-py3-none-manylinux_{newest[0]}_{newest[1]}_x86_64.whl")
        metadata = wheel.read(f"triad_train-{version}.dist-info/METADATA").decode()
        self.assertIn(f"Name: triad-train\nVersion: {version}\n", metadata)
        self.assertIn("It has no MPI", metadata)  # what a wheel lacks stands in its description
        self.assertIn(f"Tag: {name[:-4].split('-', 2)[2]}\n", wheel.read(f"triad_train-{version}.dist-info/WHEEL").decode())
        self.assertEqual(wheel.read(f"triad_train-{version}.data/scripts/triad"), pathlib.Path(program).read_bytes())
        self.assertEqual(wheel.getinfo(f"triad_train-{version}.data/scripts/triad").external_attr >> 16, 0o100755)
        self.assertEqual(wheel.read(f"triad_train-{version}.data/data/share/triad/configs/tiny.json"), b"{}")
        record = wheel.read(f"triad_train-{version}.dist-info/RECORD").decode().splitlines()
        self.assertEqual(sorted(line.split(",")[0] for line in record), sorted(wheel.namelist()))
        for line in record[:-1]:
            path, digest, size = line.split(",")
            data = wheel.read(path)
            self.assertEqual(digest, "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode())
            self.assertEqual(int(size), len(data))

    def test_equal_files_give_an_equal_wheel(self):
        name, _ = wheel_of(self.folder / "a", shutil.which("true"))
        again, _ = wheel_of(self.folder / "b", shutil.which("true"))
        self.assertEqual((self.folder / "a" / name).read_bytes(), (self.folder / "b" / again).read_bytes())

    def test_a_program_that_needs_other_libraries_is_refused(self):
        with self.assertRaisesRegex(SystemExit, "libopenblas.*needs glibc alone"):
            wheel_of(self.folder, TRIAD)

    def test_pip_installs_it(self):
        if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
            self.skipTest("no pip")
        name, _ = wheel_of(self.folder, shutil.which("true"))
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--prefix", self.folder / "here",
                        "--root-user-action=ignore", self.folder / name], check=True)
        subprocess.run([self.folder / "here/bin/triad"], check=True)
        self.assertTrue((self.folder / "here/share/triad/configs/tiny.json").is_file())


class NsaLibrary(unittest.TestCase):
    """Which libtriad_nsa.so `pip install ./tools/pytorch` packs."""

    def chosen(self, builds, gpu):
        """builds: names and caches of the folders of build/ that have a library, the last one the newest."""
        with tempfile.TemporaryDirectory() as scratch:
            root = pathlib.Path(scratch)
            for age, (name, cache) in enumerate(builds.items()):
                library = root / "build" / name / "libtriad_nsa.so"
                library.parent.mkdir(parents=True)
                library.write_text(name)
                os.utime(library, (age, age))
                (library.parent / "CMakeCache.txt").write_text(cache)
            with unittest.mock.patch.object(build_wheel, "ROOT", root):
                found = build_wheel.newest_build(gpu)
                return found and found.read_text()

    def test_choice(self):
        cpu = "CMAKE_BUILD_TYPE:STRING=Release\nTRIAD_SANITIZE:STRING=OFF\n"
        cuda, no_nvcc = cpu + "CMAKE_CUDA_COMPILER:FILEPATH=/nvcc\n", cpu + "CMAKE_CUDA_COMPILER:FILEPATH=NOTFOUND\n"
        sanitized = cpu.replace("OFF", "thread")
        debug = cpu.replace("Release", "RelWithDebInfo")
        for builds, gpu, expected in (
                ({}, False, None),
                ({"cpu": cpu}, False, "cpu"),
                ({"cpu": cpu}, True, "cpu"),
                ({"cuda": cuda}, False, "cuda"),
                ({"cpu": cpu, "cuda": cuda}, False, "cpu"),  # though the other is newer
                ({"cuda": cuda, "cpu": cpu}, True, "cuda"),
                ({"auto": no_nvcc, "cuda": cuda}, False, "auto"),
                ({"old": cpu, "new": cpu}, False, "new"),
                ({"cpu": cpu, "tsan": sanitized}, False, "cpu"),
                ({"tsan": sanitized, "cuda-debug": debug}, False, None)):
            with self.subTest(builds=list(builds), gpu=gpu):
                self.assertEqual(self.chosen(builds, gpu), expected)

    def test_a_build_is_made_for_the_gpu_only_where_it_can_be_used(self):
        for gpu, nvcc_problem, preset in ((False, "", "cpu"), (True, "", "cuda"), (True, "no nvcc", "cpu")):
            with self.subTest(gpu=gpu, nvcc=nvcc_problem), tempfile.TemporaryDirectory() as scratch:
                root = pathlib.Path(scratch)
                (root / "tools").mkdir()
                # A stand-in that builds as CMake does: lines of ninja on stderr, then the library.
                (root / "tools/build.sh").write_text(
                    "#!/bin/sh\ncd \"$(dirname \"$0\")/..\"\necho \"[1/2] compiles a.cpp for $1 $2\" >&2\necho '[2/2] links' >&2\n"
                    "mkdir -p build/$1 && echo $1 >build/$1/libtriad_nsa.so && : >build/$1/CMakeCache.txt\n")
                (root / "tools/build.sh").chmod(0o755)
                progress = build_wheel.Progress()
                progress.terminal = io.StringIO()  # the user's, behind pip
                with unittest.mock.patch.multiple(build_wheel, ROOT=root, in_common=lambda function: nvcc_problem):
                    built = build_wheel.build_library(gpu, progress)
                self.assertEqual(built.read_text().strip(), preset)
                shown = progress.terminal.getvalue()
                self.assertIn(f"building it once (preset {preset})\n", shown)
                self.assertIn("built 1 of 2 files", shown)

    def test_a_failed_build_is_quoted(self):
        with tempfile.TemporaryDirectory() as scratch:
            root = pathlib.Path(scratch)
            (root / "tools").mkdir()
            (root / "tools/build.sh").write_text("#!/bin/sh\necho 'build.sh: cmake is missing' >&2\nexit 1\n")
            (root / "tools/build.sh").chmod(0o755)
            with unittest.mock.patch.multiple(build_wheel, ROOT=root), self.assertRaisesRegex(SystemExit, "cmake is missing"):
                build_wheel.build_library(False, build_wheel.Progress())


if __name__ == "__main__":
    TRIAD = sys.argv.pop(1)
    unittest.main()
