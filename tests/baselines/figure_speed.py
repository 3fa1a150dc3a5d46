#!/usr/bin/env python3
"""Writes speed.svg from the kept rows of rows.jsonl: training speed and time of attention against sequence length.

    tests/baselines/figure_speed.py

Left: tokens/s of whole training steps, M7C at V = 50257 (PyTorch: the same layers, tied head). Right: forward and
backward of attention alone, 12 heads of 64 in 2 groups, scaled to ms per 65,536 tokens, because the kept shapes differ
in tokens. Both axes are logarithmic. Each point is the newest row of its shape (tables.py).
"""
import dataclasses
import math

from tables import ROOT, STEPS, ms, newest

PANEL, HEIGHT = 400, 330                      # px; two panels make the figure 800 px wide
LEFT, RIGHT, TOP, BOTTOM = 46, 116, 52, 44  # px, margins of a panel; the names of the lines are in the right one
TOKENS = 65536                                # tokens to which the right panel's times are scaled
SHAPES = ["8x2048x12x2x64", "3x6000x12x2x64", "1x65536x12x2x64"]
LENGTHS = [2048, 4096, 8192, 16384, 32768, 65536]
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 14px } .note { fill: #59636e; font-size: 11px }
.line { fill: none; stroke: currentColor; stroke-width: 2.5 } .dot { fill: currentColor }
.name { fill: currentColor; font-weight: 600 }
.back { fill: #ffffff } .grid { stroke: #d1d9e0 } .gap { stroke: #59636e; stroke-dasharray: 2 3 }
.nsa { color: #0969da } .dense { color: #1a7f37 } .peer { color: #bc4c00 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9198a1 } .name { fill: currentColor }
  .back { fill: #0d1117 } .grid { stroke: #30363d } .gap { stroke: #9198a1 }
  .nsa { color: #58a6ff } .dense { color: #3fb950 } .peer { color: #f0883e }
}
"""


@dataclasses.dataclass
class Series:
    name: str
    style: str    # class of STYLE
    points: list  # (sequence length, value)


@dataclasses.dataclass
class Panel:
    title: str
    note: str
    series: list
    ticks: list   # of y; the first and the last bound the axis
    tick_name: object

    def x(self, length):
        return LEFT + math.log(length / LENGTHS[0]) / math.log(LENGTHS[-1] / LENGTHS[0]) * (PANEL - LEFT - RIGHT)

    def y(self, value):
        low, high = self.ticks[0], self.ticks[-1]
        return HEIGHT - BOTTOM - math.log(value / low) / math.log(high / low) * (HEIGHT - TOP - BOTTOM)


def panels(rows):
    def steps(program, kind):
        points = []
        for _, case in STEPS:
            row = rows.get((program, "step", f"{case} {kind}", "step"))
            if row is not None:
                points.append((int(case.rsplit("x", 1)[1]), row["tokens_per_s"]))
        return points

    def attention(program, op):
        points = []
        for shape in SHAPES:
            sequences, length = (int(n) for n in shape.split("x")[:2])
            both = sum(ms(rows[program, op, shape + " randn", way]) for way in ("forward", "backward"))
            points.append((length, both * TOKENS / (sequences * length)))
        return points

    return [
        Panel("Training, tokens/s", "12 layers of 768, bf16, one H200; higher is better",
              [Series("Triad NSA", "nsa", steps("Triad", "nsa")),
               Series("Triad dense", "dense", steps("Triad", "dense")),
               Series("PyTorch dense", "peer", steps("PyTorch 2.11", "dense"))],
              [50000, 100000, 200000, 500000, 1000000], lambda v: f"{v // 1000}k" if v < 1000000 else "1M"),
        Panel("Attention, ms per 65,536 tokens", "forward and backward, 12 heads of 64; lower is better",
              [Series("Triad NSA", "nsa", attention("Triad", "attention")),
               Series("cuDNN dense", "peer", attention("cuDNN", "dense"))],
              [1, 2, 5, 10, 20, 50, 100], str),
    ]


def text(x, y, content, style="", anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{content}</text>'


def axes(panel):
    bottom, right = HEIGHT - BOTTOM, PANEL - RIGHT
    parts = [text(LEFT, 22, panel.title, "title"), text(LEFT, 39, panel.note, "note")]
    for tick in panel.ticks:
        y = panel.y(tick)
        parts += [f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>',
                  text(LEFT - 8, y + 4, panel.tick_name(tick), "note", "end")]
    for length in LENGTHS:
        x = panel.x(length)
        parts += [f'<path class="grid" d="M{x:.1f} {bottom}v4"/>',
                  text(x, bottom + 18, f"{length // 1024}k", "note", "middle")]
    return parts + [text((LEFT + right) / 2, HEIGHT - 8, "sequence length, tokens", "note", "middle")]


def lines(panel):
    parts = []
    for series in panel.series:
        at = [(panel.x(length), panel.y(value)) for length, value in series.points]
        if len(at) > 1:
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            parts.append(f'<polyline class="line {series.style}" points="{corners}"/>')
        parts += [f'<circle class="dot {series.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in at]
        x, y = at[-1]
        parts.append(text(x + 9, y + 4, series.name, f"name {series.style}"))
    low, high = sorted(series.points[-1][1] for series in (panel.series[0], panel.series[-1]))  # Triad NSA, its peer
    x, middle = panel.x(LENGTHS[-1]), panel.y(math.sqrt(low * high))
    parts.append(f'<path class="gap" d="M{x:.1f} {panel.y(low) - 7:.1f}V{panel.y(high) + 7:.1f}"/>')
    parts.append(text(x + 9, middle + 4, f"{high / low:.1f} times", "note"))
    return parts


def main():
    width = 2 * PANEL
    figure = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
              f'viewBox="0 0 {width} {HEIGHT}" role="img" aria-label="Training speed and time of attention against sequence length">',
              f"<style>{STYLE}</style>", f'<rect class="back" width="{width}" height="{HEIGHT}" rx="6"/>']
    for number, panel in enumerate(panels(newest())):
        figure += [f'<g transform="translate({number * PANEL})">', *axes(panel), *lines(panel), "</g>"]
    path = ROOT / "tests/baselines/speed.svg"
    path.write_text("\n".join(figure) + "\n</svg>\n")
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
