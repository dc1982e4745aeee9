"""The peak memory of a step beyond weights, cache and rows: computed from shapes, measured in `tests/engine/test_memory.py`.

    forward    the residual stream, and the largest part of a layer: its mixer (`attention/spec.py`) or its MLP;
               masks and distances live for the whole step, and so do the logits of the previous step
    a product  on ARM, where torch first copies the matrix into another layout
    sampling   logits [rows, vocab] float32, and the sampler's copies of them

The counts are for the plain torch kernels (`kernels/reference/`, `attention/cpu.py`, `worker/sampler.py`). Each tensor is counted
from its allocation to its release.
"""

from octavo.attention.mixer import StepLoad
from octavo.models.description import EXPERT_STACKS, LayerShape, Matrix, MLPShape, ModelDescription
from octavo.policy.cache_spec import ITEM_BYTES

FLOAT32 = 4
# Bytes per (row, vocabulary token) at the peak of a top-p draw: logits 4, distances 4, logits of the filtered rows 4, their
# probabilities 8, the mask of counted tokens 1, the mask as integers 8, the product 8. Logits of another dtype are held in addition.
SAMPLER_BYTES = 37
CHOICE_BYTES = 20  # per expert chosen for a token: its number 8, its position in the order 8, its weight 4


def step_bytes(model: ModelDescription, dtype: str, cache_dtype: str, load: StepLoad, arm: bool = False) -> int:
    """Returns the peak bytes of a step. `dtype`: of the run; `cache_dtype`: of the cache"""
    logits = load.rows * model.vocab_size
    product = _product_bytes(model, ITEM_BYTES[dtype], load) if arm else 0
    sampler = SAMPLER_BYTES + (0 if dtype == "float32" else ITEM_BYTES[dtype])
    return max(max(_forward_bytes(model, dtype, cache_dtype, load), product) + FLOAT32 * logits, sampler * logits)


def _product_bytes(model: ModelDescription, item: int, load: StepLoad) -> int:
    """The stream, a copy of the matrix, the input and the result of the product; the caller counts the logits of the head."""

    def numbers(matrix: Matrix) -> int:
        if matrix.vocabulary:
            return matrix.numbers + load.rows * matrix.columns
        experts = None if matrix.layer is None else model.layers[matrix.layer].mlp.experts
        parts = experts.held if experts is not None and matrix.name in EXPERT_STACKS else 1  # one expert is multiplied at a time
        return matrix.numbers // parts + load.tokens * (model.hidden_size + matrix.rows // parts + matrix.columns)

    return item * max(map(numbers, model.matrices))


def _forward_bytes(model: ModelDescription, dtype: str, cache_dtype: str, load: StepLoad) -> int:
    item = ITEM_BYTES[dtype]
    stream = 4 * model.hidden_size * item  # input and sum, before and after the norm
    windows = {layer.mixer.window for layer in model.kinds if "context_parallel" not in layer.mixer.features}  # those build no mask
    masks = {None if window is None or window >= load.context else window for window in windows}  # one each, for the whole step
    distances = FLOAT32 if any("alibi" in layer.mixer.features for layer in model.kinds) else 0
    layers = max(_layer_bytes(layer, model.hidden_size, dtype, cache_dtype, load) for layer in model.kinds)
    return load.tokens * stream + load.tokens * load.context * (len(masks) * item + distances) + layers


def _layer_bytes(layer: LayerShape, hidden: int, dtype: str, cache_dtype: str, load: StepLoad) -> int:
    mlp = _mlp_bytes(layer.mlp, hidden, ITEM_BYTES[dtype], load.tokens)
    mixer = layer.mixer.step_bytes(load, dtype, cache_dtype)
    if layer.parallel:
        mlp += load.tokens * hidden * ITEM_BYTES[dtype]  # the result of the mixer
    return max(mixer, mlp, _after_bytes(layer, hidden, ITEM_BYTES[dtype], load))


def _mlp_bytes(mlp: MLPShape, hidden: int, item: int, tokens: int) -> int:
    """At the peak: gate and up, silu, their product. Without a gate: up, and the result.

    Experts are computed one after the other. In the worst case every token chooses the largest one. In addition there are the rows it
    reads, the result of the previous expert, the float32 sum of all results, the logits, and the positions and weights of all choices.
    The shared expert is computed after the others.
    """
    if mlp.experts is None:
        return tokens * (4 if mlp.gated else 2) * mlp.inner * item
    chosen, choices = item * (2 * hidden + 4 * mlp.inner) + FLOAT32 * hidden, mlp.experts.chosen * CHOICE_BYTES + mlp.experts.count * item
    return tokens * (max(chosen, item * (hidden + 4 * mlp.experts.shared_inner)) + choices)


def _after_bytes(layer: LayerShape, hidden: int, item: int, load: StepLoad) -> int:
    """Bytes while a sub-layer's result is normed or scaled: the input, the float32 intermediates and the output."""
    plain = layer.norms == "before" and layer.residual_scale == 1
    return 0 if plain else load.tokens * hidden * (2 * item + 2 * FLOAT32)
