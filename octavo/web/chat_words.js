/* What is said of an answer: its figures, and why its prompt was or was not in the cache. */

export const REASONS = {
  end: "Every full block of this prompt was in the cache; only its last tokens were computed.",
  short: "The prompt does not fill one block, and only full blocks are kept.",
  differs: "The cached beginning ends where this prompt says something else than those before it.",
  evicted: "The rest had been in the cache, and was evicted to make room.",
  cold: "Nothing that was seen before begins like this prompt.",
  off: "The prefix cache is off.",
};
const FEW = 0.5; // of the prompt

export function figures(answer) {
  const said = [];
  if (answer.tokens !== undefined) said.push(count(answer.tokens, "token"));
  if (answer.rate) said.push(`${answer.rate.toFixed(answer.rate < 100 ? 1 : 0)} tokens/s`);
  if (answer.first !== undefined) said.push(`first after ${seconds(answer.first)}`);
  if (answer.preemptions) said.push(`preempted ${answer.preemptions === 1 ? "once" : `${answer.preemptions} times`}`);
  if (answer.end === "length") said.push("ended by its length");
  if (answer.end === "stopped") said.push("stopped");
  return said.join(" · ");
}

export function cacheWords(answer) {
  if (answer.cached === undefined || !answer.prompt) return "";
  const said = `${answer.cached} of ${count(answer.prompt, "prompt token")} came from the cache.`;
  const why = answer.cached < FEW * answer.prompt ? REASONS[answer.reason] : undefined;
  return why ? `${said} ${why}` : said;
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
}
