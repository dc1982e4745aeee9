// The door of the page: lines become frames, and a frame is checked before anything believes it.
//
// A frame may come from a server of another version or from any file that somebody dropped. What is wrong is said in one
// sentence that names the field; a kind that is not known is left to newer pages (`null`).

const KINDS = new Set(["head", "full", "delta", "note"]);
const MOST_BLOCKS = 1 << 24;
const MOST_ENGINES = 1000;

export class FrameError extends Error {}

function want(condition, message) {
  if (!condition) throw new FrameError(message);
}

/** One line of a stream or recording; null for an empty line and for a kind this page does not know. */
export function parseLine(line, head) {
  if (!line.trim()) return null;
  let frame;
  try {
    frame = JSON.parse(line);
  } catch {
    throw new FrameError("a line is not JSON, so this is no recording of a view");
  }
  want(frame !== null && typeof frame === "object" && typeof frame.kind === "string", "a line has no kind, so it is no frame");
  if (!KINDS.has(frame.kind)) return null;
  if (frame.kind === "head") return checkHead(frame);
  want(head, `a ${frame.kind} came before the head`);
  want(Number.isFinite(frame.at), `at of a ${frame.kind} is ${frame.at}, not a number of seconds`);
  want(frame.engine === undefined || Number.isInteger(frame.engine), `engine of a note is ${frame.engine}, not a number`);
  if (frame.kind !== "note") checkChanges(frame, head.num_blocks);
  return frame;
}

function checkHead(frame) {
  want(frame.version === 1, `the view has version ${frame.version}; this page reads version 1`);
  const { num_blocks: blocks, block_size: size } = frame;
  want(Number.isInteger(blocks) && blocks > 1 && blocks <= MOST_BLOCKS, `num_blocks is ${blocks}; it must lie in 2..${MOST_BLOCKS}`);
  want(Number.isInteger(size) && size > 0, `block_size is ${size}, not a number of tokens`);
  want(Number.isFinite(frame.started), `started of a head is ${frame.started}, not a number of seconds`);
  want(frame.engines === undefined || (Number.isInteger(frame.engines) && frame.engines <= MOST_ENGINES), `engines of a head is ${frame.engines}, not a number of engines`);
  const isRank = (one) => Number.isInteger(one?.rank) && Array.isArray(one.layers);
  want(frame.ranks === undefined || (Array.isArray(frame.ranks) && frame.ranks.every(isRank)), "ranks of a head are not what ranks are");
  return frame;
}

function checkChanges(frame, numBlocks) {
  for (const field of ["blocks", "seqs", "gone", "steps", "events", "ranks"]) {
    want(frame[field] === undefined || Array.isArray(frame[field]), `${field} of a ${frame.kind} is not a list`);
  }
  const areCounts = (list) => Array.isArray(list) && list.every((count) => Number.isInteger(count) && count >= 0);
  const isBlock = (block) => Number.isInteger(block) && block > 0 && block < numBlocks;
  for (const row of frame.blocks ?? []) {
    want(Array.isArray(row) && isBlock(row[0]), `block ${row?.[0]} is outside 1..${numBlocks - 1}`);
    want(Number.isInteger(row[1]) && row[1] >= 0, `block ${row[0]} has the reference count ${row[1]}`);
    want(row[4] == null || Array.isArray(row[4]), `tokens of block ${row[0]} are not a list`);
  }
  for (const seq of frame.seqs ?? []) {
    want(Number.isInteger(seq?.seq), `seq is ${seq?.seq}, not a number`);
    want(seq.table === undefined || (Array.isArray(seq.table) && seq.table.every(isBlock)), `the table of sequence ${seq.seq} names no blocks`);
    want(seq.checkpoints === undefined || areCounts(seq.checkpoints), `the checkpoints of sequence ${seq.seq} are not numbers of tokens`);
  }
  want(frame.states === undefined || (areCounts(frame.states) && frame.states.length === 4), `states of a ${frame.kind} are not four counts`);
  for (const field of ["steps", "events", "gone", "ranks"]) want((frame[field] ?? []).every(Array.isArray), `${field} of a ${frame.kind} are not lists`);
}
