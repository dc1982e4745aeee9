// Requests, and the block table of the one selected: logical to physical, entry by entry, each with its text.
//
//   requests   a button for each sequence that runs or waits, and for those that ended last or are selected
//   table      0 -> 17 "The cat"   1 -> 4 " sat on"   ...

import { button, make } from "./dom.js";
import { colourOf, letterOf } from "./palette.js";
import { tokenList } from "./pool_words.js";

const MOST_REQUESTS = 100;
const SHOWN_ENDS = 6;
const FIRST_ENTRIES = 64; // of a long table its beginning and its end are shown
const LAST_ENTRIES = 192;

export const swatch = (seq) => {
  const mark = make("span", { class: "swatch", "aria-hidden": "true" });
  mark.style.background = `var(--seq-${colourOf(seq)})`;
  return make("span", { class: "seq-mark" }, mark, letterOf(seq));
};

/** The sequences that are selected: by number, by request, or none. */
export function selectedRows(state, { seq, request }) {
  if (seq !== undefined) return [state.row(seq)].filter(Boolean);
  return request === undefined ? [] : state.samples(request);
}

/** The blocks that light up; null where nothing is selected. */
export function litBlocks(state, chosen) {
  if (chosen.seq === undefined && chosen.request === undefined) return null;
  const lit = new Set();
  for (const row of selectedRows(state, chosen)) for (const [, block, kept] of state.entries(row)) if (kept) lit.add(block);
  return lit;
}

function sayRow({ request, state, how, tokens, prompt, cached, preemptions }) {
  const parts = [state === "ended" ? `ended (${how})` : state, `${tokens} tokens, ${prompt} of them prompt`];
  if (cached) parts.push(`${cached} from the cache`);
  if (preemptions) parts.push(`preempted ${preemptions}×`);
  return [request, parts.join(" · ")];
}

export class Requests {
  #list = make("ul", { class: "pool-requests" });
  #rest = make("p", { class: "muted" });
  #items = new Map(); // seq -> { item, button, text }
  #view;

  constructor(element, view) {
    this.#view = view;
    element.append(this.#list, this.#rest);
  }

  draw(state) {
    const chosen = this.#view.selection.get();
    const picked = new Set(selectedRows(state, chosen).map(({ seq }) => seq));
    const ended = [...state.ended.values()];
    const rows = [...state.seqs.values(), ...ended.filter(({ seq }, index) => index >= ended.length - SHOWN_ENDS || picked.has(seq))];
    const shown = rows.filter(({ seq }, index) => index < MOST_REQUESTS || picked.has(seq));
    for (const [seq, { item }] of this.#items) {
      if (shown.some((row) => row.seq === seq)) continue;
      item.remove();
      this.#items.delete(seq);
    }
    for (const row of shown) this.#drawRow(row, picked.has(row.seq));
    const hidden = rows.length - shown.length;
    this.#rest.textContent = state.seqs.size === 0 ? "No request runs or waits." : hidden ? `and ${hidden} more` : "";
  }

  #drawRow(row, picked) {
    let one = this.#items.get(row.seq);
    if (!one) {
      const [name, text] = [make("span", { class: "request-name" }), make("span", { class: "muted" })];
      const select = () => this.#view.selection.set(one.element.getAttribute("aria-pressed") === "true" ? {} : { seq: row.seq });
      const element = button(swatch(row.seq), select, { class: "request" });
      element.append(name, text);
      one = { item: make("li", {}, element), element, name, text };
      this.#items.set(row.seq, one);
      this.#list.append(one.item);
    }
    const [name, text] = sayRow(row);
    if (one.name.textContent !== name) one.name.textContent = name;
    if (one.text.textContent !== text) one.text.textContent = text;
    one.element.setAttribute("aria-pressed", String(picked));
  }
}

export class Table {
  #element;
  #view;
  #drawn = ""; // what is shown, in one string

  constructor(element, view) {
    this.#element = element;
    this.#view = view;
  }

  draw(state) {
    const chosen = this.#view.selection.get();
    const rows = selectedRows(state, chosen);
    const asked = chosen.seq !== undefined || chosen.request !== undefined;
    const key = JSON.stringify([asked, chosen.block, rows.map((row) => [row.seq, row.state, this.#entries(state, row)])]);
    if (key === this.#drawn) return;
    this.#drawn = key;
    const focused = this.#element.contains(document.activeElement) ? document.activeElement.dataset.entry : null;
    this.#element.replaceChildren(...rows.map((row) => this.#drawTable(state, row, chosen.block)));
    if (asked && rows.length === 0) this.#element.append(make("p", { class: "muted" }, "This request holds no blocks at this moment."));
    if (focused) this.#element.querySelector(`[data-entry="${CSS.escape(focused)}"]`)?.focus();
  }

  /** The entries shown: [index, block, kept, tokens]. */
  #entries(state, row) {
    const all = state.entries(row);
    const some = all.length > FIRST_ENTRIES + LAST_ENTRIES ? [...all.slice(0, FIRST_ENTRIES), ...all.slice(-LAST_ENTRIES)] : all;
    return some.map(([index, block, kept]) => [index, block, kept, kept ? state.blocks.tokens[block] : null]);
  }

  #drawTable(state, row, chosenBlock) {
    const shown = this.#entries(state, row);
    const left = row.table.length - shown.length;
    const about = `Block table of sequence ${row.seq}: ${row.table.length} entries${left ? `, ${left} in the middle left out` : ""}`;
    const entries = shown.map(([index, block, kept, tokens]) => {
      const words = kept ? tokenList(tokens) : [make("span", { class: "muted" }, "has other content now")];
      const place = make("span", { class: "entry-place" }, `${index} → ${block}`);
      const pick = () => this.#view.selection.set({ ...this.#view.selection.get(), block });
      const element = button(place, pick, { class: "entry", "aria-pressed": String(block === chosenBlock), "data-entry": `${row.seq}.${index}` });
      element.append(make("span", { class: "entry-text" }, ...words));
      return make("li", {}, element);
    });
    return make("div", { class: "pool-table" }, make("p", {}, swatch(row.seq), ` ${about}`), make("ol", { "aria-label": about }, ...entries));
  }
}
