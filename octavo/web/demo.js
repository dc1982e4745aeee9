/* The page without a server (docs/demo/make.py builds it): it says what Octavo is, and plays the recorded lesson. There is no chat, and nothing is asked of a server.

`?replay=FILE` plays another recording that lies beside the page; so does a file that is opened or dropped here. */

import { button, make } from "./dom.js";
import { mountLesson } from "./lesson.js";
import { openRecordedPlayer, showsLesson } from "./lesson_player.js";
import { mountPool } from "./pool.js";
import { connect } from "./source.js";
import { mountTimeline } from "./timeline.js";
import { createView } from "./view.js";

const SHOWN_SCENE = 4; // behind the opening: four requests that share a prefix

const part = (id) => document.getElementById(id);
for (const element of document.querySelectorAll("#chat, .places, .skip, #forget-key")) element.remove();

const view = createView();
mountPool(part("pool-body"), view);
mountTimeline(part("timeline-body"), view);
const source = connect(view, { server: false });
const lesson = mountLesson(part("lesson"), part("lesson-opener"), view, changeOpening);
const start = button("Start the lesson", () => lesson.open(), { class: "primary", disabled: true });
const said = make("p", { class: "lesson-said", role: "status" });
const opening = make(
  "section",
  { class: "lesson opening", "aria-labelledby": "opening-title", hidden: true },
  make("h2", { id: "opening-title" }, "An LLM engine that shows its memory"),
  make("p", {}, "Octavo runs language models on a CPU or an NVIDIA GPU. It stores what a model has read in small blocks, and requests that begin alike share them."),
  make("p", {}, "The squares are the blocks of a real engine, recorded while four requests ran. The lesson explains them in ten short scenes."),
  make("div", { class: "lesson-controls" }, start),
  make("p", { class: "muted" }, make("a", { href: "../../README.md" }, "Run it on your own machine"), " with one command: ", make("code", {}, "make serve")),
  said,
);
part("lesson").before(opening);
if (!source.replays) open();

/** The words at once, the picture beside them as soon as the recording was read. */
async function open() {
  show(true);
  try {
    await showScene();
    start.disabled = false;
  } catch (error) {
    said.textContent = error.message;
  }
  view.on(() => !opening.hidden && !showsLesson(view) && show(false)); // another recording was opened
}

async function showScene() {
  const player = await openRecordedPlayer(view);
  player.showEnd(SHOWN_SCENE);
  player.leave();
}

function show(shown) {
  const alone = shown || lesson.isOpen;
  opening.hidden = !shown;
  part("lesson-opener").hidden = alone;
  document.body.toggleAttribute("data-lesson", alone);
}

function changeOpening(lessonIsOpen) {
  const shown = !lessonIsOpen && showsLesson(view);
  show(shown);
  if (!shown) return;
  showScene();
  start.focus();
}
