"""FakeKV: a runner without weights in which any paging mistake changes the text.

    slot of index i:      h[i] = mix(h[i-1] read through the block table, token i, i + offset of the row),   h[-1] from the digest root
    next token:           a hash over every h read through the table, and the noise key (none if greedy); no end id before min_tokens,
                          no last id of a bad word, and for a masked row only ids that the mask allows
    drafts:               their slots are written like all others, so a rejected one that is read later changes the text, too
    logprobs:             another hash over every h determines the best token, its logprob, and how much less the next ids have;
                          in prompts all tokens are equally likely

A wrong block, a stale block, a wrong parent, a lost token or an error at a block boundary changes the text at once. `expected`
computes the same over a plain list. Slots are `None` at first and in poisoned rows: reading one makes the row bad, as NaN would.
Every further cache group must hold the same as the first: everything that a query reads is compared, up to the length that the plan
says, and a freed block must not be read. With states, h[i-1] is read from a state slot, not through the table: a wrong one changes the
text. A state may be written only if no row of the step reads it.
"""

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from octavo.errors import EngineError
from octavo.messages import NoiseKey, PromptPiece, RowWrite, StepPlan, StepResult, TokenLogprobs
from octavo.policy.block_pool import NULL_BLOCK
from octavo.policy.cache_spec import CacheGeometry
from octavo.policy.state_pool import NULL_STATE
from octavo.sampling_params import SamplingParams
from octavo.worker.executor import Kept, Masks, num_drafts, row_masks
from octavo.worker.faults import Faults

MASK = (1 << 61) - 1
NO_NOISE = NoiseKey((0, 0), 0, 0)
Slot = int | None


def _mix(previous: int, token: int, position: int) -> int:
    return (previous * 6364136223846793005 + token * 1442695040888963407 + position + 1) & MASK


def _of_group(number: int, entry: int) -> int:
    """Returns the value that a cache group stores for `entry`. It differs between groups, so that a wrong group's block is detected."""
    return entry ^ number


def _root(root: bytes) -> int:
    return int.from_bytes(root[:7], "little")


def _next_token(entries: list[int], noise: NoiseKey, vocab_size: int, barred: Collection[int], mask: Masks | None = None) -> int:
    drawn = hash((noise.key, noise.stream, noise.high, *entries))
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
        allowed[list(barred)] = 0
        left = allowed.nonzero()[0]
        return int(left[drawn % len(left)])
    token = drawn % vocab_size
    while token in barred:
        token = (token + 1) % vocab_size
    return token


def _even(count: int, vocab_size: int) -> TokenLogprobs:
    """Returns logprobs in which all tokens are equally likely, and the `count` best, lower ids first."""
    ids, logprob = tuple(range(min(count, vocab_size))), -log(vocab_size)
    return TokenLogprobs(logprob, 1, ids, (logprob,) * len(ids))


def ranked(entries: Sequence[int], token: int, count: int, vocab_size: int) -> TokenLogprobs:
    """Returns the logprob of a token after these entries, and the best `count`: the best id, followed by the next higher ids."""
    drawn, ranks = hash((1, *entries)), range(min(count, vocab_size))
    best, fall, rank = drawn % vocab_size, 0.1 + drawn % 9973 / 9973, (token - drawn) % vocab_size
    first = -0.05 - drawn // 9973 % 9973 / 9973
    ids, logprobs = tuple((best + other) % vocab_size for other in ranks), tuple(first - fall * other for other in ranks)
    return TokenLogprobs(first - fall * rank, rank + 1, ids, logprobs)


def _barred(output: Sequence[int], end_ids: Collection[int], min_tokens: int, bad_words: list[list[int]]) -> set[int]:
    """Returns the ids that must not follow this output."""
    barred = {word[-1] for word in bad_words if list(output[len(output) - len(word) + 1 :]) == word[:-1]}
    return barred | set(end_ids) if len(output) < min_tokens else barred


def expected(
    prompt: list[int],
    count: int,
    root: bytes,
    noise: NoiseKey,
    vocab_size: int,
    end_ids: Collection[int] = (),
    min_tokens: int = 0,
    bad_words: list[list[int]] | None = None,
    output: Sequence[int] = (),
    position_offset: int = 0,
) -> list[int]:
    """Returns `count` tokens after `prompt`, computed without blocks. `output`: the first tokens, if they were sampled elsewhere"""
    entries: list[int] = []
    previous, tokens = _root(root), [*prompt, *output]
    while len(tokens) < len(prompt) + count:
        for position in range(len(entries), len(tokens)):
            previous = _mix(previous, tokens[position], position + position_offset)
            entries.append(previous)
        barred = _barred(tokens[len(prompt) :], end_ids, min_tokens, bad_words or [])
        tokens.append(_next_token(entries, noise, vocab_size, barred))
    return tokens[len(prompt) :]


@dataclass(slots=True)
class _Row:
    tokens: "array[int]"
    tables: list[list[int]]  # one per cache group
    root: int
    noise: NoiseKey
    end_ids: tuple[int, ...]
    num_prompt: int
    position_offset: int
    params: SamplingParams
    bad_words: list[list[int]]

    @staticmethod
    def of(write: RowWrite) -> "_Row":
        noise = NO_NOISE if write.params.greedy else write.noise
        tables = [list(table) for table in write.tables]
        ids, root = array("i", write.token_ids), _root(write.root)
        numbers = write.num_prompt, write.position_offset
        return _Row(ids, tables, root, noise, write.end_ids, *numbers, write.params, write.bad_words)

    def copy(self, noise: NoiseKey) -> "_Row":
        noise = NO_NOISE if self.noise is NO_NOISE else noise
        return replace(self, tokens=array("i", self.tokens), tables=[list(table) for table in self.tables], noise=noise)

    def barred(self, sampled: list[int]) -> set[int]:
        """Returns the ids that must not follow. `sampled`: by this step, not yet appended"""
        output = [*self.tokens[self.num_prompt :], *sampled]
        return _barred(output, self.end_ids, self.params.min_tokens, self.bad_words)

    def shorten(self, length: int, spans: list[int]) -> None:
        """Keeps this many ids, and the blocks of all but the last of them."""
        if length > len(self.tokens):
            raise EngineError(f"a row of {len(self.tokens)} ids should keep {length}")
        del self.tokens[length:]
        for table, span in zip(self.tables, spans):
            del table[-(-(length - 1) // span) :]


class FakeRunner:
    def __init__(self, geometry: CacheGeometry, vocab_size: int, faults: Faults) -> None:
        self.geometry = geometry
        self.vocab_size = vocab_size
        self.faults = faults
        self.spans = [group.links * geometry.block_size for group in geometry.groups]
        self.blocks: list[list[Slot]] = [[None] * max(self.spans) for _ in range(geometry.num_blocks)]
        self.states: list[Slot] = [None] * geometry.num_states
        self.rows: dict[int, _Row] = {}
        self.num_computed = 0  # positions computed in all steps
        self._plan = StepPlan(0)
        self._entries: list[list[int] | None] = []  # the values that each scheduled row read

    def stop(self) -> None:
        self.blocks, self.states, self.rows = [], [], {}

    def forward(self, plan: StepPlan) -> None:
        self.faults.before_forward(plan.step)
        copied = [list(self.blocks[source]) for source, _ in plan.copies]  # all reads before any write
        for (_, target), content in zip(plan.copies, copied, strict=True):
            self.blocks[target] = content
        self._apply_rows(plan)
        self._plan, self._entries = plan, []
        self._check_states(plan)
        for entry, row_id in enumerate(plan.row):
            row = self.rows[row_id]
            lengths = {group: lengths[entry] for group, lengths in plan.group_lengths.items()}
            tokens = row.tokens + array("i", plan.drafts.get(entry, ()))
            before = self._state_before(row, plan, entry)
            entries = self._compute(row, tokens, plan.start[entry], plan.num_query[entry], lengths, before)
            if self.faults.poisons(plan.step, entry):
                self._poison(row, plan.start[entry], plan.num_query[entry])
                entries = None
            if plan.states:
                self._write_states(row, plan, entry)
            self._entries.append(entries)

    def sample(self, masks: Masks | None = None) -> Kept:
        plan = self._plan
        masked = {} if masks is None else row_masks(plan, masks)
        result = StepResult(plan.step, [], bad_rows=[entry for entry, entries in enumerate(self._entries) if entries is None])
        for entry, (row_id, entries) in enumerate(zip(plan.row, self._entries)):
            row, known = self.rows[row_id], plan.sampled_position(entry)
            drafts = plan.drafts[entry][: num_drafts(plan, entry, masked)] if entry in plan.drafts else []
            tokens: list[int] = []
            if plan.outputs[entry]:
                tokens = [0] if entries is None else self._sample(row, entries, known, drafts, masked.get(entry))
                row.tokens.extend(tokens)
            if tokens and row.params.logprobs is not None:
                result.logprobs[entry] = self._logprobs(row.params.logprobs, tokens, entries or [], known)
            result.tokens.append(tokens)
            if piece := self._prompt_piece(row, plan.start[entry], plan.num_query[entry]):
                result.prompt_logprobs[entry] = piece
        return Kept(result)

    def _sample(self, row: _Row, entries: list[int], known: int, drafts: list[int], masks: Masks | None) -> list[int]:
        """Samples after the first `known` positions, and after each draft that is accepted. `masks`: of each output"""
        tokens: list[int] = []
        for number in range(len(drafts) + 1):
            mask = None if masks is None else masks[number]
            tokens.append(_next_token(entries[: known + number], row.noise, self.vocab_size, row.barred(tokens), mask))
            if tokens != drafts[: number + 1]:
                break
        return tokens

    def _logprobs(self, count: int, tokens: list[int], entries: list[int], known: int) -> list[TokenLogprobs]:
        """Returns the logprobs of each token. `entries`: also of the tokens, after the first `known`"""
        return [ranked(entries[: known + at], token, count, self.vocab_size) for at, token in enumerate(tokens)]

    def _prompt_piece(self, row: _Row, start: int, count: int) -> PromptPiece | None:
        """Returns the logprobs of the prompt tokens after the computed positions."""
        wanted, reach = row.params.prompt_logprobs, min(start + count, row.num_prompt - 1)
        return None if wanted is None or reach <= start else (start + 1, [_even(wanted, self.vocab_size)] * (reach - start))

    def _apply_rows(self, plan: StepPlan) -> None:
        changed = [fork.row for fork in plan.row_forks] + [write.row for write in plan.row_writes]
        if len(changed) > len(set(changed)):  # a device makes all these changes at once, in no particular order
            raise EngineError(f"rows {sorted(changed)}: one is written twice in step {plan.step}")
        forked = [self.rows[fork.source].copy(fork.noise) for fork in plan.row_forks]  # all reads before any write
        for fork, row in zip(plan.row_forks, forked, strict=True):
            self.rows[fork.row] = row
        for write in plan.row_writes:
            self.rows[write.row] = _Row.of(write)
        for row_id, length in plan.lengths:
            self.rows[row_id].shorten(length, self.spans)
        for row_id, token in plan.last_ids:
            self.rows[row_id].tokens[-1] = token
        for row_id, group, index, block in plan.new_blocks:
            table = self.rows[row_id].tables[group]
            if index < len(table):
                table[index] = block
            elif index == len(table):
                table.append(block)
            else:
                raise EngineError(f"row {row_id}: block for index {index}, table has {len(table)}")

    def _check_states(self, plan: StepPlan) -> None:
        if bool(plan.states) != bool(plan.row and self.states):
            raise EngineError(f"step {plan.step}: {len(plan.states)} state slots for {len(plan.row)} rows")
        read = {slot for slot, _ in plan.states}
        written = [slot for _, slot in plan.states] + [slot for _, _, slot in plan.checkpoints]
        if len(set(written)) < len(written) or read & set(written) or NULL_STATE in written:
            raise EngineError(f"step {plan.step} reads state slots {sorted(read)} and writes {sorted(written)}")

    def _state_before(self, row: _Row, plan: StepPlan, entry: int) -> Slot:
        start = plan.start[entry]
        if not plan.states:
            return self._read(row, 0, start - 1, start)[0] if start else row.root
        slot, _ = plan.states[entry]
        if (slot == NULL_STATE) != (start == 0):
            raise EngineError(f"row {plan.row[entry]} starts at {start} with state slot {slot}")
        return row.root if slot == NULL_STATE else self.states[slot]

    def _write_states(self, row: _Row, plan: StepPlan, entry: int) -> None:
        end = plan.start[entry] + plan.num_query[entry]
        (self.states[plan.states[entry][1]],) = self._read(row, 0, end - 1, end)
        for other, covered, slot in plan.checkpoints:
            if other == entry:
                (self.states[slot],) = self._read(row, 0, covered - 1, covered)

    def _compute(
        self, row: _Row, tokens: "array[int]", start: int, count: int, lengths: dict[int, int], before: Slot
    ) -> list[int] | None:
        """Writes the new slots. Returns every slot of the row, or None if one of them was never written.

        `tokens`: also its drafts. `lengths`: in cache groups that do not have all positions to the end of the step. `before`: h[start - 1]
        """
        self.num_computed += count
        previous = before
        for position in range(start, start + count):
            if previous is not None:
                previous = _mix(previous, tokens[position], position + row.position_offset)
            self._write(row, position, previous)
        read = self._read(row, 0, 0, start + count)
        entries = [slot for slot in read if slot is not None]
        if len(entries) < start + count:
            return None
        for number, group in enumerate(self.geometry.groups[1:], 1):
            first, end = group.first_read(start), lengths.get(number, start + count)
            held = [_of_group(number, entry) for entry in entries[first : group.length(start + count)]]
            if self._read(row, number, first, end) != held:
                raise EngineError(f"cache group {number} does not hold what positions {first} to {first + len(held) - 1} wrote")
        return entries

    def _read(self, row: _Row, number: int, first: int, end: int) -> list[Slot]:
        """Returns the slots of a group at these positions."""
        span, table = self.spans[number], row.tables[number]
        start = first // span
        blocks = table[start : -(-end // span)]
        if NULL_BLOCK in blocks:
            raise EngineError(f"positions {first} to {end - 1} are read in cache group {number}, but their block was given back")
        slots = [slot for block in blocks for slot in self.blocks[block][:span]]
        return slots[first - start * span : end - start * span]

    def _write(self, row: _Row, position: int, slot: Slot) -> None:
        for number, (table, span) in enumerate(zip(row.tables, self.spans)):
            self.blocks[table[position // span]][position % span] = None if slot is None else _of_group(number, slot)

    def _poison(self, row: _Row, start: int, count: int) -> None:
        for position in range(start, start + count):
            self._write(row, position, None)
