// The ranks of a model that is split over processes: one line for each, with how much of the last second it was in steps.

import { make } from "./dom.js";

const SILENT_SECONDS = 5; // a rank whose last beat is older is marked

/** A page whose model has one rank shows nothing. */
export function writeRanks({ ranks }, { head, ranks: did }) {
  const told = head.ranks ?? [];
  ranks.hidden = told.length === 0;
  const lines = told.map((one) => sayRank(one, did.find(([rank]) => rank === one.rank)));
  const words = JSON.stringify(lines);
  if (ranks.dataset.words === words) return;
  ranks.dataset.words = words;
  ranks.replaceChildren(...lines.map(([name, about, share, silent]) => make("li", {}, make("b", {}, name), ` ${about}`, make("b", {}, share), make("strong", {}, silent))));
}

function sayRank({ rank, stage, stages, layers, cores, device, host }, row) {
  const [first, count] = layers;
  const where = (device === "cpu" ? `cores ${cores}` : device) + (host === undefined ? "" : ` on ${host}`);
  const parts = [...(stages > 1 ? [`stage ${stage}`] : []), `layers ${first}–${first + count - 1}`, where];
  const share = row ? `, ${Math.round(100 * row[2])} % in steps` : "";
  return [`Rank ${rank}`, parts.join(", "), share, row && row[3] >= SILENT_SECONDS ? `, silent for ${Math.round(row[3])} s` : ""];
}
