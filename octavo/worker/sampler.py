"""The sampler: from logits to the next id of each sampled row. The order is that of vLLM V1:

    raw logits -> logprobs to report, unless those of the processed kind are wanted
               -> what a grammar allows -> allowed ids -> bad words, end ids until min_tokens -> bias
               -> repetition, frequency, presence penalties
               -> greedy rows: argmax
               -> others: temperature, min-p, top-k, top-p -> Gumbel noise, argmax
               -> logprobs of the processed kind: of what greedy rows take the best, and others draw

Penalties read the row's own ids, so forks, preemption and steps in flight need no counts kept beside them. Noise is
keyed by (seed, sample) and counted by (token, position). A row's result therefore depends on its logits, ids, parameters
and key alone, never on its neighbours, its row number or its place in the batch. Equal scores go to the lower id. A row
of logits that are not finite still yields some valid id, and disturbs no other.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.drawn_from import rank_drawn
from octavo.kernels.reference.sampling import ONE, Draws, Ranking
from octavo.messages import TokenLogprobs
from octavo.sampling_params import SamplingParams
from octavo.worker.executor import Masks
from octavo.worker.request_table import MIN_P, TEMPERATURE, TOP_P, LogitEdits, RequestTable


class Sampling(Protocol):
    """What reads whole rows of the vocabulary: the module `kernels.reference.sampling`, or the native library."""

    def draw(self, logits: Tensor, draws: Draws) -> Tensor: ...

    def rank(self, logits: Tensor, ids: Tensor, count: int) -> Ranking: ...


@dataclass(frozen=True, slots=True)
class Sampled:
    ids: Tensor  # [S] int64
    logprobs: dict[int, TokenLogprobs]  # index into ids -> where asked for


def sample(
    logits: Tensor,  # [S, V] float32, left as they are
    rows: Tensor,  # [S], rows of the table
    table: RequestTable,
    sampling: Sampling,
    best: Tensor | None = None,  # the argmax of each, if known
    masks: Mapping[int, Masks] | None = None,  # index into rows -> [words], where a grammar decides, too
    processed: bool = False,  # logprobs are of what an id was drawn from, not of the logits
) -> Sampled:
    """The id that follows each row."""
    row_list = rows.tolist()
    params = [table.params[row] for row in row_list]
    scores = _adjusted(logits, row_list, table, masks or {})
    random = [i for i, p in enumerate(params) if not p.greedy]
    if len(random) == len(params):
        ids = sampling.draw(scores, _draws(rows, table))
    else:
        ids = best if best is not None and scores is logits else torch.from_numpy(scores.numpy().argmax(-1))  # the first of equals
        if random:
            ids[random] = sampling.draw(scores[random], _draws(rows[random], table))
    asked = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
    if not asked:
        return Sampled(ids, {})
    some, counts = list(asked), list(asked.values())
    if processed:
        found = _rank_drawn(scores, ids, rows, some, max(counts), table, sampling)
    else:
        every = len(some) == len(ids)
        found = sampling.rank(logits if every else logits[some], ids if every else ids[some], max(counts))
    return Sampled(ids, dict(zip(some, listed(found, counts), strict=True)))


def _rank_drawn(
    scores: Tensor, ids: Tensor, rows: Tensor, some: list[int], count: int, table: RequestTable, sampling: Sampling
) -> Ranking:
    """Where some of the ids stand among what they were drawn from. scores: [S, V], adjusted; ids and rows: [S]"""
    return rank_drawn(
        lambda part: scores[some[part]],
        scores.shape[1],
        _draws(rows[some], table),
        ids[some],
        filtered=any(table.params[row].filtered for row in rows[some].tolist()),
        rank=lambda logits, chosen: sampling.rank(logits, chosen, count),
    )


def _draws(rows: Tensor, table: RequestTable) -> Draws:
    values = table.values[rows]
    return Draws(
        temperature=values[:, TEMPERATURE],
        top_k=table.top_k[rows],
        top_p=values[:, TOP_P],
        min_p=values[:, MIN_P],
        noise=table.noise[rows],
        positions=table.num_tokens[rows],  # the place the new id will take
    )


def _adjusted(logits: Tensor, row_list: list[int], table: RequestTable, masks: Mapping[int, Masks]) -> Tensor:
    """Logits after grammars, minimum lengths and penalties: a copy if any row needs them, else the logits themselves. [S, V]"""
    scores = logits
    for i, row in enumerate(row_list):
        params = table.params[row]
        asks = params.min_tokens or _penalised(params) or params.logit_bias or params.allowed_token_ids or params.bad_words
        if not asks and i not in masks:
            continue
        scores = logits.clone() if scores is logits else scores
        if i in masks:
            bits = np.unpackbits(masks[i].view(np.uint8), bitorder="little")
            scores[i].numpy()[bits[: scores.shape[1]] == 0] = -np.inf
        ids = table.token_ids[row, : int(table.num_tokens[row])]
        output = ids[int(table.num_prompt[row]) :]
        edits = table.edits[row]
        if edits.allowed:
            kept = scores[i, edits.allowed_ids]
            scores[i] = -torch.inf
            scores[i, edits.allowed_ids] = kept
        banned = _word_ends(edits, output)
        if len(output) < params.min_tokens:
            banned.update(table.end_ids[row])
        if not edits.allowed or not edits.allowed <= banned:  # else nothing would be left
            scores[i, list(banned)] = -torch.inf
        if params.logit_bias:
            scores[i, edits.bias_ids] += edits.biases
        if _penalised(params):
            _penalise(scores[i], ids, output, params)
    return scores


def _word_ends(edits: LogitEdits, output: Tensor) -> set[int]:
    """Ids that would complete a bad word: all but its last stand at the end of the output."""
    tail = output[max(len(output) - edits.longest_word + 1, 0) :].tolist() if edits.longest_word > 1 else []
    words = edits.longer_words.get(tail[-1], ()) if tail else ()
    ends = {word[-1] for word in words if len(word) <= len(tail) + 1 and tail[len(tail) - len(word) + 1 :] == word[:-1]}
    return ends | edits.single_words


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0


def _penalise(scores: Tensor, ids: Tensor, output: Tensor, params: SamplingParams) -> None:
    """Makes ids of the row less likely, in place. scores: [V]; ids: prompt and output; output: its end alone"""
    repetition = params.repetition_penalty
    if repetition != 1:
        seen = scores[ids]
        scores[ids] = torch.where(seen > 0, seen / repetition, seen * repetition)  # an id met twice is written twice, alike
    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        met, counts = output.unique(return_counts=True)
        scores[met] -= params.frequency_penalty * counts + params.presence_penalty


def token_logprobs(logits: Tensor, ids: Tensor, counts: Sequence[int], sampling: Sampling) -> list[TokenLogprobs]:
    """Of each row's id, and the best of the row, as many as its count says. logits: [S, V], raw; ids: [S]"""
    return listed(sampling.rank(logits, ids, max(counts)), counts)


def listed(found: Ranking, counts: Sequence[int]) -> list[TokenLogprobs]:
    """What a ranking says of each row, with as many of its best as its count says."""
    columns = (found.totals, found.ranks, found.chosen, found.near, found.near_ids)
    return [
        _with_total(total, rank, [chosen, *near[:count]], near_ids[:count])
        for count, total, rank, chosen, near, near_ids in zip(counts, *(column.tolist() for column in columns), strict=True)
    ]


def _with_total(total: int, rank: int, distances: list[float], top_ids: list[int]) -> TokenLogprobs:
    log_total = math.log(total / ONE) if total > 0 else math.nan  # not above 0: the logits are not finite
    logprob, *top = [-distance - log_total for distance in distances]
    return TokenLogprobs(logprob, rank, top_ids, top)
