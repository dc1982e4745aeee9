/* The server, as this page asks it: JSON, streams of events, and errors as the server says them.

A 401 asks for the key once and goes on; whoever called need not know. */

import { askForKey, authHeaders } from "./key.js";

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter; // seconds
  }

  /** Worth another try: it came too early, there were too many, or nobody heard it. */
  get isPassing() {
    return this.status === 0 || this.status === 429 || this.status === 503;
  }
}

/** What the server says of itself: "ready", "loading", "draining", "dead". "unreachable": nobody answers; "absent": somebody else does. */
export async function askHealth() {
  let answer;
  try {
    answer = await fetch("./health", { cache: "no-store" });
  } catch {
    return "unreachable";
  }
  try {
    return String((await answer.json()).status ?? "absent");
  } catch {
    return "absent"; // a host of plain files
  }
}

/** How many engines the server has and how many are ready, as { ready, all }; null if it does not say. */
export async function askEngines() {
  try {
    return (await (await fetch("./health", { cache: "no-store" })).json()).engines ?? null;
  } catch {
    return null;
  }
}

export async function getJson(path) {
  return (await ask(path, {})).json();
}

/** Asks for something to be done, and waits until it is. */
export async function postJson(path, signal) {
  return (await ask(path, { method: "POST", signal })).json();
}

/** The chunks of an answer as they come. An error in mid-stream is thrown, and so is an end that is none. */
export async function* streamChat(body, signal) {
  const headers = { "content-type": "application/json" };
  const answer = await ask("./v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(String(chunk.error.message), { status: answer.status, code: chunk.error.code });
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

async function ask(path, options) {
  for (let again = true; ; again = false) {
    const answer = await reach(path, { ...options, headers: { ...options.headers, ...authHeaders() } });
    if (answer.ok) return answer;
    const error = await errorOf(answer);
    if (answer.status !== 401 || !again || !(await askForKey())) throw error;
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, { ...options, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
}

async function errorOf(answer) {
  const retryAfter = Number(answer.headers.get("retry-after")) || null;
  let said = {};
  try {
    said = (await answer.json()).error ?? {};
  } catch {
    // a proxy's page, or nothing
  }
  return new ApiError(String(said.message ?? `The server answered ${answer.status}.`), { status: answer.status, code: said.code, retryAfter });
}

/** The data of each event of a stream, wherever its bytes were cut. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pieces = []; // of the event that has not ended: joined once, however many there are
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      pieces.push(value);
      if (!value.includes("\n")) continue;
      const parts = pieces.join("").split("\n\n");
      pieces = [parts.pop()];
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost before the answer ended.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
