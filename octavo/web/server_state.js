/* What the server says of itself, asked again until it is ready, and whenever a request failed. */

import { askHealth, getJson } from "./api.js";
import { make } from "./dom.js";

const AGAIN = 1500; // ms
const BETTER = "octavo serve Qwen/Qwen3-0.6B"; // than the default model
const WORDS = {
  ready: "",
  loading: "The model is loading …",
  draining: "The server is stopping.",
  dead: "The engine is not running.",
  unreachable: "The server cannot be reached; asking again …",
  absent: "There is no server behind this page: the chat needs one.",
};

/** Shows it in `state` and the model in `about`; `allow` hears whether one may ask, `know` the model's entry. Returns a function that asks again. */
export function watchServer(state, about, { allow, know }) {
  let asking = false;

  async function ask() {
    if (asking) return;
    asking = true;
    let health = await askHealth();
    for (; health !== "ready" && health !== "absent"; health = await askHealth()) {
      state.textContent = WORDS[health] ?? `The server says: ${health}`;
      await new Promise((resolve) => setTimeout(resolve, AGAIN));
    }
    asking = false;
    state.textContent = WORDS[health];
    if (health === "ready") await showModel(about, know);
    allow(health === "ready");
  }

  ask();
  return ask;
}

async function showModel(about, know) {
  try {
    const [model] = (await getJson("./v1/models")).data;
    const context = make("span", { class: "context" }, ` · ${Number(model.max_model_len).toLocaleString("en")} tokens of context`);
    const [mark, better] = model.demo ? aboutDemo() : ["", ""];
    about.replaceChildren(make("span", { class: "model-name" }, model.id), mark, context, better);
    know(model);
  } catch (error) {
    about.textContent = error.message;
  }
}

function aboutDemo() {
  const better = make("span", { class: "better-model" }, "for better answers: ", make("code", {}, BETTER));
  return [make("span", { class: "demo-model" }, "135M demo model"), better];
}
