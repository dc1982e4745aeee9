/* What an empty conversation shows: what Octavo is, if nothing has been said in this browser, questions to begin with, and who reads along. */

import { button, make } from "./dom.js";

// The default model answers them well, at the settings of the page.
const QUESTIONS = ["What is photosynthesis?", "Give me three tips for a good night's sleep.", "What does the heart do?"];

const WHAT = "Octavo runs a language model and shows its memory at work: ask something, and watch the blocks fill.";
const PRIVACY =
  "Conversations are stored only in this browser. The server reads what you send, and people who may watch its block pool can see the text.";

/** `ask(text)` asks the model; `teach()` opens the lesson. */
export function welcome({ ask, teach }, isNew) {
  const questions = QUESTIONS.map((text) => make("li", {}, button(text, () => ask(text), { class: "question-button" })));
  const lesson = button("Show me how paging works", teach, { class: "lesson-button" });
  return make(
    "section",
    { class: "welcome", "aria-label": "Welcome" },
    ...(isNew ? [make("p", { class: "welcome-what" }, WHAT)] : []),
    make("ul", { class: "welcome-questions", "aria-label": "Suggested questions" }, ...questions),
    ...(isNew ? [lesson] : []),
    make("p", { class: "footnote" }, PRIVACY),
  );
}
