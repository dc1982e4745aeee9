"""What the native program holds, counted as `octavo/native/octavo.h` lays it out: weights in panels, and the buffers of its steps.

Quantised tensors of a GGUF file stay codes; parts of one matrix take the most bits and the smallest group of any. Floats take
the dtype of the run. Panels are 16 rows; columns are filled up to 64, or to a group.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.model_config import ModelConfig
from octavo.policy.activations import FLOAT32, SAMPLER_BYTES, StepLoad

PANEL, COLUMNS = 16, 64
SCRATCH_BYTES = 2 * 2**20  # of each thread, as far as it is touched: weights unpacked for many rows
# GGUF kind -> bits of a code, columns of a group
PACKED = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), (4, 32)),
    **dict.fromkeys(("Q2_K", "Q3_K"), (4, 16)),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q8_0"), (8, 32)),
    "Q6_K": (8, 16),
}
# Bytes on the way, for each weight of a matrix: its code, with a share of the scales; or its floats, read and put together.
CODES_ON_THE_WAY, FLOATS_ON_THE_WAY = 1.25, 12


@dataclass(frozen=True, slots=True)
class _Matrix:
    rows: int
    columns: int
    parts: tuple[str, ...]  # names in a GGUF file

    def nbytes(self, item: int, kinds: Mapping[str, str]) -> tuple[int, int]:
        """Kept, and held beside that while it is packed."""
        packed = [PACKED.get(kinds.get(part, "")) for part in self.parts]
        rows, weights = _up(self.rows, PANEL), self.rows * self.columns
        found = [one for one in packed if one is not None]
        if len(found) < len(packed):
            return rows * _up(self.columns, COLUMNS) * item, weights * FLOATS_ON_THE_WAY
        bits, group = max(bits for bits, _ in found), min(group for _, group in found)
        columns = _up(self.columns, max(COLUMNS, group))
        return rows * columns * bits // 8 + rows * (columns // group) * 4, int(weights * CODES_ON_THE_WAY)


def native_weight_bytes(config: ModelConfig, item: int, kinds: Mapping[str, str]) -> tuple[int, int]:
    """(the weights, the most that is held while they are packed). `item`: bytes of a float; `kinds`: of a GGUF file's tensors."""
    kept = (2 * config.num_layers + 1) * config.hidden_size * FLOAT32
    if not config.tie_embeddings:
        kept += config.vocab_size * config.hidden_size * item
    most = 0
    for matrix in _matrices(config):
        size, on_the_way = matrix.nbytes(item, kinds)
        kept += size
        most = max(most, kept + on_the_way)
    return kept, most


def native_step_bytes(model: ModelConfig, load: StepLoad, threads: int) -> int:
    """Buffers grow to the fullest step and stay; hidden states and logits come on top, and the sampler's copies of those."""
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    widest = max(model.hidden_size, model.intermediate_size, q) + 128
    token = 3 * model.hidden_size + 2 * q + 2 * kv + model.intermediate_size + widest + widest // 8 + model.hidden_size
    logits = load.rows * model.vocab_size
    return load.tokens * token * FLOAT32 + load.rows * model.hidden_size * FLOAT32 + SAMPLER_BYTES * logits + threads * SCRATCH_BYTES


def _matrices(config: ModelConfig) -> list[_Matrix]:
    """In the order in which they are packed."""
    hidden, inner = config.hidden_size, _up(config.intermediate_size, PANEL)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = []
    for layer in range(config.num_layers):
        name = f"blk.{layer}."
        found += [
            _Matrix(q + 2 * kv, hidden, (f"{name}attn_q.weight", f"{name}attn_k.weight", f"{name}attn_v.weight")),
            _Matrix(hidden, q, (f"{name}attn_output.weight",)),
            _Matrix(2 * inner, hidden, (f"{name}ffn_gate.weight", f"{name}ffn_up.weight")),
            _Matrix(hidden, inner, (f"{name}ffn_down.weight",)),
        ]
    return [*found, _Matrix(config.vocab_size, hidden, ("token_embd.weight" if config.tie_embeddings else "output.weight",))]


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
