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

function press(element, pressed) {
  if (element.getAttribute("aria-pressed") !== String(pressed)) element.setAttribute("aria-pressed", String(pressed));
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
    const kept = new Set(shown.map(({ seq }) => seq));
    for (const [seq, { item }] of this.#items) {
      if (kept.has(seq)) continue;
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
    press(one.element, picked);
  }
}

export class Table {
  #element;
  #view;
  #tables = new Map(); // seq -> the OneTable that is shown
  #nothing = make("p", { class: "muted" }, "This request holds no blocks at this moment.");

  constructor(element, view) {
    this.#element = element;
    this.#view = view;
  }

  draw(state) {
    const chosen = this.#view.selection.get();
    const rows = selectedRows(state, chosen);
    const asked = chosen.seq !== undefined || chosen.request !== undefined;
    const before = this.#tables;
    this.#tables = new Map(rows.map((row) => [row.seq, before.get(row.seq) ?? new OneTable(row.seq, this.#view)]));
    const wanted = asked && rows.length === 0 ? [this.#nothing] : Array.from(this.#tables.values(), ({ element }) => element);
    if (wanted.length !== this.#element.children.length || wanted.some((element, index) => element !== this.#element.children[index])) {
      this.#element.replaceChildren(...wanted);
    }
    for (const row of rows) this.#tables.get(row.seq).draw(state, row, chosen.block);
  }
}

/** The table of one sequence. Only entries that changed are written: a table has hundreds, and mostly its last one changes. */
class OneTable {
  #entries = new Map(); // index -> { item, element, place, text, and block, kept, tokens as they are written }
  #about = make("span");
  #list = make("ol");
  #view;

  constructor(seq, view) {
    this.#view = view;
    this.seq = seq;
    this.element = make("div", { class: "pool-table" }, make("p", {}, swatch(seq), " ", this.#about), this.#list);
  }

  draw(state, row, chosenBlock) {
    const shown = shownEntries(state.entries(row));
    const left = row.table.length - shown.length;
    const about = `Block table of sequence ${this.seq}: ${row.table.length} entries${left ? `, ${left} in the middle left out` : ""}`;
    if (this.#about.textContent !== about) {
      this.#about.textContent = about;
      this.#list.setAttribute("aria-label", about);
    }
    const indices = new Set(shown.map(([index]) => index));
    for (const [index, { item }] of this.#entries) {
      if (indices.has(index)) continue;
      item.remove();
      this.#entries.delete(index);
    }
    shown.forEach(([index, block, kept], place) => {
      const { item } = this.#write(index, block, kept, kept ? state.blocks.tokens[block] : null, block === chosenBlock, state.head);
      if (this.#list.children[place] !== item) this.#list.insertBefore(item, this.#list.children[place] ?? null);
    });
  }

  #write(index, block, kept, tokens, chosen, head) {
    const one = this.#entries.get(index) ?? this.#make(index);
    if (one.block !== block) one.place.textContent = `${index} → ${block}`;
    if (one.kept !== kept || one.tokens !== tokens) one.text.replaceChildren(...(kept ? tokenList(tokens, head) : [make("span", { class: "muted" }, "has other content now")]));
    press(one.element, chosen);
    return Object.assign(one, { block, kept, tokens });
  }

  #make(index) {
    const [place, text] = [make("span", { class: "entry-place" }), make("span", { class: "entry-text" })];
    const pick = () => this.#view.selection.set({ ...this.#view.selection.get(), block: this.#entries.get(index).block });
    const element = button(place, pick, { class: "entry", "data-entry": `${this.seq}.${index}` });
    element.append(text);
    const one = { item: make("li", {}, element), element, place, text };
    this.#entries.set(index, one);
    return one;
  }
}

function shownEntries(all) {
  return all.length > FIRST_ENTRIES + LAST_ENTRIES ? [...all.slice(0, FIRST_ENTRIES), ...all.slice(-LAST_ENTRIES)] : all;
}
