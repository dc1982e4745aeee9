// What is selected: its sequences, its blocks, and the block table of each: logical to physical, entry by entry, each with its text.
//
//   table      0 -> 17 "The cat"   1 -> 4 " sat on"   ...

import { button, make, press } from "./dom.js";
import { tokenList } from "./pool_words.js";

const FIRST_ENTRIES = 64; // of a long table its beginning and its end are shown
const LAST_ENTRIES = 192;

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

/** The table of one sequence. Only entries that changed are written: a table has hundreds, and mostly its last one changes. */
export class OneTable {
  #entries = new Map(); // index -> { item, element, place, shared, text, and block, lost, tokens, users as they are written }
  #view;
  about = make("span");
  list = make("ol", { class: "pool-table" });

  constructor(seq, view) {
    this.#view = view;
    this.seq = seq;
  }

  draw(state, row, chosenBlock) {
    const shown = shownEntries(state.entries(row));
    const left = row.table.length - shown.length;
    const about = row.table.length ? `Block table of sequence ${this.seq}: ${row.table.length} entries${left ? `, ${left} in the middle left out` : ""}` : "It holds no blocks at this moment.";
    if (this.about.textContent !== about) {
      this.about.textContent = about;
      this.list.setAttribute("aria-label", about);
    }
    const indices = new Set(shown.map(([index]) => index));
    for (const [index, { item }] of this.#entries) {
      if (indices.has(index)) continue;
      item.remove();
      this.#entries.delete(index);
    }
    shown.forEach(([index, block, kept], place) => {
      const { item } = this.#write(state, row, index, block, kept, block === chosenBlock);
      if (this.list.children[place] !== item) this.list.insertBefore(item, this.list.children[place] ?? null);
    });
  }

  #write(state, row, index, block, kept, chosen) {
    const one = this.#entries.get(index) ?? this.#make(index);
    const tokens = kept ? state.blocks.tokens[block] : null;
    const users = kept ? state.users(block) : 0;
    const lost = kept ? "" : sayLost(state, row, index, block);
    if (one.block !== block) one.place.textContent = `${index} → ${block}`;
    if (one.users !== users) one.shared.textContent = users > 1 ? `shared by ${users}` : "";
    if (one.lost !== lost || one.tokens !== tokens) one.text.replaceChildren(...(kept ? tokenList(tokens, state.head) : [make("span", { class: "muted" }, lost)]));
    press(one.element, chosen);
    return Object.assign(one, { block, lost, tokens, users });
  }

  #make(index) {
    const [place, shared, text] = ["entry-place", "entry-shared muted", "entry-text"].map((name) => make("span", { class: name }));
    const pick = () => this.#view.selection.set({ ...this.#view.selection.get(), block: this.#entries.get(index).block });
    const element = button(place, pick, { class: "entry", "data-entry": `${this.seq}.${index}` });
    element.append(shared, text);
    const one = { item: make("li", {}, element), element, place, shared, text };
    this.#entries.set(index, one);
    return one;
  }
}

/** What became of a block that a request had, and that has no longer what the request put there. */
function sayLost(state, row, index, block) {
  if (state.kind(block) !== "free") return "has other content now";
  return row.digests?.[index] ? "was evicted, and is free now" : "was not full, so it was freed at the end";
}

function shownEntries(all) {
  return all.length > FIRST_ENTRIES + LAST_ENTRIES ? [...all.slice(0, FIRST_ENTRIES), ...all.slice(-LAST_ENTRIES)] : all;
}
