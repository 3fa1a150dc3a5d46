#!/usr/bin/env python3
"""Draws validation loss over millions of bytes from the kept CSVs NAME_T_val.csv, a panel for each T, T_from_F or
T-note: figure.py FOLDER T ... [--names nsa,dense] [--bytes-a-step 32768] [--after 0] [--out curves.svg]
--after leaves out earlier points. With --step-ms 98.6,182 the axis is the time on the GPU, from each name's time a step."""
import argparse, csv, pathlib, re

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 420, 300, 52, 30, 16, 42  # of a panel, and its margins
COLOURS = ["#0b6fa4", "#d1603d"]


def read(path, unit, after):
    points = [(int(r["step"]) * unit, float(r["val_loss"])) for r in csv.DictReader(path.open())]
    return [(x, loss) for x, loss in points if x >= after]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("lengths", nargs="+", metavar="T")
    parser.add_argument("--names", default="nsa,dense")
    parser.add_argument("--bytes-a-step", type=int, default=32768)
    parser.add_argument("--step-ms")
    parser.add_argument("--after", type=float, default=0)
    parser.add_argument("--out", default="curves.svg")
    options = parser.parse_args()
    folder, lengths, names = options.folder, options.lengths, options.names.split(",")
    units = ([float(ms) / 1e3 for ms in options.step_ms.split(",")] if options.step_ms
             else [options.bytes_a_step / 1e6] * len(names))
    axis = "seconds on the GPU" if options.step_ms else "million bytes"
    curves = {(t, a): read(folder / f"{a}_{t}_val.csv", unit, options.after)
              for t in lengths for a, unit in zip(names, units)}
    values = [loss for curve in curves.values() for _, loss in curve]
    x_end = max(x for curve in curves.values() for x, _ in curve)
    low, high = int(min(values) * 10) / 10, int(max(values) * 10) / 10 + 0.1
    x_tick = next(tick for tick in (1, 20, 50, 100) if x_end <= 10 * tick)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(lengths)} {HEIGHT}" '
             'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>']
    for panel, t in enumerate(lengths):
        tokens, first, note = re.fullmatch(r"(\d+)(?:_from_(\d+))?(?:-(.+))?", t).groups()
        title = (f"T = {int(tokens):,}" + (f", with weights from {int(first):,}" if first else "") +
                 (f", {note.replace('-', ' ')}" if note else ""))
        def at(x, y):
            return (panel * WIDTH + LEFT + x / x_end * (WIDTH - LEFT - RIGHT),
                    TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM))
        left, right = at(0, low)[0], at(x_end, low)[0]
        tick = 0.1 if high - low <= 1 else 0.2
        for i in range(round((high - low) / tick) + 1):
            y = at(0, low + i * tick)[1]
            parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#ddd"/>'
                         f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{low + i * tick:.1f}</text>')
        for x in range(0, int(x_end) + 1, x_tick):
            parts.append(f'<text x="{at(x, low)[0]:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x}</text>')
        parts.append(f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{axis}</text>'
                     f'<text x="{left:.1f}" y="18" font-weight="bold">{title}: validation loss</text>')
        for row, (name, colour) in enumerate(zip(names, COLOURS)):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in curves[t, name]))
            dash = ' stroke-dasharray="5 3"' if row == 1 else ""
            text = f"{'NSA' if name == 'nsa' else name} {curves[t, name][-1][1]:.4f}"
            y = TOP + 22 + 18 * row
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
                         f'<path d="M{right - 120:.1f} {y - 4}h22" stroke="{colour}" stroke-width="2"{dash}/>'
                         f'<text x="{right - 92:.1f}" y="{y}">{text}</text>')
    (folder / options.out).write_text("\n".join(parts) + "\n</svg>\n")


main()
