/* Conversations, stored in this browser only: localStorage, with a key for each.

Tabs of one browser share them. What another tab writes is taken in (`watchOtherTabs`). Where both have written, nothing is overwritten:
this tab's messages become a branch.

There is a limit, and the oldest go first. If the store is full, forbidden or damaged, the chat still works: it then lasts as long as the page. */

const PREFIX = "octavo.conversation.";
const OPEN = "octavo.open"; // of this tab: which conversations are side by side
const MOST_CONVERSATIONS = 50;
const MOST_CHARACTERS = 1_500_000; // of all of them; browsers allow some 5 MB an origin
const kept = new Map(); // id -> conversation: what this page knows, whatever the store does
const seen = new Map(); // id -> the text in the store that this tab read or wrote last

export function newConversation() {
  const conversation = { id: freshKey(), name: "", system: "", sampling: {}, messages: [], updated: Date.now() };
  kept.set(conversation.id, conversation);
  return conversation;
}

/** A copy with a name of its own, stored. */
export function branch(conversation) {
  const copy = { ...structuredClone(conversation), id: freshKey(), name: branchName(conversation), updated: Date.now() };
  endAnswer(copy);
  kept.set(copy.id, copy);
  store(copy);
  return copy;
}

/** "Branch: ...", "Branch 2: ...": the number comes first, so that it is read where the rest has no room. */
function branchName(conversation) {
  if (!conversation.messages.length) return conversation.name; // its first message will name it
  const base = title(conversation).replace(/^Branch(?: \d+)?: /, "");
  const names = new Set(conversations().map(title));
  for (let number = 1; ; number += 1) {
    const name = `Branch${number > 1 ? ` ${number}` : ""}: ${base}`;
    if (!names.has(name)) return name;
  }
}

/** An answer that still comes is over for whoever reads the conversation later. */
function endAnswer({ messages }) {
  const last = messages.at(-1);
  if (last?.role === "assistant" && !last.error) last.end ??= "stopped";
}

/** Whether nothing has been said in this browser. */
export function isNewBrowser() {
  return conversations().every(({ messages }) => !messages.length);
}

/** All of them, the latest first. */
export function conversations() {
  for (const [id, text] of stored()) {
    if (!kept.has(id)) {
      const read = readConversation(id, text);
      if (read) kept.set(id, read);
      seen.set(id, text);
    }
  }
  return [...kept.values()].sort((one, other) => other.updated - one.updated);
}

export function save(conversation) {
  if (!kept.has(conversation.id)) return; // forgotten while its answer came
  conversation.updated = Date.now();
  store(conversation);
}

/** Its answer cannot go on: the page is left. */
export function saveUnfinished(conversation) {
  endAnswer(conversation);
  save(conversation);
}

/** `name` is shown in the place of the first message; an empty one brings that back. */
export function rename(conversation, name) {
  conversation.name = name;
  store(conversation); // it stays where it is in the list
}

/** Takes back `remove`. */
export function restore(conversation) {
  kept.set(conversation.id, conversation);
  store(conversation);
}

function store(conversation) {
  const stored = read(conversation.id);
  if (stored !== null && stored !== seen.get(conversation.id) && !takesOnlySettings(conversation, stored)) leaveToOtherTab(conversation);
  const text = JSON.stringify(conversation);
  if (text.length > MOST_CHARACTERS) return forgetStored(conversation.id);
  makeRoom(text.length, conversation.id);
  try {
    localStorage.setItem(PREFIX + conversation.id, text);
    seen.set(conversation.id, text);
  } catch {
    // full or forbidden: it stays on the page
  }
}

/** Another tab has written this conversation. If its messages are those that were stored before, only its name and settings are new. */
function takesOnlySettings(conversation, text) {
  const [theirs, before] = [text, seen.get(conversation.id) ?? ""].map((each) => readConversation(conversation.id, each));
  if (!theirs || !before || JSON.stringify(theirs.messages) !== JSON.stringify(before.messages)) return false;
  const { name, system, sampling } = theirs;
  Object.assign(conversation, { name, system, sampling });
  return true;
}

/** Both tabs have added messages: what is stored stays, and this tab goes on with a branch. */
function leaveToOtherTab(conversation) {
  kept.delete(conversation.id);
  Object.assign(conversation, { id: freshKey(), name: branchName(conversation) });
  kept.set(conversation.id, conversation);
}

/** Calls `changed(conversation)` when another tab wrote one, and `gone(conversation)` when it deleted one. `isBusy(conversation)`: whether
 * an answer to it comes in this tab. Then it stays as it is here, until it is stored. */
export function watchOtherTabs({ changed, gone, isBusy }) {
  addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(PREFIX)) return;
    const id = key.slice(PREFIX.length);
    const mine = kept.get(id);
    if (newValue === null) {
      seen.delete(id);
      kept.delete(id);
      if (mine) gone(mine);
      return;
    }
    const theirs = readConversation(id, newValue);
    if (!theirs || (mine && isBusy(mine))) return;
    seen.set(id, newValue);
    kept.set(id, mine ? Object.assign(mine, theirs) : theirs);
    changed(kept.get(id));
  });
}

function freshKey() {
  return crypto.getRandomValues(new Uint32Array(3)).join("-");
}

export function remove(id) {
  kept.delete(id);
  forgetStored(id);
}

export function removeAll() {
  for (const [id] of stored()) forgetStored(id);
  kept.clear();
  saveOpen([]);
}

export function title(conversation) {
  if (conversation.name) return conversation.name;
  const first = conversation.messages.find((message) => message.role === "user");
  const text = first ? first.content.trim().replace(/\s+/g, " ") : "";
  return text.length > 40 ? `${text.slice(0, 39)}…` : text || "New conversation";
}

export function openIds() {
  try {
    const ids = JSON.parse(sessionStorage.getItem(OPEN) ?? "[]");
    return Array.isArray(ids) ? ids : [];
  } catch {
    return [];
  }
}

export function saveOpen(ids) {
  try {
    sessionStorage.setItem(OPEN, JSON.stringify(ids));
  } catch {
    // the next page begins with one
  }
}

function stored() {
  try {
    const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
    return names.map((name) => [name.slice(PREFIX.length), localStorage.getItem(name) ?? ""]);
  } catch {
    return [];
  }
}

function read(id) {
  try {
    return localStorage.getItem(PREFIX + id);
  } catch {
    return null;
  }
}

function forgetStored(id) {
  seen.delete(id);
  try {
    localStorage.removeItem(PREFIX + id);
  } catch {
    // there is none
  }
}

function makeRoom(needed, id) {
  const others = stored().filter(([other]) => other !== id);
  const oldest = others.map(([other, text]) => ({ id: other, size: text.length, updated: kept.get(other)?.updated ?? updatedOf(text) }));
  oldest.sort((one, other) => one.updated - other.updated);
  let characters = needed + oldest.reduce((sum, { size }) => sum + size, 0);
  while (oldest.length >= MOST_CONVERSATIONS || (oldest.length && characters > MOST_CHARACTERS)) {
    const gone = oldest.shift();
    characters -= gone.size;
    forgetStored(gone.id);
  }
}

function updatedOf(text) {
  return readConversation("", text)?.updated ?? 0;
}

/** Checked: what lies in the store may be another version's, or anybody's. */
function readConversation(id, text) {
  try {
    const { name = "", system, sampling, messages, updated } = JSON.parse(text);
    if (typeof name !== "string" || typeof system !== "string" || typeof updated !== "number" || typeof sampling !== "object" || sampling === null) return null;
    const right = (message) => ["user", "assistant"].includes(message.role) && typeof message.content === "string";
    return messages.every(right) ? { id, name, system, sampling, messages, updated } : null;
  } catch {
    return null;
  }
}
