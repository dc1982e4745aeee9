"""The client seam: how the text side talks to an engine. In-process, a step is a call.

    add   abort   step -> deltas   reset_prefix_cache   stats   close
"""

from collections.abc import Callable
from typing import Protocol

from octavo.config import Debug, EngineConfig
from octavo.engine.assemble import Engine
from octavo.engine.trace import open_trace
from octavo.loading.resolve import ModelSource
from octavo.log import Stopwatch, logger
from octavo.messages import AddRequest, Delta, SchedulerStats
from octavo.model_config import ModelConfig
from octavo.policy.cache_spec import CacheGeometry
from octavo.structured_outputs import StructuredOutputs
from octavo.text.grammar_limits import check_limits
from octavo.text.tokenizer import Tokenizer
from octavo.worker.device import compilers_for


class EngineClient(Protocol):
    geometry: CacheGeometry

    def add(self, request: AddRequest) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def step(self) -> list[Delta]:
        """Wait for news; empty when there is nothing to wait for."""

    def reset_prefix_cache(self) -> None: ...

    def stats(self) -> SchedulerStats: ...

    def close(self) -> None: ...


def open_engine(
    config: EngineConfig, source: ModelSource, model: ModelConfig, debug: Debug,
    tokenizer: Callable[[], Tokenizer] | None = None, epoch: int = 1,
) -> Engine:  # fmt: skip
    """An engine that is ready; `epoch`: which start of it this is. Its trace is opened before anything is loaded.

    `tokenizer` is called when the first request with a grammar comes; without it, such requests are refused.
    """
    trace = open_trace(config.trace, goes_on=epoch > 1)
    engine = _build(config, source, model, debug, tokenizer)
    engine.core.trace = trace
    return engine


def _build(
    config: EngineConfig, source: ModelSource, model: ModelConfig, debug: Debug, tokenizer: Callable[[], Tokenizer] | None
) -> Engine:
    """torch loads in here, not with the module; FakeKV does without."""
    if debug.runner == "fake":
        from octavo.engine.build_fake import build_fake

        return build_fake(config, source, model, debug, tokenizer)
    with compilers_for(config.device) as compilers:
        watch = Stopwatch()
        from octavo.engine.build import build_engine

        logger.info("Importing torch and the engine took %.2f seconds", watch.total())
        return build_engine(config, source, model, debug, compilers=compilers, tokenizer=tokenizer)


class InprocClient:
    def __init__(
        self, config: EngineConfig, source: ModelSource, model: ModelConfig, debug: Debug, tokenizer: Callable[[], Tokenizer] | None = None
    ) -> None:
        engine = open_engine(config, source, model, debug, tokenizer)
        self._core = engine.core
        self.geometry = engine.geometry
        self._checked: StructuredOutputs | None = None  # the newest form, which the prompts of one call often share

    def add(self, request: AddRequest) -> None:
        form = request.params.structured_outputs
        if form is not None and form != self._checked:
            check_limits(form)
            self._checked = form
        self._core.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        self._core.abort(request_id, index)

    def step(self) -> list[Delta]:
        return self._core.step() if self._core.has_work else []

    def reset_prefix_cache(self) -> None:
        self._core.scheduler.kv.pool.forget()

    def stats(self) -> SchedulerStats:
        return self._core.scheduler.snapshot()

    def close(self) -> None:
        self._core.close()
