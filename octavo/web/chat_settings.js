/* The system prompt and the sampling of a conversation. A field that is empty shows, in grey, the default that then applies. */

import { defaultLimit } from "./chat_answer.js";
import { freshId, make } from "./dom.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", least: 0, most: 2 },
  { name: "top_p", label: "Top p", above: 0, most: 1 },
  { name: "max_tokens", label: "Max tokens", least: 1, whole: true }, // at most the context, once the model is known
  { name: "seed", label: "Seed", least: 0, whole: true },
];

/** Writes into `conversation`, and calls `changed` when it has. */
export class Settings {
  #system;
  #fields;
  #hint = make("p", { class: "muted" });

  constructor(conversation, changed) {
    const id = freshId("system");
    this.#system = make("textarea", { id, rows: "3" });
    this.#system.value = conversation.system;
    this.#system.addEventListener("change", () => {
      conversation.system = this.#system.value;
      changed();
    });
    this.#fields = NUMBERS.map((number) => field({ ...number }, conversation.sampling, changed));
    const grid = make("div", { class: "numbers" }, ...this.#fields.map(({ element }) => element));
    const label = make("label", { for: id }, "System prompt");
    this.element = make("details", { class: "settings" }, make("summary", {}, "Settings"), label, this.#system, grid, this.#hint);
  }

  /** `model`: its entry in /v1/models, which says the defaults. */
  know(model) {
    const { defaults, max_model_len: context } = model;
    const shown = { ...defaults, max_tokens: defaultLimit(model) ?? "rest of context", seed: "random" };
    this.#system.placeholder = defaults.system_prompt ?? "None";
    for (const { number, input } of this.#fields) {
      if (number.name === "max_tokens") number.most = context;
      input.placeholder = String(shown[number.name]);
    }
    this.#hint.textContent = `Grey values are the defaults. Prompt and answer together have room for ${context.toLocaleString("en")} tokens.`;
  }
}

function field(number, sampling, changed) {
  const { name, label } = number;
  const [id, below] = [freshId(name), freshId("trouble")];
  const input = make("input", { id, type: "number", inputmode: "decimal", step: "any", "aria-describedby": below });
  const trouble = make("p", { id: below, class: "trouble", role: "status" });
  input.value = sampling[name] ?? "";
  const isRight = () => (input.value === "" ? !input.validity.badInput : fits(input.valueAsNumber, number));
  const tell = (right) => {
    trouble.textContent = right ? "" : `Not used: must be ${rangeOf(number)}.`;
    input.setAttribute("aria-invalid", String(!right));
    return right;
  };
  input.addEventListener("input", () => isRight() && tell(true));
  input.addEventListener("change", () => {
    if (!tell(isRight())) return;
    if (input.value === "") delete sampling[name];
    else sampling[name] = input.valueAsNumber;
    changed();
  });
  return { number, input, element: make("div", {}, make("label", { for: id }, label), input, trouble) };
}

function fits(value, { least = -Infinity, above = -Infinity, most = Infinity, whole }) {
  return value >= least && value > above && value <= most && (!whole || Number.isSafeInteger(value));
}

function rangeOf({ least, above, most, whole }) {
  const number = whole ? "a whole number " : "";
  if (most === undefined) return `${number}of at least ${least}`;
  return above === undefined ? `${number}from ${least} to ${most.toLocaleString("en")}` : `${number}above ${above} and at most ${most}`;
}
