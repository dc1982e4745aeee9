"""Tiny random models of the dense families, of odd shapes, saved as `transformers` saves them.

Heads are not of the width that the hidden size would give them, windows are shorter than a block or longer than a chunk, and what is
scaled or capped is so by enough to be noticed.
"""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SLIDING, FULL = "sliding_attention", "full_attention"
VOCAB, CONTEXT = 300, 256
ORIGINAL = 64  # positions of longrope's short factors


@dataclass(frozen=True)
class Tiny:
    architecture: str
    options: dict[str, Any]  # of its config
    gguf: str | None = None  # its architecture in a GGUF file, if there is such a form of it
    less: float = 0.0  # what is stored of a norm's weights is less by this
    spread: float = 2.0  # standard deviation of the logits
    engine: dict[str, Any] = field(default_factory=dict)  # settings
    reference: dict[str, Any] = field(default_factory=dict)  # options of its config that the reference has instead

    @property
    def config_class(self) -> str:
        config = "TextConfig" if self.architecture.startswith(("Gemma3For", "Qwen3_5")) else "Config"
        return self.architecture.replace("ForCausalLM", config)


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, inner: int = 52, head_dim: int | None = None) -> dict[str, Any]:
    width = {} if head_dim is None else {"head_dim": head_dim}
    return dict(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=inner,
        vocab_size=VOCAB, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=2, pad_token_id=0, **width,
    )  # fmt: skip


_GEMMA2 = {"sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}
_ROTATIONS = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0}, SLIDING: {"rope_type": "default", "rope_theta": 300.0},
}  # fmt: skip
_GEMMA3 = {"sliding_window": 9, "final_logit_softcapping": 4.0, "rope_parameters": _ROTATIONS}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.2, 2.5, 7.0], "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
_PHI = sizes(2, 48, 4, 2)  # heads of 12, of which 6 numbers are rotated
_PHI_LONG = dict(_PHI, rope_parameters=LONGROPE, original_max_position_embeddings=ORIGINAL)

_BLOOM = {
    "n_layer": 2, "hidden_size": 48, "n_head": 4, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "seq_length": CONTEXT,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

FAMILIES = {
    "llama 3.1": Tiny("LlamaForCausalLM", dict(sizes(2, 48, 3, 1, head_dim=20), rope_parameters=_LLAMA3), "llama"),
    "mistral, window in a block": Tiny("MistralForCausalLM", dict(sizes(2, 56, 3, 1, head_dim=20), sliding_window=5)),
    "mistral, window over chunks": Tiny("MistralForCausalLM", dict(sizes(2, 56, 3, 1, head_dim=20), sliding_window=45)),
    "mistral, no window": Tiny("MistralForCausalLM", dict(sizes(2, 56, 3, 1, head_dim=20), sliding_window=None), "llama"),
    "ministral": Tiny(
        "MinistralForCausalLM", dict(sizes(3, 56, 3, 3, head_dim=20), sliding_window=23, layer_types=[SLIDING, FULL, SLIDING])
    ),
    "phi3, short factors": Tiny("Phi3ForCausalLM", _PHI_LONG, "phi3", engine={"max_model_len": ORIGINAL}),
    "phi3, long factors": Tiny(
        "Phi3ForCausalLM", _PHI_LONG, "phi3",
        reference={"rope_parameters": dict(LONGROPE, short_factor=LONGROPE["long_factor"])},
    ),
    "phi3, window": Tiny("Phi3ForCausalLM", dict(_PHI, sliding_window=12), "phi3"),
    "phi3, whole heads": Tiny("Phi3ForCausalLM", sizes(2, 128, 4, 2), "phi3"),  # of 32 numbers
    "gemma2": Tiny("Gemma2ForCausalLM", dict(sizes(3, 40, 4, 2, head_dim=16), **_GEMMA2, query_pre_attn_scalar=24), less=1.0),
    "gemma2, as in files": Tiny(  # which know neither another scale of scores, nor another order of layers
        "Gemma2ForCausalLM", dict(sizes(3, 40, 4, 2, head_dim=16), **_GEMMA2, query_pre_attn_scalar=16), "gemma2", less=1.0,
    ),
    "gemma3": Tiny(
        "Gemma3ForCausalLM",
        dict(sizes(4, 40, 4, 2, head_dim=16), **_GEMMA3, query_pre_attn_scalar=24, layer_types=[SLIDING, SLIDING, FULL, SLIDING]),
        less=1.0,
    ),
    "gemma3, as in files": Tiny(
        "Gemma3ForCausalLM", dict(sizes(7, 40, 4, 2, head_dim=16), **_GEMMA3, query_pre_attn_scalar=16), "gemma3", less=1.0,
    ),
    "olmo2": Tiny("Olmo2ForCausalLM", sizes(2, 48, 4, 2), "olmo2"),
    "granite": Tiny(
        "GraniteForCausalLM",
        dict(sizes(2, 48, 4, 2), embedding_multiplier=6.0, residual_multiplier=0.22, attention_multiplier=0.7, logits_scaling=8.0),
        "granite", spread=16.0,
    ),
    "smollm3": Tiny("SmolLM3ForCausalLM", dict(sizes(4, 48, 4, 2), tie_word_embeddings=True), "smollm3"),
    "smollm3, windows": Tiny(
        "SmolLM3ForCausalLM", dict(sizes(3, 48, 4, 2), no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=6)
    ),
    "cohere": Tiny("CohereForCausalLM", dict(sizes(2, 48, 4, 2), logit_scale=0.25), "command-r", spread=8.0),
    "cohere2": Tiny(  # its first layers have a window
        "Cohere2ForCausalLM", dict(sizes(5, 48, 4, 2), logit_scale=0.25, sliding_window=9), "cohere2", spread=8.0,
    ),
    "glm4": Tiny("Glm4ForCausalLM", sizes(2, 48, 3, 1, head_dim=20), "glm4"),  # of which 10 numbers are rotated
    "bloom": Tiny("BloomForCausalLM", _BLOOM, "bloom"),
    "bloom, six heads": Tiny("BloomForCausalLM", _BLOOM | {"n_head": 6}),  # slopes of four, and two between them
}  # fmt: skip


def for_a_gpu(tiny: Tiny) -> Tiny:
    """Returns the model with heads of 32 numbers: kernels of a GPU take multiples of 16."""
    heads = tiny.options.get("num_attention_heads") or tiny.options["n_head"]
    width = {"head_dim": 32} if "head_dim" in tiny.options else {"hidden_size": 32 * heads}
    rope = tiny.options.get("rope_parameters", {})
    if rope.get("rope_type") != "longrope":
        return replace(tiny, options=tiny.options | width)
    longer = {"short_factor": [1 + pair / 20 for pair in range(8)], "long_factor": [1 + pair / 3 for pair in range(8)]}
    own, reference = rope | longer, rope | longer | {"short_factor": longer["long_factor"]}
    chosen = {"rope_parameters": reference} if tiny.reference else {}
    return replace(tiny, options=tiny.options | width | {"rope_parameters": own}, reference=chosen)


def family_model(folder: Path, tiny: Tiny, seed: int, dtype: torch.dtype = torch.float32) -> Path:
    import transformers

    config = getattr(transformers, tiny.config_class)(**deepcopy(tiny.options))  # which it would change
    model = getattr(transformers, tiny.architecture)(config)
    fill(model, seed, tiny, dtype)
    model.save_pretrained(folder)
    return folder


def fill(model: Any, seed: int, tiny: Tiny, dtype: torch.dtype = torch.float32) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.data = _drawn(name, torch.randn(parameter.shape, generator=generator), tiny).to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # of sigmoids
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def _drawn(name: str, noise: Tensor, tiny: Tiny) -> Tensor:
    if name.endswith("linear_attn.norm.weight"):  # the only one without `less`
        return 1 + 0.2 * noise
    if name.endswith(("norm.weight", "ln_f.weight")):
        return 1 - tiny.less + 0.2 * noise
    if name.endswith("conv1d.weight"):
        return 0.5 * noise
    if noise.dim() < 2:
        return 0.5 * noise
    scale = tiny.spread if "embed" in name or "lm_head" in name else 1.0
    return scale * noise / noise.shape[1] ** 0.5


def gemma3_with_images(folder: Path, seed: int) -> Tiny:
    """Writes a model of text and images. Returns its text part."""
    import transformers

    text = replace(FAMILIES["gemma3"], options=FAMILIES["gemma3"].options | {"final_logit_softcapping": None})  # it would leave that out
    images = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=deepcopy(text.options), vision_config=images, mm_tokens_per_image=4, eos_token_id=[2, 5])
    model = transformers.Gemma3ForConditionalGeneration(config)
    fill(model, seed, text)
    model.save_pretrained(folder)
    return replace(text, architecture="Gemma3ForConditionalGeneration")


def reference_model(folder: Path, tiny: Tiny) -> Any:
    """In float32, with scores made one by one: the quicker ways of transformers leave out the cap."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    for name, value in tiny.reference.items():
        setattr(config, name, deepcopy(value))
    model_class = getattr(transformers, tiny.architecture)
    return model_class.from_pretrained(folder, config=config, dtype=torch.float32, attn_implementation="eager")
