"""Self-attention over keys and values: the mixer of most layers, with its projections around a backend.

The backend implements rotation, cache and softmax. A mixer is called as `mixer(x, cache, batch)`: `cache` has the buffers of its
layer, whose names only the mixer and its kernels use. `build_rope` creates the tables for the backend's rotation.
"""

import math

import torch
from torch import Tensor, nn

from octavo.attention.backend import NewBackend, QKNorm, Rope
from octavo.attention.forward_batch import Cache, ForwardBatch
from octavo.attention.spec import AttentionSpec, alibi_slopes
from octavo.comm.comm import Comm
from octavo.layers.linear import MergedLinear, RMSNorm, RowParallelLinear
from octavo.model_config import RopeConfig
from octavo.quant.schemes import QuantScheme, empty_parameter


class Attention(nn.Module):
    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        bias: tuple[bool, bool],
        norm_eps: float,
        rope: Rope,
        backend: NewBackend,
        scheme: QuantScheme,
        dtype: torch.dtype,
        comm: Comm,
        norm_dtype: torch.dtype | None = None,
    ) -> None:
        """`bias`: whether q, k and v have one, and whether the output has one. `norm_eps`: of the norms on heads, if any.

        `norm_dtype`: of their weights, if it is not `dtype`
        """
        super().__init__()
        self.rope, self.dtype, self.output_gate = rope, dtype, spec.output_gate
        self.widths = [spec.q_size + 2 * spec.kv_size, spec.q_size]  # of q, k and v together, and of the gate if there is one
        self.qkv = MergedLinear(hidden_size, spec.projections, bias[0], scheme, dtype)
        self.output = RowParallelLinear(spec.q_size, hidden_size, bias[1], scheme, dtype, comm)
        self.norms: QKNorm | None = None
        if spec.qk_norm is not None:
            q_size, k_size = spec.normed
            self.q_norm = RMSNorm(q_size, norm_eps, norm_dtype or dtype)
            self.k_norm = RMSNorm(k_size, norm_eps, norm_dtype or dtype)
            self.norms = QKNorm(self.q_norm.weight, self.k_norm.weight, norm_eps)
        self.sinks = empty_parameter(spec.num_heads, dtype=dtype) if spec.sinks else None  # [heads]
        self.slopes = slopes_of_rank(spec.num_heads, comm) if spec.alibi else None  # [heads]
        self.backend = backend(spec)

    def forward(self, x: Tensor, cache: Cache, batch: ForwardBatch) -> Tensor:
        """Returns the attention of each token [T, heads * head_dim]. The caller applies `output`."""
        return self.attend(self.qkv(x), cache, batch)

    def attend(self, projected: Tensor, cache: Cache, batch: ForwardBatch) -> Tensor:
        """Like `forward`, for q, k and v, and the gate if there is one."""
        qkv, gate = projected.split(self.widths, dim=1) if self.output_gate else (projected, None)
        q = self.backend.write(qkv, self.norms, self.rope, cache, batch)
        mixed = self.backend.attend(q, cache, batch, torch.empty_like(q, memory_format=torch.contiguous_format), self.sinks, self.slopes)
        return mixed.flatten(1) if gate is None else mixed.flatten(1) * gate.sigmoid()


def slopes_of_rank(num_heads: int, comm: Comm) -> Tensor:
    """Returns the slopes of ALiBi for this rank's heads. They depend on the number of heads of all ranks."""
    of_all = alibi_slopes(num_heads * comm.size)
    return torch.tensor(of_all[comm.rank * num_heads :][:num_heads], dtype=torch.float32, device=_table_device())


# -- rotation tables: the angle of dimension pair i at position p is p * frequency[i]
#
#     default   frequency[i] = theta ^ (-2i / dim): high for small i, low for large i. `dim`: the number of rotated dimensions of a head
#     linear    all frequencies are divided by `factor`, which maps positions into the trained range
#     llama3    low frequencies are divided and high ones are not, with a ramp between, by wavelengths relative to the original context
#     yarn      the same with the ramp over dimensions, by rotations within the original context; tables are also scaled,
#               which scales q and k, because a longer context flattens the softmax
#     longrope  each frequency is divided by its own factor, and tables are scaled. There are two lists of factors: one is selected
#               for all positions by the maximum sequence length, so that cached keys stay valid

TABLE_DEVICE = torch.device("cpu")  # tables are computed there: equal on every device, and also for a model on the meta device


def build_rope(config: RopeConfig | None, dim: int, max_len: int) -> Rope:
    """`dim`: the number of rotated dimensions of a head; without a config, none are."""
    position = torch.arange(max_len, dtype=torch.float32, device=TABLE_DEVICE)
    frequency = torch.empty(0, device=TABLE_DEVICE) if config is None else frequencies(config, dim, max_len)
    angle = torch.outer(position, frequency)  # [max_len, dim / 2]
    scale = 1.0 if config is None else table_scale(config)
    place = _table_device()
    return Rope(cos=(angle.cos() * scale).to(place), sin=(angle.sin() * scale).to(place))


def _table_device() -> torch.device:
    """Returns the device of the model that is built; a model on the meta device has its tables on the CPU."""
    default = torch.get_default_device()
    return TABLE_DEVICE if default.type == "meta" else default


def frequencies(config: RopeConfig, dim: int, max_len: int) -> Tensor:
    """Returns radians per position, [dim / 2] float32. `max_len`: the maximum sequence length"""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=TABLE_DEVICE) / dim
    base = 1.0 / config.theta**exponent
    if config.kind == "longrope":
        return 1.0 / (torch.tensor(config.up_to(max_len).factors, dtype=torch.float32, device=TABLE_DEVICE) * config.theta**exponent)
    if config.kind == "linear":
        return base / config.factor
    if config.kind == "llama3":
        return _blend(base, config.factor, _llama3_kept(config, base))
    if config.kind == "yarn":
        return _blend(base, config.factor, _yarn_kept(config, dim))
    return base


def table_scale(config: RopeConfig) -> float:
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "longrope":
        return 1.0 if config.factor <= 1 else math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))
    if config.mscale and config.mscale_all_dim:
        return _yarn_scale(config.factor, config.mscale) / _yarn_scale(config.factor, config.mscale_all_dim)
    return _yarn_scale(config.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _blend(base: Tensor, factor: float, kept: Tensor) -> Tensor:
    """Returns the frequencies [dim / 2]: where `kept` is 1 they are unchanged, where it is 0 divided by the factor, otherwise blended."""
    return base / factor * (1 - kept) + base * kept


def _llama3_kept(config: RopeConfig, base: Tensor) -> Tensor:
    turns = config.original_max_position * base / (2 * math.pi)  # rotations within the original context
    return ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)


def _yarn_kept(config: RopeConfig, dim: int) -> Tensor:
    def dimension(turns: float) -> float:
        """Returns the dimension pair (a fraction) whose frequency makes this many rotations within the original context."""
        return dim * math.log(config.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pair = torch.arange(dim // 2, dtype=torch.float32, device=TABLE_DEVICE)
    return 1 - ((pair - low) / (high - low)).clamp(0, 1)
