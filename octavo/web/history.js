// The page's memory: frames go in, the state of any moment of the last minutes comes out.
//
//   segments:  [ keyframe | frame frame frame ] [ keyframe | frame frame ] [ keyframe | frame ...   -> state (now)
//
// A moment is its segment's keyframe plus the frames up to it. A segment ends when its frames weigh as much as its keyframe,
// or after half a minute: so memory stays a small multiple of what came in, and going back costs little, whether a pool
// has 100 blocks or 100,000. Whole segments are forgotten, the oldest first, by age and by weight.
//
// A head and a full begin a new part, which stands behind what came before: the engine was started again, or told all it has
// once more, or another engine is shown. Times go on: all of them count from the start of the first engine.

import { Log, SHOWN_STEPS, State } from "./state.js";

const SEGMENT_SECONDS = 30;
const LEAST_SEGMENT = 100_000;

const KEPT_SECONDS = 600;
const KEPT_NOTES = 1000;
const KEPT_WEIGHT = 100_000_000; // estimated bytes
const STARTED_AGAIN = "the engine was started again";

export class History {
  constructor({ seconds = KEPT_SECONDS, weight = KEPT_WEIGHT } = {}) {
    this.limits = { seconds, weight };
    this.head = null; // the last one
    this.origin = null; // unix seconds from which all times count
    this.offset = 0; // of this part's times
    this.logs = { steps: new Log(), events: new Log() };
    this.notes = []; // captions of a lesson
    this.state = null; // now; moves on with every frame
    this.segments = [];
    this.weight = 0;
    this.cursor = null; // where the last look back ended
  }

  /** A frame that was checked (frames.js); it is the history's own from here on. */
  apply(frame) {
    if (frame.kind === "head") {
      this.head = frame;
      return;
    }
    if (frame.kind !== "full" && this.state?.head !== this.head) return; // a delta before its full tells nothing
    const { last } = this;
    if (frame.kind === "full") this.#beginPart(frame);
    else shift(frame, this.offset);
    const at = Math.max(frame.at, last);
    this.logs.steps.append(frame.steps ?? []);
    this.logs.events.append(frame.events ?? []);
    if (frame.kind === "note") this.notes = [...this.notes.slice(1 - KEPT_NOTES), frame];
    this.state.apply(frame, at);
    if (frame.kind === "full") this.#begin(true);
    else this.#keep(frame, at);
    this.#drop();
  }

  /** What a full tells again is not new. */
  #beginPart(frame) {
    const { head, state, logs, last } = this;
    this.origin ??= head.started;
    const again = state !== null && (state.head.started !== head.started || state.head.epoch !== head.epoch);
    if (again) {
      this.offset = Math.max(head.started - this.origin, last - frame.at);
      const moved = state.head.engine !== head.engine;
      logs.events.append([[0, Math.max(this.offset, last), "note", moved ? `engine ${head.engine} is shown from here on` : STARTED_AGAIN]]);
    }
    shift(frame, this.offset);
    frame.steps = unseen(logs.steps, frame.steps ?? []);
    frame.events = unseen(logs.events, frame.events ?? []);
    this.state = new State(head, logs);
  }

  #begin(part) {
    const weight = weightOfState(this.state);
    this.segments.push({ part, key: this.state.clone(), keyWeight: weight, weight, frames: [] });
    this.weight += weight;
  }

  #keep(frame, at) {
    const segment = this.segments.at(-1);
    const weight = weightOfFrame(frame);
    segment.frames.push({ at, frame });
    segment.weight += weight;
    this.weight += weight;
    const grown = segment.weight - segment.keyWeight > Math.max(segment.keyWeight, LEAST_SEGMENT);
    if (grown || at - segment.key.at > Math.min(SEGMENT_SECONDS, this.limits.seconds / 2)) this.#begin(false);
  }

  #drop() {
    const { seconds, weight } = this.limits;
    while (this.segments.length > 1 && (this.last - this.segments[1].key.at > seconds || this.weight > weight)) {
      this.weight -= this.segments.shift().weight;
      const { numSteps, numEvents } = this.segments[0].key;
      this.logs.steps.forget(numSteps - SHOWN_STEPS);
      this.logs.events.forget(numEvents - SHOWN_STEPS);
    }
  }

  get first() {
    return this.state ? Math.max(this.segments[0].key.at, this.last - this.limits.seconds) : 0;
  }

  /** Where the steps that are known begin: the server tells those of the minutes before, too. */
  get firstStep() {
    return Math.min(this.first, this.logs.steps.items[0]?.[1] ?? this.first);
  }

  get last() {
    return this.state?.at ?? 0;
  }

  /** The state of a moment between first and last. It is good until the next call, which may move it on. */
  at(time) {
    if (!this.state || time >= this.last) return this.state;
    const segment = this.segments.findLast(({ key }) => key.at <= time) ?? this.segments[0];
    if (this.cursor?.segment !== segment || this.cursor.state.at > time) this.cursor = { segment, next: 0, state: segment.key.clone() };
    const { cursor } = this;
    while (cursor.next < segment.frames.length && segment.frames[cursor.next].at <= time) {
      const { frame, at } = segment.frames[cursor.next++];
      cursor.state.apply(frame, at);
    }
    return cursor.state;
  }

  /** The nearest moment after (+1) or before (-1) a time at which something happened; else the end of what is remembered. */
  neighbour(time, direction) {
    const happened = this.segments.flatMap(({ part, key, frames }) => [...(part ? [key] : []), ...frames.filter(({ frame }) => isEventful(frame))]);
    if (direction > 0) return happened.find(({ at }) => at > time)?.at ?? this.last;
    return happened.findLast(({ at }) => at < time && at >= this.first)?.at ?? this.first;
  }
}

/** Moves all times of a frame. */
function shift(frame, seconds) {
  if (seconds === 0) return;
  frame.at += seconds;
  for (const row of frame.blocks ?? []) if (row[5] != null) row[5] += seconds;
  for (const rows of [frame.steps ?? [], frame.events ?? []]) for (const row of rows) row[1] += seconds;
}

/** Rows that are later than the last one of a log. */
function unseen(log, rows) {
  const last = log.items.at(-1)?.[1] ?? -Infinity;
  return rows.filter(([, at]) => at > last);
}

function isEventful(frame) {
  return frame.kind === "note" || Boolean(frame.steps?.length || frame.events?.length);
}

function weightOfFrame({ blocks = [], seqs = [], steps = [], events = [], ranks = [] }) {
  let weight = 100 + steps.length * 120 + events.length * 80 + ranks.length * 80;
  for (const row of blocks) weight += 80 + (row[4] ? 40 + 24 * row[4].length : 0);
  for (const { table = [] } of seqs) weight += 300 + 8 * table.length;
  return weight;
}

function weightOfState({ head, seqs }) {
  let weight = head.num_blocks * 21; // 4 + 1 + 8 in typed arrays, and two references
  for (const { table } of seqs.values()) weight += 300 + 8 * table.length;
  return weight;
}
