"""GET /v1/requests/{id}: what happened to a request, found by the id of its answer.

A record is shown to the client that made the request, and to whoever may read text (privacy.py). Times are seconds after arrival.
No text is kept. When there are more than MOST_SAMPLES answers, the oldest records are dropped.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fastapi import APIRouter

from octavo.messages import FinishReason, LifeRecord
from octavo.server.access import Arrival, current_arrival
from octavo.server.errors import ApiError

if TYPE_CHECKING:
    from octavo.server.state import Server

MOST_SAMPLES = 10_000  # some 5 MB


@dataclass(slots=True)
class Sample:
    """One answer to a prompt."""

    prompt: "Prompt"
    generated_tokens: int = 0
    last_token: float = 0.0  # when it came; 0: none has
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Prompt:
    prompt_tokens: int
    left: int  # samples that have not ended
    first_token: float = 0.0  # when it came; 0: none has
    finished: float = 0.0
    life: LifeRecord | None = None  # what the engine said last


@dataclass(slots=True)
class Record:
    id: str
    arrival: Arrival
    n: int  # samples of each prompt
    prompts: list[Prompt]
    samples: list[Sample]  # in the order of choices: prompt * n + sample
    error: str | None = None  # why it failed, as in the metrics
    finished: float = 0.0  # when nobody waited for it any more

    @property
    def state(self) -> Literal["running", "finished"]:
        return "finished" if self.finished else "running"

    def told(self) -> dict[str, object]:
        samples = [self.samples[at : at + self.n] for at in range(0, len(self.samples), self.n)]
        return {
            "id": self.id,
            "object": "request",
            "request_id": self.arrival.request_id,
            "created": round(self.arrival.wall, 3),
            "state": self.state,
            "error": self.error,
            "prompts": [_told(prompt, its, self.arrival.at) for prompt, its in zip(self.prompts, samples, strict=True)],
        }


def _told(prompt: Prompt, samples: list[Sample], arrived: float) -> dict[str, object]:
    life = prompt.life or LifeRecord(0.0)
    times = (("queued", life.queued), ("first_scheduled", life.first_scheduled), ("first_token", prompt.first_token))
    return {
        "prompt_tokens": prompt.prompt_tokens,
        "cached_tokens": life.cached_tokens,
        "hit_reason": life.hit_reason,
        "preemptions": life.preemptions,
        "recomputed_tokens": life.recomputed_tokens,
        **{name: round(at - arrived, 6) if at else None for name, at in (*times, ("finished", prompt.finished))},
        "samples": [{"generated_tokens": each.generated_tokens, "finish_reason": each.finish_reason} for each in samples],
    }


@dataclass(slots=True)
class Records:
    _known: dict[str, Record] = field(default_factory=dict)  # oldest first
    _num_samples: int = 0

    def add(self, record: Record) -> None:
        self._known[record.id] = record
        self._num_samples += len(record.samples)
        while self._num_samples > MOST_SAMPLES and len(self._known) > 1:
            oldest = self._known.pop(next(iter(self._known)))
            self._num_samples -= len(oldest.samples)

    def get(self, answer_id: str) -> Record | None:
        return self._known.get(answer_id)


def router(server: "Server") -> APIRouter:
    routes = APIRouter()

    @routes.get("/v1/requests/{id}")
    async def request_record(id: str) -> dict[str, object]:
        record = server.observer.records.get(id)
        if record is None or not current_arrival().caller.may_read(record.arrival.caller):
            raise ApiError(404, "there is no record with this id, or it is no longer kept", param="id", code="request_not_found")
        return record.told()

    return routes
