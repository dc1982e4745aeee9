/* A message on the page: what was asked, or an answer. An answer grows; until its first token there is a sign of waiting, at its end there
are its figures, the chip about the cache, and the buttons. */

import { canGoOn } from "./chat_answer.js";
import { cacheWords, figures } from "./chat_words.js";
import { button, copyButton, freshId, make } from "./dom.js";
import { shower, visible } from "./markdown.js";

const WAITING_PACE = 250; // ms between two looks at what the request is waiting for
const PACE = 50; // ms between two drawings of a growing answer, and four times what the last one took

export function userMessage(message, edit) {
  const tools = make("div", { class: "tools" }, ...(edit ? [button("Edit", edit)] : []));
  const text = make("div", { class: "text asked", dir: "auto" }, visible(message.content));
  return make("article", { class: "message from-user", "aria-label": "Your message" }, make("h3", { class: "speaker" }, "You"), text, tools);
}

/** `actions`: { again, goOn, select }. */
export class AnswerMessage {
  #answer;
  #actions;
  #text = make("div", { class: "text", dir: "auto" });
  #thought = make("div", { class: "text thought", dir: "auto" });
  #thinking = make("details", { class: "thinking", hidden: true }, make("summary", {}, "Thinking"), this.#thought);
  #sign = make("p", { class: "waiting", hidden: true });
  #timer = 0;
  #below = make("div", { class: "below" });
  #showText = shower(this.#text);
  #showThought = shower(this.#thought);
  #next = 0; // the earliest moment of the next drawing
  #scheduled = false;

  constructor(answer, actions) {
    this.#answer = answer;
    this.#actions = actions;
    this.select = button("Show in the pool", actions.select, { "aria-pressed": "false", hidden: true });
    const head = make("div", { class: "head" }, make("h3", { class: "speaker" }, "Octavo"), this.select);
    this.element = make("article", { class: "message from-model", "aria-label": "Answer" }, head, this.#thinking, this.#sign, this.#text, this.#below);
  }

  get request() {
    return this.#answer.request;
  }

  markSelected(selected) {
    this.select.setAttribute("aria-pressed", String(selected));
    this.element.classList.toggle("selected", selected);
  }

  /** Until the first token: `waiting.words` says what is known. */
  wait(waiting) {
    const say = () => {
      if (this.#sign.textContent !== waiting.words) this.#sign.textContent = waiting.words;
      if (!this.element.isConnected) this.#endWaiting(); // the column shows another conversation
    };
    this.#sign.hidden = false;
    this.#sign.textContent = waiting.words;
    this.#timer = setInterval(say, WAITING_PACE);
  }

  #endWaiting() {
    clearInterval(this.#timer);
    this.#sign.hidden = true;
  }

  /** Draws soon. The page stays responsive, however fast the answer grows. */
  grow() {
    if (this.#scheduled) return;
    this.#scheduled = true;
    setTimeout(() => requestAnimationFrame(() => this.#scheduled && this.#draw(true)), Math.max(0, this.#next - performance.now()));
  }

  /** `model`: its entry in /v1/models, where it is known. */
  end(isLast, model) {
    this.#draw(false);
    const { again, goOn } = this.#actions;
    const { error, content } = this.#answer;
    const goesOn = isLast && canGoOn(this.#answer, model);
    const isEmpty = error && !goesOn;
    const tools = make("div", { class: "tools" });
    if (goesOn) tools.append(button("Continue", goOn, { class: "go-on" }));
    if (isLast && !isEmpty) tools.append(button("Regenerate", again));
    if (content && navigator.clipboard) tools.append(copyButton(() => content));
    this.#below.replaceChildren(...facts(this.#answer, model), ...(error ? [errorBox(error, isLast && isEmpty ? again : undefined)] : []), tools);
  }

  #draw(growing) {
    const start = performance.now();
    this.#scheduled = false;
    if (!growing || this.#answer.content || this.#answer.reasoning) this.#endWaiting();
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

function errorBox(error, retry) {
  const code = [error.status || "", error.code || ""].filter(Boolean).join(", ");
  const wait = error.retryAfter ? ` The server asks to wait ${error.retryAfter} s.` : "";
  const words = make("p", {}, `${visible(error.message)}${code ? ` (${code})` : ""}${wait}`);
  const again = retry ? [button(error.passing ? "Try again" : "Send again", retry)] : [];
  return make("div", { class: "error", role: "alert" }, words, ...again);
}

/** The figures in a line, and behind them a chip about the cache. What it means appears when it is pointed at, focused or clicked. */
function facts(answer, model) {
  const cache = cacheWords(answer);
  const line = make("p", { class: "facts" }, make("span", {}, figures(answer, model)));
  if (!cache) return line.textContent ? [line] : [];
  const id = freshId("cache");
  const open = () => chip.setAttribute("aria-expanded", String(chip.getAttribute("aria-expanded") === "false"));
  const close = () => chip.setAttribute("aria-expanded", "false");
  const chip = button(cache.short, open, { class: "chip", "aria-expanded": "false", "aria-describedby": id, onblur: close });
  line.append(chip, make("span", { id, class: "tip", role: "tooltip" }, cache.long));
  return [line];
}
