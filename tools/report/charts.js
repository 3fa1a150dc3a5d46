// SVG charts: lines, stacked areas and bars. A chart is drawn for its current width, and redrawn when the width or a switch
// of the page changes. It shows the values under the pointer, or under a cursor that the arrow keys move. Text from files
// is inserted as text, never as HTML.
"use strict";

const kHeight = 230, kLeft = 54, kRight = 14, kTop = 12, kBottom = 40;

// State of the page's switches. axis: steps, tokens or time; unit: loss, perplexity or bits.
const view = {axis: "steps", unit: "loss", smooth: true, log: false, whole: false};
const redraws = [];

function node(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "line", "rect", "text", "circle", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const kColours = 10;  // more runs than these repeat them, with dashes
const colour = i => `var(--s${i % kColours})`;
const whole = x => Math.round(x).toLocaleString("en");

function short(x) {
  if (x === null || x === undefined || !isFinite(x)) return "–";
  const size = Math.abs(x);
  if (size >= 1e15) return Number(x.toPrecision(3)).toExponential();
  if (size >= 1e9) return (x / 1e9).toPrecision(4) / 1 + "G";
  if (size >= 1e6) return (x / 1e6).toPrecision(4) / 1 + "M";
  if (size >= 1e4) return (x / 1e3).toPrecision(4) / 1 + "k";
  if (size !== 0 && size < 1e-3) return Number(x.toPrecision(3)).toExponential();
  return String(Number(x.toPrecision(5)));
}

function clockText(s) {
  const two = x => String(Math.floor(x)).padStart(2, "0");
  if (s < 60) return `${Number(s.toPrecision(3))} s`;
  if (s < 3600) return s % 60 < 1 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 60)}:${two(s % 60)} min`;
  return s % 3600 < 60 ? `${whole(Math.floor(s / 3600))} h` : `${whole(Math.floor(s / 3600))}:${two(s / 60 % 60)} h`;
}

// ---- axes ----

// The multiples, in [low, high], of that one of the steps which gives nearest to kTicks of them.
const kTicks = 5;
function nearestTicks(steps, low, high, n) {
  let best = [];
  for (const step of steps) {
    const count = Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
    if (count > 3 * n) continue;
    const at = multiples(step, low, high);
    if (best.length === 0 || Math.abs(at.length - n) < Math.abs(best.length - n)) best = at;
  }
  return best;
}
// About n round numbers in [low, high].
function ticks(low, high, n = kTicks, least = 0) {
  const power = 10 ** Math.floor(Math.log10(Math.max((high - low) / n, least)));
  return nearestTicks([1, 2, 5, 10, 2.5, 4, 0.5].map(f => f * power).filter(step => step >= least), low, high, n);
}
// The least range that contains [low, high] and ends at two of about kTicks round numbers.
function roundRange([low, high]) {
  const power = 10 ** Math.floor(Math.log10((high - low) / (kTicks - 1)));
  let best = null;
  for (const step of [1, 2, 5, 10, 2.5, 4].map(f => f * power)) {
    const from = Math.floor(low / step + 1e-9), to = Math.ceil(high / step - 1e-9), off = Math.abs(to - from + 1 - kTicks);
    if (best === null || off < best.off) best = {off, range: [from * step, to * step], step};
  }
  return Object.assign(best.range.map(v => Number(v.toPrecision(12))), {step: best.step});  // step: between its ticks
}
const wholeTicks = (low, high, n) => ticks(low, high, n, 1).filter(Number.isInteger);
function multiples(step, low, high) {
  const out = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) out.push(Number(at.toPrecision(12)));
  return out;
}
function timeTicks(low, high, n) {
  const raw = (high - low) / n;
  if (raw < 1 || raw > 86400) return ticks(low, high, n);
  return nearestTicks([1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800], low, high, n);
}
// Ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or fewer; round numbers if the range is narrow.
function logTicks(low, high) {
  if (high / low < 8) return ticks(low, high).filter(t => t > 0);
  const decade = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  let best = [];
  for (const [each, every] of [[[1, 2, 5], 1], [[1, 3], 1], [[1], 1], [[1], 2], [[1], 3], [[1], 6]]) {
    const at = [];
    for (let power = decade; power <= last; power += every)
      at.push(...each.map(f => Number((f * 10 ** power).toPrecision(3))).filter(t => t >= low * 0.999 && t <= high * 1.001));
    if (best.length === 0 || Math.abs(at.length - kTicks) < Math.abs(best.length - kTicks)) best = at;
  }
  return best;
}
const kAxes = {
  steps: {name: "step", ticks: wholeTicks, write: whole, title: x => `step ${whole(x)}`},
  tokens: {name: "tokens", ticks, write: short, title: x => `${short(x)} tokens`},
  time: {name: "time", ticks: timeTicks, write: clockText, title: x => `after ${clockText(x)}`},
};

function widened([low, high]) {
  if (!(low <= high)) return [0, 1];
  if (low === high) { const by = Math.abs(low) * 0.05 || 1; return [low - by, high + by]; }
  return [low, high];
}
function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) if (v !== null && isFinite(v)) { low = Math.min(low, v); high = Math.max(high, v); }
  return [low, high];
}

// Linear interpolation between points [[x, y], ...], extrapolated beyond their ends.
function between(points, x) {
  if (points.length < 2) return points.length === 1 ? points[0][1] : NaN;
  let low = 1, high = points.length - 1;
  while (low < high) { const middle = (low + high) >> 1; points[middle][0] < x ? (low = middle + 1) : (high = middle); }
  const [x0, y0] = points[low - 1], [x1, y1] = points[low];
  return x1 > x0 ? y0 + (y1 - y0) * (x - x0) / (x1 - x0) : y1;
}
// A function from a run's step to its place on the current axis.
function placer(run) {
  if (view.axis === "tokens") return step => step * run.tokens_per_step;
  if (view.axis === "time") return step => between(run.clock, step);
  return step => step;
}

// Gaussian smoothing; sigma is a hundredth of the line. null where there is no value.
function smoothed(values) {
  const sigma = values.length / 100, reach = Math.ceil(3 * sigma);
  return values.map((value, i) => {
    if (value === null) return null;
    let sum = 0, weights = 0;
    for (let k = Math.max(0, i - reach); k <= Math.min(values.length - 1, i + reach); ++k) {
      if (values[k] === null) continue;
      const weight = Math.exp(-((k - i) ** 2) / (2 * sigma * sigma));
      sum += weight * values[k];
      weights += weight;
    }
    return sum / weights;
  });
}
const kFewest = 30;  // least number of points of a smoothed line

// ---- common parts of all charts ----

// Adds a chart to a card. draw(width) returns {svg, bottom, xs, describe(i, row)}: the SVG, the y of the axis, the x of each
// place of the cursor, and the lines of text there. Charts with rows also return rows (their number) and rowAt(y).
// table() returns the chart's numbers for a CSV file: a list of rows, the names first.
function mount(card, label, draw, table) {
  const chart = node("div", {class: "chart", tabindex: "0", role: "img", "aria-label": label});
  card.append(chart);
  addSaving(card, chart, label, table);
  let scene = null, at = null, tip = null, cursor = null;
  const forget = () => { tip?.remove(); cursor?.remove(); tip = cursor = null; at = null; };
  const show = index => {
    if (!scene || scene.xs.length === 0) return;
    at = Math.max(0, Math.min(scene.xs.length - 1, index));
    const lines = scene.describe(at, scene.row, scene.y);
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
    scene = draw(Math.max(220, chart.clientWidth));
    chart.prepend(scene.svg);
  };
  chart.addEventListener("pointermove", e => {
    const box = chart.getBoundingClientRect(), x = e.clientX - box.left;
    if (!scene || scene.xs.length === 0) return;
    scene.y = e.clientY - box.top;
    scene.row = scene.rowAt ? scene.rowAt(scene.y) : null;
    let best = 0;
    scene.xs.forEach((value, i) => { if (Math.abs(value - x) < Math.abs(scene.xs[best] - x)) best = i; });
    show(best);
  });
  chart.addEventListener("pointerleave", forget);
  chart.addEventListener("blur", forget);
  chart.addEventListener("keydown", e => {
    if (!scene) return;
    const by = {ArrowLeft: -1, ArrowRight: 1}[e.key], down = scene.rows ? {ArrowUp: -1, ArrowDown: 1}[e.key] : undefined;
    if (by === undefined && down === undefined) return;
    e.preventDefault();
    if (down !== undefined) scene.row = Math.max(0, Math.min(scene.rows - 1, (scene.row ?? (down > 0 ? -1 : scene.rows)) + down));
    scene.y = undefined;
    show(at === null ? ((by ?? 1) > 0 ? 0 : scene.xs.length - 1) : at + (by ?? 0));
  });
  let width = 0;
  new ResizeObserver(() => { if (chart.clientWidth !== width) { width = chart.clientWidth; redraw(); } }).observe(chart);
  redraws.push(() => { if (chart.isConnected && (width = chart.clientWidth) > 0) redraw(); });
}

function canvas(width, height) {
  return node("svg", {viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true"});
}

// The part of a chart that shows only what is between its axes' ends, or a little beyond.
function plotIn(svg, width, bottom) {
  const kBeyond = 4, top = kTop - kBeyond, height = bottom - kTop + 2 * kBeyond;
  const plot = node("svg", {class: "plot", x: 0, y: top, width, height, viewBox: `0 ${top} ${width} ${height}`});
  svg.append(plot);
  return plot;
}

// Draws the bottom axis; returns the function from a value to its x.
function bottomAxis(svg, width, bottom, range, axis = kAxes[view.axis]) {
  const x = v => kLeft + (v - range[0]) / (range[1] - range[0]) * (width - kLeft - kRight);
  svg.append(node("line", {class: "axis", x1: kLeft, x2: width - kRight, y1: bottom, y2: bottom}));
  let marks = [];
  for (let n = kTicks; n > 1; --n) {  // fewer where the labels do not fit
    marks = axis.ticks(range[0], range[1], n);
    const widest = Math.max(0, ...marks.map(t => axis.write(t).length)) * 6.5 + 8;
    if (marks.length * widest <= width - kLeft - kRight + widest) break;
  }
  for (const t of marks)
    svg.append(node("text", {x: x(t), y: bottom + 15, "text-anchor": "middle"}, axis.write(t)));
  svg.append(node("text", {class: "name", x: (kLeft + width - kRight) / 2, y: bottom + 31, "text-anchor": "middle"}, axis.name));
  return x;
}

function leftAxis(svg, width, bottom, range, {log = false, write = short} = {}) {
  const at = log ? Math.log : v => v;
  const y = v => bottom - (at(v) - at(range[0])) / (at(range[1]) - at(range[0])) * (bottom - kTop);
  for (const t of log ? logTicks(...range) : range.step ? multiples(range.step, range[0], range[1]) : ticks(range[0], range[1])) {
    svg.append(node("line", {class: "rule", x1: kLeft, x2: width - kRight, y1: y(t), y2: y(t)}));
    svg.append(node("text", {x: kLeft - 6, y: y(t) + 4, "text-anchor": "end"}, write(t)));
  }
  return y;
}

// Marks events at their steps. marks: [{run, step, text, differs}]; differs: where two runs' losses first differ.
function drawMarks(svg, marks, x, xRange, bottom) {
  const drawn = new Set();  // a step may have several events
  for (const mark of marks) {
    const where = placer(mark.run)(mark.step), at = x(where), place = `${where}${mark.differs ?? ""}`;
    if (where < xRange[0] || where > xRange[1] || drawn.has(place)) continue;
    drawn.add(place);
    svg.append(node("line", {class: mark.differs ? "differs" : "mark", x1: at, x2: at, y1: kTop, y2: bottom}));
    svg.append(node("text", {x: at, y: kTop, "text-anchor": "middle"}, mark.differs ? "◆" : "▼"));
  }
}

function legend(card, entries, shape) {
  if (entries.length < 2) return;
  const div = node("div", {class: "legend"});
  for (const entry of entries) {
    const i = node("i", {class: shape ?? (entry.dots ? "dot" : entry.dashed ? "dash" : "")});
    i.style.color = entry.colour;
    div.append(node("span", {}, i, entry.name));
  }
  card.append(div);
}

// ---- lines ----

const kUnits = {loss: {name: "", of: v => v}, perplexity: {name: "", of: Math.exp}, bits: {name: " bits", of: (v, run) => (run.bits_per_nat ? v * run.bits_per_nat : null)}};

// A series in the current axis and unit: {x, y, step} of each point, and the smoothed line or null.
function lineNow(s, options) {
  const of = options.loss ? kUnits[view.unit].of : v => v;
  const mapped = typeof s.points === "function", place = mapped ? x => x : placer(s.run);
  const points = (mapped ? s.points(view.axis) : s.points).map(([at, v]) => ({x: place(at), y: v === null ? null : of(v, s.run), step: at}));
  const smooth = options.smooth && view.smooth && !s.dots && points.length >= kFewest;
  return {...s, mapped, points, line: smooth ? smoothed(points.map(p => p.y)) : null};
}

function drawLine(svg, s, x, y) {
  const path = (values, style) => {
    let d = "", pen = false;
    values.forEach((v, i) => {
      if (v === null || !isFinite(y(v))) { pen = false; return; }
      d += `${pen ? "L" : "M"}${x(s.points[i].x).toFixed(1)},${y(v).toFixed(1)}`;
      pen = true;
    });
    svg.append(node("path", {d, fill: "none", stroke: s.colour, "stroke-linejoin": "round", ...style}));
  };
  const raw = s.points.map(p => p.y);
  if (s.line && !s.crowded) path(raw, {"stroke-width": 1, "stroke-opacity": 0.3});
  path(s.line ?? raw, {"stroke-width": s.dots ? 1 : 1.7, "stroke-dasharray": s.dashed || s.dots ? "4 3" : "none"});
  if (s.dots || s.points.length < kFewest)
    for (const p of s.points)
      if (p.y !== null && isFinite(y(p.y))) svg.append(node("circle", {cx: x(p.x), cy: y(p.y), r: s.dots ? 3.2 : 2.5, fill: s.colour}));
}

function nearest(points, x, reach) {
  let low = 0, high = points.length - 1;
  if (high < 0) return -1;
  while (low < high) { const middle = (low + high) >> 1; points[middle].x < x ? (low = middle + 1) : (high = middle); }
  const best = low > 0 && x - points[low - 1].x < Math.abs(points[low].x - x) ? low - 1 : low;
  return Math.abs(points[best].x - x) <= reach ? best : -1;
}

// Draws lines. series: [{name, run, points: [[step, value], ...], dots, dashed, colour}]; points may be a function of the
// axis that returns [[place, value], ...]. options: unit, marks, label, zero (the axis contains 0), smooth and log (obey
// those switches), noLegend, loss (values are losses, shown in the unit of the switch), axis (one for these points instead of
// that of the switch, as in kAxes; points are functions). Returns false if there is nothing to draw.
function lineChart(card, {series, unit = "", marks = [], zero = false, label, ...options}) {
  series = series.map((s, i) => ({colour: colour(i), ...s}));
  series = series.filter(s => (typeof s.points === "function" ? s.points("steps") : s.points).some(p => p[1] !== null));
  if (series.length === 0) return false;
  const ends = series.filter(s => typeof s.points !== "function").map(s => `${s.name} ends at ${short(s.points.at(-1)[1])}${unit}`);
  const visible = () => series.filter(s => !s.run?.hidden).map(s => lineNow(s, options)).filter(s => s.points.length > 0);
  const described = series.length > 6 ? [label, `${series.length} lines`] : [label, ...ends];
  mount(card, described.join(", "), width => {
    const lines = visible();
    const svg = canvas(width, kHeight), bottom = kHeight - kBottom;
    const xRange = widened(extent(lines.flatMap(s => s.points.map(p => p.x))));
    const seen = extent(lines.flatMap(s => s.points.map(p => p.y)));
    const log = options.log && view.log && seen[0] > 0, most = seen[1];
    if (!log && !view.whole) seen[1] = withoutFirstSpike(lines, seen);
    if (zero) { seen[0] = Math.min(0, seen[0]); seen[1] = Math.max(0, seen[1]) || (seen[0] < 0 ? 0 : 1); }
    const yRange = log ? widened(seen) : roundRange(widened(seen));
    const axis = options.axis ?? kAxes[view.axis];
    const x = bottomAxis(svg, width, bottom, xRange, axis), y = leftAxis(svg, width, bottom, yRange, {log});
    if (zero && seen[0] < 0) svg.append(node("line", {class: "axis", x1: kLeft, x2: width - kRight, y1: y(0), y2: y(0)}));
    const plot = plotIn(svg, width, bottom);
    for (const s of lines) drawLine(plot, s, x, y);
    if (seen[1] < most)
      svg.append(node("text", {x: width - kRight, y: kTop - 3, "text-anchor": "end"}, `↑ ${short(most)} at the beginning`));
    drawMarks(svg, marks, x, xRange, bottom);
    const shown = options.loss ? kUnits[view.unit].name : unit;
    const stops = [...new Set(lines.flatMap(s => s.points.map(p => p.x)))].sort((a, b) => a - b);
    const reach = (xRange[1] - xRange[0]) / 100;  // lines are thinned separately: use the nearest point of each
    return {svg, bottom, xs: stops.map(x), describe: (i, row, pointer) => [
      {text: axis.title(stops[i])},
      ...nearestLines(lines.flatMap(s => {
        const at = nearest(s.points, stops[i], reach);
        if (at < 0 || s.points[at].y === null) return [];
        const mean = s.line ? `, smoothed ${short(s.line[at])}` : "", step = view.axis === "steps" || s.mapped ? "" : ` at step ${whole(s.points[at].step)}`;
        return [{colour: s.colour, y: y(s.line ? s.line[at] : s.points[at].y), text: `${s.name}: ${short(s.points[at].y)}${shown}${mean}${step}`}];
      }), pointer),
      ...marks.filter(m => placer(m.run)(m.step) === stops[i]).map(m => ({text: m.text}))]};
  }, () => {
    const lines = visible(), steps = [...new Set(lines.flatMap(s => s.points.map(p => p.step)))].sort((a, b) => a - b);
    const values = lines.map(s => new Map(s.points.map(p => [p.step, p.y])));
    return [[options.axis?.name ?? (lines.some(s => s.mapped) ? kAxes[view.axis].name : "step"), ...lines.map(s => s.name)],
            ...steps.map(step => [step, ...values.map(at => at.get(step) ?? "")])];
  });
  if (!options.noLegend) legend(card, series);
  return true;
}

// The end of an axis for these lines: the largest value, but for points at their beginning that would fill most of it.
function withoutFirstSpike(lines, [low, high]) {
  const kFirst = 0.05, kFewestPoints = 20;
  const body = extent(lines.flatMap(s => s.points.slice(s.points.length < kFewestPoints ? 0 : Math.ceil(kFirst * s.points.length)).map(p => p.y)));
  if (!(body[1] > body[0]) || high - low <= 1.3 * (body[1] - Math.min(low, body[0]))) return high;
  return body[1] + 0.05 * (body[1] - Math.min(low, body[0]));
}

// The lines that a tooltip has room for: those nearest to the pointer.
function nearestLines(all, pointer) {
  const kMost = 10;
  if (all.length <= kMost) return all;
  const far = entry => (pointer === undefined ? 0 : Math.abs(entry.y - pointer));
  const near = [...all].sort((a, b) => far(a) - far(b)).slice(0, kMost).sort((a, b) => a.y - b.y);
  return [...near, {text: `and ${all.length - kMost} more`}];
}

// ---- stacked ----

// Draws values that add up, as stacked areas over the steps, or as stacked bars if the stack has names. stack: {run, steps,
// names, parts: [{name, values}]}, one value a step. stacks: all that share this axis. most: the axis's end; default: the
// largest sum. Returns false if there is nothing to draw.
function stackedChart(card, {stack, stacks = [stack], unit = "", label, marks = [], most = null}) {
  const {run, steps, names} = stack;
  const parts = stack.parts.map((p, i) => ({colour: colour(i + 2), ...p})).filter(p => p.values.some(v => v > 0));
  if (steps.length < (names ? 1 : 2) || parts.length === 0) return false;
  const sumsOf = s => s.steps.map((_, i) => s.parts.reduce((sum, p) => sum + (p.values[i] || 0), 0));
  const sums = sumsOf(stack), highest = extent(stacks.flatMap(sumsOf))[1];
  const asLines = stacks.map(s => ({points: sumsOf(s).map(y => ({y}))}));
  const end = () => most ?? (view.whole || names ? highest : withoutFirstSpike(asLines, [0, highest]));
  mount(card, [label, ...parts.map(p => `${p.name} ${short(p.values.at(-1))}${unit} at the end`)].join(", "), width => {
    const svg = canvas(width, kHeight), bottom = kHeight - kBottom, y = leftAxis(svg, width, bottom, roundRange(widened([0, end()])));
    if (most === null && end() < highest)
      svg.append(node("text", {x: width - kRight, y: kTop - 3, "text-anchor": "end"}, `↑ ${short(highest)} at the beginning`));
    const scene = names ? stackedBars(svg, width, bottom, y, names, parts) : stackedAreas(svg, width, bottom, y);
    return {svg, bottom, xs: scene, describe: i => [
      {text: names ? names[i] : kAxes[view.axis].title(placer(run)(steps[i]))},
      ...[...parts].reverse().map(p => ({colour: p.colour, text: `${p.name}: ${short(p.values[i])}${unit}`})),
      ...(most === null ? [{text: `together ${short(sums[i])}${unit}`}] : [])]};
  }, () => [[names ? "snapshot" : "step", ...parts.map(p => p.name)], ...steps.map((step, i) => [names ? names[i] : step, ...parts.map(p => p.values[i] ?? "")])]);
  legend(card, parts, "box");
  return true;

  function stackedAreas(svg, width, bottom, y) {
    const xRange = widened(extent(stacks.flatMap(s => s.steps.map(placer(s.run)))));
    const x = bottomAxis(svg, width, bottom, xRange), xs = steps.map(placer(run)).map(x);
    const below = steps.map(() => 0), plot = plotIn(svg, width, bottom);
    for (const p of parts) {
      const up = xs.map((at, i) => `${at.toFixed(1)},${y(below[i] + (p.values[i] || 0)).toFixed(1)}`);
      const down = xs.map((at, i) => `${at.toFixed(1)},${y(below[i]).toFixed(1)}`).reverse();
      plot.append(node("path", {d: "M" + up.join("L") + "L" + down.join("L") + "Z", fill: p.colour}));
      p.values.forEach((v, i) => { below[i] += v || 0; });
    }
    drawMarks(svg, marks, x, xRange, bottom);
    return xs;
  }
}

function stackedBars(svg, width, bottom, y, names, parts) {
  const slot = (width - kLeft - kRight) / names.length, bar = Math.min(slot * 0.7, 56), every = Math.ceil(60 / slot);
  svg.append(node("line", {class: "axis", x1: kLeft, x2: width - kRight, y1: bottom, y2: bottom}));
  return names.map((name, i) => {
    const x = kLeft + slot * (i + 0.5);
    if (i % every === 0) svg.append(node("text", {x, y: bottom + 15, "text-anchor": "middle"}, name));
    let below = 0;
    for (const p of parts) {
      const value = p.values[i] || 0;
      svg.append(node("rect", {x: x - bar / 2, width: bar, y: y(below + value), height: Math.max(0, y(below) - y(below + value)), fill: p.colour}));
      below += value;
    }
    return x;
  });
}
