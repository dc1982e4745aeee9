// A picture of blocks by keyboard: a cursor that moves from cell to cell.

import { blocksOf, cellOf } from "./pool_layout.js";

export function listenKeys(canvas, stage, pool) {
  canvas.addEventListener("focus", () => {
    if (stage.layout?.cells && (pool.cursor === null || cellOf(stage.layout, pool.cursor) < 0)) go(stage, pool, 0, 1);
  });
  canvas.addEventListener("keydown", (event) => {
    if (!stage.layout || event.ctrlKey || event.metaKey || event.altKey) return;
    const { columns, cells } = stage.layout;
    const cell = pool.cursor === null ? 0 : Math.max(0, cellOf(stage.layout, pool.cursor));
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, PageDown: 10 * columns, PageUp: -10 * columns };
    if (event.key in moves) go(stage, pool, cell + moves[event.key], moves[event.key]);
    else if (event.key === "Home") go(stage, pool, 0, 1);
    else if (event.key === "End") go(stage, pool, cells - 1, -1);
    else if (event.key === "Enter" || event.key === " ") pool.pickCell(stage, cell);
    else return;
    event.preventDefault();
  });
}

/** To a cell or, where that place is empty, to the next one in that direction. */
function go({ layout }, pool, cell, direction) {
  while (cell >= 0 && cell < layout.cells && !blocksOf(layout, cell)[0]) cell += direction;
  if (cell >= 0 && cell < layout.cells) pool.moveTo(blocksOf(layout, cell)[0]);
}
