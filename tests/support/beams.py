"""Beam search without blocks, forks or rows, written after `transformers`: every step looks at every token of every beam.

It also tells how near its nearest decision was: two searches may part where scores are as good as equal.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise

from octavo.messages import Beams, FinishReason
from octavo.worker.fake_runner import _mix, _root, ranked

NEVER = -1e9  # the score of what must not be chosen
LogprobsOf = Callable[[list[list[int]]], list[list[tuple[int, float]]]]  # outputs -> the logprobs of all tokens after each


@dataclass
class Searched:
    answers: list[tuple[list[int], FinishReason]]  # best first
    scores: list[float]
    nearest: float  # the smallest difference that decided anything


def search(logprobs_of: LogprobsOf, count: int, beams: Beams, end_ids: Collection[int]) -> Searched:
    """`count`: the most tokens of an answer."""
    width, penalty, nearest = beams.width, beams.length_penalty, 1e9
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = [(NEVER, [])] * width
    for length in range(1, count + 1):
        found = logprobs_of([output for _, output in running])
        candidates = [(score + logprob, [*output, token]) for (score, output), each in zip(running, found) for token, logprob in each]
        candidates.sort(key=lambda one: -one[0])
        stops = [output[-1] in end_ids or length == count for _, output in candidates]
        done = [(score / length**penalty, output) for (score, output), stop in zip(candidates[:width], stops) if stop]
        going = [one for one, stop in zip(candidates, stops) if not stop]
        best = sorted([*ended, *done], key=lambda one: -one[0])
        nearest = min(nearest, *_gaps(candidates[: width + 1]), *_gaps(going[: width + 1]), *_gaps(best[: width + 1]))
        ended, running = best[:width], going[:width]
        if length == count:
            break
        hopes = count if beams.early_stopping == "never" and penalty > 0 else length
        worst, hope = ended[-1][0], running[0][0] / hopes**penalty
        if worst > NEVER:
            nearest = min(nearest, abs(hope - worst))
            if beams.early_stopping is True or hope <= worst:
                break
    answers: list[tuple[list[int], FinishReason]] = [(output, "stop" if output[-1] in end_ids else "length") for _, output in ended]
    return Searched(answers, [score for score, _ in ended], nearest)


def _gaps(best: list[tuple[float, list[int]]]) -> list[float]:
    return [one - other for (one, _), (other, _) in pairwise(best) if other > NEVER]


def expected_beams(
    prompt: list[int], count: int, root: bytes, vocab_size: int, beams: Beams, end_ids: Collection[int], position_offset: int = 0
) -> list[tuple[list[int], FinishReason]]:
    """Returns the answers that FakeKV gives."""

    def logprobs_of(outputs: list[list[int]]) -> list[list[tuple[int, float]]]:
        return [_logprobs([*prompt, *output], root, vocab_size, position_offset) for output in outputs]

    return search(logprobs_of, count, beams, end_ids).answers


def _logprobs(tokens: list[int], root: bytes, vocab_size: int, position_offset: int) -> list[tuple[int, float]]:
    entries: list[int] = []
    previous = _root(root)
    for position, token in enumerate(tokens, position_offset):
        previous = _mix(previous, token, position)
        entries.append(previous)
    found = ranked(entries, 0, vocab_size, vocab_size)
    return list(zip(found.top_ids, found.top_logprobs, strict=True))
