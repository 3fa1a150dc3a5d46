// The page around the charts: its contents, rows of cards without gaps, and loading anew while a run trains.

// ---- rows of cards ----

// Gives each grid's cards widths that fill every row, with as few cards alone in one as the page's width allows.
function arrange() {
  const kGap = 13, kColumns = 12;  // 12 columns: rows of 1, 2, 3, 4 or 6 cards
  for (const grid of document.querySelectorAll(".grid")) {
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const least = rem * (grid.classList.contains("halves") ? 34 : 24);
    const most = Math.max(1, Math.min(4, Math.floor((grid.clientWidth + kGap) / (least + kGap))));
    const spread = cards => {
      const rows = Math.ceil(cards.length / most), few = Math.floor(cards.length / rows), more = cards.length % rows;
      let at = 0;
      for (let row = 0; row < rows; ++row)
        for (let end = at + few + (row < more ? 1 : 0), wide = kColumns / (end - at); at < end; ++at) cards[at].style.gridColumn = `span ${wide}`;
    };
    grid.style.gridTemplateColumns = `repeat(${kColumns}, minmax(0, 1fr))`;
    let cards = [];
    for (const child of grid.children) {
      if (!child.classList.contains("wide")) { cards.push(child); continue; }
      if (cards.length > 0) spread(cards);
      cards = [];
    }
    if (cards.length > 0) spread(cards);
  }
}

// Gives the tiles as many columns as fill their rows, where the page is wide enough.
function arrangeTiles() {
  for (const tiles of document.querySelectorAll(".tiles")) {
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const most = Math.max(2, Math.floor((tiles.clientWidth + 0.6 * rem) / (10.1 * rem)));
    const places = [...tiles.children].reduce((sum, tile) => sum + (tile.classList.contains("words") ? 2 : 1), 0);
    tiles.style.gridTemplateColumns = `repeat(${Math.max(2, Math.ceil(places / Math.ceil(places / most)))}, minmax(0, 1fr))`;
  }
}

// ---- contents ----

function fillContents() {
  const nav = document.getElementById("contents"), headings = [...document.querySelectorAll("main h2")];
  if (!nav || headings.length < 2) return;
  headings.forEach((heading, i) => {
    heading.id = `section-${i}-${heading.textContent.toLowerCase().replace(/[^a-z0-9]+/g, "-")}`;
    const link = node("a", {}, heading.textContent);
    link.href = `#${heading.id}`;
    nav.append(link);
  });
}

// ---- loading anew ----

const page = JSON.parse(document.getElementById("page").textContent);

// The switches' state outlives the page's reloads; a browser that forbids this starts with the usual state.
const kStored = `triad report ${location.pathname}`;
function keepView() {
  try { sessionStorage.setItem(kStored, JSON.stringify(view)); } catch { /* the state is only lost */ }
}
try { Object.assign(view, JSON.parse(sessionStorage.getItem(kStored) ?? "{}")); } catch { /* the usual state */ }

function loadAnew() {
  if (!(page.refresh_s > 0)) return;
  document.querySelector("h1").after(node("p", {class: "faint live"}, `written at ${page.written}; loads itself anew every ${page.refresh_s} s while a run trains`));
  const reload = () => (document.hidden ? setTimeout(reload, 1000) : location.reload());
  setTimeout(reload, 1000 * page.refresh_s);
}
