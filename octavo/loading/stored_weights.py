"""How each weight of a model is stored, as headers say it: what plans read. No torch here.

    GGUF          by the kind of each tensor
    AWQ, GPTQ     by `quantization_config`, for modules that have a qweight; their other tensors belong to it
    all others    floats
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from octavo.loading.safetensors_header import Entry, read_header
from octavo.models.family import Rules
from octavo.policy.description import ModelDescription
from octavo.policy.model_size import Codes
from octavo.quant.quant_config import QuantConfig, whole_group

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # name in the file -> (dtype or GGUF kind, shape), in the order of the file
GGUF_CODES = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), Codes(4, 32)),
    **dict.fromkeys(("Q2_K", "Q3_K"), Codes(4, 16)),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q8_0"), Codes(8, 32)),
    "Q6_K": Codes(8, 16),
}
SOME_ORDER = "act-order"  # where the order was not read: one for all modules, since it is found from the same inputs


@dataclass(frozen=True, slots=True)
class StoredWeight:
    name: str  # Hugging Face's
    kind: str  # to show: BF16, Q4_K, AWQ
    size: int  # numbers, not bytes
    codes: Codes | None = None  # None: floats


def stored_weights(
    tensors: Tensors, source: str, quantization: QuantConfig | None, rules: Rules, orders: Mapping[str, str] | None = None
) -> tuple[StoredWeight, ...]:
    """`source`: for messages; `orders`: of the columns of each module with act-order, where they are known."""
    found = []
    for name, (kind, shape) in tensors.items():
        module, _, part = name.rpartition(".")
        if quantization is None or f"{module}.qweight" not in tensors or part == "bias":
            found.append(StoredWeight(rules.of_gguf(name) or name, kind, prod(shape), GGUF_CODES.get(kind)))
        elif part == "qweight" and len(shape) == 2:
            per_word = 32 // quantization.bits
            columns = shape[0] * (1 if quantization.method == "awq" else per_word)
            order = (SOME_ORDER if quantization.desc_act else "") if orders is None else orders.get(module, "")
            found.append(_packed(source, module, prod(shape) * per_word, columns, quantization, order))
    return tuple(found)


def of_description(model: ModelDescription, source: str, quantization: QuantConfig) -> tuple[StoredWeight, ...]:
    """Returns the weights as such a model is usually stored: its linear layers quantised, the vocabulary not."""
    products = [matrix for matrix in model.matrices if not matrix.vocabulary]
    modules = [(part.removesuffix(".weight"), matrix.columns, rows) for matrix in products for part, rows in matrix.parts.items()]
    order = SOME_ORDER if quantization.desc_act else ""
    return tuple(_packed(source, name, rows * k, k, quantization, order) for name, k, rows in modules if quantization.converts(name))


def of_folder(files: Iterable[Path], source: str, quantization: QuantConfig, rules: Rules) -> tuple[StoredWeight, ...]:
    entries: dict[str, Entry] = {}
    orders: dict[str, str] = {}
    for path in files:
        header, begin = read_header(path)
        entries |= header
        for name in [name for name in header if name.endswith(".g_idx")]:
            orders[name.removesuffix(".g_idx")] = _order(path, begin, header[name], quantization.group_size)
    tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    return stored_weights(tensors, source, quantization, rules, orders)


def _order(path: Path, begin: int, entry: Entry, group_size: int) -> str:
    """Returns a digest of the order of columns, or nothing if they stand in the order of their groups."""
    if entry.stop - entry.start > path.stat().st_size:
        return SOME_ORDER  # opening the file will raise the error
    with path.open("rb") as file:
        file.seek(begin + entry.start)
        group_of = file.read(entry.stop - entry.start)
    columns = len(group_of) // 4
    in_order = np.arange(columns, dtype="<i4") // (group_size if group_size > 0 else max(columns, 1))
    return "" if group_of == in_order.tobytes() else hashlib.blake2b(group_of, digest_size=8).hexdigest()


def _packed(source: str, module: str, size: int, columns: int, quantization: QuantConfig, order: str) -> StoredWeight:
    group_size = columns if quantization.group_size == -1 else quantization.group_size
    if quantization.method == "gptq":
        group_size = min(group_size, columns)
    codes = Codes(quantization.bits, whole_group(f"{source}: {module}.qweight", group_size, columns), order)
    return StoredWeight(f"{module}.weight", quantization.method.upper(), size, codes)
