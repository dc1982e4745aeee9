"""How a layer stores the weights of its matrix: a scheme, selected when the layer is built.

    params     creates the layer's parameters, uninitialised; the loader fills them by name
    finalize   runs once when they are filled, for example to repack them for the kernels
    apply      the product itself, in `out` if given
    gated      silu(gate) * up, if the matrix is gate over up
    rows       looks up rows of the matrix, as an embedding
"""

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.kernels.device_codes import DeviceCodes, block_size
from octavo.kernels.fp8_matrix import Fp8Matrix
from octavo.kernels.ops import (
    fp8_linear,
    invariant_fp8_linear,
    invariant_gate_up,
    invariant_linear,
    invariant_packed_linear,
    packed_gate_up,
    packed_linear,
    silu_and_mul,
    unpack,
)
from octavo.kernels.reference.dequant import FP4_TABLE
from octavo.kernels.reference.fp8 import widen
from octavo.kernels.reference.layer import pack_words
from octavo.kernels.reference.products import multiply
from octavo.quant.packed import PackedWeight


class QuantScheme(Protocol):
    invariant: bool  # on a GPU, a product has the same bits for a row whatever the other rows are

    def params(self, layer: nn.Module, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None: ...

    def finalize(self, layer: nn.Module) -> None: ...

    def apply(self, layer: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor: ...

    def gated(self, layer: nn.Module, x: Tensor) -> Tensor: ...

    def rows(self, layer: nn.Module, index: Tensor) -> Tensor: ...


class Unquantized:
    """Dense weights [out_features, in_features] in the dtype of the run."""

    def __init__(self, invariant: bool = False) -> None:
        self.invariant = invariant

    def params(self, layer: nn.Module, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        layer.register_parameter("weight", empty_parameter(out_features, in_features, dtype=dtype))
        layer.register_parameter("bias", empty_parameter(out_features, dtype=dtype) if bias else None)

    def finalize(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = invariant_linear if self.invariant else multiply
        return product(x, cast(Tensor, layer.weight), cast(Tensor | None, layer.bias), out)

    def gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.invariant and layer.bias is None:
            return invariant_gate_up(x, cast(Tensor, layer.weight), "swiglu")
        return silu_and_mul(self.apply(layer, x))

    def rows(self, layer: nn.Module, index: Tensor) -> Tensor:
        return F.embedding(index, cast(Tensor, layer.weight))


UNQUANTIZED = Unquantized()


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Returns a parameter for inference, which the loader fills."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


# -- quantised weights on the device that computes with them
#
# Weights are repacked once when they are loaded (`kernels/device_codes.py` draws the layout) and stay quantised. A model built with the
# scheme `Packed` has no matrices until `loading/loader.py` has read them, so that quantised weights never exist as floats. A matrix
# that cannot be quantised makes its layer an `Unquantized` one, and one of 8-bit floats an `Fp8` one.

CHUNK = 1 << 24  # codes repacked at a time


def _without_matrix(layer: nn.Module, out_features: int, bias: bool, dtype: torch.dtype) -> None:
    layer.register_parameter("bias", empty_parameter(out_features, dtype=dtype) if bias else None)
    layer.dtype = dtype  # type: ignore[assignment]  # the stub of a module does not allow arbitrary attributes


class Packed:
    """The layer's parameters are those of its `codes`."""

    def __init__(self, invariant: bool = False) -> None:
        self.invariant = invariant

    def params(self, layer: nn.Module, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        _without_matrix(layer, out_features, bias, dtype)

    def fill(self, layer: nn.Module, weight: PackedWeight, device: torch.device) -> None:
        layer.codes = codes = repack(weight, device)  # type: ignore[assignment]
        for name, tensor in (("words", codes.words), ("scales", codes.scales), ("order", codes.order), ("table", codes.table)):
            layer.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))

    def finalize(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = invariant_packed_linear if self.invariant else packed_linear
        return product(x, cast(DeviceCodes, layer.codes), cast(Tensor | None, layer.bias), out)

    def gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        if layer.bias is not None or self.invariant:
            return silu_and_mul(self.apply(layer, x))
        return packed_gate_up(x, cast(DeviceCodes, layer.codes))

    def rows(self, layer: nn.Module, index: Tensor) -> Tensor:
        return unpack(cast(DeviceCodes, layer.codes), cast(torch.dtype, layer.dtype), index)


class Fp8:
    """8-bit floats with scales. The layer's parameters are those of `fp8`."""

    def __init__(self, invariant: bool = False) -> None:
        self.invariant = invariant

    def params(self, layer: nn.Module, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        _without_matrix(layer, out_features, bias, dtype)

    def fill(self, layer: nn.Module, matrix: Fp8Matrix) -> None:
        layer.fp8 = matrix  # type: ignore[assignment]
        layer.register_parameter("weight", nn.Parameter(matrix.values, requires_grad=False))
        layer.register_parameter("weight_scale", nn.Parameter(matrix.scale, requires_grad=False))

    def finalize(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor:
        product = invariant_fp8_linear if self.invariant else fp8_linear
        return product(x, cast(Fp8Matrix, layer.fp8), cast(Tensor | None, layer.bias), out)

    def gated(self, layer: nn.Module, x: Tensor) -> Tensor:
        return silu_and_mul(self.apply(layer, x))

    def rows(self, layer: nn.Module, index: Tensor) -> Tensor:
        return widen(cast(Fp8Matrix, layer.fp8), index).to(cast(torch.dtype, layer.dtype))


FP8 = Fp8()


def make_invariant(model: nn.Module) -> None:
    """Lets every matrix of a loaded model use products whose bits for a row do not depend on the other rows."""
    for module in model.modules():
        scheme = getattr(module, "scheme", None)
        if isinstance(scheme, (Unquantized, Packed, Fp8)):
            module.scheme = type(scheme)(invariant=True)  # type: ignore[assignment]


def repack(weight: PackedWeight, device: torch.device) -> DeviceCodes:
    n, k = weight.shape
    block = block_size(weight.bits, weight.group)
    filling, span = -k % block, min(weight.group, block * weight.bits // 16)
    words = torch.empty(n, (k + filling) * weight.bits // 16, dtype=torch.int16, device=device)
    height = max(1, CHUNK // k)
    for codes, part in zip(weight.codes.split(height), words.split(height)):
        part.copy_(pack_words(F.pad(codes.to(device), (0, filling)), weight.bits, span))
    pairs = torch.stack([weight.scale, weight.offset], dim=-1).to(device)  # [n, groups, 2]: the scale in the lower half of a word
    groups = -(-(k + filling) // weight.group)
    scales = F.pad(pairs, (0, 0, 0, groups - pairs.shape[1])).view(torch.int32).squeeze(-1).contiguous()
    order = None if weight.order is None else weight.order.long().to(device)
    table = None if weight.table is None else weight.table.to(device)
    floats = table is not None and torch.equal(table, FP4_TABLE.to(device))
    return DeviceCodes(weight.bits, weight.group, k, words, scales, weight.factor, order, table, floats)
