"""What is chosen for which GPU: Hopper's own kernels for Hopper alone, and tiles that fit wherever they are not timed."""

import pytest
import torch

from octavo.kernels.triton.attention.tiles import Tiles, prefill_tiles
from octavo.kernels.triton.packed.products import MEASURED, SMALL_TILE, Gemm, small
from octavo.kernels.triton.target import has_copy_engine, has_divided_prefill, has_pdl, is_roomy

AMPERE_AND_ADA, HOPPER, B200, GB10 = (80, 86, 87, 89), 90, 100, 121
KINDS = [(dtype, dim, plain) for dtype in (torch.bfloat16, torch.float32) for dim in (64, 80, 128, 256) for plain in (True, False)]


# promise: kernels-gpus-compute
def test_what_only_later_gpus_have_is_not_chosen_below_them() -> None:
    for arch in AMPERE_AND_ADA:
        assert not (has_copy_engine(arch) or has_pdl(arch) or has_divided_prefill(arch) or is_roomy(arch))
        chosen = [prefill_tiles(dtype, dim, arch, plain) for dtype, dim, plain in KINDS]
        assert not any(tiles.described or tiles.divided for tiles in chosen)
    for arch in (B200, GB10):
        assert has_copy_engine(arch) and has_pdl(arch) and not has_divided_prefill(arch)
        assert not any(prefill_tiles(dtype, dim, arch, plain).divided for dtype, dim, plain in KINDS)
    assert is_roomy(B200) and not is_roomy(GB10)


# promise: kernels-gpus-compute
@pytest.mark.parametrize(
    ("dim", "plain", "tiles"),
    [
        (64, True, Tiles(keys=128, warps=4, stages=2, queries=128, divided=True)),
        (128, True, Tiles(keys=128, warps=4, stages=2, queries=128, divided=True)),
        (80, True, Tiles(keys=64, warps=4, stages=2, queries=128, described=True)),
        (128, False, Tiles(keys=64, warps=8, stages=3, queries=128, described=True, lagging=True)),
        (256, True, Tiles(keys=32, warps=8, stages=3, queries=128, described=True, lagging=True)),
    ],
)
def test_hopper_has_the_tiles_that_were_timed_on_it(dim: int, plain: bool, tiles: Tiles) -> None:
    assert prefill_tiles(torch.bfloat16, dim, HOPPER, plain) == tiles
    assert prefill_tiles(torch.float32, dim, HOPPER, plain) == Tiles(keys=16, warps=8, stages=2, queries=32)


def test_products_with_codes_have_smaller_tiles_where_there_is_less_room_and_no_fewer_programs() -> None:
    timed = {how for hows in MEASURED.values() for how in hows if isinstance(how, Gemm)}
    for tile in timed:
        less = small(tile)
        assert less.rows * less.columns <= SMALL_TILE.rows * SMALL_TILE.columns and less.rows <= tile.rows
        assert less.shares * tile.rows * tile.columns >= tile.shares * less.rows * less.columns
    assert small(Gemm(256, 128, 4, 8, 3)) == Gemm(128, 64, 1, 8, 3) and small(Gemm(64, 64, 4, 4, 4)) == Gemm(64, 64, 4, 4, 4)
