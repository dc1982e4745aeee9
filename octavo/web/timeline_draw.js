// The timeline on its canvases: bars of steps with marks of events above them, and small lines for the figures.

import { css } from "./palette.js";

const MARKED = { evict: "muted", copy: "ink", fork: "ink", hit: "accent", note: "accent", preempt: "warn" }; // the rarest on top
const MARK_ROOM = 10; // pixels above the bars
const MARK_EVERY = 2; // pixels
const MS_ROOM = 14; // and below them, for how long a step took

/** Decode tokens below, prefill tokens on top of them; under the line how long it took. Before `known` there are steps alone, and no blocks. */
export function drawBars(sheet, bars, events, { from, to, moment, known }, palette) {
  sheet.clear();
  const { context, width, height } = sheet;
  const floor = height - MS_ROOM;
  const most = Math.max(1, ...bars.map(({ prefill, decode }) => prefill + decode));
  const longest = Math.max(1, ...bars.map((bar) => bar.ms));
  const place = (time) => ((time - from) / (to - from)) * width;
  for (const bar of bars) {
    const [x, wide] = [bar.x0 * width, Math.max(1.5, (bar.x1 - bar.x0) * width - 0.5)];
    const [decode, prefill] = [bar.decode, bar.prefill].map((tokens) => (tokens / most) * (floor - MARK_ROOM));
    context.globalAlpha = bar.at > moment ? 0.3 : bar.at < known ? 0.55 : 1;
    context.fillStyle = css(palette.held);
    context.fillRect(x, floor - decode, wide, decode);
    context.fillStyle = css(palette.accent);
    context.fillRect(x, floor - decode - prefill, wide, prefill);
    context.fillStyle = css(palette.muted);
    context.fillRect(x, floor + 2, wide, ((MS_ROOM - 3) * bar.ms) / longest);
  }
  context.globalAlpha = 1;
  const moments = momentsOf(events, ((to - from) / width) * MARK_EVERY);
  for (const [what, name] of Object.entries(MARKED)) {
    context.fillStyle = css(palette[name]);
    for (const at of moments.get(what)) drawMark(context, place(at));
  }
  context.fillStyle = css(palette.accent);
  for (const [, at, which] of events) if (which === "note") context.fillRect(place(at) - 0.5, 0, 1, height);
  context.fillStyle = css(palette.ink);
  context.fillRect(Math.min(width - 1, place(moment)), 0, 1.5, height);
  return { most, longest };
}

/** When each kind of event happened, told once for those too near to each other to be seen apart. */
function momentsOf(events, near) {
  const moments = new Map(Object.keys(MARKED).map((what) => [what, []]));
  for (const [, at, what] of events) {
    const found = moments.get(what);
    if (found && Math.floor(at / near) !== Math.floor(found.at(-1) / near)) found.push(at);
  }
  return moments;
}

function drawMark(context, x) {
  context.beginPath();
  context.moveTo(x, MARK_ROOM - 2);
  context.lineTo(x - 3.5, 1);
  context.lineTo(x + 3.5, 1);
  context.fill();
}

/** A line over columns of values, null where there is none, with the moment marked. */
export function drawLine(sheet, values, most, share, palette) {
  sheet.clear();
  const { context, width, height } = sheet;
  const place = (value) => height - 1.5 - (value / (most || 1)) * (height - 3);
  context.strokeStyle = css(palette.muted);
  context.lineWidth = 1.25;
  context.beginPath();
  let drawing = false;
  values.forEach((value, index) => {
    if (value === null) return;
    const x = ((index + 0.5) / values.length) * width;
    if (drawing) context.lineTo(x, place(value));
    else context.moveTo(x, place(value));
    drawing = true;
  });
  context.stroke();
  context.fillStyle = css(palette.ink);
  context.fillRect(Math.min(width - 1, share * width), 0, 1, height);
}
