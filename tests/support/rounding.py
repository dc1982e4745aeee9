"""How far rounding moves the logprobs of a small model, derived from the formats, and whether two runs are as near as that.

A number m * 2^e with 1 <= m < 2 and p bits behind the point is rounded to steps of 2^(e-p). The error is uniform within half a step:
2^(e-p) / sqrt(12) in the root mean square (rms). Normal numbers with an rms of 1 have an rms of 2^e of 0.737. So rounding one factor
moves a product of long rows by the same share of its own rms: `share_of_float(p)`, 2.66 % for the 3 bits of e4m3.

In groups of G integers a step is the largest of G numbers by 127, and the largest of G normal numbers is about sqrt(2 ln G) times their
rms: `share_of_int8(G)`. Integers of 4 bits have 15 steps from the least to the largest number of a group: `share_of_int4(G)`.
Float32 sums of K terms make a random walk of K roundings, each half a unit in the last place at most: `share_of_float32(K)`.

Norms keep the size of what runs through a layer. So shares of products that follow each other add up as independent errors do, in
squares. A layer has five of them: of what attention reads, of its output, of gate and of up, which are multiplied, and of down. A logprob
is the difference of two logits in a sharp distribution. Logits that spread by `spread` are then off by

    spread * share * sqrt(2 * 5 * layers)

What this leaves out makes errors smaller: a residual stream holds the embedding, which is not rounded, and branches that do not add up in
their largest numbers. The rms of all differences must stay below it. One wrong position of 75 alone makes it 0.16 * spread, more than any
of the bounds. Single differences have none: where attention hangs on two keys that score alike, a little rounding goes a long way.
"""

from math import erf, log, sqrt

import torch

from octavo import RequestOutput

PRODUCTS = 5  # of a layer, whose errors add up


def share_of_float(bits: int) -> float:
    squares = (4**e * (erf(2 ** (e + 1) / sqrt(2)) - erf(2**e / sqrt(2))) for e in range(-30, 4))  # of normal numbers
    return 2**-bits / sqrt(12) * sqrt(sum(squares))


def share_of_int8(group: int) -> float:
    return sqrt(2 * log(group)) / 127 / sqrt(12)


def share_of_int4(group: int) -> float:
    return 2 * sqrt(2 * log(group)) / 15 / sqrt(12)


def share_of_float32(terms: int) -> float:
    return 2**-24 * sqrt(terms)


E4M3 = share_of_float(3)


def both(*shares: float) -> float:
    """The share of errors that are independent."""
    return sqrt(sum(share**2 for share in shares))


def differences(found: list[RequestOutput], reference: list[RequestOutput]) -> list[float]:
    """Of the logprobs of the tokens of prompts, and of the first token of each answer."""
    pairs = []
    for one, other in zip(found, reference, strict=True):
        ours, theirs = ([*(output.prompt_logprobs or ())[1:], (output.outputs[0].logprobs or [{}])[0]] for output in (one, other))
        pairs += list(zip(ours, theirs, strict=True))
    return [abs(ours[token].logprob - theirs[token].logprob) for ours, theirs in pairs for token in theirs if token in ours]


def spread(outputs: list[RequestOutput]) -> float:
    """Of logits: the prompts are random, so the logprobs of their tokens are those of random tokens."""
    pairs = [pair for output in outputs for pair in zip(output.prompt_token_ids[1:], (output.prompt_logprobs or ())[1:], strict=True)]
    return float(torch.tensor([choices[token].logprob for token, choices in pairs if choices]).std())


def assert_near(found: list[RequestOutput], reference: list[RequestOutput], share: float, layers: int) -> str:
    """Fails where more happened than rounding; returns how near the bound is."""
    bound = spread(reference) * share * sqrt(2 * PRODUCTS * layers)
    off = torch.tensor(differences(found, reference))
    rms = float(off.square().mean().sqrt())
    said = f"{len(off)} logprobs, off by {rms:.2g} (rms), {rms / bound:.2f} of the bound, and by {float(off.max()):.2g} at most"
    assert len(off) > 100 and rms < bound, said
    return said
