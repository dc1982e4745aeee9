// A legend that is folded behind a "?" button. It opens over the page, so that nothing moves, and closes by Escape or a click elsewhere.

import { freshId, make } from "./dom.js";

const GAP = 6; // pixels between the button and the legend

/** { opener, panel }: the button, and what it opens. `name` is what both are called. */
export function foldLegend(name, ...content) {
  const id = freshId("legend");
  const panel = make("div", { id, popover: "auto", class: "legend-panel", role: "group", "aria-label": name }, ...content);
  const opener = make("button", { type: "button", class: "legend-opener", popovertarget: id, "aria-label": name, title: name }, "?");
  panel.addEventListener("toggle", ({ newState }) => {
    if (newState !== "open") return;
    const { right, bottom } = opener.getBoundingClientRect();
    const { width, height } = panel.getBoundingClientRect();
    panel.style.left = `${Math.max(GAP, right - width)}px`;
    panel.style.top = `${Math.max(GAP, Math.min(bottom + GAP, innerHeight - height - GAP))}px`;
  });
  return { opener, panel };
}
