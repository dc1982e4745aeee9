/* The API key: asked for when the server wants one, kept for this tab alone (sessionStorage), sent as a header and never in a URL. */

import { button, freshId, make } from "./dom.js";

const NAME = "octavo.key";
const listeners = new Set();
let key = "";
let asking = null; // one question at a time, whoever asks
try {
  key = sessionStorage.getItem(NAME) ?? "";
} catch {
  // a browser without storage: the key lasts as long as the page
}

export function authHeaders() {
  return key ? { authorization: `Bearer ${key}` } : {};
}

export function hasKey() {
  return key !== "";
}

/** Called whenever there is another key, or none any more. */
export function onKey(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function setKey(value) {
  key = value;
  try {
    if (value) sessionStorage.setItem(NAME, value);
    else sessionStorage.removeItem(NAME);
  } catch {
    // as above
  }
  for (const listener of listeners) listener();
}

/** Resolves to whether there is a new key. `said`: why the server wants one, in its words. */
export function askForKey(said) {
  asking ??= showQuestion(said).finally(() => { asking = null; });
  return asking;
}

function showQuestion(said) {
  const [title, reason, field] = [freshId("key-title"), freshId("key-reason"), freshId("key-field")];
  const input = make("input", { id: field, type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const form = make(
    "form",
    { method: "dialog" },
    make("h2", { id: title }, "This server wants a key"),
    make("p", { id: reason, class: "muted" }, `${said} The key stays in this tab and is forgotten when it closes.`),
    make("label", { for: field }, "API key"),
    input,
    make("div", { class: "row" }, make("button", { type: "submit", class: "primary" }, "Use this key"), button("Cancel", () => dialog.close())),
  );
  const dialog = make("dialog", { "aria-labelledby": title, "aria-describedby": reason, class: "question" }, form);
  document.body.append(dialog);
  return new Promise((resolve) => {
    let given = "";
    form.addEventListener("submit", () => { given = input.value.trim(); });
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (given) setKey(given);
      resolve(given !== "");
    });
    dialog.showModal();
    input.focus();
  });
}
