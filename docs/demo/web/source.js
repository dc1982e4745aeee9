// Where frames come from: the stream of a server, or a recording out of a file or beside the page.
//
//   connect(view, { headers })         `?replay=URL` plays that recording, otherwise the stream `./v1/view` is followed
//   connect(view, { server: false })   the same without a stream: the page of a static host
//   source.choose(engine)              of several engines, follows another one, from here on
//
// A stream that ends is opened again, later each time; a recording is read whole, so that every moment of it is at hand.

import { FrameError, parseLine } from "./frames.js";
import { History } from "./history.js";

const STREAM = "./v1/view";
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;
const SILENCE_MS = 15_000; // three signs of life
const MOVED = "moved";
const SLICE_MS = 20; // of reading, before the page may draw
const MOST_BYTES = 512 * 2 ** 20;

export function connect(view, { headers = () => ({}), server = true } = {}) {
  const source = new Source(view, headers);
  source.hasServer = server;
  view.source = source;
  const replay = new URLSearchParams(location.search).get("replay");
  source.replays = replay !== null;
  if (source.replays) source.openAddress(replay);
  else if (server) source.follow();
  return source;
}

class Source {
  #view;
  #headers;
  #live = null; // the AbortController of the stream that is followed
  #wake = () => {};
  engine = 0; // the one that is followed
  engines = 1; // how many the server has

  constructor(view, headers) {
    this.#view = view;
    this.#headers = headers;
  }

  /** Follows the server's stream. */
  follow() {
    this.#end();
    const live = new AbortController();
    this.#live = live;
    this.#view.show(new History(), false);
    this.#keepFollowing(live);
  }

  choose(engine) {
    if (engine === this.engine && this.#live) return;
    this.engine = engine;
    this.follow();
  }

  /** Tries at once what waits for its next try, say because there is a key now. */
  retry() {
    this.#wake();
  }

  async openFile(file) {
    await this.#open(file.name, file.size, file.stream());
  }

  async openAddress(address) {
    const url = new URL(address, document.baseURI);
    if (url.origin !== location.origin) {
      this.#view.say(false, `${address} lies on another host; a recording has to lie beside the page`);
      return;
    }
    try {
      const answer = await fetch(url);
      if (!answer.ok) throw new FrameError(`the server answers ${answer.status}`);
      await this.#open(address, Number(answer.headers.get("content-length") ?? 0), answer.body);
    } catch (error) {
      this.#view.say(false, `${address} cannot be played: ${error.message}`);
    }
  }

  #end() {
    this.#live?.abort();
    this.#live = null;
    this.#wake();
  }

  async #open(name, size, stream) {
    try {
      if (size > MOST_BYTES) throw new FrameError(`it has ${size.toLocaleString()} bytes, and this page plays up to ${MOST_BYTES.toLocaleString()}`);
      this.#view.say(true, `Reading ${name}`);
      const history = await readRecording(stream);
      this.#end();
      this.#view.show(history, true);
      this.#view.say(true, `Recording ${name}`);
    } catch (error) {
      this.#view.say(false, `${name} cannot be played: ${error.message}`);
    }
  }

  async #keepFollowing(live) {
    let wait = FIRST_WAIT_MS;
    while (!live.signal.aborted) {
      const { came, why, again } = await this.#followOnce(live.signal);
      if (live.signal.aborted) return;
      if (why === MOVED) continue;
      this.#view.say(false, why);
      if (!again) return;
      wait = came ? FIRST_WAIT_MS : Math.min(LONGEST_WAIT_MS, wait * 2);
      await this.#sleep(wait);
    }
  }

  #sleep(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  /** One connection: whether frames came, why it ended, and whether to try again. */
  async #followOnce(signal) {
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENCE_MS);
    let came = false;
    try {
      const answer = await fetch(this.engine ? `${STREAM}?engine=${this.engine}` : STREAM, { headers: this.#headers(), cache: "no-store", signal: AbortSignal.any([signal, silence.signal]) });
      if (answer.status === 400) this.engine = 0; // the server was started again, with fewer engines
      if (!answer.ok) return { came, ...refusal(answer.status, await wordsOf(answer)) };
      for await (const line of lines(answer.body)) {
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE_MS);
        const frame = parseLine(line, this.#view.history.head);
        if (!frame) continue;
        if (!came) this.#view.say(true, "");
        came = true;
        if (frame.kind === "head") this.engines = frame.engines ?? 1;
        this.#view.apply(frame);
        if (frame.kind !== "note" || (frame.engine ?? this.engine) === this.engine) continue;
        this.engine = frame.engine; // the lesson goes on there; the history stays the same
        return { came, why: MOVED, again: true };
      }
      return { came, why: "The stream ended; it is opened again", again: true };
    } catch (error) {
      const why = error instanceof FrameError ? `The stream is not understood: ${error.message}` : "The server cannot be reached; trying again";
      return { came, why: silence.signal.aborted ? "The server has been silent for 15 s; trying again" : why, again: true };
    } finally {
      clearTimeout(timer);
    }
  }
}

/** Why the server refuses, if it says so. */
async function wordsOf(answer) {
  const body = await answer.json().catch(() => null);
  return typeof body?.error?.message === "string" ? body.error.message : `The server answers ${answer.status}`;
}

function refusal(status, words) {
  if (status === 401 || status === 403) return { why: "The server shows its pool only with a key", again: true };
  if (status === 404) return { why: "There is no stream of a pool here: a server has one unless it was started with --no-inspector", again: false };
  return { why: `${words}; trying again`, again: true };
}

/** The lines of a stream. Between them, where reading has taken its slice, the page may draw. */
async function* lines(stream) {
  let rest = []; // parts of a line whose end has not come yet
  let until = performance.now() + SLICE_MS;
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const found = part.value.split("\n");
      for (const end of found.slice(0, -1)) {
        yield rest.join("") + end;
        rest = [];
        if (performance.now() < until) continue;
        await new Promise((resolve) => setTimeout(resolve));
        until = performance.now() + SLICE_MS;
      }
      rest.push(found.at(-1));
    }
    const last = rest.join("");
    if (last) yield last;
  } finally {
    reader.cancel().catch(() => {}); // the connection may be gone already
  }
}

async function readRecording(stream) {
  const history = new History({ seconds: Infinity, weight: Infinity });
  let broken = null; // only the last line may be: a recording ends where its server did
  for await (const line of lines(stream)) {
    if (broken) throw broken;
    try {
      const frame = parseLine(line, history.head);
      if (frame) history.apply(frame);
    } catch (error) {
      if (!history.state) throw error;
      broken = error;
    }
  }
  if (!history.state) throw new FrameError("it holds no full frame");
  return history;
}
