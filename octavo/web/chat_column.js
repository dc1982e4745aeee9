/* One conversation beside others: its messages, its settings, and where one writes. Several of them stream at the same time. */

import { takeAnswer } from "./chat_answer.js";
import { AnswerMessage, userMessage } from "./chat_message.js";
import { Settings } from "./chat_settings.js";
import { welcome } from "./chat_welcome.js";
import { button, freshId, make } from "./dom.js";
import { isNewBrowser, save } from "./store.js";

const NEAR = 60; // px from the end: who reads there wants to stay there

/** `host`: { announce(text), select(request), changed(), used(column), sendAll(text), branch(column), close(column), failed(), waiting(), teach(),
 * isFirst(column), model }. */
export class Column {
  #host;
  #stream = null; // an AbortController while an answer comes
  #editing = false;
  #several = false; // whether there are other columns
  #answers = [];
  #height = 0; // of the messages when they were last drawn
  #log = make("div", { class: "log", role: "log", "aria-live": "off", "aria-label": "Messages", tabindex: "0" });
  #place = make("div", { class: "settings-place" });
  #settings;
  #title = make("h3", { class: "column-title" });
  #waiting = null; // see chat_waiting.js, while an answer comes
  #write;
  #send = make("button", { type: "submit", class: "primary" }, "Send");
  #stop = button("Stop", () => this.stop(), { class: "primary", hidden: true });
  #cancel = button("Cancel", () => this.#leaveEditing(), { hidden: true });
  #sendAll = button("Send to all", () => this.#submitToAll(), { hidden: true, title: "Send this message in every column (Ctrl+Enter)" });

  constructor(conversation, host) {
    this.conversation = conversation;
    this.#host = host;
    const id = freshId("write");
    this.#write = make("textarea", { id, rows: "2", placeholder: "Ask something", dir: "auto", onkeydown: (event) => this.#key(event) });
    this.closer = button("Close", () => host.close(this), { "aria-label": "Close this column" });
    const branch = button("Branch", () => host.branch(this), { title: "A copy of this conversation beside it" });
    const head = make("div", { class: "column-head" }, this.#title, branch, this.closer);
    const form = make("form", { class: "write", onsubmit: (event) => this.#submit(event) });
    form.append(make("label", { for: id, class: "hidden" }, "Message"), this.#write, make("div", { class: "row" }, this.#cancel, this.#stop, this.#send, this.#sendAll));
    this.element = make("section", { class: "column", onfocusin: () => host.used(this) }, head, this.#place, this.#log, form);
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
    this.refresh();
  }

  /** The conversation was changed from elsewhere. What is being written stays, but for a message that was being changed. */
  refresh() {
    if (this.#editing) this.#leaveEditing();
    const { conversation } = this;
    const isOpen = this.#settings?.element.open ?? false;
    this.#settings = new Settings(conversation, () => {
      save(conversation);
      this.#host.changed();
    });
    this.#settings.element.open = isOpen;
    this.#place.replaceChildren(this.#settings.element);
    this.know(this.#host.model);
    this.#draw();
  }

  /** `model`: its entry in /v1/models, once it is known. */
  know(model) {
    if (model) this.#settings.know(model);
  }

  /** What stands above the column, and whether there are others to send to. */
  label(number, title, { several, busy }) {
    this.element.setAttribute("aria-label", `Column ${number}`);
    this.#title.textContent = this.#title.title = title;
    this.closer.hidden = !several;
    this.#several = several;
    this.#sendAll.disabled = busy || this.#send.disabled;
    this.#showSendAll();
  }

  /** Not while a message is being changed: the other columns have other messages. */
  #showSendAll() {
    this.#sendAll.hidden = !this.#several || this.streams || this.#editing;
  }

  /** Sends a message; where it cannot, the message waits in the box. Returns whether it was sent. */
  ask(content) {
    if (!this.isFree) {
      this.#write.value = content;
      return false;
    }
    this.conversation.messages.push({ role: "user", content });
    this.#answerNext();
    return true;
  }

  /** The focus goes to the messages, not to where one writes: a phone then opens no keyboard. */
  #askSuggested(text) {
    this.ask(text);
    this.#log.focus();
  }

  get isFree() {
    return !this.streams && !this.#send.disabled;
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
      if ((event.ctrlKey || event.metaKey) && !this.#sendAll.hidden) this.#submitToAll();
      else this.#submit(event);
    } else if (event.key === "Escape") {
      if (this.streams || this.#editing) event.preventDefault(); // it is used up here
      if (this.streams) this.stop();
      else this.#leaveEditing();
    }
  }

  #submit(event) {
    event.preventDefault();
    const content = this.#write.value.trim();
    if (!content || !this.isFree) return;
    if (this.#editing) this.#dropFrom(this.#lastAsked());
    this.#leaveEditing();
    this.ask(content);
  }

  #submitToAll() {
    const content = this.#write.value.trim();
    if (!content || this.#sendAll.disabled) return;
    this.#write.value = "";
    this.#host.sendAll(content);
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
    this.#showSendAll();
    this.#write.value = this.conversation.messages[this.#lastAsked()].content;
    this.focus();
  }

  #leaveEditing() {
    this.#editing = false;
    this.#cancel.hidden = true;
    this.#write.value = "";
    this.#showSendAll();
  }

  #lastAsked() {
    return this.conversation.messages.findLastIndex((message) => message.role === "user");
  }

  #dropFrom(index) {
    this.conversation.messages.splice(index);
  }

  #answerNext() {
    const answer = { role: "assistant", content: "" };
    this.conversation.messages.push(answer);
    this.#take(answer);
  }

  /** More of an answer that was cut off. */
  #goOn(answer) {
    if (this.isFree) this.#take(answer);
  }

  async #take(answer) {
    const { conversation } = this;
    const stream = (this.#stream = new AbortController());
    this.#waiting = this.#host.waiting();
    save(conversation);
    this.#draw();
    this.#host.changed();
    this.#host.announce("Answering.");
    const element = this.#answers.at(-1);
    await takeAnswer(conversation, answer, this.#host.model, stream.signal, () => this.#stream === stream && element.grow());
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
    const actions = { ask: (text) => this.#askSuggested(text), teach: this.#host.teach };
    this.#log.replaceChildren(...(elements.length ? elements : [welcome(actions, isNewBrowser() && this.#host.isFirst(this))]));
    this.#log.scrollTop = this.#height = this.#log.scrollHeight;
    this.#stop.hidden = !this.streams;
    this.#send.hidden = this.streams;
  }

  #answer(message, isLast) {
    const again = () => this.#again();
    const shown = new AnswerMessage(message, { again, goOn: () => this.#goOn(message), select: () => this.#host.select(message.request) });
    if (isLast && this.streams) {
      shown.wait(this.#waiting);
      shown.grow();
      shown.drawn = () => this.#follow();
    } else {
      shown.end(isLast, this.#host.model);
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
