// The timeline: each step a bar, the figures as numbers and lines, and the controls that stop time and go back in it.
//
//   mountTimeline(element, view)

import { freshId, make, oncePerPicture } from "./dom.js";
import { onTheme, readPalette } from "./palette.js";
import { Sheet } from "./sheet.js";
import { buildControls } from "./timeline_controls.js";
import { drawBars, drawLine } from "./timeline_draw.js";
import { FIGURES, barsOf, columnsOf, firstFrom, stepAt } from "./timeline_series.js";

const COLUMNS = 120; // of a line
const STRETCHES = [2, 10, 30, 120, 600]; // seconds that may be shown at once

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
  wake = oncePerPicture(() => this.#draw());

  constructor(element, view) {
    this.#view = view;
    this.#parts = build(element, () => this.wake());
    this.#controls = buildControls(this.#parts.controls, view, STRETCHES, this.#stretch, (seconds) => {
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
    const { steps } = this.#view.history.logs;
    const time = this.#timeOf(share);
    const step = steps.items[firstFrom(steps.items, time)];
    if (step) this.#parts.step.textContent = sayStep(step);
  }

  #draw() {
    this.#controls.draw();
    const { history, state, moment } = this.#view;
    this.#parts.root.toggleAttribute("data-empty", !state);
    if (!state) return;
    this.#palette ??= readPalette(this.#parts.root);
    const [steps, events] = [history.logs.steps.items, history.logs.events.items];
    const to = this.#window(history, moment);
    const from = to - this.#stretch;
    const bars = barsOf(steps, from, to, Math.max(1, Math.floor(this.#parts.bars.width / 3)));
    this.#shown = { from, to };
    const marked = events.slice(firstFrom(events, from), firstFrom(events, to + 1e-6));
    const { most, longest } = drawBars(this.#parts.bars, bars, marked, { from, to, moment }, this.#palette);
    this.#parts.scale.textContent = `tallest bar ${most.toLocaleString()} tokens, longest ${longest.toFixed(1)} ms`;
    const step = stepAt(steps, moment);
    this.#parts.step.textContent = step ? sayStep(step) : "No step yet.";
    this.#drawFigures(steps, from, to, moment, state);
    Object.assign(this.#parts.root.dataset, { moment: moment.toFixed(3), step: step?.[0] ?? "" });
  }

  /** The end of the stretch shown: the newest moment, or, further back, one that keeps the moment inside. */
  #window(history, moment) {
    const { to } = this.#shown;
    if (this.#view.time === "live") return history.last;
    if (to <= history.last && moment <= to && moment >= to - this.#stretch) return to;
    return Math.min(history.last, moment + this.#stretch / 2);
  }

  #drawFigures(steps, from, to, moment, state) {
    const sums = columnsOf(steps, from, to, COLUMNS);
    const seconds = this.#stretch / COLUMNS;
    const blocks = state.head.num_blocks - 1;
    const lately = columnsOf(steps, moment - 1, moment, 1)[0];
    const before = columnsOf(steps, from, moment, 1)[0];
    for (const [name, { line, number }] of Object.entries(this.#parts.figures)) {
      const { value, say, most, empty = null } = FIGURES[name];
      const values = sums.map((sum) => (sum ? value(sum, seconds, blocks) : empty));
      drawLine(line, values, most ?? Math.max(1, ...values), (moment - from) / (to - from), this.#palette);
      const known = name === "throughput" ? lately && value(lately, 1, blocks) : before && value(before, 1, blocks);
      number.textContent = known === null ? (empty === 0 ? say(0) : "–") : say(known);
    }
  }
}

function sayStep([step, at, ms, prefill, decode, rows]) {
  return `Step ${step} at ${at.toFixed(2)} s: ${prefill} prefill and ${decode} decode tokens in ${rows} rows, ${ms.toFixed(1)} ms`;
}

function build(element, resized) {
  const title = freshId("steps");
  const sheet = (properties) => new Sheet(make("canvas", properties), resized);
  const bars = sheet({ class: "timeline-bars", role: "img", "aria-labelledby": title });
  const figures = Object.fromEntries(
    Object.keys(FIGURES).map((name) => [name, { line: sheet({ class: "figure-line", "aria-hidden": "true" }), number: make("dd", { "data-figure": name }) }]),
  );
  const parts = {
    bars,
    figures,
    controls: make("div", { class: "timeline-controls" }),
    step: make("p", { class: "timeline-step", id: title }),
    scale: make("span", { class: "muted" }),
  };
  const key = (name, words) => make("span", { class: "timeline-key" }, make("span", { class: `key key-${name}`, "aria-hidden": "true" }), words);
  parts.root = make(
    "div",
    { class: "timeline" },
    parts.controls,
    parts.step,
    bars.canvas,
    make("p", { class: "timeline-legend" }, key("prefill", "prefill"), key("decode", "decode"), key("ms", "time taken"), parts.scale),
    make("dl", { class: "figures" }, ...Object.entries(figures).map(([name, { line, number }]) => make("div", { class: "figure" }, make("dt", {}, FIGURES[name].label), number, make("dd", { class: "figure-drawing" }, line.canvas)))),
  );
  element.append(parts.root);
  return parts;
}
