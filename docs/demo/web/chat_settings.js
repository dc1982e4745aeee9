/* The system prompt and the sampling of a conversation. What is left empty is as the model recommends. */

import { freshId, make } from "./dom.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: "any" },
  { name: "max_tokens", label: "Most tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 },
];

/** Writes into `conversation`, and calls `changed` when it has. */
export function settings(conversation, changed) {
  const id = freshId("system");
  const system = make("textarea", { id, rows: "3", placeholder: "None" });
  system.value = conversation.system;
  system.addEventListener("change", () => {
    conversation.system = system.value;
    changed();
  });
  const fields = NUMBERS.map((number) => field(number, conversation.sampling, changed));
  const grid = make("div", { class: "numbers" }, ...fields);
  const hint = make("p", { class: "muted" }, "Empty: as the model recommends.");
  return make("details", { class: "settings" }, make("summary", {}, "Settings"), make("label", { for: id }, "System prompt"), system, grid, hint);
}

function field({ name, label, ...range }, sampling, changed) {
  const id = freshId(name);
  const input = make("input", { id, type: "number", inputmode: "decimal", placeholder: "auto", ...range });
  input.value = sampling[name] ?? "";
  input.addEventListener("change", () => {
    if (!input.reportValidity()) return;
    if (input.value === "") delete sampling[name];
    else sampling[name] = input.valueAsNumber;
    changed();
  });
  return make("div", {}, make("label", { for: id }, label), input);
}
