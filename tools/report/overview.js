// The table of many runs: lines of their losses, sorting, and which runs the charts show.

const overview = document.querySelector("table.runs");

function sparkline(run) {
  const kWide = 110, kHigh = 26, points = run.training.loss.filter(p => p[1] !== null);
  const svg = node("svg", {viewBox: `0 0 ${kWide} ${kHigh}`, width: kWide, height: kHigh, role: "img", "aria-label": "loss by step"});
  if (points.length < 2) return svg;
  const xs = extent(points.map(p => p[0])), seen = extent(points.map(p => p[1]));
  const high = withoutFirstSpike([{points: points.map(p => ({y: p[1]}))}], seen), scale = (v, low, top, size) => (top > low ? (v - low) / (top - low) : 0.5) * size;
  const d = points.map((p, i) => `${i === 0 ? "M" : "L"}${scale(p[0], ...xs, kWide).toFixed(1)},${(kHigh - 2 - scale(Math.min(p[1], high), seen[0], high, kHigh - 4)).toFixed(1)}`).join("");
  svg.append(node("path", {d, fill: "none", "stroke-width": 1.4, stroke: "currentColor", "stroke-linejoin": "round"}));
  return svg;
}

function sortedBy(column, ascending) {
  const body = overview.tBodies[0], value = row => {
    const cell = row.cells[column];
    return cell === undefined ? "" : cell.dataset.sorted === undefined ? cell.textContent : Number(cell.dataset.sorted);
  };
  // Numbers first, then texts; cells without a value last.
  const rank = v => (typeof v === "number" ? 0 : v === "–" || v === "" ? 2 : 1);
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (rank(x) !== rank(y)) return rank(x) - rank(y);
    const order = typeof x === "number" ? x - y : x.localeCompare(y, "en", {numeric: true});
    return ascending ? order : -order;
  });
  body.append(...rows);
}

if (overview) {
  for (const row of overview.tBodies[0].rows) {
    if (row.dataset.run === undefined) continue;
    const i = Number(row.dataset.run), run = runs[i], shown = node("input", {type: "checkbox", "aria-label": `show ${run.label} in the charts`});
    shown.checked = true;
    shown.addEventListener("change", () => { run.hidden = !shown.checked; redraws.forEach(draw => draw()); });
    const swatch = node("i", {class: i >= kColours ? "swatch dash" : "swatch"});
    swatch.style.color = colour(i);
    row.cells[0].prepend(shown, swatch);
    const spark = row.querySelector(".spark");
    spark.style.color = colour(i);
    spark.append(sparkline(run));
  }
  [...overview.tHead.rows[0].cells].forEach((head, column) => {
    if (head.textContent === "loss by step") return;
    const button = node("button", {type: "button", title: "sort"}, ...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") !== "ascending";
      for (const other of overview.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      sortedBy(column, ascending);
    });
  });
}
