"""What a model is: `ModelConfig`, read from a config.json or from GGUF metadata put in the same words.

Only what the dense families need; every value is checked here, so that the model code may trust it.
"""

import reprlib
from dataclasses import dataclass
from typing import Any, Literal, cast

from octavo.errors import LoadError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
NORM_EPSILONS = (1e-15, 1.0)
ROPE_THETAS = (1.001, 1e15)  # what logarithms and powers of the rotary tables can bear, and more than any model has
ROPE_SCALES = (1e-6, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0  # llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: computed from factor, mscale, mscale_all_dim
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn: round the correction range to whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool  # bias of the attention output projection
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # per layer: sliding window in tokens, None = full attention
    dtype: str | None  # what the checkpoint says, if it says
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @staticmethod
    def from_dict(raw: dict[str, Any], source: str) -> "ModelConfig":
        return _Reader(raw, source).config()


class _Reader:
    """Takes checked values out of a raw config; every complaint names the file and the key."""

    def __init__(self, raw: dict[str, Any], source: str) -> None:
        self.raw = raw
        self.source = source

    def fail(self, key: str, wanted: str) -> LoadError:
        shown = reprlib.repr(self.raw.get(key, "(missing)"))
        return LoadError(f"{self.source}: {key} must be {wanted}, got {shown}")

    def integer(self, key: str, default: int | None = None, high: int = 2**31, low: int = 1) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not int or not low <= value <= high:
            raise self.fail(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.fail(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            raise self.fail(key, "true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.raw.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and item >= 0 for item in values):
            raise self.fail(key, "a token id or a list of them")
        return tuple(values)

    def architecture(self) -> str:
        names = self.raw.get("architectures")
        name = names[0] if isinstance(names, list) and len(names) == 1 else None
        if name not in ARCHITECTURES:
            raise LoadError(f"{self.source}: architectures is {reprlib.repr(names)}; supported: {', '.join(ARCHITECTURES)}")
        return str(name)

    def config(self) -> ModelConfig:
        architecture = self.architecture()
        heads = self.integer("num_attention_heads", high=65536)
        kv_heads = self.integer("num_key_value_heads", heads, high=65536)
        hidden = self.integer("hidden_size", high=2**20)
        if heads % kv_heads:
            raise LoadError(f"{self.source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if self.raw.get("head_dim") is None and hidden % heads:
            raise LoadError(f"{self.source}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = self.integer("head_dim", hidden // heads, high=4096)
        if head_dim % 2:
            raise self.fail("head_dim", "even, for rotary positions")
        if self.raw.get("hidden_act", "silu") != "silu":
            raise self.fail("hidden_act", "silu")
        layers = self.integer("num_hidden_layers", high=1024)
        bias = self.flag("attention_bias", False)
        eos = self.ids("eos_token_id")
        bos = self.ids("bos_token_id")
        return ModelConfig(
            architecture=architecture,
            vocab_size=self.integer("vocab_size", high=2**24),
            hidden_size=hidden,
            intermediate_size=self.integer("intermediate_size", high=2**22),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position=self.integer("max_position_embeddings", 2048),
            norm_eps=self.number("rms_norm_eps", 1e-6, *NORM_EPSILONS),
            rope=self.rope(),
            tie_embeddings=self.flag("tie_word_embeddings", False),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            output_bias=bias and architecture != "Qwen2ForCausalLM",
            mlp_bias=self.flag("mlp_bias", False),
            qk_norm=architecture == "Qwen3ForCausalLM",
            windows=self.windows(layers),
            dtype=self.dtype(),
            eos_token_ids=eos,
            bos_token_id=bos[0] if bos else None,
        )

    def dtype(self) -> str | None:
        name = self.raw.get("dtype") or self.raw.get("torch_dtype")
        if name is not None and not isinstance(name, str):
            raise self.fail("dtype", "a name such as bfloat16")
        return name

    def windows(self, layers: int) -> tuple[int | None, ...]:
        """Qwen2 and Qwen3 may slide: `layer_types` says which layers, older files give `max_window_layers`."""
        if not self.flag("use_sliding_window", False) or self.raw.get("sliding_window") is None:
            return (None,) * layers
        window = self.integer("sliding_window")
        types = self.raw.get("layer_types")
        if types is None:
            first = self.integer("max_window_layers", 28, low=0)
            types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        known = ("sliding_attention", "full_attention")
        if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
            raise self.fail("layer_types", f"{layers} of full_attention or sliding_attention")
        return tuple(window if kind == "sliding_attention" else None for kind in types)

    def rope(self) -> RopeConfig:
        """`rope_parameters` (new files) or `rope_theta` with `rope_scaling` (older ones)."""
        scaling = self.raw.get("rope_parameters") or self.raw.get("rope_scaling") or {}
        if not isinstance(scaling, dict):
            raise self.fail("rope_scaling", "an object")
        inner = _Reader(scaling, f"{self.source}: rope")
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind not in ROPE_KINDS:
            raise LoadError(f"{self.source}: rope_type is {reprlib.repr(kind)}; supported: {', '.join(ROPE_KINDS)}")
        given = [key for key in ("attention_factor", "mscale", "mscale_all_dim") if scaling.get(key) is not None]
        optional = {key: inner.number(key, 1.0, *ROPE_SCALES) for key in given}
        low, high = inner.number("low_freq_factor", 1.0, *ROPE_SCALES), inner.number("high_freq_factor", 4.0, *ROPE_SCALES)
        if kind == "llama3" and low >= high:
            raise inner.fail("high_freq_factor", f"above low_freq_factor {low:g}")
        return RopeConfig(
            kind=cast(RopeKind, kind),
            theta=inner.number("rope_theta", self.number("rope_theta", 10000.0, *ROPE_THETAS), *ROPE_THETAS),
            factor=inner.number("factor", 1.0, *ROPE_SCALES),
            original_max_position=inner.integer(
                "original_max_position_embeddings", self.integer("max_position_embeddings", 2048)
            ),
            low_freq_factor=low,
            high_freq_factor=high,
            beta_fast=inner.number("beta_fast", 32.0, *ROPE_SCALES),
            beta_slow=inner.number("beta_slow", 1.0, *ROPE_SCALES),
            truncate=inner.flag("truncate", True),
            **optional,
        )
