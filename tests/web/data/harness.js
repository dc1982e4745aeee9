// Mounts the pool and the timeline as the page does, and keeps the view where a test finds it.
import { mountPool } from "../web/pool.js";
import { connect } from "../web/source.js";
import { mountTimeline } from "../web/timeline.js";
import { createView } from "../web/view.js";

const view = createView();
mountPool(document.getElementById("pool"), view);
mountTimeline(document.getElementById("timeline"), view);
connect(view, { headers: () => ({ authorization: "Bearer secret" }) });
globalThis.view = view;
