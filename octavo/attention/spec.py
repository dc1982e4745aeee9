"""`AttentionSpec`: all properties of a layer's attention that are known before the model is built. It uses no torch.

For the memory plan it computes the cache per token, and the peak memory of a step:

    cache      k and v [kv_heads, head_dim] of each token; as 8-bit integers with a scale for each head; of a latent, k alone
    a CPU      the torch kernels of `kernels/reference/`: each tensor counted from its allocation to its release
    a GPU      kernels that gather nothing; decode stores the partial results of work items and of shared-prefix groups
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from octavo.attention.mixer import StepLoad
from octavo.layout import SCORES, SHARE_LINE, TEAM_LEVELS
from octavo.model_config import RopeConfig
from octavo.policy.cache_spec import ITEM_BYTES, Buffer

T = TypeVar("T")
LATENT_NORM_EPS = 1e-6  # of the norms of latents, whatever that of other norms is
FLOAT32 = 4
WORD = 4  # bytes
DECODE_PROGRAMS = 640  # maximum programs of decode attention: four for each of 160 multiprocessors
DECODE_SHARES = 2  # work items for each of them
LEFT_PARTS = 2  # parts of long rows, for each of those
LATENT_PROGRAMS, LATENT_HEADS = 320, 32  # with a latent: two programs for each multiprocessor, or one of twice as many heads
LEAST_HEADS = 16  # of a program, if there are more


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (MLA): all heads read one key per token, and the values are its first numbers.

        cached key   [ latent: normed | rotary key ]                                        head_dim numbers, the last of them rotated
        q of a head  [ plain_dim | rotary_dim ], of which the first are multiplied by W_UK, so that they match the latent
        result       the weighted latents, multiplied by W_UV: value_dim numbers of each head

    W_UK and W_UV are the halves of kv_b_proj, head by head. An `AttentionSpec` with a latent describes attention between the two, with
    one kv head.
    """

    q_rank: int | None  # numbers of the latent that q is computed from; None: it is projected from the input
    plain_dim: int  # numbers of q and k of a head that are not rotated
    value_dim: int  # numbers of the value of a head


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query sees this many keys, including its own
    rope: RopeConfig | None = None  # None: no rotation
    rotary_dim: int | None = None  # the number of rotated dimensions at the start of a head, with a latent at its end; None: all
    qk_norm: Literal["heads", "whole"] | None = None  # q and k are normed before the rotation: each head, or all heads together
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False  # a score falls by the slope of its head (`alibi_slopes`) for each token between query and key
    output_gate: bool = False  # the result is multiplied by the sigmoid of a fourth projection, before the output projection
    latent: Latent | None = None
    context_ranks: int = 1  # ranks with the same k and v heads, each for some of the tokens, and with different q heads

    kind: ClassVar[str] = "attention"

    @property
    def features(self) -> tuple[str, ...]:
        """The features that this attention needs beyond the plain kind; a backend or a program may lack them."""
        needed = {
            "window": self.window is not None,
            "soft_cap": self.soft_cap is not None,
            "sinks": self.sinks,
            "no_rotation": self.rope is None,
            "partial_rotation": self.rope is not None and self.rotated < self.head_dim and self.latent is None,
            "whole_norm": self.qk_norm == "whole",
            "alibi": self.alibi,
            "output_gate": self.output_gate,
            "latent": self.latent is not None,
            "context_parallel": self.context_ranks > 1,
        }
        return tuple(name for name, wanted in needed.items() if wanted)

    @property
    def materialises_scores(self) -> bool:
        """Whether the torch kernels compute scores one by one, instead of in a fused kernel."""
        return self.soft_cap is not None or self.sinks or self.alibi or self.latent is not None

    @property
    def value_dim(self) -> int:
        """The numbers of a value as attention reads it: with a latent, the first ones of the key."""
        return self.head_dim if self.latent is None else self.head_dim - self.rotated

    @property
    def result_size(self) -> int:
        """The numbers of a token's result, which the output projection reads."""
        return self.q_size if self.latent is None else self.num_heads * self.latent.value_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def projections(self) -> dict[str, int]:
        """The parts of the product that computes q, k and v, and the gate if there is one, and their widths.

        With a latent: q or its latent, and the latent with the rotary key.
        """
        if self.latent is not None:
            q = {"q": self.projected_q} if self.latent.q_rank is None else {"q_latent": self.latent.q_rank}
            return {**q, "kv": self.head_dim}
        gate = {"gate": self.q_size} if self.output_gate else {}
        return {"q": self.q_size, "k": self.kv_size, "v": self.kv_size, **gate}

    @property
    def projected_q(self) -> int:
        """The numbers of q as it is projected: with a latent, before W_UK."""
        return self.q_size if self.latent is None else self.num_heads * (self.latent.plain_dim + self.rotated)

    @property
    def normed(self) -> tuple[int, int]:
        """How many numbers of q and of k are normed together."""
        return (self.q_size, self.kv_size) if self.qk_norm == "whole" else (self.head_dim, self.head_dim)

    @property
    def rotated(self) -> int:
        """How many dimensions of a head are rotated, if there is a rotation."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def turned(self) -> int:
        """How many dimensions of a head are rotated: none without a rotation."""
        return 0 if self.rope is None else self.rotated

    @property
    def position_table(self) -> tuple[Hashable, int] | None:
        """Cosines and sines, each for half of the rotated dimensions."""
        return None if self.rope is None else ((self.rope, self.rotated), self.rotated)

    def positions(self, max_len: int) -> Hashable:
        return None if self.rope is None else (self.rope.up_to(max_len), self.rotated)

    def buffers(self, dtype: str) -> dict[str, Buffer]:
        token = Buffer((self.num_kv_heads, self.head_dim), dtype)
        if self.latent is not None:
            return {"k": token}
        buffers = {"k": token, "v": token}
        if dtype == "int8":
            scale = Buffer((self.num_kv_heads,), "float32")
            buffers |= {"k_scale": scale, "v_scale": scale}
        return buffers

    def state(self) -> dict[str, Buffer]:
        return {}

    def step_bytes(self, load: StepLoad, dtype: str, cache_dtype: str) -> int:
        """The larger of two: rotating q, or attention with the keys and values that it gathers.

        Rows that share a prefix gather it only once; the count assumes that they share none.
        """
        item, q, kv = ITEM_BYTES[dtype], self.q_size, self.kv_size
        if self.latent is not None:
            return self._latent_bytes(self.latent, load, item, 0 if cache_dtype == dtype else ITEM_BYTES[cache_dtype])
        gate = q * item if self.output_gate else 0  # held until the end, when its sigmoid is held in addition to the result
        projected = (q + 2 * kv) * item + gate
        normed = (q + kv) * item if self.qk_norm else 0
        turning = 3 * q * FLOAT32 if item < FLOAT32 else 2 * q * FLOAT32  # a copy in float32, two halves, and the result
        rotate = projected + normed + turning + self.head_dim * FLOAT32
        if self.context_ranks > 1:
            return max(load.tokens * rotate, self._partial_bytes(load, item, ITEM_BYTES[cache_dtype]))
        # rotated, selected for a group, room for the result; new keys and values contiguous (measured)
        queries = (3 * q + 2 * kv) * item + 2 * gate
        scores = load.tokens * load.context  # elements of a mask, which is built from one-byte flags
        gathered = self.gathered_bytes(dtype, cache_dtype) * load.gathered
        attend = load.tokens * queries + gathered + max(load.tokens * q * item, scores)
        return max(load.tokens * rotate, attend + self._scores_bytes(load))

    def _latent_bytes(self, latent: Latent, load: StepLoad, item: int, cache_item: int) -> int:
        """The bytes of attention over latents, which materialises scores. `cache_item`: 0 if the cache has the dtype of the run

        Of a token: what is projected; q and the key; q selected for a group; the results of a group, and of all. Of a gathered key: the
        key, as it is stored and as it is read, and in half precision its copies in float32. Scores for some queries at a time.
        """
        results = self.num_heads * self.value_dim
        projected = sum(self.projections.values()) + (0 if latent.q_rank is None else self.projected_q)
        token = projected + 2 * self.q_size + self.head_dim + 2 * results
        wide = 0 if item == FLOAT32 else (self.head_dim + self.value_dim) * FLOAT32
        key = self.head_dim * (item + cache_item) + wide
        scores = min(self.num_heads * load.tokens * load.context, max(SCORES, self.num_heads * load.gathered))
        queries = scores // (self.num_heads * load.context)  # at a time
        return load.tokens * token * item + load.gathered * key + (2 * scores + queries * (self.q_size + results)) * FLOAT32

    def _scores_bytes(self, load: StepLoad) -> int:
        """The bytes of attention that materialises scores (`kernels/reference/attention.py`).

        For some queries at a time, but at least one of each row: scores, and a second copy for their sums; keys and values in float32.
        """
        if not self.materialises_scores:
            return 0
        scores = min(self.num_heads * load.tokens * load.context, max(SCORES, self.num_heads * load.gathered))
        return (2 * self.kv_size * load.gathered + 2 * scores) * FLOAT32

    def _partial_bytes(self, load: StepLoad, item: int, cache_item: int) -> int:
        """The bytes of attention over the keys of one rank: heads of the whole group, and in float32 the result and its sum over ranks.

        Keys and values are gathered for one row at a time, as stored and in float32.
        """
        group = self.context_ranks * self.q_size
        token = (2 * self.q_size + 2 * self.kv_size) * item + group * (item + 2 * FLOAT32)
        keys = -(-load.context // self.context_ranks) * 2 * self.kv_size * (cache_item + FLOAT32)
        return load.tokens * token + keys + 3 * SCORES * FLOAT32

    def gathered_bytes(self, dtype: str, cache_dtype: str) -> int:
        """Returns the bytes per gathered key. From a cache of another dtype: k in the dtype of the run, and v during its conversion."""
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
        """q, k and v; the partial result over earlier context, and the result. If ranks share a context: q of all, two results in float32.

        For features that the kernel that writes the cache lacks, torch computes with three copies of q in float32.
        """
        of_group = 5 * self.context_ranks * self.q_size if self.context_ranks > 1 else self.q_size
        of_torch = 6 * self.q_size if {"partial_rotation", "whole_norm"} & {*self.features} else 0
        gates = 2 * self.q_size if self.output_gate else 0
        if self.latent is not None:  # what is projected, q over latents, weighted latents, and the result
            projected = sum(self.projections.values()) + (0 if self.latent.q_rank is None else self.projected_q)
            return projected + self.q_size + self.num_heads * self.value_dim + self.result_size
        return self.q_size + 2 * self.kv_size + of_group + self.q_size + of_torch + gates

    def gpu_step_bytes(self, rows: int) -> int:
        """The work items of decode attention, the partial results of split contexts, and those of shared-prefix groups, in float32."""
        if self.latent is not None:
            shares, groups = LATENT_PROGRAMS * DECODE_SHARES, -(-self.num_heads // LEAST_HEADS)
            lines = shares * LEFT_PARTS * min(self.num_heads, LATENT_HEADS)
            return lines * (self.value_dim + 1) * FLOAT32 + (shares + rows * groups) * SHARE_LINE * WORD
        shares = DECODE_PROGRAMS * DECODE_SHARES
        lines = shares * LEFT_PARTS * (self.num_heads // self.num_kv_heads)
        if self.window is None:
            lines += rows * TEAM_LEVELS * self.num_heads
        return lines * (self.head_dim + 1) * FLOAT32 + (shares + rows * self.num_kv_heads) * SHARE_LINE * WORD


def alibi_slopes(num_heads: int) -> list[float]:
    """Returns the slope of each head of a model: powers of 2 ** (-8 / heads). If the heads are no power of two, the slopes of the next
    lower one are followed by every other one of twice as many heads."""
    low = 1 << num_heads.bit_length() - 1
    between = _powers(2 * low)[::2]
    return [*_powers(low), *between[: num_heads - low]]


def _powers(heads: int) -> list[float]:
    return [2.0 ** (-8 * head / heads) for head in range(1, heads + 1)]


def kv_buffers(cache: Mapping[str, T]) -> tuple[T, T | None, T | None, T | None]:
    """Returns k and v of a layer's cache, and their scales if they are quantised. A latent has no v: its values are a part of k."""
    return cache["k"], cache.get("v"), cache.get("k_scale"), cache.get("v_scale")
