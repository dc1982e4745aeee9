// The elements of the pool, and its words beside the canvas: figures, legend, the cell looked at, what just happened.

import { freshId, make } from "./dom.js";
import { blocksOf } from "./pool_layout.js";
import { sayBlock, sayBlocks, sayEvents, tokenList } from "./pool_words.js";

const SHOWN_NEWS = 4;
const READ_NEWS = 60; // events that these may be made of
const MOST_IN_DETAIL = 12; // blocks of one cell whose text is shown
const HELP = "Arrow keys move from cell to cell, Enter selects the sequence that holds it, Escape selects nothing.";

const LEGEND = {
  held: "held (letter: sequence)",
  shared: "shared (number: references)",
  cached: "cached",
  free: "free",
  sealed: "sealed",
};

export function buildPool(element) {
  const [help, block] = [freshId("pool-help"), freshId("pool-block")];
  const cells = make("canvas", { class: "pool-cells", "aria-hidden": "true" });
  const marks = make("canvas", { class: "pool-marks", tabindex: "0", role: "application", "aria-label": "Blocks of the pool", "aria-describedby": help });
  const parts = {
    cells,
    marks,
    stage: make("div", { class: "pool-stage" }, cells, marks),
    status: make("p", { class: "pool-status", role: "status" }),
    caption: make("div", { class: "pool-caption", role: "status" }),
    figures: make("p", { class: "pool-figures" }),
    legend: make("ul", { class: "pool-legend", "aria-label": "Legend" }),
    requests: make("div", { class: "pool-side", role: "group", "aria-label": "Requests" }),
    detail: make("div", { class: "pool-detail" }),
    table: make("div", { class: "pool-tables" }),
    news: make("ol", { class: "pool-news", "aria-label": "What happened last" }),
    said: make("p", { class: "pool-said", role: "status" }),
    goTo: make("input", { id: block, type: "number", min: "1", step: "1", class: "pool-go" }),
  };
  parts.root = make(
    "div",
    { class: "pool" },
    parts.status,
    parts.caption,
    make("div", { class: "pool-head" }, parts.figures, make("label", { for: block }, "Block ", parts.goTo)),
    parts.legend,
    make("div", { class: "pool-main" }, parts.stage, parts.requests),
    parts.detail,
    parts.table,
    parts.news,
    parts.said,
    make("p", { id: help, class: "pool-said" }, HELP),
  );
  element.append(parts.root);
  return parts;
}

export function writeFigures({ figures, legend }, state, counts) {
  const total = state.head.num_blocks - 1;
  const used = counts.held + counts.shared;
  figures.textContent = `${used.toLocaleString()} of ${total.toLocaleString()} blocks in use (${((100 * used) / total).toFixed(1)} %), ${state.head.block_size} tokens each`;
  const there = Object.keys(LEGEND).filter((kind) => counts[kind] > 0);
  if (legend.dataset.there !== there.join()) {
    legend.dataset.there = there.join();
    legend.replaceChildren(
      ...there.map((kind) => make("li", {}, make("span", { class: `key key-${kind}`, "aria-hidden": "true" }), `${LEGEND[kind]} `, make("b", { "data-kind": kind }))),
    );
  }
  for (const kind of there) legend.querySelector(`[data-kind="${kind}"]`).textContent = counts[kind].toLocaleString();
}

/** What a lesson says of this moment. */
export function writeCaption({ caption }, { note }) {
  const words = note ? [`${note.scene} of ${note.of}: ${note.title}`, note.text] : [];
  if (caption.dataset.words === words.join("\n")) return;
  caption.dataset.words = words.join("\n");
  caption.replaceChildren(...words.map((text, index) => make(index ? "p" : "b", {}, text)));
}

/** A cell in one sentence. */
export function sayCell(state, layout, cell) {
  const [from, to] = blocksOf(layout, cell);
  return to - from === 1 ? sayBlock(state, from) : sayBlocks(state, from, to);
}

/** The cell looked at: in a sentence, and with its text; of a cell of many blocks, of those that have text. */
export function writeDetail({ detail }, state, layout, cell, block) {
  if (cell === null) {
    if (detail.dataset.cell !== "none") detail.replaceChildren(make("p", { class: "muted" }, "Point at a cell, or move to it with the arrow keys, to read what is in it."));
    detail.dataset.cell = "none";
    return;
  }
  detail.dataset.cell = cell;
  const [from, to] = block === null ? blocksOf(layout, cell) : [block, block + 1];
  const numbers = Array.from({ length: to - from }, (_, index) => from + index);
  const several = numbers.length > 1;
  const readable = numbers.filter((number) => !several || state.blocks.tokens[number]).slice(0, MOST_IN_DETAIL);
  detail.replaceChildren(
    make("p", {}, several ? sayBlocks(state, from, to) : sayBlock(state, from)),
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
