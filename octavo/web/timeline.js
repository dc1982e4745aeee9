// The timeline: each step a bar, the figures as numbers and lines, and the controls that stop time and go back in it.
//
//   mountTimeline(element, view)

import { freshId, make, oncePerPicture } from "./dom.js";
import { foldLegend } from "./legend.js";
import { onTheme, readPalette } from "./palette.js";
import { Sheet } from "./sheet.js";
import { buildControls, sayStretch } from "./timeline_controls.js";
import { drawBars, drawLine } from "./timeline_draw.js";
import { AT, FIGURES, NUMBER, UNKNOWN, barsOf, columnsOf, firstFrom, stepAt } from "./timeline_series.js";

const COLUMNS = 120; // of a line
const STRETCHES = [2, 10, 30, 120, 600]; // seconds that may be shown at once
const TICK_MS = 300; // between two drawings while no frame comes and figures still change
const SETTLED_SECONDS = 6; // after the last step: by then every figure is what it stays
const LONG_STEP = 1; // seconds after which the age of a step is told

export function mountTimeline(element, view) {
  const timeline = new Timeline(element, view);
  view.on(() => timeline.wake());
  timeline.wake();
}

class Timeline {
  #view;
  #parts;
  #controls;
  #palette = null;
  #stretch = 30;
  #shown = { from: 0, to: 30 };
  #tick = 0;
  wake = oncePerPicture(() => this.#draw());

  constructor(element, view) {
    this.#view = view;
    this.#parts = build(element, () => this.wake());
    this.#controls = buildControls(this.#parts, view, STRETCHES, this.#stretch, (seconds) => {
      this.#stretch = seconds;
      this.wake();
    });
    onTheme(() => {
      this.#palette = null;
      this.wake();
    });
    const { bars } = this.#parts;
    bars.canvas.addEventListener("click", (event) => this.#goTo(event.offsetX / bars.width));
    bars.canvas.addEventListener("pointermove", (event) => this.#tell(event.offsetX / bars.width));
    bars.canvas.addEventListener("pointerleave", () => this.wake());
  }

  #timeOf(share) {
    const { from, to } = this.#shown;
    return from + share * (to - from);
  }

  #goTo(share) {
    this.#view.pause();
    this.#view.seek(this.#timeOf(share));
  }

  #tell(share) {
    const { first, logs } = this.#view.history;
    const time = this.#timeOf(share);
    const place = firstFrom(logs.steps.items, time);
    const step = logs.steps.items[place];
    if (step) this.#parts.step.textContent = `${sayStep(step, logs.steps.items[place - 1])}${step[AT] < first ? ". Its blocks are not known" : ""}`;
  }

  #draw() {
    this.#controls.draw();
    const { history, state, moment, now } = this.#view;
    this.#parts.root.toggleAttribute("data-empty", !state);
    if (!state) return;
    this.#palette ??= readPalette(this.#parts.root);
    const [steps, events] = [history.logs.steps.items, history.logs.events.items];
    const to = this.#window(history, moment, now);
    const from = to - this.#stretch;
    const bars = barsOf(steps, from, to, Math.max(1, Math.floor(this.#parts.bars.width / 3)));
    this.#shown = { from, to };
    const marked = events.slice(firstFrom(events, from), firstFrom(events, to + 1e-6));
    const { most, longest } = drawBars(this.#parts.bars, bars, marked, { from, to, moment: now, known: history.first }, this.#palette);
    this.#parts.scale.textContent = bars.length ? `tallest bar: ${most.toLocaleString()} tokens, longest step: ${longest.toFixed(1)} ms` : "";
    this.#parts.before.hidden = !(steps[0]?.[AT] < history.first && from < history.first && bars.length);
    const step = stepAt(steps, moment);
    this.#parts.step.textContent = this.#sayNow(state, step, now, steps);
    this.#drawFigures(steps, from, to, now, state);
    this.#goOn(state, step, now);
    Object.assign(this.#parts.root.dataset, { moment: moment.toFixed(3), step: step?.[0] ?? "" });
  }

  /** The end of the stretch shown: the newest moment, or, further back, one that keeps the moment inside. */
  #window(history, moment, now) {
    const { to } = this.#shown;
    if (this.#view.time === "live") return now;
    if (to <= history.last && moment <= to && moment >= to - this.#stretch) return to;
    return Math.min(history.last, moment + this.#stretch / 2);
  }

  /** The step under way, if it takes long; else the last one. */
  #sayNow(state, step, now, steps) {
    const begun = Math.max(state.busySince ?? 0, step?.[AT] ?? 0);
    if (this.#view.isLive && state.busySince !== null && now - begun > LONG_STEP) {
      return `Step ${(step?.[0] ?? 0) + 1} is running, for ${(now - begun).toFixed(1)} s now.`;
    }
    return step ? sayStep(step, steps[steps.indexOf(step) - 1]) : this.#view.recorded ? "No step yet." : "No step in the last ten minutes.";
  }

  #drawFigures(steps, from, to, now, state) {
    const sums = columnsOf(steps, from, to, COLUMNS);
    const seconds = this.#stretch / COLUMNS;
    const blocks = state.head.num_blocks - 1;
    const [shown] = columnsOf(steps, from, now, 1);
    const { firstStep: first } = this.#view.history;
    for (const [name, { line, number, label, element }] of Object.entries(this.#parts.figures)) {
      const { label: called, now: figure, value, say, most, empty = null, ofStretch = false, hidesZero = false } = FIGURES[name];
      const values = sums.map((sum) => (sum ? value(sum, seconds, blocks) : empty));
      drawLine(line, values, most ?? Math.max(1, ...values), (now - from) / (to - from), this.#palette);
      const words = this.#view.isStale && !ofStretch ? UNKNOWN : say(figure({ steps, state, now, first, shown }));
      if (number.textContent !== words) number.textContent = words;
      const title = ofStretch ? [called, `, ${sayStretch(this.#stretch)}`] : [called, ""];
      if (label.textContent !== title.join("")) label.replaceChildren(title[0], make("span", { class: "figure-stretch" }, title[1]));
      element.hidden = hidesZero && words === "0";
    }
  }

  /** Draws again soon, if no frame comes before, while there is something that changes by itself. */
  #goOn(state, step, now) {
    clearTimeout(this.#tick);
    const settled = state.busySince === null && now - (step?.[AT] ?? -Infinity) > SETTLED_SECONDS;
    if (this.#view.isLive && !settled) this.#tick = setTimeout(() => this.wake(), TICK_MS);
  }
}

/** One step, or where rows are of several the steps since the row before. */
function sayStep([step, at, ms, prefill, decode, rows], before) {
  const several = before && step - before[NUMBER] > 1;
  return `${several ? `Steps ${before[NUMBER] + 1} to ${step}` : `Step ${step}`} at ${at.toFixed(2)} s: ${prefill} prefill and ${decode} decode tokens of ${rows} ${rows === 1 ? "sequence" : "sequences"}, ${ms.toFixed(1)} ms`;
}

const LEGEND = {
  prefill: "prefill tokens",
  decode: "decode tokens",
  ms: "time taken",
  "event-hit": "prefix hit",
  "event-preempt": "preemption",
  "event-copy": "copy or new sample",
  "event-evict": "eviction",
  again: "engine restart",
  moment: "this moment",
};

function build(element, resized) {
  const title = freshId("steps");
  const sheet = (properties) => new Sheet(make("canvas", properties), resized);
  const bars = sheet({ class: "timeline-bars", role: "img", "aria-labelledby": title });
  const figures = Object.fromEntries(Object.keys(FIGURES).map((name) => [name, buildFigure(name, sheet)]));
  const key = ([name, words]) => make("li", {}, make("span", { class: `key key-${name}`, "aria-hidden": "true" }), words);
  const legend = foldLegend("Legend of the timeline", make("ul", { class: "timeline-legend" }, ...Object.entries(LEGEND).map(key)));
  const parts = {
    bars,
    figures,
    controls: make("div", { class: "timeline-controls" }),
    status: make("p", { class: "timeline-status", role: "status" }),
    step: make("p", { class: "timeline-step", id: title }),
    scale: make("p", { class: "timeline-scale" }),
    before: make("p", { class: "timeline-before", hidden: true }, "Before this page was opened: steps only, no blocks"),
  };
  parts.root = make(
    "div",
    { class: "timeline" },
    make("div", { class: "timeline-head" }, parts.step, parts.status, legend.opener, legend.panel),
    parts.controls,
    make("div", { class: "timeline-notes" }, parts.before, parts.scale),
    bars.canvas,
    make("dl", { class: "figures" }, ...Object.values(figures).map((figure) => figure.element)),
  );
  element.append(parts.root);
  return parts;
}

function buildFigure(name, sheet) {
  const [line, label, number] = [sheet({ class: "figure-line", "aria-hidden": "true" }), make("dt"), make("dd", { "data-figure": name })];
  return { line, label, number, element: make("div", { class: "figure" }, label, number, make("dd", { class: "figure-drawing" }, line.canvas)) };
}
