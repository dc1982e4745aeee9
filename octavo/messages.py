"""The messages of a step: the plan for the worker, its result, and the deltas for the text side.

All of it is plain data (ids and numbers, never live objects), so that it can cross a process.
"""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    Ids = array[int]
else:
    Ids = array  # decoders look at the types of fields, and there an array has no parameter

FinishReason = Literal["stop", "length", "abort", "error"]
Ending = Literal["stop", "length", "abort", "error", "lost"]  # of a sequence; lost: a beam that others have outranked
HitReason = Literal["end", "short", "differs", "evicted", "cold", "off", "no_state", "state_evicted"]


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """The source of a sequence's sampling noise: the same key and position give the same noise anywhere."""

    key: tuple[int, int]
    stream: int
    high: int


@dataclass(slots=True)
class RowWrite:
    """A sequence moves into a row. This is all that a worker learns about it."""

    row: int
    seq_id: int
    token_ids: Ids
    num_prompt: int
    start: int  # positions already in the cache (the prefix hit)
    tables: list[list[int]]  # the blocks of that hit, a table for each cache group; the null block behind a window
    params: SamplingParams
    end_ids: tuple[int, ...]  # ids that end it, held back until min_tokens
    bad_words: list[list[int]]  # ids that must not follow each other in its output
    noise: NoiseKey
    root: bytes  # start of its digest chain; sequences with different roots share nothing
    position_offset: int = 0  # the position of a token is its index plus this


@dataclass(slots=True)
class RowFork:
    """`row` becomes a copy of `source`: a sample leaves its parent, or a sequence moves into another row."""

    row: int
    source: int
    seq_id: int
    noise: NoiseKey
    moves: bool = False  # the sequence itself was in `source`


@dataclass(slots=True)
class StepPlan:
    """The work of one step. Entry i of the five parallel lists is one scheduled row.

    A worker carries it out in this order: copies, row forks, row writes, lengths, last ids, new blocks, forward, sample.
    Copies read all their sources before any of them writes. Row forks and row writes are one parallel assignment: every source is read
    before any row is written, so two rows can exchange places. No row is written twice.
    All cache groups share one pool of blocks of equal bytes, so a copy is of a whole block, whichever group owns it.
    A row with a new length keeps that many ids, and the table entries for all positions except that of its last id; the rest of the row
    is meaningless. Its last id is computed again, because a token is sampled after it.
    A new block may be the null block: then the entry is out of its group's window and is never read again, and its previous block may
    belong to another row from this plan on.
    Drafts are ids that may come next. They are computed at the positions after the row's last id, so `num_query` counts them. Output i of
    a row is sampled after its draft i, and draft i + 1 is accepted if it is the id sampled there; so drafts never change a text. The cache
    slots of rejected drafts are written again by the row's next plan, which starts at the first of them.
    In a model with recurrent layers an entry reads a state and writes another one, and no entry writes what any entry reads, so a step
    can be computed twice. A checkpoint is one more state that an entry writes on its way.
    """

    step: int
    row: list[int] = field(default_factory=list)
    seq_id: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)  # first position computed
    num_query: list[int] = field(default_factory=list)  # how many
    outputs: list[int] = field(default_factory=list)  # sampled from how many logits: none, or one after its last id and each of its drafts
    drafts: dict[int, list[int]] = field(default_factory=dict)  # entry -> its drafts, if it has any
    new_blocks: list[tuple[int, int, int, int]] = field(default_factory=list)  # (row, cache group, index in that table, block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source block, fresh block)
    row_writes: list[RowWrite] = field(default_factory=list)
    row_forks: list[RowFork] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)  # (row, ids it keeps)
    last_ids: list[tuple[int, int]] = field(default_factory=list)  # (row, id that replaces its last one)
    mask_rows: list[int] = field(default_factory=list)  # entries with a grammar: each of their outputs is sampled with a mask
    group_lengths: dict[int, list[int]] = field(default_factory=dict)  # cache group -> of each entry, if not all positions to its end
    states: list[tuple[int, int]] = field(default_factory=list)  # of each entry of a recurrent model: state slot read, state slot written
    checkpoints: list[tuple[int, int, int]] = field(default_factory=list)  # (entry, positions covered, state slot), in ascending order

    def sampled_position(self, entry: int) -> int:
        """Returns the position of the id that an entry's first output samples."""
        return self.start[entry] + self.num_query[entry] - len(self.drafts.get(entry, ()))

    def first_outputs(self) -> Sequence[int]:
        """Returns where the outputs of each entry begin, and their end. Logits are also computed after entries that sample nothing."""
        if not self.drafts:
            return range(len(self.row) + 1)
        return [0, *accumulate(max(count, 1) for count in self.outputs)]

    @property
    def is_empty(self) -> bool:
        """Returns whether a worker has nothing to do."""
        return not (self.row or self.row_writes or self.row_forks or self.lengths or self.last_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token, sampled or of a prompt: its logprob and rank, and the best alternatives, best first."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...]  # tuples, which the garbage collector skips: a slow reader has 100,000 of them waiting
    top_logprobs: tuple[float, ...]

    def best(self, count: int) -> "TokenLogprobs":
        """Returns the same token with this many alternatives."""
        return replace(self, top_ids=self.top_ids[:count], top_logprobs=self.top_logprobs[:count])


PromptPiece = tuple[int, list[TokenLogprobs]]  # logprobs of a prompt's tokens from this position on


@dataclass(slots=True)
class StepResult:
    """The result of a plan; its lists are parallel to the plan's entries."""

    step: int
    tokens: list[list[int]]  # [] if nothing was sampled; otherwise the accepted drafts and one id more
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # entry -> if requested, of its ids and maybe of further outputs
    prompt_logprobs: dict[int, PromptPiece] = field(default_factory=dict)  # entry -> if requested
    bad_rows: list[int] = field(default_factory=list)  # entries whose hidden states were not finite


@dataclass(slots=True)
class LifeRecord:
    """What happened to a request; times in seconds of the engine's monotonic clock, None until it happened."""

    queued: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    common_tokens: int = 0  # tokens whose blocks were found; more than cached ones if a recurrent model had no state for the rest
    pinned_tokens: int = 0  # of those, found in a pinned prefix
    hit_reason: HitReason | None = None
    hit_group: int | None = None  # with several cache groups, the group whose missing block ended the hit
    engine: int = 0  # which of several engines computes it
    routing: str = ""  # why that engine; empty: there is one engine
    resumed: int = 0  # how often it was moved, because its engine died or was replaced


@dataclass(slots=True)
class Delta:
    """An update of one sample: tokens since the last delta, and how it ended if it did; or only a piece of the prompt's logprobs."""

    request_id: str
    index: int  # which of the n samples
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    life: LifeRecord | None = None  # with the first token and at the end
    prompt_logprobs: PromptPiece | None = None
    code: str | None = None  # of the error: numerical_error, queue_timeout


@dataclass(frozen=True, slots=True)
class Beams:
    """A request is answered by beam search: its `params.n` best answers are returned together."""

    width: int
    length_penalty: float = 1.0  # answers are compared by score / length ** length_penalty
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, slots=True)
class PinOrder:
    """A request computes a prefix that is then pinned. Several requests may carry the same order, which is carried out once."""

    pin_id: str
    seconds: float | None = None  # how long it is pinned, from now on; None: until it is released
    hits: int = 0  # counted by earlier engines
    tokens_saved: int = 0


@dataclass(frozen=True, slots=True)
class PinState:
    """A pinned prefix in one engine."""

    pin_id: str
    held: bool  # False: it is being computed
    prompt_tokens: int  # of the prompt from which it was made
    num_tokens: int  # its first tokens, in whole blocks
    num_blocks: int
    hits: int  # requests that found a part of it
    tokens_saved: int  # tokens that these requests did not compute
    seconds_left: float | None = None  # None: until it is released


@dataclass(slots=True)
class AddRequest:
    """A request on its way into the engine: text is already token ids."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    bad_words: list[list[int]] = field(default_factory=list)  # params.bad_words as token ids
    outputs: dict[int, list[int]] | None = None  # the request began elsewhere: sample -> its tokens so far, for all that have not ended
    beams: Beams | None = None
    pin: PinOrder | None = None
    position_offset: int = 0  # the position of a token is its index plus this
    extras: dict[int, bytes] = field(default_factory=dict)  # link of the prompt -> what its digest covers besides its tokens
    checkpoints: list[int] = field(default_factory=list)  # lengths of prefixes that other prompts may continue, for recurrent models

    def resumed(self, outputs: dict[int, list[int]]) -> "AddRequest":
        """Returns the request as another engine continues it. `outputs`: the tokens so far of each sample that has not ended"""
        is_fresh = len(outputs) == self.params.n and not any(outputs.values())
        return replace(self, outputs=None if is_fresh else outputs)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one engine, against which requests are checked."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    model_max_len: int = 0  # the model's own maximum, up to which max_model_len can be raised
    cache_tokens: int = 1 << 60  # the largest number of positions of one sequence that fits the whole KV cache
    max_pinned_blocks: int = 0  # that pinned prefixes may hold


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Blocks of an engine that can be found, or no longer: short digests of 8 bytes each, concatenated."""

    full: bool  # the reader forgets what came before
    sealed: bytes
    evicted: bytes = b""


BEAT_SECONDS = 1.0  # between two heartbeats of a rank


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What is known of one rank of a model that is split."""

    rank: int
    stage: int
    stages: int
    place: int  # in its stage
    places: int
    pid: int
    host: str
    cores: str  # a list such as 0-3,8
    device: str
    kernels: str
    first_layer: int
    num_layers: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class RankNumbers:
    """What a rank had done by its last heartbeat. It is in a step also while it waits for other ranks."""

    steps: int
    seconds: float  # in steps
    share: float  # of the last second, in steps
    age: float  # seconds since that heartbeat


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What start-up resolved and the text side has to know."""

    model_name: str
    epoch: int  # which start of the engine this is: 1, and one more after every restart
    limits: Limits
    ranks: list[RankFacts] = field(default_factory=list)  # if there are several
    digest_key: bytes = b""  # equal keys and identities give equal digests
    identity: bytes = b""
    weights: bytes = b""  # identifies the weights; empty: there are none
    keeps_states: bool = False  # a model with recurrent layers: requests say where other prompts may continue (AddRequest.checkpoints)


STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class SchedulerStats:
    """A snapshot for the log line, for metrics and for tests."""

    running: int
    waiting: int
    free_blocks: int
    num_blocks: int
    preemptions: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # of which found
    prompt_tokens: int  # computed
    generation_tokens: int
    steps: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))  # by tokens: at most STEP_TOKENS[i], or more
    step_tokens: int = 0  # computed, by all of them
    pinned_blocks: int = 0
    pin_hits: int = 0  # requests that found a part of a pinned prefix
    pin_tokens: int = 0  # tokens that they found there
    state_slots: int = 0  # of a recurrent model, without the null one
    held_states: int = 0  # of these, held by sequences and pins
    checkpoints: int = 0  # states that prompts can continue from, whether held or not
    checkpoints_kept: int = 0
    checkpoints_used: int = 0  # to continue from
    checkpoints_evicted: int = 0
    stateless_tokens: int = 0  # prompt tokens whose blocks were found, but no state after them: they were computed again

    def after(self, before: "SchedulerStats") -> "SchedulerStats":
        """Returns these numbers with the counters of an earlier engine added."""
        gauges = ("running", "waiting", "free_blocks", "num_blocks", "pinned_blocks", "state_slots", "held_states", "checkpoints")
        return replace(self.plus(before), **{name: getattr(self, name) for name in gauges})

    def plus(self, other: "SchedulerStats") -> "SchedulerStats":
        """Returns the numbers of two engines together."""
        sums = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self) if each.name != "steps"}
        return SchedulerStats(**sums, steps=[one + more for one, more in zip(self.steps, other.steps, strict=True)])

    def count_step(self, num_tokens: int) -> None:
        if num_tokens:
            self.steps[bisect_left(STEP_TOKENS, num_tokens)] += 1
            self.step_tokens += num_tokens
