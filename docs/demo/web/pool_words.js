// The pool in words: what a block is, what happened, and pieces of text that can be seen (spaces, line ends, controls).

import { make } from "./dom.js";
import { letterOf } from "./palette.js";

const inWords = new Intl.NumberFormat(); // made once: it takes longer than a sentence

const plural = (count, word) => `${inWords.format(count)} ${word}${count === 1 ? "" : "s"}`;

export const nameOf = (seq) => `${letterOf(seq)} ${seq}`;

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
  if (tokens !== null && head?.text === false) return [make("span", { class: "muted" }, "text is shown to the admin key alone")];
  if (tokens === null) return [make("span", { class: "muted" }, "text not known")];
  return tokens.map((token) => make("bdi", { class: "token" }, visible(token) || "∅"));
}

const WORDS_OF_KIND = { free: "free", cached: "cached: kept until it is needed", held: "held", shared: "shared" };

/** A block in one sentence. */
export function sayBlock(state, block) {
  const { ref, sealed, digests, tokens, since } = state.blocks;
  const kind = state.kind(block);
  const parts = [`Block ${block}: ${kind === "shared" ? `shared by ${ref[block]}` : WORDS_OF_KIND[kind]}`];
  const owners = state.owners(block);
  if (owners.length) parts.push(owners.slice(0, 8).map(([seq, index]) => `entry ${index} of sequence ${nameOf(seq)}`).join(", "));
  if (owners.length > 8) parts.push(`and ${owners.length - 8} more`);
  if (sealed[block]) parts.push(`sealed, digest ${digests[block] || "not told"}`);
  if (kind !== "free" && since[block]) parts.push(`for ${Math.max(0, state.at - since[block]).toFixed(1)} s`);
  if (tokens[block]) parts.push(`${tokens[block].length} of ${state.head.block_size} tokens`);
  return `${parts.join("; ")}.`;
}

/** Several blocks in one cell. */
export function sayBlocks(state, from, to) {
  const counts = {};
  for (let block = from; block < to; block += 1) counts[state.kind(block)] = (counts[state.kind(block)] ?? 0) + 1;
  const kinds = Object.entries(counts).map(([kind, count]) => `${count} ${kind}`);
  return `Blocks ${from} to ${to - 1} in one cell: ${kinds.join(", ")}.`;
}

const SENTENCES = {
  evict: (block) => `block ${block} was evicted`,
  copy: (from, to, seq) => `block ${from} was copied to ${to}: sequence ${nameOf(seq)} writes its own`,
  preempt: (seq) => `sequence ${nameOf(seq)} was preempted and waits`,
  hit: (seq, tokens, reason) => `sequence ${nameOf(seq)} found ${plural(tokens, "token")} in the cache (${reason})`,
  fork: (seq, child) => `sequence ${nameOf(seq)} forked into ${nameOf(child)}`,
  admit: (seq) => `sequence ${nameOf(seq)} was admitted`,
  note: (text) => text,
};

/** Events in words, the newest first; evictions of one step are one sentence, and what this page does not know is left out. */
export function sayEvents(events) {
  const said = new Set();
  const evicted = Map.groupBy(events.filter(([, , what]) => what === "evict"), ([step]) => step);
  for (const [step, , what, ...details] of events.toReversed()) {
    const many = what === "evict" ? evicted.get(step).length : 1;
    const sentence = many > 1 ? `${plural(many, "block")} were evicted` : SENTENCES[what]?.(...details);
    if (sentence) said.add(`Step ${step}: ${sentence}`);
  }
  return [...said];
}
