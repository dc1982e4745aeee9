/* The page put together: the chat, the block pool, the timeline, and what the server says of itself. */

import { mountChat } from "./chat.js";
import { authHeaders, hasKey, onKey, setKey } from "./key.js";
import { mountLesson } from "./lesson.js";
import { mountPlaces } from "./places.js";
import { mountPool } from "./pool.js";
import { watchServer } from "./server_state.js";
import { connect } from "./source.js";
import { mountTimeline } from "./timeline.js";
import { createView } from "./view.js";

const part = (id) => document.getElementById(id);

const view = createView();
mountPool(part("pool-body"), view);
mountTimeline(part("timeline-body"), view);
const source = connect(view, { headers: authHeaders });
const chat = mountChat(part("chat"), view, { select, teach: () => lesson.open(), failed: () => askAgain() });
const lesson = mountLesson(part("lesson"), part("lesson-opener"), view);
const ignore = view.on(() => {
  if (!view.history.head) return;
  ignore();
  if (view.history.head.lesson && !view.recorded) lesson.open(); // octavo serve --lesson
});
const places = mountPlaces(part("places"), () => {
  view.selection.set({}); // on a phone the drawer of the pool lies over the other parts
  chat.closeList();
});

function select(request) {
  view.selection.set({ request });
  places.show(part("pool"));
}

const askAgain = watchServer(part("state"), part("about"), {
  know: chat.know,
  allow(allowed) {
    chat.allow(allowed);
    if (!allowed && !source.replays) lesson.open(); // a page without a server tells the story
  },
});

view.on((what) => what === "status" && view.isStale && askAgain());

const forget = part("forget-key");
const showForget = () => { forget.hidden = !hasKey(); };
forget.addEventListener("click", () => {
  setKey("");
  location.reload();
});
onKey(showForget);
onKey(() => source.retry());
showForget();
