"""How a layer keeps the weights of its matrix: a scheme, chosen when the layer is built.

    params     creates the layer's parameters, uninitialised; the loader fills them by name
    finalize   runs once when they are filled: the place to repack them for the kernels
    apply      the product itself, in `out` if that is given
    gated      silu(gate) * up, where the matrix is gate over up
    rows       rows of the matrix, looked up: an embedding
"""

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels.ops import silu_and_mul


class QuantScheme(Protocol):
    def params(self, layer: nn.Module, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None: ...

    def finalize(self, layer: nn.Module) -> None: ...

    def apply(self, layer: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor: ...

    def gated(self, layer: nn.Module, x: Tensor) -> Tensor: ...

    def rows(self, layer: nn.Module, index: Tensor) -> Tensor: ...


class Unquantized:
    """Dense weights [out_features, in_features] in the dtype of the run."""

    def params(self, layer: nn.Module, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        layer.register_parameter("weight", empty_parameter(out_features, in_features, dtype=dtype))
        layer.register_parameter("bias", empty_parameter(out_features, dtype=dtype) if bias else None)

    def finalize(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor:
        weight, bias = cast(Tensor, layer.weight), cast(Tensor | None, layer.bias)
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        return silu_and_mul(self.apply(layer, x))

    def rows(self, layer: nn.Module, index: Tensor) -> Tensor:
        return F.embedding(index, cast(Tensor, layer.weight))


UNQUANTIZED = Unquantized()


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter for inference, to be filled by the loader."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
