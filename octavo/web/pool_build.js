// The elements of the pool, and its words beside the pictures: figures, legend, the blocks looked at, what just happened.
//
//   head      figures                              go to block  ?
//   counts    of each kind
//   main      pictures | requests, or over them the block table
//   reading   the block looked at | what happened last
//
// All but the pictures have fixed heights (pool.css), so that no text ever changes the size of the pictures.

import { button, freshId, make } from "./dom.js";
import { foldLegend } from "./legend.js";
import { sayBlocks, sayEvents, tokenList } from "./pool_words.js";

const SHOWN_NEWS = 3;
const READ_NEWS = 60; // events that these may be made of
const MOST_IN_DETAIL = 12; // blocks of one cell whose text is shown
const HELP = "Arrow keys move from block to block, Enter opens the block table of the request that holds it, Escape closes it.";

// Each block is of one kind, so the counts are the pool.
const KINDS = { held: "in use by one", shared: "shared", pinned: "pinned", cached: "cached", free: "free" };
const LEGEND = {
  held: "in use by one request: its letter and colour; the height of the colour is how full the block is",
  shared: "shared by several (number: by how many)",
  cached: "cached: kept until its room is needed",
  free: "free",
  sealed: "dark corner: full, so it can be found again",
  pinned: "dot: pinned, so it stays in the cache",
  write: "written now",
  hit: "prefix hit",
  copy: "copied",
  evict: "evicted",
  preempt: "preempted",
  lit: "selected",
};
const canPoint = matchMedia("(hover: hover)");

/** `stage(name, label, help)` makes a picture of blocks. */
export function buildPool(element, stage) {
  const [help, block] = [freshId("pool-help"), freshId("pool-block")];
  const legend = foldLegend("Legend of the pool", make("ul", { class: "pool-legend" }, ...Object.entries(LEGEND).map(([name, words]) => make("li", {}, key(name), words))));
  const parts = {
    map: stage("pool", "Blocks of the pool", help),
    grid: stage("grid", "Blocks in use and cached blocks", help),
    welcome: make("div", { class: "pool-welcome", hidden: true }),
    status: make("p", { class: "pool-status", role: "status" }),
    caption: make("div", { class: "pool-caption", role: "status" }),
    figures: make("p", { class: "pool-figures" }, make("span"), make("span", { class: "pool-block-size" })),
    counts: make("ul", { class: "pool-counts", "aria-label": "Blocks of each kind" }, ...Object.entries(KINDS).map(([kind, words]) => make("li", {}, key(kind), `${words} `, make("b", { "data-kind": kind })))),
    engines: make("div", { class: "pool-engines", hidden: true }),
    ranks: make("ul", { class: "pool-ranks", "aria-label": "Ranks", hidden: true }),
    states: make("ul", { class: "pool-states", "aria-label": "State slots of each kind", hidden: true }),
    requests: make("div", { class: "pool-requests", role: "group", "aria-label": "Requests" }),
    drawer: make("aside", { class: "pool-drawer", "aria-label": "Block table", hidden: true }),
    detail: make("div", { class: "pool-detail", tabindex: "0", role: "group", "aria-label": "The block looked at" }),
    news: make("ol", { class: "pool-news", tabindex: "0", "aria-label": "What happened last" }),
    said: make("p", { class: "pool-said", role: "status" }),
    goTo: make("input", { id: block, type: "number", min: "1", step: "1", class: "pool-go" }),
    open: button("", () => {}, { class: "pool-open" }),
    whole: make("span", { class: "pool-whole" }),
    left: make("span"),
  };
  parts.counts.querySelector("[data-kind=cached]").after(parts.left);
  parts.pictures = make("div", { class: "pool-pictures" }, parts.grid.element, parts.whole, parts.map.element, parts.open, parts.welcome, parts.status);
  parts.root = make(
    "div",
    { class: "pool" },
    make("div", { class: "pool-head" }, parts.figures, make("label", { for: block }, "Go to block ", parts.goTo), legend.opener, legend.panel),
    parts.counts,
    parts.engines,
    parts.ranks,
    parts.caption,
    make("div", { class: "pool-main" }, parts.pictures, make("div", { class: "pool-side" }, parts.requests, parts.drawer)),
    parts.states,
    make("div", { class: "pool-reading" }, parts.detail, parts.news),
    parts.said,
    make("p", { id: help, class: "pool-said" }, HELP),
  );
  element.append(parts.root);
  return parts;
}

const key = (name) => make("span", { class: `key key-${name}`, "aria-hidden": "true" });

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function writeFigures({ figures, counts: list }, state, counts) {
  const total = state.head.num_blocks - 1;
  const used = counts.held + counts.shared + counts.pinned;
  const share = (100 * used) / total;
  const words = used > 0 && share < 0.1 ? "< 0.1" : share.toFixed(1);
  write(figures.firstChild, `${used.toLocaleString()} of ${total.toLocaleString()} blocks in use (${words} %)`);
  write(figures.lastChild, `, ${state.head.block_size} tokens each`);
  for (const number of list.querySelectorAll("b")) {
    const count = counts[number.dataset.kind];
    write(number, count.toLocaleString());
    number.parentElement.hidden = count === 0;
  }
}

/** The words of the map. `full`: the grid has no room, so the map cannot be closed. `left`: cached blocks for which it has none. */
export function writeOverview({ whole, open, left: notDrawn }, total, shows, full, left) {
  const all = `All ${total.toLocaleString()} blocks`;
  write(whole, full ? `${all}: too many are in use to draw each of them` : shows === "map" ? `${all} in physical order` : all);
  open.hidden = full;
  write(open, shows === "map" ? "Show the blocks in use" : "Show all");
  open.setAttribute("aria-expanded", String(shows === "map"));
  write(notDrawn, left ? ` (${left.toLocaleString()} have no room here)` : "");
}

/** What a lesson says of this moment. */
export function writeCaption({ caption }, { note }) {
  const words = note ? [`${note.scene} of ${note.of}: ${note.title}`, note.text] : [];
  if (caption.dataset.words === words.join("\n")) return;
  caption.dataset.words = words.join("\n");
  caption.replaceChildren(...words.map((text, index) => make(index ? "p" : "b", {}, text)));
}

/** The blocks looked at: in a sentence, and with their text; of many blocks in one cell, of those that have text. */
export function writeDetail({ detail }, state, range) {
  if (range === null) {
    if (detail.dataset.cell !== "none") detail.replaceChildren(make("p", { class: "muted" }, canPoint.matches ? "Point at a block, or move to it with the arrow keys, to read what is in it." : "Tap a block to read what is in it."));
    detail.dataset.cell = "none";
    return;
  }
  detail.dataset.cell = range[0];
  const [from, to] = range;
  const numbers = Array.from({ length: to - from }, (_, index) => from + index);
  const several = numbers.length > 1;
  const readable = numbers.filter((number) => !several || state.blocks.tokens[number]).slice(0, MOST_IN_DETAIL);
  detail.replaceChildren(
    make("p", {}, sayBlocks(state, from, to)),
    ...readable.filter((number) => state.kind(number) !== "free").map((number) =>
      make("p", { class: "pool-text" }, ...(several ? [make("b", {}, `${number} `)] : []), ...tokenList(state.blocks.tokens[number], state.head))),
  );
}

export function writeNews({ news }, state) {
  const last = sayEvents(state.events.slice(-READ_NEWS)).slice(0, SHOWN_NEWS);
  if (news.dataset.last === last.join("\n")) return;
  news.dataset.last = last.join("\n");
  news.replaceChildren(...last.map((text) => make("li", {}, text)));
}
