// The colours of the page, for canvases: what the CSS variables mean right now, in light or dark.
//
// A sequence has one of twelve colours and one of 26 letters, both by its number alone: 156 pairs, the same on every page,
// and never a colour without its letter or number nearby.

import { make } from "./dom.js";

const NAMES = ["ink", "paper", "muted", "accent", "warn", "free", "cached", "held", "shared"];
const COLOURS = 12;
export const MARKS = 156; // sequences with different marks: the least common multiple of 12 colours and 26 letters

export const colourOf = (mark) => mark % COLOURS;
export const letterOf = (mark) => String.fromCharCode(65 + (mark % 26));

/** { ink: [r, g, b], ..., seq: [[r, g, b], ...] } as an element has them. */
export function readPalette(element) {
  const names = [...NAMES, ...Array.from({ length: COLOURS }, (_, index) => `seq-${index}`)];
  const probes = names.map((name) => {
    const probe = document.createElement("span");
    probe.hidden = true;
    probe.style.color = `var(--${name})`;
    return probe;
  });
  element.append(...probes); // all at once, so that styles are computed once
  const pixels = new OffscreenCanvas(names.length, 1).getContext("2d", { willReadFrequently: true });
  probes.forEach((probe, x) => {
    pixels.fillStyle = getComputedStyle(probe).color;
    pixels.fillRect(x, 0, 1, 1);
  });
  for (const probe of probes) probe.remove();
  const { data } = pixels.getImageData(0, 0, names.length, 1);
  const colours = names.map((_, x) => [...data.slice(4 * x, 4 * x + 3)]);
  return { ...Object.fromEntries(NAMES.map((name, x) => [name, colours[x]])), seq: colours.slice(NAMES.length) };
}

export const css = ([red, green, blue], alpha = 1) => `rgb(${red} ${green} ${blue} / ${alpha})`;

/** A colour on the way from one to another. */
export const mix = (from, to, share) => from.map((value, index) => Math.round(value + (to[index] - value) * share));

/** Black or white, whichever is read better on a colour. */
export function inkOn([red, green, blue]) {
  const light = [red, green, blue].map((value) => (value / 255) ** 2.2);
  return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] > 0.18 ? [0, 0, 0] : [255, 255, 255];
}

/** Calls `redraw` with a new palette whenever the page turns light or dark. */
export function onTheme(redraw) {
  document.addEventListener("themechange", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}

/** The mark of a sequence beside its words: its colour and its letter. */
export function swatch(seq) {
  const mark = make("span", { class: "swatch", "aria-hidden": "true" });
  mark.style.background = `var(--seq-${colourOf(seq)})`;
  return make("span", { class: "seq-mark" }, mark, letterOf(seq));
}
