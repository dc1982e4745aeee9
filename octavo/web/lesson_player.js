/* Who plays the scenes: the engine of this server (`octavo serve --lesson`), or the recording beside this file. The lesson uses both alike:

    scenes                { scene, title, text, marks } of each; `scene` is its number, from 1
    number                of the scene that is shown
    isRunning, isOver     whether the picture moves; whether the scene has come to its end
    play(number), pause(), resume(), leave()

A scene that is over shows the last moment at which blocks were in use: after it the pool would be empty. */

import { getJson, postJson } from "./api.js";

const RECORDING = "./web/lesson.ndjson";
const LATE_MS = 10_000; // how long the stream may take to tell the end of a scene that is over

export async function openPlayer(view) {
  await serverKnown(view);
  const isEngines = Boolean(view.history.head?.lesson) && !view.recorded;
  return isEngines ? new EnginePlayer(view, (await getJson("./v1/lesson")).data) : openRecordedPlayer(view);
}

let recording = null; // the history of the recorded lesson, once it was read

export const showsLesson = (view) => view.history === recording;

export async function openRecordedPlayer(view) {
  if (!showsLesson(view)) {
    await view.source.openAddress(RECORDING);
    if (!view.recorded || !view.status.ok) throw new Error(view.status.text);
    recording = view.history;
  }
  return new RecordedPlayer(view);
}

/** Until the server has said what it is, or cannot be reached. */
function serverKnown(view) {
  return until(view, () => view.history.head || !view.status.ok || !view.source.hasServer);
}

/** Resolves once this holds, which is looked at with all that happens in the view, or when so many milliseconds are over. */
async function until(view, holds, milliseconds = 0) {
  if (holds()) return;
  await new Promise((resolve) => {
    const end = () => {
      leave();
      clearTimeout(timer);
      resolve();
    };
    const leave = view.on(() => holds() && end());
    const timer = milliseconds ? setTimeout(end, milliseconds) : null;
  });
}

class RecordedPlayer {
  about = "This is a recording. octavo serve --lesson plays the scenes on your own machine.";
  #view;
  #ends; // the moment at which each scene stops
  #ignore;

  constructor(view) {
    const { history } = view;
    this.#view = view;
    this.scenes = history.notes.filter(({ scene }, index, notes) => scene && scene !== notes[index - 1]?.scene); // told again where an engine dies
    this.#ends = this.scenes.map(({ at }, index) => lastInUse(history, at, this.scenes[index + 1]?.at ?? history.last));
    this.#ignore = view.on(() => this.#stopAtEnd());
  }

  get number() {
    return this.#view.state?.note?.scene ?? 1;
  }

  get isRunning() {
    return this.#view.running;
  }

  get isOver() {
    return this.#view.moment >= this.#ends[this.number - 1];
  }

  play(number) {
    this.#view.seek(this.scenes[number - 1].at);
    this.#view.resume();
  }

  pause() {
    this.#view.pause();
  }

  resume() {
    this.#view.resume();
  }

  /** The last moment of a scene, standing still. */
  showEnd(number) {
    this.#view.pause();
    this.#view.seek(this.#ends[number - 1]);
  }

  leave() {
    this.#ignore();
    this.#view.pause();
    if (this.#view.source.hasServer) this.#view.source.follow();
  }

  #stopAtEnd() {
    if (this.isRunning && this.isOver) this.showEnd(this.number);
  }
}

class EnginePlayer {
  about = "The engines of this server play these scenes.";
  number = 1;
  isOver = false;
  #view;
  #home; // the engine that was shown before the lesson
  #playing = null; // an AbortController

  constructor(view, scenes) {
    this.#view = view;
    this.#home = view.source.engine;
    this.scenes = scenes;
  }

  get isRunning() {
    return this.#playing !== null && this.#view.time === "live";
  }

  /** Resolves when the scene is over, or when another one is played instead. */
  async play(number) {
    this.#playing?.abort();
    const playing = new AbortController();
    const from = this.#view.history.last;
    Object.assign(this, { number, isOver: false });
    this.#playing = playing;
    this.#view.resume();
    try {
      await postJson(`./v1/lesson/${number}`, playing.signal);
      await until(this.#view, () => this.#playing !== playing || this.#isTold(from), LATE_MS);
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    } finally {
      if (this.#playing === playing) this.#end(from);
    }
  }

  /** Whether the picture has come to the end of the scene: its blocks were in use and are free again. The stream tells this later than
   * the answer to the request comes. */
  #isTold(from) {
    const { history } = this.#view;
    return !this.isRunning || (!isInUse(history.state) && lastInUse(history, from, history.last) > from);
  }

  #end(from) {
    const { history } = this.#view;
    const wasRunning = this.isRunning;
    this.#playing = null;
    this.isOver = true;
    if (!wasRunning) return; // it was paused before, and stays there
    this.#view.pause();
    this.#view.seek(lastInUse(history, from, history.last));
  }

  /** The picture stands still. The engine goes on, and so does the picture from where the engine is then. */
  pause() {
    this.#view.pause();
  }

  resume() {
    this.#view.resume();
  }

  leave() {
    const playing = this.#playing;
    this.#playing = null;
    playing?.abort();
    this.#view.resume();
    this.#view.source.choose(this.#home);
  }
}

/** Whether a sequence has blocks. */
function isInUse(state) {
  return state !== null && [...state.seqs.values()].some(({ table }) => table.length);
}

/** The last moment between two at which a sequence had blocks. */
function lastInUse(history, from, until) {
  let moment = history.neighbour(until, -1);
  while (moment > from && !isInUse(history.at(moment))) moment = history.neighbour(moment, -1);
  return moment;
}
