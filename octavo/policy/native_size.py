"""What the native program holds, counted as `octavo/native/octavo.h` lays it out: weights in panels, and the buffers of its steps.

Quantised matrices stay codes. Floats take the dtype of the run, norms and biases are float32. Panels are 16 rows; columns are
filled up to 64, or to a group.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from octavo.policy.activations import FLOAT32
from octavo.policy.description import Matrix, ModelDescription, StepLoad
from octavo.policy.model_size import SCALE_AND_OFFSET, Codes, Kept, kept_matrices

PANEL, COLUMNS = 16, 64
SCRATCH_BYTES = 4 * 2 * PANEL  # of each thread, for each column of the widest matrix: four panels unpacked for many rows
# Bytes on the way, for each weight of a matrix: its code, with a share of the scales; or its float, with a share of what malloc
# keeps back of those before it, and once more where it comes in parts.
CODES_ON_THE_WAY, FLOATS_ON_THE_WAY, PARTS_ON_THE_WAY = 1.25, 5.3, 4


def native_refusal(model: ModelDescription) -> str | None:
    """Says why the native program cannot run this model, or returns None. Its layers are alike, but for their windows."""
    if (why := model.unlike_the_plain_layer() or model.several_tables()) is not None:
        return why
    mixers: list[Any] = [layer.mixer for layer in model.kinds]
    lacking = [name for mixer in mixers for name in mixer.features if name != "window"]
    if lacking or any(mixer.position_table is None for mixer in mixers):
        return f"attention has {', '.join(lacking) or 'no rotation'}"
    alike = {(replace(mixer, window=None), layer.mlp, layer.norm) for mixer, layer in zip(mixers, model.kinds)}
    return None if len(alike) == 1 else "its layers differ in more than their windows"


def native_matrices(model: ModelDescription, item: int, stored: Mapping[str, Codes | None]) -> list[Kept]:
    """Returns how each matrix is kept. `item`: bytes of a float; `stored`: how each weight is stored, by its name"""
    return kept_matrices(model, stored, lambda matrix, codes: _panel_bytes(matrix, codes, item))


def native_weight_bytes(
    model: ModelDescription, item: int, stored: Mapping[str, Codes | None], unpacked: int = 0, straight: Collection[str] = ()
) -> tuple[int, int]:
    """Returns (bytes of the weights, most bytes held while they are packed). `unpacked`: of a weight while it is quantised again;
    `straight`: weights that are packed out of the file, without a copy in between"""
    kept = model.vector_numbers * FLOAT32
    if model.lookup is not None:
        kept += model.lookup.numbers * item
    most = 0
    for one in native_matrices(model, item, stored):
        on_the_way = 0 if all(part in straight for part in one.matrix.parts) else CODES_ON_THE_WAY
        if one.codes is None:
            on_the_way = FLOATS_ON_THE_WAY + (PARTS_ON_THE_WAY if len(one.matrix.parts) > 1 else 0)
        size = one.matrix.numbers
        most = max(most, kept + size * unpacked, kept + one.nbytes + int(size * on_the_way))
        kept += one.nbytes
    return kept, most


def native_step_bytes(model: ModelDescription, load: StepLoad, threads: int) -> int:
    """Returns the bytes of buffers, which grow to the fullest step and stay, of hidden states and logits of two steps, and of what each
    thread needs to draw from a row. A level that multiplies bfloat16 leaves some of the floats counted here untouched."""
    layer = {matrix.name: matrix for matrix in model.matrices if matrix.layer == 0}
    widest = max(matrix.columns for matrix in layer.values()) + COLUMNS
    prepared = model.hidden_size + widest  # rows as products read them: of norms, and of attention or gates
    # the stream, what is new, the norm; q, k, v and the result of attention; gates
    token = 3 * model.hidden_size + layer["qkv"].rows + layer["output"].columns + layer["down"].columns + prepared
    logits = load.rows * model.vocab_size
    return load.tokens * token * FLOAT32 + 2 * FLOAT32 * logits + threads * (SCRATCH_BYTES * widest + 2 * FLOAT32 * model.vocab_size)


def _panel_bytes(matrix: Matrix, codes: Codes | None, item: int) -> int:
    # gate and up stand in turn, each filled up by itself
    rows = sum(_up(part, PANEL) for part in matrix.parts.values()) if matrix.gated else _up(matrix.rows, PANEL)
    bias = rows * FLOAT32 if matrix.bias else 0
    if codes is None:
        return rows * _up(matrix.columns, COLUMNS) * item + bias
    columns = _up(matrix.columns, max(COLUMNS, codes.group))
    order = matrix.columns * 4 if codes.order else 0
    return rows * columns * codes.bits // 8 + rows * (columns // codes.group) * SCALE_AND_OFFSET + order + bias


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
