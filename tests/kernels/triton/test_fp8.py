"""Products with weights of 8-bit floats against their twins: every kind of scale, few rows and more, sizes that no tile divides."""

import pytest
import torch
from torch import Tensor

from octavo.kernels.fp8_matrix import Fp8Matrix
from octavo.kernels.reference import fp8 as plain
from octavo.kernels.triton import fp8

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}  # of the largest result


def matrix(n: int, k: int, block: tuple[int, int], device: str) -> Fp8Matrix:
    dice = torch.Generator().manual_seed(n + k)
    values = torch.randn(n, k, generator=dice).clamp(-3, 3).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // block[0]), -(-k // block[1]), generator=dice) + 0.25
    return Fp8Matrix(values.to(device), scale.to(device), block)


def random(rows: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    """Rows of very different size."""
    numbers = torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))
    return (numbers * torch.linspace(0.1, 9, rows)[:, None]).to(device, dtype)


@pytest.mark.parametrize("rows", [1, 3, 19])
@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "bfloat16"])
def test_products_of_every_kind_of_scale(dtype: torch.dtype, kind: str, rows: int, device: str) -> None:
    n, k = 150, 288
    weight = matrix(n, k, {"tensor": (n, k), "rows": (1, k), "blocks": (128, 128)}[kind], device)
    x, bias = random(rows, k, dtype, device), random(1, n, dtype, device)[0]
    for offset in (None, bias):
        got, exact = fp8.fp8_linear(x, weight, offset), plain.fp8_linear(x, weight, offset)
        assert got.dtype == dtype
        torch.testing.assert_close(got, exact, atol=TOLERANCE[dtype] * float(exact.abs().max()), rtol=0)


def test_rows_are_rounded_as_the_twin_rounds_them(device: str) -> None:
    x = random(6, 200, torch.float32, device)
    x[2] = 0
    got, exact = fp8.quantize_rows(x), plain.quantize_rows(x)
    assert torch.equal(got[1], exact[1])
    assert torch.equal(got[0].float(), exact[0].float())


def test_no_rows_are_no_work(device: str) -> None:
    assert fp8.fp8_linear(random(0, 128, torch.bfloat16, device), matrix(40, 128, (40, 128), device)).shape == (0, 40)
