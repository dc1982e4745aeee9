// The pool by keyboard: a cursor that moves from cell to cell.

import { blocksOf, cellOf } from "./pool_layout.js";

/** `pool` has layout (null while there is nothing to move in), cursor (a block or null), moveTo, pickCell and pickNothing. */
export function listenKeys(canvas, pool) {
  canvas.addEventListener("focus", () => {
    if (pool.layout && pool.cursor === null) pool.moveTo(1);
  });
  canvas.addEventListener("keydown", (event) => {
    if (!pool.layout || event.ctrlKey || event.metaKey || event.altKey) return;
    const { columns, cells } = pool.layout;
    const cell = pool.cursor === null ? 0 : cellOf(pool.layout, pool.cursor);
    const to = {
      ArrowRight: cell + 1,
      ArrowLeft: cell - 1,
      ArrowDown: cell + columns,
      ArrowUp: cell - columns,
      PageDown: cell + 10 * columns,
      PageUp: cell - 10 * columns,
      Home: 0,
      End: cells - 1,
    }[event.key];
    if (to !== undefined) {
      if (to >= 0 && to < cells) pool.moveTo(blocksOf(pool.layout, to)[0]);
    } else if (event.key === "Enter" || event.key === " ") pool.pickCell(cell);
    else if (event.key === "Escape") pool.pickNothing();
    else return;
    event.preventDefault();
  });
}
