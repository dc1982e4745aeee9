"""Weights that differ from those of a file: converted to the format of the setting `quantization`, or random.

    auto          unchanged: quantised weights stay quantised, floats stay floats
    none          floats: quantised weights are dequantised
    int8, int4    8-bit or 4-bit weights in every matrix of a product (`sizing/model_size.py` lists which); quantised weights of
                  the file are dequantised first, so that they are rounded a second time

The native program and a GPU store the quantised weights, and torch gets the dequantised ones. A GPU has larger groups. Floats are
quantised on the device that will store them. Dummy weights are drawn as quantised values: quantising random numbers would give other
random numbers. So are weights that are MXFP4 according to the model's config. If it says FP8, they are 8-bit floats with scales, as
in a file.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from octavo.config import Quantization
from octavo.kernels.reference.dequant import FP4_MIDDLE, FP4_TABLE
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.loader import weight_targets
from octavo.loading.packed_modules import cut
from octavo.model_config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.description import ModelDescription
from octavo.models.registry import describe
from octavo.models.split import Part
from octavo.quant.fp8 import Fp8Weight, Quantised
from octavo.quant.packed import PackedWeight, quantize
from octavo.quant.quant_config import FP8_GROUP, QuantConfig, whole_group
from octavo.sizing.model_size import Codes, requantised

STD = 0.02  # standard deviation of random weights
FP4_SCALE = 2.0**-9  # or twice that: the numbers of FP4, which a table has doubled, are 5.9 on average
FP8_SPREAD = 60.0  # of random 8-bit floats, all below the largest possible one
CPU = torch.device("cpu")
POOL = 4_000_037  # values drawn; a prime, so that repetitions never align with the rows of a matrix


class DummyCheckpoint:
    """Random weights of a plausible size, for testing shapes: deterministic for a seed, and created when they are read.

    There is one for every weight of `model`, which may be on the meta device. Norms are ones.
    `codes`: the format of those weights that are drawn quantised; `quantization`: according to the config
    """

    source = "dummy weights"

    def __init__(
        self,
        model: Decoder,
        seed: int,
        device: torch.device = CPU,
        codes: Mapping[str, Codes] = MappingProxyType({}),
        quantization: QuantConfig | None = None,
    ) -> None:
        self._seed, self._codes, self._quantization = seed, codes, quantization
        targets = weight_targets(model)
        self._shapes = {name: tuple(target.values.shape) for name, target in targets.items()}
        self._plus = {name: target.plus for name, target in targets.items()}
        starts = accumulate((prod(shape) for shape in self._shapes.values()), initial=0)
        self._start = {name: start % POOL for name, start in zip(self._shapes, starts)}
        self._pool = torch.randn(POOL, generator=torch.Generator().manual_seed(seed % 2**63)).mul_(STD).to(device)

    @cached_property
    def _bytes(self) -> Tensor:
        dice = torch.Generator().manual_seed(self._seed % 2**63)
        return torch.randint(256, (POOL,), dtype=torch.uint8, generator=dice).to(self._pool.device)

    def names(self) -> list[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if (packed := self.packed(name)) is not None:
            return packed.dequantize()
        is_norm = len(shape) == 1 and name.endswith(".weight")
        return torch.full(shape, 1 - self._plus[name]) if is_norm else self._taken(self._pool, name, prod(shape)).view(shape)

    def check_part(self, name: str, part: Part) -> None:
        """Any part can be created."""

    def read_part(self, name: str, part: Part) -> Tensor:
        return cut(self.read(name), part)

    def packed_part(self, name: str, part: Part) -> Quantised | None:
        packed = self.packed(name)
        if isinstance(packed, Fp8Weight):
            start = (0 if part.rows is None else part.rows.start, 0 if part.columns is None else part.columns.start)
            return replace(packed, values=cut(packed.values, part), start=start)
        if packed is None or (part.columns is not None and (part.columns.start | part.columns.stop) % packed.group):
            return None
        groups = None if part.columns is None else range(part.columns.start // packed.group, part.columns.stop // packed.group)
        scale, offset = (cut(table, Part(part.rows, groups)) for table in (packed.scale, packed.offset))
        return replace(packed, codes=cut(packed.codes, part), scale=scale, offset=offset)

    def _draw_fp8(self, name: str, fp8: QuantConfig) -> Fp8Weight:
        """Returns a matrix of random 8-bit floats. Its scales differ by at most a factor of three."""
        n, k = self._shapes[name]
        rows, columns = fp8.block or (1, k)
        values = (self._taken(self._pool, name, n * k).view(n, k) * (FP8_SPREAD / STD)).to(torch.float8_e4m3fn)
        count = -(-n // rows) * -(-k // columns)
        scale = (0.5 + self._taken(self._bytes, name, count).cpu() / 256) * (STD / FP8_SPREAD)
        module = name.removesuffix(".weight")
        return Fp8Weight(module, values, scale.view(-(-n // rows), -1), (rows, columns), (0, 0), whole_group(name, FP8_GROUP, k))

    def draw(self, name: str, codes: Codes) -> PackedWeight:
        """Returns a matrix of random codes. The scales of its groups differ by at most a factor of three."""
        n, k = self._shapes[name]
        most = 2**codes.bits - 1
        drawn = self._taken(self._bytes, name, n * k).view(n, k) & most
        if codes.table:
            scale = FP4_SCALE * (1 + self._taken(self._bytes, name, n * k // codes.group).view(n, -1) % 2)
            table, offset = FP4_TABLE.to(drawn.device), scale * -FP4_MIDDLE
            return PackedWeight(codes.bits, codes.group, drawn, scale.half(), offset.half(), 1.0, table=table)
        spread = STD * (12 / ((most + 1) ** 2 - 1)) ** 0.5  # the scale for which weights are as large as the floats
        scale = spread * (0.5 + self._taken(self._bytes, name, n * k // codes.group).view(n, -1) / 256)
        return PackedWeight(codes.bits, codes.group, drawn, scale.half(), (scale * (-most / 2)).half(), 1.0)

    def _taken(self, pool: Tensor, name: str, count: int) -> Tensor:
        """Returns numbers of the pool, which repeats, starting where the previous weight ended."""
        pieces, start = [], self._start[name]
        while count:
            pieces.append(pool[start : start + count])
            count, start = count - len(pieces[-1]), 0
        return torch.cat(pieces)

    def packed(self, name: str) -> Quantised | None:
        if name not in self._codes:
            return None
        if self._quantization is not None and self._quantization.layout == "fp8":
            return self._draw_fp8(name, self._quantization)
        return self.draw(name, self._codes[name])

    def fingerprint(self) -> bytes:
        return b"dummy%d" % self._seed


def as_wanted(
    checkpoint: Checkpoint, quantization: Quantization, config: ModelConfig, device: torch.device = CPU, form: str = "cpu"
) -> Checkpoint:
    """Returns a checkpoint in the wanted format. `form`: the device whose quantised format is used, cpu or cuda."""
    return checkpoint if quantization == "auto" else Requantized(checkpoint, quantization, describe(config), device, form)


class Requantized:
    def __init__(
        self, stored: Checkpoint, quantization: Quantization, model: ModelDescription, device: torch.device, form: str
    ) -> None:
        self.source = stored.source
        self._stored = stored
        self._quantization = quantization
        self._matrices = {part: matrix for matrix in model.matrices for part in matrix.parts}
        self._device = device
        self._form = form

    def names(self) -> list[str]:
        return self._stored.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(name)

    def read(self, name: str) -> Tensor:
        packed = self.packed(name)
        return self._stored.read(name) if packed is None else packed.dequantize()

    def packed(self, name: str) -> PackedWeight | None:
        wanted = self._codes(name)
        if wanted is None:
            return None
        if isinstance(self._stored, DummyCheckpoint):
            return self._stored.draw(name, wanted)
        return quantize(self._stored.read(name).to(self._device), wanted.bits, wanted.group, f"{self.source}: {name}")

    def _codes(self, name: str) -> Codes | None:
        if self._quantization == "none" or name not in self._matrices:
            return None
        return requantised(self._matrices[name], self._quantization, self._form)

    def fingerprint(self) -> bytes:
        return self._stored.fingerprint()
