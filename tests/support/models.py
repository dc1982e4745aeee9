"""Small models for the tests: a real one of 260,000 parameters, random ones of every family, and GGUF copies of both.

`transformers` and `gguf` are the references here, so the layouts are written with their help or in another way than the
engine's. They are imported inside the functions: `transformers` takes seconds.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DATA = Path(__file__).parent.parent / "data"
GGUF_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def stories260k(folder: Path) -> Path:
    """stories260K.bin (llama2.c, version 0) as a Hugging Face folder."""
    raw = (DATA / "models" / "stories260K.bin").read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, context = (int(number) for number in np.frombuffer(raw, "<i4", 7))
    tied, vocab = vocab > 0, abs(vocab)
    values = torch.from_numpy(np.frombuffer(raw, "<f4", offset=28).copy())
    head_dim = dim // heads
    used = 0

    def take(*shape: int) -> Tensor:
        nonlocal used
        used += (count := int(np.prod(shape)))
        return values[used - count : used].reshape(shape).clone()

    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    stacked = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": take(layers, heads * head_dim, dim),
        "self_attn.k_proj": take(layers, kv_heads * head_dim, dim),
        "self_attn.v_proj": take(layers, kv_heads * head_dim, dim),
        "self_attn.o_proj": take(layers, dim, heads * head_dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    for part in ("self_attn.q_proj", "self_attn.k_proj"):  # pairs (2i, 2i+1) of a head become (i, i + head_dim/2)
        by_head = stacked[part].view(layers, -1, head_dim, dim)
        stacked[part] = torch.cat([by_head[:, :, 0::2], by_head[:, :, 1::2]], dim=2).reshape(layers, -1, dim)
    weights |= {f"model.layers.{i}.{part}.weight": weight[i].clone() for part, weight in stacked.items() for i in range(layers)}
    weights["model.norm.weight"] = take(dim)
    take(2, context, head_dim // 2)  # cosines and sines, which the engine computes itself
    if not tied:
        weights["lm_head.weight"] = take(vocab, dim)
    assert used == len(values)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": dim, "intermediate_size": hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": context,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": tied, "dtype": "float32",
        "bos_token_id": 1, "eos_token_id": [1, 2],  # llama2.c puts BOS between stories: it ends one, too
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_model(
    folder: Path,
    architecture: str,
    seed: int,
    *,
    tie: bool = False,
    rope: dict[str, Any] | None = None,
    window: int | None = None,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    vocab: int = 320,
    context: int = 512,
    spread: float = 2.0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> Path:
    """A random model of 2 layers whose logits spread (standard deviation about `spread`), saved as `transformers` saves it.

    `rope` is config.json's rope_parameters; `window` (Qwen only) makes every layer but the first slide; `head_dim` is Qwen3's alone:
    elsewhere it is hidden size over heads.
    """
    import transformers

    options: dict[str, Any] = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", **(rope or {})}}
    if architecture == "Qwen3ForCausalLM":
        options["head_dim"] = head_dim  # as the real ones: wider than hidden size over heads
    if window is not None:
        options |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    family = architecture.removesuffix("ForCausalLM")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=context, tie_word_embeddings=tie, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    model = getattr(transformers, architecture)(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = _scaled(name, noise, spread).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def _scaled(name: str, noise: Tensor, spread: float) -> Tensor:
    if name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("bias"):
        return 0.5 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return spread * noise / noise.shape[1] ** 0.5  # times normed states
    return noise / noise.shape[1] ** 0.5


def to_gguf(
    folder: Path,
    path: Path,
    kind: str,
    extra: dict[str, Tensor] | None = None,
    packed: dict[str, tuple[str, np.ndarray]] | None = None,
    kinds: dict[str, str] | None = None,
) -> Path:
    """The folder's model as llama.cpp's converter would write it; matrices as `kind`, vectors as F32.

    `kinds` are those of matrices that are something else, by a part of their names: {"ffn_down": "Q5_0"}.
    `extra` adds tensors as F32, `packed` adds bytes (uint8, in rows) as they stand, under the kind they are said to be.
    """
    import gguf

    config = json.loads((folder / "config.json").read_text())
    architecture = GGUF_ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, architecture)
    write_keys(writer, config)
    for name, weight in load_file(folder / "model.safetensors").items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            weight = interleaved(weight, heads)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        write_tensor(writer, target, weight, next((other for part, other in (kinds or {}).items() if part in target), kind))
    for target, weight in (extra or {}).items():
        write_tensor(writer, target, weight, "F32")
    for target, (said, rows) in (packed or {}).items():
        writer.add_tensor(target, rows, raw_dtype=gguf.GGMLQuantizationType[said])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """Row i of a head and row i + head_dim/2 become neighbours."""
    by_head = rows.reshape(heads, -1, *rows.shape[1:])
    low, high = by_head.chunk(2, dim=1)
    return torch.stack([low, high], dim=2).reshape(rows.shape)


def write_tensor(writer: Any, name: str, weight: Tensor, kind: str) -> None:
    import gguf

    kind = "F32" if weight.dim() == 1 else kind
    number = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), number), raw_dtype=number)


def write_keys(writer: Any, config: dict[str, Any], widths: bool = True) -> None:
    """`widths`: of keys and values, which some converters do not write"""
    import gguf

    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if widths:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    writer.add_rope_freq_base(rope["rope_theta"])
    if (kind := rope.get("rope_type", "default")) not in ("default", "llama3"):  # the last has a tensor of factors instead
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[-1] if isinstance(ends, list) else ends)
    writer.add_bos_token_id(config["bos_token_id"])
