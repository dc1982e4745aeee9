// What is passing, drawn over the cells: new writes pulse, a copy is an arrow, evicted blocks are crossed out, blocks of a
// preempted sequence and of a prefix hit are framed. Also the cursor. Where motion is unwanted marks stand still, then go.

import { cellOf, placeOf, sideOf } from "./pool_layout.js";
import { css } from "./palette.js";

const LASTS_MS = { write: 500, copy: 1600, evict: 1200, preempt: 1400, hit: 1400 };
const MOST_MARKS = 400;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Marks {
  #context;
  #marks = []; // { what, block, to, begun }
  cursor = null; // a cell
  hover = null;

  constructor(canvas) {
    this.#context = canvas.getContext("2d");
  }

  add(what, block, to = block) {
    this.#marks.push({ what, block, to, begun: performance.now() });
    if (this.#marks.length > MOST_MARKS) this.#marks.splice(0, this.#marks.length - MOST_MARKS);
  }

  /** Draws what still lasts; returns whether anything does. */
  draw(layout, palette, scale) {
    const context = this.#context;
    const now = performance.now();
    this.#marks = this.#marks.filter(({ what, begun }) => now - begun < LASTS_MS[what]);
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, context.canvas.width, context.canvas.height);
    for (const mark of this.#marks) {
      if (cellOf(layout, mark.block) < 0 || cellOf(layout, mark.to) < 0) continue; // it has no place any more
      context.globalAlpha = still.matches ? 1 : 1 - (now - mark.begun) / LASTS_MS[mark.what];
      DRAW[mark.what](context, this.#box(layout, mark.block), this.#box(layout, mark.to), palette);
    }
    context.globalAlpha = 1;
    if (this.hover !== null) frame(context, placed(layout, this.hover), css(palette.muted), 1);
    if (this.cursor !== null && this.cursor >= 0) frame(context, placed(layout, this.cursor), css(palette.ink), 2);
    return this.#marks.length > 0;
  }

  #box(layout, block) {
    return placed(layout, cellOf(layout, block));
  }
}

function placed(layout, cell) {
  const [x, y] = placeOf(layout, cell);
  return { x, y, side: sideOf(layout) };
}

/** Around a cell, but never outside of the picture, which the first column and the first row touch. */
function frame(context, { x, y, side }, colour, width) {
  const half = width / 2;
  const [left, top] = [Math.max(half, x - half), Math.max(half, y - half)];
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.strokeRect(left, top, x + side + half - left, y + side + half - top);
}

function cross(context, { x, y, side }, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(x + side, y + side);
  context.moveTo(x + side, y);
  context.lineTo(x, y + side);
  context.stroke();
}

function arrow(context, from, to, colour) {
  const [x, y] = [from.x + from.side / 2, from.y + from.side / 2];
  const [toX, toY] = [to.x + to.side / 2, to.y + to.side / 2];
  const angle = Math.atan2(toY - y, toX - x);
  context.strokeStyle = colour;
  context.fillStyle = colour;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x, y);
  context.lineTo(toX, toY);
  context.stroke();
  context.beginPath();
  context.moveTo(toX, toY);
  for (const side of [-0.45, 0.45]) context.lineTo(toX - 9 * Math.cos(angle + side), toY - 9 * Math.sin(angle + side));
  context.fill();
  frame(context, to, colour, 2);
}

const DRAW = {
  write: (context, box, _, palette) => frame(context, box, css(palette.accent), 2),
  copy: (context, from, to, palette) => arrow(context, from, to, css(palette.ink)),
  evict: (context, box, _, palette) => cross(context, box, css(palette.warn)),
  preempt: (context, box, _, palette) => frame(context, box, css(palette.warn), 3),
  hit: (context, box, _, palette) => frame(context, box, css(palette.accent), 3),
};
