"""What the native program holds, counted as `octavo/native/octavo.h` lays it out: weights in panels, and the buffers of its steps.

Quantised matrices stay codes. Floats take the dtype of the run, norms and biases are float32. Panels are 16 rows; columns are
filled up to 64, or to a group.
"""

from collections.abc import Mapping

from octavo.model_config import ModelConfig
from octavo.policy.activations import FLOAT32, StepLoad
from octavo.policy.model_size import SCALE_AND_OFFSET, Codes, Kept, Matrix, kept_matrices, num_norms

PANEL, COLUMNS = 16, 64
SCRATCH_BYTES = 4 * 2 * PANEL  # of each thread, for each column of the widest matrix: four panels unpacked for many rows
# Bytes on the way, for each weight of a matrix: its code, with a share of the scales; or its float, with a share of what malloc
# keeps back of those before it, and once more where it comes in parts.
CODES_ON_THE_WAY, FLOATS_ON_THE_WAY, PARTS_ON_THE_WAY = 1.25, 5.3, 4


def native_matrices(config: ModelConfig, item: int, stored: Mapping[str, Codes | None]) -> list[Kept]:
    """`item`: bytes of a float; `stored`: how each weight comes, by its name."""
    return kept_matrices(config, stored, lambda matrix, codes: _panel_bytes(matrix, codes, item))


def native_weight_bytes(config: ModelConfig, item: int, stored: Mapping[str, Codes | None], unpacked: int = 0) -> tuple[int, int]:
    """(the weights, the most that is held while they are packed). `unpacked`: bytes a weight takes while it is quantised again."""
    kept = num_norms(config) * FLOAT32
    if not config.tie_embeddings:
        kept += config.vocab_size * config.hidden_size * item
    most = 0
    for one in native_matrices(config, item, stored):
        on_the_way = CODES_ON_THE_WAY
        if one.codes is None:
            on_the_way = FLOATS_ON_THE_WAY + (PARTS_ON_THE_WAY if len(one.matrix.parts) > 1 else 0)
        size = one.matrix.rows * one.matrix.columns
        most = max(most, kept + size * unpacked, kept + one.nbytes + int(size * on_the_way))
        kept += one.nbytes
    return kept, most


def native_step_bytes(model: ModelConfig, load: StepLoad, threads: int) -> int:
    """Buffers grow to the fullest step and stay; hidden states and logits come on top, those of the step before too, and what each
    thread needs to draw from a row. A level that multiplies bfloat16 leaves some of the floats counted here untouched."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    widest = max(model.hidden_size, model.intermediate_size, q) + COLUMNS
    prepared = model.hidden_size + widest  # rows as products read them: of norms, and of attention or gates
    token = 3 * model.hidden_size + 2 * q + 2 * kv + model.intermediate_size + prepared
    logits = load.rows * model.vocab_size
    return load.tokens * token * FLOAT32 + 2 * FLOAT32 * logits + threads * (SCRATCH_BYTES * widest + 2 * FLOAT32 * model.vocab_size)


def _panel_bytes(matrix: Matrix, codes: Codes | None, item: int) -> int:
    # gate and up stand in turn, each filled up by itself
    rows = sum(_up(part, PANEL) for part in matrix.parts.values()) if matrix.name == "gate_up" else _up(matrix.rows, PANEL)
    bias = rows * FLOAT32 if matrix.bias else 0
    if codes is None:
        return rows * _up(matrix.columns, COLUMNS) * item + bias
    columns = _up(matrix.columns, max(COLUMNS, codes.group))
    order = matrix.columns * 4 if codes.order else 0
    return rows * columns * codes.bits // 8 + rows * (columns // codes.group) * SCALE_AND_OFFSET + order + bias


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
