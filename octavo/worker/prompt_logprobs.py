"""How likely a model finds the tokens of a prompt.

    positions computed    3  4  5  6          hidden state i says what it expects at i + 1:
    tokens it expects     4  5  6  7          a prompt of 7 tokens has no token 7, so the last one is left to the sampler

Logits are made a slice at a time: those of a whole chunk would take more memory than the model's weights.
"""

from torch import Tensor

from octavo.messages import PromptPiece, StepPlan, TokenLogprobs
from octavo.worker.program import Program
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import Sampling, token_logprobs

SLICE_LOGITS = 2**22  # logits in a slice: 16 MiB


def prompt_logprobs(hidden: Tensor, plan: StepPlan, table: RequestTable, program: Program, sampling: Sampling) -> dict[int, PromptPiece]:
    """Plan entry -> logprobs of the prompt tokens it reached, for rows that asked for them. hidden: [T, hidden]"""
    pieces: dict[int, PromptPiece] = {}
    first = 0
    for entry, (row, start, count) in enumerate(zip(plan.row, plan.start, plan.num_query)):
        wanted = table.params[row].prompt_logprobs
        if wanted is not None:
            reach = min(start + count, int(table.num_prompt[row]) - 1)
            if start < reach:
                targets = table.token_ids[row, start + 1 : reach + 1]
                pieces[entry] = (start + 1, _in_slices(hidden[first : first + reach - start], targets, wanted, program, sampling))
        first += count
    return pieces


def _in_slices(hidden: Tensor, targets: Tensor, count: int, program: Program, sampling: Sampling) -> list[TokenLogprobs]:
    size = max(1, SLICE_LOGITS // program.vocab_size)
    found: list[TokenLogprobs] = []
    for start in range(0, len(targets), size):
        some = targets[start : start + size]
        found += token_logprobs(program.logits(hidden[start : start + size]), some, [count] * len(some), sampling)
    return found
