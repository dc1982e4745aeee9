"""Rotation tables from a `RopeConfig`: the angle of dimension pair i at position p is p * frequency[i].

    default   frequency[i] = theta ^ (-2i / head_dim): fast for small i, hardly moving for large
    linear    all frequencies divided by `factor`: positions squeezed into the trained range
    llama3    slow ones divided, fast ones kept, a ramp between, by wavelengths that fit the original context
    yarn      the same idea with the ramp over dimensions, by turns made within the original context; tables are also
              scaled, which scales q and k, because a longer context flattens the softmax
"""

import math

import torch
from torch import Tensor

from octavo.attention.backend import Rope
from octavo.model_config import RopeConfig

TABLE_DEVICE = torch.device("cpu")  # they are made there: the same for every device, and for a model without memory


def build_rope(config: RopeConfig, head_dim: int, max_len: int) -> Rope:
    position = torch.arange(max_len, dtype=torch.float32, device=TABLE_DEVICE)
    angle = torch.outer(position, frequencies(config, head_dim))  # [max_len, head_dim / 2]
    scale = table_scale(config)
    default = torch.get_default_device()
    place = TABLE_DEVICE if default.type == "meta" else default
    return Rope(cos=(angle.cos() * scale).to(place), sin=(angle.sin() * scale).to(place))


def frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, [head_dim / 2] float32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=TABLE_DEVICE) / head_dim
    base = 1.0 / config.theta**exponent
    if config.kind == "linear":
        return base / config.factor
    if config.kind == "llama3":
        return _blend(base, config.factor, _llama3_kept(config, base))
    if config.kind == "yarn":
        return _blend(base, config.factor, _yarn_kept(config, head_dim))
    return base


def table_scale(config: RopeConfig) -> float:
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _yarn_scale(config.factor, config.mscale) / _yarn_scale(config.factor, config.mscale_all_dim)
    return _yarn_scale(config.factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _blend(base: Tensor, factor: float, kept: Tensor) -> Tensor:
    """kept [head_dim / 2]: 1 keeps a frequency, 0 divides it by the factor."""
    return base / factor * (1 - kept) + base * kept


def _llama3_kept(config: RopeConfig, base: Tensor) -> Tensor:
    turns = config.original_max_position * base / (2 * math.pi)  # within the original context
    return ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0, 1)


def _yarn_kept(config: RopeConfig, head_dim: int) -> Tensor:
    def dimension(turns: float) -> float:
        """Where, between dimension pairs, a frequency makes this many turns within the original context."""
        return head_dim * math.log(config.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    pair = torch.arange(head_dim // 2, dtype=torch.float32, device=TABLE_DEVICE)
    return 1 - ((pair - low) / (high - low)).clamp(0, 1)
