#!/usr/bin/env python3
"""Checks that the excerpts of code in the guides are still in the sources.

An excerpt is a fenced block whose first line names a file: `// train/run/trainer.cpp`. Its other lines stand in that file one after another,
but for indentation; a line `...` skips lines. Prints each excerpt that does not match, with its first line that was not found.
  tests/checks/excerpts.py [ROOT]
"""
import os
import re
import subprocess
import sys


def missing_line(lines, source):
    """The first line of the excerpt that the source lacks at its place; None where the excerpt matches."""
    runs, run = [], []
    for line in lines:
        if line.strip() in ("...", "// ..."):
            runs.append(run)
            run = []
        else:
            run.append(line.strip())
    runs = [r for r in runs + [run] if r]
    at = 0
    for run in runs:
        best = 0
        for start in range(at, len(source)):
            same = 0
            while same < len(run) and start + same < len(source) and source[start + same] == run[same]:
                same += 1
            best = max(best, same)
            if same == len(run):
                at = start + same
                break
        else:
            return run[best]
    return None


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else "."
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    names = [name for name in names if os.path.exists(os.path.join(root, name))]
    count = bad = 0
    for name in names:
        with open(os.path.join(root, name), encoding="utf-8") as file:
            text = file.read()
        for block in re.findall(r"^```\w*\n// (\S+\.\w+)\n(.*?)^```", text, re.S | re.M):
            count += 1
            path = os.path.join(root, block[0])
            if not os.path.exists(path):
                print(f"{name}: the excerpt's file {block[0]} does not exist")
                bad += 1
                continue
            with open(path, encoding="utf-8") as file:
                source = [line.strip() for line in file.read().split("\n")]
            line = missing_line(block[1].rstrip("\n").split("\n"), source)
            if line is not None:
                print(f"{name}: the excerpt of {block[0]} differs from the file at: {line}")
                bad += 1
    print(f"{count} excerpts, {bad} differ")
    return 1 if bad or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
