// Steps become what is drawn: bars and lines over a stretch of time, in as many columns as there is room for.
//
// A step: [step, at, ms, prefill, decode, rows, running, waiting, used, preempted, hit, query]; `at` is its end. One row may be of several
// steps that were made long ago (docs/view.md).

export const NUMBER = 0;
export const AT = 1;
const [MS, PREFILL, DECODE, ROWS, RUNNING, WAITING, USED, PREEMPTED, HIT, QUERY] = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11];

/** Where the first step at or after a time stands. */
export function firstFrom(steps, time) {
  let [low, high] = [0, steps.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle][AT] < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The last step that had ended by a time, or null. */
export function stepAt(steps, time) {
  return steps[firstFrom(steps, time + 1e-6) - 1] ?? null;
}

/** Steps of a column in one: tokens and times summed, the rest as it was at its end. */
function gather(steps, from, to) {
  if (from === to) return null;
  const last = steps[to - 1];
  const sum = { count: to - from, ms: 0, prefill: 0, decode: 0, preempted: 0, hit: 0, query: 0, most: 0, longest: 0 };
  for (let index = from; index < to; index += 1) {
    const step = steps[index];
    sum.ms += step[MS];
    sum.prefill += step[PREFILL];
    sum.decode += step[DECODE];
    sum.preempted += step[PREEMPTED];
    sum.hit += step[HIT];
    sum.query += step[QUERY];
    sum.most = Math.max(sum.most, step[PREFILL] + step[DECODE]);
    sum.longest = Math.max(sum.longest, step[MS]);
  }
  return { ...sum, step: last[0], at: last[AT], rows: last[ROWS], running: last[RUNNING], waiting: last[WAITING], used: last[USED] };
}

/** Columns between two times: [what gather says, or null]. */
export function columnsOf(steps, from, to, count) {
  const columns = [];
  let index = firstFrom(steps, from);
  for (let column = 1; column <= count; column += 1) {
    const start = index;
    const end = column === count ? to + 1e-9 : from + ((to - from) * column) / count;
    while (index < steps.length && steps[index][AT] < end) index += 1;
    columns.push(gather(steps, start, index));
  }
  return columns;
}

/** Bars between two times, one for each step as long as each has room of its own: [{ x0, x1, steps of it }] in shares of the width. */
export function barsOf(steps, from, to, most) {
  const [start, end] = [firstFrom(steps, from), firstFrom(steps, to + 1e-6)];
  const share = (time) => (time - from) / (to - from);
  if (end - start > most) {
    return columnsOf(steps, from, to, most).flatMap((sum, index) => (sum ? [{ ...sum, x0: index / most, x1: (index + 1) / most }] : []));
  }
  return steps.slice(start, end).map((step, index) => {
    const sum = gather(steps, start + index, start + index + 1);
    return { ...sum, x0: Math.max(0, share(step[AT] - step[MS] / 1000)), x1: share(step[AT]) };
  });
}

const AVERAGED_SECONDS = 5; // of tokens per second; less where less is remembered

export const UNKNOWN = "–"; // a figure of an engine that cannot be seen

const whole = (value) => Math.round(value).toLocaleString();
const percent = (digits) => (share) => (share === null ? UNKNOWN : `${(100 * share).toFixed(digits)} %`);
const rateOf = (name) => ({ steps, now, first }) => {
  const seconds = Math.min(AVERAGED_SECONDS, Math.max(1, now - first));
  return (columnsOf(steps, now - seconds, now, 1)[0]?.[name] ?? 0) / seconds;
};
const countOf = (wanted) => ({ state }) => [...state.seqs.values()].filter((row) => (row.state === "running") === wanted).length;

/**
 * name -> { label, now, say, value, most, empty, ofStretch, hidesZero }
 *   now: the figure of a moment, of { steps, state, now (its time), first (where memory begins), shown (the steps of the stretch up to it, in one) }
 *   say: that figure -> words
 *   ofStretch: it is of the stretch shown, not of a moment; hidesZero: it is shown only where it is not 0
 *   value: of a column of the line (its seconds, blocks of the pool) -> number or null; empty: of a column without steps
 */
export const FIGURES = {
  decode: { label: "Decode tok/s", now: rateOf("decode"), say: whole, value: (sum, seconds) => sum.decode / seconds, empty: 0 },
  prefill: { label: "Prefill tok/s", now: rateOf("prefill"), say: whole, value: (sum, seconds) => sum.prefill / seconds, empty: 0 },
  running: { label: "Running", now: countOf(true), say: whole, value: (sum) => sum.running },
  waiting: { label: "Waiting", now: countOf(false), say: whole, value: (sum) => sum.waiting },
  used: { label: "Blocks in use", now: ({ state }) => state.numUsed / (state.head.num_blocks - 1), say: percent(1), value: (sum, _, blocks) => sum.used / blocks, most: 1 },
  hits: { label: "Prefix hits", ofStretch: true, now: ({ shown }) => (shown?.query ? shown.hit / shown.query : null), say: percent(0), value: (sum) => (sum.query ? sum.hit / sum.query : null), most: 1 },
  preempted: { label: "Preemptions", ofStretch: true, hidesZero: true, now: ({ shown }) => shown?.preempted ?? 0, say: whole, value: (sum) => sum.preempted, empty: 0 },
};
