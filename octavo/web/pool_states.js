// The state slots of a model with recurrent layers, which are apart from its blocks: how many there are of each kind.

import { make } from "./dom.js";

/** A page whose model has no recurrent layers shows nothing. */
export function writeStates({ states: strip }, { states }) {
  strip.hidden = states === null;
  if (states === null) return;
  const [all, live, kept, pinned] = states;
  const words = JSON.stringify(states);
  if (strip.dataset.words === words) return;
  strip.dataset.words = words;
  const counts = { live, checkpoints: kept, pinned, empty: all - live - kept - pinned };
  const items = Object.entries(counts).map(([kind, count]) => make("li", { "data-kind": kind }, `${kind} `, make("b", {}, count.toLocaleString())));
  strip.replaceChildren(make("li", {}, "State slots ", make("b", {}, all.toLocaleString())), ...items);
}
