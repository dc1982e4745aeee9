// The drawer over the requests: all that is known of the request or block selected, and its block table.
//
// It closes by its button, by Escape from anywhere on the page, and by itself when the request has left the list of requests.

import { REASONS } from "./chat_words.js";
import { button, make } from "./dom.js";
import { colourOf, swatch } from "./palette.js";
import { sayBlock, tokenList } from "./pool_words.js";
import { sayProgress } from "./pool_titles.js";
import { OneTable, selectedRows } from "./table.js";

export class Drawer {
  #parts;
  #view;
  #titles;
  #leave; // gives the focus back to the picture
  #closer = button("✕", () => this.close(), { class: "drawer-close", "aria-label": "Close the block table" });
  #heading = make("h3", { class: "drawer-title" });
  #block = make("div", { class: "drawer-block" });
  #body = make("div", { class: "drawer-body", tabindex: "0", role: "group", "aria-label": "Block tables" });
  #nothing = make("p", { class: "muted" });
  #tables = new Map(); // seq -> SequenceTable
  #seen = false; // what is selected was there since it was selected
  #chosen = "";

  constructor(parts, view, titles, leave) {
    this.#parts = parts;
    this.#view = view;
    this.#titles = titles;
    this.#leave = leave;
    this.#body.append(this.#nothing, this.#block);
    parts.drawer.append(make("div", { class: "drawer-head" }, this.#heading, this.#closer), this.#body);
    document.addEventListener("keydown", (event) => {
      const busy = event.defaultPrevented || document.querySelector("dialog[open]");
      const isSelected = Object.keys(view.selection.get()).length > 0; // it opens with the next drawing, and Escape may come before
      if (event.key === "Escape" && !busy && isSelected) this.close();
    });
  }

  close() {
    const hadFocus = this.#parts.drawer.contains(document.activeElement);
    this.#view.selection.set({});
    this.#parts.drawer.hidden = true;
    this.#parts.requests.hidden = false;
    if (hadFocus) this.#leave();
  }

  draw(state) {
    const chosen = this.#view.selection.get();
    const rows = state ? selectedRows(state, chosen) : [];
    if (this.#isOver(state, chosen, rows)) {
      this.close();
      return;
    }
    this.#open(chosen.seq !== undefined || chosen.request !== undefined || chosen.block !== undefined);
    if (!state) return;
    this.#writeHeading(state, chosen, rows);
    this.#writeBlock(state, chosen.block);
    this.#writeTables(state, rows, chosen.block);
  }

  /** Whether the request that is selected has left: it was there, and is not any more. Who looks at the past may come back to it. */
  #isOver(state, chosen, rows) {
    const name = JSON.stringify([chosen.seq, chosen.request]);
    if (name !== this.#chosen) [this.#chosen, this.#seen] = [name, false];
    this.#seen ||= rows.length > 0;
    return state !== null && this.#seen && rows.length === 0 && this.#view.time === "live";
  }

  #open(wanted) {
    const { drawer, requests } = this.#parts;
    if (drawer.hidden !== wanted) return;
    const hadFocus = requests.contains(document.activeElement);
    drawer.hidden = !wanted;
    requests.hidden = wanted;
    if (wanted) this.#parts.pictures.scrollIntoView({ block: "nearest" }); // where the page is one column
    if (hadFocus) this.#closer.focus({ preventScroll: true });
  }

  #writeHeading(state, { seq, request, block }, rows) {
    const title = rows.length ? this.#titles.of(state, rows[0]) : seq === undefined && request === undefined ? `Block ${block}` : (request ?? `Sequence ${seq}`);
    const colour = rows.length ? `var(--seq-${colourOf(rows[0].seq)})` : "";
    if (this.#heading.textContent !== title) this.#heading.textContent = title;
    this.#parts.drawer.style.setProperty("--own", colour);
    const asked = seq !== undefined || request !== undefined;
    const words = asked && rows.length === 0 ? (this.#view.time === "live" ? "This request is not in the list: the engine keeps the last 32 that ended." : "This request is not there at this moment.") : "";
    this.#nothing.hidden = !words;
    if (this.#nothing.textContent !== words) this.#nothing.textContent = words;
  }

  /** The block that was chosen: who holds it, and what is in it. */
  #writeBlock(state, block) {
    this.#block.hidden = block === undefined || block >= state.head.num_blocks;
    if (this.#block.hidden) return;
    const words = sayBlock(state, block);
    const tokens = state.kind(block) === "free" ? [] : state.blocks.tokens[block];
    if (this.#block.dataset.words === words && this.#block.tokens === tokens) return;
    this.#block.dataset.words = words;
    this.#block.tokens = tokens;
    this.#block.replaceChildren(make("p", {}, words), make("p", { class: "pool-text" }, ...tokenList(tokens, state.head)));
  }

  #writeTables(state, rows, block) {
    const before = this.#tables;
    this.#tables = new Map(rows.map((row) => [row.seq, before.get(row.seq) ?? new SequenceTable(row.seq, this.#view)]));
    for (const [seq, { element }] of before) if (!this.#tables.has(seq)) element.remove();
    for (const { element } of this.#tables.values()) if (!element.isConnected) this.#body.append(element);
    for (const row of rows) this.#tables.get(row.seq).draw(state, row, block);
  }
}

/** One sequence: its facts, and its block table. */
class SequenceTable {
  #facts = make("ul", { class: "drawer-facts" });
  #table;

  constructor(seq, view) {
    this.#table = new OneTable(seq, view);
    this.element = make("section", { class: "drawer-sequence", "aria-label": `Sequence ${seq}` }, make("p", {}, swatch(seq), " ", this.#table.about), this.#facts, this.#table.list);
    this.element.style.setProperty("--own", `var(--seq-${colourOf(seq)})`);
  }

  draw(state, row, block) {
    const facts = sayFacts(row);
    if (this.#facts.dataset.words !== facts.join("\n")) {
      this.#facts.dataset.words = facts.join("\n");
      this.#facts.replaceChildren(...facts.map((text) => make("li", {}, text)));
    }
    this.#table.draw(state, row, block);
  }
}

function sayFacts(row) {
  const { cached, prompt, reason, request, checkpoints } = row;
  const count = (number) => number.toLocaleString();
  const facts = [sayProgress(row).words];
  if (reason) facts.push(`${count(cached)} of ${count(prompt)} prompt tokens came from the cache. ${REASONS[reason] ?? ""}`.trim());
  if (checkpoints?.length) facts.push(`States of the recurrent layers are kept after ${checkpoints.map(count).join(", ")} tokens.`);
  return [...facts, request];
}
