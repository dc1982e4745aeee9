// The block pool, live: every block a cell, the requests beside it, and the table of the one selected.
//
//   mountPool(element, view)   draws the state of the view's moment, once in an animation frame in which something changed

import { oncePerPicture } from "./dom.js";
import { onTheme, readPalette } from "./palette.js";
import { buildPool, sayCell, writeCaption, writeDetail, writeFigures, writeNews } from "./pool_build.js";
import { HELD, encode, fillOf, kindOf } from "./pool_codes.js";
import { CellPainter } from "./pool_draw.js";
import { listenKeys } from "./pool_keys.js";
import { blocksOf, cellAt, cellOf, layOut } from "./pool_layout.js";
import { Marks } from "./pool_marks.js";
import { Requests, Table, litBlocks } from "./table.js";

const FADE_STEP_MS = 40; // fading marks need no picture of every refresh
const MOST_PULSES = 300; // more blocks written at once are another moment, no news

export function mountPool(element, view) {
  const pool = new Pool(element, view);
  view.on((what) => pool.hear(what));
  pool.wake();
}

class Pool {
  #view;
  #parts;
  #cells;
  #marks;
  #requests;
  #table;
  #palette = null;
  #codes = null; // as they are on the canvas
  #drawn = { history: null, at: 0, tables: new Map() }; // the moment on the canvas
  #hover = null; // the cell under the pointer
  wake = oncePerPicture(() => this.#draw());
  #animated = false;
  #stale = true; // the layout, which is good for keys until the next draw
  layout = null;
  cursor = null; // the block at the keyboard's cursor

  constructor(element, view) {
    this.#view = view;
    this.#parts = buildPool(element);
    this.#cells = new CellPainter(this.#parts.cells);
    this.#marks = new Marks(this.#parts.marks);
    this.#requests = new Requests(this.#parts.requests, view);
    this.#table = new Table(this.#parts.table, view);
    new ResizeObserver(() => this.#layAgain()).observe(this.#parts.stage);
    onTheme(() => {
      this.#palette = null;
      this.#layAgain();
    });
    this.#listen(this.#parts.marks);
    listenKeys(this.#parts.marks, this);
  }

  hear(what) {
    const { block } = this.#view.selection;
    if (what === "selection" && block !== undefined) this.cursor = block;
    this.wake();
  }

  moveTo(block) {
    const { state } = this.#view;
    if (!state) return; // the engine was just started again
    this.cursor = block;
    this.#parts.said.textContent = sayCell(state, this.layout, cellOf(this.layout, block));
    this.wake();
  }

  /** Selects the sequence that holds a block of the cell, or the block alone. */
  pickCell(cell) {
    const { state } = this.#view;
    if (!state) return;
    const [from, to] = blocksOf(this.layout, cell);
    let block = from;
    while (block < to - 1 && state.blocks.ref[block] === 0) block += 1;
    this.#pick(state.blocks.ref[block] ? block : from);
  }

  #pick(block) {
    const [owner] = this.#view.state.owners(block);
    this.#view.selection.set(owner ? { seq: owner[0], block } : { block });
  }

  pickNothing() {
    this.cursor = null;
    this.#view.selection.set({});
  }

  #listen(canvas) {
    const under = (event) => this.layout && cellAt(this.layout, event.offsetX, event.offsetY);
    const point = (cell) => {
      if (cell === this.#hover) return;
      this.#hover = cell;
      this.wake();
    };
    canvas.addEventListener("pointermove", (event) => point(under(event)));
    canvas.addEventListener("pointerleave", () => point(null));
    canvas.addEventListener("click", (event) => {
      const cell = under(event);
      if (cell !== null) this.pickCell(cell);
    });
    this.#parts.goTo.addEventListener("change", ({ target }) => {
      const block = Number(target.value);
      const count = this.#view.state?.head.num_blocks ?? 0;
      target.setCustomValidity(block > 0 && block < count ? "" : `Blocks have the numbers 1 to ${count - 1}`);
      if (target.reportValidity()) this.#pick(block);
    });
  }

  #layAgain() {
    this.#stale = true;
    this.wake();
  }

  #layOut(state) {
    const { root, stage, cells, marks } = this.#parts;
    const [width, height] = [stage.clientWidth, stage.clientHeight];
    this.#palette ??= readPalette(root);
    this.#stale = false;
    this.layout = layOut(width, height, state.head.num_blocks);
    for (const canvas of [cells, marks]) {
      canvas.width = Math.round(width * devicePixelRatio);
      canvas.height = Math.round(height * devicePixelRatio);
    }
    this.#cells.clear(this.layout, this.#palette, devicePixelRatio);
    this.#codes = null;
    if (this.cursor >= state.head.num_blocks) this.cursor = null;
    this.#hover = null;
    this.#parts.root.dataset.perCell = this.layout.per;
  }

  #draw() {
    const { state, status, selection } = this.#view;
    const { root } = this.#parts;
    root.toggleAttribute("data-empty", !state);
    this.#parts.status.textContent = state ? "" : status.text || "Waiting for the first frame.";
    if (!state) {
      this.layout = null;
      return;
    }
    if (this.#stale || this.layout?.count !== state.head.num_blocks - 1) this.#layOut(state);
    const { codes, counts } = encode(state, litBlocks(state, selection.get()));
    const changed = this.#cells.draw(codes);
    this.#markNews(state, codes, changed);
    this.#codes = codes;
    this.#animate();
    writeCaption(this.#parts, state);
    writeFigures(this.#parts, state, counts);
    writeNews(this.#parts, state);
    this.#requests.draw(state);
    this.#table.draw(state);
    const cell = this.#hover ?? (this.cursor === null ? null : cellOf(this.layout, this.cursor));
    const exact = this.#hover === null && selection.block !== undefined && selection.block === this.cursor;
    writeDetail(this.#parts, state, this.layout, cell, exact ? this.cursor : null);
    Object.assign(root.dataset, { at: state.at, changed: changed.length, lit: selection.seq ?? selection.request ?? "" });
  }

  /** What led to this moment becomes marks, unless the view jumped here. */
  #markNews(state, codes, changed) {
    const { history, at, tables } = this.#drawn;
    this.#drawn = { history: this.#view.history, at: state.at, tables: new Map(Array.from(state.seqs, ([seq, { table }]) => [seq, table])) };
    if (history !== this.#view.history || state.at <= at || this.#codes === null) return;
    const written = changed.filter((block) => kindOf(codes[block]) >= HELD && isWritten(this.#codes[block], codes[block]));
    if (written.length <= MOST_PULSES) for (const block of written) this.#marks.add("write", block);
    for (const [, , what, ...details] of state.news) this.#markEvent(state, tables, what, details);
  }

  #markEvent(state, tables, what, [first, second]) {
    if (what === "evict") this.#marks.add(what, first);
    if (what === "copy") this.#marks.add(what, first, second);
    const row = state.row(first);
    if (what === "hit" && row) for (const block of row.table.slice(0, Math.ceil(second / state.head.block_size))) this.#marks.add(what, block);
    if (what === "preempt") for (const block of tables.get(first) ?? []) this.#marks.add(what, block);
  }

  /** Draws the marks until the last of them has faded. */
  #animate() {
    if (!this.layout) return;
    this.#marks.cursor = this.cursor === null ? null : cellOf(this.layout, this.cursor);
    this.#marks.hover = this.#hover;
    if (!this.#marks.draw(this.layout, this.#palette, devicePixelRatio) || this.#animated) return;
    this.#animated = true;
    setTimeout(() => {
      this.#animated = false;
      requestAnimationFrame(() => this.#animate());
    }, FADE_STEP_MS);
  }
}

function isWritten(before, now) {
  return kindOf(before) < HELD || fillOf(now) > fillOf(before);
}
