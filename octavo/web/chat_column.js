/* One conversation beside others: its messages, its settings, and where one writes. Several of them stream at the same time. */

import { takeAnswer } from "./chat_answer.js";
import { AnswerMessage, userMessage } from "./chat_message.js";
import { settings } from "./chat_settings.js";
import { button, freshId, make } from "./dom.js";
import { save } from "./store.js";

const NEAR = 60; // px from the end: who reads there wants to stay there

/** `host`: { announce(text), select(request), changed(), open(column, id), branch(column), close(column), failed() }. */
export class Column {
  #host;
  #stream = null; // an AbortController while an answer comes
  #editing = false;
  #answers = [];
  #height = 0; // of the messages when they were last drawn
  #log = make("div", { class: "log", role: "log", "aria-live": "off", "aria-label": "Messages", tabindex: "0" });
  #settings = make("div");
  #write;
  #send = make("button", { type: "submit", class: "primary" }, "Send");
  #stop = button("Stop", () => this.stop(), { class: "primary", hidden: true });
  #cancel = button("Cancel", () => this.#leaveEditing(), { hidden: true });

  constructor(conversation, host) {
    this.conversation = conversation;
    this.#host = host;
    const id = freshId("write");
    this.#write = make("textarea", { id, rows: "2", placeholder: "Ask something", dir: "auto", onkeydown: (event) => this.#key(event) });
    this.choice = make("select", { "aria-label": "Conversation", onchange: () => host.open(this, this.choice.value) });
    this.closer = button("Close", () => host.close(this), { "aria-label": "Close this column" });
    const branch = button("Branch", () => host.branch(this), { title: "A copy of this conversation beside it" });
    const head = make("div", { class: "column-head" }, this.choice, branch, this.closer);
    const form = make("form", { class: "write", onsubmit: (event) => this.#submit(event) });
    form.append(make("label", { for: id, class: "hidden" }, "Message"), this.#write, make("div", { class: "row" }, this.#cancel, this.#stop, this.#send));
    this.element = make("section", { class: "column" }, head, this.#settings, this.#log, form);
    this.show(conversation);
  }

  get streams() {
    return this.#stream !== null;
  }

  show(conversation) {
    this.stop();
    this.#stream = null; // what still comes of it belongs to the other conversation
    this.conversation = conversation;
    this.#leaveEditing();
    this.#settings.replaceChildren(settings(conversation, () => save(conversation)));
    this.#draw();
  }

  focus() {
    this.#write.focus();
  }

  allow(allowed) {
    this.#send.disabled = this.#write.disabled = !allowed;
  }

  stop() {
    this.#stream?.abort();
  }

  /** Which of its answers, if any, is the one selected in the pool. */
  markSelected(request) {
    for (const answer of this.#answers) answer.markSelected(request !== undefined && answer.request === request);
  }

  #key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.#submit(event);
    } else if (event.key === "Escape") {
      if (this.streams || this.#editing) event.preventDefault(); // it is used up here
      if (this.streams) this.stop();
      else this.#leaveEditing();
    }
  }

  #submit(event) {
    event.preventDefault();
    this.ask(this.#write.value);
  }

  /** Asks this, as if it had been written and sent. */
  ask(text) {
    const content = text.trim();
    if (!content || this.streams || this.#send.disabled) return;
    if (this.#editing) this.#dropFrom(this.#lastAsked());
    this.#leaveEditing();
    this.conversation.messages.push({ role: "user", content });
    this.#answerNext();
  }

  #again() {
    if (this.streams) return;
    this.#dropFrom(this.#lastAsked() + 1);
    this.#answerNext();
  }

  #edit() {
    if (this.streams) return;
    this.#editing = true;
    this.#cancel.hidden = false;
    this.#write.value = this.conversation.messages[this.#lastAsked()].content;
    this.focus();
  }

  #leaveEditing() {
    this.#editing = false;
    this.#cancel.hidden = true;
    this.#write.value = "";
  }

  #lastAsked() {
    return this.conversation.messages.findLastIndex((message) => message.role === "user");
  }

  #dropFrom(index) {
    this.conversation.messages.splice(index);
  }

  async #answerNext() {
    const conversation = this.conversation;
    const answer = { role: "assistant", content: "" };
    conversation.messages.push(answer);
    const stream = (this.#stream = new AbortController());
    save(conversation);
    this.#draw();
    this.#host.changed();
    this.#host.announce("Answering.");
    const element = this.#answers.at(-1);
    await takeAnswer(conversation, answer, stream.signal, () => this.#stream === stream && element.grow());
    save(conversation);
    if (this.#stream === stream) this.#ended(answer);
  }

  #ended(answer) {
    this.#stream = null;
    if (answer.error?.passing) this.#host.failed();
    this.#host.announce(answer.error ? "" : `Answer: ${answer.content.slice(0, 1000)}`); // an error is an alert already
    this.#draw();
    this.#host.changed();
  }

  #draw() {
    const { messages } = this.conversation;
    const asked = this.#lastAsked();
    this.#answers = [];
    const elements = messages.map((message, index) => {
      if (message.role === "user") return userMessage(message, index === asked && !this.streams ? () => this.#edit() : undefined);
      return this.#answer(message, index === messages.length - 1);
    });
    const empty = make("p", { class: "empty muted" }, "What is asked here stays in this browser.");
    this.#log.replaceChildren(...(elements.length ? elements : [empty]));
    this.#log.scrollTop = this.#height = this.#log.scrollHeight;
    this.#stop.hidden = !this.streams;
    this.#send.hidden = this.streams;
  }

  #answer(message, isLast) {
    const again = () => this.#again();
    const shown = new AnswerMessage(message, { again, retry: again, select: () => this.#host.select(message.request) });
    if (isLast && this.streams) {
      shown.grow();
      shown.drawn = () => this.#follow();
    } else {
      shown.end(isLast);
    }
    this.#answers.push(shown);
    return shown.element;
  }

  /** The growing answer stays in sight, unless the reader has gone elsewhere. */
  #follow() {
    const wasLeft = this.#height - this.#log.scrollTop - this.#log.clientHeight;
    this.#height = this.#log.scrollHeight;
    if (wasLeft < NEAR) this.#log.scrollTop = this.#height;
  }
}
