// What an engine holds at one moment: every block, every sequence, and what had happened until then.
//
//   State.apply(frame, at)   moves it on by one frame          State.clone()   a keyframe
//
// Rows of sequences and tables are replaced, never changed, so that clones share them.

export const SHOWN_STEPS = 600; // as many as a full frame tells
const REMEMBERED_ENDS = 32;

class Blocks {
  constructor(numBlocks, blockSize) {
    this.blockSize = blockSize;
    this.ref = new Uint32Array(numBlocks);
    this.sealed = new Uint8Array(numBlocks);
    this.pins = new Uint32Array(numBlocks);
    this.since = new Float64Array(numBlocks);
    this.digests = new Array(numBlocks).fill("");
    this.tokens = new Array(numBlocks).fill(null); // block -> pieces of text, null: not known
  }

  clone() {
    const copy = Object.create(Blocks.prototype);
    copy.blockSize = this.blockSize;
    for (const name of ["ref", "sealed", "pins", "since", "digests", "tokens"]) copy[name] = this[name].slice();
    return copy;
  }

  set(row) {
    const [block, ref, sealed, digest, tokens, since] = row;
    if (tokens != null) this.tokens[block] = tokens;
    else if (!keepsText(this, row)) this.tokens[block] = null;
    this.ref[block] = ref;
    this.sealed[block] = sealed ? 1 : 0;
    this.pins[block] = Math.max(0, sealed - 1);
    this.digests[block] = digest;
    if (since != null) this.since[block] = since;
  }
}

/** Whether a block, told without its tokens, can still have those that are known of it. */
function keepsText({ blockSize, sealed, digests, tokens, since: times }, [block, ref, nowSealed, digest, , since]) {
  if (ref === 0 && !nowSealed) return false; // free
  if (sealed[block]) return digests[block] === digest;
  if (nowSealed) return tokens[block]?.length === blockSize; // it may have been taken by another and filled since
  return since == null || since === times[block]; // else taken by another
}

/** An append-only list that forgets its beginning; places in it keep their numbers. */
export class Log {
  items = [];
  dropped = 0;

  get end() {
    return this.dropped + this.items.length;
  }

  append(items) {
    for (const item of items) this.items.push(item);
  }

  between(from, to) {
    return this.items.slice(Math.max(0, from - this.dropped), Math.max(0, to - this.dropped));
  }

  forget(before) {
    const count = before - this.dropped;
    if (count <= 0) return;
    this.items.splice(0, count);
    this.dropped += count;
  }
}

export class State {
  constructor(head, logs) {
    this.head = head;
    this.logs = logs; // { steps, events }: shared by all states of a history
    this.at = 0;
    this.blocks = new Blocks(head.num_blocks, head.block_size);
    this.seqs = new Map(); // seq -> its row, in order of arrival
    this.ended = new Map(); // seq -> its last row, with how it ended and the digests its full blocks had
    this.numSteps = logs.steps.end;
    this.numEvents = logs.events.end;
    this.news = []; // events of the delta that led here
    this.note = null;
    this.lost = 0;
    this.states = null; // state slots of a recurrent model: [all, live, checkpoints, pinned checkpoints]
    this.ranks = []; // what each rank did last, where there are several: [rank, steps, share, age]
    this.busySince = null; // when the first of the requests that run or wait now was told; null: there is none
  }

  clone() {
    const copy = Object.assign(Object.create(State.prototype), this);
    copy.blocks = this.blocks.clone();
    copy.seqs = new Map(this.seqs);
    copy.ended = new Map(this.ended);
    return copy;
  }

  apply(frame, at) {
    this.at = at;
    if (frame.kind === "note") {
      this.note = frame.scene === 0 ? null : frame;
      return;
    }
    for (const row of frame.blocks ?? []) this.blocks.set(row);
    for (const seq of frame.seqs ?? []) setSeq(this.seqs, seq);
    for (const [seq, how] of frame.gone ?? []) end(this, seq, how);
    this.news = frame.kind === "full" ? [] : (frame.events ?? []);
    this.numSteps += frame.steps?.length ?? 0;
    this.numEvents += frame.events?.length ?? 0;
    this.lost += frame.lost ?? 0;
    this.states = frame.states ?? this.states;
    this.ranks = frame.ranks ?? this.ranks;
    this.busySince = this.seqs.size ? (this.busySince ?? at) : null;
  }

  /** The last steps, at most as many as a full frame tells. */
  get steps() {
    return this.logs.steps.between(this.numSteps - SHOWN_STEPS, this.numSteps);
  }

  get events() {
    return this.logs.events.between(this.numEvents - SHOWN_STEPS, this.numEvents);
  }

  /** Blocks that somebody holds. */
  get numUsed() {
    return this.blocks.ref.reduce((count, references) => count + (references > 0), 0);
  }

  /** Who holds a block: [[seq, index in its table], ...]. */
  owners(block) {
    const found = [];
    for (const { seq, table } of this.seqs.values()) {
      for (let index = table.indexOf(block); index >= 0; index = table.indexOf(block, index + 1)) found.push([seq, index]);
    }
    return found;
  }

  /** By how many block tables a block is used: a pin holds it, too, and uses nothing. */
  users(block) {
    return this.blocks.ref[block] - this.blocks.pins[block];
  }

  /** What is in a block, in one word. */
  kind(block) {
    const { ref, sealed } = this.blocks;
    const users = this.users(block);
    if (users > 0) return users > 1 ? "shared" : "held";
    if (ref[block]) return "pinned";
    return sealed[block] ? "cached" : "free";
  }

  /** The row of a sequence that runs, waits, or has ended lately. */
  row(seq) {
    return this.seqs.get(seq) ?? this.ended.get(seq);
  }

  /** Sequences of a request, those that ended lately too. */
  samples(request) {
    return [...this.ended.values(), ...this.seqs.values()].filter((row) => row.request === request);
  }

  /** A row's table, entry by entry: [index, block, whether that block still has what the row put there]. */
  entries(row, from = 0, to = row.table.length) {
    const { digests } = this.blocks;
    return row.table.slice(from, to).map((block, place) => [from + place, block, row.state !== "ended" || row.digests?.[from + place] === digests[block]]);
  }
}

function setSeq(seqs, { from = 0, table, ...fields }) {
  const old = seqs.get(fields.seq) ?? { table: [] };
  seqs.set(fields.seq, { ...old, ...fields, table: table ? old.table.slice(0, from).concat(table) : old.table });
}

function end({ seqs, ended }, seq, how) {
  const row = seqs.get(seq);
  if (!row) return;
  seqs.delete(seq);
  ended.set(seq, { ...row, state: "ended", how });
  if (ended.size > REMEMBERED_ENDS) ended.delete(ended.keys().next().value);
}
