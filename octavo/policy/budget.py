"""The token budget of a plan, and the part of it for running prefills."""

from octavo.messages import Limits
from octavo.policy.request import Sequence


def share_of_plan(limits: Limits, running: list[Sequence], stages: int, num_plans: int) -> tuple[int, int]:
    """Returns the token budget of a plan and how many sequences it may decode: an equal part for each stage that has no work.

    `num_plans`: plans in flight, including this one
    """
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    if stages == 1:
        return tokens, rows
    idle = stages + 1 - num_plans
    return max(tokens // stages, rows), -(-sum(not seq.in_flight for seq in running) // max(1, idle))


def budget_of_prefills(budget: int, running: list[Sequence]) -> int:
    """Returns the tokens for running prefills while a request waits and a row is free: half of what decode leaves."""
    decoding = sum(seq.target - seq.num_planned == 1 for seq in running)
    return (budget - decoding) // 2
