/* The list of conversations beside the columns: open one, rename it, delete it, begin another.

Where the chat is narrow the list starts closed and opens over the columns; there, choosing a conversation closes it again. */

import { button, freshId, make } from "./dom.js";
import { title } from "./store.js";

/** `host`: { open(conversation), begin(), rename(conversation, name), remove(conversation), restore(conversation), clear() }. */
export class ConversationList {
  #host;
  #items = new Map(); // id -> { item, opener, conversation }
  #list = make("ul");
  #undo = make("p", { class: "undo", hidden: true });
  #scrim = make("div", { class: "scrim", hidden: true, onclick: () => this.#show(false) });
  #narrow = false;
  #wanted = true; // while there is room for it

  constructor(host) {
    this.#host = host;
    const id = freshId("conversations");
    const begin = button("New conversation", () => this.#choose(() => host.begin()), { class: "begin" });
    const foot = make("div", { class: "conversations-foot" }, make("p", { class: "muted" }, "Stored in this browser only."), button("Delete all", () => host.clear()));
    const escape = (event) => event.key === "Escape" && this.#narrow && this.#show(false);
    this.panel = make("nav", { id, class: "conversations", "aria-label": "Conversations", onkeydown: escape }, begin, this.#list, this.#undo, foot);
    this.toggle = button("Conversations", () => this.#show(this.panel.hidden), { "aria-controls": id, "aria-expanded": "true" });
    this.elements = [this.#scrim, this.panel];
  }

  /** Whether the chat has no room for the list beside its columns. */
  setNarrow(narrow) {
    if (narrow === this.#narrow) return;
    this.#narrow = narrow;
    this.panel.classList.toggle("over", narrow);
    this.#setOpen(!narrow && this.#wanted);
  }

  /** `current`: the id of the conversation in the column that is used. */
  draw(conversations, current) {
    const focused = document.activeElement;
    for (const [id, { item }] of this.#items) {
      if (conversations.some((conversation) => conversation.id === id)) continue;
      item.remove();
      this.#items.delete(id);
    }
    const items = conversations.map((conversation) => this.#drawn(conversation, conversation.id === current));
    const isSorted = items.every((item, index) => this.#list.children[index] === item);
    if (isSorted || this.#list.querySelector("input")) return; // an item that moves would end its renaming
    this.#list.append(...items);
    if (this.#list.contains(focused)) focused.focus(); // an item that was moved has lost it
  }

  #drawn(conversation, isCurrent) {
    const shown = this.#itemOf(conversation);
    const { item, opener } = shown;
    const name = title(conversation);
    shown.conversation = conversation; // a branch may have left its id to what another tab wrote
    if (opener.textContent !== name) opener.textContent = opener.title = name;
    if (isCurrent) opener.setAttribute("aria-current", "true");
    else opener.removeAttribute("aria-current");
    if (!item.parentNode) this.#list.append(item);
    return item;
  }

  #itemOf(conversation) {
    const known = this.#items.get(conversation.id);
    if (known) return known;
    const opener = button("", () => this.#choose(() => this.#host.open(made.conversation)), { class: "opener" });
    const rename = button("✎", () => this.#rename(made.conversation), { "aria-label": "Rename", title: "Rename" });
    const remove = button("×", () => this.#remove(made.conversation), { "aria-label": "Delete", title: "Delete" });
    const made = { item: make("li", {}, opener, make("span", { class: "item-tools" }, rename, remove)), opener, conversation };
    this.#items.set(conversation.id, made);
    return made;
  }

  #choose(act) {
    this.#undo.hidden = true;
    act();
    this.leave();
  }

  /** A field in the place of the name: Enter keeps what it says, Escape leaves the name as it was. */
  #rename(conversation) {
    const { item, opener } = this.#items.get(conversation.id);
    const field = make("input", { "aria-label": "Name of the conversation", maxlength: "80" });
    field.value = title(conversation);
    let ended = false; // taking the field away is a "blur", too
    const end = (name) => {
      if (ended) return;
      ended = true;
      field.replaceWith(opener);
      if (name !== null) this.#host.rename(conversation, name);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      end(event.key === "Enter" ? field.value.trim() : null);
      opener.focus();
    });
    field.addEventListener("blur", () => end(field.value.trim()));
    opener.replaceWith(field);
    item.scrollIntoView({ block: "nearest" });
    field.select();
  }

  #remove(conversation) {
    const name = title(conversation);
    this.#host.remove(conversation);
    const back = button("Undo", () => this.#choose(() => this.#host.restore(conversation)));
    this.#undo.replaceChildren(`Deleted “${name}”. `, back);
    this.#undo.hidden = false;
    back.focus();
  }

  /** Closes it where it lies over the columns. */
  leave() {
    if (this.#narrow) this.#setOpen(false);
  }

  #show(open) {
    if (!this.#narrow) this.#wanted = open;
    this.#setOpen(open);
    if (this.#narrow) (open ? this.panel.querySelector(".begin") : this.toggle).focus();
  }

  #setOpen(open) {
    this.panel.hidden = !open;
    this.#scrim.hidden = !(open && this.#narrow);
    this.toggle.setAttribute("aria-expanded", String(open));
  }
}
