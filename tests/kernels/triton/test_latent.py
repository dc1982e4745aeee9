"""Latent attention against its reference: rows of one query and of more in one step, and the kernels before and behind it.

Wherever no row has written there is NaN, so that what is read without need shows.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import SamplingParams
from octavo.attention import triton as backend
from octavo.attention.spec import AttentionSpec, Latent
from octavo.kernels.reference import latent as plain
from octavo.kernels.triton.latent import invariant
from octavo.kernels.triton.latent.inputs import expand, write_latent
from octavo.kernels.triton.latent.invariant import (
    by_head,
    invariant_expand,
    invariant_latent_attention,
    invariant_latent_shares,
)
from octavo.kernels.triton.latent.launch import latent_attention, latent_shares
from octavo.kernels.triton.latent.tiles import MOST_LINES, LatentTiles, decode_tiles, head_groups, prefill_tiles
from octavo.kernels.triton.moe.route import choose_in_groups
from octavo.kernels.triton.step.norm import rms_norm
from octavo.layers import latent_attention as layers
from octavo.layers import mlp
from octavo.step.share_words import ARRIVED, IN_ALL, LINE, PARTS, most_parts, most_shares
from tests.support.families import family_model, reference_model
from tests.support.greedy import compare_with_reference
from tests.support.latents import LATENTS, for_a_gpu
from tests.support.places import Place, open_engine

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SMALL = LatentTiles(lines=16, keys=16, warps=4, stages=2)
SPLIT = LatentTiles(lines=16, keys=16, warps=4, stages=2, programs=3, shares=20, grain=1, merged=4)
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float16", "bfloat16"])

Mix = list[tuple[int, int]]  # a row's queries and its context
# A chunk over a past, decode, a row that is not asked, a whole prompt, padding of a graph, two queries, a first token, decode.
MIX: Mix = [(7, 37), (1, 41), (0, 5), (19, 19), (1, 0), (2, 33), (1, 1), (1, 70)]
DECODE: Mix = [(1, 41), (1, 0), (1, 1), (1, 150), (1, 16)]


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    torch._C._set_deterministic_algorithms(True)
    yield
    torch._C._set_deterministic_algorithms(False)


@dataclass
class Case:
    """Rows in a shuffled pool of blocks, and in regions of their own."""

    mix: Mix
    heads: int
    dtype: torch.dtype
    device: str
    size: int = 16  # of a block
    rank: int = 32
    rotary: int = 16
    spare: int = 0  # tokens of padding behind all rows
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def __post_init__(self) -> None:
        length, dim = max(context for _, context in self.mix), self.rank + self.rotary
        width = -(-length // self.size)
        blocks = torch.randperm(len(self.mix) * width, generator=self.generator).view(len(self.mix), width) + 1
        regions, tables = torch.randperm(len(self.mix), generator=self.generator)[:, None], torch.zeros_like(blocks)
        paged = torch.full((len(self.mix) * width + 1, self.size, 1, dim), torch.nan, dtype=self.dtype)
        contiguous = torch.full((len(self.mix), length + 3, 1, dim), torch.nan, dtype=self.dtype)
        for row, (_, context) in enumerate(self.mix):
            used, keys = -(-context // self.size), self.random(context, 1, dim)
            tables[row, :used] = blocks[row, :used]
            contiguous[regions[row, 0], :context] = keys
            paged.view(-1, 1, dim)[(blocks[row] * self.size)[:, None].add(torch.arange(self.size)).flatten()[:context]] = keys
        starts = list(accumulate((queries for queries, _ in self.mix), initial=0))
        self.q = self.random(starts[-1] + self.spare, self.heads, dim).to(self.device)
        self.query_start, self.context_len = self.words(starts), self.words([context for _, context in self.mix])
        self.caches = {True: (paged.to(self.device), self.words(tables)), False: (contiguous.to(self.device), self.words(regions))}
        self.used, self.scale = starts[-1], dim**-0.5

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def words(self, values: object) -> Tensor:
        return torch.as_tensor(values).to(self.device, torch.int32)

    @property
    def rows(self) -> tuple[Tensor, Tensor]:
        return self.query_start, self.context_len

    def attend(self, tiles: LatentTiles | None = None, paged: bool = True) -> Tensor:
        (cache, tables), most = self.caches[paged], max(queries for queries, _ in self.mix)
        return latent_attention(self.q, cache, tables, *self.rows, self.scale, self.poison(), most, None, paged, tiles)[: self.used]

    def exact(self) -> Tensor:
        cache, tables = self.caches[True]
        return plain.latent_attention(self.q, cache, tables, *self.rows, self.scale, self.poison())[: self.used]

    def poison(self) -> Tensor:
        return torch.full((*self.q.shape[:2], self.rank), torch.nan, dtype=self.dtype, device=self.device)

    def check(self, *tiles: LatentTiles | None) -> None:
        """Over blocks the results of the reference, and over regions the same bits."""
        expected = self.exact().float()
        for one in tiles:
            found = self.attend(one)
            torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])
            assert torch.equal(self.attend(one, paged=False), found)


@DTYPES
@pytest.mark.parametrize("heads", [1, 3, 20])
def test_a_mixed_step_gives_the_results_of_the_reference(heads: int, dtype: torch.dtype, device: str) -> None:
    Case(MIX, heads, dtype, device, spare=3).check(None if heads == 1 else LatentTiles(lines=32, keys=16, warps=4, stages=2))


@DTYPES
@pytest.mark.parametrize(("heads", "rank", "rotary"), [(20, 24, 8), (5, 40, 12), (128, 32, 16)])
def test_a_decode_step_gives_them_too(heads: int, rank: int, rotary: int, dtype: torch.dtype, device: str) -> None:
    """Of sizes that are no powers of two, and of more heads than a program has."""
    Case(DECODE, heads, dtype, device, rank=rank, rotary=rotary).check(None)


@pytest.mark.parametrize("size", [1, 4, pytest.param(64, marks=pytest.mark.soak), pytest.param(256, marks=pytest.mark.soak)])
def test_blocks_of_any_size(size: int, device: str) -> None:
    Case(MIX, 3, torch.float32, device, size=size).check(SMALL)


@pytest.mark.parametrize(("heads", "context"), [(3, 300), (20, 150)])
def test_parts_of_long_rows_are_merged_in_rounds(heads: int, context: int, device: str) -> None:
    """With 20 heads, in two groups: each has parts and counters of its own. Counters are zero again behind a step."""
    case = Case([(1, context), (1, 20), (1, 0), (1, context // 2)], heads, torch.float32, device)
    case.check(SPLIT)
    cache, tables = case.caches[True]
    shares = latent_shares(*case.rows, cache, heads, SPLIT)
    out = latent_attention(case.q, cache, tables, *case.rows, case.scale, case.poison(), 1, shares, True, SPLIT)
    lines = shares.lines[1 : 1 + int(shares.lines[0, IN_ALL])]
    assert int(lines[:, PARTS].max()) > 8 and not lines[:, ARRIVED].any(), "more parts than are merged in one round"
    assert torch.equal(latent_attention(case.q, cache, tables, *case.rows, case.scale, case.poison(), 1, shares, True, SPLIT), out)


def test_a_prompt_of_several_tiles_beside_rows_of_one_token(device: str) -> None:
    Case([(50, 50), (1, 9), (33, 70)], 2, torch.float32, device).check(LatentTiles(lines=32, keys=16, warps=4, stages=2))


@pytest.mark.soak
@DTYPES
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_latents_of_published_sizes(heads: int, dtype: torch.dtype, device: str) -> None:
    for mix in ([(5, 25), (1, 70), (1, 0)], DECODE):
        Case(mix, heads, dtype, device, rank=512, rotary=64).check(None)


def test_an_empty_step_fills_nothing(device: str) -> None:
    assert Case([(0, 5)], 2, torch.float32, device).attend().shape == (0, 2, 32)


def test_heads_are_divided_evenly_among_programs() -> None:
    assert [head_groups(heads, 64) for heads in (1, 20, 64, 96, 128, 65, 67)] == [1, 1, 1, 2, 2, 5, 67]
    for arch, dtype, heads in ((arch, dtype, heads) for arch in (80, 86, 90, 121) for dtype in TOLERANCE for heads in (1, 16, 20, 96, 128)):
        for tiles in (decode_tiles(dtype, heads, arch), prefill_tiles(dtype, arch)):
            assert heads // head_groups(heads, tiles.lines) <= tiles.lines <= MOST_LINES


@pytest.mark.soak
@pytest.mark.parametrize("name", ["deepseek v3", "deepseek v2 lite"])
def test_an_engine_that_computes_with_them_gives_the_tokens_of_transformers(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded steps, prompts in chunks beside rows of one token, and second turns from cached blocks; on a CPU the rest is references."""

    def attend(*given: Any) -> Tensor:
        *rest, _shares, paged = given
        return latent_attention(*rest, None, paged)

    for module, kernel in ((backend, write_latent), (layers, expand), (mlp, choose_in_groups)):
        monkeypatch.setattr(module, kernel.__name__, kernel)
    monkeypatch.setattr(backend, "latent_attention", attend)
    place: Place = "cuda" if device == "cuda" else "cpu"
    tiny = LATENTS[name] if place == "cpu" else for_a_gpu(LATENTS[name])
    folder, params = (
        family_model(tmp_path / "model", tiny, seed=38),
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=4),
    )
    settings: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 48, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}
    prompts = [[(7 * number + 3 * at) % 90 + 3 for at in range(length)] for number, length in enumerate((1, 5, 70, 33))]
    with open_engine(folder, place, check=True, **settings) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        second = llm.generate([[*one.prompt_token_ids, *one.outputs[0].token_ids, 7, 8, 9] for one in first], params, use_tqdm=False)
        assert llm.stats().prefix_hits > 0
    compare_with_reference(first + second, reference_model(folder, tiny)).accept()


# -- with deterministic


@pytest.fixture
def mix(device: str, monkeypatch: pytest.MonkeyPatch) -> Mix:
    """A chunk over a past, decode of three pieces, a row that is not asked, a prompt, padding, a token after two pieces, a first token."""
    if device == "cpu":
        monkeypatch.setattr(invariant, "PIECE", 64)
    piece = invariant.PIECE
    return [(40, piece + 25), (1, 2 * piece + 9), (0, 5), (33, 33), (1, 0), (1, 2 * piece + 1), (1, 1)]


class Alike(Case):
    """The same with the kernels of `deterministic`."""

    def attend(self, tiles: LatentTiles | None = None, paged: bool = True) -> Tensor:
        return self.of(self.mix, paged)

    def of(self, mix: Mix, paged: bool = True) -> Tensor:
        """`mix`: other queries of the same rows, the last ones of shorter contexts"""
        starts = self.words(list(accumulate((queries for queries, _ in mix), initial=0)))
        context, (cache, tables) = self.words([length for _, length in mix]), self.caches[paged]
        rows = zip(mix, self.mix, self.query_start.tolist())
        picked = [start + own - (whole - length) - count + at for (count, length), (own, whole), start in rows for at in range(count)]
        q, most = self.q[torch.tensor(picked, dtype=torch.int64, device=self.q.device)], max(queries for queries, _ in mix)
        out = torch.full((len(q), self.heads, self.rank), torch.nan, dtype=self.dtype, device=self.device)
        shares = invariant_latent_shares(starts, context, cache, self.heads)
        return invariant_latent_attention(q, cache, tables, starts, context, self.scale, out, most, shares, paged)


def same(one: Tensor, other: Tensor) -> bool:
    """The interpreter multiplies with numpy, which adds in an order of its own."""
    if one.is_cuda:
        return torch.equal(one, other)
    return torch.allclose(one.float(), other.float(), atol=4 * TOLERANCE[one.dtype], rtol=TOLERANCE[one.dtype])


@DTYPES
@pytest.mark.parametrize("heads", [3, 20, pytest.param(128, marks=pytest.mark.soak)])
def test_with_deterministic_attention_is_near_its_reference(heads: int, dtype: torch.dtype, device: str, mix: Mix) -> None:
    case = Alike(mix, heads, dtype, device)
    found = case.attend()
    torch.testing.assert_close(found.float(), case.exact().float(), atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])
    assert torch.equal(case.attend(paged=False), found)


@DTYPES
@pytest.mark.parametrize("sizes", [(3, 32, 16), pytest.param((20, 512, 64), marks=pytest.mark.soak)])
def test_with_deterministic_no_chunk_and_no_row_changes_a_bit(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: str, mix: Mix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row alone, whose pieces are then work items of their own; and a chunk token by token."""
    heads, rank, rotary = sizes
    case = Alike(mix, heads, dtype, device, rank=rank, rotary=rotary)
    whole, starts = case.attend(), case.query_start.tolist()
    for row, (count, context) in enumerate(mix):
        alone = case.of([(count, context) if number == row else (0, 0) for number in range(len(mix))])
        assert same(alone, whole[starts[row] : starts[row] + count]), row
    for last in (1, 7, 40):
        one = case.of([(1, mix[0][1] - 40 + last), *((0, 0) for _ in mix[1:])])
        assert same(one, whole[last - 1 : last]), last
    divide = invariant.decode_shares

    def undivided(*given: Any, **options: Any) -> Any:
        return divide(*given[:-1], 0, **options)  # more tiles than fit: whole rows

    monkeypatch.setattr(invariant, "most_shares", lambda rows, groups, *_: rows * groups)
    monkeypatch.setattr(invariant, "decode_shares", undivided)
    assert same(case.of(mix), whole)


@DTYPES
def test_with_deterministic_the_products_of_heads_do_not_depend_on_other_rows(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(2)
    heads, plain_dim, rank, tokens = (20, 192, 512, 300) if device == "cuda" else (3, 40, 72, 70)
    x = torch.randn(tokens, heads, plain_dim, generator=generator).to(device, dtype)
    k_up, v_up = (torch.randn(shape, generator=generator).to(device, dtype) for shape in ((heads * plain_dim, rank), (heads * 48, rank)))
    mixed = torch.randn(tokens, heads, rank, generator=generator).to(device, dtype)

    def products(count: int) -> Tensor:
        made = torch.full((count, heads, rank + 8), torch.nan, dtype=dtype, device=device)
        by_head(x[:count].transpose(0, 1), k_up.view(heads, plain_dim, rank), made[:, :, :rank].transpose(0, 1))
        return made[:, :, :rank]

    out, values = products(tokens), invariant_expand(mixed, v_up)
    scale = rank**0.5 * 8 * TOLERANCE[dtype]
    exact = torch.einsum("thp,hpl->thl", x.double(), k_up.double().view(heads, plain_dim, rank))
    torch.testing.assert_close(out.double(), exact, atol=scale, rtol=TOLERANCE[dtype])
    torch.testing.assert_close(values.float(), plain.expand(mixed, v_up).float(), atol=scale, rtol=TOLERANCE[dtype])
    for count in (1, 16, 17, 65):
        assert same(products(count), out[:count]) and same(invariant_expand(mixed[:count], v_up), values[:count]), count


# -- memory


@pytest.mark.parametrize("heads", [1, 16, 20, 48, 64, 128])
def test_the_memory_plan_counts_what_the_parts_of_rows_need(heads: int) -> None:
    """On the largest GPUs: 160 multiprocessors."""
    spec = AttentionSpec(heads, 1, 576, 1.0, rotary_dim=64, latent=Latent(None, 128, 128))
    rows = 512
    for arch, dtype in product((80, 86, 90, 100, 121), TOLERANCE):
        for tiles in (decode_tiles(dtype, heads, arch), invariant.invariant_tiles(dtype, arch)):
            groups, programs = head_groups(heads, tiles.lines), 160 * tiles.programs
            parts = most_parts(programs, tiles.shares) * (heads // groups) * (spec.value_dim + 1)
            lines = (1 + most_shares(rows, groups, programs, tiles.shares)) * LINE
            assert 4 * (parts + lines) <= spec.gpu_step_bytes(rows) * 1.001


def test_the_memory_plan_counts_the_numbers_of_each_token() -> None:
    """What is projected, q over latents, weighted latents, and the values of heads."""
    for q_rank, projected in ((None, 20 * 192), (768, 768 + 20 * 192)):
        spec = AttentionSpec(20, 1, 576, 1.0, rotary_dim=64, latent=Latent(q_rank, 128, 96))
        assert spec.gpu_token_numbers == projected + 576 + 20 * (576 + 512 + 96)


# -- the inputs, and the values of heads


@DTYPES
@pytest.mark.parametrize(("heads", "plain_dim", "rank", "rotary"), [(3, 12, 24, 8), (40, 16, 32, 16)])
def test_q_and_the_new_keys_are_those_of_the_reference(
    heads: int, plain_dim: int, rank: int, rotary: int, dtype: torch.dtype, device: str
) -> None:
    """q and the latent are columns of one product, as they are without a latent of q. Padding has no slot."""
    generator = torch.Generator().manual_seed(heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    tokens, wide, dim = 5, heads * (plain_dim + rotary), rank + rotary
    both, k_up, weight = random(tokens, wide + dim + 3), random(heads * plain_dim, rank), random(rank)
    angle = torch.randn(30, rotary // 2, generator=generator).to(device)
    positions, slots = (torch.tensor(one, device=device) for one in ([7, 29, 0, 3, 0], [12, 5, 16, 31, -1]))
    found, exact = (torch.full((8, 4, 1, dim), torch.nan, dtype=dtype, device=device) for _ in range(2))
    given = both[:, :wide], both[:, wide : wide + dim], k_up, (weight, 1e-6), angle.cos(), angle.sin()
    q = write_latent(*given, positions.int(), slots, found)
    wanted = plain.write_latent(*given, positions, slots, exact)
    tolerance = {"atol": 4 * TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(q.float(), wanted.float(), **tolerance)
    torch.testing.assert_close(found.float(), exact.float(), equal_nan=True, **tolerance)


@DTYPES
def test_the_values_of_heads_are_those_of_the_reference(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    mixed, v_up = (torch.randn(shape, generator=generator).to(device, dtype) for shape in ((4, 3, 24), (3 * 20, 24)))
    found = expand(mixed, v_up)
    assert found.shape == (4, 60) and found.is_contiguous()
    torch.testing.assert_close(found.float(), plain.expand(mixed, v_up).float(), atol=8 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_beside_others_are_normed_without_a_copy(device: str) -> None:
    rows, weight = torch.randn(3, 40, device=device), torch.randn(24, device=device)
    assert torch.equal(rms_norm(rows[:, :24], weight, 1e-6), rms_norm(rows[:, :24].contiguous(), weight, 1e-6))
