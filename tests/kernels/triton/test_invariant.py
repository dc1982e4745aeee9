"""Products and attention of `--deterministic`: near their references, and with equal bits for a row in every batch, chunk and division.

The interpreter multiplies with numpy, which adds in an order of its own. Here it adds column by column, as the tensor cores do.
"""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from octavo.kernels.gates import Gate
from octavo.kernels.reference import attention as plain_attention
from octavo.kernels.triton.gemv.tiles import FUSED_ROWS
from octavo.kernels.triton.invariant import attention
from octavo.kernels.triton.invariant.attention import invariant_attention, invariant_shares
from octavo.kernels.triton.invariant.fused import invariant_add_norm, invariant_norm_gate_up, invariant_norm_linear, invariant_norm_router
from octavo.kernels.triton.invariant.products import by_tiles, invariant_gate_up, invariant_linear
from octavo.kernels.triton.invariant.tiles import Tiles
from octavo.kernels.triton.step.elementwise import gate_and_mul
from octavo.kernels.triton.step.norm import add_rms_norm
from octavo.step.share_words import DEPTH, IN_ALL
from octavo.step.shared_keys import SharedKeys
from octavo.step.team_words import Teams, most_teams, team_words
from tests.kernels.triton.test_attention import HEADS, KV_HEADS, TOLERANCE, Caches, Mix
from tests.kernels.triton.test_teams import share
from tests.support.interpreter import widen
from tests.support.soaked import rarely

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHORT_PIECE = 64  # in the interpreter, which is slow
CHUNK = 40  # queries of the first row


@pytest.fixture(autouse=True)
def dots_in_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        x, y = (widen(one.data) if one.dtype.scalar == tl.bfloat16 else one.data.astype(np.float32) for one in (a, b))
        total = d.data
        for k in range(x.shape[1]):
            total = total + x[:, k, None] * y[None, k]
        return TensorHandle(total, d.dtype.scalar)

    if device == "cpu":
        monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def piece(device: str, monkeypatch: pytest.MonkeyPatch) -> int:
    if device == "cpu":
        monkeypatch.setattr(attention, "PIECE", SHORT_PIECE)
    return attention.PIECE


@pytest.fixture
def mix(piece: int) -> Mix:
    """A chunk over a past, decode of three pieces, a row that is not asked, a prompt, padding, a token after two pieces, a first token."""
    return [(CHUNK, piece + 25), (1, 2 * piece + 9), (0, 5), (33, 33), (1, 0), (1, 2 * piece + 1), (1, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "wide", "size"), [(1, 40, 48), (5, 64, 128), (37, 33, 72)])
def test_a_product_is_near_its_reference(rows: int, wide: int, size: int, dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((rows, size), (wide, size), (wide,)))
    for added in (None, bias):
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
        error = (invariant_linear(x, weight, added).double() - expected).norm() / expected.norm()
        assert error < {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_a_product_does_not_depend_on_the_others(dtype: torch.dtype, device: str) -> None:
    on_gpu = device == "cuda"
    size, wide, sizes = (4096, 2304, (1, 3, 16, 17, 64, 65, 200, 256, 600, 2048, 2900)) if on_gpu else (96, 40, (1, 3, 17, 70))
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((sizes[-1], size), (wide, size), (wide,)))
    for added in (None, bias):
        alone = invariant_linear(x, weight, added)
        for rows in sizes:
            assert torch.equal(invariant_linear(x[:rows].clone(), weight, added), alone[:rows]), rows
            assert torch.equal(invariant_linear(x[-rows:].clone(), weight, added), alone[-rows:]), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tile_changes_a_bit(dtype: torch.dtype, device: str) -> None:
    """Rows, columns, steps, warps and stages: the order of the sums is that of the columns in all of them."""
    generator = torch.Generator().manual_seed(2)
    size, wide = (2048, 512) if device == "cuda" else (160, 128)
    x, weight = (torch.randn(count, size, generator=generator).to(device, dtype) for count in (48, wide))
    hows = [Tiles(16, 16, 32, 2, 2), Tiles(16, 32, 16, 4, 3), Tiles(32, 64, 32, 4, 2), Tiles(64, 128, 64, 8, 2)]
    if dtype == torch.float32:
        hows = [how._replace(rows=min(how.rows, 32), columns=min(how.columns, 32), step=min(how.step, 32)) for how in hows]
    first, *others = [by_tiles(x, weight, None, torch.full((48, wide), torch.nan, dtype=dtype, device=device), how) for how in hows]
    assert all(torch.equal(first, other) for other in others)


# -- products with the operations around them


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gate", ["swiglu", *rarely("clamped")])
def test_a_gate_in_a_product_changes_no_bit(gate: Gate, dtype: torch.dtype, device: str) -> None:
    on_gpu = device == "cuda"
    size, wide, sizes = (1024, 3072, (1, 4, 16, 17, 64, 65, 200, 256, 300)) if on_gpu else (72, 40, (1, 17, 70))
    generator = torch.Generator().manual_seed(4)
    x, weight = (torch.randn(count, size, generator=generator).to(device, dtype) for count in (sizes[-1], 2 * wide))
    apart = gate_and_mul(invariant_linear(x, weight), gate)
    for rows in sizes:
        assert torch.equal(invariant_gate_up(x[:rows].clone(), weight, gate), apart[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [72, 1024, 2880])
def test_a_norm_in_a_product_changes_no_bit(size: int, dtype: torch.dtype, device: str) -> None:
    wide = 2048 if device == "cuda" else 24
    size = size if device == "cuda" else min(size, 136)
    generator = torch.Generator().manual_seed(size)
    shapes = (FUSED_ROWS, size), (FUSED_ROWS, size), (size,), (2 * wide, size), (2 * wide,)
    x, residual, scales, weight, bias = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes)
    normed, stream = invariant_add_norm(x, residual, scales, 1e-6)
    expected = add_rms_norm(x, residual, scales, 1e-6)
    assert torch.equal(stream, expected[1]) and (normed.float() - expected[0].float()).norm() < 1e-2 * expected[0].float().norm()
    hows = [None, Tiles(16, 16, 32, 2, 2), Tiles(16, 32, 64 if dtype != torch.float32 else 32, 4, 3)]
    for rows in range(1, FUSED_ROWS + 1):
        given = x[:rows].clone(), residual[:rows].clone(), scales, 1e-6, weight
        apart = invariant_linear(normed[:rows].contiguous(), weight, bias)
        gated = gate_and_mul(invariant_linear(normed[:rows].contiguous(), weight), "swiglu")
        for how in hows:
            for got, exact in (
                (invariant_norm_linear(*given, bias, how), (apart, stream[:rows])),
                (invariant_norm_router(*given, bias, how), (apart, normed[:rows], stream[:rows])),
                (invariant_norm_gate_up(*given, "swiglu", how), (gated, stream[:rows])),
            ):
                assert all(torch.equal(one, other) for one, other in zip(got, exact, strict=True)), (rows, how)


class Rows(Caches):
    def of(self, mix: Mix | None = None, paged: bool = True, teams: Teams | None = None, **options: Any) -> Tensor:
        """`mix`: other queries of the same rows, the last ones of shorter contexts"""
        queries = torch.tensor([count for count, _ in mix or self.mix])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]).to(self.q.device, self.query_start.dtype)
        context = torch.tensor([length for _, length in mix or self.mix]).to(self.context_len)
        q = self.q
        if mix:
            picked = []
            for (count, length), (own, whole), start in zip(mix, self.mix, self.query_start.tolist()):
                first = start + own - (whole - length) - count
                picked.append(torch.arange(first, first + count))
            q = self.q[torch.cat(picked).to(self.q.device)]
        caches, tables = (self.paged, self.tables) if paged else (self.contiguous, self.regions)
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=q.device)
        shares = invariant_shares(starts, context, caches[0], options.get("window"), teams)
        return invariant_attention(
            q, *caches, tables, starts, context, self.scale, out, int(queries.max()), shares, paged=paged, **options
        )


def options(name: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    per_head = torch.rand(HEADS, generator=generator).to(device)
    return {
        "plain": {}, "window": {"window": 20}, "wide window": {"window": attention.PIECE + 3}, "soft cap": {"soft_cap": 5.0},
        "sinks": {"sinks": per_head.to(dtype)}, "ALiBi": {"slopes": per_head / 50},
        "all": {"window": 20, "soft_cap": 5.0, "sinks": per_head.to(dtype), "slopes": per_head / 50},
    }[name]  # fmt: skip


OPTIONS = ["plain", "window", "wide window", "soft cap", "sinks", "ALiBi", "all"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_near_its_reference(name: str, dtype: torch.dtype, device: str, mix: Mix) -> None:
    rows, given = Rows(mix, 16, dtype, device), options(name, device, dtype)
    expected = torch.empty_like(rows.q, memory_format=torch.contiguous_format)
    plain_attention.paged_attention(
        rows.q, *rows.paged, rows.tables, rows.query_start, rows.context_len, rows.scale, expected, **given
    )
    for paged in (True, False):
        error = (rows.of(paged=paged, **given).float() - expected.float()).abs().max()
        assert error < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", *rarely(*OPTIONS[1:6]), "all"])
def test_a_query_does_not_depend_on_chunks_rows_or_the_division_of_the_work(
    name: str, dtype: torch.dtype, device: str, mix: Mix, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, given = Rows(mix, 16, dtype, device), options(name, device, dtype)
    whole = rows.of(**given)
    assert torch.equal(whole, rows.of(paged=False, **given)), "paging changes bits"
    for cut in (1, CHUNK - 1) if device == "cpu" else (1, 7, 16, 24, CHUNK - 1):  # the first row in two chunks
        assert torch.equal(rows.of([(cut, mix[0][1] - CHUNK + cut), *mix[1:]], **given)[:cut], whole[:cut]), f"a chunk of {cut}"
        assert torch.equal(rows.of([(CHUNK - cut, mix[0][1]), *mix[1:]], **given), whole[cut:]), f"a chunk after {cut}"
    how = attention.prefill_reading(dtype, rows.q.shape[2])
    monkeypatch.setattr(attention, "prefill_reading", lambda *_: how._replace(split=not how.split))
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 0)  # too few for pieces: programs read whole rows
    assert torch.equal(rows.of(**given), whole), "pieces were joined in another way"


@pytest.mark.usefixtures("mix")
def test_rows_are_read_in_pieces_while_there_are_few(device: str) -> None:
    rows = Rows([(1, 3 * attention.PIECE), (1, 5)], 16, torch.float32, device)
    shares = invariant_shares(rows.query_start, rows.context_len, rows.paged[0], None)
    assert shares.lines[0, 0].item() == 4 * KV_HEADS


# -- shared beginnings


def teams_of(rows: Rows, keys: SharedKeys, piece: int, most: int, wanted: int) -> Teams:
    words = team_words(keys, len(rows.mix), most, wanted, piece)
    entries, lines = (torch.from_numpy(part).to(rows.q.device) for part in words)
    return Teams(entries, torch.nn.functional.pad(lines, (0, 0, 0, 1 + most_teams(len(rows.mix)) - len(lines)), value=-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "sinks", *rarely("soft cap", "ALiBi")])
def test_a_query_does_not_depend_on_rows_that_share_its_beginning(
    name: str, dtype: torch.dtype, device: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two beginnings, of which one goes on in two ways, and one that is shorter than a piece; groups of two rows and of five."""
    contexts = [3 * piece + 30, 2 * piece + 40, 4 * piece + 1, piece + 20, 5, 0, 2 * piece + 17, 2 * piece + 33, 4 * piece + 9, 3 * piece]
    rows, given = Rows([*((1, context) for context in contexts), (7, 40)], 16, dtype, device), options(name, device, dtype)
    blocks = piece // 16
    tree = [(2, 0, 3 * blocks + 1), (8, 2, 4 * blocks), (1, 0, 2 * blocks + 2), (3, 0, 2), (7, 6, 2 * blocks), (9, 6, 3)]
    keys = share(rows, tree)
    alone = rows.of(**given)
    depths = set()
    for most, wanted in ((2, 1), (2, 99), (5, 1), (5, 99)):
        teams = teams_of(rows, keys, piece, most, wanted)
        lines = invariant_shares(rows.query_start, rows.context_len, rows.paged[0], None, teams).lines
        depths.add(int(lines[1 : 1 + int(lines[0, IN_ALL]), DEPTH].max()))
        assert torch.equal(rows.of(teams=teams, **given), alone), f"groups of {most}, {wanted} wanted"
        assert torch.equal(rows.of(teams=teams, paged=False, **given), alone), "paging changes bits"
    assert max(depths) == 4 > min(depths), depths
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 0)  # too few for pieces: programs read whole rows
    assert torch.equal(rows.of(teams=teams, **given), alone), "pieces were joined in another way"
