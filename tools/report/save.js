// Saves a chart as a picture or its numbers as a table. Nothing leaves the page: the browser makes the files.

// A chart's title, without what its label says about its numbers.
const titleOf = label => label.split(/[,:]/)[0];

// Adds the two buttons to the heading of the chart's card, in place of those of a chart that was there before.
function addSaving(card, chart, label, table) {
  const heading = card.querySelector(":scope > h3, :scope > h4") ?? card.closest("section")?.querySelector("h3");
  if (!heading) return;
  heading.querySelector(".save")?.remove();
  const name = `${document.title.split(" · ")[0].split("/").pop()} ${titleOf(label)}`.replace(/[^A-Za-z0-9]+/g, "_").slice(0, 100);
  const button = (text, what, save) => {
    const made = node("button", {type: "button", title: `save ${what}`, "aria-label": `save ${what}: ${titleOf(label)}`}, text);
    made.addEventListener("click", save);
    return made;
  };
  heading.append(node("span", {class: "save"}, button("PNG", "as a picture", () => savePicture(chart, name)),
                      ...(table ? [button("CSV", "the numbers", () => saveFile(new Blob([csvOf(table())], {type: "text/csv"}), `${name}.csv`))] : [])));
}

function csvOf(rows) {
  const field = value => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return rows.map(row => row.map(field).join(",")).join("\n") + "\n";
}

function saveFile(blob, name) {
  const link = node("a", {download: name});
  link.href = URL.createObjectURL(blob);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// A copy of the chart's SVG that looks the same outside of the page, whose style it no longer has.
function standalone(chart) {
  const svg = chart.querySelector("svg"), copy = svg.cloneNode(true), styles = getComputedStyle(svg);
  const [from, to] = [[svg, ...svg.querySelectorAll("*")], [copy, ...copy.querySelectorAll("*")]];
  from.forEach((element, i) => {
    const shown = getComputedStyle(element);
    for (const key of ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "font-family", "font-size", "font-weight"])
      to[i].style.setProperty(key, shown.getPropertyValue(key));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("width", chart.clientWidth);
  copy.style.display = styles.display;
  return copy;
}

// Draws the chart, its heading and its legend on a canvas of twice the size, with the card's colours.
function savePicture(chart, name) {
  const kScale = 2, kPad = 14, section = chart.closest("section"), shown = getComputedStyle(section);
  const svg = standalone(chart), width = chart.clientWidth, height = chart.querySelector("svg").clientHeight;
  const entries = [...section.querySelectorAll(".legend > span")].map(span => ({text: span.textContent, box: span.querySelector("i")})).filter(e => e.box);
  const canvas = node("canvas"), draw = canvas.getContext("2d"), image = new Image();
  const font = size => `${size}px ${shown.fontFamily}`;
  // The legend's lines, broken where the width ends.
  const rows = [[]];
  draw.font = font(12);
  for (const entry of entries) {
    const wide = 22 + draw.measureText(entry.text).width + 14, used = rows.at(-1).reduce((sum, e) => sum + e.wide, 0);
    if (used > 0 && used + wide > width) rows.push([]);
    rows.at(-1).push({...entry, wide});
  }
  const scale = section.querySelector(".ramp"), legendHeight = entries.length > 0 ? rows.length * 18 + 4 : scale ? 22 : 0;
  canvas.width = kScale * (width + 2 * kPad);
  canvas.height = kScale * (height + legendHeight + 3 * kPad + 12);
  image.onload = () => {
    draw.scale(kScale, kScale);
    draw.fillStyle = shown.backgroundColor;
    draw.fillRect(0, 0, canvas.width, canvas.height);
    draw.fillStyle = shown.color;
    draw.font = `600 ${font(14)}`;
    draw.fillText(titleOf(chart.getAttribute("aria-label")), kPad, kPad + 10, width);
    draw.drawImage(image, kPad, 2 * kPad + 8, width, height);
    draw.font = font(12);
    rows.forEach((row, r) => {
      let x = kPad;
      const y = 2 * kPad + 8 + height + 18 * r + 12;
      for (const {text, box, wide} of row) {
        draw.fillStyle = getComputedStyle(box).color;
        draw.fillRect(x, y - 7, 16, 4);
        draw.fillStyle = shown.color;
        draw.fillText(text, x + 22, y);
        x += wide;
      }
    });
    if (scale) {
      const y = 2 * kPad + 8 + height + 12, texts = [scale.previousSibling.textContent, scale.nextSibling.textContent];
      const left = kPad + draw.measureText(texts[0]).width + 8, wide = 140, colours = draw.createLinearGradient(left, 0, left + wide, 0);
      kRamp.forEach((c, i) => colours.addColorStop(i / (kRamp.length - 1), `rgb(${c})`));
      draw.fillText(texts[0], kPad, y);
      draw.fillText(texts[1], left + wide + 8, y);
      draw.fillStyle = colours;
      draw.fillRect(left, y - 10, wide, 10);
    }
    canvas.toBlob(blob => saveFile(blob, `${name}.png`));
  };
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(svg));
}
