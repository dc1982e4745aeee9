"""What a step holds at once beside weights, cache and rows: counted from shapes, measured in `tests/engine/test_memory.py`.

    forward    the residual stream, and what is largest in a layer: the MLP, rotating q, or attention with the keys and values
               it gathers; masks last for the step, and so do the logits of the step before
    sampling   logits [rows, vocab] float32, and the sampler's copies of them

Bytes are those of the plain torch kernels (`kernels/reference/`, `attention/cpu.py`, `worker/sampler.py`), each tensor
counted from where it is made to where it is dropped. Rows that share a prefix gather it once each; the count supposes that
they share none.
"""

from dataclasses import dataclass

from octavo.model_config import ModelConfig
from octavo.policy.cache_spec import ITEM_BYTES, LayerCacheSpec

FLOAT32 = 4
# Bytes for each (row, token of the vocabulary) at the widest point of a top-p draw: logits 4, distances 4, those of the rows
# that filter 4, their masses 8, which of them count 1, the same as integers 8, the product 8.
SAMPLER_BYTES = 37


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The fullest step a configuration allows."""

    tokens: int  # computed in the step
    rows: int  # sampled
    context: int  # of the longest row
    gathered: int  # keys read, over all rows


def loaded_bytes(spec: LayerCacheSpec, dtype: str) -> int:
    """Bytes for each key that attention gathers. From a cache of another dtype: k as the run has it, and v on its way there."""
    kept, item = spec.buffers["k"], ITEM_BYTES[dtype]  # v is as large
    if kept.dtype == dtype:
        return spec.bytes_per_token
    numbers = kept.bytes_per_token // ITEM_BYTES[kept.dtype]
    way = kept.bytes_per_token + numbers * item
    if kept.dtype == "int8":  # times its scale, in float32
        way = spec.buffers["k_scale"].bytes_per_token + numbers * (1 + FLOAT32)
        way = max(way, numbers * (FLOAT32 + item)) if item < FLOAT32 else way
    return numbers * item + way


def step_bytes(model: ModelConfig, item: int, loaded: int, load: StepLoad) -> int:
    """`item`: bytes of a number of the run's dtype; `loaded`: `loaded_bytes` of a layer."""
    logits = load.rows * model.vocab_size
    return max(_forward_bytes(model, item, loaded, load) + FLOAT32 * logits, SAMPLER_BYTES * logits)


def _forward_bytes(model: ModelConfig, item: int, loaded: int, load: StepLoad) -> int:
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    stream = 4 * model.hidden_size * item  # input and sum, before and after the norm
    mlp = 4 * model.intermediate_size * item  # gate and up, silu, product
    projected = (q + 2 * kv) * item
    normed = (q + kv) * item if model.qk_norm else 0
    turning = 3 * q * FLOAT32 if item < FLOAT32 else 2 * q * FLOAT32  # a copy in float32, two halves, both together
    rotate = projected + normed + turning + model.head_dim * FLOAT32
    queries = (3 * q + 2 * kv) * item  # rotated, picked for a group, room for the result; new keys and values lined up (measured)
    result = q * item
    gathered = loaded * load.gathered
    scores = load.tokens * load.context  # places of a mask
    windows = {None if window is None or window >= load.context else window for window in model.windows}
    attend = load.tokens * queries + gathered + max(load.tokens * result, scores)  # a mask is made of flags of one byte
    return load.tokens * stream + len(windows) * scores * item + max(load.tokens * max(mlp, rotate), attend)
