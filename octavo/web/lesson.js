/* The lesson: short scenes that show how paging works, with one stepper. While it is open, pool and caption have the page to themselves.

Arrow keys go from scene to scene, Escape closes it. */

import { button, make } from "./dom.js";
import { explain } from "./lesson_marks.js";
import { openPlayer } from "./lesson_player.js";

/** `changed(isOpen)` is called whenever it opens or closes. */
export function mountLesson(element, opener, view, changed = () => {}) {
  const lesson = new Lesson(element, opener, view, changed);
  opener.addEventListener("click", () => (lesson.isOpen ? lesson.close() : lesson.open()));
  document.addEventListener("keydown", (event) => lesson.key(event), { capture: true }); // before others: Escape may be meant for them
  return lesson;
}

class Lesson {
  #element;
  #opener;
  #view;
  #changed;
  #player = null; // while it is open and the scenes are known
  #history = null; // what the player plays
  #written = null; // the scene that is on the page
  #parts = {
    count: make("p", { class: "lesson-count" }),
    bars: make("ol", { class: "scenes", "aria-label": "Scenes" }),
    caption: make("div", { class: "lesson-caption", role: "status" }),
    marks: make("ul", { class: "lesson-marks", "aria-label": "Marks in this scene" }),
    previous: button("Previous", () => this.#step(-1)),
    play: button("Play", () => this.#playOrPause()),
    next: button("Next", () => this.#step(1), { class: "primary" }),
    said: make("p", { class: "lesson-said", role: "status" }), // what went wrong
    about: make("span"),
  };

  constructor(element, opener, view, changed) {
    this.#element = element;
    this.#opener = opener;
    this.#view = view;
    this.#changed = changed;
    const { count, bars, caption, marks, previous, play, next, said, about } = this.#parts;
    element.tabIndex = -1;
    element.append(
      make("div", { class: "lesson-head" }, count, bars, button("Close", () => this.close(), { "aria-label": "Close the lesson" })),
      make("div", { class: "lesson-controls", role: "group", "aria-label": "Scene" }, previous, play, next),
      caption,
      marks,
      said,
      make("p", { class: "muted lesson-about" }, about, make("span", { class: "lesson-keys" }, " The arrow keys ← and → go from scene to scene, Escape closes the lesson.")),
    );
    view.on(() => this.#draw());
  }

  get isOpen() {
    return !this.#element.hidden;
  }

  async open() {
    if (this.isOpen) return;
    this.#show(true);
    this.#element.focus();
    this.#say("");
    try {
      const player = await openPlayer(this.#view);
      if (!this.isOpen) return; // closed meanwhile
      this.#player = player;
      this.#history = this.#view.history;
    } catch (error) {
      this.#say(error.message);
      return;
    }
    this.#parts.about.textContent = this.#player.about;
    this.#written = null;
    this.#parts.bars.replaceChildren(...this.#player.scenes.map(({ scene, title }) => make("li", {}, button("", () => this.#go(scene), { "aria-label": `Scene ${scene}: ${title}` }))));
    this.#go(1);
  }

  close() {
    const player = this.#player;
    this.#player = null;
    player?.leave();
    this.#show(false);
    this.#opener.focus();
  }

  key(event) {
    if (!this.isOpen || event.ctrlKey || event.metaKey || event.altKey) return;
    const isIn = (selector) => event.target.closest?.(selector);
    if (isIn("input, select, textarea, dialog")) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (steps && !isIn("[role=application]")) this.#step(steps); // there the arrow keys go from block to block
    else if (event.key === "Escape" && !Object.keys(this.#view.selection.get()).length) this.close(); // else it ends the selection
    else return;
    event.preventDefault();
  }

  #show(open) {
    this.#element.hidden = !open;
    this.#opener.hidden = open;
    document.body.toggleAttribute("data-lesson", open);
    this.#changed(open);
  }

  #say(text) {
    this.#parts.said.textContent = text;
  }

  /** After the last scene, on means close. */
  #step(by) {
    const to = (this.#player?.number ?? 0) + by;
    if (to > this.#player?.scenes.length) this.close();
    else if (to >= 1) this.#go(to);
  }

  async #go(number) {
    const player = this.#player;
    if (!player) return;
    this.#say("");
    try {
      await player.play(number);
    } catch (error) {
      this.#say(error.message);
    }
    this.#draw();
  }

  #playOrPause() {
    const player = this.#player;
    if (!player) return;
    if (player.isRunning) player.pause();
    else if (player.isOver) this.#go(player.number);
    else player.resume();
  }

  #draw() {
    const player = this.#player;
    if (!player) return;
    if (this.#view.history !== this.#history) { // somebody opened another recording
      this.#player = null;
      this.#show(false);
      return;
    }
    const label = player.isRunning ? "Pause" : player.isOver ? "Play again" : "Play";
    if (this.#parts.play.textContent !== label) this.#parts.play.textContent = label;
    if (this.#written !== player.number) this.#write(player.scenes, player.number);
  }

  #write(scenes, number) {
    this.#written = number;
    const { count, bars, caption, marks, previous, next } = this.#parts;
    const { title, text, marks: names } = scenes[number - 1];
    count.textContent = `${number} of ${scenes.length}`;
    caption.replaceChildren(make("h2", {}, title), make("p", {}, text));
    marks.replaceChildren(...explain(names));
    previous.setAttribute("aria-disabled", String(number === 1)); // not `disabled`: it would lose the focus, and the arrow keys with it
    next.textContent = number === scenes.length ? "Finish" : "Next";
    [...bars.children].forEach((item, index) => {
      item.toggleAttribute("data-seen", index < number);
      if (index === number - 1) item.firstChild.setAttribute("aria-current", "step");
      else item.firstChild.removeAttribute("aria-current");
    });
  }
}
