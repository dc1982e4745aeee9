"""Tiny models for llama.cpp's converter: one of every form that a GGUF file of a family has.

They differ from those of `families.py` only where llama.cpp wants it: contexts are multiples of 256, and what a file does not say (another
scale of scores, a window of Mistral) is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from tests.support import mixtures
from tests.support.families import FAMILIES, LONGROPE, Tiny, family_model, sizes
from tests.support.hybrids import HYBRIDS

TEXT = resources.files("octavo.bench").joinpath("sonnets.txt").read_text(encoding="utf-8")  # of which the tokenizer is made
PROMPTS = [TEXT[:1], TEXT[100:130], TEXT[1000:1140], TEXT[2000:2300]]
SHORT, LONG = 512, 1024  # contexts of longrope: the original one, and the model's
SEED = 21


@dataclass(frozen=True)
class Case:
    word: str  # general.architecture
    make: Callable[[Path], Path]  # writes its folder
    vocab_size: int
    context: int = 256  # for both engines
    tensors: tuple[str, ...] = ()  # that its file must have, or the case would show nothing
    keys: dict[str, Any] = field(default_factory=dict)  # likewise
    deep: bool = False  # llama.cpp looks GELU up in a table of 16 bits, and many layers add up what that rounds
    packed: bool = False  # llama.cpp would round what it multiplies by packed weights; it gets the floats that they stand for


def _dense(tiny: Tiny, **more: Any) -> Case:
    assert tiny.gguf is not None
    return Case(tiny.gguf, partial(_saved, tiny=tiny), tiny.options["vocab_size"], **more)


def _saved(folder: Path, tiny: Tiny) -> Path:
    return family_model(folder, tiny, SEED)


def _mixture(word: str, architecture: str, options: dict[str, Any] | None = None, **more: Any) -> Case:
    make = partial(mixtures.tiny_mixture, architecture=architecture, seed=SEED, **options or {})
    return Case(word, make, mixtures.VOCAB, **more)


def _mxfp4(folder: Path) -> Path:
    """gpt-oss as on the hub. Its blocks have 32 columns."""
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": _NO_YARN}
    floats = mixtures.tiny_mixture(folder.with_name("floats"), "GptOssForCausalLM", SEED, inner=32, **shape)
    return mixtures.to_mxfp4(floats, folder)


def _with(name: str, **options: Any) -> Tiny:
    return replace(FAMILIES[name], options=FAMILIES[name].options | options)


_PHI_LONG = _with(
    "phi3, long factors", max_position_embeddings=LONG, original_max_position_embeddings=SHORT,
    rope_parameters=LONGROPE | {"original_max_position_embeddings": SHORT},
)  # fmt: skip
_NO_YARN = {"rope_type": "default", "rope_theta": 10000.0}  # whose ramp llama.cpp rounds, and gpt-oss does not
_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")

def _square(name: str) -> Tiny:
    """A hybrid whose k and v heads have one size: llama.cpp knows no others."""
    return replace(HYBRIDS[name], options=HYBRIDS[name].options | {"linear_key_head_dim": 32, "linear_value_head_dim": 32})


CASES = {
    "llama": _dense(Tiny("LlamaForCausalLM", sizes(2, 48, 4, 2), "llama")),
    "llama 3.1": _dense(FAMILIES["llama 3.1"], tensors=("rope_freqs.weight",)),
    "mistral": _dense(FAMILIES["mistral, no window"]),
    "qwen2": _dense(Tiny("Qwen2ForCausalLM", sizes(2, 48, 4, 2), "qwen2"), tensors=("blk.0.attn_q.bias",)),
    "qwen3": _dense(Tiny("Qwen3ForCausalLM", sizes(2, 48, 3, 1, head_dim=20), "qwen3"), tensors=("blk.0.attn_q_norm.weight",)),
    "qwen3, yarn": _dense(
        Tiny("Qwen3ForCausalLM", sizes(2, 48, 3, 1, head_dim=20) | {"rope_parameters": mixtures.YARN | {"truncate": True}}, "qwen3"),
        keys={"qwen3.rope.scaling.type": "yarn"},
    ),
    "phi3": _dense(FAMILIES["phi3, whole heads"]),
    "phi3, short factors": _dense(_PHI_LONG, context=SHORT, tensors=_FACTORS),
    "phi3, long factors": _dense(_PHI_LONG, context=LONG, tensors=_FACTORS),
    "gemma2": _dense(FAMILIES["gemma2, as in files"]),
    "gemma2, 46 layers": _dense(_with("gemma2, as in files", num_hidden_layers=46, query_pre_attn_scalar=10), deep=True),
    "gemma3": _dense(FAMILIES["gemma3, as in files"]),
    "gemma3, 62 layers": _dense(_with("gemma3, as in files", num_hidden_layers=62, query_pre_attn_scalar=10), deep=True),
    "olmo2": _dense(FAMILIES["olmo2"]),
    "granite": _dense(FAMILIES["granite"]),
    "smollm3": _dense(FAMILIES["smollm3"]),
    "mixtral": _mixture("llama", "MixtralForCausalLM", tensors=("blk.0.ffn_gate_exps.weight",)),
    "qwen2moe": _mixture("qwen2moe", "Qwen2MoeForCausalLM", tensors=("blk.0.ffn_gate_shexp.weight",)),
    "qwen3moe": _mixture("qwen3moe", "Qwen3MoeForCausalLM", {"mlp_only_layers": []}, tensors=("blk.0.ffn_gate_exps.weight",)),
    "gpt-oss": _mixture("gpt-oss", "GptOssForCausalLM", {"rope_parameters": _NO_YARN}, tensors=("blk.0.attn_sinks.weight",)),
    "qwen3.5": _dense(_square("qwen3.5"), tensors=("blk.0.ssm_a",)),
    "qwen3.5 moe": _dense(_square("qwen3.5 moe"), tensors=("blk.0.ffn_gate_shexp.weight",)),
    "qwen3-next": _dense(_square("qwen3-next"), tensors=("blk.0.ssm_a",)),
    "gpt-oss, MXFP4": Case("gpt-oss", _mxfp4, mixtures.VOCAB, packed=True),
}  # fmt: skip
