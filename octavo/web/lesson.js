/* The lesson: its scenes in a row, played by the server's own engine (`octavo serve --lesson`) or out of the recording beside this file.

A recording knows its scenes by their captions, so a button there goes to its moment; the caption itself stands over the pool. */

import { getJson, postJson } from "./api.js";
import { button, make } from "./dom.js";

const RECORDING = "./web/lesson.ndjson";
const PAUSE_MS = 2500; // between two scenes, to read on

export function mountLesson(element, opener, view) {
  const lesson = new Lesson(element, view);
  opener.addEventListener("click", () => (element.hidden ? lesson.open() : lesson.close()));
  return lesson;
}

class Lesson {
  #view;
  #element;
  #scenes = []; // { scene, title }
  #live = false;
  #playing = null; // an AbortController, while the engine plays

  constructor(element, view) {
    this.#element = element;
    this.#view = view;
    this.list = make("ol", { class: "scenes" });
    this.all = button("Play all", () => this.#playAll());
    this.stop = button("Stop", () => this.#stop());
    this.said = make("p", { class: "muted", role: "status" });
    element.append(this.list, make("div", { class: "row" }, this.all, this.stop, button("Close the lesson", () => this.close())), this.said);
    view.on(() => this.#mark());
  }

  async open() {
    this.#element.hidden = false;
    await this.#serverKnown();
    this.#live = Boolean(this.#view.history.head?.lesson) && !this.#view.recorded;
    try {
      if (this.#live) this.#scenes = (await getJson("./v1/lesson")).data;
      else await this.#openRecording();
      this.#write();
    } catch (error) {
      this.said.textContent = error.message;
    }
  }

  /** Until a server has said what it is, or cannot be had. */
  async #serverKnown() {
    const known = () => this.#view.history.head || !this.#view.status.ok;
    if (known()) return;
    await new Promise((resolve) => {
      const leave = this.#view.on(() => {
        if (!known()) return;
        leave();
        resolve();
      });
    });
  }

  close() {
    this.#stop();
    this.#element.hidden = true;
    if (!this.#live && this.#view.recorded) this.#view.source.follow();
  }

  async #openRecording() {
    await this.#view.source.openAddress(RECORDING);
    this.#scenes = this.#view.history.notes.filter((note) => note.scene);
    this.said.textContent = "A recording of the lesson. octavo serve --lesson plays it on your own machine.";
  }

  #write() {
    this.all.hidden = this.stop.hidden = !this.#live;
    this.stop.disabled = true;
    this.list.replaceChildren(...this.#scenes.map((scene) => make("li", {}, button(scene.title, () => this.#go(scene)))));
    this.#mark();
  }

  /** The scene that is being told is marked. */
  #mark() {
    const now = this.#view.state?.note?.scene;
    [...this.list.children].forEach((item, index) => {
      if (this.#scenes[index].scene === now) item.firstChild.setAttribute("aria-current", "step");
      else item.firstChild.removeAttribute("aria-current");
    });
  }

  async #go(scene) {
    if (this.#live) {
      await this.#play([scene]);
      return;
    }
    this.#view.seek(scene.at);
    this.#view.resume();
  }

  #playAll() {
    return this.#play(this.#scenes);
  }

  #stop() {
    this.#playing?.abort();
  }

  async #play(scenes) {
    this.#stop();
    const playing = new AbortController();
    this.#playing = playing;
    this.#view.resume();
    this.stop.disabled = false;
    this.said.textContent = "";
    try {
      for (const [number, { scene }] of scenes.entries()) {
        if (number) await pause(PAUSE_MS, playing.signal);
        await postJson(`./v1/lesson/${scene}`, playing.signal);
      }
    } catch (error) {
      if (error.name !== "AbortError") this.said.textContent = error.message;
    }
    if (this.#playing === playing) this.stop.disabled = true;
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("stopped", "AbortError"));
    });
  });
}
