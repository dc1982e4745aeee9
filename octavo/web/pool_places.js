// The grid's places: who has which one. A block keeps its place for as long as it is in use or cached, so the eye can follow it.
//
//   needed     blocks in use and blocks that are selected: each has a place; cells shrink if they have to
//   cached     the rest of the places, while cells can still be read; the one that was used longest ago makes room
//
// All places are given anew only when cells change their size: when they no longer fit, or when much larger ones would.

import { LARGEST, READABLE, capacity } from "./pool_layout.js";
import { CACHED, HELD, isLit, isPinned, kindOf } from "./pool_codes.js";

const SIZES = [LARGEST, 64, 57, 51, 46, 41, 37, 33, 30, 27, 24, 22, READABLE, 16, 12, 9, 7]; // pixels
const ROOM_TO_GROW = 1.3; // cells become larger only if so many times as many of them would fit

export class Places {
  #cells = new Map(); // block -> cell
  #blocks = []; // cell -> block, 0: empty
  #used = new Map(); // block -> the last drawing in which it was needed
  #drawing = 0;
  #size = -1; // of a cell; 0: there was no room, -1: nothing was drawn yet
  #given = 0; // the size for which places were given

  cellOf(block) {
    return this.#cells.get(block) ?? -1;
  }

  blockAt(cell) {
    return this.#blocks[cell] ?? 0;
  }

  /** The layout for these codes, how many places there are, and how many cached blocks are left without one; null: there is no room even for the smallest cells. */
  update(codes, width, height) {
    this.#size = this.#choose(...count(codes), width, height);
    if (this.#size === 0) return null;
    const { needed, cached } = sort(codes);
    const size = this.#size;
    const columns = Math.floor(width / size);
    const room = capacity(width, height, size);
    this.#drawing += 1;
    this.#remove(codes);
    if (this.#blocks.length === 0) this.#begin([...needed, ...cached.slice(0, room - needed.length)]);
    else if (size !== this.#given) this.#giveAnew(room, needed);
    this.#given = size;
    this.#place(needed, room);
    this.#fill(cached, room);
    const cells = this.#blocks.length;
    const left = needed.length + cached.length - this.#cells.size;
    return { size, columns, rows: Math.ceil(cells / columns), cells, count: codes.length - 1, dense: false, per: 1, places: this, room, left };
  }

  #choose(needed, cached, width, height) {
    const fits = (size, spare = 1) => {
      const room = capacity(width, height, size);
      return size > READABLE ? room >= spare * (needed + cached) : room >= spare * needed;
    };
    const largest = (spare) => SIZES.find((size) => fits(size, spare)) ?? 0;
    if (this.#size < 0 || (this.#size > 0 && !fits(this.#size))) return largest(1);
    return Math.max(this.#size, largest(ROOM_TO_GROW));
  }

  /** Blocks that became free leave. */
  #remove(codes) {
    for (const [block, cell] of this.#cells) {
      if (block < codes.length && kindOf(codes[block]) >= CACHED) continue;
      this.#leave(block, cell);
    }
    while (this.#blocks.length && !this.#blocks.at(-1)) this.#blocks.pop();
  }

  #leave(block, cell) {
    this.#cells.delete(block);
    this.#used.delete(block);
    this.#blocks[cell] = 0;
  }

  /** Nothing was there before: in physical order. */
  #begin(blocks) {
    blocks.sort((one, other) => one - other).forEach((block, cell) => {
      this.#used.set(block, 0);
      this.#take(block, cell);
    });
  }

  /** In the order they had, without gaps; cached blocks only as far as there is room beside those that are needed. */
  #giveAnew(room, needed) {
    const must = new Set(needed);
    let spare = room - needed.length;
    const kept = this.#blocks.filter((block) => block && (must.has(block) || spare-- > 0));
    const used = this.#used;
    this.#used = new Map(kept.map((block) => [block, used.get(block) ?? 0]));
    this.#blocks = kept;
    this.#cells = new Map(kept.map((block, cell) => [block, cell]));
  }

  #place(needed, room) {
    let empty = 0; // no empty place is before this one
    let oldest = null; // cached blocks, the one that was used last first
    for (const block of needed) {
      this.#used.set(block, this.#drawing);
      if (this.#cells.has(block)) continue;
      while (empty < this.#blocks.length && this.#blocks[empty]) empty += 1;
      if (empty < room) {
        this.#take(block, empty);
        continue;
      }
      oldest ??= [...this.#cells.keys()].filter((other) => this.#used.get(other) !== this.#drawing).sort((one, other) => this.#used.get(other) - this.#used.get(one));
      let leaving = oldest.pop();
      while (this.#used.get(leaving) === this.#drawing) leaving = oldest.pop(); // it is needed, too
      const cell = this.#cells.get(leaving);
      this.#leave(leaving, cell);
      this.#take(block, cell);
    }
  }

  #fill(cached, room) {
    let empty = 0;
    for (const block of cached) {
      if (this.#cells.has(block)) continue;
      while (empty < this.#blocks.length && this.#blocks[empty]) empty += 1;
      if (empty >= room) return;
      this.#used.set(block, 0);
      this.#take(block, empty);
    }
  }

  #take(block, cell) {
    this.#blocks[cell] = block;
    this.#cells.set(block, cell);
  }
}

const isNeeded = (code) => kindOf(code) >= HELD || (kindOf(code) === CACHED && (isLit(code) === 1 || isPinned(code) === 1));

/** How many blocks are needed, and how many more are cached. */
function count(codes) {
  let [needed, cached] = [0, 0];
  for (let block = 1; block < codes.length; block += 1) {
    if (isNeeded(codes[block])) needed += 1;
    else if (kindOf(codes[block]) === CACHED) cached += 1;
  }
  return [needed, cached];
}

function sort(codes) {
  const [needed, cached] = [[], []];
  for (let block = 1; block < codes.length; block += 1) {
    if (isNeeded(codes[block])) needed.push(block);
    else if (kindOf(codes[block]) === CACHED) cached.push(block);
  }
  return { needed, cached };
}
