"""`ViewFrame`: what changed in an engine since the last one, as data with token ids; the text side makes lines of it (docs/view.md)."""

from dataclasses import dataclass, field
from typing import Literal

Wanted = Literal["full", "delta", "none"]  # all there is, what is new since the last frame, no more
BlockState = tuple[int, int, int, str, list[int] | None, float | None]  # block, ref, sealed, digest, ids so far, since
StepNumbers = tuple[int, float, float, int, int, int, int, int, int, int, int, int]
# step, at, ms, prefill_tokens, decode_tokens, rows, running, waiting, used_blocks, preempted, hit_tokens, query_tokens
EventWords = tuple[int | float | str, ...]  # step, at, kind, and what belongs to it


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One sequence that is new, has changed or has ended; `table` stands from entry `start` on."""

    seq: int
    request: str
    sample: int
    samples: int  # of its request
    state: str
    prompt: int
    tokens: int
    limit: int  # the most tokens it may have, prompt and answer
    computed: int
    cached: int
    reason: str
    preemptions: int
    start: int
    table: list[int]
    digests: list[str] | None = None  # of its full blocks, where it has ended
    asked: list[int] | None = None  # of a waiting sequence: the last ids of its prompt, which no block holds yet


@dataclass(frozen=True, slots=True)
class ViewFrame:
    full: bool  # whoever reads it forgets what came before
    at: float  # seconds after `started`
    started: float  # unix seconds
    blocks: list[BlockState] = field(default_factory=list)
    seqs: list[SequenceState] = field(default_factory=list)
    gone: list[tuple[int, str]] = field(default_factory=list)
    steps: list[StepNumbers] = field(default_factory=list)
    events: list[EventWords] = field(default_factory=list)
    lost: int = 0
    error: str = ""  # why this is the last one, and empty
