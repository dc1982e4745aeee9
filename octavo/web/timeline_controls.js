// The controls of time: pause, step, a slider over all that is remembered, and recordings.

import { button, freshId, make } from "./dom.js";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];

/** Fills `element` with them; `status` is where the page says where its frames come from, if that is not the stream. */
export function buildControls({ controls: element, status }, view, stretches, stretch, setStretch) {
  const picker = make("input", { type: "file", hidden: true, "aria-label": "A recording" });
  const slider = make("input", { type: "range", class: "timeline-slider", step: "0.001", "aria-label": "Moment" });
  const parts = {
    picker,
    slider,
    pause: button("Pause", () => (view.running ? view.pause() : view.resume()), { class: "timeline-pause" }),
    moment: make("output", { class: "timeline-moment" }),
    live: button("Live", () => (view.recorded ? view.source?.follow() : view.resume())),
    speed: choice("Speed", SPEEDS, 1, (value) => `${value}×`, (value) => (view.speed = value)),
    status,
  };
  element.append(
    button("◂", () => view.step(-1), { "aria-label": "One step back", title: "One step back" }),
    parts.pause,
    button("▸", () => view.step(1), { "aria-label": "One step on", title: "One step on" }),
    slider,
    parts.moment,
    parts.live,
    choice("Shown", stretches, stretch, sayStretch, setStretch),
    parts.speed,
    button("Open a recording", () => picker.click()),
    picker,
  );
  listen(parts, view);
  return { draw: () => draw(parts, view) };
}

export const sayStretch = (seconds) => (seconds < 120 ? `${seconds} s` : `${seconds / 60} min`);

function choice(label, values, chosen, say, set) {
  const id = freshId("choice");
  const select = make("select", { id, onchange: () => set(Number(select.value)) }, ...values.map((value) => make("option", { value, selected: value === chosen }, say(value))));
  return make("span", { class: "timeline-choice" }, make("label", { for: id }, label), " ", select);
}

function listen({ picker, slider }, view) {
  slider.addEventListener("input", () => {
    if (!view.recorded) view.pause();
    view.seek(Number(slider.value));
  });
  slider.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    const seconds = { PageDown: -5, PageUp: 5 }[event.key];
    if (steps) view.step(steps);
    else if (seconds) {
      view.pause();
      view.seek(view.moment + seconds);
    } else return;
    event.preventDefault();
  });
  picker.addEventListener("change", () => {
    if (picker.files[0]) view.source?.openFile(picker.files[0]);
    picker.value = "";
  });
  const hasFile = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => hasFile(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!hasFile(event)) return;
    event.preventDefault();
    view.source?.openFile(event.dataTransfer.files[0]);
  });
}

function draw({ slider, pause, moment, live, speed, status }, view) {
  const { first, last } = view.history;
  slider.min = first;
  slider.max = last;
  slider.value = view.moment;
  slider.disabled = !view.state;
  const behind = last - view.moment;
  const words = view.recorded ? `${view.moment.toFixed(2)} of ${last.toFixed(2)} s` : view.isStale ? "not connected" : view.time === "live" ? "live" : `${behind.toFixed(2)} s ago`;
  moment.textContent = words;
  slider.setAttribute("aria-valuetext", words);
  const label = view.running ? "Pause" : view.recorded ? "Play" : "Resume";
  if (pause.textContent !== label) pause.textContent = label;
  live.hidden = view.time === "live" || (view.recorded && !view.source?.hasServer);
  speed.hidden = !view.recorded;
  if (status.textContent !== view.status.text) status.textContent = view.status.text;
  status.toggleAttribute("data-trouble", !view.status.ok);
}
