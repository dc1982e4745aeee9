"""A batch of twelve questions, eight of them behind one long system prompt: what came out, how fast, and what the cache saved.

All twelve are handed over at once. The first of the eight computes the system prompt's blocks; the other seven wait for it
and find them in the cache. Run it with `make demo`.
"""

import sys
import textwrap
import time

from octavo import LLM, RequestOutput, SamplingParams

GUIDE = """You are the guide of a small museum of the sea, in an old lighthouse on a rocky coast. Visitors of every age ask you about
what they see. On the ground floor there are ropes, knots, anchors and the model of a whaling ship. On the first floor there are
charts, compasses, a sextant and a working barometer. On the second floor there is an aquarium with crabs, starfish, sea anemones
and one very old lobster called Agatha. At the top is the lamp, which still turns every evening at dusk. The museum opens at ten
and closes at six; children enter free of charge; dogs wait outside, where there is a bowl of water. Answer in one short and
friendly sentence, as you would to a visitor who stands in front of you, and never invent what the museum does not have."""

VISITORS = [
    "What is a sextant for?",
    "Who is Agatha?",
    "When do you close?",
    "May I bring my dog?",
    "What does a barometer measure?",
    "Does the lamp still work?",
    "Where can I see starfish?",
    "What does it cost for children?",
]
OTHERS = [
    "What is the capital of Japan?",
    "Name three primary colours.",
    "Why is the sky blue?",
    "What is two plus three?",
]
PARAMS = SamplingParams(temperature=0, max_tokens=24)
HEADINGS = ("question", "answer", "prompt", "cached", "prefix", "tokens", "first token")


def main() -> int:
    conversations = [[{"role": "system", "content": GUIDE}, {"role": "user", "content": question}] for question in VISITORS]
    conversations += [[{"role": "user", "content": question}] for question in OTHERS]
    started = time.perf_counter()
    with LLM() as llm:
        loaded = time.perf_counter()
        print(f"{llm.model_name}, ready after {loaded - started:.1f} s; {len(conversations)} questions at once\n", flush=True)
        outputs = llm.chat(conversations, PARAMS)
        seconds = time.perf_counter() - loaded
    show_table([cells(question, output) for question, output in zip(VISITORS + OTHERS, outputs, strict=True)])
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    written = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"\n{written} tokens written in {seconds:.1f} s: {written / seconds:.1f} tokens/s")
    print(f"{cached} of {prompt} prompt tokens came from the cache, {prompt - cached} were computed")
    return 0 if all(output.outputs[0].finish_reason in ("stop", "length") for output in outputs) else 1


def cells(question: str, output: RequestOutput) -> tuple[str, ...]:
    life, answer = output.metrics, output.outputs[0]
    waited = f"{life.first_token - life.queued:.2f} s" if life.first_token is not None else "-"
    text = " ".join(answer.text.split()) + ("..." if answer.finish_reason == "length" else "")
    return (
        question,
        text,
        str(len(output.prompt_token_ids)),
        str(output.num_cached_tokens),
        str(life.hit_reason),
        str(len(answer.token_ids)),
        waited,
    )


def show_table(rows: list[tuple[str, ...]]) -> None:
    """With rich at a terminal, plain columns elsewhere."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        show_plain(rows)
        return
    if not sys.stdout.isatty():
        show_plain(rows)
        return
    table = Table(box=None, pad_edge=False, row_styles=("", "dim"))
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if column in (0, 1, 4) else "right", overflow="fold", no_wrap=column > 1)
    for row in rows:
        table.add_row(*row)
    Console(markup=False, emoji=False).print(table)


def show_plain(rows: list[tuple[str, ...]]) -> None:
    layout = "{:34}  {:48}  {:>6}  {:>6}  {:8}{:>6}  {:>11}"
    print(layout.format(*HEADINGS))
    for row in rows:
        first, *more = textwrap.wrap(row[1], 48) or [""]
        print(layout.format(row[0], first, *row[2:]))
        for line in more:
            print(f"{'':34}  {line}")


if __name__ == "__main__":
    sys.exit(main())
