/* The chat: conversations side by side in columns, and the list of all that this browser has stored. */

import { Column } from "./chat_column.js";
import { ConversationList } from "./chat_list.js";
import { Waiting } from "./chat_waiting.js";
import { button, freshId, make } from "./dom.js";
import {
  branch, conversations, newConversation, openIds, remove, removeAll, rename, restore, saveOpen, saveUnfinished, title, watchOtherTabs,
} from "./store.js";

const MOST_COLUMNS = 4;
const LIST_WIDTH = 190; // px, with the space beside it
const COLUMN_WIDTH = 270;

/** Returns { allow(whether one may ask), know(the model's entry in /v1/models), closeList() where it lies over the columns }.

`select(request)` selects a request in the pool, `teach` opens the lesson. `failed` is called when there was no answer, for a reason that may
pass. */
export function mountChat(element, view, { select, teach, failed }) {
  const status = make("p", { class: "hidden", role: "status" });
  const strip = make("div", { class: "columns" });
  const adder = button("New column", () => add(newConversation()));
  const columns = [];
  let used = null; // the column that had the focus last
  let allowed = true;

  const host = {
    model: null,
    announce: (text) => { status.textContent = text; },
    select,
    waiting: () => new Waiting(view),
    changed: refresh,
    teach,
    failed,
    isFirst: (column) => (columns[0] ?? column) === column,
    used(column) {
      if (used === column) return;
      used = column;
      refresh();
    },
    sendAll: (text) => columns.forEach((column) => column.ask(text)),
    branch(column) {
      add(branch(column.conversation));
    },
    close(column) {
      column.stop();
      column.element.remove();
      columns.splice(columns.indexOf(column), 1);
      if (used === column) used = columns.at(-1);
      refresh();
      columns.at(-1).focus();
    },
  };

  const list = new ConversationList({
    open: show,
    begin: () => show(newConversation()),
    rename(conversation, name) {
      rename(conversation, name);
      refresh();
    },
    remove(conversation) {
      remove(conversation.id);
      for (const column of columns) if (column.conversation === conversation) column.show(newConversation());
      refresh();
    },
    restore(conversation) {
      restore(conversation);
      show(conversation);
    },
    clear: clearAll,
  });
  element.append(make("div", { class: "chat-bar" }, list.toggle, adder), make("div", { class: "chat-body" }, ...list.elements, strip), status);

  /** In the column used last, unless another column has it already. */
  function show(conversation) {
    const column = columns.find((each) => each.conversation === conversation) ?? used;
    if (column.conversation !== conversation) column.show(conversation);
    refresh();
    column.focus();
  }

  function add(conversation) {
    if (columns.length >= MOST_COLUMNS) return;
    const column = new Column(conversation, host);
    column.allow(allowed);
    columns.push(column);
    strip.append(column.element);
    used = column;
    refresh();
    column.focus();
  }

  function refresh() {
    const open = columns.map((column) => column.conversation.id);
    const together = { several: columns.length > 1, busy: columns.some((column) => column.streams) };
    for (const [index, column] of columns.entries()) {
      column.label(index + 1, title(column.conversation), together);
      column.element.classList.toggle("used", column === used);
    }
    list.draw(conversations().filter(({ id, messages }) => messages.length || open.includes(id)), used?.conversation.id);
    adder.disabled = columns.length >= MOST_COLUMNS;
    saveOpen(open);
    markSelected();
    makeRoom();
  }

  function makeRoom() {
    list.setNarrow(element.clientWidth < LIST_WIDTH + columns.length * COLUMN_WIDTH);
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
  new ResizeObserver(makeRoom).observe(element);
  addEventListener("pagehide", () => columns.filter((column) => column.streams).forEach((column) => saveUnfinished(column.conversation)));
  const shown = (conversation) => columns.filter((column) => column.conversation === conversation);
  watchOtherTabs({
    isBusy: (conversation) => shown(conversation).some((column) => column.streams),
    changed(conversation) {
      for (const column of shown(conversation)) column.refresh();
      refresh();
    },
    gone(conversation) {
      for (const column of shown(conversation)) column.show(newConversation());
      refresh();
    },
  });
  return {
    allow(whether) {
      allowed = whether;
      for (const column of columns) column.allow(whether);
      refresh();
    },
    know(model) {
      host.model = model;
      for (const column of columns) column.know(model);
    },
    closeList: () => list.leave(),
  };
}

function confirmed() {
  const id = freshId("clear");
  const dialog = make(
    "dialog",
    { class: "question", "aria-labelledby": id },
    make("h2", { id }, "Delete all conversations?"),
    make("p", { class: "muted" }, "They are stored in this browser only. Nobody can bring them back."),
    make("div", { class: "row" }, button("Delete all", () => dialog.close("yes"), { class: "primary" }), button("Keep them", () => dialog.close(""))),
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
