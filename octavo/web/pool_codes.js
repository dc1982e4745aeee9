// What is to be seen of a block, in one number, so that a frame costs one pass and only what changed is drawn.
//
//   kind 2 bits | dim 1 | mark of the sequence 8 | lit 1 | sealed 1 | fill 4 | users 8 | pinned 1

import { MARKS } from "./palette.js";

export const FREE = 0;
export const CACHED = 1;
export const HELD = 2;
export const SHARED = 3;
export const KINDS = ["free", "cached", "held", "shared"];

export const COLOURED = 1 << 11; // codes below it: the bits that decide the colour
const DIM = 1 << 2;
const LIT = COLOURED;

export const kindOf = (code) => code & 3;
export const isDim = (code) => (code >> 2) & 1;
export const markOf = (code) => (code >> 3) & 255;
export const isLit = (code) => (code >> 11) & 1;
export const isSealed = (code) => (code >> 12) & 1;
export const fillOf = (code) => ((code >> 13) & 15) / 15;
export const countOf = (code) => (code >> 17) & 255;
export const isPinned = (code) => (code >> 25) & 1;

/**
 * Codes of all blocks, and how many there are of each kind: together they are the pool. A block that a pin alone holds looks cached.
 * `lit`: the blocks of what is selected, or null.
 */
export function encode(state, lit) {
  const { ref, sealed: seals, pins, tokens } = state.blocks;
  const { block_size: size, num_blocks: count } = state.head;
  const marks = new Uint8Array(count);
  for (const { seq, table } of state.seqs.values()) for (const block of table) marks[block] = seq % MARKS;
  const codes = new Uint32Array(count);
  const found = new Uint32Array(KINDS.length);
  let pinned = 0;
  const dim = lit === null ? 0 : DIM;
  for (let block = 1; block < count; block += 1) {
    const users = ref[block] - pins[block];
    const sealed = seals[block];
    const kind = users > 1 ? SHARED : users === 1 ? HELD : sealed ? CACHED : FREE;
    if (kind === CACHED && pins[block]) pinned += 1;
    else found[kind] += 1;
    let code = kind | dim | (sealed << 12) | (pins[block] ? 1 << 25 : 0);
    if (kind >= HELD) {
      const known = sealed ? null : tokens[block];
      const fill = known === null ? 15 : Math.round((15 * Math.min(size, known.length)) / size);
      code |= (marks[block] << 3) | (fill << 13) | (Math.min(255, users) << 17);
    }
    codes[block] = code;
  }
  for (const block of lit ?? []) codes[block] = (codes[block] & ~DIM) | LIT;
  const counts = Object.fromEntries(KINDS.map((kind, index) => [kind, found[index]]));
  return { codes, counts: { ...counts, pinned } };
}
