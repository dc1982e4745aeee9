"""A long English text for loads that are cut from real text: the same ids in every run, for any tokenizer.

sonnets.txt is Shakespeare, as vLLM ships it for its benchmarks (Apache-2.0). It is short, so it is read again and again,
its lines in another order each time: no run of lines comes back, and no prompt is found in the prefix cache by accident.
"""

from importlib import resources
from random import Random
from typing import Protocol

ENOUGH = 20_480  # what loads.cpu asks for is "over 20,000"


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


def text_ids(tokenizer: Encoder) -> list[int]:
    lines = resources.files("octavo.bench").joinpath("sonnets.txt").read_text(encoding="utf-8").splitlines()
    order, ids = Random(0), list[int]()
    while len(ids) < ENOUGH:
        ids += tokenizer.encode("\n".join(lines) + "\n", add_special_tokens=False)
        order.shuffle(lines)
    return ids
