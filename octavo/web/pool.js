// The block pool, live: its blocks as cells, the requests beside them, and a drawer with the block table of the one selected.
//
//   mountPool(element, view)   draws the state of the view's moment, once in an animation frame in which something changed
//
// What is shown (data-shows):
//   all     a small pool, in which every block can be read: the map, which is the whole pool in physical order
//   grid    a larger one: blocks in use and cached blocks as large cells, and below them the map as a thin strip
//   map     the map alone, large: the user opened it, or more blocks are in use than the grid has room for

import { oncePerPicture } from "./dom.js";
import { onTheme, readPalette } from "./palette.js";
import { buildPool, writeCaption, writeDetail, writeFigures, writeNews, writeOverview } from "./pool_build.js";
import { HELD, encode, fillOf, kindOf } from "./pool_codes.js";
import { Drawer } from "./pool_drawer.js";
import { Engines } from "./pool_engines.js";
import { READABLE, blocksOf, cellOf, layOut } from "./pool_layout.js";
import { Places } from "./pool_places.js";
import { writeRanks } from "./pool_ranks.js";
import { writeStates } from "./pool_states.js";
import { Requests } from "./pool_requests.js";
import { Stage } from "./pool_stage.js";
import { Titles } from "./pool_titles.js";
import { Welcome } from "./pool_welcome.js";
import { sayBlocks } from "./pool_words.js";
import { litBlocks } from "./table.js";

const MOST_PULSES = 300; // more blocks written at once are another moment, no news

export function mountPool(element, view) {
  const pool = new Pool(element, view);
  view.on((what) => pool.hear(what));
  pool.wake();
}

class Pool {
  #view;
  #parts;
  #places = new Places();
  #engines;
  #requests;
  #drawer;
  #welcome;
  #palette = null;
  #codes = null; // as they are on the canvases
  #drawn = { history: null, at: 0, tables: new Map() }; // the moment on the canvases
  #opened = false; // the map, by the user
  #measured = null; // { count, all, map, grid, strip }: blocks of the pool, and the size of each picture
  #stale = true; // the measures, or the colours
  #mapLayout = null;
  wake = oncePerPicture(() => this.#draw());
  cursor = null; // the block at the keyboard's cursor

  constructor(element, view) {
    this.#view = view;
    this.#parts = buildPool(element, (name, label, help) => new Stage(name, label, help, this));
    this.#engines = new Engines(this.#parts.engines, view);
    const titles = new Titles();
    this.#requests = new Requests(this.#parts.requests, view, titles);
    this.#drawer = new Drawer(this.#parts, view, titles, () => this.#main.focus());
    this.#welcome = new Welcome(this.#parts.welcome);
    new ResizeObserver(() => this.#measureAgain()).observe(this.#parts.pictures);
    onTheme(() => {
      this.#palette = null;
      this.#measureAgain();
    });
    this.#parts.open.addEventListener("click", () => {
      this.#opened = !this.#opened;
      this.wake();
    });
    this.#listenToNumber(this.#parts.goTo);
  }

  hear(what) {
    const { block } = this.#view.selection;
    if (what === "selection" && block !== undefined) this.cursor = block;
    this.wake();
  }

  /** The picture that is large. */
  get #main() {
    const { grid, map, root } = this.#parts;
    return root.dataset.shows === "grid" ? grid : map;
  }

  moveTo(block) {
    const { state } = this.#view;
    if (!state) return; // the engine was just started again
    this.cursor = block;
    this.#parts.said.textContent = sayBlocks(state, ...this.#blocksAtCursor());
    this.wake();
  }

  /** Selects the sequence that holds a block of the cell, or the block alone. */
  pickCell(stage, cell) {
    const { state } = this.#view;
    if (!state) return;
    const [from, to] = blocksOf(stage.layout, cell);
    let block = from;
    while (block < to - 1 && state.blocks.ref[block] === 0) block += 1;
    this.#pick(state.blocks.ref[block] ? block : from);
  }

  #pick(block) {
    const [owner] = this.#view.state.owners(block);
    this.#view.selection.set(owner ? { seq: owner[0], block } : { block });
  }

  #listenToNumber(input) {
    input.addEventListener("change", () => {
      const block = Number(input.value);
      const count = this.#view.state?.head.num_blocks ?? 0;
      input.setCustomValidity(block > 0 && block < count ? "" : `Blocks have the numbers 1 to ${count - 1}`);
      if (input.reportValidity()) this.#pick(block);
    });
  }

  #measureAgain() {
    this.#stale = true;
    this.wake();
  }

  /** The size of each picture, however it is shown: asked for here alone, for the browser lays the page out to answer. */
  #measure(count) {
    const { root, map, grid } = this.#parts;
    this.#palette ??= readPalette(root);
    const [before, sizes] = [this.#measured, { count }];
    for (const [shows, picture, name] of [["all", map, "all"], ["map", map, "map"], ["grid", grid, "grid"], ["grid", map, "strip"]]) {
      root.dataset.shows = shows;
      writeOverview(this.#parts, count - 1, shows, false, 0); // the strip has what its words leave
      sizes[name] = picture.size;
    }
    delete root.dataset.shows;
    if (before?.count !== count || String(before.grid) !== String(sizes.grid)) this.#places = new Places();
    this.#measured = sizes;
    this.#stale = false;
  }

  /** Decides what is shown; what was not shown before is drawn whole. Returns the grid's layout, if there is one. */
  #arrange(count, codes) {
    if (this.#stale || this.#measured.count !== count) this.#measure(count);
    const { root, map, grid } = this.#parts;
    const sizes = this.#measured;
    const isSmall = layOut(...sizes.all, count).size >= READABLE;
    const layout = isSmall ? null : this.#places.update(codes, ...sizes.grid);
    const shows = isSmall ? "all" : layout && !this.#opened ? "grid" : "map";
    if (shows !== root.dataset.shows) {
      root.dataset.shows = shows;
      const size = shows === "grid" ? sizes.strip : sizes[shows];
      this.#mapLayout = layOut(...size, count);
      map.clear(size, this.#palette);
      grid.clear(sizes.grid, this.#palette);
      this.#codes = null;
    }
    writeOverview(this.#parts, count - 1, shows, layout === null, layout ? layout.left : 0);
    return shows === "grid" ? layout : null;
  }

  #draw() {
    const { state, status, selection } = this.#view;
    const { root } = this.#parts;
    root.toggleAttribute("data-empty", !state);
    root.toggleAttribute("data-stale", this.#view.isStale);
    const words = this.#view.isStale ? `${status.text}. This is how the pool was last seen.` : state ? "" : status.text || "Waiting for the engine's first report.";
    if (this.#parts.status.textContent !== words) this.#parts.status.textContent = words;
    this.#engines.draw();
    this.#drawer.draw(state);
    if (!state) return;
    const { codes, counts } = encode(state, litBlocks(state, selection.get()));
    this.#drawPictures(state, codes);
    this.#welcome.draw(state, counts, !this.#view.recorded && root.dataset.shows === "grid");
    writeCaption(this.#parts, state);
    writeFigures(this.#parts, state, counts);
    writeRanks(this.#parts, state);
    writeStates(this.#parts, state);
    writeNews(this.#parts, state);
    this.#requests.draw(state);
    writeDetail(this.#parts, state, this.#lookedAt());
    Object.assign(root.dataset, { at: state.at, lit: selection.seq ?? selection.request ?? "", perCell: this.#mapLayout.per, cell: this.#main.layout.size });
  }

  #drawPictures(state, codes) {
    const { map, grid } = this.#parts;
    const layout = this.#arrange(state.head.num_blocks, codes);
    if (this.cursor >= codes.length) this.cursor = null;
    const changed = map.draw(this.#mapLayout, codes);
    if (layout) grid.draw(layout, codes);
    this.#markNews(state, codes, changed);
    this.#codes = codes;
    map.animate();
    grid.animate();
  }

  /** The blocks under the pointer or else at the cursor, from the first up to, not including, the second; null: none. */
  #lookedAt() {
    const { map, grid } = this.#parts;
    const stage = [grid, map].find(({ layout, hover }) => layout && hover !== null);
    if (stage) return blocksOf(stage.layout, stage.hover);
    return this.cursor === null ? null : this.#blocksAtCursor();
  }

  #blocksAtCursor() {
    const { cursor } = this;
    const { layout } = this.#main;
    const cell = cellOf(layout, cursor);
    return cell < 0 || this.#view.selection.block === cursor ? [cursor, cursor + 1] : blocksOf(layout, cell);
  }

  /** What led to this moment becomes marks on the large picture, unless the view jumped here. */
  #markNews(state, codes, changed) {
    const { history, at, tables } = this.#drawn;
    this.#drawn = { history: this.#view.history, at: state.at, tables: new Map(Array.from(state.seqs, ([seq, { table }]) => [seq, table])) };
    if (history !== this.#view.history || state.at <= at || this.#codes === null) return;
    const written = changed.filter((block) => kindOf(codes[block]) >= HELD && isWritten(this.#codes[block], codes[block]));
    if (written.length <= MOST_PULSES) for (const block of written) this.#main.mark("write", block);
    for (const [, , what, ...details] of state.news) this.#markEvent(state, tables, what, details);
  }

  #markEvent(state, tables, what, [first, second]) {
    const main = this.#main;
    if (what === "evict") main.mark(what, first);
    if (what === "copy") main.mark(what, first, second);
    const row = state.row(first);
    if (what === "hit" && row) for (const block of row.table.slice(0, Math.ceil(second / state.head.block_size))) main.mark(what, block);
    if (what === "preempt") for (const block of tables.get(first) ?? []) main.mark(what, block);
  }
}

function isWritten(before, now) {
  return kindOf(before) < HELD || fillOf(now) > fillOf(before);
}
