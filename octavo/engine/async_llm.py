"""`AsyncLLM`: a server's side of an engine that runs in a process of its own."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.messages import EngineFacts, SchedulerStats
from octavo.outputs import TextDelta
from octavo.sampling_params import SamplingParams
from octavo.text.prompt import PromptEncoder
from octavo.text.tokenizer import Tokenizer

State = Literal["loading", "ready", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, ready for the engine."""

    prompt: str | None  # its text, where it has one
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs first, where scheduling_policy is priority
    cache_salt: str = ""  # prompts of different salts share no block
    timeout: float | None = None  # seconds; past them, DeadlineError


class AsyncLLM:
    facts: EngineFacts  # known once ready
    state: State
    encoder: PromptEncoder
    tokenizer: Tokenizer
    sampling_defaults: Mapping[str, object]
    stats: SchedulerStats  # the last known

    def generate(self, ask: Ask) -> AsyncIterator[list[TextDelta]]:
        """News since the last item, of all samples; leaving the iteration aborts the request.

        Raises RequestError, OverloadError, UnavailableError, DeadlineError and EngineError, before the first item where it can.
        """
        raise NotImplementedError

    async def reset_prefix_cache(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
