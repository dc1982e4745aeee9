/* A message on the page: what was asked, or an answer as it grows with its figures, its thinking folded, and what can be done with it. */

import { cacheWords, figures } from "./chat_words.js";
import { button, make } from "./dom.js";
import { shower, visible } from "./markdown.js";

const PACE = 50; // ms between two drawings of a growing answer, and four times what the last one took

export function userMessage(message, edit) {
  const tools = make("div", { class: "tools" }, ...(edit ? [button("Edit", edit)] : []));
  const text = make("div", { class: "text asked", dir: "auto" }, visible(message.content));
  return make("article", { class: "message from-user", "aria-label": "Your message" }, make("h3", { class: "speaker" }, "You"), text, tools);
}

/** `actions`: { again, retry, select }, each undefined where it cannot be done. */
export class AnswerMessage {
  #answer;
  #actions;
  #text = make("div", { class: "text", dir: "auto" });
  #thought = make("div", { class: "text thought", dir: "auto" });
  #thinking = make("details", { class: "thinking", hidden: true }, make("summary", {}, "Thinking"), this.#thought);
  #below = make("div", { class: "below" });
  #showText = shower(this.#text);
  #showThought = shower(this.#thought);
  #next = 0; // the earliest moment of the next drawing
  #waiting = false;

  constructor(answer, actions) {
    this.#answer = answer;
    this.#actions = actions;
    this.select = button("Show in the pool", actions.select, { "aria-pressed": "false", hidden: true });
    const head = make("div", { class: "head" }, make("h3", { class: "speaker" }, "Octavo"), this.select);
    this.element = make("article", { class: "message from-model", "aria-label": "Answer" }, head, this.#thinking, this.#text, this.#below);
  }

  get request() {
    return this.#answer.request;
  }

  markSelected(selected) {
    this.select.setAttribute("aria-pressed", String(selected));
    this.element.classList.toggle("selected", selected);
  }

  /** Soon; however fast it grows the page stays responsive. */
  grow() {
    if (this.#waiting) return;
    this.#waiting = true;
    setTimeout(() => requestAnimationFrame(() => this.#waiting && this.#draw(true)), Math.max(0, this.#next - performance.now()));
  }

  end(isLast) {
    this.#draw(false);
    const { again, retry } = this.#actions;
    const { error, content } = this.#answer;
    const tools = make("div", { class: "tools" });
    if (isLast && again && !error) tools.append(button("Regenerate", again));
    if (content && navigator.clipboard) tools.append(button("Copy", () => navigator.clipboard.writeText(content)));
    const said = [figures(this.#answer), cacheWords(this.#answer)].filter(Boolean).map((text) => make("p", { class: "figures" }, text));
    this.#below.replaceChildren(...said, ...(error ? [this.#told(error, isLast ? retry : undefined)] : []), tools);
  }

  #told(error, retry) {
    const code = [error.status || "", error.code || ""].filter(Boolean).join(", ");
    const wait = error.retryAfter ? ` The server asks to wait ${error.retryAfter} s.` : "";
    const words = make("p", {}, `${visible(error.message)}${code ? ` (${code})` : ""}${wait}`);
    const again = retry ? [button(error.passing ? "Try again" : "Send again", retry)] : [];
    return make("div", { class: "error", role: "alert" }, words, ...again);
  }

  #draw(growing) {
    const start = performance.now();
    this.#waiting = false;
    this.#showText(this.#answer.content);
    if (this.#answer.reasoning) {
      this.#thinking.hidden = false;
      this.#showThought(this.#answer.reasoning);
    }
    this.select.hidden = !this.#answer.request;
    this.element.classList.toggle("growing", growing);
    this.element.setAttribute("aria-busy", String(growing));
    const now = performance.now();
    this.#next = now + PACE + 4 * (now - start);
    this.drawn?.();
  }
}
