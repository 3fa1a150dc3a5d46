// Builds the report's charts from the JSON in the page: for one run, or for several, which share the axes of every chart
// and have one colour each. A chart without data is left out.

const runs = JSON.parse(document.getElementById("data").textContent);
const both = runs.length > 1, many = runs.length > 6;  // many: the table of runs is the charts' legend
const tag = i => (both ? ` ${runs[i].label}` : "");
const styleOf = i => ({colour: colour(i), dashed: i >= kColours, crowded: many});
const ofRuns = build => runs.flatMap((run, i) => build(run, i));

// Returns a function that returns the section's grid and creates the section at its first call.
function section(title) {
  let grid = null;
  return () => {
    if (!grid) {
      grid = node("div", {class: "grid"});
      document.getElementById("charts").append(node("h2", {}, title), grid);
    }
    return grid;
  };
}
// Adds a card and lets draw(card) fill it; drops the card if draw returns false.
function card(grid, title, draw, {note, unit, wide} = {}) {
  const heading = node("h3", {}, title);
  if (unit) heading.append(node("span", {class: "faint"}, unit.trim()));
  const made = node("section", {class: wide ? "card wide" : "card"}, heading);
  if (note) made.append(node("p", {class: "faint note"}, note));
  if (draw(made) !== false) grid().append(made);
  return made;
}

const bad = new Set(["anomaly", "slow", "hung", "nonfinite", "divergence", "failed", "lr_jump"]);
const marks = many ? [] : ofRuns((run, i) => run.events.filter(e => bad.has(e.kind))
  .map(e => ({run, step: e.step, text: `${e.kind}${tag(i)}, rank ${e.rank}: ${e.text}`})));
const firstDifference = JSON.parse(document.getElementById("first_difference").textContent);
const difference = JSON.parse(document.getElementById("difference").textContent);
if (firstDifference.first !== null) marks.push({run: runs[0], step: firstDifference.first, differs: true, text: "the losses first differ here"});

// A line's name: with more than two runs the run's is enough.
const nameOf = (name, i) => (runs.length > 2 ? runs[i].label : name + tag(i));
// A chart with a line for each run; pick(run) returns its points.
function lines(grid, title, pick, {name = title.toLowerCase(), note, unit, ...options} = {}) {
  card(grid, title, made => lineChart(made, {series: ofRuns((run, i) => [{run, name: nameOf(name, i), points: pick(run) ?? [], ...styleOf(i)}]),
                                             unit, marks, label: title, noLegend: many, ...options}), {note, unit});
}
// A chart with a line for each rank of each run; with two runs, in the run's colour.
function rankLines(grid, title, key, {note, unit} = {}) {
  const series = ofRuns((run, i) => run.ranks.map((r, k) => ({run, name: run.ranks.length > 1 || !both ? `rank ${r.rank}${tag(i)}` : tag(i).trim(),
    points: r.lines[key] ?? [], colour: both ? colour(i) : colour(k), dashed: both && k > 0})));
  card(grid, title, made => lineChart(made, {series, unit, marks, label: title, zero: true, smooth: true}), {note, unit});
}
// A heat map for each run with data, on the same colours and axes.
function heatCards(grid, title, pick, {unit, note, log} = {}) {
  const heats = ofRuns(run => (pick(run) ? [{run, heat: pick(run)}] : []));
  for (const {run, heat} of heats)
    card(grid, title + tag(runs.indexOf(run)), made => heatMap(made, {run, heat, heats, label: title + tag(runs.indexOf(run)), unit, log}), {note});
}

// ---- the switches ----

function choice(legend, key, options) {
  const set = node("fieldset", {}, node("legend", {}, legend));
  for (const [value, text] of options) {
    const input = node("input", {type: "radio", name: key, value});
    input.checked = view[key] === value;
    input.addEventListener("change", () => { view[key] = value; keepView(); redraws.forEach(draw => draw()); });
    set.append(node("label", {}, input, text));
  }
  return set;
}
function onOff(text, key) {
  const input = node("input", {type: "checkbox", name: key});
  input.checked = view[key];
  input.addEventListener("change", () => { view[key] = input.checked; keepView(); redraws.forEach(draw => draw()); });
  return node("label", {}, input, text);
}
function switches() {
  const axis = [["steps", "steps"]], unit = [["loss", "loss"], ["perplexity", "perplexity"]];
  const trained = runs.filter(run => run.training.loss.length > 1);
  if (trained.every(run => run.tokens_per_step)) axis.push(["tokens", "tokens"]);
  if (trained.every(run => run.clock.length > 1)) axis.push(["time", "time"]);
  if (trained.some(run => run.bits_per_nat)) unit.push(["bits", "bits per byte"]);
  for (const [key, options] of [["axis", axis], ["unit", unit]])  // a stored choice may be missing
    if (!options.some(option => option[0] === view[key])) view[key] = options[0][0];
  const lineSet = node("fieldset", {}, node("legend", {}, "Lines"), onOff("smoothed", "smooth"), onOff("log axis", "log"), onOff("whole range", "whole"));
  return node("form", {class: "switches"}, choice("Against", "axis", axis), choice("Losses as", "unit", unit), lineSet);
}

// ---- training ----

const training = section("Training");
card(training, "Loss", made => lineChart(made, {
  series: [...ofRuns((run, i) => [{run, name: many ? run.label : "training" + tag(i), points: run.training.loss, ...styleOf(i)}]),
           ...(many ? [] : ofRuns((run, i) => [{run, name: "validation" + tag(i), points: run.validation, dots: true, colour: both ? colour(i) : colour(1)}]))],
  marks, label: many ? "Training loss" : "Loss of training and validation", loss: true, smooth: true, log: true, noLegend: many}), {wide: true});
document.querySelector("#charts .grid")?.before(switches());
if (difference) {
  const over = key => axis => difference[key][axis] ?? [];
  card(training, "Difference of the losses, B less A", made => lineChart(made, {
    series: [{name: "training", points: over("loss"), colour: colour(5)}, {name: "validation", points: over("validation"), dots: true, colour: colour(3)}],
    marks, label: "Difference of the losses", zero: true, smooth: true}), {wide: true, note: "Below 0, B is better. Always in nats."});
}
lines(training, "Validation loss", run => run.validation, {loss: true, log: true});
// Ranges of positions double, so that their axis is logarithmic, in powers of two.
const kPositions = {name: "tokens before the prediction, up to", ticks: kAxes.steps.ticks, write: x => (x < 10 ? whole(2 ** x) : `${whole(2 ** (x - 10))}k`),
                    title: x => `up to ${whole(2 ** x)} tokens before`};
card(training, "Loss by position", made => lineChart(made, {
  series: ofRuns((run, i) => [{run, name: "loss" + tag(i), ...styleOf(i), points: () => run.positions.map(([to, loss]) => [Math.log2(to), loss])}]),
  label: "Loss by position", loss: true, axis: kPositions}), {note: "Of the last triad eval --per-position."});
lines(training, "Throughput", run => run.training.tokens_per_s, {name: "tokens/s", unit: " tokens/s", zero: true, smooth: true});
lines(training, "Gradient norm", run => run.training.grad_norm, {name: "norm before clipping", smooth: true, log: true});
lines(training, "Learning rate", run => run.training.lr);
lines(training, "Model FLOPs utilisation", run => run.training.mfu, {name: "mfu", zero: true});
heatCards(training, "Gradient norm by layer", run => run.gradient_norms, {log: true, note: "Logarithmic colour scale."});

// ---- samples ----

const samples = section("Samples");
for (const run of runs.filter(r => r.samples.length > 0))
  card(samples, "Continuations of log.samples" + tag(runs.indexOf(run)), made => {
    const pick = node("select", {"aria-label": "evaluation"}, ...run.samples.map((at, i) => node("option", {value: i}, `step ${whole(at.step)}`)).reverse());
    const place = node("div", {class: "samples"});
    const draw = () => place.replaceChildren(...run.samples[Number(pick.value)].samples.map(({prompt, text, stopped}) =>
      node("p", {}, node("span", {class: "faint"}, prompt), text, ...(stopped ? [node("span", {class: "faint"}, " (end)")] : []))));
    pick.addEventListener("change", draw);
    made.append(pick, place);
    draw();
  }, {wide: true, note: "At each evaluation, always the likeliest token. The prompt is grey."});

// ---- time ----

const time = section("Time");
const kParts = [["compute_ms", "forward and backward"], ["comm_wait_ms", "waiting for other ranks"], ["update_ms", "norm and update"],
                ["fetch_ms", "waiting for tokens"]];
const timeStacks = ofRuns(run => {
  const rank = run.ranks[0];
  if (!rank?.lines.step_ms) return [];
  const steps = rank.lines.step_ms.map(p => p[0]), all = new Map(rank.lines.step_ms);
  const parts = kParts.map(([key, name]) => {
    const at = new Map(rank.lines[key] ?? []);
    let last = 0;  // lines are thinned separately: a step without a value repeats the previous one
    return {name, values: steps.map(s => (last = at.get(s) ?? last))};
  });
  parts.push({name: "other", values: steps.map((s, k) => Math.max(0, all.get(s) - parts.reduce((sum, p) => sum + p.values[k], 0)))});
  return [{run, rank, steps, parts}];
});
for (const stack of timeStacks) {
  const {run, rank} = stack, title = "Step time by part" + tag(runs.indexOf(run));
  const note = [run.ranks.length > 1 ? `Of rank ${rank.rank}.` : "",
                rank.lines.gpu_mem_alloc_mib ? "GPU and host work concurrently, so the parts may add up to more than the step." : ""];
  card(time, title, made => stackedChart(made, {stack, stacks: timeStacks, unit: " ms", label: title, marks}), {note: note.join(" ").trim(), unit: "ms"});
}
const severalRanks = runs.some(run => run.ranks.length > 1);
if (both || severalRanks) rankLines(time, severalRanks ? "Step time by rank" : "Step time", "step_ms", {unit: " ms"});
if (severalRanks)
  rankLines(time, "Waiting for other ranks", "comm_wait_ms", {unit: " ms", note: "The rank with the shortest wait delays the others."});

// ---- memory ----

const memory = section("Memory and device");
const memoryStacks = ofRuns(run => {
  const names = [...new Set(run.memory.flatMap(m => Object.keys(m.categories)))];
  return names.length === 0 ? [] : [{run, steps: run.memory.map(m => m.step), names: run.memory.map(m => m.label),
                                     parts: names.map(name => ({name, values: run.memory.map(m => m.categories[name] ?? 0)}))}];
});
for (const stack of memoryStacks) {
  const title = "Memory by category" + tag(runs.indexOf(stack.run));
  card(memory, title, made => stackedChart(made, {stack, stacks: memoryStacks, unit: " MiB", label: title}), {note: "At each memory snapshot of the run.", unit: "MiB"});
}
for (const [title, key, unit] of [["Host memory", "host_mib", " MiB"], ["GPU memory in use", "gpu_used_mib", " MiB"], ["GPU memory of the arena", "gpu_mem_alloc_mib", " MiB"],
                                  ["GPU utilisation", "gpu_util_pct", "%"], ["GPU power", "power_w", " W"]])
  rankLines(memory, title, key, {unit});

// ---- documents ----

const documents = section("Documents");
{
  const known = runs.filter(run => run.lengths && run.lengths.tokens > 0);
  const rangesOf = run => [...run.lengths.lengths, ...(run.lengths.row_parts ?? [])];
  const first = Math.min(...known.flatMap(run => rangesOf(run).map(r => r.from))), end = Math.max(...known.flatMap(run => rangesOf(run).map(r => r.to)));
  const starts = [];
  for (let from = first; from < end; from *= 2) starts.push(from);
  const sharesOf = (ranges, key) => {
    const at = new Map((ranges ?? []).map(r => [r.from, r[key]])), all = [...at.values()].reduce((a, b) => a + b, 0);
    return starts.map(from => (at.get(from) ?? 0) / (all || 1));
  };
  const names = starts.map(from => (from === 1 ? "1" : `${whole(from)}–${whole(2 * from - 1)}`));
  const withParts = known.some(run => run.lengths.row_parts);
  for (const [title, key] of [["Tokens by length of their document", "tokens"], ["Documents by length", "documents"]])
    if (known.length > 0)
      card(documents, title, made => groupedBars(made, {names, label: title, axis: "length in tokens", of: "length", mark: withParts ? "as the rows hold them" : "",
        series: known.map(run => ({name: `${key}${tag(runs.indexOf(run))}`, colour: colour(runs.indexOf(run)), values: sharesOf(run.lengths.lengths, key),
                                   marks: run.lengths.row_parts ? sharesOf(run.lengths.row_parts, key) : null}))}),
        {unit: "%", note: known.map(run => `${tag(runs.indexOf(run)).trim() ? tag(runs.indexOf(run)).trim() + ": " : ""}${whole(run.lengths.documents)} document${run.lengths.documents === 1 ? "" : "s"}, ` +
                                           `${whole(Math.round(run.lengths.tokens / run.lengths.documents))} tokens on average, at most ${whole(run.lengths.longest)}.`).join(" ")});
}
for (const [title, key, note] of [["Documents a row", "docs_per_row", ""],
                                  ["Tokens cut from their document", "docs_cut_share", "Tokens without the beginning of their document, and dropped ones, per token of the rows."],
                                  ["Padding", "docs_padded_share", "Share of the rows' tokens."]])
  rankLines(documents, title, key, {note});

// ---- gates ----

const gates = section("Gates");
const kBranches = [["cmp", "compressed"], ["sel", "selected"], ["win", "window"]];
const withGates = runs.filter(run => run.gates.cmp);
// The branches' shares over the steps: of one layer, or the mean of all layers (layer null).
function gateStack(run, layer) {
  const heat = run.gates.cmp;
  const values = (key, c) => {
    const column = run.gates[key].values.map(row => row[c]);
    return layer === null ? column.reduce((sum, v) => sum + v, 0) / column.length : column[layer];
  };
  return {run, steps: heat.steps, parts: kBranches.map(([key, name]) => ({name, values: heat.steps.map((_, c) => 100 * values(key, c))}))};
}
for (const run of withGates) {
  const i = runs.indexOf(run), title = "Shares of the branches" + tag(i), layers = run.gates.cmp.layers;
  card(gates, title, made => {
    const pick = node("select", {"aria-label": title + ", layer"}, node("option", {value: ""}, "mean of all layers"),
                      ...layers.map((layer, k) => node("option", {value: k}, `layer ${layer}`)));
    const place = node("div");
    const draw = () => {
      place.replaceChildren();
      const layer = pick.value === "" ? null : Number(pick.value);
      stackedChart(place, {stack: gateStack(run, layer), stacks: withGates.map(other => gateStack(other, null)), unit: "%", label: title, marks, most: 100});
    };
    pick.addEventListener("change", draw);
    made.append(pick, place);
    draw();
  }, {unit: "%"});
  const atEnd = other => kBranches.map(([key, name]) => ({name, values: other.gates[key].values.map(row => (row.at(-1) === null ? null : 100 * row.at(-1)))}));
  const bars = "Shares by layer, at the end" + tag(i), dots = "Shares by layer, magnified" + tag(i);
  card(gates, bars, made => shareBars(made, {layers, label: bars, parts: atEnd(run)}), {unit: "%"});
  card(gates, dots, made => shareDots(made, {layers, label: dots, parts: atEnd(run), all: withGates.map(atEnd)}), {unit: "%"});
}
for (const [key, title] of [["cmp", "Share of the compressed branch"], ["sel", "Share of the selected branch"], ["win", "Share of the window branch"],
                            ["entropy_mean", "Gate entropy"], ["max_mean", "Largest gate"], ["collapse_frac", "Collapsed gates"]])
  heatCards(gates, title, run => run.gates[key], {note: key === "entropy_mean" ? "The maximum, ln 3 = 1.0986, means equal shares." : ""});
lines(gates, "Dead gates", run => run.ranks[0]?.lines.gate_dead_frac?.some(p => p[1] > 0) ? run.ranks[0].lines.gate_dead_frac : [],
      {name: "dead rows", note: "Share of rows whose gates are all 0, over all layers. The maps leave them out."});

// ---- selection ----

const selection = section("Selection");
const sampled = runs.filter(run => run.sample);
// The number of the layer of sample.lists[i]. Samples without "layers" hold every layer.
const layerOf = (sample, i) => sample.layers?.[i] ?? i;
{
  const parts = sampled.map(run => ({run, ...distancesOf(run.sample)})).filter(d => d.all > 0);
  const bins = Math.max(0, ...parts.map(d => d.chosen.length)), first = Math.min(...parts.map(d => d.even.findIndex(v => v > 0)));
  if (parts.length > 0)
    card(selection, "How far away the chosen blocks are", made => groupedBars(made, {names: binNames(bins).slice(first), label: "Distance of the chosen blocks", axis: "distance in blocks", of: "distance", mark: "uniform choice",
      series: parts.map(d => ({name: `chosen blocks${tag(runs.indexOf(d.run))}`, colour: colour(runs.indexOf(d.run)), values: d.chosen.slice(first), marks: d.even.slice(first)}))}),
      {unit: "%", note: "Distance from the query's own block to a block chosen by score, over all layers and groups. Forced blocks are left out."});
  for (const {run} of parts) {
    const {sample} = run, title = "Distance by layer" + tag(runs.indexOf(run));
    const rows = sample.lists.map((_, layer) => distancesOf(sample, layer).chosen.slice(first).map(v => 100 * v));
    card(selection, title, made => distanceMap(made, {names: binNames(bins).slice(first, first + rows[0].length), values: rows, layers: rows.map((_, i) => layerOf(sample, i)), label: title}), {unit: "%", note: "Share of a layer's chosen blocks."});
  }
}
const kMostMaps = 8;  // with more, one layer is shown at a time
for (const run of sampled) {
  const {sample} = run, i = runs.indexOf(run), layers = sample.lists.length, groups = sample.lists[0].length;
  card(selection, "Which blocks are selected" + tag(i), made => {
    const pick = node("select", {"aria-label": "layer"}, ...sample.lists.map((_, layer) => node("option", {value: layer}, `layer ${layerOf(sample, layer)}`)));
    const place = node("div", {class: "maps"}), all = layers * groups * sampled.length <= kMostMaps;
    const draw = () => {
      place.replaceChildren();
      for (let layer = 0; layer < layers; ++layer)
        for (let group = 0; group < groups && (all || layer === Number(pick.value)); ++group) {
          const label = `layer ${layerOf(sample, layer)}, group ${group}`, map = node("div", {}, node("h4", {}, label));
          place.append(map);
          blockMap(map, {sample, layer, group, paint: colour(i), label: `Selected blocks, ${label}`});
        }
    };
    pick.addEventListener("change", draw);
    if (!all) made.append(pick);
    made.append(place);
    draw();
    const chosen = node("i", {class: "box"}), forced = node("i", {class: "box forced"});
    chosen.style.color = colour(i);
    made.append(node("div", {class: "legend"}, node("span", {}, chosen, "chosen by score"), node("span", {}, forced, "forced: first and nearest blocks")));
  }, {wide: true, note: `${whole(sample.queries.length)} queries of the first validation sequence, at step ${whole(sample.step)}; blocks of ${[...new Set(sample.l_sel)].join(" or ")} tokens` +
                    (isPacked(sample) ? `, counted from the beginning of each of its ${whole(sample.bounds.length - 1)} documents.` : ".")});
}
for (const [key, title] of [["k_mean", "Selected tokens a row, mean"], ["k_max", "Selected tokens a row, most"], ["pct_at_max", "Rows with the most tokens"]])
  heatCards(selection, title, run => run.selection[key]);
for (const [key, title, note] of [["sel_overlap", "Overlap of neighbours' lists", "Share of a row's selected blocks that the previous row selects too."],
                                  ["sel_forced_frac", "Forced blocks", "Share of a row's selected blocks."]])
  lines(selection, title, run => run.ranks[0]?.lines[key], {note, smooth: true});

// ---- taught index ----

const index = section("Index");
lines(index, "Index loss", run => run.ranks[0]?.lines.index_loss, {name: "sum over the layers", smooth: true, log: true});
lines(index, "Gradient norm of the index", run => run.ranks[0]?.lines.index_grad_norm, {name: "norm before clipping", smooth: true, log: true});
heatCards(index, "Index loss by layer", run => run.index?.index_loss);
heatCards(index, "Recall by layer", run => run.index?.recall,
          {note: "Share of dense attention's probability that the lists hold, in rows sampled at evaluations."});
heatCards(index, "Largest attention logit by layer", run => run.index?.max_logit, {note: "In the same rows, over all tokens that they see."});
// Classes of distances: 0, 1, 2 to 3, 4 to 7, ... On the axis, class 2^(x - 1) to 2^x - 1 is at x.
const classOf = distance => (distance === 0 ? 0 : Math.log2(distance) + 1);
const classText = x => (x < 2 ? String(x) : `${kPositions.write(x - 1)} to ${whole(2 ** x - 1)}`);
const kDistances = {name: "distance in tokens, from", ticks: kAxes.steps.ticks, write: x => (x < 1 ? "0" : kPositions.write(x - 1)),
                    title: x => `distance ${classText(x)}`};
const measured = runs.filter(run => run.index?.distances);
// The layers' mean mass in each class, and the share of it that lists hold.
const distanceSums = ({distances, mass, recall}) => distances.map((distance, k) => {
  let all = 0, held = 0;
  mass.forEach((row, layer) => { all += row[k] ?? 0; held += (row[k] ?? 0) * (recall[layer][k] ?? 0); });
  return {at: classOf(distance), mass: all / mass.length, recall: all > 0 ? held / all : null};
});
card(index, "Recall by distance", made => lineChart(made, {
  series: measured.flatMap(run => {
    const i = runs.indexOf(run), sums = distanceSums(run.index.distances), points = key => () => sums.map(sum => [sum.at, sum[key]]);
    return [{run, name: "recall" + tag(i), colour: colour(i), points: points("recall")},
            {run, name: "share of the probability" + tag(i), colour: colour(i), dashed: true, points: points("mass")}];
  }), label: "Recall by distance", zero: true, axis: kDistances}),
  {note: "Over all layers, at the last evaluation. A low recall matters where the share is large."});
for (const run of measured) {
  const {distances, layers, recall} = run.index.distances, title = "Recall by layer and distance" + tag(runs.indexOf(run));
  card(index, title, made => distanceMap(made, {names: distances.map(d => classText(classOf(d))), layers, label: title, axis: "distance in tokens",
                                                values: recall.map(row => row.map(v => (v === null ? null : 100 * v)))}), {unit: "%"});
}

arrange();
arrangeTiles();
fillContents();
loadAnew();
new ResizeObserver(() => { arrange(); arrangeTiles(); }).observe(document.querySelector("main"));

// The first drawing does not wait for the browser's first frame, which a busy machine may delay beyond a printout.
redraws.forEach(draw => draw());
