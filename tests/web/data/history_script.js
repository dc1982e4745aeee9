// Runs a script of ["apply", frame], ["at", share of the span remembered, 0 or direction] and ["neighbour", share, direction]
// over a History.
// After each: the whole state, in plain lists.

/** All scripts, and what is said of lines that may be no frames. */
export function answer(History, parseLine, { cases, lines }) {
  const say = (line) => {
    try {
      return parseLine(line, { num_blocks: 10, block_size: 4 });
    } catch (error) {
      return error.message;
    }
  };
  return { cases: cases.map((one) => runScript(History, one)), said: lines.map(say) };
}

function runScript(History, { limits, script }) {
  const history = new History(limits);
  return script.map(([what, argument, direction]) => {
    if (what === "apply") {
      history.apply(argument);
      return { known: history.state && plain(history.state), weight: history.weight };
    }
    let time = history.first + argument * (history.last - history.first);
    if (what === "at" && direction) time = history.neighbour(time, direction); // exactly when a frame came
    if (what === "neighbour") return { time, found: history.neighbour(time, direction), first: history.first };
    return { time, first: history.first, last: history.last, known: plain(history.at(time)) };
  });
}

function plain(state) {
  const { ref, sealed, digests, tokens, since } = state.blocks;
  const small = ref.length < 1000;
  return {
    at: state.at,
    blocks: small ? [...ref].map((_, block) => [ref[block], sealed[block], digests[block], tokens[block], since[block]]) : [],
    seqs: [...state.seqs.values()],
    ended: [...state.ended.values()].map((row) => [row.seq, row.how, state.entries(row)]),
    owners: small ? [...ref].map((_, block) => state.owners(block).length) : [],
    steps: state.steps.map(([step]) => step).filter((_, index) => index % 20 === 0),
    events: state.events.slice(-30),
    note: state.note?.title ?? null,
  };
}
