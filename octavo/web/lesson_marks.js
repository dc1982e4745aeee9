/* The marks of a scene, each drawn as it is in the picture and explained in one sentence. Scenes name the marks that they use. */

import { make } from "./dom.js";

const MARKS = {
  held: ["A", "The letter and the colour name the sequence that uses a block. A sequence is a prompt and its answer."],
  fill: ["", "The height of the colour shows how full a block is."],
  sealed: ["", "A marked corner means that the block is full. It then has a digest, by which it can be found again."],
  write: ["A", "This thin frame flashes where a token was just written."],
  cached: ["", "A block with a line is cached: nobody uses it, and its content is still there."],
  hit: ["C", "This frame marks blocks that a request found in the cache."],
  shared: ["×4", "The number says how many sequences share a block."],
  copy: ["→", "The arrow goes from the shared block to its copy."],
  preempt: ["C", "This frame marks blocks that a preempted request gave back."],
  evict: ["", "A cross marks a cached block that was evicted: its content is gone."],
  states: ["", "The line below the pool counts the slots of states. Requests can start from a checkpoint."],
  prefill: ["", "These bars in the timeline are prompt tokens, computed in one step (prefill)."],
  decode: ["", "These bars are answer tokens (decode)."],
};

/** List items; a name that this page does not know is left out. */
export function explain(names = []) {
  return names.filter((name) => Object.hasOwn(MARKS, name)).map((name) => {
    const [letter, words] = MARKS[name];
    return make("li", {}, make("span", { class: `mark mark-${name}`, "aria-hidden": "true" }, letter), words);
  });
}
