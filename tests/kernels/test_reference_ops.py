"""Each small reference op against its formula, written out in float64 by other means."""

import math

import pytest
import torch

from octavo.kernels.reference import products
from octavo.kernels.reference.attention import store
from octavo.kernels.reference.layer import add_rms_norm, rms_norm, rotate, silu_and_mul

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "bfloat16"])


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@DTYPES
def test_rms_norm_divides_by_the_root_of_the_mean_square(dtype: torch.dtype) -> None:
    x, weight = random(5, 48, dtype=dtype), random(48, dtype=dtype)
    exact = [[v / math.sqrt(sum(u * u for u in row) / 48 + 1e-5) * w for v, w in zip(row, weight.tolist())] for row in x.tolist()]
    normed = rms_norm(x, weight, 1e-5).double()
    torch.testing.assert_close(normed, torch.tensor(exact, dtype=torch.float64), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rms_norm_of_bfloat16_is_rounded_once_before_the_weight_and_once_after() -> None:
    x, weight = random(50, 64, dtype=torch.bfloat16), random(64, dtype=torch.bfloat16)
    scaled = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = (scaled.bfloat16().double() * weight.double()).bfloat16()
    assert (rms_norm(x, weight, 1e-5) == expected).float().mean() > 0.99  # float32 itself may round at a tie


@DTYPES
def test_add_rms_norm_is_an_addition_and_a_norm(dtype: torch.dtype) -> None:
    x, residual, weight = random(5, 48, dtype=dtype), random(4, 48, dtype=dtype)[:1].expand(5, 48), random(48, dtype=dtype)
    normed, stream = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(stream, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))


@DTYPES
def test_rotate_turns_each_pair_as_a_complex_number(dtype: torch.dtype) -> None:
    x, angle = random(7, 3, 16, dtype=dtype), random(7, 8)
    points = torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.polar(torch.ones(7, 1, 8).double(), angle[:, None].double())
    expected = torch.cat([points.real, points.imag], dim=-1)
    rotated = rotate(x, angle.cos(), angle.sin())
    assert rotated.dtype == dtype
    torch.testing.assert_close(rotated.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@DTYPES
def test_silu_and_mul_gates_the_second_half(dtype: torch.dtype) -> None:
    x = random(3, 20, dtype=dtype)
    gate, up = x[:, :10].double(), x[:, 10:].double()
    torch.testing.assert_close(silu_and_mul(x).double(), gate / (1 + torch.exp(-gate)) * up, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_store_writes_the_named_slots_and_no_others() -> None:
    buffer, values, slots = torch.zeros(4, 2, 3, 5), random(3, 3, 5), torch.tensor([7, 0, 3])
    store(buffer, values, slots)
    assert torch.equal(buffer[3, 1], values[0]) and torch.equal(buffer[0, 0], values[1]) and torch.equal(buffer[1, 1], values[2])
    assert buffer.count_nonzero() == values.count_nonzero()


@pytest.mark.parametrize("bias", [None, random(50, dtype=torch.bfloat16)], ids=["", "bias"])
@pytest.mark.parametrize("slow", [False, True], ids=["torch", "float32"])
def test_a_product_of_bfloat16_is_rounded_once_on_every_cpu(slow: bool, bias: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch would be slow, it multiplies float32, a few rows of the weight at a time."""
    asked, multiply = set(), products.F.linear

    def note(x: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        asked.add(x.dtype)
        return multiply(x, *rest)

    monkeypatch.setattr(products.F, "linear", note)
    monkeypatch.setattr(products, "_cpu_multiplies_bfloat16", lambda: not slow)
    monkeypatch.setattr(products, "CHUNK", 24 * 7)
    x, weight = random(5, 24, dtype=torch.bfloat16), random(50, 24, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    product, given = products.multiply(x, weight, bias), torch.empty(5, 50, dtype=torch.bfloat16)
    assert products.multiply(x, weight, bias, given) is given
    for found in (product, given):
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)
    assert asked == {torch.float32 if slow else torch.bfloat16}
