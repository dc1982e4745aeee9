// The pool in words: what a block is, what happened, and pieces of text that can be seen (spaces, line ends, controls).

import { make } from "./dom.js";
import { letterOf } from "./palette.js";

const MOST_LETTERS = 12; // of those that share a block
const inWords = new Intl.NumberFormat(); // made once: it takes longer than a sentence

const plural = (count, word) => `${inWords.format(count)} ${word}${count === 1 ? "" : "s"}`;

export const nameOf = (seq) => `${letterOf(seq)} (sequence ${seq})`;

/** Control characters as their pictures, so that text stays on its line and nothing is hidden in it. */
export function visible(text) {
  return text
    .replaceAll("\n", "⏎")
    .replaceAll("\t", "⇥")
    .replace(/[\u0000-\u001f]/g, (found) => String.fromCharCode(0x2400 + found.charCodeAt(0)))
    .replace(/[\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g, "␦");
}

/** Tokens side by side, each one visible as such. */
export function tokenList(tokens, head) {
  if (tokens !== null && head?.text === false) return [make("span", { class: "muted" }, "The text is hidden. It is shown with the server's admin key, or by a server without a key on your own machine.")];
  if (tokens === null) return [make("span", { class: "muted" }, "text not known")];
  return tokens.map((token) => make("bdi", { class: "token" }, visible(token) || "∅"));
}

const WORDS_OF_KIND = { free: "free", cached: "cached, until its room is needed", held: "in use", pinned: "pinned, so it stays in the cache" };

/** The sequences that have a block at the same place of their tables. */
function sayOwners([index, owners]) {
  if (owners.length === 1) return `entry ${index} of ${nameOf(owners[0][0])}`;
  const letters = owners.slice(0, MOST_LETTERS).map(([seq]) => letterOf(seq)).join(", ");
  const rest = owners.length - MOST_LETTERS;
  return `entry ${index} of ${letters}${rest > 0 ? ` and ${inWords.format(rest)} more` : ""}`;
}

/** A block in one sentence. */
export function sayBlock(state, block) {
  const { sealed, pins, digests, tokens, since } = state.blocks;
  const kind = state.kind(block);
  const parts = [`Block ${block}: ${kind === "shared" ? `shared by ${state.users(block)}` : WORDS_OF_KIND[kind]}`];
  const owners = state.owners(block);
  if (owners.length) parts.push(...Array.from(Map.groupBy(owners, ([, index]) => index), sayOwners));
  if (pins[block] && kind !== "pinned") parts.push("pinned");
  if (sealed[block]) parts.push(`full, digest ${digests[block] || "not known"}`);
  if (kind !== "free" && since[block]) parts.push(`for ${Math.max(0, state.at - since[block]).toFixed(1)} s`);
  if (tokens[block]) parts.push(`${tokens[block].length} of ${state.head.block_size} tokens`);
  return `${parts.join("; ")}.`;
}

/** The blocks of one cell, from the first up to, not including, the second. */
export function sayBlocks(state, from, to) {
  if (to - from === 1) return sayBlock(state, from);
  const counts = {};
  for (let block = from; block < to; block += 1) counts[state.kind(block)] = (counts[state.kind(block)] ?? 0) + 1;
  const kinds = Object.entries(counts).map(([kind, count]) => `${count} ${kind === "held" ? "in use" : kind}`);
  return `Blocks ${from} to ${to - 1} in one cell: ${kinds.join(", ")}.`;
}

const SENTENCES = {
  evict: (block) => `cached block ${block} was evicted to make room`,
  copy: (from, to, seq) => `block ${from} was copied to ${to}, because ${nameOf(seq)} writes into it and others share it`,
  preempt: (seq) => `${nameOf(seq)} was preempted: it gave its blocks back and waits`,
  hit: (seq, tokens) => `${nameOf(seq)} found ${plural(tokens, "token")} of its prompt in the cache`,
  fork: (seq, child) => `${nameOf(seq)} was split: ${nameOf(child)} is another sample of its prompt`,
  admit: (seq) => `${nameOf(seq)} started`,
  pin: (blocks, tokens) => `a prefix of ${plural(tokens, "token")} was pinned and stays in the cache, in ${plural(blocks, "block")}`,
  unpin: (blocks, tokens) => `a pinned prefix of ${plural(tokens, "token")} was released`,
  note: (text) => text,
};

/** Events in words, the newest first; evictions of one step are one sentence, and what this page does not know is left out. */
export function sayEvents(events) {
  const said = new Set();
  const evicted = Map.groupBy(events.filter(([, , what]) => what === "evict"), ([step]) => step);
  for (const [step, , what, ...details] of events.toReversed()) {
    const many = what === "evict" ? evicted.get(step).length : 1;
    const sentence = many > 1 ? `${plural(many, "cached block")} were evicted to make room` : SENTENCES[what]?.(...details);
    if (sentence) said.add(`Step ${step}: ${sentence}`);
  }
  return [...said];
}
