"""How many tokens a plan may have, and how many of them running prefills."""

from octavo.messages import Limits
from octavo.policy.request import Sequence


def share_of_plan(limits: Limits, running: list[Sequence], row_tokens: int, stages: int, num_plans: int) -> tuple[int, int]:
    """Returns the tokens of a plan, and the most sequences that it decodes: an equal part for each stage without work.

    `num_plans`: in flight, this one among them
    """
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    if stages == 1:
        return tokens, rows
    idle = stages + 1 - num_plans
    return max(tokens // stages, rows * row_tokens), -(-sum(not seq.in_flight for seq in running) // max(1, idle))


def budget_of_prefills(budget: int, running: list[Sequence], row_tokens: int) -> int:
    """Returns what running prefills get while anything waits for a row that is free: half of what decode leaves."""
    decoding = sum(lack for seq in running if (lack := seq.target - seq.num_planned) <= row_tokens)
    return (budget - decoding) // 2
