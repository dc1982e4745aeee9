"""The small kernels against their twins: cache writes, norms, gates, copies."""

from importlib import import_module
from inspect import Parameter, signature

import pytest
import torch
from torch import Tensor

from octavo.kernels import ops
from octavo.kernels.gates import GATES, Gate
from octavo.kernels.reference import attention as plain_attention
from octavo.kernels.reference import layer as plain_layer
from octavo.kernels.triton.step.cache import copy_blocks, write_kv
from octavo.kernels.triton.step.elementwise import add_weighted, gate_and_mul, gelu, gelu_and_mul, scale_logits, silu_and_mul
from octavo.kernels.triton.step.norm import add_layer_norm, add_rms_norm, layer_norm, norm_add, norm_add_norm, rms_norm

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # one rounding of the dtype, of numbers near 1
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "float16", "bfloat16"])


def random(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def assert_near(got: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(got, exact, atol=TOLERANCE[got.dtype], rtol=TOLERANCE[got.dtype])


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("heads", [6, 1])
@DTYPES
def test_write_kv_writes_the_named_slots_and_no_others(dtype: torch.dtype, heads: int, norm: bool, device: str) -> None:
    kv_heads, dim, tokens = (1, 20, 5) if heads == 1 else (2, 16, 5)
    angle = torch.outer(torch.arange(64.0), 1e4 ** -(torch.arange(dim // 2) / (dim // 2))).to(device)
    norms = (random(device, dtype, dim), random(device, dtype, dim + 1)[1:], 1e-5) if norm else None
    positions, slots = torch.tensor([3, 63, 0, 17, 0], device=device), torch.tensor([9, 40, 11, 31, 0], device=device)  # 0: padding
    results = []
    for write in (write_kv, plain_attention.write_kv):
        qkv = random(device, dtype, tokens, (heads + 2 * kv_heads) * dim)
        caches = [torch.full((6, 8, kv_heads, dim), torch.nan, device=device, dtype=dtype) for _ in "kv"]
        q = write(qkv, norms, angle.cos(), angle.sin(), positions, slots, *caches)
        assert q.data_ptr() == qkv.data_ptr() and q.shape == (tokens, heads, dim)
        results.append([qkv, *(cache.nan_to_num(nan=77) for cache in caches)])
    for got, exact in zip(*results):
        assert_near(got, exact)


def test_write_kv_leaves_the_gate_beside_q_k_and_v_alone(device: str) -> None:
    """Tokens are strided then. Also of a single token, q keeps the stride, by which kernels are compiled."""
    heads, kv_heads, dim = 3, 2, 16
    turns = torch.ones(64, 4, device=device)
    for tokens in (1, 4):
        results = []
        for write in (write_kv, plain_attention.write_kv):
            projected = random(device, torch.float32, tokens, (2 * heads + 2 * kv_heads) * dim)
            qkv, gate = projected.split([(heads + 2 * kv_heads) * dim, heads * dim], dim=1)
            caches, before = [torch.zeros(6, 8, kv_heads, dim, device=device) for _ in "kv"], gate.clone()
            positions = torch.arange(tokens, device=device)
            q = write(qkv, None, turns, turns / 2, positions, positions + 9, *caches)
            assert torch.equal(gate, before) and (write is not write_kv or q.stride(0) == projected.stride(0))
            results.append([q.contiguous(), *caches])
        for got, exact in zip(*results):
            assert_near(got, exact)


@pytest.mark.parametrize(
    ("rotated", "kind", "wide"), [(8, "heads", True), (0, "heads", False), (12, "whole", True), (0, None, False)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_write_kv_rotates_a_part_or_nothing_and_norms_all_heads_as_one(
    dtype: torch.dtype, rotated: int, kind: str | None, wide: bool, device: str
) -> None:
    """`wide`: the norms' weights are float32 whatever the dtype is."""
    heads, kv_heads, dim, tokens = 3, 2, 20, 4
    angle = torch.outer(torch.arange(64.0), 1e4 ** -(torch.arange(rotated // 2) / max(rotated // 2, 1))).to(device)
    sizes = (heads * dim, kv_heads * dim) if kind == "whole" else (dim, dim)
    weights = [random(device, torch.float32 if wide else dtype, size) for size in sizes]
    norms = None if kind is None else (*weights, 1e-5)
    positions, slots = torch.tensor([3, 63, 0, 17], device=device), torch.tensor([9, 40, 11, 31], device=device)
    results = []
    for write in (write_kv, plain_attention.write_kv):
        qkv = random(device, dtype, tokens, (heads + 2 * kv_heads) * dim)
        caches = [torch.full((6, 8, kv_heads, dim), torch.nan, device=device, dtype=dtype) for _ in "kv"]
        write(qkv, norms, angle.cos(), angle.sin(), positions, slots, *caches)
        results.append([qkv, *(cache.nan_to_num(nan=77) for cache in caches)])
    for got, exact in zip(*results):
        assert_near(got, exact)


@pytest.mark.parametrize("size", [1, 48, 1025])
@DTYPES
def test_add_rms_norm(dtype: torch.dtype, size: int, device: str) -> None:
    x, residual, weight = random(device, dtype, 3, size), random(device, dtype, 3, size) * 3, random(device, dtype, size)
    got, exact = add_rms_norm(x, residual, weight, 1e-5), plain_layer.add_rms_norm(x, residual, weight, 1e-5)
    assert_near(got[0], exact[0])
    assert torch.equal(got[1], exact[1])


@pytest.mark.parametrize("biased", [True, False], ids=["biased", "bare"])
@pytest.mark.parametrize("size", [1, 48, 1025])
@DTYPES
def test_layer_norms(dtype: torch.dtype, size: int, biased: bool, device: str) -> None:
    x, residual = random(device, dtype, 3, size) + 7, random(device, dtype, 3, size) * 3
    weight, bias = random(device, dtype, size), random(device, dtype, size) if biased else None
    got, exact = add_layer_norm(x, residual, weight, bias, 1e-5), plain_layer.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert_near(got[0], exact[0])
    assert torch.equal(got[1], exact[1])
    assert_near(layer_norm(x, weight, bias, 1e-5), torch.nn.functional.layer_norm(x, (size,), weight, bias, 1e-5))


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("wide", [True, False], ids=["wide", "same"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_norms_after_a_sub_layer_and_before_the_next(dtype: torch.dtype, wide: bool, scale: float, device: str) -> None:
    kind = torch.float32 if wide else dtype
    x, residual = random(device, dtype, 3, 48), random(device, dtype, 3, 48) * 3
    after, before = random(device, kind, 48), random(device, kind, 48) + 1
    assert_near(rms_norm(x, before, 1e-5), plain_layer.rms_norm(x, before, 1e-5))
    assert_near(norm_add(x, residual, after, 1e-5, scale), plain_layer.norm_add(x, residual, after, 1e-5, scale))
    for got, exact in zip(
        norm_add_norm(x, residual, after, before, 1e-5, scale), plain_layer.norm_add_norm(x, residual, after, before, 1e-5, scale)
    ):
        assert_near(got, exact)
    got, exact = add_rms_norm(x, residual, before, 1e-5, scale), plain_layer.add_rms_norm(x, residual, before, 1e-5, scale)
    assert_near(got[0], exact[0])
    assert_near(got[1], exact[1])  # a GPU multiplies and adds in one operation


@pytest.mark.parametrize(("scale", "cap"), [(0.25, None), (1.0, 30.0), (0.5, 3.0)], ids=str)
@DTYPES
def test_logits_are_scaled_and_capped_in_place(dtype: torch.dtype, scale: float, cap: float | None, device: str) -> None:
    logits = random(device, dtype, 3, 999) * 4
    logits[0, 0], logits[1, 1] = -20_000, 20_000
    exact = plain_layer.scale_logits(logits.clone(), scale, cap)
    assert scale_logits(logits, scale, cap) is logits
    torch.testing.assert_close(logits, exact, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert cap is None or float(logits.abs().max()) <= cap


@pytest.mark.parametrize("gate", GATES)
@DTYPES
def test_gates(dtype: torch.dtype, gate: Gate, device: str) -> None:
    x = random(device, dtype, 3, 2 * 40) * 4
    x[0, 0], x[1, 0], x[2, 0], x[2, 40] = -200, 200, 9, 9  # whose exponentials no float32 holds, and what is clamped
    assert_near(gate_and_mul(x, gate), plain_layer.gate_and_mul(x, gate))
    if gate == "geglu":
        assert torch.equal(gelu_and_mul(x), gate_and_mul(x, gate))


@DTYPES
def test_gelu_without_a_gate(dtype: torch.dtype, device: str) -> None:
    x = random(device, dtype, 3, 1030) * 4
    x[0, 0], x[1, 0] = -200, 200
    assert_near(gelu(x), plain_layer.gelu(x))


@pytest.mark.parametrize("size", [1, 40, 1030])
@DTYPES
def test_silu_and_mul(dtype: torch.dtype, size: int, device: str) -> None:
    x = random(device, dtype, 3, 2 * size) * 4
    x[0, 0], x[1, 0] = -200, 200  # whose exponentials no float32 holds
    assert_near(silu_and_mul(x), plain_layer.silu_and_mul(x))


@pytest.mark.parametrize("size", [16, 200, 1030])
@DTYPES
def test_a_shared_expert_is_added_with_its_weight(dtype: torch.dtype, size: int, device: str) -> None:
    out, shared, x = (random(device, dtype, 3, size) for _ in range(3))
    weight = random(device, dtype, 1, size) * size**-0.5
    weight[0, 0], x[0, 0], x[1, 0] = 1, -200, 200  # whose exponentials no float32 holds
    assert_near(add_weighted(out, shared, x, weight), plain_layer.add_weighted(out, shared, x, weight))


def test_a_kernel_is_called_like_its_reference() -> None:
    """It may take more behind that, which only tests give."""
    for kernel in [each for each in vars(ops).values() if hasattr(each, "triton")]:
        reference = kernel.__wrapped__
        ours = getattr(import_module(f"octavo.kernels.triton.{kernel.triton}"), reference.__name__)
        taken, wanted = ([(each.name, each.default) for each in signature(one).parameters.values()] for one in (ours, reference))
        assert taken[: len(wanted)] == wanted, f"{kernel.triton}.{reference.__name__}"
        assert all(default is not Parameter.empty for _, default in taken[len(wanted) :])


def test_no_rows_are_no_work(device: str) -> None:
    nothing = torch.empty(0, 32, device=device)
    assert silu_and_mul(nothing).shape == (0, 16)
    assert add_rms_norm(nothing, nothing, torch.ones(32, device=device), 1e-5)[0].shape == (0, 32)


@pytest.mark.parametrize("pairs", [[(1, 2), (1, 4), (3, 5)], [(1, 2), (2, 3)], [(1, 2), (2, 1), (0, 5)]], ids=["apart", "chain", "swap"])
def test_copies_read_before_they_write_in_every_buffer(pairs: list[tuple[int, int]], device: str) -> None:
    for shape in ((6, 1, 2, 16), (6, 16, 3, 256)):  # less than a piece of a block, and more
        buffers = [random(device, dtype, *shape) for dtype in (torch.bfloat16, torch.float16, torch.bfloat16)]
        expected = [buffer.cpu().clone() for buffer in buffers]
        copy_blocks(buffers, pairs)
        plain_attention.copy_blocks(expected, pairs)
        assert all(torch.equal(buffer.cpu(), copy) for buffer, copy in zip(buffers, expected, strict=True))
