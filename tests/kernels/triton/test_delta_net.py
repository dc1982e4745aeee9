"""Gated DeltaNet against its reference: rows of every length in one step, from the beginning of a sequence and from the middle of one.

Slots that were never written have NaN, and all slots are compared, so a slot that must not be written is noticed.
"""

from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import SamplingParams
from octavo.attention.delta_net import DeltaNetSpec
from octavo.kernels.reference import delta_net as plain
from octavo.kernels.triton.delta_net.chunks import CELL
from octavo.kernels.triton.delta_net.launch import SHORT, delta_net, invariant_delta_net
from octavo.kernels.triton.step.norm import gated_norm
from octavo.layers import delta_net as layers
from octavo.step.step_tensors import NO_STATE, StepStates
from tests.support.families import family_model, reference_model
from tests.support.greedy import compare_with_reference
from tests.support.hybrids import HYBRIDS
from tests.support.places import Place, open_engine

# Of a result, relative to the length of all: a prompt in 16 bits has the rounding errors of its products, other numbers are float32.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Row:
    tokens: int
    start: int = 0  # tokens before them, which a state covers
    checkpoints: tuple[int, ...] = ()  # tokens of this step that each covers
    padding: bool = False


@dataclass
class Case:
    rows: tuple[Row, ...]
    k_heads: int = 2
    v_heads: int = 4
    k_dim: int = 16
    v_dim: int = 16
    width: int = 4
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    unused: int = 0  # tokens of padding behind all rows
    alike: bool = False  # all tokens are the same one, and nothing is forgotten
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def __post_init__(self) -> None:
        tokens = sum(row.tokens for row in self.rows) + self.unused
        channels = 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim
        self.qkvz = self.random(1 if self.alike else tokens, channels + 8).expand(tokens, -1).to(self.dtype).contiguous()
        self.gates = self.random(tokens, 2 * self.v_heads).mul(2).to(self.dtype)
        self.weights = self.random(channels, self.width).to(self.dtype), self.random(self.v_heads), self.random(self.v_heads)
        if self.alike:
            self.weights[1].fill_(-30)
        self.query_start = self.words(accumulate((row.tokens for row in self.rows), initial=0))
        self._fill_slots(channels)

    def _fill_slots(self, channels: int) -> None:
        """The first slot is the null state; then those that rows read, which have other states, then those that they write."""
        begun = [row.start > 0 for row in self.rows]
        reads = [number + 1 if there else 0 for number, there in enumerate(begun)]
        writes = [NO_STATE if row.padding else len(self.rows) + 1 + number for number, row in enumerate(self.rows)]
        covered = [(number, end) for number, row in enumerate(self.rows) for end in row.checkpoints]
        starts = self.query_start.tolist()
        checkpoints = [(starts[number] + end, 2 * len(self.rows) + 1 + slot) for slot, (number, end) in enumerate(covered)]
        first = accumulate((len(row.checkpoints) for row in self.rows), initial=0)
        self.states = StepStates(
            self.words(reads), self.words(writes), self.words(row.start for row in self.rows), self.words(first),
            torch.tensor(checkpoints, dtype=torch.int32, device=self.device).view(-1, 2),
        )  # fmt: skip
        slots = 2 * len(self.rows) + 2 + len(checkpoints)
        self.conv = torch.full((slots, self.width - 1, channels), torch.nan, device=self.device)
        self.recurrent = torch.full((slots, self.v_heads, self.k_dim, self.v_dim), torch.nan, device=self.device)
        self.conv[0] = self.recurrent[0] = 0
        for slot in filter(None, reads):
            self.conv[slot], self.recurrent[slot] = self.random(*self.conv.shape[1:]), self.random(*self.recurrent.shape[1:])

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def words(self, values: object) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.device)  # type: ignore[call-overload]

    def run(self, kernel: object) -> tuple[Tensor, Tensor, Tensor]:
        conv, recurrent = self.conv.clone(), self.recurrent.clone()
        qkv = self.qkvz[:, : conv.shape[2]]  # a view, as in the layer
        out = kernel(qkv, self.gates, *self.weights, conv, recurrent, self.query_start, self.states)  # type: ignore[operator]
        return out, conv, recurrent

    def check(self, kernel: object = delta_net) -> None:
        expected, found = self.run(plain.delta_net), self.run(kernel)
        limit = TOLERANCE[self.dtype]
        for name, one, other in zip(("out", "conv", "recurrent"), found, expected, strict=True):
            assert torch.equal(one.isnan(), other.isnan()), f"{name}: other slots were written"
            error = float((one - other).nan_to_num().norm() / other.nan_to_num().norm().clamp(min=1e-6))
            assert error <= (0 if name == "conv" else limit), f"{name}: {error:.1e}"
        assert torch.equal(found[1][0], self.conv[0]) and torch.equal(found[2][0], self.recurrent[0])
        again = self.run(kernel)
        assert all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(found, again)), "a second time"


MIXED = (
    Row(1, start=63), Row(65, checkpoints=(16, 64)), Row(3, start=5, checkpoints=(1,)), Row(1), Row(70, start=33, checkpoints=(31, 47, 48)),
    Row(4, start=62), Row(0, padding=True), Row(0, padding=True),
)  # fmt: skip
DECODE = (Row(1), Row(1, start=7), Row(1, start=64), Row(1, padding=True))
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float16", "bfloat16"])


@DTYPES
def test_a_mixed_step_gives_the_results_and_states_of_the_reference(dtype: torch.dtype, device: str) -> None:
    Case(MIXED, k_heads=1, v_heads=2, dtype=dtype, device=device, unused=5).check()


@DTYPES
def test_a_decode_step_gives_them_too(dtype: torch.dtype, device: str) -> None:
    Case(DECODE, k_heads=1, v_heads=3, k_dim=24, v_dim=40, dtype=dtype, device=device).check()


@pytest.mark.parametrize(("length", "start"), [(5, 0), (63, 0), (64, 0), (65, 0), (64, 65), (130, 63)])
def test_prompts_of_any_length_from_any_position(length: int, start: int, device: str) -> None:
    Case((Row(length, start),), k_heads=1, v_heads=1, device=device).check()


@pytest.mark.parametrize(
    ("k_heads", "v_heads", "k_dim", "v_dim", "width"),
    [(1, 2, 24, 80, 2), pytest.param(3, 6, 128, 48, 8, marks=pytest.mark.soak), pytest.param(4, 4, 256, 256, 4, marks=pytest.mark.soak)],
)
def test_heads_of_other_sizes_and_other_convolutions(
    k_heads: int, v_heads: int, k_dim: int, v_dim: int, width: int, device: str
) -> None:
    for rows in ((Row(70, start=3, checkpoints=(29,)), Row(2)), DECODE):
        Case(rows, k_heads, v_heads, k_dim, v_dim, width, device=device).check()


@pytest.mark.soak
@pytest.mark.parametrize("length", [1, 3, 4, 63, 64, 65, 200, 450])
@pytest.mark.parametrize("start", [0, 1, 63, 64, 100])
def test_further_prompts_with_checkpoints(length: int, start: int, device: str) -> None:
    checkpoints = tuple(range(7, length, 37))
    Case((Row(length, start, checkpoints), Row(1, start), Row(length)), device=device).check()


@DTYPES
def test_keys_that_are_all_alike_grow_no_errors(dtype: torch.dtype, device: str) -> None:
    """The powers of the triangle, of which its inverse could be made, have numbers as large as 1e17 then."""
    Case((Row(128),), k_heads=1, v_heads=1, dtype=dtype, device=device, alike=True).check()


SHORTER = Row(1, start=63), Row(9, checkpoints=(2, 5)), Row(1), Row(6, start=33, checkpoints=(1,)), Row(0, padding=True)


@pytest.mark.parametrize("rows", [SHORTER, DECODE, pytest.param(MIXED, marks=pytest.mark.soak)], ids=["mixed", "decode", "long"])
def test_the_kernel_of_deterministic_agrees_with_the_reference(rows: tuple[Row, ...], device: str) -> None:
    Case(rows, v_heads=2, device=device, unused=0 if rows is DECODE else 3).check(invariant_delta_net)


@DTYPES
def test_with_deterministic_no_division_of_a_row_changes_a_bit(dtype: torch.dtype, device: str) -> None:
    """The same tokens in one step, in two, and beside others."""
    tokens, cut = 9, 4
    whole = Case((Row(tokens, start=3, checkpoints=(cut,)),), dtype=dtype, device=device)
    out, conv, recurrent = whole.run(invariant_delta_net)
    beside = Case((Row(2), Row(tokens - cut, start=3 + cut), Row(3, start=1)), dtype=dtype, device=device)
    beside.qkvz[2:-3], beside.gates[2:-3], beside.weights = whole.qkvz[cut:], whole.gates[cut:], whole.weights
    beside.conv[2], beside.recurrent[2] = conv[3], recurrent[3]  # the checkpoint, read by the second row
    rest, rest_conv, rest_recurrent = beside.run(invariant_delta_net)
    assert torch.equal(rest[2:-3], out[cut:])
    assert torch.equal(rest_conv[5], conv[2]) and torch.equal(rest_recurrent[5], recurrent[2])


@pytest.mark.parametrize("cut", [64, 84])
def test_a_row_that_continues_from_a_checkpoint_has_the_bits_of_the_row_that_wrote_it(cut: int, device: str) -> None:
    """Chunks end at multiples of 64 positions of the sequence, wherever the row and its first token are in the step."""
    start, tokens = 20, 130
    whole = Case((Row(tokens, start, checkpoints=(cut - start,)),), k_heads=1, v_heads=1, device=device)
    out, conv, recurrent = whole.run(delta_net)
    rest, count = Case((Row(7), Row(tokens + start - cut, cut)), k_heads=1, v_heads=1, device=device), tokens + start - cut
    rest.qkvz[7:], rest.gates[7:], rest.weights = whole.qkvz[-count:], whole.gates[-count:], whole.weights
    rest.conv[2], rest.recurrent[2] = conv[3], recurrent[3]
    again, again_conv, again_recurrent = rest.run(delta_net)
    assert torch.equal(again[7:], out[-count:])
    assert torch.equal(again_conv[4], conv[2]) and torch.equal(again_recurrent[4], recurrent[2])


def test_rows_of_few_tokens_and_of_many_meet_in_one_step() -> None:
    counts = {row.tokens for row in MIXED}
    assert {1, SHORT} < {count for count in counts if 0 < count <= SHORT} and max(counts) > SHORT and 0 in counts


def test_the_memory_plan_counts_the_numbers_that_chunks_need() -> None:
    """In 16 bits, what is allocated before the results: q, k, v, w, the products of a chunk, and sums in float32."""
    spec = DeltaNetSpec(k_heads=2, v_heads=6, k_dim=48, v_dim=32, conv_width=4, norm_eps=1e-6)
    chunks = spec.channels + spec.v_heads * (spec.k_dim + CELL.value) + 2 * spec.v_heads
    assert spec.gpu_token_numbers == spec.channels + spec.v_size + 2 * spec.v_heads + chunks + 2 * spec.v_size


@pytest.mark.parametrize(("heads", "dim"), [(3, 16), (2, 40), (32, 128)])
@DTYPES
def test_the_gated_norm(dtype: torch.dtype, heads: int, dim: int, device: str) -> None:
    generator = torch.Generator().manual_seed(heads)
    x, weight = torch.randn(3, heads, dim, generator=generator).to(device), torch.randn(dim, generator=generator).to(device, dtype)
    gate = torch.randn(3, 2 * heads * dim, generator=generator).to(device, dtype)[:, heads * dim :].unflatten(1, (heads, dim))
    got, exact = gated_norm(x, gate, weight, 1e-6), plain.gated_norm(x, gate, weight, 1e-6)
    step = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]  # one rounding of the dtype
    assert got.is_contiguous() and got.dtype == dtype
    torch.testing.assert_close(got, exact, atol=step, rtol=step)


@pytest.mark.soak
def test_an_engine_that_computes_with_them_gives_the_tokens_of_transformers(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded steps, prompts in chunks beside rows of one token, and second turns from checkpoints; on a CPU the rest is references."""
    monkeypatch.setattr(layers, "delta_net", delta_net)
    monkeypatch.setattr(layers, "gated_norm", gated_norm)
    place: Place = "cuda" if device == "cuda" else "cpu"
    folder = family_model(tmp_path / "model", HYBRIDS["qwen3.5"], seed=38)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=4)
    settings: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 48, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}
    prompts = [[(7 * number + 3 * at) % 90 + 3 for at in range(length)] for number, length in enumerate((1, 5, 70, 33))]
    with open_engine(folder, place, check=True, **settings) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        second = llm.generate([[*one.prompt_token_ids, *one.outputs[0].token_ids, 7, 8, 9] for one in first], params, use_tqdm=False)
        assert llm.stats().prefix_hits > 0
    compare_with_reference(first + second, reference_model(folder, HYBRIDS["qwen3.5"])).accept()
