#!/usr/bin/env python3
"""Checks that every portable kernel can be launched on each architecture for which the target `portable` compiles it.

  cmake --build --preset cuda --target portable triad_tests triad_card
  tests/checks/resources.py build/cuda [--all] [--markdown FILE]

Reads registers, stack, static shared memory and launch bounds from the machine code in BUILD/CMakeFiles/portable.dir. Threads and dynamic
shared memory are those that the host code launches: a test runs the ops on a simulated card of each architecture
(tests/fault_injection/cuda_card.cpp). Prints a table per architecture with the occupancy that follows: for each kernel name the
instantiation with the fewest resident warps, with --all every one. A kernel that nothing launches counts with its launch bound. Ends with 1 if a launch exceeds a limit of its architecture, with a line
that has the kernel, the value and the limit. Stack bytes (spilled registers and local arrays) are reported only.

--markdown FILE  writes the tables to FILE as well
--facts FILE     reads lines "code ARCH KERNEL REGISTERS STACK STATIC BOUND" and "launch ARCH KERNEL THREADS DYNAMIC LABEL" instead of the
                 build (tests/checks/test_resources.py); BOUND: threads of __launch_bounds__, 0 if there are none
"""
import argparse
import collections
import glob
import os
import re
import struct
import subprocess
import sys

# Limits by architecture (CUDA Programming Guide, technical specifications per compute capability): bytes of shared memory per SM and per
# CTA; resident warps and CTAs per SM. Every one has 65,536 registers per SM and reserves 1 KiB of shared memory per CTA.
Limits = collections.namedtuple("Limits", "sm_bytes cta_bytes warps ctas")
LIMITS = {
    80: Limits(164 << 10, 163 << 10, 64, 32),
    86: Limits(100 << 10, 99 << 10, 48, 16),
    89: Limits(100 << 10, 99 << 10, 48, 24),
    90: Limits(228 << 10, 227 << 10, 64, 32),
    100: Limits(228 << 10, 227 << 10, 64, 32),
    120: Limits(100 << 10, 99 << 10, 48, 24),
}
REGISTERS, PARTITIONS, REGISTER_UNIT, SHARED_UNIT, RESERVED, MOST_THREADS = 65536, 4, 256, 128, 1024, 1024

Code = collections.namedtuple("Code", "registers stack static bound")
Launch = collections.namedtuple("Launch", "threads dynamic label")


def round_up(n, unit):
    return (n + unit - 1) // unit * unit


def elf_kernels(data, at):
    """(architecture, {symbol: Code}) of the CUDA ELF file at data[at:]; None if it is another file."""
    machine, = struct.unpack_from("<H", data, at + 18)
    if machine != 190:  # EM_CUDA
        return None
    table, flags = struct.unpack_from("<Q", data, at + 40)[0], struct.unpack_from("<I", data, at + 48)[0]
    entry, count, names_at = struct.unpack_from("<HHH", data, at + 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, at + table + i * entry) for i in range(count)]

    def text(offset):
        return data[offset:data.index(b"\0", offset)].decode()

    names = [text(at + sections[names_at][4] + s[0]) for s in sections]
    symbols = sections[names.index(".symtab")]
    strings = at + sections[symbols[6]][4]

    def symbol(i):
        return text(strings + struct.unpack_from("<I", data, at + symbols[4] + 24 * i)[0])

    def attributes(section):
        offset, end = at + section[4], at + section[4] + section[5]
        while offset < end:
            form, kind, size = struct.unpack_from("<BBH", data, offset)
            offset += 4
            yield kind, data[offset:offset + size] if form == 4 else b""
            offset += size if form == 4 else 0

    registers, frames = {}, {}
    for kind, value in attributes(sections[names.index(".nv.info")]):
        if kind in (0x2F, 0x11):  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
            of, number = struct.unpack("<II", value)
            (registers if kind == 0x2F else frames)[symbol(of)] = number
    kernels = {}
    for name, section in zip(names, sections):
        if not name.startswith(".nv.info."):
            continue
        kernel = name[len(".nv.info."):]
        bounds = [struct.unpack("<III", value) for kind, value in attributes(section) if kind == 0x05]  # EIATTR_MAX_THREADS
        shared = names.index(".nv.shared." + kernel) if ".nv.shared." + kernel in names else None
        static = sections[shared][5] if shared is not None else 0
        if ".nv.shared.reserved.0" in names:  # from sm_90 on the section contains what CUDA reserves
            static = max(0, static - RESERVED)
        kernels[kernel] = Code(registers[kernel], frames.get(kernel, 0), static,
                               bounds[0][0] * bounds[0][1] * bounds[0][2] if bounds else 0)
    return flags >> 8 & 0xFF, kernels


def demangle(names):
    """{name: the kernel with its template arguments, without namespaces and parameters}"""
    names = sorted(set(names))
    out = subprocess.run(["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True).stdout.split("\n")
    return {name: re.sub(r"\(anonymous namespace\)::|triad::(?:cuda::|partials_detail::)*|\(\w+(?:::\w+)*\)", "", plain) for name, plain in zip(names, out)}


def read_build(build):
    """The code {arch: {kernel: Code}}, the launches {arch: {kernel: {Launch}}} and the errors of a build folder."""
    objects = glob.glob(os.path.join(build, "CMakeFiles", "portable.dir", "**", "*.o"), recursive=True)
    if not objects:
        sys.exit(f"{build} has no objects of the target portable: cmake --build {build} --target portable")
    found = []  # (arch, symbol, Code)
    for path in objects:
        with open(path, "rb") as file:
            data = file.read()
        at = data.find(b"\x7fELF", 1)
        while at >= 0:
            elf = elf_kernels(data, at)
            if elf:
                found += [(elf[0], symbol, code) for symbol, code in elf[1].items()]
            at = data.find(b"\x7fELF", at + 4)
    launched, errors = [], []  # (arch, symbol, Launch)
    for arch in LIMITS:
        run = subprocess.run([os.path.join(build, "triad_tests"), "[card]"], capture_output=True, text=True,
                             env={**os.environ, "LD_PRELOAD": os.path.abspath(os.path.join(build, "libtriad_card.so")), "TRIAD_CARD": str(arch)})
        label, lines = "", 0
        for line in run.stdout.split("\n"):
            word, _, rest = line.partition("\t")
            if word == "case":
                label = rest
            elif word == "refused":
                errors.append(f"sm_{arch}: {label}: {rest}")
            elif word == "launch":
                symbol, threads, dynamic = rest.split("\t")
                launched.append((arch, symbol, Launch(int(threads), int(dynamic), label)))
                lines += 1
        if run.returncode != 0 or lines == 0:
            sys.exit(f"the launches on sm_{arch} failed:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    plain = demangle([s for _, s, _ in found + launched])
    code, launches = {arch: {} for arch in LIMITS}, {arch: collections.defaultdict(set) for arch in LIMITS}
    for arch, symbol, one in found:  # a kernel of a header is in several objects
        code[arch][plain[symbol]] = Code(*map(max, one, code[arch].get(plain[symbol], one)))
    for arch, symbol, one in launched:
        launches[arch][plain[symbol]].add(one)
    return code, launches, errors


def read_facts(path):
    code, launches = collections.defaultdict(dict), collections.defaultdict(lambda: collections.defaultdict(set))
    with open(path, encoding="utf-8") as file:
        for line in file:
            word, arch, kernel, *rest = line.split(None, 3 if line.startswith("code") else 5)
            if word == "code":
                code[int(arch)][kernel] = Code(*map(int, rest[0].split()))
            else:
                launches[int(arch)][kernel].add(Launch(int(rest[0]), int(rest[1]), rest[2].strip()))
    return code, launches, []


def occupancy(code, launch, limits):
    """(CTAs, warps) that are resident on an SM."""
    warps = (launch.threads + 31) // 32
    by_registers = REGISTERS // PARTITIONS // round_up(32 * max(code.registers, 1), REGISTER_UNIT) * PARTITIONS // warps
    by_shared = limits.sm_bytes // round_up(code.static + launch.dynamic + RESERVED, SHARED_UNIT)
    ctas = min(limits.ctas, limits.warps // warps, by_registers, by_shared)
    return ctas, ctas * warps


def errors_of(arch, kernel, code, launch):
    """What makes this launch fail on the architecture."""
    limits, found = LIMITS[arch], []
    warps = (launch.threads + 31) // 32
    where = f"sm_{arch}: {kernel}" + (f" ({launch.label})" if launch.label else "")
    most = code.bound or MOST_THREADS
    if launch.threads > most:
        found.append(f"{where}: {launch.threads} threads per CTA, at most {most}")
    if code.static + launch.dynamic > limits.cta_bytes:
        found.append(f"{where}: {code.static} + {launch.dynamic} bytes of shared memory (static + dynamic) per CTA, at most {limits.cta_bytes}")
    registers = round_up(32 * code.registers, REGISTER_UNIT) * round_up(warps, PARTITIONS)
    if registers > REGISTERS:
        found.append(f"{where}: {code.registers} registers of {launch.threads} threads take {registers}, at most {REGISTERS}")
    return found


Row = collections.namedtuple("Row", "kernel count registers stack static threads dynamic ctas warps label")


def rows_of(arch, code, launches, every):
    """A row per instantiation, or per kernel name: that of the instantiation and launch with the fewest resident warps."""
    rows = collections.defaultdict(list)
    for kernel, one in sorted(code.items()):
        of = launches.get(kernel) or {Launch(one.bound, 0, "") if one.bound > 0 else None}
        name = kernel if every else kernel.split("<")[0]
        for launch in of:
            ctas, warps = occupancy(one, launch, LIMITS[arch]) if launch else (None, None)
            rows[name].append(Row(name, 1, *one[:3], launch.threads if launch else None, launch.dynamic if launch else None, ctas, warps, kernel))
    out = []
    for name, all_of in sorted(rows.items()):
        worst = min(all_of, key=lambda r: (r.warps is None, r.warps, -(r.dynamic or 0), -r.registers, r.label))
        out.append(worst._replace(count=len({r.label for r in all_of}), registers=max(r.registers for r in all_of), stack=max(r.stack for r in all_of)))
    return out


def table(header, rows, markdown):
    cells = [[("-" if c is None else f"{c:,}" if isinstance(c, int) else str(c)) for c in row] for row in rows]
    if markdown:
        return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header)] + cells) + "\n"
    widths = [max(len(row[i]) for row in [header] + cells) for i in range(len(header))]
    return "\n".join("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip() for row in [header] + cells) + "\n"


def summary(code, launches, rows):
    """A row for an architecture; rows: all of its instantiations."""
    known = [r for r in rows if r.warps is not None]
    name = {r: r.kernel.split("<")[0] for r in rows}
    registers, stacks = max(rows, key=lambda r: r.registers), [c for c in code.values() if c.stack > 0]
    largest, fewest = max(known, key=lambda r: r.static + r.dynamic), min(known, key=lambda r: r.warps)
    return [len(code), len(set(code) - set(launches)), f"{registers.registers} ({name[registers]})", f"{len(stacks)}, at most {max((c.stack for c in stacks), default=0)}",
            f"{largest.static + largest.dynamic:,} ({name[largest]})", f"{fewest.warps} ({name[fewest]})"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--markdown")
    parser.add_argument("--facts")
    options = parser.parse_args()
    if bool(options.build) == bool(options.facts):
        parser.error("one of BUILD and --facts is needed")
    code, launches, errors = read_facts(options.facts) if options.facts else read_build(options.build)

    header = ["kernel", "instances", "registers", "stack B", "static B", "threads", "dynamic B", "CTAs/SM", "warps/SM"]
    overview, pages = [], []
    for arch, limits in LIMITS.items():
        if not code.get(arch):
            errors.append(f"sm_{arch}: no kernel was compiled")
            continue
        for kernel, of in sorted(launches.get(arch, {}).items()):
            if kernel not in code[arch]:
                errors.append(f"sm_{arch}: {kernel} is launched, but was not compiled")
                continue
            for launch in sorted(of):
                errors += errors_of(arch, kernel, code[arch][kernel], launch)
        rows = rows_of(arch, code[arch], launches.get(arch, {}), options.all)
        title = f"sm_{arch}: {limits.sm_bytes >> 10} KiB of shared memory per SM, {limits.cta_bytes >> 10} per CTA; {limits.warps} warps and {limits.ctas} CTAs per SM"
        pages.append((title, [r[:9] for r in rows]))
        every = rows if options.all else rows_of(arch, code[arch], launches.get(arch, {}), True)
        overview.append([f"sm_{arch}"] + summary(code[arch], launches.get(arch, {}), every))
        print(f"{title}\n{table(header, pages[-1][1], False)}")
        for row in every:
            if row.stack > 0:
                print(f"  stack of {row.stack} bytes: {row.kernel}")
        print()
    about = ["architecture", "kernels", "not launched", "most registers", "with stack, bytes", "most shared memory, bytes per CTA", "fewest warps per SM"]
    if overview:
        print(table(about, overview, False))
    if options.markdown:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, text=True).stdout.strip()
        with open(options.markdown, "w", encoding="utf-8") as file:
            file.write(f"# Portable kernels by architecture\n\nWritten by `tests/checks/resources.py --markdown`, commit {commit or 'unknown'}.\n\n{table(about, overview, True)}")
            for title, rows in pages:
                file.write(f"\n{title}\n\n{table(header, rows, True)}")
    for error in dict.fromkeys(errors):
        print(error)
    print(f"{len(set(errors))} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
