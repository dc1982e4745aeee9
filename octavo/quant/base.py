"""How a linear layer keeps its weights: a scheme of three methods, chosen when the layer is built.

    params     creates the layer's parameters, uninitialised; the loader fills them by name
    finalize   runs once when they are filled: the place to repack them for the kernels
    apply      the product itself
"""

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class QuantScheme(Protocol):
    def params(self, layer: nn.Module, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None: ...

    def finalize(self, layer: nn.Module) -> None: ...

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor: ...


class Unquantized:
    """Dense weights [out_features, in_features] in the dtype of the run."""

    def params(self, layer: nn.Module, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        layer.register_parameter("weight", empty_parameter(out_features, in_features, dtype=dtype))
        layer.register_parameter("bias", empty_parameter(out_features, dtype=dtype) if bias else None)

    def finalize(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, cast(Tensor, layer.weight), cast(Tensor | None, layer.bias))


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A parameter for inference, to be filled by the loader."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
