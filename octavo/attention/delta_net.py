"""`DeltaNetSpec`: all properties of a layer's Gated DeltaNet that are known before the model is built. It uses no torch.

    q k v    a convolution over the last `conv_width` tokens, channel by channel, and SiLU
    state    a matrix [k_dim, v_dim] for each v head:  S = S * decay + k (beta * (v - S^T k))^T,  and the result of a token is S^T q

It stores nothing per token. A sequence has one state, whatever its length: the last inputs of the convolution, and the matrices.
Each q and k head belongs to `v_heads / k_heads` neighbouring v heads.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from octavo.attention.mixer import StepLoad
from octavo.policy.cache_spec import ITEM_BYTES, Buffer

FLOAT32 = 4
CHUNK = 64  # tokens that a GPU computes together
STATES = 4  # of one row at once: the one that was read, the decayed one, its update, and the result


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    k_heads: int  # and q heads
    v_heads: int
    k_dim: int
    v_dim: int
    conv_width: int
    norm_eps: float  # of the norm of the result

    kind: ClassVar[str] = "delta_net"

    @property
    def window(self) -> int | None:
        return None

    @property
    def head_dim(self) -> int:
        return max(self.k_dim, self.v_dim)

    @property
    def features(self) -> tuple[str, ...]:
        return ()

    @property
    def k_size(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def v_size(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def sections(self) -> tuple[int, int, int]:
        """The rows of q, k and v."""
        return self.k_size, self.k_size, self.v_size

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return sum(self.sections)

    @property
    def position_table(self) -> tuple[Hashable, int] | None:
        return None

    def positions(self, max_len: int) -> Hashable:
        return None

    def buffers(self, dtype: str) -> dict[str, Buffer]:
        return {}

    def state(self) -> dict[str, Buffer]:
        """`conv`: the last inputs of the convolution, oldest first. The dtype is that of the sums, since errors would add up."""
        return {
            "conv": Buffer((self.conv_width - 1, self.channels), "float32"),
            "recurrent": Buffer((self.v_heads, self.k_dim, self.v_dim), "float32"),
        }

    def step_bytes(self, load: StepLoad, dtype: str, cache_dtype: str) -> int:
        """The projections and the result of all tokens, and of one row, in the worst case all tokens, the float32 intermediates.

        These are the inputs and results of the convolution, its sum and a product, and q and k repeated for the v heads and normed.
        """
        item, state = ITEM_BYTES[dtype], self.v_heads * self.k_dim * self.v_dim
        token = (self.channels + self.v_size + 2 * self.v_heads) * item + 3 * self.v_size * FLOAT32
        row = 4 * self.channels + 4 * self.v_heads * self.k_dim + 2 * self.v_size
        return load.tokens * (token + row * FLOAT32) + STATES * state * FLOAT32

    @property
    def gpu_token_numbers(self) -> int:
        """The projections; of the chunks, q, k and v after their convolution, the products of each v head and a number in float32; and
        the result, before its norm in float32. Floats of 16 bits are assumed."""
        projected = self.channels + self.v_size + 2 * self.v_heads
        chunks = self.channels + self.v_heads * (self.k_dim + CHUNK + 2)
        return projected + chunks + 2 * self.v_size

    def gpu_step_bytes(self, rows: int) -> int:
        return 0
