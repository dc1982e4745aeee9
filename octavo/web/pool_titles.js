// What a request is called, and how far it has got.
//
// A title is what was asked: the last message of the user, if the prompt is a chat, else the prompt's first words. It is read from
// the tokens in the blocks of the prompt, once they are known, and remembered, for the blocks may get other content. A request that
// waits has no blocks: the server tells the end of its prompt. A request whose text is not shown is called by its id.

const READ_BLOCKS = 64; // at the end of a prompt
const MOST_LETTERS = 80;
const SPECIAL = /^(<\|.*\|>|<\/?s>|\[\/?INST\]|<(start|end)_of_turn>)$/; // tokens of chat templates
const ROLES = new Set(["system", "user", "assistant", "model", "tool"]);
const MOST_TITLES = 4096;

export class Titles {
  #known = new Map(); // request -> title

  of(state, row) {
    const known = this.#known.get(row.request);
    if (known !== undefined) return known;
    const text = state.head.text === false ? "" : titleOf(row.state === "waiting" ? (row.asked ?? []) : readPrompt(state, row));
    if (!text) return row.request;
    if (row.computed < row.prompt) return text; // more of it is to come
    this.#known.set(row.request, text);
    if (this.#known.size > MOST_TITLES) this.#known.delete(this.#known.keys().next().value);
    return text;
  }
}

/** The tokens of a prompt as far as they are known, at most those of its last blocks. */
function readPrompt(state, row) {
  const { block_size: size } = state.head;
  const end = Math.ceil(row.prompt / size);
  const first = Math.max(0, end - READ_BLOCKS);
  const pieces = [];
  for (const [index, block, kept] of state.entries(row, first, end)) {
    const tokens = kept ? state.blocks.tokens[block] : null;
    if (!tokens) return pieces;
    pieces.push(...tokens.slice(0, row.prompt - index * size));
  }
  return pieces;
}

/** The last thing a user said in it, else its first words. */
export function titleOf(pieces) {
  let [role, text, asked] = ["", "", ""];
  const close = () => {
    const trimmed = text.trim();
    const name = trimmed.split(/\s/, 1)[0];
    if (ROLES.has(trimmed)) role = trimmed; // the message follows
    else if (ROLES.has(name) && text.trimStart().startsWith(`${name}\n`)) {
      if (name === "user") asked = trimmed.slice(name.length).trim();
      role = "";
    } else if (role === "user" && trimmed) [asked, role] = [trimmed, ""];
    text = "";
  };
  for (const piece of pieces) {
    if (SPECIAL.test(piece.trim())) close();
    else text += piece;
  }
  close();
  const found = (asked || pieces.filter((piece) => !SPECIAL.test(piece.trim())).join("")).replace(/\s+/g, " ").trim();
  return found.length > MOST_LETTERS ? `${found.slice(0, MOST_LETTERS - 1)}…` : found;
}

const ENDS = { stop: "finished", length: "reached its token limit", abort: "cancelled", error: "failed", lost: "a beam that others have beaten" };

/** { words, share: how much of its tokens it has, null where that is not known }. */
export function sayProgress({ state, how, sample, samples, tokens, prompt, computed, limit, cached, preemptions }) {
  const number = (value) => value.toLocaleString();
  const words = [];
  if (samples > 1) words.push(`sample ${sample + 1} of ${samples}`);
  const reads = state === "running" && computed < prompt - 1;
  if (state === "ended") words.push(ENDS[how] ?? how, `${number(tokens - prompt)} tokens`);
  else if (reads) words.push(`reading the prompt: ${number(computed)} of ${number(prompt)} tokens`);
  else if (state === "running") words.push(limit ? `${number(tokens - prompt)} of at most ${number(limit - prompt)} tokens` : `${number(tokens - prompt)} tokens`);
  else words.push(`waiting, ${number(prompt)} prompt tokens`);
  if (cached) words.push(`${number(cached)} from the cache`);
  if (preemptions) words.push(`preempted ${preemptions}×`);
  const share = reads ? computed / prompt : limit && state === "running" ? (tokens - prompt) / (limit - prompt) : null;
  return { words: words.join(" · "), share };
}
