"""Outputs of a call of `LLM`: updates and results of its requests as they arrive, and results in the user's form."""

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing

from octavo.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput, TextDelta
from octavo.progress import GenerateProgress
from octavo.text.tokenizer import Tokenizer


class Reader:
    """Receives the updates of the requests of one call or stream, in any thread."""

    def __init__(self, progress: GenerateProgress | None = None) -> None:
        self.news: deque[TextDelta] = deque()  # of a stream: not read yet
        self.finished: dict[str, RequestOutput] = {}
        self._progress = progress

    def push(self, delta: TextDelta) -> None:
        if self._progress is None:
            self.news.append(delta)
        else:
            self._progress.count(0, 0, len(delta.token_ids))

    def finish(self, output: RequestOutput) -> None:
        self.finished[output.request_id] = output
        if self._progress is not None:
            self._progress.count(1, len(output.prompt_token_ids), 0)


def numbered(ids: Sequence[str], deltas: Generator[TextDelta, None, None]) -> Generator[tuple[int, TextDelta], None, None]:
    place = {request_id: index for index, request_id in enumerate(ids)}
    with closing(deltas):
        for delta in deltas:
            yield place[delta.request_id], delta


def beam_output(output: RequestOutput, tokenizer: Tokenizer | None, keep_end: bool) -> BeamSearchOutput:
    """`keep_end`: an end id is one of an answer's tokens"""
    prompt = output.prompt
    if prompt is None and tokenizer is not None:
        prompt = tokenizer.decode(output.prompt_token_ids)
    return BeamSearchOutput([BeamSearchSequence.of(output, sample, prompt, keep_end) for sample in output.outputs])
