#!/usr/bin/env python3
"""Draws curves.svg from the kept CSVs: figure.py FOLDER T ... (validation loss over millions of bytes, a panel a T or T_from_F)"""
import csv, pathlib, sys

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 420, 300, 52, 30, 16, 42  # of a panel, and its margins
COLOURS = {"nsa": "#0b6fa4", "dense": "#d1603d"}
BYTES_A_STEP = 32768


def read(path):
    return [(int(r["step"]) * BYTES_A_STEP / 1e6, float(r["val_loss"])) for r in csv.DictReader(path.open())]


def main():
    folder, lengths = pathlib.Path(sys.argv[1]), sys.argv[2:]
    curves = {(t, a): read(folder / f"{a}_{t}_val.csv") for t in lengths for a in COLOURS}
    values = [loss for curve in curves.values() for _, loss in curve]
    x_end = max(x for curve in curves.values() for x, _ in curve)
    low, high = int(min(values) * 10) / 10, int(max(values) * 10) / 10 + 0.1
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(lengths)} {HEIGHT}" '
             'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>']
    for panel, t in enumerate(lengths):
        tokens, _, first = t.partition("_from_")
        title = f"T = {int(tokens):,}" + (f", with weights from {int(first):,}" if first else "")
        def at(x, y):
            return (panel * WIDTH + LEFT + x / x_end * (WIDTH - LEFT - RIGHT),
                    TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM))
        left, right = at(0, low)[0], at(x_end, low)[0]
        tick = 0.1 if high - low <= 1 else 0.2
        for i in range(round((high - low) / tick) + 1):
            y = at(0, low + i * tick)[1]
            parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#ddd"/>'
                         f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{low + i * tick:.1f}</text>')
        for x in range(0, int(x_end) + 1, 20):
            parts.append(f'<text x="{at(x, low)[0]:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{x}</text>')
        parts.append(f'<text x="{(left + right) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">million bytes</text>'
                     f'<text x="{left:.1f}" y="18" font-weight="bold">{title}: validation loss</text>')
        for row, (attention, colour) in enumerate(COLOURS.items()):
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in curves[t, attention]))
            dash = ' stroke-dasharray="5 3"' if attention == "dense" else ""
            name = f"{'NSA' if attention == 'nsa' else attention} {curves[t, attention][-1][1]:.4f}"
            y = TOP + 22 + 18 * row
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
                         f'<path d="M{right - 120:.1f} {y - 4}h22" stroke="{colour}" stroke-width="2"{dash}/>'
                         f'<text x="{right - 92:.1f}" y="{y}">{name}</text>')
    (folder / "curves.svg").write_text("\n".join(parts) + "\n</svg>\n")


main()
