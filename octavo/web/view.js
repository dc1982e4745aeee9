// What the page looks at: a history, a moment of it, and what is selected. Everything that draws listens here.
//
//   live:       time is "live" and follows the newest frame; pause() keeps the moment, resume() goes back to "live"
//   recorded:   the whole recording is in the history at once; resume() lets the moment run on, at its speed
//
// A listener hears what changed: "frame", "time", "selection" or "status".

import { History } from "./history.js";

const TICK_MS = 50;

export function createView() {
  return new View();
}

class Selection {
  #tell;
  #chosen = {};

  constructor(tell) {
    this.#tell = tell;
  }

  get seq() {
    return this.#chosen.seq;
  }

  get request() {
    return this.#chosen.request;
  }

  get block() {
    return this.#chosen.block;
  }

  get() {
    return { ...this.#chosen };
  }

  /** `{seq}` or `{request}`, with or without `{block}`; `{}` selects nothing. */
  set(chosen) {
    this.#chosen = { ...chosen };
    this.#tell("selection");
  }
}

class View {
  #listeners = new Set();
  #clock = null;
  #heard = 0; // when the last frame of a live stream came, by this page's clock

  constructor() {
    this.history = new History();
    this.selection = new Selection((what) => this.tell(what));
    this.time = "live";
    this.recorded = false;
    this.speed = 1;
    this.status = { ok: true, text: "" };
    this.source = null; // set by source.js: what opens a recording or goes back to the server
  }

  on(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  tell(what) {
    for (const listener of this.#listeners) listener(what);
  }

  say(ok, text) {
    this.status = { ok, text };
    this.tell("status");
  }

  /** The state of the moment looked at; null before the first full frame. */
  get state() {
    return this.time === "live" ? this.history.state : this.history.at(this.moment);
  }

  get moment() {
    const { first, last } = this.history;
    return this.time === "live" ? last : Math.min(last, Math.max(first, this.time));
  }

  /** The present, by the engine's clock: a live stream says nothing while nothing changes or a step takes long. */
  get now() {
    return this.isLive ? this.history.last + (performance.now() - this.#heard) / 1000 : this.moment;
  }

  /** Whether what is shown is the present. */
  get isLive() {
    return this.time === "live" && !this.recorded && this.status.ok && this.state !== null;
  }

  /** Whether what is shown is the last that was known of an engine that cannot be seen any more. */
  get isStale() {
    return this.time === "live" && !this.recorded && !this.status.ok && this.state !== null;
  }

  get running() {
    return this.recorded ? this.#clock !== null : this.time === "live";
  }

  /** A frame of a live stream. */
  apply(frame) {
    this.history.apply(frame);
    this.#heard = performance.now();
    this.tell("frame");
  }

  /** Another history: a recording, from its beginning, or an empty one for a live stream. */
  show(history, recorded) {
    this.#stop();
    this.history = history;
    this.recorded = recorded;
    this.selection.set({});
    this.time = recorded ? history.first : "live";
    if (recorded) this.resume();
    this.tell("frame");
  }

  pause() {
    this.time = this.moment;
    this.#stop();
    this.tell("time");
  }

  resume() {
    if (!this.recorded) this.time = "live";
    else if (!this.#clock) this.#run();
    this.tell("time");
  }

  seek(moment) {
    const running = this.#clock !== null;
    this.#stop();
    this.time = moment;
    this.time = this.moment;
    if (running && this.moment < this.history.last) this.#run(); // at its end it stays there
    this.tell("time");
  }

  step(direction) {
    const from = this.moment;
    this.pause();
    this.seek(this.history.neighbour(from, direction));
  }

  #run() {
    if (this.moment >= this.history.last) this.time = this.history.first;
    let before = performance.now();
    this.#clock = setInterval(() => {
      const now = performance.now();
      this.time = this.moment + ((now - before) / 1000) * this.speed;
      before = now;
      if (this.time >= this.history.last) this.pause();
      else this.tell("time");
    }, TICK_MS);
  }

  #stop() {
    clearInterval(this.#clock);
    this.#clock = null;
  }
}
