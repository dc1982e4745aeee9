"""`Drafts`: ids that may come next, computed together with a sequence's own.

    ids known    t0 t1 t2 t3 t4 | d1 d2 d3        the plan computes t4 and three drafts, and samples after each of them
    sampled                  t5   t6 t7 t8        d1 = t5 and d2 = t6 are accepted, and d3 != t7 is not: t5 t6 t7 are appended
    in the cache t0 t1 t2 t3 t4   t5 t6 d3        the slot of d3 is written again by the next plan, which starts with t7

A draft is accepted if it is the id that is sampled before it, so a text does not depend on its drafts. Blocks that were allocated for
rejected drafts stay with the sequence, as room for the next ids. A block is sealed only when all of its ids are accepted.
"""

from collections.abc import Callable

from octavo.messages import StepPlan
from octavo.policy.kv_manager import KVManager
from octavo.policy.request import Sequence
from octavo.policy.rows import Rows

Draft = Callable[[Sequence], list[int]]  # ids that may come after those of a sequence


class Drafts:
    def __init__(self, kv: KVManager, rows: Rows, waiting: list[Sequence], source: Draft | None) -> None:
        """`waiting` is the scheduler's own list."""
        assert source is None or kv.states is None, "a state cannot be taken back when a draft is rejected"
        self._kv = kv
        self._rows = rows
        self._waiting = waiting
        self.source = source  # None: there are no drafts

    def add(self, seq: Sequence, budget: int, plan: StepPlan) -> int:
        """Adds drafts to the last entry of a plan, which samples for a sequence. They displace nothing. Returns how many there are.

        A plan has as many outputs as there are rows. Each draft needs one: that of a free row which no waiting request can take.
        """
        outputs = len(self._rows.free) - len(self._waiting) - sum(map(len, plan.drafts.values()))
        most = min(budget, outputs, seq.stop_at - seq.num_planned)
        if self.source is None or most <= 0 or seq.request.beams is not None:
            return 0
        drafts = self.source(seq)[:most]
        count = len(drafts)
        if not drafts or not (seq.num_planned + count <= seq.room or self._kv.allocate(seq, count, plan)):
            return 0
        plan.drafts[len(plan.row) - 1] = drafts
        plan.num_query[-1] += count
        plan.outputs[-1] += count
        seq.num_planned += count
        return count


def up_to_end(seq: Sequence, tokens: list[int]) -> list[int]:
    """Returns the tokens up to an end id. Drafts after it were accepted in vain."""
    end = next((at for at, token in enumerate(tokens) if token in seq.request.end_ids), len(tokens))
    return tokens[: end + 1]
