// The requests beside the pool: those that run, those that wait, and, folded, those that ended last. A button for each sample.

import { button, make, press } from "./dom.js";
import { swatch } from "./palette.js";
import { sayProgress } from "./pool_titles.js";
import { selectedRows } from "./table.js";

const MOST_REQUESTS = 100; // of a group
const GROUPS = { running: "Running", waiting: "Waiting", ended: "Ended" };
const WERE = { running: "Were running", waiting: "Were waiting", ended: "Ended" }; // when the engine was last seen

export class Requests {
  #titles;
  #groups;
  #none = make("p", { class: "muted" }, "No request is running or waiting.");
  #view;

  constructor(element, view, titles) {
    this.#view = view;
    this.#titles = titles;
    this.#groups = Object.fromEntries(Object.keys(GROUPS).map((state) => [state, new Group(state, view)]));
    element.append(this.#none, ...Object.values(this.#groups).map((group) => group.element));
  }

  draw(state) {
    const picked = new Set(selectedRows(state, this.#view.selection.get()).map(({ seq }) => seq));
    const live = [...state.seqs.values()];
    const rows = {
      running: live.filter((row) => row.state === "running"),
      waiting: live.filter((row) => row.state !== "running"),
      ended: [...state.ended.values()].reverse(), // the last one first
    };
    this.#none.hidden = live.length > 0 || this.#view.isStale;
    const titles = this.#view.isStale ? WERE : GROUPS;
    for (const [name, group] of Object.entries(this.#groups)) group.draw(titles[name], rows[name], picked, (row) => this.#titles.of(state, row));
  }
}

/** One heading with its buttons. Only what changed is written. */
class Group {
  #items = new Map(); // seq -> { item, element, name, text, bar }
  #list = make("ul", { class: "request-list" });
  #rest = make("p", { class: "muted", hidden: true });
  #title = make("span");
  #count = make("b");
  #view;

  constructor(state, view) {
    this.#view = view;
    const content = [this.#list, this.#rest];
    const heading = [this.#title, " ", this.#count];
    this.element = state === "ended"
      ? make("details", { class: "request-group" }, make("summary", {}, ...heading), ...content)
      : make("div", { class: "request-group" }, make("h3", {}, ...heading), ...content);
  }

  draw(title, rows, picked, titleOf) {
    this.element.hidden = rows.length === 0;
    if (this.#title.textContent !== title) this.#title.textContent = title;
    const shown = rows.filter(({ seq }, index) => index < MOST_REQUESTS || picked.has(seq));
    const kept = new Set(shown.map(({ seq }) => seq));
    for (const [seq, { item }] of this.#items) {
      if (kept.has(seq)) continue;
      item.remove();
      this.#items.delete(seq);
    }
    shown.forEach((row, place) => {
      const { item } = this.#drawRow(row, picked.has(row.seq), titleOf(row));
      if (this.#list.children[place] !== item) this.#list.insertBefore(item, this.#list.children[place] ?? null);
    });
    const count = rows.length.toLocaleString();
    if (this.#count.textContent !== count) this.#count.textContent = count;
    const hidden = rows.length - shown.length;
    this.#rest.hidden = hidden === 0;
    if (hidden) this.#rest.textContent = `and ${hidden} more`;
  }

  #drawRow(row, picked, title) {
    const one = this.#items.get(row.seq) ?? this.#make(row);
    const { words, share } = sayProgress(row);
    if (one.name.textContent !== title) one.name.textContent = title;
    if (one.text.textContent !== words) one.text.textContent = words;
    one.bar.hidden = share === null || row.state === "ended";
    if (share !== null) one.bar.value = share;
    press(one.element, picked);
    return one;
  }

  #make({ seq, request }) {
    const [name, text] = [make("span", { class: "request-name" }), make("span", { class: "request-words muted" })];
    const bar = make("progress", { class: "request-progress", max: "1", "aria-hidden": "true" });
    const element = button(swatch(seq), () => this.#view.selection.set({ seq }), { class: "request", title: request, "data-request": request });
    element.append(name, text, bar);
    const one = { item: make("li", {}, element), element, name, text, bar };
    this.#items.set(seq, one);
    return one;
  }
}
