/* What is said about an answer: its figures, and why its prompt was or was not in the cache. */

export const REASONS = {
  end: "Every full block of this prompt was cached. Only the last tokens were computed.",
  short: "The prompt does not fill one block, and only full blocks are cached.",
  no_state: "More of it was cached, but no state of the recurrent layers was kept after it.",
  state_evicted: "More of it was cached, but the state of the recurrent layers after it was evicted to make room.",
  differs: "From there on, this prompt is different from the ones before it.",
  evicted: "The rest had been cached, but was evicted to make room.",
  cold: "No earlier prompt begins like this one.",
  off: "The prefix cache is off.",
};

/** `model`: its entry in /v1/models, where it is known. */
export function figures(answer, model) {
  const said = [];
  if (answer.tokens !== undefined) said.push(count(answer.tokens, "token"));
  if (answer.rate) said.push(`${answer.rate.toFixed(answer.rate < 100 ? 1 : 0)} tokens/s`);
  if (answer.first !== undefined) said.push(`first token after ${seconds(answer.first)}`);
  if (answer.preemptions) said.push(`preempted ${answer.preemptions === 1 ? "once" : `${answer.preemptions} times`}`);
  if (answer.end === "length") said.push(answer.total >= model?.max_model_len ? "the context is full" : "max tokens reached");
  if (answer.end === "stopped") said.push("stopped");
  if (!answer.end && !answer.error) said.push("not finished: another tab may still be answering");
  return said.join(" · ");
}

/** `common`: how many tokens were in the cache, where that is more than could be continued. */
function reasonWords(reason, common) {
  const known = (common ?? 0).toLocaleString("en");
  if (common && reason === "no_state") return `${known} were in the cache, but no state of the recurrent layers was kept after the rest of them.`;
  if (common && reason === "state_evicted") return `${known} were in the cache, but the next state of the recurrent layers was evicted to make room.`;
  return REASONS[reason] ?? "";
}

/** { short, long } about the prompt's cached tokens; null where the server did not say. */
export function cacheWords({ cached, prompt, reason, common }) {
  if (cached === undefined || !prompt) return null;
  const short = `${cached.toLocaleString("en")} of ${prompt.toLocaleString("en")} cached`;
  const long = `${cached.toLocaleString("en")} of ${count(prompt, "prompt token")} came from the cache. ${reasonWords(reason, common)}`;
  return { short, long: long.trim() };
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
}
