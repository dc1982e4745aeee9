// The cells on their canvas. Sparse: each is drawn, with letter, number and marks as far as there is room. Dense: each is one
// pixel of a small image, the mean colour of its blocks, which the canvas shows enlarged. Both draw only what changed.

import { CACHED, COLOURED, FREE, HELD, SHARED, countOf, fillOf, isDim, isLit, isPinned, isSealed, kindOf, markOf } from "./pool_codes.js";
import { blocksOf, cellOf, placeOf, sideOf } from "./pool_layout.js";
import { colourOf, css, inkOn, letterOf, mix } from "./palette.js";

const LEAST_FOR_TEXT = 14;
const LEAST_FOR_NUMBERS = 32; // of blocks
const LEAST_FOR_MARKS = 9;

function colour(palette, code) {
  const plain = [palette.free, palette.cached, palette.seq[colourOf(markOf(code))], palette.shared][kindOf(code)];
  return isDim(code) ? mix(plain, palette.paper, 0.72) : plain;
}

export class CellPainter {
  #context;
  #drawn = new Uint32Array(0); // block -> its code as it is on the canvas
  #shown = []; // cell -> its block on the canvas, 0: an empty place
  #image = null; // of a dense pool: a pixel for each cell
  #colours = null; // and the red, green and blue of every code

  constructor(canvas) {
    this.#context = canvas.getContext("2d");
  }

  /** Forgets what is on the canvas; the next draw is a whole one. */
  clear(layout, palette, scale) {
    this.layout = layout;
    this.palette = palette;
    this.scale = scale;
    this.#drawn = new Uint32Array(0);
    this.#shown = [];
    this.#context.setTransform(scale, 0, 0, scale, 0, 0);
    this.#context.clearRect(0, 0, this.#context.canvas.width, this.#context.canvas.height);
    this.#image = layout.dense ? new OffscreenCanvas(layout.columns, layout.rows).getContext("2d") : null;
    this.pixels = layout.dense ? new ImageData(layout.columns, layout.rows) : null;
    this.#colours = layout.dense ? Uint8Array.from({ length: 3 * COLOURED }, (_, place) => colour(palette, Math.floor(place / 3))[place % 3]) : null;
  }

  /** Draws what differs from the canvas; returns the blocks that did. */
  draw(layout, codes) {
    this.layout = layout;
    const whole = this.#drawn.length !== codes.length;
    const changed = [];
    for (let block = 1; block < codes.length; block += 1) if (whole || codes[block] !== this.#drawn[block]) changed.push(block);
    this.#drawn = codes;
    if (layout.places) this.#drawPlaces(new Set(changed), codes);
    else if (changed.length && layout.dense) this.#drawDense(changed, codes);
    else for (const block of changed) this.#drawCell(cellOf(layout, block), block, codes[block]);
    return changed;
  }

  /** Places whose block is another one, or has changed. */
  #drawPlaces(changed, codes) {
    for (let cell = 0; cell < this.layout.room; cell += 1) {
      const [block] = blocksOf(this.layout, cell);
      if (block === this.#shown[cell] && !changed.has(block)) continue;
      this.#shown[cell] = block;
      if (block) this.#drawCell(cell, block, codes[block]);
      else this.#drawEmpty(cell);
    }
  }

  #drawEmpty(cell) {
    const side = sideOf(this.layout);
    this.#clearCell(cell);
    this.#context.fillStyle = css(this.palette.free, 0.45);
    this.#context.fillRect(...placeOf(this.layout, cell), side, side);
  }

  #clearCell(cell) {
    const { size } = this.layout;
    this.#context.clearRect(...placeOf(this.layout, cell), size, size);
  }

  #drawDense(changed, codes) {
    let before = -1;
    for (const block of changed) {
      const cell = cellOf(this.layout, block);
      if (cell !== before) this.#drawPixel(cell, codes);
      before = cell;
    }
    this.#image.putImageData(this.pixels, 0, 0);
    const { columns, rows, size } = this.layout;
    this.#context.imageSmoothingEnabled = false;
    this.#context.drawImage(this.#image.canvas, 0, 0, columns * size, rows * size);
  }

  /** The mean of a cell's blocks; one that is lit must not drown in it. */
  #drawPixel(cell, codes) {
    const [from, to] = blocksOf(this.layout, cell);
    const { data } = this.pixels;
    let [red, green, blue, lit] = [0, 0, 0, 0];
    for (let block = from; block < to; block += 1) {
      const place = 3 * (codes[block] % COLOURED);
      red += this.#colours[place];
      green += this.#colours[place + 1];
      blue += this.#colours[place + 2];
      lit |= isLit(codes[block]);
    }
    const count = to - from;
    const { accent } = this.palette;
    data[4 * cell] = lit ? accent[0] : red / count;
    data[4 * cell + 1] = lit ? accent[1] : green / count;
    data[4 * cell + 2] = lit ? accent[2] : blue / count;
    data[4 * cell + 3] = 255;
  }

  #drawCell(place, block, code) {
    const context = this.#context;
    const cell = sideOf(this.layout);
    const [x, y] = placeOf(this.layout, place);
    const fill = colour(this.palette, code);
    const kind = kindOf(code);
    this.#clearCell(place);
    context.fillStyle = css(this.palette.free);
    context.fillRect(x, y, cell, cell);
    if (kind === HELD || kind === SHARED) {
      const full = Math.max(1, Math.round(cell * fillOf(code)));
      context.fillStyle = css(fill, 0.35);
      context.fillRect(x, y, cell, cell - full);
      context.fillStyle = css(fill);
      context.fillRect(x, y + cell - full, cell, full);
    } else if (kind === CACHED) {
      context.fillStyle = css(fill);
      context.fillRect(x, y, cell, cell);
      this.#hatch(x, y, cell);
    }
    if (kind === SHARED) this.#inset(x, y, cell, fill);
    if (cell >= LEAST_FOR_TEXT && kind >= HELD) this.#writeMark(x, y, cell, code, fill);
    if (cell >= LEAST_FOR_NUMBERS) this.#writeNumber(x, y, cell, block, code, fill);
    if (cell >= LEAST_FOR_MARKS && isSealed(code)) this.#corner(x, y, cell, isDim(code));
    if (cell >= LEAST_FOR_MARKS && isPinned(code)) this.#pin(x, y, cell, isDim(code));
    if (isLit(code)) this.#outline(x, y, cell);
  }

  #hatch(x, y, cell) {
    this.#context.strokeStyle = css(this.palette.muted, 0.55);
    this.#context.lineWidth = 1;
    this.#context.beginPath();
    this.#context.moveTo(x + 1, y + cell - 1);
    this.#context.lineTo(x + cell - 1, y + 1);
    this.#context.stroke();
  }

  #inset(x, y, cell, fill) {
    this.#context.strokeStyle = css(inkOn(fill), 0.6);
    this.#context.lineWidth = 1;
    this.#context.strokeRect(x + 1.5, y + 1.5, cell - 3, cell - 3);
  }

  /** The letter of the sequence that holds it, or how many share it. */
  #writeMark(x, y, cell, code, fill) {
    const numbered = cell >= LEAST_FOR_NUMBERS;
    const text = kindOf(code) === SHARED ? `×${countOf(code)}` : letterOf(markOf(code));
    const share = (numbered ? 0.42 : 0.55) * (text.length > 2 ? 0.85 : 1);
    this.#text(text, `600 ${Math.round(cell * share)}px`, x + cell / 2, y + cell * (numbered ? 0.4 : 0.5) + 0.5, fillOf(code) > 0.6 ? inkOn(fill) : this.palette.ink);
  }

  /** The block's own number, at the foot of a large cell. */
  #writeNumber(x, y, cell, block, code, fill) {
    const ink = { [FREE]: this.palette.muted, [CACHED]: this.palette.ink }[kindOf(code)] ?? (fillOf(code) > 0.2 ? inkOn(fill) : this.palette.ink);
    this.#text(String(block), block < 100_000 ? "10px" : "8px", x + cell / 2, y + cell - 7, ink, isDim(code) ? 0.5 : 0.9);
  }

  #text(text, font, x, y, ink, alpha = 1) {
    const context = this.#context;
    context.font = `${font} system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = css(ink, alpha);
    context.fillText(text, x, y);
  }

  #corner(x, y, cell, dim) {
    const side = Math.max(4, cell * 0.28);
    this.#context.fillStyle = css(this.palette.ink, dim ? 0.3 : 0.85);
    this.#context.beginPath();
    this.#context.moveTo(x + cell, y);
    this.#context.lineTo(x + cell - side, y);
    this.#context.lineTo(x + cell, y + side);
    this.#context.fill();
  }

  /** A dot in the corner that a full block leaves free. */
  #pin(x, y, cell, dim) {
    const radius = Math.max(2, cell * 0.13);
    this.#context.fillStyle = css(this.palette.accent, dim ? 0.4 : 1);
    this.#context.beginPath();
    this.#context.arc(x + radius + 1, y + radius + 1, radius, 0, 2 * Math.PI);
    this.#context.fill();
  }

  #outline(x, y, cell) {
    this.#context.strokeStyle = css(this.palette.accent);
    this.#context.lineWidth = 2;
    this.#context.strokeRect(x + 1, y + 1, cell - 2, cell - 2);
  }
}
