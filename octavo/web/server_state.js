/* What the server says of itself, asked again until it is ready, and whenever a request failed. */

import { askHealth, getJson } from "./api.js";

const AGAIN = 1500; // ms
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
    allow(health === "ready");
    if (health === "ready") await showModel(about, know);
  }

  ask();
  return ask;
}

async function showModel(about, know) {
  try {
    const [model] = (await getJson("./v1/models")).data;
    about.textContent = `${model.id} · ${Number(model.max_model_len).toLocaleString("en")} tokens of context`;
    know(model);
  } catch (error) {
    about.textContent = error.message;
  }
}
