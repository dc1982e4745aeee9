/* The page put together: the chat, the block pool, the timeline, and what the server says of itself. */

import { mountChat } from "./chat.js";
import { hasKey, onKey, setKey } from "./key.js";
import { watchServer } from "./server_state.js";

const part = (id) => document.getElementById(id);

const view = { on() {}, selection: { get: () => null, set() {} } };
const chat = mountChat(part("chat"), view, () => askAgain());
const askAgain = watchServer(part("state"), part("about"), (allowed) => chat.allow(allowed));

const forget = part("forget-key");
const showForget = () => { forget.hidden = !hasKey(); };
forget.addEventListener("click", () => {
  setKey("");
  location.reload();
});
onKey(showForget);
showForget();
