/* The chat: conversations side by side, the list of those this browser keeps, and the button that forgets them all. */

import { Column } from "./chat_column.js";
import { button, freshId, make } from "./dom.js";
import { conversations, newConversation, openIds, removeAll, save, saveOpen, title } from "./store.js";

const MOST_COLUMNS = 4;
const NEW = "new";

/** Returns { allow(whether one may ask), ask(text) }. `failed`: called when an answer was not to be had, for a reason that may pass. */
export function mountChat(element, view, failed) {
  const status = make("p", { class: "hidden", role: "status" });
  const strip = make("div", { class: "columns" });
  const adder = button("New column", () => add(newConversation()));
  const bar = make("div", { class: "chat-bar" }, adder, button("Clear all", clearAll));
  const columns = [];
  let allowed = true;
  element.append(bar, strip, status);

  const host = {
    announce: (text) => { status.textContent = text; },
    select: (request) => view.selection.set({ request }),
    changed: refresh,
    failed,
    open(column, id) {
      const known = conversations().find((conversation) => conversation.id === id);
      column.show(known ?? newConversation());
      refresh();
    },
    branch(column) {
      const copy = newConversation(column.conversation);
      save(copy);
      add(copy);
    },
    close(column) {
      column.stop();
      column.element.remove();
      columns.splice(columns.indexOf(column), 1);
      refresh();
      columns.at(-1).focus();
    },
  };

  function add(conversation) {
    if (columns.length >= MOST_COLUMNS) return;
    const column = new Column(conversation, host);
    column.allow(allowed);
    columns.push(column);
    strip.append(column.element);
    refresh();
    column.focus();
  }

  function refresh() {
    const open = columns.map((column) => column.conversation.id);
    const known = conversations();
    for (const [index, column] of columns.entries()) {
      const own = column.conversation;
      column.element.setAttribute("aria-label", `Column ${index + 1}`);
      const listed = known.filter(({ id, messages }) => id === own.id || (messages.length && !open.includes(id)));
      column.choice.replaceChildren(...listed.map((each) => make("option", { value: each.id }, title(each))), make("option", { value: NEW }, "New …"));
      column.choice.value = own.id;
      column.closer.hidden = columns.length === 1;
    }
    adder.disabled = columns.length >= MOST_COLUMNS;
    element.style.setProperty("--num-columns", String(columns.length));
    saveOpen(open);
    markSelected();
  }

  function markSelected() {
    const { request } = view.selection.get() ?? {};
    for (const column of columns) column.markSelected(request);
  }

  async function clearAll() {
    if (!(await confirmed())) return;
    for (const column of columns.splice(0)) {
      column.stop();
      column.element.remove();
    }
    removeAll();
    add(newConversation());
  }

  const known = new Map(conversations().map((conversation) => [conversation.id, conversation]));
  const open = openIds().filter((id) => known.has(id));
  for (const id of open) add(known.get(id));
  if (!columns.length) add(newConversation());
  view.on(markSelected);
  addEventListener("pagehide", () => columns.filter((column) => column.streams).forEach((column) => save(column.conversation)));
  return {
    allow(whether) {
      allowed = whether;
      for (const column of columns) column.allow(whether);
    },
    ask(text) {
      columns[0].ask(text);
    },
  };
}

function confirmed() {
  const id = freshId("clear");
  const dialog = make(
    "dialog",
    { class: "question", "aria-labelledby": id },
    make("h2", { id }, "Forget every conversation?"),
    make("p", { class: "muted" }, "They are in this browser alone; nobody can bring them back."),
    make("div", { class: "row" }, button("Forget them all", () => dialog.close("yes"), { class: "primary" }), button("Keep them", () => dialog.close(""))),
  );
  document.body.append(dialog);
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    dialog.showModal();
  });
}
