"""The memory of the native program, computed from the layout in `octavo/native/octavo.h`: weights in panels, and step buffers.

Quantised matrices stay quantised. Floats have the dtype of the run, norms and biases are float32. Panels have 16 rows; columns are
padded to 64, or to a group.
"""

from collections.abc import Collection, Mapping
from typing import Any

from octavo.attention.mixer import StepLoad
from octavo.attention.spec import AttentionSpec
from octavo.layout import K_PAD, PANEL
from octavo.models.description import EXPERT_STACKS, LayerShape, Matrix, ModelDescription
from octavo.sizing.activations import FLOAT32
from octavo.sizing.model_size import SCALE_AND_OFFSET, Codes, Kept, kept_matrices

SCRATCH_BYTES = 4 * 2 * PANEL  # per thread, for each column of the widest matrix: four panels unpacked for many rows
# Bytes held during loading for each weight of a matrix: the quantised value with its share of the scales, or the float with a share
# of the memory that malloc retains from earlier matrices. On ARM torch has its own allocator, which retains nothing.
CODES_ON_THE_WAY, FLOATS_ON_THE_WAY, KEPT_BACK = 1.25, 4.1, 1.2
HALF_EMPTY = 1 << 20  # bytes on average: a matrix occupies whole huge pages of 2 MiB

KNOWN = {  # features of attention
    "window", "soft_cap", "sinks", "no_rotation", "partial_rotation", "whole_norm", "alibi", "output_gate", "latent",
}  # fmt: skip
DELTA_MATRICES = {"delta_in", "delta_gates"}
LANES, LARGEST_HEAD, LARGEST_CONV = 16, 256, 8  # of Gated DeltaNet
LARGEST_LATENT = 1024  # with the rotary key: the queries of a task and their results must fit into the memory of a thread


def native_refusal(model: ModelDescription) -> str | None:
    """Returns why the native program cannot run this model, or None."""
    from octavo.models.mixture_family import MATRICES  # the families need numpy, and `octavo doctor` plans without it

    for layer, index in model.kinds.items():
        if (difference := _unknown(layer)) is not None:
            return f"layer {index} {difference}"
    return next((f"it has a matrix {matrix.name}" for matrix in model.matrices if matrix.name not in MATRICES | DELTA_MATRICES), None)


def _unknown(layer: LayerShape) -> str | None:
    """Returns the property of a layer that the native program does not support, or None."""
    if layer.mixer.kind not in ("attention", "delta_net"):
        return f"has a mixer of kind {layer.mixer.kind}"
    if layer.mlp.experts is not None and (layer.parallel or not layer.mlp.gated):
        return "has a mixture of experts without gates, or parallel to its mixer"
    if layer.mixer.kind == "delta_net":
        return _unknown_delta_net(layer)
    if "latent" in layer.mixer.features and (layer.parallel or layer.mixer.head_dim > LARGEST_LATENT):
        return f"has latents of {layer.mixer.head_dim} numbers, or parallel to its MLP: up to {LARGEST_LATENT} are supported"
    lacking = [name for name in layer.mixer.features if name not in KNOWN]
    return f"has attention with {', '.join(lacking)}" if lacking else None


def _unknown_delta_net(layer: LayerShape) -> str | None:
    spec: Any = layer.mixer
    if layer.parallel:
        return "has Gated DeltaNet parallel to its MLP"
    if any(size % LANES or not 0 < size <= LARGEST_HEAD for size in (spec.k_dim, spec.v_dim)):
        return f"has Gated DeltaNet with heads of {spec.k_dim} and {spec.v_dim}: multiples of {LANES} up to {LARGEST_HEAD} are supported"
    if not 2 <= spec.conv_width <= LARGEST_CONV:
        return f"has a convolution of width {spec.conv_width}: 2 to {LARGEST_CONV} are supported"
    return None


def native_matrices(model: ModelDescription, item: int, stored: Mapping[str, Codes | None]) -> list[Kept]:
    """Returns how each matrix is stored. `item`: bytes of a float; `stored`: the storage format of each weight, by name"""
    return kept_matrices(model, stored, lambda matrix, codes: _panel_bytes(matrix, codes, item))


def native_weight_bytes(
    model: ModelDescription,
    item: int,
    stored: Mapping[str, Codes | None],
    unpacked: int = 0,
    straight: Collection[str] = (),
    arm: bool = False,
) -> tuple[int, int]:
    """Returns (bytes of the weights, peak bytes while they are packed). `unpacked`: bytes per number of a weight while it is requantised;
    `straight`: weights that are packed directly from the file, without an intermediate copy"""
    kept = model.vector_numbers * FLOAT32
    if model.lookup is not None:
        kept += model.lookup.numbers * item
    most = 0
    for one in native_matrices(model, item, stored):
        on_the_way = 0 if not one.matrix.heads and all(part in straight for part in one.matrix.parts) else CODES_ON_THE_WAY
        if one.codes is None:
            on_the_way = FLOATS_ON_THE_WAY + (0 if arm else KEPT_BACK)
        size = one.matrix.numbers
        most = max(most, kept + size * unpacked, kept + one.nbytes + int(size * on_the_way))
        kept += one.nbytes
    return kept, most


def native_step_bytes(model: ModelDescription, load: StepLoad, threads: int) -> int:
    """Returns the bytes of the buffers, which grow to the largest step and stay allocated, of the hidden states and logits of two steps,
    of what each thread needs to sample a row, and of unused space behind the weights. A level that multiplies bfloat16 uses fewer floats
    than are counted here."""
    widest = max(matrix.columns for matrix in model.matrices if matrix.layer is not None) + K_PAD
    token = max(_token_numbers(model, layer, index, widest) for layer, index in model.kinds.items())
    logits = load.rows * model.vocab_size
    own = threads * (SCRATCH_BYTES * widest + 2 * FLOAT32 * model.vocab_size)
    return load.tokens * token * FLOAT32 + 2 * FLOAT32 * logits + own + HALF_EMPTY


def _token_numbers(model: ModelDescription, layer: LayerShape, index: int, widest: int) -> int:
    """Numbers in the buffers, per token."""
    there = {matrix.name: matrix for matrix in model.matrices if matrix.layer == index}
    hidden, experts = model.hidden_size, layer.mlp.experts
    prepared = hidden + widest  # rows in the format that products read: for norms, and for attention or gates
    if layer.parallel:  # the same rows for the MLP, and its result
        prepared += hidden + K_PAD + hidden
    if "delta_gates" in there:  # the same rows for the gates, and their product
        prepared += hidden + K_PAD + there["delta_gates"].rows
    # the residual stream, the sub-layer's output, the norm; q, k, v and the result of attention, or of Gated DeltaNet
    first = next(there[name] for name in ("qkv", "delta_in", "latent_in") if name in there)
    attention = 3 * hidden + first.rows + there["output"].columns + prepared
    if isinstance(layer.mixer, AttentionSpec) and layer.mixer.latent is not None:
        attention += _latent_numbers(layer.mixer)
    if experts is None:
        return attention + there["down"].columns
    # per chosen expert: its input row, gates twice, and its result; once: rows for the router and for experts, and the scores
    chosen = experts.chosen * (2 * hidden + 2 * _up(layer.mlp.inner, K_PAD))
    shared = 2 * hidden + 2 * _up(experts.shared_inner, K_PAD) if experts.shared_inner else 0
    return attention + chosen + shared + 2 * hidden + experts.count


def _latent_numbers(spec: AttentionSpec) -> int:
    """q as it is projected, and what it reads; q and the key; the weighted latents; the rows of each head for the products around them."""
    assert spec.latent is not None
    rows = spec.num_heads * (_up(spec.latent.plain_dim, K_PAD) + _up(spec.value_dim, K_PAD))
    q = spec.projected_q + _up(spec.latent.q_rank or 0, K_PAD)
    return q + (spec.num_heads + 1) * spec.head_dim + spec.num_heads * spec.value_dim + rows


def _panel_bytes(matrix: Matrix, codes: Codes | None, item: int) -> int:
    if matrix.heads:
        return _head_bytes(matrix, item)
    # gate and up rows alternate, each padded separately, and so are experts
    apart = matrix.gated or matrix.name in EXPERT_STACKS
    rows = sum(_up(part, PANEL) for part in matrix.part_rows) if apart else _up(matrix.rows, PANEL)
    bias = rows * FLOAT32 if matrix.bias else 0
    if codes is None:
        return rows * _up(matrix.columns, K_PAD) * item + bias
    columns = _up(matrix.columns, max(K_PAD, codes.group))
    order = matrix.columns * 4 if codes.order else 0
    return rows * columns * codes.bits // 8 + rows * (columns // codes.group) * SCALE_AND_OFFSET + order + bias


def _head_bytes(matrix: Matrix, item: int) -> int:
    """A matrix for each head, in whole panels. Those of k are transposed: q is multiplied by them."""
    shape = matrix.rows // matrix.heads, matrix.columns
    rows, columns = reversed(shape) if matrix.name == "latent_k" else shape
    return matrix.heads * _up(rows, PANEL) * _up(columns, K_PAD) * item


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
