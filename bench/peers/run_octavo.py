"""Octavo through `LLM`, ids in and ids out as everywhere here. `engine` of the settings: keywords of `LLM`."""

import time
from typing import Any

from serve import Answers, Requests, serve

from octavo import LLM, SamplingParams
from octavo.engine.core import EngineCore
from octavo.messages import Delta


class Octavo:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = LLM(**settings["engine"])
        self._clock = _Clock(self._llm)
        self.times: list[list[float]] = []

    def prepare(self, requests: Requests) -> None:
        self._llm.reset_prefix_cache()

    def generate(self, requests: Requests) -> Answers:
        self._clock.times.clear()
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in requests]
        outputs = self._llm.generate([ids for ids, _ in requests], params, use_tqdm=False)
        self.times = [self._clock.times[output.request_id] for output in outputs]
        return [output.outputs[0].token_ids for output in outputs]


class _Clock:
    """Notes when each token comes out of a step; an output only tells when the first and the last one did."""

    def __init__(self, llm: LLM) -> None:
        self.times: dict[str, list[float]] = {}
        core: EngineCore = llm._core
        self._step = core.step
        core.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[Delta]:
        deltas = self._step()
        now = time.perf_counter()
        for delta in deltas:
            self.times.setdefault(delta.request_id, []).extend([now] * len(delta.token_ids))
        return deltas


if __name__ == "__main__":
    serve(Octavo)
