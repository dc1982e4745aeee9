// The elements of the pool, and its words beside the pictures: figures, legend, the blocks looked at, what just happened.

import { button, freshId, make } from "./dom.js";
import { sayBlocks, sayEvents, tokenList } from "./pool_words.js";

const SHOWN_NEWS = 3;
const READ_NEWS = 60; // events that these may be made of
const MOST_IN_DETAIL = 12; // blocks of one cell whose text is shown
const HELP = "Arrow keys move from block to block, Enter opens the block table of the request that holds it, Escape closes it.";

const KINDS = {
  held: "in use (letter: request)",
  shared: "shared (number: by how many)",
  cached: "cached",
  free: "free",
  sealed: "full",
  pinned: "pinned",
};
const MARKS = { write: "written now", hit: "prefix hit", copy: "copied", evict: "evicted", preempt: "preempted", lit: "selected" };

/** `stage(name, label, help)` makes a picture of blocks. */
export function buildPool(element, stage) {
  const [help, block] = [freshId("pool-help"), freshId("pool-block")];
  const parts = {
    map: stage("pool", "Blocks of the pool", help),
    grid: stage("grid", "Blocks in use and cached blocks", help),
    welcome: make("div", { class: "pool-welcome", hidden: true }),
    status: make("p", { class: "pool-status", role: "status" }),
    caption: make("div", { class: "pool-caption", role: "status" }),
    figures: make("p", { class: "pool-figures" }),
    engines: make("div", { class: "pool-engines", hidden: true }),
    ranks: make("ul", { class: "pool-ranks", "aria-label": "Ranks", hidden: true }),
    legend: make("ul", { class: "pool-legend", "aria-label": "Legend" }, ...legend()),
    requests: make("div", { class: "pool-requests", role: "group", "aria-label": "Requests" }),
    drawer: make("aside", { class: "pool-drawer", "aria-label": "Block table", hidden: true }),
    detail: make("div", { class: "pool-detail" }),
    news: make("ol", { class: "pool-news", "aria-label": "What happened last" }),
    said: make("p", { class: "pool-said", role: "status" }),
    goTo: make("input", { id: block, type: "number", min: "1", step: "1", class: "pool-go" }),
    open: button("", () => {}, { class: "pool-open" }),
    whole: make("span"),
  };
  parts.overview = make("div", { class: "pool-overview" }, parts.whole, parts.open);
  parts.pictures = make("div", { class: "pool-pictures" }, parts.welcome, parts.grid.element, parts.overview, parts.map.element);
  parts.root = make(
    "div",
    { class: "pool" },
    parts.status,
    parts.caption,
    parts.engines,
    make("div", { class: "pool-head" }, parts.figures, make("label", { for: block }, "Go to block ", parts.goTo)),
    parts.ranks,
    make(
      "div",
      { class: "pool-main" },
      make("div", { class: "pool-left" }, parts.pictures, parts.legend, parts.detail, parts.news),
      make("div", { class: "pool-side" }, parts.requests, parts.drawer),
    ),
    parts.said,
    make("p", { id: help, class: "pool-said" }, HELP),
  );
  element.append(parts.root);
  return parts;
}

function legend() {
  const key = (name) => make("span", { class: `key key-${name}`, "aria-hidden": "true" });
  const kinds = Object.entries(KINDS).map(([kind, words]) => make("li", {}, key(kind), `${words} `, make("b", { "data-kind": kind })));
  return [...kinds, ...Object.entries(MARKS).map(([mark, words]) => make("li", {}, key(mark), words))];
}

function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function writeFigures({ figures, legend: list }, state, counts) {
  const total = state.head.num_blocks - 1;
  const used = counts.held + counts.shared + counts.pinnedAlone;
  const share = (100 * used) / total;
  const words = used > 0 && share < 0.1 ? "< 0.1" : share.toFixed(1);
  write(figures, `${used.toLocaleString()} of ${total.toLocaleString()} blocks in use (${words} %), ${state.head.block_size} tokens each`);
  for (const number of list.querySelectorAll("b")) write(number, counts[number.dataset.kind].toLocaleString());
}

/** The line between grid and map. `full`: the grid has no room, so the map cannot be closed. */
export function writeOverview({ overview, whole, open }, total, shows, full) {
  overview.hidden = shows === "all";
  write(whole, full ? `All ${total.toLocaleString()} blocks: too many are in use to draw each of them` : `All ${total.toLocaleString()} blocks in physical order`);
  open.hidden = full;
  write(open, shows === "map" ? "Show the blocks in use" : "Show all");
  open.setAttribute("aria-expanded", String(shows === "map"));
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
    if (detail.dataset.cell !== "none") detail.replaceChildren(make("p", { class: "muted" }, "Point at a block, or move to it with the arrow keys, to read what is in it."));
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
