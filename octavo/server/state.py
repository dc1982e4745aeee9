"""The server's state, which every route gets: the engine, the settings, and what the server remembers."""

import time
from dataclasses import dataclass, field

from octavo.engine.async_llm import AsyncLLM, State
from octavo.server.grammar_check import GrammarChecker, first_pieces
from octavo.server.observer import Observer
from octavo.server.recorder import Recorder
from octavo.server.threads import Threads
from octavo.server.view import ViewHub
from octavo.server_config import ServerConfig


@dataclass(slots=True)
class Server:
    llm: AsyncLLM
    config: ServerConfig
    model_name: str  # what clients call the model
    observer: Observer = field(default_factory=Observer)
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False  # told to stop: what is open may end, nothing new begins
    open_requests: int = 0
    warned: set[str] = field(default_factory=set)  # fields nobody knows that were already warned about
    recorder: Recorder | None = None
    threads: Threads = field(default_factory=Threads)
    view: ViewHub = field(init=False)
    _grammars: GrammarChecker | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.view = ViewHub(self)

    @property
    def grammars(self) -> GrammarChecker:
        """Made when somebody asks: its words are the model's."""
        if self._grammars is None:
            tokenizer = self.llm.tokenizer
            special = [tokenizer.token(token) for token in sorted(tokenizer.special_ids)]
            self._grammars = GrammarChecker(special, lambda: first_pieces(tokenizer))
        return self._grammars

    async def close(self) -> None:
        """No process, task or file of its own is left."""
        self.threads.close()
        if self.recorder is not None:
            await self.recorder.close()
        await self.view.close()
        if self._grammars is not None:
            await self._grammars.close()

    @property
    def state(self) -> State:
        return "draining" if self.draining and self.llm.state != "dead" else self.llm.state
