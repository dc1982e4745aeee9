// What is to be seen of a block, in one number, so that a frame costs one pass and only what changed is drawn.
//
//   kind 2 bits | sealed 1 | fill 4 | lit 1 | dim 1 | mark of the sequence 8 | reference count 8

import { MARKS } from "./palette.js";

export const FREE = 0;
export const CACHED = 1;
export const HELD = 2;
export const SHARED = 3;
export const KINDS = ["free", "cached", "held", "shared"];

export const kindOf = (code) => code & 3;
export const isSealed = (code) => (code >> 2) & 1;
export const fillOf = (code) => ((code >> 3) & 15) / 15;
export const isLit = (code) => (code >> 7) & 1;
export const isDim = (code) => (code >> 8) & 1;
export const markOf = (code) => (code >> 9) & 255;
export const countOf = (code) => (code >> 17) & 255;

/** Codes of all blocks, and how many there are of each kind and sealed. `lit`: the blocks of what is selected, or null. */
export function encode(state, lit) {
  const { ref, sealed, tokens } = state.blocks;
  const { block_size: size, num_blocks: count } = state.head;
  const marks = new Uint8Array(count);
  for (const { seq, table } of state.seqs.values()) for (const block of table) marks[block] = seq % MARKS;
  const codes = new Uint32Array(count);
  const found = new Uint32Array(KINDS.length);
  let numSealed = 0;
  const dim = lit === null ? 0 : 1;
  for (let block = 1; block < count; block += 1) {
    const kind = ref[block] > 1 ? SHARED : ref[block] === 1 ? HELD : sealed[block] ? CACHED : FREE;
    found[kind] += 1;
    numSealed += sealed[block];
    const known = sealed[block] ? null : tokens[block];
    const fill = known === null ? 15 : Math.round((15 * Math.min(size, known.length)) / size);
    codes[block] = kind | (sealed[block] << 2) | (fill << 3) | (dim << 8);
    if (kind >= HELD) codes[block] |= (marks[block] << 9) | (Math.min(255, ref[block]) << 17);
  }
  for (const block of lit ?? []) codes[block] = (codes[block] & ~(1 << 8)) | (1 << 7);
  const counts = Object.fromEntries(KINDS.map((kind, index) => [kind, found[index]]));
  return { codes, counts: { ...counts, sealed: numSealed } };
}
