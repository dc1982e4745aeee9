"""Rows to draw from and rank, of all kinds, and what exact arithmetic allows as the result.

A kernel and its twin may differ where two scores, or a mass and a cut, are closer than a float32 tells; nowhere else.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels.cpu.packing import Floats
from octavo.kernels.reference import sampling as twin
from octavo.kernels.reference.philox import uniform
from octavo.kernels.reference.sampling import Draws
from octavo.messages import TokenLogprobs

INF = math.inf
SLACK = 2e-6  # of scores and masses: what float32 logarithms and exponentials may be off


def make_logits(kind: str, vocab: int, seed: int) -> Floats:
    random = np.random.default_rng(seed)
    row = random.standard_normal(vocab, np.float32) * np.float32(random.choice([0.1, 1, 4, 15]))
    if kind == "ties":
        return np.round(row)
    if kind == "equal":
        return np.full(vocab, row[0], np.float32)
    if kind == "zeros":
        return random.choice(np.array([0.0, -0.0], np.float32), vocab)
    if kind == "masked":  # all but a few
        row[random.permutation(vocab)[3:]] = -INF
    if kind == "one":
        row[:], row[random.integers(vocab)] = -INF, 1.5
    if kind == "peak":
        row[random.integers(vocab)] += 40
    return row


@dataclass(frozen=True)
class Row:
    kind: str
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    noise: tuple[int, ...] = (1, 2, 3, 4)
    position: int = 7


word32 = st.integers(0, 2**32 - 1)
rows = st.builds(
    Row,
    kind=st.sampled_from(["normal", "ties", "equal", "zeros", "masked", "one", "peak"]),
    seed=st.integers(0, 2**20),
    temperature=st.sampled_from([1e-40, 1e-3, 0.7, 1.0, 1.3, 1e3, 3e38]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 50, 126, 999, 1000, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-50, 0.2, 0.5, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-30, 1e-6, 0.1, 1.0]),
    noise=st.tuples(word32, word32, word32, word32),
    position=st.integers(0, 2**31),
)


def draws_of(batch: list[Row]) -> Draws:
    def numbers(name: str) -> Tensor:
        return torch.tensor([getattr(row, name) for row in batch])

    floats = {name: numbers(name).float() for name in ("temperature", "top_p", "min_p")}
    return Draws(**floats, top_k=numbers("top_k"), noise=numbers("noise"), positions=numbers("position"))


def logits_of(batch: list[Row], vocab: int) -> Tensor:
    return torch.from_numpy(np.stack([make_logits(row.kind, vocab, row.seed) for row in batch]))


def allowed(logits: Tensor, draws: Draws) -> list[set[int]]:
    """The ids of each row that exact arithmetic cannot tell from the right one, by the rule written down once more, in float64."""
    distance = twin.distances(logits, draws.temperature)
    order = np.argsort(distance.numpy(), kind="stable")  # equals stay in the order of their ids
    noise = uniform(draws.noise, draws.positions, logits.shape[1]).double()
    score = (-torch.log(-torch.log(noise)) - distance.double()).numpy()
    mass = torch.exp(-distance.double()).numpy()
    found = []
    for row, ids in enumerate(order):
        surely, perhaps = (_kept(mass[row][ids], row, draws, sign * SLACK) for sign in (-1, 1))
        best = score[row][ids[surely]].max()
        found.append({int(i) for i in ids[perhaps] if score[row][i] >= best - SLACK * max(1, abs(best))})
    return found


def assert_logprobs_of_the_drawn(logits: Tensor, draws: Draws, ids: list[int], found: list[TokenLogprobs]) -> None:
    """Each is that of a softmax over what filters leave, in float64; a token at a cut may be within or not, but for the id itself."""
    distance = twin.distances(logits, draws.temperature).double().numpy()
    order = np.argsort(distance, kind="stable")
    for row, (token, one) in enumerate(zip(ids, found, strict=True)):
        wanted = []
        for sign in (-1, 1):
            left = np.full(logits.shape[1], INF)
            keep = order[row][_kept(np.exp(-distance[row][order[row]]), row, draws, sign * SLACK)]
            left[keep] = distance[row][keep]
            best = np.argsort(left, kind="stable")[: len(one.top_ids)]
            logprobs = -left - math.log(np.exp(-left).sum())
            wanted.append(([token, *best], 1 + int((left < left[token]).sum()), [logprobs[token], *logprobs[best]]))
        said = [token, *one.top_ids], one.rank, [one.logprob, *one.top_logprobs]
        assert one.logprob > -INF and any(
            said[:2] == these[:2] and np.allclose(said[2], these[2], rtol=1e-5, atol=2e-5) for these in wanted
        ), (row, said, wanted)


def _kept(mass: NDArray[np.float64], row: int, draws: Draws, slack: float) -> NDArray[np.bool_]:
    """Which of a row's tokens, in order, pass the filters, if these are taken more or less strictly."""
    keep = mass >= float(draws.min_p[row]) * (1 - slack) - max(slack, 0) * 2.0**-20  # what is below 2^-40 counts as nothing
    if top_k := int(draws.top_k[row]):
        keep &= np.arange(len(mass)) < top_k
    if draws.top_p[row] < 1:
        mass = mass * keep
        keep &= mass.cumsum() - mass < float(draws.top_p[row]) * mass.sum() + slack * mass.sum()
    keep[0] = True
    return keep
