"""Draws the random requests and schedules of `octavo verify --schedules`.

    requests      greedy, with a seed and by beam search, one sample or several, with logprobs; most prompts share a prefix, the longest
                  have more tokens than a piece of attention, and some continue the answer to another request
    schedules     limits, chunks, pipeline depth, threads, blocks, size of the pool, caching, preemptions, when requests arrive, and when
                  one of two engines is lost

Equal seeds give equal ones, so that a difference can be found again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from octavo.messages import AddRequest, Beams
from octavo.sampling_params import SamplingParams

LONGEST = 640  # tokens of a sequence, if the model allows as many
LEAST = 448  # attention joins pieces of 256 keys: a context should have more than one
MOST_ANSWER = 16
MOST_TAIL = 64  # tokens after a shared prefix
MOST_NEXT = 16  # tokens of a second turn, after the first answer
MOST_ROWS = 16
MOST_LOST = 2 * MOST_ANSWER  # tokens of an engine that is lost
BLOCK_SIZES = (4, 64)  # beside the configured one
CHUNKS = (16, 48, 100, 256, 1024)
POOLS = (1.25, 2.0, 5.0)  # in sequences of the greatest length
KINDS = (
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9, n=4, logprobs=2),
    SamplingParams(temperature=0, logprobs=0, prompt_logprobs=1),
    SamplingParams(temperature=0, n=3, logprobs=2),
    SamplingParams(temperature=0.8, top_k=20, presence_penalty=0.5, logprobs=2),
)
SEARCHES = (SamplingParams(n=2, logprobs=2), SamplingParams(n=1, logprobs=0))  # with beams
BEAMS = Beams(2)


@dataclass(frozen=True, slots=True)
class Work:
    """Requests, and for each second turn the request whose answer it continues."""

    requests: list[AddRequest]
    after: dict[str, str]


@dataclass(frozen=True, slots=True)
class Schedule:
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pipeline_depth: int
    threads: int
    pool: float  # in sequences of the greatest length
    caching: bool
    rounds: int  # how often all requests run: in the second round the cache has seen them
    preempt_every: int  # steps; 0: only if the pool is full
    share_all: bool  # rows read every shared key together, even if it does not pay off
    order: tuple[int, ...]  # in which requests arrive
    burst: int  # requests that arrive at once
    gap: int  # steps between two bursts
    lost_after: int  # tokens that the first of two engines answers before it is lost; 0: there is one engine

    def __str__(self) -> str:
        cache = ("two rounds with a cache" if self.rounds == 2 else "a cache") if self.caching else "no cache"
        engines = f"two engines and one of them lost after {self.lost_after} tokens" if self.lost_after else "one engine"
        preempted = f"preempted every {self.preempt_every} steps" if self.preempt_every else "not preempted on purpose"
        return (
            f"{self.max_num_batched_tokens} tokens and {self.max_num_seqs} sequences a step, depth {self.pipeline_depth}, "
            f"threads: {self.threads}, blocks of {self.block_size}, pool of {self.pool:g} sequences, {cache}, {preempted}, "
            f"{self.burst} every {self.gap} steps, {engines}"
        )


def draw_requests(count: int, longest: int, vocab_size: int, seed: int) -> list[AddRequest]:
    """Returns first turns. `longest`: tokens of a sequence, with room for a second turn"""
    rng = Random(f"requests {seed}")
    room = longest - 2 * MOST_ANSWER - MOST_NEXT - MOST_TAIL
    prefixes = [_ids(rng, room, vocab_size) for _ in range(2)]
    requests: list[AddRequest] = []
    for number in range(count):
        if number % 4 == 3:
            prompt = _ids(rng, rng.randint(1, room // 2), vocab_size)  # shares nothing
        else:
            prefix = prefixes[number % len(prefixes)][: room if number % 4 < 2 else rng.randint(1, room)]
            prompt = prefix + _ids(rng, rng.randint(1, MOST_TAIL), vocab_size)
        kind = (*KINDS, *SEARCHES)[number % (len(KINDS) + len(SEARCHES))]
        params = replace(kind, seed=number, ignore_eos=True, max_tokens=rng.randint(MOST_ANSWER // 4, MOST_ANSWER))
        requests.append(AddRequest(str(number), prompt, params, beams=BEAMS if kind in SEARCHES else None))
    return requests


def draw_second_turns(first: Sequence[AddRequest], answers: Mapping[str, list[int]], vocab_size: int, seed: int) -> Work:
    """Returns the first turns, and for every third of them a request that continues its answer."""
    rng = Random(f"turns {seed}")
    turns, after = [], {}
    for request in first[::3]:
        name = f"{request.request_id}, turn 2"
        prompt = request.prompt_token_ids + answers[request.request_id] + _ids(rng, rng.randint(1, MOST_NEXT), vocab_size)
        turns.append(replace(request, request_id=name, prompt_token_ids=prompt))
        after[name] = request.request_id
    return Work([*first, *turns], after)


def with_second_turn(requests: Sequence[AddRequest]) -> int:
    """Returns the most tokens of a sequence that has a second turn. All requests limit their answers."""
    return max(len(request.prompt_token_ids) + 2 * (request.params.max_tokens or 0) + MOST_NEXT for request in requests)


def draw_schedules(count: int, block_size: int, longest: int, threads: int, requests: int, seed: int) -> list[Schedule]:
    """Returns schedules, those with the same block size together. The first one has all that a schedule can have.

    `block_size`, `threads`: as configured, which are drawn too
    """
    sizes = list(dict.fromkeys((block_size, *BLOCK_SIZES)))[:count]
    schedules = []
    for number in range(count):
        rng = Random(f"schedule {seed} {number}")
        chunk, caching = rng.choice(CHUNKS), rng.random() < 0.75
        drawn = Schedule(
            block_size=sizes[number * len(sizes) // count],
            max_num_seqs=rng.choice((4, 7, MOST_ROWS)),
            max_num_batched_tokens=chunk,
            pipeline_depth=rng.choice((1, 2)),
            threads=rng.choice((1, 2, threads)),
            pool=rng.choice(POOLS),
            caching=caching,
            rounds=1 + (caching and rng.random() < 0.5),
            preempt_every=rng.choice((0, preemptions(longest, chunk) + rng.randint(0, 4))),
            share_all=rng.random() < 0.5,
            order=tuple(rng.sample(range(requests), requests)),
            burst=rng.choice((1, 3, requests)),
            gap=rng.randint(1, 8),
            lost_after=rng.choice((0, rng.randint(1, MOST_LOST))),
        )
        if number == 0:
            every = preemptions(longest, 100)
            drawn = replace(drawn, max_num_seqs=MOST_ROWS, max_num_batched_tokens=100, pipeline_depth=2, threads=2, pool=POOLS[0],
                            caching=True, rounds=2, preempt_every=every, share_all=True,
                            lost_after=rng.randint(1, MOST_LOST))  # fmt: skip
        schedules.append(drawn)
    return schedules


def preemptions(longest: int, chunk: int) -> int:
    """Returns after how many steps a sequence may be preempted again: the longest must get beyond its prompt in between."""
    return -(-longest // chunk) + 2


def _ids(rng: Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]
