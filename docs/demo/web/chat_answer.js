/* One answer, from the question to its last token: the stream taken in, times measured here, tokens counted by the server.

An answer is a message of the assistant: content, reasoning, request (the id its sequence has in the pool), and the figures: tokens,
first (ms until the first token), rate (tokens/s after it), prompt, cached, reason, preemptions, end ("stop", "length", "stopped"), error. */

import { ApiError, getJson, streamChat } from "./api.js";

const MOST_CHARACTERS = 4_000_000; // of one answer: nobody reads on

/** Fills `answer` in; `changed` is called as it grows. Never throws: what goes wrong is the answer's error. */
export async function takeAnswer(conversation, answer, signal, changed) {
  const clock = new Clock();
  try {
    for await (const chunk of streamChat(bodyOf(conversation, answer), signal)) {
      takeChunk(answer, chunk, clock);
      changed();
      if (answer.content.length > MOST_CHARACTERS) throw new ApiError("The answer is too long for this page.");
    }
    answer.end ??= "stop";
  } catch (error) {
    if (signal.aborted) answer.end = "stopped";
    else answer.error = told(error);
    await takeRecord(answer);
  }
  clock.measure(answer);
  changed();
}

function bodyOf(conversation, answer) {
  const before = conversation.messages.slice(0, conversation.messages.indexOf(answer));
  const turns = before.filter(({ content, error }) => content || !error).map(({ role, content }) => ({ role, content }));
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const asked = { messages: [...system, ...turns], stream: true, stream_options: { include_usage: true }, include_timings: true };
  return { ...asked, ...conversation.sampling };
}

function takeChunk(answer, chunk, clock) {
  answer.request ??= chunk.id;
  const [choice] = chunk.choices;
  if (choice) {
    const { content = "", reasoning_content: reasoning = "" } = choice.delta;
    if (content || reasoning) clock.tick();
    answer.content += content ?? "";
    if (reasoning) answer.reasoning = (answer.reasoning ?? "") + reasoning;
    if (choice.finish_reason) answer.end = choice.finish_reason;
  }
  if (chunk.usage) {
    answer.tokens = chunk.usage.completion_tokens;
    answer.prompt = chunk.usage.prompt_tokens;
    answer.cached = chunk.usage.prompt_tokens_details?.cached_tokens;
  }
  if (chunk.timings) {
    answer.reason = chunk.timings.hit_reason;
    answer.preemptions = chunk.timings.preemptions;
  }
}

/** Of an answer that was cut short the server's record knows what its last chunk would have said. */
async function takeRecord(answer) {
  if (!answer.request) return;
  try {
    const [prompt] = (await getJson(`./v1/requests/${encodeURIComponent(answer.request)}`)).prompts;
    answer.tokens = prompt.samples[0].generated_tokens;
    [answer.prompt, answer.cached] = [prompt.prompt_tokens, prompt.cached_tokens];
    [answer.reason, answer.preemptions] = [prompt.hit_reason, prompt.preemptions];
  } catch {
    // the server is gone, or has forgotten it: there are no figures
  }
}

function told(error) {
  const { status = 0, code = null, retryAfter = null } = error;
  return { message: String(error.message), status, code, retryAfter, passing: error instanceof ApiError && error.isPassing };
}

class Clock {
  #asked = performance.now();
  #first = null;
  #last = null;

  tick() {
    this.#last = performance.now();
    this.#first ??= this.#last;
  }

  measure(answer) {
    if (this.#first === null) return;
    answer.first = this.#first - this.#asked;
    const seconds = (this.#last - this.#first) / 1000;
    if (answer.tokens > 1 && seconds > 0) answer.rate = (answer.tokens - 1) / seconds;
  }
}
