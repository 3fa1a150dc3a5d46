// Charts as SVG: lines, stacked areas, heat maps. Each is drawn for the width it has, again when that changes, and tells
// what is under the pointer, or under the cursor that the arrow keys move. Text from files goes in as text, never as HTML.
"use strict";

const kHeight = 210, kLeft = 54, kRight = 12, kTop = 10, kBottom = 26;

function node(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "circle", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const colour = i => `var(--s${i % 10})`;

function short(x) {
  if (x === null || x === undefined || !isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size >= 1e9) return (x / 1e9).toPrecision(4) / 1 + "G";
  if (size >= 1e6) return (x / 1e6).toPrecision(4) / 1 + "M";
  if (size >= 1e4) return (x / 1e3).toPrecision(4) / 1 + "k";
  if (size !== 0 && size < 1e-3) return Number(x.toPrecision(3)).toExponential();
  return String(Number(x.toPrecision(5)));
}

// About n round numbers that cover [low, high].
function ticks(low, high, n) {
  const raw = (high - low) / Math.max(1, n), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find(f => f * power >= raw) * power;
  const out = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) out.push(Number(at.toPrecision(12)));
  return out;
}

function widened([low, high]) {
  if (!(low <= high)) return [0, 1];
  if (low === high) { const by = Math.abs(low) * 0.05 || 1; return [low - by, high + by]; }
  return [low, high];
}

// A card's chart: draw(width) fills an SVG and returns {xs, describe(i), place(i)} for the cursor.
function mount(card, label, draw) {
  const chart = node("div", {class: "chart", tabindex: "0", role: "img", "aria-label": label});
  card.append(chart);
  let scene = null, at = null, tip = null, cursor = null;
  const forget = () => { tip?.remove(); cursor?.remove(); tip = cursor = null; at = null; };
  const show = index => {
    if (!scene || scene.xs.length === 0) return;
    at = Math.max(0, Math.min(scene.xs.length - 1, index));
    const row = scene.row, lines = scene.describe(at, row);
    tip?.remove(); cursor?.remove();
    const x = scene.xs[at];
    cursor = node("line", {class: "cursor", x1: x, x2: x, y1: kTop, y2: scene.bottom});
    scene.svg.append(cursor);
    tip = node("div", {class: "tip"});
    lines.forEach((line, i) => {
      const div = node("div", {}, i === 0 ? node("b", {}, line.text) : "");
      if (i > 0) {
        if (line.colour) { const box = node("i"); box.style.background = line.colour; div.append(box); }
        div.append(line.text);
      }
      tip.append(div);
    });
    chart.append(tip);
    const room = chart.clientWidth - tip.offsetWidth;
    tip.style.left = Math.max(0, Math.min(room, x > chart.clientWidth / 2 ? x - tip.offsetWidth - 12 : x + 12)) + "px";
    tip.style.top = kTop + "px";
  };
  const redraw = () => {
    forget();
    chart.querySelector("svg")?.remove();
    scene = draw(Math.max(240, chart.clientWidth));
    chart.prepend(scene.svg);
  };
  chart.addEventListener("pointermove", e => {
    const box = chart.getBoundingClientRect(), x = e.clientX - box.left;
    if (!scene || scene.xs.length === 0) return;
    scene.row = scene.rowAt ? scene.rowAt(e.clientY - box.top) : null;
    let best = 0;
    scene.xs.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(scene.xs[best] - x)) best = i; });
    show(best);
  });
  chart.addEventListener("pointerleave", forget);
  chart.addEventListener("blur", forget);
  chart.addEventListener("keydown", e => {
    const by = {ArrowLeft: -1, ArrowRight: 1}[e.key];
    if (by === undefined || !scene) return;
    e.preventDefault();
    show(at === null ? (by > 0 ? 0 : scene.xs.length - 1) : at + by);
  });
  let width = 0;
  new ResizeObserver(() => { if (chart.clientWidth !== width) { width = chart.clientWidth; redraw(); } }).observe(chart);
}

function axes(svg, width, xRange, yRange, height) {
  const x = v => kLeft + (v - xRange[0]) / (xRange[1] - xRange[0]) * (width - kLeft - kRight);
  const bottom = height - kBottom;
  const y = v => bottom - (v - yRange[0]) / (yRange[1] - yRange[0]) * (bottom - kTop);
  for (const t of ticks(yRange[0], yRange[1], 4)) {
    svg.append(node("line", {class: "rule", x1: kLeft, x2: width - kRight, y1: y(t), y2: y(t)}));
    svg.append(node("text", {x: kLeft - 6, y: y(t) + 4, "text-anchor": "end"}, short(t)));
  }
  stepAxis(svg, x, xRange, width, bottom);
  return {x, y, bottom};
}

function stepAxis(svg, x, xRange, width, bottom) {
  svg.append(node("line", {class: "axis", x1: kLeft, x2: width - kRight, y1: bottom, y2: bottom}));
  for (const t of ticks(xRange[0], xRange[1], width / 110).filter(Number.isInteger))
    svg.append(node("text", {x: x(t), y: bottom + 16, "text-anchor": "middle"}, t.toLocaleString("en")));
  svg.append(node("text", {class: "unit", x: kLeft - 6, y: bottom + 16, "text-anchor": "end"}, "step"));
}

function canvas(width, height) {
  return node("svg", {viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true"});
}

function drawMarks(svg, marks, axis, xRange) {
  const drawn = new Set();  // several may be of one step
  for (const mark of marks) {
    const at = axis.x(mark.step), place = `${mark.step}${mark.parts ?? ""}`;
    if (mark.step < xRange[0] || mark.step > xRange[1] || drawn.has(place)) continue;
    drawn.add(place);
    svg.append(node("line", {class: mark.parts ? "part" : "mark", x1: at, x2: at, y1: kTop, y2: axis.bottom}));
    svg.append(node("text", {x: at, y: kTop, "text-anchor": "middle"}, mark.parts ? "◆" : "▼"));
  }
}

function legend(card, entries, box) {
  if (entries.length < 2) return;
  const div = node("div", {class: "legend"});
  for (const entry of entries) {
    const i = node("i", box ? {class: "box"} : {});
    i.style.background = entry.colour;
    div.append(node("span", {}, i, entry.name));
  }
  card.append(div);
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v !== null && isFinite(v)) { low = Math.min(low, v); high = Math.max(high, v); }
  return [low, high];
}

// series: [{name, points: [[step, value], ...], dots}]; marks: [{step, text}].
function lineChart(card, {series, unit = "", marks = [], zero = false, label}) {
  series = series.map((s, i) => ({colour: colour(i), ...s})).filter(s => s.points.some(p => p[1] !== null));
  if (series.length === 0) return false;
  const xRange = widened(extent(series.flatMap(s => s.points.map(p => p[0]))));
  const values = extent(series.flatMap(s => s.points.map(p => p[1])));
  if (zero) values[0] = Math.min(0, values[0]);
  const yRange = widened(values);
  const steps = [...new Set(series.flatMap(s => s.points.map(p => p[0])))].sort((a, b) => a - b);
  // Lines are thinned each on its own: one that lacks a step has the point next to it.
  const reach = (xRange[1] - xRange[0]) / 100;
  const near = (points, step) => {
    let low = 0, high = points.length - 1;
    while (low < high) { const middle = (low + high) >> 1; points[middle][0] < step ? (low = middle + 1) : (high = middle); }
    const best = low > 0 && step - points[low - 1][0] < Math.abs(points[low][0] - step) ? points[low - 1] : points[low];
    return Math.abs(best[0] - step) <= reach ? best : null;
  };
  mount(card, `${label}: ${series.map(s => `${s.name} ends at ${short(s.points.at(-1)[1])}${unit}`).join(", ")}`, width => {
    const svg = canvas(width, kHeight), axis = axes(svg, width, xRange, yRange, kHeight);
    for (const s of series) {
      let path = "", pen = false;
      for (const [step, value] of s.points) {
        if (value === null) { pen = false; continue; }
        path += `${pen ? "L" : "M"}${axis.x(step).toFixed(1)},${axis.y(value).toFixed(1)}`;
        pen = true;
      }
      svg.append(node("path", {d: path, fill: "none", stroke: s.colour, "stroke-width": 1.6, "stroke-linejoin": "round",
                               "stroke-dasharray": s.dashed ? "5 3" : "none"}));
      if (s.dots || s.points.length < 30)
        for (const [step, value] of s.points)
          if (value !== null) svg.append(node("circle", {cx: axis.x(step), cy: axis.y(value), r: 2.5, fill: s.colour}));
    }
    drawMarks(svg, marks, axis, xRange);
    return {svg, bottom: axis.bottom, xs: steps.map(axis.x), describe: i => [
      {text: `step ${steps[i].toLocaleString("en")}`},
      ...series.flatMap(s => {
        const point = near(s.points, steps[i]);
        return point ? [{colour: s.colour, text: `${s.name}: ${short(point[1])}${unit}`}] : [];
      }),
      ...marks.filter(m => m.step === steps[i]).map(m => ({text: m.text}))]};
  });
  legend(card, series);
  return true;
}

// parts: [{name, values}], one value a step of `steps`; they add up.
function stackedChart(card, {steps, parts, unit, label, marks = [], names = null}) {
  parts = parts.map((p, i) => ({colour: colour(i), ...p})).filter(p => p.values.some(v => v > 0));
  if (steps.length === 0 || parts.length === 0) return false;
  const sums = steps.map((_, i) => parts.reduce((sum, p) => sum + (p.values[i] || 0), 0));
  const xs = names ? steps.map((_, i) => i) : steps, xRange = widened(extent(xs)), yRange = widened([0, extent(sums)[1]]);
  mount(card, `${label}: ${parts.map(p => `${p.name} ${short(p.values.at(-1))}${unit}`).join(", ")} at the end`, width => {
    const svg = canvas(width, kHeight);
    let axis;
    if (names) {  // bars, one a name
      const slot = (width - kLeft - kRight) / names.length;
      axis = axes(svg, width, [-0.5, names.length - 0.5], yRange, kHeight);
      svg.querySelectorAll("text[text-anchor=middle], .unit").forEach(t => t.remove());
      const every = Math.ceil(names.length * 60 / (width - kLeft - kRight));
      names.forEach((name, i) => {
        if (i % every === 0)
          svg.append(node("text", {x: axis.x(i), y: axis.bottom + 16, "text-anchor": "middle"}, name));
        let below = 0;
        for (const p of parts) {
          const value = p.values[i] || 0, bar = Math.min(slot * 0.7, 56);
          svg.append(node("rect", {x: axis.x(i) - bar / 2, width: bar, y: axis.y(below + value),
                                   height: Math.max(0, axis.y(below) - axis.y(below + value)), fill: p.colour}));
          below += value;
        }
      });
    } else {
      axis = axes(svg, width, xRange, yRange, kHeight);
      const below = steps.map(() => 0);
      for (const p of parts) {
        const up = steps.map((s, i) => `${axis.x(s).toFixed(1)},${axis.y(below[i] + (p.values[i] || 0)).toFixed(1)}`);
        const down = steps.map((s, i) => `${axis.x(s).toFixed(1)},${axis.y(below[i]).toFixed(1)}`).reverse();
        svg.append(node("path", {d: "M" + up.join("L") + "L" + down.join("L") + "Z", fill: p.colour, "fill-opacity": 0.85}));
        p.values.forEach((v, i) => { below[i] += v || 0; });
      }
      drawMarks(svg, marks, axis, xRange);
    }
    return {svg, bottom: axis.bottom, xs: xs.map(axis.x), describe: i => [
      {text: names ? names[i] : `step ${steps[i].toLocaleString("en")}`},
      ...[...parts].reverse().map(p => ({colour: p.colour, text: `${p.name}: ${short(p.values[i])}${unit}`})),
      {text: `together ${short(sums[i])}${unit}`}]};
  });
  legend(card, parts, true);
  return true;
}

// Viridis: lightness rises evenly, and colour-blind readers see it rise too.
const kRamp = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
function ramp(share) {
  const at = Math.max(0, Math.min(1, share)) * (kRamp.length - 1), i = Math.min(kRamp.length - 2, Math.floor(at)), f = at - i;
  return `rgb(${kRamp[i].map((c, k) => Math.round(c + (kRamp[i + 1][k] - c) * f)).join(",")})`;
}

// heat: {steps, last, layers, values[layer][column]}.
function heatMap(card, {heat, range, label, unit = ""}) {
  const {steps, layers, values} = heat;
  const seen = extent(values.flat()), middle = (seen[0] + seen[1]) / 2;
  const least = Math.abs(middle) / 50;  // what differs by less is drawn as alike
  const alike = !(seen[1] - seen[0] > least);  // all zeros, or nothing at all, among them
  const [low, high] = range ?? (!alike ? seen : !isFinite(middle) ? [0, 1] : least > 0 ? widened([middle - least / 2, middle + least / 2]) : [middle - 0.5, middle + 0.5]);
  const cell = Math.max(9, Math.min(22, 160 / layers.length)), height = kTop + cell * layers.length + kBottom;
  mount(card, `${label}: from ${short(seen[0])}${unit} to ${short(seen[1])}${unit} over ${layers.length} layers`, width => {
    const svg = canvas(width, height), bottom = height - kBottom, w = (width - kLeft - kRight) / steps.length;
    const every = Math.ceil(13 / cell);
    layers.forEach((layer, r) => {
      const y = kTop + r * cell;
      if (r % every === 0) svg.append(node("text", {x: kLeft - 6, y: y + cell / 2 + 4, "text-anchor": "end"}, layer));
      values[r].forEach((v, c) => {
        if (v !== null)
          svg.append(node("rect", {x: (kLeft + c * w).toFixed(2), y, width: (w + 0.3).toFixed(2), height: cell + 0.3,
                                   fill: ramp((v - low) / (high - low)), "shape-rendering": "crispEdges"}));
      });
    });
    svg.append(node("text", {x: 12, y: kTop + cell * layers.length / 2, "text-anchor": "middle",
                             transform: `rotate(-90 12 ${kTop + cell * layers.length / 2})`}, "layer"));
    // Columns are steps at which the file has rows, evenly spaced or not: labels say which.
    svg.append(node("line", {class: "axis", x1: kLeft, x2: width - kRight, y1: bottom, y2: bottom}));
    const labels = Math.max(1, Math.min(steps.length, Math.floor(width / 110)));
    for (let k = 0; k < labels; ++k) {
      const c = Math.floor(k * steps.length / labels);
      svg.append(node("text", {x: kLeft + (c + 0.5) * w, y: bottom + 16, "text-anchor": "middle"}, steps[c].toLocaleString("en")));
    }
    svg.append(node("text", {x: kLeft - 20, y: bottom + 16, "text-anchor": "end"}, "step"));
    return {svg, bottom, xs: steps.map((_, c) => kLeft + (c + 0.5) * w), rowAt: y => Math.floor((y - kTop) / cell),
            describe: (i, row) => [
              {text: `step ${steps[i].toLocaleString("en")}`},
              ...layers.flatMap((layer, r) => (row === null || row === undefined ? r < 12 : r === row)
                ? [{colour: ramp((values[r][i] - low) / (high - low)), text: `layer ${layer}: ${short(values[r][i])}${unit}`}] : [])]};
  });
  const bar = node("span", {class: "ramp"});
  bar.style.background = `linear-gradient(to right, ${kRamp.map(c => `rgb(${c})`).join(",")})`;
  card.append(node("div", {class: "legend"}, node("span", {}, short(low) + unit, bar, short(high) + unit)));
  return true;
}
