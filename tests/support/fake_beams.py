"""Beam search over FakeKV without blocks, forks or rows, written after `transformers`: every step looks at every token of every beam."""

from collections.abc import Collection

from octavo.messages import Beams, FinishReason
from octavo.worker.fake_runner import _mix, _root, ranked

NEVER = -1e9  # the score of what must not be chosen


def expected_beams(
    prompt: list[int], count: int, root: bytes, vocab_size: int, beams: Beams, end_ids: Collection[int]
) -> list[tuple[list[int], FinishReason]]:
    """Returns the answers, best first, each with how it ended."""
    width, penalty = beams.width, beams.length_penalty
    running: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = [(NEVER, [])] * width
    for length in range(1, count + 1):
        candidates = [
            (score + logprob, [*output, token])
            for score, output in running
            for token, logprob in _logprobs([*prompt, *output], root, vocab_size)
        ]
        candidates.sort(key=lambda one: -one[0])
        stops = [output[-1] in end_ids or length == count for _, output in candidates]
        done = [(score / length**penalty, output) for (score, output), stop in zip(candidates[:width], stops) if stop]
        ended = sorted([*ended, *done], key=lambda one: -one[0])[:width]
        running = [one for one, stop in zip(candidates, stops) if not stop][:width]
        if length == count:
            break
        hopes = count if beams.early_stopping == "never" and penalty > 0 else length
        worst = min(score for score, _ in ended)
        full = worst > NEVER
        if full and (beams.early_stopping is True or running[0][0] / hopes**penalty <= worst):
            break
    return [(output, "stop" if output[-1] in end_ids else "length") for _, output in ended]


def _logprobs(tokens: list[int], root: bytes, vocab_size: int) -> list[tuple[int, float]]:
    entries: list[int] = []
    previous = _root(root)
    for position, token in enumerate(tokens):
        previous = _mix(previous, token, position)
        entries.append(previous)
    found = ranked(entries, 0, vocab_size, vocab_size)
    return list(zip(found.top_ids, found.top_logprobs, strict=True))
