"""Which rows of a step read keys together, in every cache group: what programs on the host hand to attention."""

from collections.abc import Sequence

import numpy as np

from octavo.kernels.shared_keys import FREE, NOTHING, ReadCost, SharedKeys, SharedReads
from octavo.kernels.step_tensors import StepTensors
from octavo.worker.request_table import RequestTable


class StepSharing:
    def __init__(self, table: RequestTable, spans: Sequence[int], cost: ReadCost) -> None:
        """`table`: in the memory of the host. `spans`: tokens in a block of each cache group"""
        lines, layout = table.words.numpy(), table.layout
        firsts = [layout.table(group) for group in range(layout.groups)]
        self._reads = [SharedReads(lines[:, first : first + layout.max_blocks], span, cost) for first, span in zip(firsts, spans)]
        self._changes = table.count_changes()

    def share_all(self) -> None:
        """Makes entries read together whatever they can, worth it or not: for proofs, whose contexts are short."""
        for reads in self._reads:
            reads.cost = FREE

    def of(self, step: StepTensors) -> list[SharedKeys]:
        """Returns the nodes of each cache group, of entries that have one token. It may be asked for again."""
        host = step.on_host()
        starts, rows, context = host["query_start"], host["row"], host["context_len"]
        (single,) = ((starts[1:] - starts[:-1] == 1) & (rows >= 0)).nonzero()
        if len(single) < 2:
            return [NOTHING] * len(self._reads)
        rows, context = rows[single], context[single]
        found = [reads.nodes(rows, context, count) for reads, count in zip(self._reads, self._changes.count)]
        return found if len(single) == len(host["row"]) else [SharedKeys(keys.nodes, single[keys.rows].astype(np.int32)) for keys in found]
