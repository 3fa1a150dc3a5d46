// The report from its data: one run, or two (then every line chart has both, and what belongs to one run is told of each).
"use strict";

const runs = JSON.parse(document.getElementById("data").textContent);
const both = runs.length > 1;
const tag = i => (both ? ` ${"AB"[i]}` : "");

function card(parent, title, note, unit) {
  const heading = node("h3", {}, title);
  if (unit) heading.append(node("span", {class: "faint"}, unit.trim()));
  const made = node("section", {class: "card"}, heading);
  if (note) made.append(node("p", {class: "faint"}, note));
  parent.append(made);
  return made;
}
function section(title) {
  const grid = node("div", {class: "grid"});
  document.getElementById("charts").append(node("h2", {}, title), grid);
  return grid;
}
function none(parent, title, text) { card(parent, title).append(node("p", {class: "none"}, text)); }

const bad = new Set(["anomaly", "slow", "hung", "nonfinite", "divergence"]);
const marks = runs.flatMap((run, i) => run.events.filter(e => bad.has(e.kind))
  .map(e => ({step: e.step, text: `${e.kind}${tag(i)}, rank ${e.rank}: ${e.text}`})));
const parting = JSON.parse(document.getElementById("parting").textContent);
if (parting.first !== null) marks.push({step: parting.first, parts: true, text: "here the losses part"});

function line(parent, title, column, options = {}) {
  const made = card(parent, title, options.note, options.unit);
  const series = runs.map((run, i) => ({name: (options.name ?? title.toLowerCase()) + tag(i), points: run.training[column],
                                        dashed: i > 0, colour: colour(i)}));
  if (options.extra) series.push(...options.extra);
  if (!lineChart(made, {series, marks, label: title, ...options.chart})) {
    made.append(node("p", {class: "none"}, options.none ?? "no rows yet"));
  }
}

// ---- how it goes ----
const curves = section("Training");
line(curves, "Loss", "loss", {extra: runs.map((run, i) => ({name: "validation" + tag(i), points: run.validation, dots: true, colour: colour(i + 2)}))});
{
  const made = card(curves, "Validation loss");
  if (!lineChart(made, {series: runs.map((run, i) => ({name: "validation loss" + tag(i), points: run.validation, dots: true})), marks, label: "Validation loss"}))
    made.append(node("p", {class: "none"}, "This run made no evaluation (train.eval_every)."));
}
line(curves, "Throughput", "tokens_per_s", {name: "tokens/s", unit: "tokens/s", chart: {zero: true}});
line(curves, "Gradient norm", "grad_norm", {name: "norm before clipping"});
line(curves, "Learning rate", "lr");
line(curves, "Model FLOPs utilisation", "mfu", {name: "mfu", none: "Known on a GPU alone.", chart: {zero: true}});

// ---- where the time goes ----
const time = section("Time");
const kParts = [["compute_ms", "forward and backward"], ["comm_wait_ms", "waiting for other ranks"], ["update_ms", "norm and update"],
                ["fetch_ms", "waiting for tokens"]];
runs.forEach((run, i) => {
  const title = "Step time by part" + tag(i), rank = run.ranks[0];
  if (!rank?.lines.step_ms) return none(time, title, "This run has no heartbeats of steps (log.heartbeat_every).");
  const steps = rank.lines.step_ms.map(p => p[0]), all = new Map(rank.lines.step_ms);
  const parts = kParts.map(([key, name]) => {
    const at = new Map(rank.lines[key] ?? []);
    let last = 0;  // lines are thinned each on its own: a step that one lacks has the value before it
    return {name, values: steps.map(s => (last = at.get(s) ?? last))};
  });
  parts.push({name: "other", values: steps.map((s, k) => Math.max(0, all.get(s) - parts.reduce((sum, p) => sum + p.values[k], 0)))});
  const note = [run.ranks.length > 1 ? `Of rank ${rank.rank}.` : "",
                rank.lines.gpu_mem_alloc_mib ? "The GPU's parts run beside the host's: they may add up to more than the step." : ""];
  stackedChart(card(time, title, note.join(" ").trim(), "ms"),
               {steps, parts, unit: " ms", label: title, marks});
});
runs.forEach((run, i) => {
  const title = "Step time, ranks side by side" + tag(i);
  const series = run.ranks.map(r => ({name: `rank ${r.rank}`, points: r.lines.step_ms ?? []}));
  if (!series.some(s => s.points.length > 0)) return none(time, title, "This run has no heartbeats of steps (log.heartbeat_every).");
  lineChart(card(time, title, "", "ms"), {series, unit: " ms", marks, label: title, zero: true});
});
runs.forEach((run, i) => {
  if (run.ranks.length < 2) return;
  const title = "Waiting for other ranks" + tag(i);
  const series = run.ranks.map(r => ({name: `rank ${r.rank}`, points: r.lines.comm_wait_ms ?? []}));
  if (!series.some(s => s.points.length > 0)) return none(time, title, "This run's heartbeats do not tell.");
  lineChart(card(time, title, "A rank that waits little is the one that the others wait for.", "ms"),
            {series, unit: " ms", marks, label: title, zero: true});
});

// ---- where the memory goes ----
const memory = section("Memory and device");
runs.forEach((run, i) => {
  const title = "Memory by category" + tag(i);
  if (run.memory.length === 0) return none(memory, title, "This run wrote no memory snapshots (mem_*.json; log.memory_every).");
  const names = [...new Set(run.memory.flatMap(m => Object.keys(m.categories)))];
  stackedChart(card(memory, title, "At each snapshot that the run has left.", "MiB"),
               {steps: run.memory.map(m => m.step), names: run.memory.map(m => m.label), unit: " MiB", label: title,
                parts: names.map(name => ({name, values: run.memory.map(m => m.categories[name] ?? 0)}))});
});
function deviceLine(title, key, unit) {
  const series = runs.flatMap((run, i) => run.ranks.map(r => ({name: `rank ${r.rank}${tag(i)}`, points: r.lines[key] ?? []})));
  if (!series.some(s => s.points.length > 0)) return false;
  return lineChart(card(memory, title, "", unit), {series, unit, marks, label: title, zero: true});
}
if (!deviceLine("Host memory", "host_mib", " MiB")) none(memory, "Host memory", "This run's heartbeats do not tell.");
const ofGpu = [["GPU memory in use", "gpu_used_mib", " MiB"], ["GPU utilisation", "gpu_util_pct", "%"], ["GPU power", "power_w", " W"]]
  .filter(of => deviceLine(...of));
if (ofGpu.length === 0) none(memory, "GPU", "NVML told nothing of memory, utilisation and power: a run on the CPU, or no libnvidia-ml.");

// ---- gates and selection ----
const kGates = [["entropy_mean", "Gate entropy", [0, Math.log(3)]], ["max_mean", "Largest gate", [0, 1]], ["collapse_frac", "Collapsed gates", [0, 1]],
                ["cmp", "Share of the compressed branch", [0, 1]], ["sel", "Share of the selected branch", [0, 1]], ["win", "Share of the window branch", [0, 1]]];
const kSelection = {k_mean: "Selected tokens a row, mean", k_max: "Selected tokens a row, most", pct_at_max: "Rows with the most tokens"};
const gates = section("Gates, by layer and step");
runs.forEach((run, i) => {
  if (!run.gates.entropy_mean) return none(gates, "Gates" + tag(i), "This run has no gates.csv (a dense model has no gates).");
  for (const [key, title, range] of kGates)
    heatMap(card(gates, title + tag(i)), {heat: run.gates[key], range, label: title + tag(i)});
});
const dead = runs.map((run, i) => ({name: "dead rows" + tag(i), points: run.ranks[0]?.lines.gate_dead_frac ?? []}));
if (dead.some(s => s.points.length > 0))
  lineChart(card(gates, "Dead gates", "Rows whose gates are all 0, of all layers: they are in none of the maps."), {series: dead, marks, label: "Dead gates"});
const selection = section("Selection, by layer and step");
runs.forEach((run, i) => {
  const found = Object.entries(run.selection);
  if (found.length === 0) return none(selection, "Selection" + tag(i), "This run has no k_stats.csv (a dense model selects nothing).");
  for (const [key, heat] of found) heatMap(card(selection, kSelection[key] + tag(i)), {heat, label: kSelection[key] + tag(i)});
});
for (const [key, title, note] of [["sel_overlap", "Overlap of neighbours' lists", "Of the blocks that a row lists, those that the row before lists too."],
                                  ["sel_forced_frac", "Forced blocks", "Of the blocks that a row lists."]]) {
  const series = runs.map((run, i) => ({name: title.toLowerCase() + tag(i), points: run.ranks[0]?.lines[key] ?? []}));
  if (series.some(s => s.points.length > 0)) lineChart(card(selection, title, note), {series, marks, label: title});
}
