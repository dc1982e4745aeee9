/* Conversations, stored in this browser only: localStorage, with a key for each, so that two tabs do not overwrite each other.

There is a limit, and the oldest go first. If the store is full, forbidden or damaged, the chat still works: it then lasts as long as the page. */

const PREFIX = "octavo.conversation.";
const OPEN = "octavo.open"; // of this tab: which conversations are side by side
const MOST_CONVERSATIONS = 50;
const MOST_CHARACTERS = 1_500_000; // of all of them; browsers allow some 5 MB an origin
const kept = new Map(); // id -> conversation: what this page knows, whatever the store does

export function newConversation(from = null) {
  const conversation = from ? structuredClone(from) : { name: "", system: "", sampling: {}, messages: [] };
  Object.assign(conversation, { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), updated: Date.now() });
  kept.set(conversation.id, conversation);
  return conversation;
}

/** All of them, the latest first. */
export function conversations() {
  for (const [id, text] of stored()) {
    if (!kept.has(id)) {
      const read = readConversation(id, text);
      if (read) kept.set(id, read);
    }
  }
  return [...kept.values()].sort((one, other) => other.updated - one.updated);
}

export function save(conversation) {
  if (!kept.has(conversation.id)) return; // forgotten while its answer came
  conversation.updated = Date.now();
  store(conversation);
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
  const text = JSON.stringify(conversation);
  if (text.length > MOST_CHARACTERS) return forgetStored(conversation.id);
  makeRoom(text.length, conversation.id);
  try {
    localStorage.setItem(PREFIX + conversation.id, text);
  } catch {
    // full or forbidden: it stays on the page
  }
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

function forgetStored(id) {
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
