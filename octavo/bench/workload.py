"""`Workload` is what a benchmark runs: prompts as token ids, and how many tokens to generate for each.

    named    the published loads of loads.py; those of the CPU set are cut from a text, the ids of the others are drawn at random
    drawn    lengths that the user chooses, and random ids
    traced   lengths and shared prefixes that a real service recorded (traces.py)

The same model, choice and seed give the same workload.
"""

from dataclasses import dataclass
from importlib import resources
from random import Random
from typing import Protocol

from octavo.bench import loads
from octavo.errors import ConfigError

Ids = list[int]

TEXT_LOADS = ("single", "prefill", "batch32", "shared32")
RANDOM_LOADS = {f"gpu-{name}" if name in TEXT_LOADS else name: make for name, make in loads.GPU.items()}
INSTEAD = "choose other lengths with --input-len and --output-len"


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: list[tuple[Ids, int]]  # prompt, tokens to generate
    is_text: bool = False  # cut from a text: answers are then detokenized, too
    clipped: int = 0  # requests cut to the model's context
    arrivals: list[float] | None = None  # when each request came, in seconds, if a trace says so

    @property
    def input_tokens(self) -> int:
        return sum(len(ids) for ids, _ in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.requests)

    @property
    def longest(self) -> int:
        return max(len(ids) + count for ids, count in self.requests)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths from `low` to `high`, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def text_loads(text: Ids) -> dict[str, Workload]:
    """Returns the published loads that are cut from a text, by name."""
    return {name: Workload(name, requests, is_text=True) for name, requests in loads.cpu(text).items()}


def random_load(name: str, vocab_size: int) -> Workload:
    """Returns a published load of random ids. Raises an error if the model has too few ids for it."""
    workload = Workload(name, RANDOM_LOADS[name]())
    highest = max(max(ids) for ids, _ in workload.requests)
    if highest >= vocab_size:
        raise ConfigError(f"load {name} draws token ids up to {highest:,}, this model's vocabulary has {vocab_size:,}; {INSTEAD}")
    return workload


def drawn(inputs: Lengths, outputs: Lengths, count: int, vocab_size: int, max_model_len: int, seed: int) -> Workload:
    """Returns a workload of `count` requests with random lengths and ids."""
    name, rng = f"{inputs} in, {outputs} out", Random(seed)
    check_fits(name, inputs.high + outputs.high, max_model_len)
    lengths = [(rng.randint(inputs.low, inputs.high), rng.randint(outputs.low, outputs.high)) for _ in range(count)]
    return Workload(name, [(random_ids(rng, length, vocab_size), wanted) for length, wanted in lengths])


def random_ids(rng: Random, count: int, vocab_size: int) -> Ids:
    return rng.choices(range(vocab_size), k=count)


def check_fits(name: str, tokens: int, max_model_len: int) -> None:
    """Raises an error if a sequence of a load is too long for the model. Loads are not cut: the figures would mean something else."""
    if tokens > max_model_len:
        raise ConfigError(f"{name}: a sequence may grow to {tokens:,} tokens, max_model_len is {max_model_len:,}; {INSTEAD}")


# -- the text that loads are cut from
#
# sonnets.txt is Shakespeare, as vLLM ships it for its benchmarks (Apache-2.0). It is short, so it is repeated, each time with its
# lines in another order. No sequence of lines is repeated, so no prompt is found in the prefix cache by accident.

ENOUGH = 20_480  # ids; loads.cpu needs more than 20,000


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


def text_ids(tokenizer: Encoder) -> list[int]:
    """Returns the ids of a long English text. They are the same in every run with the same tokenizer."""
    lines = resources.files("octavo.bench").joinpath("sonnets.txt").read_text(encoding="utf-8").splitlines()
    order, ids = Random(0), list[int]()
    while len(ids) < ENOUGH:
        ids += tokenizer.encode("\n".join(lines) + "\n", add_special_tokens=False)
        order.shuffle(lines)
    return ids
