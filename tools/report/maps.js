// Heat maps by layer, gate shares by layer, distances of selected blocks, and maps of selected blocks.

// The colour map viridis: its lightness increases evenly, for colour-blind readers too.
const kRamp = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];
function ramp(share) {
  const at = Math.max(0, Math.min(1, share)) * (kRamp.length - 1), i = Math.min(kRamp.length - 2, Math.floor(at)), f = at - i;
  return `rgb(${kRamp[i].map((c, k) => Math.round(c + (kRamp[i + 1][k] - c) * f)).join(",")})`;
}

// The range of the colour scale: that of the values, or a wider one if they differ by less than kAlike of their size, so
// that tiny differences do not look large.
const kAlike = 1e-3;
function colourRange(seen) {
  const middle = (seen[0] + seen[1]) / 2, least = Math.abs(middle) * kAlike;
  if (seen[1] - seen[0] > least) return seen;
  if (!isFinite(middle)) return [0, 1];
  return least > 0 ? [middle - least / 2, middle + least / 2] : [0, 1];
}

function rampLegend(card, low, high, unit, seen = [low, high]) {
  if (seen[1] - seen[0] <= Math.abs(seen[0]) * kAlike) {
    card.append(node("div", {class: "legend"}, `${short(seen[0])}${unit} everywhere`));
    return;
  }
  const bar = node("span", {class: "ramp"});
  bar.style.background = `linear-gradient(to right, ${kRamp.map(c => `rgb(${c})`).join(",")})`;
  card.append(node("div", {class: "legend"}, node("span", {}, short(low) + unit, bar, short(high) + unit)));
}

function layerLabels(svg, layers, cell) {
  const every = Math.ceil(13 / cell), middle = kTop + cell * layers.length / 2;
  layers.forEach((layer, r) => {
    if (r % every === 0) svg.append(node("text", {x: kLeft - 6, y: kTop + r * cell + cell / 2 + 4, "text-anchor": "end"}, layer));
  });
  svg.append(node("text", {x: 14, y: middle, "text-anchor": "middle", transform: `rotate(-90 14 ${middle})`}, "layer"));
}
const cellOf = layers => Math.max(9, Math.min(22, 160 / layers.length));

// Edges of the columns at these places: half-way between neighbours.
function edges(at) {
  if (at.length === 1) return [at[0] - 0.5, at[0] + 0.5];
  const middles = at.slice(1).map((x, i) => (x + at[i]) / 2);
  return [2 * at[0] - middles[0], ...middles, 2 * at.at(-1) - middles.at(-1)];
}

// Draws a heat map. heat: {steps, last, layers, values[layer][column]}. heats: [{run, heat}, ...], all maps that share axes
// and colours. log: logarithmic colour scale.
function heatMap(card, {run, heat, heats = [{run, heat}], label, unit = "", log = false}) {
  const {steps, layers, values} = heat;
  const scale = v => (v === null ? null : log ? (v > 0 ? Math.log10(v) : null) : v);
  const all = heats.flatMap(h => h.heat.values.flat()), seen = extent(all), [low, high] = colourRange(extent(all.map(scale)));
  const cell = cellOf(layers), height = kTop + cell * layers.length + kBottom, bottom = height - kBottom;
  const paint = v => ramp((scale(v) - low) / (high - low));
  mount(card, `${label}: from ${short(seen[0])}${unit} to ${short(seen[1])}${unit} over ${layers.length} layers`, width => {
    const svg = canvas(width, height), at = edges(steps.map(placer(run)));
    const x = bottomAxis(svg, width, bottom, extent(heats.flatMap(h => edges(h.heat.steps.map(placer(h.run))))));
    layerLabels(svg, layers, cell);
    values.forEach((row, r) => row.forEach((v, c) => {
      if (scale(v) !== null)
        svg.append(node("rect", {x: x(at[c]).toFixed(2), y: kTop + r * cell, width: (x(at[c + 1]) - x(at[c]) + 0.3).toFixed(2),
                                 height: cell + 0.3, fill: paint(v), "shape-rendering": "crispEdges"}));
    }));
    return {svg, bottom, xs: steps.map((_, c) => x((at[c] + at[c + 1]) / 2)), rows: layers.length, rowAt: y => Math.floor((y - kTop) / cell),
            describe: (i, row) => [
              {text: kAxes[view.axis].title(placer(run)(steps[i]))},
              ...layers.flatMap((layer, r) => (row === null || row === undefined ? r < 12 : r === row)
                ? [{colour: paint(values[r][i]), text: `layer ${layer}: ${short(values[r][i])}${unit}`}] : [])]};
  }, () => [["step", ...layers.map(layer => `layer ${layer}`)], ...steps.map((step, c) => [step, ...values.map(row => row[c] ?? "")])]);
  rampLegend(card, log ? 10 ** low : low, log ? 10 ** high : high, unit, seen);
  return true;
}

const sharesTable = (layers, parts) => [["layer", ...parts.map(p => p.name)], ...layers.map((layer, r) => [layer, ...parts.map(p => p.values[r] ?? "")])];

// Draws a bar of full length for each layer, divided by the shares of `parts`: [{name, values[layer]}].
function shareBars(card, {layers, parts, label}) {
  parts = parts.map((p, i) => ({colour: colour(i + 2), ...p}));
  const cell = Math.max(14, cellOf(layers)), bottom = kTop + cell * layers.length;
  mount(card, label, width => {
    const svg = canvas(width, bottom + kBottom), percent = {name: "share, %", ticks, write: short};
    const x = bottomAxis(svg, width, bottom, [0, 100], percent);
    layerLabels(svg, layers, cell);
    layers.forEach((layer, r) => {
      const total = parts.reduce((sum, p) => sum + (p.values[r] ?? 0), 0) || 1;
      let below = 0;
      for (const p of parts) {
        const share = 100 * (p.values[r] ?? 0) / total, wide = x(below + share) - x(below);
        svg.append(node("rect", {x: x(below), y: kTop + r * cell + 1, width: wide, height: cell - 2, fill: p.colour}));
        if (wide > 34) svg.append(node("text", {class: "inside", x: x(below) + wide / 2, y: kTop + (r + 0.5) * cell + 4, "text-anchor": "middle"}, share.toFixed(1)));
        below += share;
      }
    });
    return {svg, bottom, xs: [0, 25, 50, 75, 100].map(x), rows: layers.length, rowAt: y => Math.max(0, Math.min(layers.length - 1, Math.floor((y - kTop) / cell))),
            describe: (_, row) => [{text: `layer ${layers[row ?? 0]}`},
                                   ...parts.map(p => ({colour: p.colour, text: `${p.name}: ${short(p.values[row ?? 0])}%`}))]};
  }, () => sharesTable(layers, parts));
  legend(card, parts, "box");
  return true;
}

// Draws the shares as dots, a row for each layer, on an axis that spans only their range. all: the parts of every chart that
// shares the axis.
function shareDots(card, {layers, parts, label, all = [parts]}) {
  parts = parts.map((p, i) => ({colour: colour(i + 2), ...p}));
  const cell = Math.max(14, cellOf(layers)), bottom = kTop + cell * layers.length;
  const seen = widened(extent(all.flat().flatMap(p => p.values))), pad = (seen[1] - seen[0]) / 20;
  mount(card, label, width => {
    const svg = canvas(width, bottom + kBottom);
    const x = bottomAxis(svg, width, bottom, [seen[0] - pad, seen[1] + pad], {name: "share, %", ticks, write: short});
    layerLabels(svg, layers, cell);
    layers.forEach((layer, r) => {
      const y = kTop + (r + 0.5) * cell;
      svg.append(node("line", {class: "rule", x1: kLeft, x2: width - kRight, y1: y, y2: y}));
      for (const p of parts) if (p.values[r] !== null) svg.append(node("circle", {cx: x(p.values[r]), cy: y, r: 4, fill: p.colour}));
    });
    const stops = parts.flatMap(p => p.values).filter(v => v !== null).sort((a, b) => a - b);
    return {svg, bottom, xs: stops.map(x), rows: layers.length, rowAt: y => Math.max(0, Math.min(layers.length - 1, Math.floor((y - kTop) / cell))),
            describe: (_, row) => [{text: `layer ${layers[row ?? 0]}`},
                                   ...parts.map(p => ({colour: p.colour, text: `${p.name}: ${short(p.values[row ?? 0])}%`}))]};
  }, () => sharesTable(layers, parts));
  legend(card, parts, "box");
  return true;
}

// ---- selected blocks ----

// Below, layer is an index of sample.lists, and of the lists of what layers may differ in: l_sel, init_blocks, local_blocks.
const isForced = (sample, layer, block, own) => block < sample.init_blocks[layer] || own - block < sample.local_blocks[layer];
const isPacked = sample => sample.bounds.length > 2;
// The document of a token of the row, as {begin, end}.
function documentOf(sample, t) {
  let low = 0, high = sample.bounds.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; sample.bounds[middle] <= t ? (low = middle) : (high = middle); }
  return {begin: sample.bounds[low], end: sample.bounds[low + 1]};
}
// The block of a query, counted from the first token of its document.
const ownBlock = (sample, layer, query) => Math.floor((sample.queries[query] - documentOf(sample, sample.queries[query]).begin) / sample.l_sel[layer]);
// The bin of a distance in blocks; bins are 1, 2 to 3, 4 to 7, ...
const distanceBin = distance => Math.floor(Math.log2(Math.max(1, distance)));
function binNames(bins) {
  return Array.from({length: bins}, (_, k) => (k === 0 ? "1" : `${whole(2 ** k)}–${whole(2 ** (k + 1) - 1)}`));
}

// Shares of the blocks chosen by score (forced blocks left out) in each bin of distance, of one layer or of all (null):
// {all: number of chosen blocks, chosen: shares, even: shares if each query chose uniformly among its candidates}.
function distancesOf(sample, layer = null) {
  const longest = Math.max(...sample.bounds.slice(1).map((end, i) => end - sample.bounds[i]));
  const bins = distanceBin(Math.ceil(longest / Math.min(...sample.l_sel)) - 1) + 1;
  const chosen = Array(bins).fill(0), even = Array(bins).fill(0);
  for (const i of layer === null ? sample.lists.keys() : [layer])
    sample.queries.forEach((t, q) => {
      const own = ownBlock(sample, i, q), open = Array(bins).fill(0);
      let candidates = 0, picked = 0;
      for (let block = sample.init_blocks[i]; block <= own - Math.max(1, sample.local_blocks[i]); ++block) { ++open[distanceBin(own - block)]; ++candidates; }
      for (const lists of sample.lists[i]) for (const block of lists[q])
        if (!isForced(sample, i, block, own)) { ++chosen[distanceBin(own - block)]; ++picked; }
      if (candidates > 0) open.forEach((n, k) => { even[k] += picked * n / candidates; });
    });
  const all = chosen.reduce((a, b) => a + b, 0);
  return {all, chosen: chosen.map(n => n / (all || 1)), even: even.map(n => n / (all || 1))};
}

// Draws grouped bars of shares, and lines at the shares in `marks`. axis: the name of the x axis; of: what a name is; mark:
// what the lines are, "" if no series has any. series: [{name, colour, values[bin], marks[bin] or null}].
function groupedBars(card, {names, series, label, axis, of, mark}) {
  const most = Math.max(...series.flatMap(s => [...s.values, ...(s.marks ?? [])])), bottom = kHeight - kBottom;
  mount(card, label, width => {
    const svg = canvas(width, kHeight), y = leftAxis(svg, width, bottom, roundRange([0, 100 * most || 1])), slot = (width - kLeft - kRight) / names.length;
    const bar = Math.min(40, slot * 0.8 / series.length), every = Math.ceil((8 + 7 * Math.max(7, ...names.map(name => name.length))) / slot);
    svg.append(node("line", {class: "axis", x1: kLeft, x2: width - kRight, y1: bottom, y2: bottom}));
    svg.append(node("text", {class: "name", x: (kLeft + width - kRight) / 2, y: bottom + 31, "text-anchor": "middle"}, axis));
    const percent = (values, k) => 100 * (values[k] ?? 0);
    const xs = names.map((name, k) => {
      const x = kLeft + slot * (k + 0.5);
      if (k % every === 0) svg.append(node("text", {x, y: bottom + 15, "text-anchor": "middle"}, name));
      series.forEach((s, i) => {
        const left = x + (i - series.length / 2) * bar, value = percent(s.values, k);
        svg.append(node("rect", {x: left + 0.5, width: bar - 1, y: y(value), height: Math.max(0, bottom - y(value)), fill: s.colour}));
        if (s.marks) svg.append(node("line", {class: "even", x1: left - 1, x2: left + bar + 1, y1: y(percent(s.marks, k)), y2: y(percent(s.marks, k))}));
      });
      return x;
    });
    return {svg, bottom, xs, describe: k => [
      {text: `${of} ${names[k]}`},
      ...series.map(s => ({colour: s.colour, text: `${s.name}: ${percent(s.values, k).toFixed(1)}%${s.marks ? `, ${mark} ${percent(s.marks, k).toFixed(1)}%` : ""}`}))]};
  }, () => [[of, ...series.map(s => s.name)], ...names.map((name, k) => [name, ...series.map(s => s.values[k] ?? "")])]);
  card.append(node("div", {class: "legend"}, ...series.map(s => {
    const i = node("i", {class: "box"});
    i.style.color = s.colour;
    return node("span", {}, i, s.name);
  }), ...(mark ? [node("span", {}, node("i", {class: "even"}), mark)] : [])));
  return true;
}

// Draws which blocks each query selects: a row for each query, a column for each block. In packed rows, a column is a token
// of the row, and lines show where documents begin. paint: colour of blocks chosen by score.
function blockMap(card, {sample, layer, group, paint, label}) {
  const lists = sample.lists[layer][group], rows = lists.length, packed = isPacked(sample), l_sel = sample.l_sel[layer], unit = packed ? 1 : l_sel;
  const columns = Math.ceil(sample.seq_len / unit), bottom = kTop + Math.max(120, Math.min(260, rows * 2.2)), cell = (bottom - kTop) / rows;
  // Where a query's block begins and ends, in columns.
  const place = (q, block) => {
    const {begin, end} = documentOf(sample, sample.queries[q]), from = begin + block * l_sel;
    return [from / unit, Math.min(packed ? end : Infinity, from + l_sel) / unit];
  };
  mount(card, label, width => {
    const svg = canvas(width, bottom + kBottom);
    const x = bottomAxis(svg, width, bottom, [0, columns], {name: packed ? "token" : "block", ticks: kAxes.steps.ticks, write: whole});
    svg.append(node("rect", {class: "ground", x: kLeft, y: kTop, width: width - kLeft - kRight, height: bottom - kTop}));
    for (const begin of packed ? sample.bounds.slice(1, -1) : [])
      svg.append(node("line", {class: "rule", x1: x(begin), x2: x(begin), y1: kTop, y2: bottom}));
    const paths = {forced: "", chosen: ""};
    lists.forEach((list, q) => {
      for (const block of list) {
        const [from, end] = place(q, block).map(x), wide = Math.max(1.2, end - from).toFixed(2);
        paths[isForced(sample, layer, block, ownBlock(sample, layer, q)) ? "forced" : "chosen"] +=
          `M${from.toFixed(2)},${(kTop + q * cell).toFixed(2)}h${wide}v${Math.max(1, cell).toFixed(2)}h-${wide}z`;
      }
    });
    svg.append(node("path", {class: "forced", d: paths.forced}), node("path", {d: paths.chosen, fill: paint}));
    const every = Math.max(1, Math.ceil(rows / 5));
    for (let q = 0; q < rows; q += every)
      svg.append(node("text", {x: kLeft - 6, y: kTop + (q + 0.5) * cell + 4, "text-anchor": "end"}, sample.queries[q] < 1e4 ? whole(sample.queries[q]) : `${Math.round(sample.queries[q] / 1e3)}k`));
    const middle = (kTop + bottom) / 2;
    svg.append(node("text", {x: 12, y: middle, "text-anchor": "middle", transform: `rotate(-90 12 ${middle})`}, "query"));
    return {svg, bottom, xs: Array.from({length: columns}, (_, c) => x(c + 0.5)), rows, rowAt: y => Math.max(0, Math.min(rows - 1, Math.floor((y - kTop) / cell))),
            describe: (column, row) => {
              const q = row ?? rows - 1, own = ownBlock(sample, layer, q), list = lists[q], {begin, end} = documentOf(sample, sample.queries[q]);
              const block = packed ? Math.floor((column - begin) / l_sel) : column;
              const is = !list.includes(block) ? "not listed" : isForced(sample, layer, block, own) ? "forced" : "chosen";
              const inside = packed ? `, ${whole(sample.queries[q] - begin)} of its document` : "";
              return [{text: `query ${whole(sample.queries[q])}${inside}, in block ${whole(own)}`},
                      {text: packed && (column < begin || column >= end) ? "another document" : `block ${whole(block)}: ${is}`},
                      {text: `lists ${list.slice(0, 24).map(whole).join(", ")}${list.length > 24 ? ", …" : ""}`}];
            }};
  }, () => [["query", "blocks"], ...lists.map((list, q) => [sample.queries[q], list.join(" ")])]);
}

// Draws values[layer][bin], in percent, as coloured cells.
// layers: the number of the layer of each row of values.
function distanceMap(card, {names, values, layers, label, axis = "distance in blocks"}) {
  const cell = cellOf(layers), bottom = kTop + cell * layers.length;
  const [low, high] = [0, Math.max(extent(values.flat())[1], 1e-9)];
  mount(card, label, width => {
    const svg = canvas(width, bottom + kBottom), slot = (width - kLeft - kRight) / names.length, every = Math.ceil(58 / slot);
    layerLabels(svg, layers, cell);
    values.forEach((row, r) => row.forEach((v, k) => {
      if (v !== null)
        svg.append(node("rect", {x: kLeft + k * slot, y: kTop + r * cell, width: slot + 0.3, height: cell + 0.3, fill: ramp(v / high), "shape-rendering": "crispEdges"}));
    }));
    names.forEach((name, k) => {
      if (k % every === 0) svg.append(node("text", {x: kLeft + (k + 0.5) * slot, y: bottom + 15, "text-anchor": "middle"}, name));
    });
    svg.append(node("text", {class: "name", x: (kLeft + width - kRight) / 2, y: bottom + 31, "text-anchor": "middle"}, axis));
    return {svg, bottom, xs: names.map((_, k) => kLeft + (k + 0.5) * slot), rows: layers.length, rowAt: y => Math.max(0, Math.min(layers.length - 1, Math.floor((y - kTop) / cell))),
            describe: (k, row) => [{text: `distance ${names[k]}`}, ...layers.flatMap((number, r) => (row === null || row === undefined ? r < 12 : r === row)
              ? [{colour: ramp(values[r][k] / high), text: `layer ${number}: ${short(values[r][k])}%`}] : [])]};
  }, () => [["layer", ...names], ...layers.map((layer, r) => [layer, ...values[r].map(v => v ?? "")])]);
  rampLegend(card, low, high, "%");
  return true;
}
