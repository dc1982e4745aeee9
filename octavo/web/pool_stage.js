// One picture of blocks: a canvas of cells, and over it a canvas of marks with a pointer and a cursor that go from cell to cell.

import { make } from "./dom.js";
import { CellPainter } from "./pool_draw.js";
import { listenKeys } from "./pool_keys.js";
import { cellAt, cellOf } from "./pool_layout.js";
import { Marks } from "./pool_marks.js";

const FADE_STEP_MS = 40; // fading marks need no picture of every refresh

/** `pool`: { cursor (a block or null), pointAt(stage, cell), moveTo(block), pickCell(stage, cell), pickNothing() }. */
export class Stage {
  #cells;
  #over;
  #painter;
  #marks;
  #palette = null;
  #animated = false;
  #pool;
  #pointer = null; // [x, y]
  layout = null; // null while there is nothing to see

  constructor(name, label, help, pool) {
    this.#pool = pool;
    this.#cells = make("canvas", { class: `${name}-cells`, "aria-hidden": "true" });
    this.#over = make("canvas", { class: `${name}-marks`, tabindex: "0", role: "application", "aria-label": label, "aria-describedby": help });
    this.element = make("div", { class: `stage ${name}-stage` }, this.#cells, this.#over);
    this.#painter = new CellPainter(this.#cells);
    this.#marks = new Marks(this.#over);
    this.#listen();
    listenKeys(this.#over, this, pool);
  }

  #listen() {
    const under = (event) => this.layout && cellAt(this.layout, event.offsetX, event.offsetY);
    this.#over.addEventListener("pointermove", (event) => this.#point([event.offsetX, event.offsetY]));
    this.#over.addEventListener("pointerleave", () => this.#point(null));
    this.#over.addEventListener("click", (event) => {
      const cell = under(event);
      if (cell !== null) this.#pool.pickCell(this, cell);
    });
  }

  #point(pointer) {
    const before = this.hover;
    this.#pointer = pointer;
    if (this.hover !== before) this.#pool.wake();
  }

  /** The cell under the pointer, also where cells have moved under it; null: none. */
  get hover() {
    return this.layout && this.#pointer && cellAt(this.layout, ...this.#pointer);
  }

  focus() {
    this.#over.focus({ preventScroll: true });
  }

  get size() {
    return [this.element.clientWidth, this.element.clientHeight];
  }

  /** An empty picture of this size, sharp on its screen; the next draw is a whole one. */
  clear([width, height], palette) {
    this.#palette = palette;
    for (const canvas of [this.#cells, this.#over]) {
      canvas.width = Math.round(width * devicePixelRatio);
      canvas.height = Math.round(height * devicePixelRatio);
    }
    this.layout = null;
  }

  /** Draws what differs from the canvas; returns the blocks that do. */
  draw(layout, codes) {
    const { layout: before } = this;
    if (before?.size !== layout.size || before.columns !== layout.columns || before.count !== layout.count) this.#painter.clear(layout, this.#palette, devicePixelRatio);
    this.layout = layout;
    return this.#painter.draw(layout, codes);
  }

  mark(what, block, to = block) {
    if (this.layout && cellOf(this.layout, block) >= 0 && cellOf(this.layout, to) >= 0) this.#marks.add(what, block, to);
  }

  /** Draws the marks until the last of them has faded. */
  animate() {
    if (!this.layout) return;
    const { cursor } = this.#pool;
    this.#marks.cursor = cursor === null ? null : cellOf(this.layout, cursor);
    this.#marks.hover = this.hover;
    if (!this.#marks.draw(this.layout, this.#palette, devicePixelRatio) || this.#animated) return;
    this.#animated = true;
    setTimeout(() => {
      this.#animated = false;
      requestAnimationFrame(() => this.animate());
    }, FADE_STEP_MS);
  }
}
