#!/usr/bin/env python3
"""Tests resources.py on made-up kernels and launches: which launches it accepts, and what it says of those that exceed a limit."""
import os
import subprocess
import sys
import tempfile

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "resources.py")
ARCHES = (80, 86, 89, 90, 100, 120)


def run(changes, *options):
    """Runs the script on one good kernel and launch per architecture, plus `changes`: lines that replace those of their kernel or are added."""
    lines = {}
    for arch in ARCHES:
        lines[f"code {arch} good_kernel"] = "64 0 1024 256"
        lines[f"launch {arch} good_kernel"] = "256 40000 case"
    for line in changes:
        words = line.split(" ", 3)
        lines[" ".join(words[:3])] = words[3]
    with tempfile.NamedTemporaryFile("w", suffix=".facts") as file:
        file.write("".join(f"{key} {value}\n" for key, value in lines.items()))
        file.flush()
        out = subprocess.run([sys.executable, SCRIPT, "--facts", file.name, *options], capture_output=True, text=True)
    return out.returncode, out.stdout + out.stderr


def main():
    failures = 0

    def check(what, changes, code, *parts, options=()):
        nonlocal failures
        got, text = run(changes, *options)
        missing = [part for part in parts if part not in text]
        if got != code or missing:
            failures += 1
            print(f"{what}: exit code {got}, expected {code}; missing {missing}; it printed:\n{text}")

    check("good kernels", [], 0, "sm_80: 164 KiB", "sm_120: 100 KiB", "good_kernel", "0 errors")
    # 64 registers allow 4 CTAs of 8 warps; shared memory of 42,112 bytes (with CUDA's 1 KiB) allows 3, 2 and 5.
    for arch, expected in ((80, "3        24"), (86, "2        16"), (90, "4        32")):
        page = run([])[1].split(f"sm_{arch}: ")[1].split("sm_")[0]
        if expected not in page:
            failures += 1
            print(f"occupancy on sm_{arch}: {expected} is missing in:\n{page}")
    limit = ["code 86 big_kernel 32 0 376 128", "launch 86 big_kernel 128 101000 case"]
    check("shared memory at the limit", limit, 0, "0 errors")
    check("too much shared memory", [limit[0], "launch 86 big_kernel 128 101001 heads of 128"], 1, "sm_86: big_kernel (heads of 128)",
          "376 + 101001 bytes", "at most 101376", "1 errors")
    check("the same on a larger card", ["code 80 big_kernel 32 0 376 128", "launch 80 big_kernel 128 101001 case"], 0)
    check("too many registers", ["code 90 wide_kernel 80 0 0 0", "launch 90 wide_kernel 1024 0 case"], 1, "sm_90: wide_kernel", "80 registers of 1024 threads",
          "at most 65536")
    check("as many registers as an SM has", ["code 90 wide_kernel 64 0 0 1024", "launch 90 wide_kernel 1024 0 case"], 0)
    check("more threads than the launch bound", ["launch 120 good_kernel 512 0 case"], 1, "sm_120: good_kernel", "512 threads per CTA, at most 256")
    check("a kernel that is not compiled", ["launch 89 lost_kernel 32 0 case"], 1, "sm_89: lost_kernel is launched, but was not compiled")
    check("a spill is reported", ["code 100 spilling_kernel 255 48 0 128"], 0, "stack of 48 bytes: spilling_kernel", "1, at most 48")
    twice = ["code 80 tile_kernel<float> 40 0 0 128", "code 80 tile_kernel<bf16> 168 16 0 128", "launch 80 tile_kernel<float> 128 0 case",
             "launch 80 tile_kernel<bf16> 128 0 case"]
    check("one row per kernel name", twice, 0, "tile_kernel          2        168       16")
    check("every instantiation", twice, 0, "tile_kernel<float>          1         40        0", options=("--all",))
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
