// Where the cells lie. Both pictures of the pool use these functions:
//
//   the map    every block in physical order; in a large pool several blocks share a cell (layOut)
//   the grid   blocks in use and cached blocks, each in a place of its own (pool_places.js)
//
// A map is sparse or dense:
//   sparse   a block is a cell of 6 to 96 pixels, with a gap; cells fill a rectangle if that costs little of their size
//   dense    cells of 5 to 3 pixels without a gap; in a pool that is larger still, several blocks share a cell of 4

export const LARGEST = 72; // pixels of a cell in the grid
const LARGEST_IN_MAP = 96; // a pool of some dozen blocks is seen whole, as in the lesson
export const READABLE = 20; // in which a letter can be read
const PRICE_OF_A_RECTANGLE = 0.75; // how much smaller cells may become for it
const LEAST_SPARSE = 6;
const LEAST_DENSE = 3;
const MANY_IN_ONE = 4;

export function layOut(width, height, numBlocks) {
  const count = numBlocks - 1; // the null block has no cell
  let size = LARGEST_IN_MAP;
  while (size >= LEAST_DENSE && capacity(width, height, size) < count) size -= 1;
  const dense = size < LEAST_SPARSE;
  if (size < LEAST_DENSE) size = MANY_IN_ONE;
  if (size >= READABLE) return rectangle(width, height, size, count);
  const columns = Math.max(1, Math.floor(width / size));
  const most = columns * Math.max(1, Math.floor(height / size));
  const per = dense ? Math.ceil(count / most) : 1; // blocks in a cell
  const cells = Math.ceil(count / per);
  return { size, columns, dense, per, cells, count, rows: Math.ceil(cells / columns), places: null };
}

/** A small pool as a rectangle without gaps, as near as can be to the shape of the room, if cells need not be much smaller: 32 blocks are 8 x 4. */
function rectangle(width, height, size, count) {
  const sizeFor = (columns) => Math.min(LARGEST_IN_MAP, Math.floor(width / columns), Math.floor((height * columns) / count));
  const distance = (columns) => Math.abs(Math.log((columns * columns) / count / (width / height)));
  const whole = Array.from({ length: count }, (_, index) => index + 1).filter((columns) => count % columns === 0 && sizeFor(columns) >= PRICE_OF_A_RECTANGLE * size);
  const columns = whole.sort((one, other) => distance(one) - distance(other))[0] ?? Math.min(count, Math.floor(width / size));
  const fitting = count % columns === 0 ? sizeFor(columns) : size;
  return { size: fitting, columns, dense: false, per: 1, cells: count, count, rows: Math.ceil(count / columns), places: null };
}

/** How many cells of a size there is room for. */
export const capacity = (width, height, size) => Math.floor(width / size) * Math.floor(height / size);

/** The cell of a block; -1: it has none. */
export const cellOf = ({ places, per }, block) => (places ? places.cellOf(block) : Math.floor((block - 1) / per));

/** The blocks of a cell: from the first up to, not including, the second. An empty place of the grid has none. */
export function blocksOf({ places, per, count }, cell) {
  if (!places) return [cell * per + 1, Math.min(count, (cell + 1) * per) + 1];
  const block = places.blockAt(cell);
  return block ? [block, block + 1] : [0, 0];
}

export const placeOf = ({ size, columns }, cell) => [(cell % columns) * size, Math.floor(cell / columns) * size];

/** The side of what is drawn in a cell. */
export const sideOf = ({ size, dense }) => size - (dense ? 0 : size > 8 ? 3 : 1);

/** The cell under a point that has a block, or null. */
export function cellAt(layout, x, y) {
  const { size, columns, cells } = layout;
  const column = Math.floor(x / size);
  const cell = Math.floor(y / size) * columns + column;
  if (column < 0 || column >= columns || y < 0 || cell >= cells) return null;
  return blocksOf(layout, cell)[0] ? cell : null;
}
