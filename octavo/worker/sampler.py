"""`Sampler`: the work left after a step for rows that need more than greedy or temperature sampling. The order is that of vLLM V1:

    raw logits -> logprobs to report, unless processed logprobs are configured
               -> grammar mask -> allowed ids -> bad words, end ids until min_tokens -> bias
               -> repetition, frequency, presence penalties
               -> greedy rows: argmax
               -> others: temperature, min-p, top-k, top-p -> Gumbel noise, argmax
               -> processed logprobs: of the distribution that ids are sampled from, or whose best id greedy rows take

A step samples every output by its temperature alone and appends that id to its row. For rows that need the full sampler the id is
provisional: they are resampled here, and the new id replaces it. Rows with drafts get their ids here, when all their outputs are
sampled: a draft is accepted while it is the id sampled from the output before it. Ids are read on the device: nothing waits for it.
Noise is keyed by (seed, sample) and counted by (token, position), so a row's result depends only on its logits, ids,
parameters and key. Equal scores go to the lower id. A row of logits that are not finite still yields some valid id, and affects no
other row.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.ops import Edits, edit_logits
from octavo.kernels.reference.sampling import ONE, Draws, Ranking, drawn_from, mask_logits, rank_drawn
from octavo.messages import NoiseKey, RowWrite, StepPlan, TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.sizing.gpu_size import ADJUSTED_LOGITS
from octavo.step import logit_edits
from octavo.worker.executor import Masks, num_drafts
from octavo.worker.rank_sampling import RankSampling
from octavo.worker.request_table import RequestTable, Words, noise_words, redrawn, upload

OUTPUT, POSITION, TEMPERATURE, TOP_K, TOP_P, MIN_P, NOISE = range(7)  # int32 fields of a resampled row
ENTRY_WORDS = NOISE + 4


class Sampling(Protocol):
    """Functions that read whole rows of logits: the module `kernels.ops`, or the native library."""

    def draw(self, logits: Tensor, draws: Draws) -> Tensor: ...

    def rank(self, logits: Tensor, ids: Tensor, count: int) -> Ranking: ...


@dataclass(frozen=True, slots=True)
class Special:
    """A row that needs the full sampler."""

    line: Words  # [ENTRY_WORDS]; the first two fields are filled in when it is resampled
    edits: Edits | None  # edits of its logits
    redrawn: bool  # the id sampled by the step is provisional
    greedy: bool
    filtered: bool
    logprobs: int | None


class Chosen(NamedTuple):
    """An output of a row that needs the full sampler."""

    output: int
    entry: int  # its scheduled row
    row: int  # of the table
    position: int  # of the id to sample
    mask: Words | None  # of a grammar
    special: Special


@dataclass(frozen=True, slots=True)
class Rankings:
    """Rankings from which logprobs are computed, on their way to the host."""

    entries: list[int]  # the scheduled row of each
    counts: list[int]
    found: Ranking | None

    def to_host(self) -> "Rankings":
        """Returns a copy in host memory, which is readable when the device has reached this point."""
        return self if self.found is None else replace(self, found=on_host(self.found))

    def logprobs(self) -> dict[int, list[TokenLogprobs]]:
        """Returns the requested logprobs of each scheduled row, for the ids of its outputs."""
        found = [] if self.found is None else listed(self.found, self.counts)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for entry, token in zip(self.entries, found, strict=True):
            logprobs.setdefault(entry, []).append(token)
        return logprobs


NO_RANKINGS = Rankings([], [], None)


class Sampler:
    def __init__(self, table: RequestTable, vocab_size: int, sampling: Sampling = ops, processed: bool = False) -> None:
        """`processed`: logprobs are those of the distribution an id was sampled from, not of the raw logits."""
        self._table = table
        self._sampling = sampling
        self._ranks = sampling if isinstance(sampling, RankSampling) else None  # ranks that share the vocabulary
        self._processed = processed
        self._vocab_size = vocab_size
        self._rows_at_once = max(ADJUSTED_LOGITS // vocab_size, 1)
        self._masked_at_once = max(min(self._rows_at_once, len(table.words)) // 2, 1)  # these need a copy in the same memory
        self._device = table.words.device
        self._special: dict[int, Special] = {}  # row -> parameters of its latest owner; a freed row stays until it is reused

    def warm_up(self, dtype: torch.dtype) -> None:
        """Runs every kernel once on logits of this dtype, so that none is compiled later. The rows must be empty, and stay so."""
        width = self._vocab_size if self._ranks is None else len(self._ranks.tokens)
        logits = torch.zeros(1, width, dtype=dtype, device=self._device)
        words = torch.zeros(1, ENTRY_WORDS, dtype=torch.int32, device=self._device)
        draws = _draws(words)
        edits = self._held(logit_edits.pack(SamplingParams(min_tokens=1), (), []))
        mask_logits(logits, torch.zeros(1, -(-self._vocab_size // 32), dtype=torch.int32, device=self._device))
        table = self._table.token_ids, self._table.num_prompt
        self._sampling.draw(edit_logits(logits, [0], [0], [0], [edits], *table), draws)
        ids = self._sampling.draw(logits, draws).to(torch.int32)
        self._sampling.rank(logits, ids, 1)
        self._table.accept([(0, 0, 0, 0)], ids)
        self._table.words[0] = 0
        if self._processed:
            self._rank_drawn(logits, [Chosen(0, 0, 0, 0, None, Special(words[0].cpu().numpy(), None, True, False, True, 1))], ids)

    def apply(self, plan: StepPlan) -> None:
        """Processes the rows that a plan forks and writes."""
        sources = [self._special.get(fork.source) for fork in plan.row_forks]
        for fork, special in zip(plan.row_forks, sources):
            self._set(fork.row, special and replace(special, line=_with_noise(special.line, fork.noise)))
        for write in plan.row_writes:
            self._set(write.row, self._special_of(write))

    def special(self, plan: StepPlan) -> list[int]:
        """Returns the scheduled rows that are sampled and need the full sampler."""
        if not self._special:
            return []
        return [entry for entry, (row, sampled) in enumerate(zip(plan.row, plan.outputs)) if sampled and row in self._special]

    def sample(self, logits: Tensor, plan: StepPlan, ids: Tensor, masks: Mapping[int, Masks]) -> Rankings:
        """Resamples the scheduled rows that need it, and appends the ids of these and of rows with drafts. logits: [S, V], raw

        It must run after the step has sampled `ids` [S], which are changed in place. An id below 0 marks a row that is not finite, and
        stays. masks: of scheduled rows with a grammar, [outputs, words] each. A row with fewer masks than outputs has no other outputs.
        """
        special = self.special(plan)
        if not special and not plan.drafts:
            return NO_RANKINGS
        choices = self._choices_of(plan, special, masks)
        for some in _at_once([one for one in choices if one.mask is not None], self._masked_at_once):
            words = upload(np.stack([one.mask for one in some if one.mask is not None]), self._device)
            self._draw_again(self._masked(self._chosen(logits, _outputs(some)), words), list(enumerate(some)), ids)
        self._draw_again(logits, [(one.output, one) for one in choices if one.mask is None and one.special.redrawn], ids)
        self._append(plan, choices, masks, ids)
        wanted = [one for one in choices if one.special.logprobs is not None]
        if not wanted:
            return NO_RANKINGS
        if self._processed:
            return self._rank_drawn(logits, wanted, ids)
        outputs, counts = _outputs(wanted), _counts(wanted)
        found = self._sampling.rank(self._chosen(logits, outputs), self._valid_ids(ids, outputs), max(counts))
        return Rankings(_entries(wanted), counts, found)

    def _choices_of(self, plan: StepPlan, special: list[int], masks: Mapping[int, Masks]) -> list[Chosen]:
        """Returns the outputs of these scheduled rows."""
        first, choices = plan.first_outputs(), []
        for entry in special:
            row, output, position, own = plan.row[entry], first[entry], plan.sampled_position(entry), masks.get(entry)
            for number in range(plan.outputs[entry] if own is None else len(own)):
                mask = None if own is None else own[number]
                choices.append(Chosen(output + number, entry, row, position + number, mask, self._special[row]))
        return choices

    def _append(self, plan: StepPlan, choices: list[Chosen], masks: Mapping[int, Masks], ids: Tensor) -> None:
        """Appends the ids of rows that were resampled, or that have drafts."""
        entries = dict.fromkeys([one.entry for one in choices if one.special.redrawn]) | dict.fromkeys(plan.drafts)
        first = plan.first_outputs()
        drafted = [
            (plan.row[entry], plan.sampled_position(entry), first[entry], num_drafts(plan, entry, masks) if entry in plan.drafts else 0)
            for entry in entries
        ]
        if drafted:
            self._table.accept(drafted, ids)

    def _rank_drawn(self, logits: Tensor, wanted: list[Chosen], ids: Tensor) -> Rankings:
        """Ranks ids in the distribution they were sampled from, which is recomputed for the requested outputs, a few at a time."""
        outputs, counts = _outputs(wanted), _counts(wanted)
        lines = _lines(wanted)
        lines[[one.special.greedy for one in wanted], TEMPERATURE] = 0  # greedy rows have no temperature and no filter
        found = rank_drawn(
            lambda part: self._scores(logits, wanted[part]),
            self._vocab_size,
            _draws(upload(lines, self._device)),
            self._valid_ids(ids, outputs),
            filtered=any(one.special.filtered for one in wanted),
            rank=lambda scores, chosen: self._sampling.rank(scores, chosen, max(counts)),
            cut=drawn_from if self._ranks is None else self._ranks.drawn_from,
        )
        return Rankings(_entries(wanted), counts, found)

    def _scores(self, logits: Tensor, some: list[Chosen]) -> Tensor:
        """Returns the logits of some outputs, masked and edited as requested, [len(some), V] float32."""
        chosen = self._chosen(logits, _outputs(some))
        masks = [one.mask for one in some if one.mask is not None]
        if masks:
            free = np.full_like(masks[0], -1)
            words = np.stack([free if one.mask is None else one.mask for one in some])
            chosen = self._masked(chosen, upload(words, self._device))
        edited = [place for place, one in enumerate(some) if one.special.edits is not None]
        if not edited:
            return chosen.float()
        where = upload(np.array(edited, np.int32), self._device)
        return chosen.float().index_copy(0, where.long(), self._edited(chosen, edited, [some[place] for place in edited]))

    def _edited(self, logits: Tensor, places: list[int], some: list[Chosen]) -> Tensor:
        """Returns the edited rows of logits at these indices, [len(some), V] float32. All of `some` have edits."""
        edits = [one.special.edits for one in some if one.special.edits is not None]
        about = [one.row for one in some], [one.position for one in some], edits, self._table.token_ids, self._table.num_prompt
        if self._ranks is None:
            return edit_logits(logits, places, *about)
        return self._ranks.own(edit_logits(self._ranks.whole(logits[places]), list(range(len(places))), *about))

    def _masked(self, logits: Tensor, words: Tensor) -> Tensor:
        return mask_logits(logits, words) if self._ranks is None else self._ranks.own(mask_logits(self._ranks.whole(logits), words))

    def _draw_again(self, logits: Tensor, some: list[tuple[int, Chosen]], ids: Tensor) -> None:
        """Resamples each of these from its row of logits, which is edited first if requested."""
        place = {chosen.output: row for row, chosen in some}
        for part in _at_once([chosen for _, chosen in some if chosen.special.edits is not None], self._rows_at_once):
            self._draw(self._edited(logits, [place[output] for output in _outputs(part)], part), part, ids)
        others = [chosen for _, chosen in some if chosen.special.edits is None]
        if others:
            self._draw(self._chosen(logits, [place[output] for output in _outputs(others)]), others, ids)

    def _draw(self, scores: Tensor, some: list[Chosen], ids: Tensor) -> None:
        """Samples one id for each from its scores, [len(some), V], and replaces the provisional one."""
        words = upload(_lines(some), self._device)  # [n, ENTRY_WORDS]
        outputs = words[:, OUTPUT].long()
        drawn = self._sampling.draw(scores, _draws(words))
        provisional = ids.index_select(0, outputs)
        ids.index_copy_(0, outputs, torch.where(provisional < 0, provisional, drawn.to(ids.dtype)))

    def _chosen(self, source: Tensor, outputs: list[int]) -> Tensor:
        """Returns some rows of a tensor; a view if they are the first ones."""
        if outputs == list(range(len(outputs))):
            return source[: len(outputs)]
        return source.index_select(0, upload(np.array(outputs, np.int32), self._device))

    def _valid_ids(self, ids: Tensor, outputs: list[int]) -> Tensor:
        """Returns the ids of outputs as valid ids of the vocabulary, also for marked rows."""
        return self._chosen(ids, outputs).clamp(min=0)

    def _set(self, row: int, special: Special | None) -> None:
        if special is None:
            self._special.pop(row, None)
        else:
            self._special[row] = special

    def _special_of(self, write: RowWrite) -> Special | None:
        params = write.params
        again = redrawn(params, write.bad_words)
        if not again and params.logprobs is None:
            return None
        edited = params.edits_logits or write.bad_words
        edits = self._held(logit_edits.pack(params, write.end_ids, write.bad_words)) if edited else None
        return Special(_with_noise(_line(params), write.noise), edits, again, params.greedy, params.filtered, params.logprobs)

    def _held(self, packed: Words) -> Edits:
        """Returns packed edits in the form that kernels of this device read."""
        return upload(packed, self._device) if self._table.words.is_cuda else logit_edits.unpack(packed)


def _at_once(some: list[Chosen], most: int) -> Iterator[list[Chosen]]:
    """Yields batches no larger than the memory plan allows."""
    return (some[start : start + most] for start in range(0, len(some), most))


def _outputs(some: list[Chosen]) -> list[int]:
    return [one.output for one in some]


def _entries(some: list[Chosen]) -> list[int]:
    return [one.entry for one in some]


def _counts(some: list[Chosen]) -> list[int]:
    return [one.special.logprobs for one in some if one.special.logprobs is not None]


def _lines(some: list[Chosen]) -> Words:
    lines = np.stack([one.special.line for one in some])
    lines[:, OUTPUT], lines[:, POSITION] = _outputs(some), [one.position for one in some]
    return lines


def _draws(words: Tensor) -> Draws:
    """words: [n, ENTRY_WORDS]"""
    floats = words.view(torch.float32)
    return Draws(
        temperature=floats[:, TEMPERATURE],
        top_k=words[:, TOP_K],
        top_p=floats[:, TOP_P],
        min_p=floats[:, MIN_P],
        noise=words[:, NOISE:],
        positions=words[:, POSITION].contiguous(),
    )


def on_host(found: Ranking) -> Ranking:
    """Starts a copy to host memory, and returns without waiting for it."""

    def copy(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    return Ranking(copy(found.chosen), copy(found.ranks), copy(found.totals), copy(found.near), copy(found.near_ids))


def _line(params: SamplingParams) -> Words:
    line = np.zeros(ENTRY_WORDS, np.int32)
    floats = line.view(np.float32)
    if params.greedy:  # the best id, the lower one in a tie
        line[TOP_K], floats[TEMPERATURE], floats[TOP_P] = 1, 1, 1
    else:
        line[TOP_K] = max(params.top_k, 0)
        floats[TEMPERATURE], floats[TOP_P], floats[MIN_P] = params.temperature, params.top_p, params.min_p
    return line


def _with_noise(line: Words, noise: NoiseKey) -> Words:
    line = line.copy()
    line[NOISE:] = noise_words(noise)
    return line


def listed(found: Ranking, counts: Sequence[int]) -> list[TokenLogprobs]:
    """Converts a ranking to the logprobs of each row, with as many best tokens as its count says."""
    columns = (found.totals, found.ranks, found.chosen, found.near, found.near_ids)
    return [
        _with_total(total, rank, [chosen, *near[:count]], near_ids[:count])
        for count, total, rank, chosen, near, near_ids in zip(counts, *(column.tolist() for column in columns), strict=True)
    ]


def _with_total(total: int, rank: int, distances: list[float], top_ids: list[int]) -> TokenLogprobs:
    log_total = math.log(total / ONE) if total > 0 else math.nan  # 0 or less: the logits are not finite
    logprob, *top = [-distance - log_total for distance in distances]
    return TokenLogprobs(logprob, rank, tuple(top_ids), tuple(top))
