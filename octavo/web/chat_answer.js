/* One answer, from the question to its last token: the stream taken in, times measured here, tokens counted by the server.

An answer is a message of the assistant: content, reasoning, request (the id its sequence has in the pool), and the figures: tokens,
first (ms until the first token), rate (tokens/s after it), prompt, cached, reason, preemptions, end ("stop", "length", "stopped"), error.
One that was cut off can go on: then the figures of its prompt are those of the last request, and its tokens those of all. */

import { ApiError, getJson, streamChat } from "./api.js";

const MOST_CHARACTERS = 4_000_000; // of one answer: nobody reads on
const MOST_TOKENS = 512; // of one answer, unless the settings say otherwise: a small model may repeat itself without end
const TOO_LONG = "context_length_exceeded";

/** The limit of an answer if the settings have none; undefined: the rest of the context. `model`: its entry in /v1/models. */
export function defaultLimit(model) {
  return model?.defaults.max_tokens ?? (model?.max_model_len <= MOST_TOKENS ? undefined : MOST_TOKENS);
}

/** Whether more of this answer can be asked for: it was cut off, and there is room for more. */
export function canGoOn({ content, reasoning, end, error, total }, model) {
  const isCut = error ? error.code !== TOO_LONG : end === "length" || end === "stopped";
  return Boolean(content || reasoning) && isCut && !(total >= model?.max_model_len);
}

/** Fills `answer` in, or goes on with it if it has begun; `changed` is called as it grows. Never throws: what goes wrong is the answer's error. */
export async function takeAnswer(conversation, answer, model, signal, changed) {
  const [clock, before] = [new Clock(), answer.tokens ?? 0];
  for (const name of ["request", "end", "error"]) delete answer[name];
  try {
    for await (const chunk of chunksOf(conversation, answer, model, signal)) {
      takeChunk(answer, chunk, clock, before);
      changed();
      if (answer.content.length > MOST_CHARACTERS) throw new ApiError("The answer is too long for this page.");
    }
    answer.end ??= "stop";
  } catch (error) {
    if (signal.aborted) answer.end = "stopped";
    else answer.error = told(error);
    await takeRecord(answer, before);
  }
  clock.measure(answer, before);
  changed();
}

/** With the default limit, unless the context has less room than that: then with all that is left. */
async function* chunksOf(conversation, answer, model, signal) {
  const body = bodyOf(conversation, answer);
  const limit = defaultLimit(model);
  try {
    yield* streamChat({ max_tokens: limit, ...body }, signal);
  } catch (error) {
    if (error.code !== TOO_LONG || limit === undefined || body.max_tokens !== undefined) throw error;
    yield* streamChat(body, signal);
  }
}

function bodyOf(conversation, answer) {
  const before = conversation.messages.slice(0, conversation.messages.indexOf(answer));
  const turns = before.filter(({ content, error }) => content || !error).map(({ role, content }) => ({ role, content }));
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const { content, reasoning } = answer;
  const begun = content || reasoning ? [{ role: "assistant", content, ...(reasoning && { reasoning_content: reasoning }) }] : [];
  const asked = { messages: [...system, ...turns, ...begun], stream: true, stream_options: { include_usage: true }, include_timings: true };
  return { ...asked, ...(begun.length && { chat_template_kwargs: { continue_final_message: true } }), ...conversation.sampling };
}

function takeChunk(answer, chunk, clock, before) {
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
    answer.tokens = before + chunk.usage.completion_tokens;
    answer.prompt = chunk.usage.prompt_tokens;
    answer.total = chunk.usage.total_tokens;
    answer.cached = chunk.usage.prompt_tokens_details?.cached_tokens;
  }
  if (chunk.timings) {
    answer.reason = chunk.timings.hit_reason;
    answer.common = chunk.timings.common_tokens;
    answer.preemptions = chunk.timings.preemptions;
  }
}

/** Of an answer that was cut short the server's record knows what its last chunk would have said. */
async function takeRecord(answer, before) {
  if (!answer.request) return;
  try {
    const [prompt] = (await getJson(`./v1/requests/${encodeURIComponent(answer.request)}`)).prompts;
    answer.tokens = before + prompt.samples[0].generated_tokens;
    [answer.prompt, answer.cached, answer.total] = [prompt.prompt_tokens, prompt.cached_tokens, prompt.prompt_tokens + prompt.samples[0].generated_tokens];
    [answer.reason, answer.common, answer.preemptions] = [prompt.hit_reason, prompt.common_tokens, prompt.preemptions];
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

  measure(answer, before) {
    if (this.#first === null) return;
    if (!before) answer.first = this.#first - this.#asked;
    const seconds = (this.#last - this.#first) / 1000;
    const tokens = answer.tokens - before;
    if (tokens > 1 && seconds > 0) answer.rate = (tokens - 1) / seconds;
  }
}
