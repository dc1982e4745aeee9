"""A frame of the view: what has changed in an engine since the last one, with token ids. The text side makes lines of it (docs/view.md)."""

from dataclasses import dataclass, field
from typing import Literal

Wanted = Literal["full", "delta", "none"]  # everything, the changes since the last frame, or no more frames
BlockState = tuple[int, int, int, str, list[int] | None, float | None]  # block, ref, sealed (1 + its pins), digest, ids so far, since
StepNumbers = tuple[int, float, float, int, int, int, int, int, int, int, int, int]
# step, at, ms, prefill_tokens, decode_tokens, rows, running, waiting, used_blocks, preempted, hit_tokens, query_tokens
StateNumbers = tuple[int, int, int, int]  # state slots of a recurrent model: all, live, checkpoints, pinned checkpoints
EventWords = tuple[int | float | str, ...]  # step, at, kind, and the fields of that kind


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence that is new, has changed or has ended. `table` has its entries from `start` on."""

    seq: int
    request: str
    sample: int
    samples: int  # of its request
    state: str
    prompt: int
    tokens: int
    limit: int  # the largest number of tokens, prompt and answer
    computed: int
    cached: int
    reason: str
    preemptions: int
    start: int
    table: list[int]
    digests: list[str] | None = None  # of its full blocks, if it has ended
    asked: list[int] | None = None  # of a waiting sequence: the last ids of its prompt, which are in no block yet
    kept: list[int] | None = None  # of a recurrent model: after how many of its tokens a state is kept


@dataclass(frozen=True, slots=True)
class ViewFrame:
    full: bool  # the reader forgets what came before
    at: float  # seconds after `started`
    started: float  # unix seconds
    blocks: list[BlockState] = field(default_factory=list)
    seqs: list[SequenceState] = field(default_factory=list)
    gone: list[tuple[int, str]] = field(default_factory=list)
    steps: list[StepNumbers] = field(default_factory=list)
    events: list[EventWords] = field(default_factory=list)
    lost: int = 0
    states: StateNumbers | None = None  # if they have changed
    error: str = ""  # why this frame is the last one, and empty
