/* What is known of a request between its sending and its first token.

The id of a request comes with its first token. Until then the engine's view is asked about the sequences that have arrived since it was
sent: if all of them wait, this one waits; if there is only one and it runs, its computed tokens are the progress of this prompt. */

const SHOWN_AFTER = 2; // seconds: a short wait needs no clock

export class Waiting {
  #view;
  #before;
  #since = performance.now();

  constructor(view) {
    this.#view = view;
    this.#before = new Set(this.#rows().map(({ seq }) => seq));
  }

  /** For the page: "Reading the prompt: 512 of 2,048 tokens · 3 s". */
  get words() {
    const seconds = Math.floor((performance.now() - this.#since) / 1000);
    return seconds < SHOWN_AFTER ? this.#stage() : `${this.#stage()} · ${seconds} s`;
  }

  #stage() {
    const rows = this.#rows().filter(({ seq }) => !this.#before.has(seq));
    if (rows.length && rows.every(({ state }) => state === "waiting")) return "Waiting in the queue";
    const [row] = rows;
    if (rows.length !== 1 || row.computed >= row.prompt) return "Waiting for the first token";
    return `Reading the prompt: ${row.computed.toLocaleString("en")} of ${row.prompt.toLocaleString("en")} tokens`;
  }

  /** Sequences that run or wait now, whatever moment the pool shows; none where a recording is played. */
  #rows() {
    const { recorded, history } = this.#view;
    return recorded || !history.state ? [] : [...history.state.seqs.values()];
  }
}
