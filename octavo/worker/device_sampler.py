"""`DeviceSampler`: what a step on the device leaves to be done for rows that ask for more than greedy or temperature alone.

    the step    samples every row by temperature alone, and appends that id to the row: it is provisional
    then here   special entries -> what a grammar allows -> adjusted logits -> drawn within their filters
                the id takes the provisional one's place
                raw logits, or what an id was drawn from -> rankings, which go to the host with the ids

The host may be a step behind and never looks at ids: whatever depends on them is read out of the rows, on the device. The order and
meaning of everything are those of `worker/sampler.py`. Nothing here waits for the device.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.asks import pack
from octavo.kernels.drawn_from import rank_drawn
from octavo.kernels.mask import mask_logits
from octavo.kernels.ops import adjust, draw, rank
from octavo.kernels.reference.sampling import Draws, Ranking
from octavo.messages import NoiseKey, RowWrite, StepPlan, TokenLogprobs
from octavo.policy.gpu_size import ADJUSTED_LOGITS
from octavo.sampling_params import SamplingParams
from octavo.worker.device_rows import DeviceRows, Words, upload
from octavo.worker.executor import Masks
from octavo.worker.sampler import listed

ENTRY, ROW, TEMPERATURE, TOP_K, TOP_P, MIN_P, NOISE = range(7)  # words of an entry that is drawn
ENTRY_WORDS = NOISE + 4


@dataclass(frozen=True, slots=True)
class Special:
    """A row that asks for more."""

    line: Words  # [ENTRY_WORDS]; entry and row are filled in when it is drawn
    filtered: bool
    ask: Tensor | None  # packed, on the device, where logits are to be adjusted
    logprobs: int | None


Chosen = tuple[int, int, Special]  # entry, row, and what that asks for


@dataclass(frozen=True, slots=True)
class Rankings:
    """What logprobs are made of, on its way to the host."""

    entries: list[int]
    counts: list[int]
    found: Ranking | None

    def to_host(self) -> "Rankings":
        """The same in memory of the host: readable when the device has come this far."""
        return self if self.found is None else replace(self, found=on_host(self.found))

    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Entry -> what it asked for, of its one token."""
        found = [] if self.found is None else listed(self.found, self.counts)
        return {entry: [token] for entry, token in zip(self.entries, found, strict=True)}


NO_RANKINGS = Rankings([], [], None)


class DeviceSampler:
    def __init__(self, rows: DeviceRows, vocab_size: int, device: torch.device, processed: bool = False) -> None:
        """`processed`: logprobs are of what an id was drawn from, not of the logits."""
        self._rows = rows
        self._processed = processed
        self._vocab_size = vocab_size
        self._rows_at_once = max(ADJUSTED_LOGITS // vocab_size, 1)
        self._masked_at_once = max(min(self._rows_at_once, len(rows.words)) // 2, 1)  # a copy is made of these first, in the same memory
        self._device = device
        self._special: dict[int, Special] = {}  # row -> what its latest tenant asks for; a freed row stays until the next

    def warm_up(self, dtype: torch.dtype) -> None:
        """Runs every kernel once on logits of this kind, so that none is compiled later. The rows have to be empty, and stay so."""
        logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
        words = torch.zeros(1, ENTRY_WORDS, dtype=torch.int32, device=self._device)
        draws = _draws(words, words[:, ENTRY])
        ask = pack(SamplingParams(min_tokens=1), (), [])
        assert ask is not None
        mask_logits(logits, torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32, device=self._device))
        table = self._rows.token_ids, self._rows.num_tokens, self._rows.num_prompt
        draw(adjust(logits, [0], [0], [upload(ask, self._device)], *table), draws)
        ids = draw(logits, draws).to(torch.int32)
        rank(logits, ids, 1)
        if self._processed:
            self._rank_drawn(logits, [(0, 0, Special(words[0].cpu().numpy(), True, None, 1))], {}, ids)

    def apply(self, plan: StepPlan) -> None:
        """Learns of the rows a plan forks and writes."""
        for fork in plan.row_forks:
            special = self._special.get(fork.source)
            self._set(fork.row, special and replace(special, line=_with_noise(special.line, fork.noise)))
        for write in plan.row_writes:
            self._set(write.row, self._asked(write))

    def special(self, plan: StepPlan) -> list[int]:
        """Entries of the plan that are sampled and not plain."""
        if not self._special:
            return []
        return [entry for entry, (row, sampled) in enumerate(zip(plan.row, plan.samples)) if sampled and row in self._special]

    def sample(
        self, logits: Tensor, special: list[int], rows: list[int], ids: Tensor, masks: Mapping[int, Masks] | None = None
    ) -> Rankings:
        """Draws the special entries again where they ask for it. logits: [P, V], raw; rows: of each entry; ids: [P], changed in place.

        It has to come after the step appended `ids` to their rows: the newest id of a row is the provisional one, so ids before it
        are what was said so far, and the place it has, num_tokens - 1, is the position noise is counted by. The drawn id goes into
        `ids` and into that place. An id below 0 stands for a row that is not finite, and stays. masks: of entries with a grammar, [words]
        """
        masks = masks or {}
        asked = [(entry, rows[entry], self._special[rows[entry]]) for entry in special]
        for some in _at_once([one for one in asked if one[0] in masks], self._masked_at_once):
            entries = _entries(some)
            words = upload(np.stack([masks[entry] for entry in entries]), self._device)
            self._draw_again(mask_logits(self._chosen(logits, entries), words), list(enumerate(some)), ids)
        free = [one for one in asked if one[0] not in masks and (one[2].filtered or one[2].ask is not None)]
        self._draw_again(logits, [(one[0], one) for one in free], ids)
        wanted = [one for one in asked if one[2].logprobs is not None]
        if not wanted:
            return NO_RANKINGS
        if self._processed:
            return self._rank_drawn(logits, wanted, masks, ids)
        entries, counts = _entries(wanted), _counts(wanted)
        return Rankings(entries, counts, rank(self._chosen(logits, entries), self._said(ids, entries), max(counts)))

    def _rank_drawn(self, logits: Tensor, wanted: list[Chosen], masks: Mapping[int, Masks], ids: Tensor) -> Rankings:
        """Of what ids were drawn from: it is made once more for those who ask, a few rows at a time."""
        entries, counts = _entries(wanted), _counts(wanted)
        rows, lines = upload(np.array([row for _, row, _ in wanted], np.int32), self._device), self._rows
        columns = lines.temperature, lines.top_k, lines.top_p, lines.min_p, lines.noise, lines.num_tokens
        found = rank_drawn(
            lambda part: self._scores(logits, wanted[part], masks),
            self._vocab_size,
            Draws(*(column.index_select(0, rows) for column in columns)),
            self._said(ids, entries),
            filtered=any(one.filtered for _, _, one in wanted),
            rank=lambda scores, chosen: rank(scores, chosen, max(counts)),
        )
        return Rankings(entries, counts, found)

    def _scores(self, logits: Tensor, some: list[Chosen], masks: Mapping[int, Masks]) -> Tensor:
        """The logits of these, masked and adjusted where they ask for it, [len(some), V] float32."""
        chosen = self._chosen(logits, _entries(some))
        if any(entry in masks for entry in _entries(some)):
            free = np.full_like(next(iter(masks.values())), -1)
            chosen = mask_logits(chosen, upload(np.stack([masks.get(entry, free) for entry in _entries(some)]), self._device))
        asking = [place for place, (_, _, one) in enumerate(some) if one.ask is not None]
        if not asking:
            return chosen.float()
        where = upload(np.array(asking, np.int32), self._device)
        return chosen.float().index_copy(0, where.long(), self._adjusted(chosen, asking, [some[place] for place in asking]))

    def _adjusted(self, logits: Tensor, places: list[int], some: list[Chosen]) -> Tensor:
        """The rows of logits at these places, [len(some), V] float32. All of `some` ask for it."""
        table = self._rows.token_ids, self._rows.num_tokens, self._rows.num_prompt
        asks = [one.ask for _, _, one in some if one.ask is not None]
        return adjust(logits, places, [row for _, row, _ in some], asks, *table)

    def _draw_again(self, logits: Tensor, some: list[tuple[int, Chosen]], ids: Tensor) -> None:
        """Each of these from its row of logits, adjusted where it asks for that."""
        place = {chosen[0]: row for row, chosen in some}
        for part in _at_once([chosen for _, chosen in some if chosen[2].ask is not None], self._rows_at_once):
            self._draw(self._adjusted(logits, [place[entry] for entry in _entries(part)], part), part, ids)
        others = [chosen for _, chosen in some if chosen[2].ask is None]
        if others:
            self._draw(self._chosen(logits, [place[entry] for entry in _entries(others)]), others, ids)

    def _draw(self, scores: Tensor, some: list[Chosen], ids: Tensor) -> None:
        """One id for each from its scores, [len(some), V]; it takes the place of the provisional one."""
        lines = np.stack([one.line for _, _, one in some])
        lines[:, ENTRY], lines[:, ROW] = _entries(some), [row for _, row, _ in some]
        words = upload(lines, self._device)  # [n, ENTRY_WORDS]
        entries, rows = words[:, :TEMPERATURE].T.long()
        positions = self._rows.num_tokens.index_select(0, rows) - 1
        drawn = draw(scores, _draws(words, positions))
        self._rows.token_ids[rows, positions.long()] = drawn.to(torch.int32)
        provisional = ids.index_select(0, entries)
        ids.index_copy_(0, entries, torch.where(provisional < 0, provisional, drawn.to(ids.dtype)))

    def _chosen(self, source: Tensor, entries: list[int]) -> Tensor:
        """These of a tensor's rows: a view, where they are its first."""
        if entries == list(range(len(entries))):
            return source[: len(entries)]
        return source.index_select(0, upload(np.array(entries, np.int32), self._device))

    def _said(self, ids: Tensor, entries: list[int]) -> Tensor:
        """Ids of the vocabulary, whatever a row is marked with."""
        return self._chosen(ids, entries).clamp(min=0)

    def _set(self, row: int, special: Special | None) -> None:
        if special is None:
            self._special.pop(row, None)
        else:
            self._special[row] = special

    def _asked(self, write: RowWrite) -> Special | None:
        params = write.params
        ask = pack(params, write.end_ids, write.bad_words)
        if not params.filtered and ask is None and params.logprobs is None and params.structured_outputs is None:
            return None
        return Special(
            line=_with_noise(_line(params), write.noise),
            filtered=params.filtered,
            ask=None if ask is None else upload(ask, self._device),
            logprobs=params.logprobs,
        )


def _at_once(some: list[Chosen], most: int) -> Iterator[list[Chosen]]:
    """No more at a time than memory is planned for."""
    return (some[start : start + most] for start in range(0, len(some), most))


def _entries(some: list[Chosen]) -> list[int]:
    return [entry for entry, _, _ in some]


def _counts(some: list[Chosen]) -> list[int]:
    return [one.logprobs for _, _, one in some if one.logprobs is not None]


def _draws(words: Tensor, positions: Tensor) -> Draws:
    """words: [n, ENTRY_WORDS]"""
    floats = words.view(torch.float32)
    return Draws(
        temperature=floats[:, TEMPERATURE],
        top_k=words[:, TOP_K],
        top_p=floats[:, TOP_P],
        min_p=floats[:, MIN_P],
        noise=words[:, NOISE:],
        positions=positions,
    )


def on_host(found: Ranking) -> Ranking:
    """A copy in memory of the host, begun and not waited for."""

    def copy(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    return Ranking(copy(found.chosen), copy(found.ranks), copy(found.totals), copy(found.near), copy(found.near_ids))


def _line(params: SamplingParams) -> Words:
    line = np.zeros(ENTRY_WORDS, np.int32)
    floats = line.view(np.float32)
    if params.greedy:  # the best one, the lower id of equals
        line[TOP_K], floats[TEMPERATURE], floats[TOP_P] = 1, 1, 1
    else:
        line[TOP_K] = max(params.top_k, 0)
        floats[TEMPERATURE], floats[TOP_P], floats[MIN_P] = params.temperature, params.top_p, params.min_p
    return line


def _with_noise(line: Words, noise: NoiseKey) -> Words:
    line = line.copy()
    line[NOISE:] = np.array([*noise.key, noise.stream, noise.high], np.uint32).view(np.int32)
    return line
