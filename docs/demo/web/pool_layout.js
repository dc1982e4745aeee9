// Where the cells lie: as large as they may be, all of them visible.
//
//   sparse   a block is a cell of 6 to 40 pixels, with a gap
//   dense    cells of 5 to 3 pixels without one; in a pool that is larger still, several blocks share one of 4

const LARGEST = 40;
const LEAST_SPARSE = 6;
const LEAST_DENSE = 3;
const MANY_IN_ONE = 4;

export function layOut(width, height, numBlocks) {
  const count = numBlocks - 1; // the null block has no cell
  let size = LARGEST;
  while (size >= LEAST_DENSE && Math.floor(width / size) * Math.floor(height / size) < count) size -= 1;
  const dense = size < LEAST_SPARSE;
  if (size < LEAST_DENSE) size = MANY_IN_ONE;
  const columns = Math.max(1, Math.floor(width / size));
  const most = columns * Math.max(1, Math.floor(height / size));
  const per = dense ? Math.ceil(count / most) : 1; // blocks in a cell
  const cells = Math.ceil(count / per);
  return { size, columns, dense, per, cells, count, rows: Math.ceil(cells / columns) };
}

export const cellOf = (layout, block) => Math.floor((block - 1) / layout.per);

/** The blocks of a cell: from the first up to, not including, the second. */
export const blocksOf = ({ per, count }, cell) => [cell * per + 1, Math.min(count, (cell + 1) * per) + 1];

export const placeOf = ({ size, columns }, cell) => [(cell % columns) * size, Math.floor(cell / columns) * size];

/** The cell under a point, or null. */
export function cellAt({ size, columns, cells }, x, y) {
  const column = Math.floor(x / size);
  const cell = Math.floor(y / size) * columns + column;
  return column >= 0 && column < columns && y >= 0 && cell < cells ? cell : null;
}
