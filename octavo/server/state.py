"""The server's state, which every route gets: the engine, the settings, and the objects that live as long as the server."""

import time
from dataclasses import dataclass, field
from hashlib import sha256

from octavo.engine.async_llm import AsyncLLM
from octavo.engine.replica import State
from octavo.grammar.checker import GrammarChecker, first_pieces
from octavo.inspector.hub import ViewHub
from octavo.inspector.recorder import Recorder
from octavo.server.records import Observer
from octavo.server.turns import MOST_BYTES, MOST_STARTS, Threads, TurnQueue
from octavo.server_config import ServerConfig


@dataclass(slots=True)
class Server:
    llm: AsyncLLM
    config: ServerConfig
    model_name: str  # what clients call the model
    observer: Observer = field(default_factory=Observer)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # the server must stop: open requests may end, no new one begins
    open_requests: int = 0
    warned: set[str] = field(default_factory=set)  # unknown fields of requests that were logged once
    recorder: Recorder | None = None
    threads: Threads = field(default_factory=Threads)
    starts: TurnQueue = field(default_factory=lambda: TurnQueue(MOST_STARTS))
    bodies: TurnQueue = field(default_factory=lambda: TurnQueue(MOST_BYTES))
    views: list[ViewHub] = field(init=False)  # of each engine
    _grammars: GrammarChecker | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.views = [ViewHub(self, engine) for engine in range(self.config.data_parallel_size)]

    @property
    def grammars(self) -> GrammarChecker:
        """The checker of grammars. It is made at its first use, because it needs the model's tokens."""
        if self._grammars is None:
            tokenizer = self.llm.tokenizer
            special = [tokenizer.token(token) for token in sorted(tokenizer.special_ids)]
            self._grammars = GrammarChecker(special, lambda: first_pieces(tokenizer))
        return self._grammars

    @property
    def fingerprint(self) -> str:
        """Identifies everything that can change an answer besides its request: version, weights, number formats and kernels."""
        return f"fp_{sha256(self.llm.facts.identity).hexdigest()[:16]}"

    @property
    def engines_to_replace(self) -> bool:
        """Whether an admin has asked for it, and it is not done."""
        numbers = self.observer.numbers
        return numbers.total(numbers.restarts_asked) > numbers.total(numbers.restarts_done)

    async def close(self) -> None:
        """Ends all its threads, tasks, processes and files."""
        self.threads.close()
        if self.recorder is not None:
            await self.recorder.close()
        for view in self.views:
            await view.close()
        if self._grammars is not None:
            await self._grammars.close()

    @property
    def state(self) -> State:
        return "draining" if self.draining and self.llm.state != "dead" else self.llm.state
