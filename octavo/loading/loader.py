"""Reads weights into a model: as dense parameters, as panels of the native program, or quantised on a device.

The rules of the family map names to parameters. An unknown name or a parameter without a weight is an error.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from octavo.errors import LoadError
from octavo.kernels.cpu.gguf_blocks import largest_of_blocks, write_floats
from octavo.kernels.cpu.library import BF16, F16, F32, PANEL, Q4, Q8, NativeLibrary
from octavo.kernels.cpu.packing import Blocks, PackedMatrix, pack_blocks, pack_codes, pack_float
from octavo.kernels.fp8_matrix import Fp8Matrix
from octavo.layers.linear import Embedding, Linear, LMHead, MergedLinear
from octavo.layers.mlp import ExpertStack
from octavo.loading.checkpoint import Checkpoint, GGUFCheckpoint
from octavo.loading.views import ReorderedCheckpoint
from octavo.models.decoder import Decoder
from octavo.models.registry import family_of
from octavo.quant.fp8 import Fp8Weight, Quantised, folded, on_device
from octavo.quant.packed import PackedWeight, concatenate, factor_for, mergeable
from octavo.quant.schemes import FP8, UNQUANTIZED, Packed

NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Target:
    label: str  # parameter, and part if there is one: `layers.0.attention.qkv.weight[q]`
    values: Tensor  # a view of the parameter
    plus: float = 0.0  # added to the weight of the checkpoint


def load_weights(model: Decoder, checkpoint: Checkpoint) -> None:
    for name, target in check_weights(model, checkpoint).items():
        target.values.copy_(_read(checkpoint, name, target.plus))
    _finalize(model)


def _read(checkpoint: Checkpoint, name: str, plus: float) -> Tensor:
    """Returns a weight. `plus` is added in float32, so that a narrower dtype of the file loses nothing."""
    values = checkpoint.read(name)
    return values if plus == 0 else values.float() + plus


def check_weights(model: Decoder, checkpoint: Checkpoint) -> dict[str, Target]:
    """Returns the destination of each weight, or raises if names or shapes do not match. No matrix is read; `model` may be on meta."""
    targets = weight_targets(model)
    found: dict[str, Target] = {}
    unknown, twice, misshapen = [], [], []
    for name in checkpoint.names():
        target = targets.get(name)
        if target is None:
            if not (_redundant(name, model) or _zero_bias(name, targets, checkpoint)):
                unknown.append(name)
        elif name in found:
            twice.append(name)
        else:
            found[name] = target
            shape, wanted = list(checkpoint.shape(name)), list(target.values.shape)
            if shape != wanted:
                misshapen.append(f"{name} has shape {shape}, this model expects {wanted}")
    missing = [f"{name} (for {target.label})" for name, target in targets.items() if name not in found]
    problems = {"unknown to this model": unknown, "given twice": twice, "missing": missing, "of another shape": misshapen}
    _complain(checkpoint.source, problems)
    return found


def weight_targets(model: Decoder) -> dict[str, Target]:
    """Returns the destination of each checkpoint name. It contains every parameter of the model, or each part of one, exactly once."""
    rules = family_of(model.config).rules
    targets = {}
    for parameter_name, parameter in model.named_parameters():  # a tied head is not listed, only the embedding
        if (source := rules.find(parameter_name)) is not None:  # a single parameter
            targets[source] = Target(parameter_name, parameter.data)
            continue
        module_name, _, leaf = parameter_name.rpartition(".")
        merged = rules.find(module_name) is not None  # one weight contains all parts
        for part, rows in [(None, slice(None))] if merged else _parts(model.get_submodule(module_name)):
            source = rules.checkpoint_module(module_name, part)
            label = parameter_name if part is None else f"{parameter_name}[{part}]"
            targets[f"{source}.{leaf}"] = Target(label, parameter.data[rows], rules.plus(f"{source}.{leaf}"))
    return targets


def _parts(module: nn.Module) -> Iterable[tuple[str | None, slice]]:
    return module.parts.items() if isinstance(module, MergedLinear) else [(None, slice(None))]


def _redundant(name: str, model: Decoder) -> bool:
    """Whether this is a redundant tensor of old checkpoints."""
    head = family_of(model.config).rules.find("head")
    return name.endswith(".rotary_emb.inv_freq") or (name == f"{head}.weight" and model.config.tie_embeddings)


def _zero_bias(name: str, targets: dict[str, Target], checkpoint: Checkpoint) -> bool:
    """Whether this is a bias of zeros in a module whose model has none, as in many GPTQ checkpoints."""
    module, _, leaf = name.rpartition(".")
    weight = targets.get(f"{module}.weight")
    if leaf != "bias" or weight is None or checkpoint.shape(name) != (weight.values.shape[0],):
        return False
    return not bool(checkpoint.read(name).any())


def _complain(source: str, problems: dict[str, list[str]]) -> None:
    found = [f"{len(names)} {what}: {_shown(names)}" for what, names in problems.items() if names]
    if found:
        raise LoadError(f"{source}: weights do not match the model: {'; '.join(found)}")


def _shown(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(name[:200] for name in names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _finalize(model: Decoder) -> None:
    for module in model.modules():
        if isinstance(module, Linear):
            module.finalize()


# -- matrix by matrix, so that a dense copy of the whole model never exists
#
# Quantised parts stay quantised, and 8-bit floats stay so on a device. Parts of one matrix (q, k, v) must have one format:
# the most bits and the smallest group of any. If one of them is stored as floats, or has another column order, all
# of them become floats.


class StoredParameters:
    """Reads a model's parameters from a checkpoint by their names in the model. Parts of one matrix are concatenated.

    The model itself needs no memory.
    """

    def __init__(self, model: Decoder, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._modules = dict(model.named_modules())
        found = check_weights(model, checkpoint)
        self._stored = {target.label: name for name, target in found.items()}
        self._plus = {target.label: target.plus for target in found.values()}

    def has(self, name: str) -> bool:
        return all(label in self._stored for label in self._labels(name))

    def shape(self, name: str) -> tuple[int, ...]:
        parts = [self.checkpoint.shape(self._stored[label]) for label in self._labels(name)]
        return (sum(part[0] for part in parts), *parts[0][1:])

    def floats(self, name: str) -> Tensor:
        """Returns floats that may be a view of the file: the caller must copy them to keep them."""
        labels = self._labels(name)
        if len(labels) == 1:
            return self._read(labels[0]).float()
        joined = torch.empty(self.shape(name), dtype=torch.float32)
        self.copy(name, joined)
        return joined

    def copy(self, name: str, target: Tensor) -> None:
        """Copies a parameter, part by part, into the rows of a tensor on any device."""
        sizes = [self.checkpoint.shape(self._stored[label])[0] for label in self._labels(name)]
        for label, rows in zip(self._labels(name), target.split(sizes), strict=True):
            rows.copy_(self._read(label))

    def _read(self, label: str) -> Tensor:
        return _read(self.checkpoint, self._stored[label], self._plus[label])

    def blocks(self, name: str) -> list[Blocks] | None:
        """Returns the parts of a matrix in their GGUF format, if all are quantised, have the same columns and can be packed directly."""
        if not isinstance(self.checkpoint, (GGUFCheckpoint, ReorderedCheckpoint)):
            return None
        found = [self.checkpoint.blocks(self._stored[label]) for label in self._labels(name)]
        parts = [part for part in found if part is not None]
        return parts if len(parts) == len(found) and len({part.shape[1] for part in parts}) == 1 else None

    def codes(self, name: str) -> PackedWeight | None:
        return _joined(self._quantised(name))

    def codes_or_fp8(self, name: str, device: torch.device) -> PackedWeight | Fp8Matrix | None:
        """Like `codes`, but 8-bit floats stay so, on the device, if its kernels support their scales."""
        parts = self._quantised(name)
        floats = [part for part in parts if isinstance(part, Fp8Weight)]
        fp8 = on_device(floats, device) if len(floats) == len(parts) else None
        return _joined(parts) if fp8 is None else fp8

    def _quantised(self, name: str) -> list[Quantised | None]:
        return [self.checkpoint.packed(self._stored[label]) for label in self._labels(name)]

    def _labels(self, name: str) -> list[str]:
        """Returns the labels of a parameter's parts, or of the parameter if one weight of the checkpoint contains all parts."""
        module = self._modules.get(name.rpartition(".")[0])
        if name in self._stored:
            return [name]
        return [f"{name}[{part}]" for part in module.parts] if isinstance(module, MergedLinear) else [name]


def _joined(parts: list[Quantised | None]) -> PackedWeight | None:
    """Returns the quantised matrix, or None if it must become floats."""
    found = [folded(part) for part in parts if part is not None]
    if len(found) < len(parts) or not mergeable(found):
        return None
    return found[0] if len(found) == 1 else concatenate(found)


class NativeWeights:
    """Packs weights into the panels of the native program."""

    def __init__(self, parameters: StoredParameters, library: NativeLibrary, dtype: str) -> None:
        """`dtype`: for weights that are not stored quantised."""
        self._parameters = parameters
        self._library = library
        self._kind, self.dtype = {"float32": F32, "bfloat16": BF16, "float16": F16}[dtype], getattr(torch, dtype)

    def vector(self, name: str) -> NDArray[np.float32]:
        return np.array(self._parameters.floats(name).numpy())

    def rows(self, name: str) -> Tensor:
        """Returns a matrix for row lookups, without packing."""
        found = torch.empty(self._parameters.shape(name), dtype=self.dtype)
        blocks = self._parameters.blocks(name)
        if blocks is None:
            self._parameters.copy(name, found)
        else:
            (whole,) = blocks
            write_floats(whole.raw, whole.kind, self._library, self._kind, found.data_ptr())
        return found

    def matrix(self, module: str, alternate: bool = False, columns: int = 0, experts: int = 1) -> PackedMatrix:
        """Returns the weights of a product, with zeros up to `columns`. With `alternate`, 16 rows of each half alternate.

        `experts`: the number of experts, which have equally many rows each, in separate panels
        """
        name, bias = f"{module}.weight", f"{module}.bias"
        if (blocks := self._parameters.blocks(name)) is not None:
            return self._pack_blocks(blocks, _panel_order(sum(part.shape[0] for part in blocks), alternate, experts), bias)
        weight = self._parameters.codes(name) or self._wide(name, columns)
        order = _panel_order(weight.shape[0], alternate, experts)
        biases = np.array(_taken(self._parameters.floats(bias), order)) if self._parameters.has(bias) else None
        rows = None if order is None else order.numpy()
        if isinstance(weight, Tensor):
            return pack_float(self._library, weight.contiguous().numpy(), self._kind, biases, rows=rows)
        return self._pack_codes(weight, biases, rows)

    def heads(self, module: str, heads: int, turned: bool = False) -> PackedMatrix:
        """Returns a matrix for each head, in separate panels and as floats. With `turned`, rows and columns of each head change places."""
        name = f"{module}.weight"
        floats = self._parameters.floats(name)
        if turned:
            floats = floats.unflatten(0, (heads, -1)).transpose(1, 2).flatten(0, 1)
        order = _panel_order(len(floats), False, heads)
        return pack_float(self._library, floats.contiguous().numpy(), self._kind, rows=None if order is None else order.numpy())

    def _pack_blocks(self, parts: list[Blocks], order: Tensor | None, bias: str) -> PackedMatrix:
        """Packs blocks of a GGUF file without an intermediate copy, with the same result as through `PackedWeight`."""
        factor = max(factor_for(part.name, largest_of_blocks(part.raw, part.kind, self._library)) for part in parts)
        biases = np.array(_taken(self._parameters.floats(bias), order)) if self._parameters.has(bias) else None
        return pack_blocks(self._library, parts, factor, biases, None if order is None else order.numpy())

    def _wide(self, name: str, columns: int) -> Tensor:
        floats = self._parameters.floats(name)
        return F.pad(floats, (0, columns - floats.shape[1])) if columns > floats.shape[1] else floats

    def _pack_codes(self, weight: PackedWeight, bias: NDArray[np.float32] | None, rows: NDArray[np.int64] | None) -> PackedMatrix:
        codes, scale, offset = (tensor.contiguous().numpy() for tensor in (weight.codes, weight.scale, weight.offset))
        order, table = (None if part is None else part.numpy() for part in (weight.order, weight.table))
        kind = Q4 if weight.bits == 4 else Q8
        return pack_codes(self._library, codes, scale, offset, weight.group, kind, weight.factor, bias, order, rows, table)


def _panel_order(rows: int, alternate: bool, experts: int) -> Tensor | None:
    """Returns the row for each row of the panels, or None for the original order; -1 is a row of zeros.

    With `alternate`, 16 rows of each half of an expert alternate.
    """
    parts = 2 * experts if alternate else experts
    size = rows // parts
    if parts == 1 or (not alternate and size % PANEL == 0):
        return None
    index = torch.full((-(-size // PANEL) * PANEL,), -1)
    index[:size] = torch.arange(size)
    every = torch.where(index < 0, -1, index + size * torch.arange(parts)[:, None])  # [parts, rows of a part in whole panels]
    return every.view(experts, parts // experts, -1, PANEL).transpose(1, 2).flatten()


def _taken(values: Tensor, order: Tensor | None) -> NDArray[np.float32]:
    """Returns the rows in that order, with zeros where it has -1."""
    if order is None:
        return values.contiguous().numpy()
    taken = values[order.clamp(min=0)]
    taken[order < 0] = 0
    return taken.numpy()


def load_packed(model: Decoder, stored: StoredParameters) -> None:
    """Fills a model that was built with the scheme `Packed`, on the device of its norms.

    An embedding that is not tied to the head stays in floats: its rows are looked up, not multiplied.
    """
    for name, parameter in model.named_parameters():  # norms and biases: the matrices do not exist yet
        stored.copy(name, parameter.data)
    of_experts = {linear for stack in model.modules() if isinstance(stack, ExpertStack) for linear in stack.children()}
    for name, module in model.named_modules():
        if isinstance(module, (Linear, Embedding, LMHead)) and not (isinstance(module, LMHead) and module.tied is not None):
            _fill(module, f"{name}.weight", stored, model, as_fp8=module not in of_experts and model.comm.size == 1)


def _fill(layer: Linear | Embedding | LMHead, name: str, stored: StoredParameters, model: Decoder, as_fp8: bool) -> None:
    """`as_fp8`: 8-bit floats stay so if their scales are supported; otherwise they are converted to integers"""
    device, dtype = model.device, model.dtype
    looked_up = isinstance(layer, Embedding) and not model.config.tie_embeddings
    assert isinstance(layer.scheme, Packed)
    kept = None if looked_up else stored.codes_or_fp8(name, device) if as_fp8 else stored.codes(name)
    if isinstance(kept, Fp8Matrix):
        layer.scheme = FP8
        FP8.fill(layer, kept)
        return
    if kept is not None:
        layer.scheme.fill(layer, kept, device)
        return
    layer.scheme = UNQUANTIZED
    layer.weight = nn.Parameter(torch.empty(stored.shape(name), dtype=dtype, device=device), requires_grad=False)
    stored.copy(name, layer.weight.data)
