"""`Request` is a user's request; `Sequence` is one sample of it: its tokens and its progress.

    token_ids     t0 t1 t2 t3 t4 t5 t6 | t7          host knows 7, one more (t7) is being sampled on the device
                  ^-----------^                      num_computed = 4: the update of their plan was processed; sealing reads it
                  ^-----------------------^          num_planned = 7: already in plans; scheduling reads it
                  num_tokens = 7, in_flight = 1      planning may reach num_tokens + in_flight, but not beyond stop_at

A request with n samples starts as one sequence that plans its prompt up to the last token. It is forked there, and every
sample computes that last token itself. `check_request` refuses what can never be served.
"""

import re
from array import array
from collections.abc import Collection
from dataclasses import replace
from enum import Enum
from hashlib import blake2b
from math import inf
from operator import attrgetter

from octavo.errors import RequestError
from octavo.messages import AddRequest, Beams, Ending, LifeRecord, Limits, NoiseKey, RowWrite
from octavo.policy.beam import num_candidates
from octavo.policy.block_pool import BlockKey

LOW32 = 0xFFFFFFFF
NEVER_TRIED = -inf
SEED_BITS = 53  # of the seeds given to requests without one: JSON keeps such integers exactly


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def given_seed(engine_seed: int, number: int) -> int:
    """Returns the seed of a request that has none of its own. `number`: another one for each request"""
    return int.from_bytes(blake2b(b"%d %d" % (engine_seed, number), digest_size=8).digest()) >> (64 - SEED_BITS)


class Request:
    __slots__ = (
        "aborted",
        "arrival",
        "bad_words",
        "beams",
        "checkpoints",
        "end_ids",
        "extras",
        "held",
        "life",
        "num_prompt",
        "params",
        "pin",
        "position_offset",
        "priority",
        "reported_logprobs",
        "request_id",
        "root",
        "seed",
        "sequences",
    )  # fmt: skip

    def __init__(
        self, message: AddRequest, arrival: int, root: bytes, end_ids: frozenset[int], engine_seed: int, queued: float
    ) -> None:
        """`end_ids`: of the model. `arrival`: its position in the queue"""
        params = message.params
        self.request_id = message.request_id
        self.params = params
        self.num_prompt = len(message.prompt_token_ids)
        self.arrival = arrival
        self.priority = message.priority
        self.root = root  # start of its digest chain: model, settings and salt
        self.end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_ids)  # ids that end a sample
        self.reported_logprobs = params.logprobs
        self.beams = message.beams
        if message.beams is not None:  # the token that a beam samples is provisional; the choice is made among its best tokens
            wanted = max(params.logprobs or 0, num_candidates(message.beams.width, len(self.end_ids)))
            self.params = replace(params, temperature=0.0, logprobs=wanted)
        self.pin = message.pin  # set if it computes a prefix that will be pinned
        self.bad_words = message.bad_words  # id sequences that must not occur in a sample
        self.seed = given_seed(engine_seed, arrival) if params.seed is None else params.seed
        self.life = LifeRecord(queued)
        self.extras = message.extras  # link -> additional bytes that its digest covers besides its tokens
        self.checkpoints = message.checkpoints  # where the prompt may be continued differently, for recurrent models
        self.position_offset = message.position_offset
        self.held = False  # must not be admitted yet
        self.sequences: list[Sequence] = []  # the live ones
        self.aborted: set[int] = set()  # samples aborted before the fork that would have created them

    @property
    def num_samples(self) -> int:
        """The maximum number of sequences it has at once."""
        return self.params.n if self.beams is None else self.beams.width

    def noise(self, index: int) -> NoiseKey:
        """Returns the key of a sample's noise, in 32-bit words."""
        return NoiseKey((self.seed & LOW32, index), 0, self.seed >> 32)


class Sequence:
    __slots__ = (
        "__weakref__", "blocks_for_others", "digests", "ended", "in_flight", "index", "key", "last_kept", "limit", "lost", "marks",
        "misses", "num_computed", "num_planned", "num_sealed", "num_tokens", "pending", "preemptions", "request", "reserved", "retry_at",
        "room", "row", "rows_needed", "seq_id", "since", "states", "states_kept", "status", "steps_passed", "stop_at", "tables", "tail",
        "token_ids", "unsealed", "waits_for",
    )  # fmt: skip

    def __init__(
        self, seq_id: int, request: Request, index: int, token_ids: "array[int]", limit: int, by_priority: bool, num_groups: int = 1
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.index = index  # which of the n samples
        self.token_ids = token_ids
        self.num_tokens = len(token_ids)  # ids the host knows
        self.num_planned = 0  # positions given to plans
        self.num_computed = 0  # positions whose plan has been updated
        self.in_flight = 0  # plans that sample for it and whose tokens the host has not received
        self.limit = limit  # maximum number of tokens: max_tokens and max_model_len
        self.stop_at = limit - 1  # planning stops here: the last token is never computed
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]  # its blocks, one table per cache group
        self.room = 0  # positions from num_planned up to here lie in blocks that it does not share
        self.digests: list[bytes] = []  # of its full links, computed on demand
        self.num_sealed = 0  # links whose blocks were offered to the cache
        self.pending: list[BlockKey] = []  # blocks it has announced but may not have sealed yet
        self.waits_for: BlockKey | None = None  # a block that another sequence is computing
        self.misses: tuple[BlockKey, ...] = ()  # blocks that its prefix lacked when it did not fit
        self.retry_at = NEVER_TRIED  # it cannot fit before this many more blocks than its margin have been freed, see admission.py
        self.states_kept: int | None = None  # checkpoints kept so far when it did not fit, if its prefix lacked one
        self.row = -1
        self.since = 0  # the step of its last admission
        self.rows_needed = 1  # more than one if it represents samples that are not forked yet
        self.blocks_for_others = 0  # blocks that those samples need at once, in addition to its own
        self.reserved: list[int] = []  # rows reserved for those samples
        self.status = Status.WAITING
        self.ended: Ending | None = None  # how it ended
        self.preemptions = 0
        self.lost = 0  # positions discarded by the last preemption
        self.steps_passed = 0  # steps in which others were admitted before it
        self.key = (request.priority if by_priority else 0, request.arrival, index)
        self.states: list[tuple[int, int]] = []  # of a recurrent model: (positions covered, state slot), the live one last
        self.unsealed: set[int] = set()  # positions of the states that will be checkpoints
        self.marks: set[int] = set()  # positions where a checkpoint is wanted
        self.tail: bytes | None = None  # the checkpoint in its output, which the next one replaces
        self.last_kept = 0  # the position of the last other checkpoint that it found or left

    @property
    def unforked(self) -> bool:
        """Whether it still represents several samples."""
        return self.stop_at < self.request.num_prompt and self.request.beams is None

    @property
    def reads_cache(self) -> bool:
        """False while logprobs of its prompt are due: they need every position computed."""
        return self.request.params.prompt_logprobs is None or self.num_tokens > self.request.num_prompt

    @property
    def target(self) -> int:
        """The end of the positions that can be planned now."""
        return min(self.num_tokens + self.in_flight, self.stop_at)

    def has_turn(self, step: int, turns: int) -> bool:
        """Whether it may be planned in this step, if sequences with grammars take turns."""
        return self.request.params.structured_outputs is None or (self.seq_id + step) % turns == 0

    def row_write(self, start: int) -> RowWrite:
        """The message to the worker for moving into its row, with `start` positions in the cache."""
        request = self.request
        return RowWrite(
            row=self.row,
            seq_id=self.seq_id,
            token_ids=array("i", self.token_ids),
            num_prompt=request.num_prompt,
            start=start,
            tables=[list(table) for table in self.tables],
            params=request.params,
            end_ids=tuple(sorted(request.end_ids)),
            bad_words=request.bad_words,
            noise=request.noise(self.index),
            root=request.root,
            position_offset=request.position_offset,
        )

    def append(self, tokens: list[int]) -> None:
        """Appends the tokens that one plan sampled."""
        self.token_ids.extend(tokens)
        self.num_tokens += len(tokens)
        self.in_flight -= 1


policy_key = attrgetter("key")  # sorts sequences in policy order


# -- what can never be served

def length_limit(message: AddRequest, limits: Limits) -> int:
    """Returns the maximum length of a sample, prompt and output together."""
    wanted, longest = message.params.max_tokens, limits.max_model_len - message.position_offset
    return longest if wanted is None else min(longest, len(message.prompt_token_ids) + wanted)


def check_request(message: AddRequest, limits: Limits) -> None:
    prompt, params = message.prompt_token_ids, message.params
    if not prompt:
        raise RequestError("the prompt is empty", "prompt")
    _check_ids("prompt", prompt, limits)
    _check_ids("stop_token_ids", params.stop_token_ids, limits)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits)
    _check_ids("logit_bias", params.logit_bias or (), limits)
    if message.beams is not None:
        _check_beams(message.beams, params.n, limits)
    if params.n > limits.max_num_seqs:
        raise RequestError(f"n is {params.n}, but at most {limits.max_num_seqs} sequences run at once (--max-num-seqs)", "n")
    _check_length(message, limits)
    _check_offset(message, limits)


def _check_beams(beams: Beams, n: int, limits: Limits) -> None:
    width = beams.width
    if n > width:
        raise RequestError(f"n is {n}, but a beam search of width {width} has {width} answers", "n")
    if width > limits.max_num_seqs:
        message = f"the beam width is {width}, but at most {limits.max_num_seqs} sequences run at once (--max-num-seqs)"
        raise RequestError(message, "beam_width")
    if 2 * width > limits.vocab_size:
        raise RequestError(f"the beam width is {width}, at most half of the {limits.vocab_size} ids of the vocabulary", "beam_width")


def _check_ids(name: str, ids: Collection[int], limits: Limits) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < limits.vocab_size):  # much faster than checking each id
        return
    bad = next(token for token in ids if not 0 <= token < limits.vocab_size)
    raise RequestError(f"token id {bad} in {name} is out of vocabulary, which has {limits.vocab_size} ids", name)


def _check_length(message: AddRequest, limits: Limits) -> None:
    prompt, params = message.prompt_token_ids, message.params
    if len(prompt) + (params.max_tokens or 1) > limits.max_model_len:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested {_requested(message)}; "
            f"{_knobs(message, limits)}",
            "max_tokens" if len(prompt) < limits.max_model_len else "prompt",
            "context_length_exceeded",
        )
    positions, size = length_limit(message, limits) - 1, limits.block_size  # the last token is never computed
    if positions > limits.cache_tokens:
        raise RequestError(
            f"the request may grow to {-(-positions // size)} blocks of {size} tokens, but the KV cache has {limits.cache_tokens // size}; "
            "lower max_tokens or enlarge the KV cache (--kv-cache-memory-bytes, --num-gpu-blocks-override)",
            "max_tokens",
            "context_length_exceeded",
        )


def _check_offset(message: AddRequest, limits: Limits) -> None:
    most = limits.max_model_len - len(message.prompt_token_ids) - (message.params.max_tokens or 1)
    if not 0 <= message.position_offset <= most:
        raise RequestError(
            f"position_offset is {message.position_offset}, but it must be from 0 to {most}: the model has {limits.max_model_len}, "
            f"and you requested {_requested(message)}",
            "position_offset",
        )


# -- pinned prefixes

MOST_TTL_SECONDS = 30 * 86400.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")


def check_pin(name: object, ttl: object) -> None:
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        message = "name must be 1 to 128 of the characters A-Z a-z 0-9 . _ : -, and begin with a letter, a digit or _"
        raise RequestError(message, "name")
    if ttl is not None and not (type(ttl) in (int, float) and 0 < ttl <= MOST_TTL_SECONDS):  # type: ignore[operator]
        raise RequestError(f"ttl must be a number of seconds above 0 and at most {MOST_TTL_SECONDS:.0f}, got {ttl!r:.40}", "ttl")


def prefix_in_use(name: str) -> RequestError:
    return RequestError(f"there is a prefix with the name {name!r}; release it first, or use another name", "name", "prefix_exists")


def no_such_prefix(name: str) -> RequestError:
    return RequestError(f"there is no pinned prefix with the name {name!r:.140}", "name", "prefix_not_found")


def _requested(message: AddRequest) -> str:
    length, most = len(message.prompt_token_ids), message.params.max_tokens
    if most is None:
        return f"{length} tokens in the prompt"
    return f"{length + most} tokens ({length} in the prompt and {most} in the answer)"


def _knobs(message: AddRequest, limits: Limits) -> str:
    """Returns the settings that help. The model's own maximum cannot be raised."""
    knobs = ["shorten the prompt"] + ([] if message.params.max_tokens is None else ["lower max_tokens"])
    if limits.max_model_len < limits.model_max_len:
        knobs.append(f"raise --max-model-len (up to {limits.model_max_len} tokens, the model's own maximum)")
    return " or ".join(knobs)
