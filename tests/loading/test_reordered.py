"""Rows of projections come in the order of the model, whatever the format of the file, whole and in the parts of ranks."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.loading.packed_modules import cut
from octavo.loading.views import ReorderedCheckpoint
from octavo.models.row_order import ByHead, Interleaved, RowOrder
from octavo.models.split import Part
from octavo.quant.fp8 import Fp8Weight, Quantised
from octavo.quant.packed import quantize
from tests.support.batches import DictCheckpoint

HEADS, DIM, COLUMNS = 4, 12, 64
NAME = "q.weight"


@dataclass(slots=True)
class File(DictCheckpoint):
    """One matrix, quantised."""

    form: str = "int8"

    def check_part(self, name: str, part: Part) -> None:
        pass

    def read_part(self, name: str, part: Part) -> Tensor:
        packed = self.packed_part(name, part)
        return cut(self.tensors[name], part) if packed is None else packed.dequantize()

    def packed_part(self, name: str, part: Part) -> Quantised | None:
        values = cut(self.tensors[name], part)
        if self.form == "floats":
            return None
        if self.form == "int8":
            return quantize(values.contiguous(), 8, 16)
        block = {"fp8 rows": (1, COLUMNS), "fp8 heads": (DIM, 16), "fp8 blocks": (8, 16), "fp8": (1000, COLUMNS)}[self.form]
        shape = [-(-size // one) for size, one in zip(self.tensors[name].shape, block)]
        scale = 1 + torch.arange(shape[0] * shape[1]).view(shape).float()
        return Fp8Weight(name, values.to(torch.float8_e4m3fn), scale, block, (part.rows.start if part.rows else 0, 0), 16)


def matrix(rows: int) -> Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows))


def rotated_pairs(values: Tensor, rotated: int) -> list[tuple[Tensor, Tensor]]:
    """The pairs of rows of a head that are rotated together, in the order of the model."""
    return [(values[pair], values[pair + rotated // 2]) for pair in range(rotated // 2)]


@pytest.mark.parametrize("rotated", [None, 8])
def test_neighbours_in_a_file_are_rotated_together(rotated: int | None) -> None:
    stored = matrix(HEADS * DIM)
    ours = ReorderedCheckpoint(File({NAME: stored}, form="floats"), {NAME: Interleaved(HEADS, rotated)}).read(NAME)
    for mine, theirs in zip(ours.split(DIM), stored.split(DIM)):
        for pair, (first, second) in enumerate(rotated_pairs(mine, rotated or DIM)):
            assert torch.equal(first, theirs[2 * pair]) and torch.equal(second, theirs[2 * pair + 1])
        assert torch.equal(mine[rotated or DIM :], theirs[rotated or DIM :])


def test_what_lies_by_head_is_split_into_q_k_and_v() -> None:
    stored = matrix(3 * HEADS * DIM)
    ours = ReorderedCheckpoint(File({NAME: stored}, form="floats"), {NAME: ByHead(HEADS)}).read(NAME)
    q, k, v = stored.view(HEADS, 3, DIM, COLUMNS).unbind(1)
    assert torch.equal(ours, torch.cat([q, k, v]).flatten(0, 1))


@pytest.mark.parametrize("form", ["floats", "int8", "fp8", "fp8 rows", "fp8 heads", "fp8 blocks"])
@pytest.mark.parametrize("order", [Interleaved(HEADS), Interleaved(HEADS, 4), ByHead(HEADS)], ids=str)
def test_parts_of_ranks_and_quantised_weights_follow_the_same_order(order: RowOrder, form: str) -> None:
    rows = HEADS * DIM * (3 if isinstance(order, ByHead) else 1)
    file = File({NAME: matrix(rows)}, form=form)
    stored = ReorderedCheckpoint(file, {NAME: order})
    whole = stored.read(NAME)
    assert torch.equal(whole, file.read_part(NAME, Part())[order.places(rows)])
    packed = stored.packed(NAME)
    assert form == "floats" or (packed is not None and torch.equal(packed.dequantize(), whole))
    for start in range(0, rows, 2 * DIM):  # two heads of q, of k or of v
        part = Part(rows=range(start, start + 2 * DIM))
        assert torch.equal(stored.read_part(NAME, part), whole[start : start + 2 * DIM])
        packed = stored.packed_part(NAME, part)
        assert packed is None or torch.equal(packed.dequantize(), whole[start : start + 2 * DIM])


def test_scales_of_blocks_stay_if_rows_stay_in_them() -> None:
    kept = ReorderedCheckpoint(File({NAME: matrix(HEADS * DIM)}, form="fp8 heads"), {NAME: Interleaved(HEADS)}).packed(NAME)
    assert isinstance(kept, Fp8Weight) and kept.block == (DIM, 16)


def test_rows_that_are_not_whole_heads_are_refused() -> None:
    with pytest.raises(LoadError, match=r"memory: q.weight has 42 rows, which are not whole heads"):
        ReorderedCheckpoint(File({NAME: matrix(42)}), {NAME: Interleaved(HEADS)})


def test_biases_are_reordered_like_weights() -> None:
    stored = ReorderedCheckpoint(File({"q.bias": torch.arange(8.0)}, form="floats"), {"q.bias": Interleaved(1)})
    assert np.array_equal(stored.read("q.bias"), [0, 2, 4, 6, 1, 3, 5, 7])
