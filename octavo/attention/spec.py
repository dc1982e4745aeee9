"""`AttentionSpec`: everything about a layer's attention over keys and values that is known before the model is built. No torch.

It says what the cache keeps of a token, and what a step holds at once, for the memory plan:

    cache      k and v [kv_heads, head_dim] of each token; as codes of 8 bits with a scale for each head
    a CPU      the torch kernels of `kernels/reference/`: each tensor counted from where it is made to where it is dropped
    a GPU      kernels that gather nothing; decode keeps what its shares have found so far, and what rows have read together
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from octavo.model_config import RopeConfig
from octavo.policy.cache_spec import ITEM_BYTES, Buffer
from octavo.policy.description import StepLoad

T = TypeVar("T")
FLOAT32 = 4
WORD = 4  # bytes
DECODE_PROGRAMS = 640  # of decode attention at most: four for each of 160 multiprocessors
DECODE_SHARES = 2  # for each of them
LEFT_PARTS = 2  # of long rows, for each of those
SHARE_WORDS = 16  # of a step, for each of those, and each row and KV head
TEAM_LEVELS = 8  # of a row: results over keys that it has read together with others
PARTIAL_SCORES = 1 << 20  # that `kernels/reference/partial_attention.py` has at once
EXPLICIT_SCORES = 1 << 20  # that `kernels/reference/attention.py` has at once, where it makes them one by one


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query sees this many keys, itself included
    rope: RopeConfig | None = None  # None: nothing is rotated
    rotary_dim: int | None = None  # the first numbers of a head that are rotated; None: all
    qk_norm: Literal["heads", "whole"] | None = None  # q and k are normed before they are rotated: each head, or all heads as one
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    role: Literal["decoder", "encoder", "cross"] = "decoder"
    context_ranks: int = 1  # that have the same heads of k and v, each for some of the tokens, and other heads of q

    kind: ClassVar[str] = "attention"

    @property
    def features(self) -> tuple[str, ...]:
        """What this attention asks for beyond the plain kind; a backend or a program may lack it."""
        asked = {
            "window": self.window is not None,
            "soft_cap": self.soft_cap is not None,
            "sinks": self.sinks,
            "no_rotation": self.rope is None,
            "partial_rotation": self.rope is not None and self.rotated < self.head_dim,
            "whole_norm": self.qk_norm == "whole",
            "alibi": self.alibi,
            f"role={self.role}": self.role != "decoder",
            "context_parallel": self.context_ranks > 1,
        }
        return tuple(name for name, wanted in asked.items() if wanted)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def projections(self) -> dict[str, int]:
        """The parts of the product that makes q, k and v, and how wide each is."""
        return {"q": self.q_size, "k": self.kv_size, "v": self.kv_size}

    @property
    def normed(self) -> tuple[int, int]:
        """How many numbers of q and of k are normed at once."""
        return (self.q_size, self.kv_size) if self.qk_norm == "whole" else (self.head_dim, self.head_dim)

    @property
    def rotated(self) -> int:
        """How many of the numbers of a head are rotated, where there is a rotation."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def position_table(self) -> tuple[Hashable, int] | None:
        """Cosines and sines for half of what is rotated each."""
        return None if self.rope is None else ((self.rope, self.rotated), self.rotated)

    def buffers(self, dtype: str) -> dict[str, Buffer]:
        token = Buffer((self.num_kv_heads, self.head_dim), dtype)
        buffers = {"k": token, "v": token}
        if dtype == "int8":
            scale = Buffer((self.num_kv_heads,), "float32")
            buffers |= {"k_scale": scale, "v_scale": scale}
        return buffers

    def step_bytes(self, load: StepLoad, dtype: str, cache_dtype: str) -> int:
        """The larger of two: rotating q, or attention with the keys and values that it gathers.

        Rows that share a prefix gather it once each; the count supposes that they share none.
        """
        item, q, kv = ITEM_BYTES[dtype], self.q_size, self.kv_size
        projected = (q + 2 * kv) * item
        normed = (q + kv) * item if self.qk_norm else 0
        turning = 3 * q * FLOAT32 if item < FLOAT32 else 2 * q * FLOAT32  # a copy in float32, two halves, both together
        rotate = projected + normed + turning + self.head_dim * FLOAT32
        if self.context_ranks > 1:
            return max(load.tokens * rotate, self._partial_bytes(load, item, ITEM_BYTES[cache_dtype]))
        queries = (3 * q + 2 * kv) * item  # rotated, picked for a group, room for the result; new keys and values lined up (measured)
        scores = load.tokens * load.context  # places of a mask, which is made of flags of one byte
        gathered = self.gathered_bytes(dtype, cache_dtype) * load.gathered
        attend = load.tokens * queries + gathered + max(load.tokens * q * item, scores)
        return max(load.tokens * rotate, attend + self._scores_bytes(load))

    def _scores_bytes(self, load: StepLoad) -> int:
        """Of attention whose scores are made one by one (`kernels/reference/attention.py`), for a soft cap or sinks.

        Some queries at a time, but at least one of each row: scores, and on the way to their sums once more; keys and values in float32.
        """
        if self.soft_cap is None and not self.sinks:
            return 0
        scores = min(self.num_heads * load.tokens * load.context, max(EXPLICIT_SCORES, self.num_heads * load.gathered))
        return (2 * self.kv_size * load.gathered + 2 * scores) * FLOAT32

    def _partial_bytes(self, load: StepLoad, item: int, cache_item: int) -> int:
        """Of attention over the keys of one rank: heads of the whole group, and in float32 what they see and its sum over ranks.

        Keys and values are gathered for one row at a time, as they are and in float32.
        """
        group = self.context_ranks * self.q_size
        token = (2 * self.q_size + 2 * self.kv_size) * item + group * (item + 2 * FLOAT32)
        keys = -(-load.context // self.context_ranks) * 2 * self.kv_size * (cache_item + FLOAT32)
        return load.tokens * token + keys + 3 * PARTIAL_SCORES * FLOAT32

    def gathered_bytes(self, dtype: str, cache_dtype: str) -> int:
        """Returns bytes for each key that is gathered. From a cache of another dtype: k as the run has it, and v on its way there."""
        numbers, item = self.kv_size, ITEM_BYTES[dtype]
        if cache_dtype == dtype:
            return 2 * numbers * item
        way = numbers * ITEM_BYTES[cache_dtype] + numbers * item
        if cache_dtype == "int8":  # times its scale, in float32
            way = self.num_kv_heads * FLOAT32 + numbers * (1 + FLOAT32)
            way = max(way, numbers * (FLOAT32 + item)) if item < FLOAT32 else way
        return numbers * item + way

    @property
    def gpu_token_numbers(self) -> int:
        """q, k and v; what was read of earlier context, and the result. Where ranks share a context: q of all, two results in float32.

        What the kernel that writes the cache lacks torch computes, with three copies of q in float32.
        """
        of_group = 5 * self.context_ranks * self.q_size if self.context_ranks > 1 else self.q_size
        of_torch = 6 * self.q_size if {"partial_rotation", "whole_norm"} & {*self.features} else 0
        return self.q_size + 2 * self.kv_size + of_group + self.q_size + of_torch

    def gpu_step_bytes(self, rows: int) -> int:
        """The shares of decode attention, what is left of contexts in several of them, and what rows read together, in float32."""
        shares = DECODE_PROGRAMS * DECODE_SHARES
        lines = shares * LEFT_PARTS * (self.num_heads // self.num_kv_heads)
        if self.window is None:
            lines += rows * TEAM_LEVELS * self.num_heads
        return lines * (self.head_dim + 1) * FLOAT32 + (shares + rows * self.num_kv_heads) * SHARE_WORDS * WORD


def kv_buffers(cache: Mapping[str, T]) -> tuple[T, T, T | None, T | None]:
    """Returns k and v of a layer's cache, and their scales where they are codes."""
    return cache["k"], cache["v"], cache.get("k_scale"), cache.get("v_scale")
