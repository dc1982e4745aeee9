"""What a plan says of the weights: how they lie on disk, and what becomes of each matrix.

    93.8 MiB   of it 4-bit codes in groups of 32: 30 qkv, 30 output, 30 gate_up, 30 down (from Q4_1)
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.config import EngineConfig
from octavo.policy.memory_plan import ModelNeeds, shown

if TYPE_CHECKING:
    from octavo.loading.shape import ModelShape


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """All matrices that are kept in one way."""

    kept: str  # 4-bit codes in groups of 32, bfloat16
    matrices: dict[str, int]  # how many of each name
    stored: list[str]  # kinds in the file
    nbytes: int

    def __str__(self) -> str:
        listed = ", ".join(f"{count} {name}" for name, count in self.matrices.items())
        return f"{self.kept}: {listed}" + (f" (from {', '.join(self.stored)})" if self.stored else "")


def stored(shape: "ModelShape", needs: ModelNeeds, config: EngineConfig) -> str:
    if shape.stored_bytes is None:
        return "no weights here"
    said = ""
    if config.quantization in ("int8", "int4"):
        said = f", {config.quantization} at load" + ("" if needs.keeps_codes else "; torch computes with floats and saves no memory")
    elif shape.packed:
        said = f", {'stay quantised' if needs.keeps_codes and config.quantization == 'auto' else 'unpacked at load'}"
    return f"{shown(shape.stored_bytes)} on disk{said}"


def matrix_forms(shape: "ModelShape", needs: ModelNeeds, config: EngineConfig) -> list[MatrixForm]:
    """Nothing where torch computes, or where all are floats from the beginning."""
    if not needs.keeps_codes or not (shape.packed or config.quantization in ("int8", "int4")):
        return []
    weights = {weight.name: weight for weight in shape.weights}
    found: dict[str, MatrixForm] = {}
    for one in shape.kept(needs.dtype, config.quantization, needs.device):
        parts = [weights[part] for part in one.matrix.parts if part in weights]
        kept = needs.dtype if one.codes is None else f"{one.codes.bits}-bit codes in groups of {one.codes.group}"
        if shape.expands(one, config.quantization):
            kept += ", as their parts cannot be merged when quantised"
        form = found.get(kept, MatrixForm(kept, {}, [], 0))
        matrices = Counter(form.matrices) + Counter([one.matrix.name])
        kinds = dict.fromkeys([*form.stored, *(part.kind for part in parts)])
        found[kept] = MatrixForm(kept, dict(matrices), list(kinds), form.nbytes + one.nbytes)
    return list(found.values())
