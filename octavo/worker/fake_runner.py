"""FakeKV: a runner without weights in which any paging mistake changes the text.

    slot of position i:   h[i] = mix(h[i-1] read through the block table, token i, i),   h[-1] from the digest root
    next token:           a hash over every h read through the table, and the noise key (greedy: none); no end id before min_tokens,
                          and of a masked row only what the mask allows
    logprobs:             to a hash every token is as likely as any other, in prompts too

A wrong block, a stale block, a wrong parent, a lost token or a slip at a block edge gives another text at once. `expected`
computes the same over a plain list. Slots start, and poisoned rows leave, `None`: reading one makes the row bad, as NaN would.
"""

from array import array
from collections.abc import Collection
from math import log

import numpy as np

from octavo.errors import EngineError
from octavo.messages import NoiseKey, PromptPiece, StepPlan, StepResult, TokenLogprobs
from octavo.policy.cache_spec import CacheGeometry
from octavo.sampling_params import SamplingParams
from octavo.worker.executor import Kept, Masks
from octavo.worker.faults import Faults

MASK = (1 << 61) - 1
NO_NOISE = NoiseKey((0, 0), 0, 0)
Slot = int | None


def _mix(previous: int, token: int, position: int) -> int:
    return (previous * 6364136223846793005 + token * 1442695040888963407 + position + 1) & MASK


def _root(root: bytes) -> int:
    return int.from_bytes(root[:7], "little")


def _next_token(entries: list[int], noise: NoiseKey, vocab_size: int, barred: Collection[int], mask: Masks | None = None) -> int:
    drawn = hash((noise.key, noise.stream, noise.high, *entries))
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size].nonzero()[0].tolist()
        left = [token for token in allowed if token not in barred]
        return int(left[drawn % len(left)])
    token = drawn % vocab_size
    while token in barred:
        token = (token + 1) % vocab_size
    return token


def _even(count: int, vocab_size: int) -> TokenLogprobs:
    """Of any token, with as many of the best, of which the lower ids come first."""
    ids, logprob = list(range(min(count, vocab_size))), -log(vocab_size)
    return TokenLogprobs(logprob, 1, ids, [logprob] * len(ids))


def expected(
    prompt: list[int], count: int, root: bytes, noise: NoiseKey, vocab_size: int, end_ids: Collection[int] = (), min_tokens: int = 0
) -> list[int]:
    """`count` tokens after `prompt`, without blocks."""
    entries: list[int] = []
    previous, tokens = _root(root), list(prompt)
    while len(tokens) < len(prompt) + count:
        for position in range(len(entries), len(tokens)):
            previous = _mix(previous, tokens[position], position)
            entries.append(previous)
        barred = end_ids if len(tokens) < len(prompt) + min_tokens else ()
        tokens.append(_next_token(entries, noise, vocab_size, barred))
    return tokens[len(prompt) :]


class _Row:
    __slots__ = ("end_ids", "noise", "num_prompt", "params", "root", "table", "tokens")

    def __init__(
        self,
        tokens: "array[int]",
        table: list[int],
        root: int,
        noise: NoiseKey,
        end_ids: tuple[int, ...],
        num_prompt: int,
        params: SamplingParams,
    ) -> None:
        self.tokens = array("i", tokens)
        self.table = list(table)
        self.root = root
        self.noise = noise
        self.end_ids = end_ids
        self.num_prompt = num_prompt
        self.params = params

    @property
    def barred(self) -> tuple[int, ...]:
        return self.end_ids if len(self.tokens) < self.num_prompt + self.params.min_tokens else ()


class FakeRunner:
    def __init__(self, geometry: CacheGeometry, vocab_size: int, faults: Faults) -> None:
        self.geometry = geometry
        self.vocab_size = vocab_size
        self.faults = faults
        self.blocks: list[list[Slot]] = [[None] * geometry.block_size for _ in range(geometry.num_blocks)]
        self.rows: dict[int, _Row] = {}
        self.num_computed = 0  # positions, over all steps
        self._plan = StepPlan(0)
        self._entries: list[list[int] | None] = []  # what each entry of the plan read

    def stop(self) -> None:
        self.blocks, self.rows = [], {}

    def forward(self, plan: StepPlan) -> None:
        self.faults.before_forward(plan.step)
        copied = [list(self.blocks[source]) for source, _ in plan.copies]  # all reads before any write
        for (_, target), content in zip(plan.copies, copied, strict=True):
            self.blocks[target] = content
        self._apply_rows(plan)
        self._plan, self._entries = plan, []
        for entry, row_id in enumerate(plan.row):
            row = self.rows[row_id]
            entries = self._compute(row, plan.start[entry], plan.num_query[entry])
            if self.faults.poisons(plan.step, entry):
                self._poison(row, plan.start[entry], plan.num_query[entry])
                entries = None
            self._entries.append(entries)

    def sample(self, masks: Masks | None = None) -> Kept:
        plan = self._plan
        masked = {} if masks is None else dict(zip(plan.mask_rows, masks, strict=True))
        result = StepResult(plan.step, [], bad_rows=[entry for entry, entries in enumerate(self._entries) if entries is None])
        for entry, (row_id, entries) in enumerate(zip(plan.row, self._entries)):
            row, tokens = self.rows[row_id], []
            if plan.samples[entry]:
                token = 0 if entries is None else _next_token(entries, row.noise, self.vocab_size, row.barred, masked.get(entry))
                row.tokens.append(token)
                tokens = [token]
                if row.params.logprobs is not None:
                    result.logprobs[entry] = _even(row.params.logprobs, self.vocab_size)
            result.tokens.append(tokens)
            if piece := self._prompt_piece(row, plan.start[entry], plan.num_query[entry]):
                result.prompt_logprobs[entry] = piece
        return Kept(result)

    def _prompt_piece(self, row: _Row, start: int, count: int) -> PromptPiece | None:
        """Of the prompt's tokens that come after those computed."""
        wanted, reach = row.params.prompt_logprobs, min(start + count, row.num_prompt - 1)
        return None if wanted is None or reach <= start else (start + 1, [_even(wanted, self.vocab_size)] * (reach - start))

    def _apply_rows(self, plan: StepPlan) -> None:
        changed = [fork.row for fork in plan.row_forks] + [write.row for write in plan.row_writes]
        if len(changed) > len(set(changed)):  # a device makes all these changes at once, in no order
            raise EngineError(f"rows {sorted(changed)}: one is written twice in step {plan.step}")
        for fork in plan.row_forks:
            source = self.rows[fork.source]
            noise = NO_NOISE if source.noise is NO_NOISE else fork.noise
            self.rows[fork.row] = _Row(source.tokens, source.table, source.root, noise, source.end_ids, source.num_prompt, source.params)
        for write in plan.row_writes:
            noise = NO_NOISE if write.params.greedy else write.noise
            self.rows[write.row] = _Row(
                write.token_ids, write.table, _root(write.root), noise, write.end_ids, write.num_prompt, write.params
            )
        for row_id, index, block in plan.new_blocks:
            table = self.rows[row_id].table
            if index < len(table):
                table[index] = block
            elif index == len(table):
                table.append(block)
            else:
                raise EngineError(f"row {row_id}: block for index {index}, table has {len(table)}")

    def _compute(self, row: _Row, start: int, count: int) -> list[int] | None:
        """Write the new entries; every entry of the row, or None if one of them was never written."""
        size, blocks, table = self.geometry.block_size, self.blocks, row.table
        self.num_computed += count
        previous: Slot = row.root if start == 0 else blocks[table[(start - 1) // size]][(start - 1) % size]
        for position in range(start, start + count):
            if previous is not None:
                previous = _mix(previous, row.tokens[position], position)
            blocks[table[position // size]][position % size] = previous
        read = [slot for block in table for slot in blocks[block]]
        entries = [slot for slot in read[: start + count] if slot is not None]
        return entries if len(entries) == start + count else None

    def _poison(self, row: _Row, start: int, count: int) -> None:
        size = self.geometry.block_size
        for position in range(start, start + count):
            self.blocks[row.table[position // size]][position % size] = None
