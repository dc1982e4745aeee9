/* The API key: asked for when the server wants one, stored for this tab only (sessionStorage), sent in a header and never in a URL. */

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

/** Resolves to whether there is a new key, one that the server accepts. */
export function askForKey() {
  asking ??= showQuestion().finally(() => { asking = null; });
  return asking;
}

/** The question stays open until a key is accepted or the user cancels. */
function showQuestion() {
  const [title, reason, field, below] = [freshId("key-title"), freshId("key-reason"), freshId("key-field"), freshId("key-trouble")];
  const input = make("input", { id: field, type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": below });
  const trouble = make("p", { id: below, class: "trouble", role: "alert" }, hasKey() ? "The key of this tab is not valid." : "");
  const submit = make("button", { type: "submit", class: "primary" }, "Use this key");
  const form = make(
    "form",
    {},
    make("h2", { id: title }, "This server asks for a key"),
    make("p", { id: reason, class: "muted" }, "It was started with --api-key. The key stays in this tab and is forgotten when the tab closes."),
    make("label", { for: field }, "API key"),
    input,
    trouble,
    make("div", { class: "row" }, submit, button("Cancel", () => dialog.close(""))),
  );
  const dialog = make("dialog", { "aria-labelledby": title, "aria-describedby": reason, class: "question" }, form);
  document.body.append(dialog);
  return new Promise((resolve) => {
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      submit.disabled = true;
      const given = input.value.trim();
      const refusal = await refusalOf(given);
      submit.disabled = false;
      trouble.textContent = refusal;
      input.setAttribute("aria-invalid", String(refusal !== ""));
      if (refusal || !dialog.open) return input.select();
      setKey(given);
      dialog.close("accepted");
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "accepted");
    });
    dialog.showModal();
    input.focus();
  });
}

/** Why the server does not accept a key; "" where it does. */
async function refusalOf(given) {
  if (!/^[!-~]+$/.test(given)) return "A key has letters, digits and signs of ASCII only, and no spaces.";
  try {
    const answer = await fetch("./v1/models", { headers: { authorization: `Bearer ${given}` }, cache: "no-store" });
    if (answer.status !== 401) return "";
    return sentence(String((await answer.json()).error.message));
  } catch {
    return "The server cannot be reached. Please try again.";
  }
}

function sentence(text) {
  const capital = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(capital) ? capital : `${capital}.`;
}
