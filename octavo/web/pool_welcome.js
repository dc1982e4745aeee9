// What stands in the pool before anything was asked: what a square is.

import { make } from "./dom.js";

export class Welcome {
  #element;
  #sentence = make("p", { class: "welcome-sentence" });

  constructor(element) {
    this.#element = element;
    const squares = ["is-full", "is-full", "is-filling", "is-free", "is-free"].map((kind) => make("span", { class: kind }, kind === "is-full" ? "A" : ""));
    element.append(make("div", { class: "welcome-squares", "aria-hidden": "true" }, ...squares), this.#sentence);
  }

  /** Shows it while nothing was ever asked; returns whether that has changed. */
  draw(state, counts, recorded) {
    const untouched = !recorded && state.seqs.size + state.ended.size + state.numSteps + counts.held + counts.shared + counts.cached + counts.pinned === 0;
    if (untouched && this.#element.dataset.size !== String(state.head.block_size)) {
      this.#element.dataset.size = state.head.block_size;
      this.#sentence.textContent = `Each square here is a block: a piece of memory with room for ${state.head.block_size} tokens of a conversation. A letter marks who uses it.`;
    }
    if (untouched !== this.#element.hidden) return false;
    this.#element.hidden = !untouched;
    return true;
  }
}
