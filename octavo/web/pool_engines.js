// Of several engines, the choice of the one that is shown, and how many are ready. A page whose server has one engine shows nothing.

import { askEngines } from "./api.js";
import { freshId, make } from "./dom.js";

const ASK_MS = 2000;

export class Engines {
  #element;
  #view;
  #choice;
  #of = make("span");
  #ready = make("b", { role: "status" });
  #timer = null; // while there are several

  constructor(element, view) {
    const id = freshId("pool-engine");
    this.#element = element;
    this.#view = view;
    this.#choice = make("select", { id, onchange: () => view.source.choose(Number(this.#choice.value)) });
    element.append(make("label", { for: id }, "Engine"), this.#choice, this.#of, this.#ready);
  }

  draw() {
    const { source, recorded } = this.#view;
    const several = Boolean(source) && source.engines > 1 && !recorded;
    this.#element.hidden = !several;
    this.#keepAsking(several);
    if (!several) return;
    const { engine, engines } = source;
    if (this.#choice.length !== engines) {
      this.#choice.replaceChildren(...Array.from({ length: engines }, (_, number) => make("option", { value: String(number) }, String(number))));
      this.#of.textContent = `of ${engines}`;
    }
    if (this.#choice.value !== String(engine)) this.#choice.value = String(engine);
  }

  #keepAsking(wanted) {
    if (wanted === (this.#timer !== null)) return;
    clearInterval(this.#timer);
    this.#timer = wanted ? setInterval(() => this.#ask(), ASK_MS) : null;
    if (wanted) this.#ask();
  }

  async #ask() {
    if (document.hidden) return;
    const told = await askEngines();
    const words = told ? `${Number(told.ready)} of ${Number(told.all)} ready` : "";
    if (this.#ready.textContent !== words) this.#ready.textContent = words;
    this.#ready.toggleAttribute("data-missing", Boolean(told) && told.ready < told.all);
  }
}
