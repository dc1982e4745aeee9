"""The smallest model that opens, as bytes: a folder of 1 layer and 16 tokens, and the same as a GGUF file.

Written by hand, so that a test can spoil any part of it; without torch, so that spoiling is quick.
"""

import copy
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.gguf_bytes import F32, STRING, U32, array, f32, gguf_bytes, string, tensor, text, u32

VOCAB, HIDDEN, HEADS, KV_HEADS, CONTEXT = 16, 8, 2, 1, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": HIDDEN,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 4,
    "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False,
    "mlp_bias": False, "dtype": "float32", "bos_token_id": 15, "eos_token_id": [14], "use_sliding_window": False, "sliding_window": None,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32},
}  # fmt: skip
GENERATION = {"eos_token_id": [14, 15], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] | trim }}{% endfor %}"
TOKENS = [*"abcdefghĠ", "ab", "Ġc", "abc", "dd", "x", "<end>", "<s>"]
MERGES = ["a b", "Ġ c", "ab c", "d d"]
TOKENIZER_CONFIG = {"bos_token": "<s>", "eos_token": {"content": "<end>"}, "chat_template": [{"name": "default", "template": TEMPLATE}]}


def _added(token_id: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": token_id, "content": TOKENS[token_id], **flags}


TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [_added(14), _added(15)],
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": "é"}, "content": "e"}]},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"[0-9]|\s?\w+|\s+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    },
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [15], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
        "byte_fallback": False, "ignore_merges": False, "vocab": {token: i for i, token in enumerate(TOKENS[:14])},
        "merges": [merge.split(" ") for merge in MERGES],
    },
}  # fmt: skip

# name in the folder: its GGUF name and shape
_LAYER = {
    "input_layernorm": ("attn_norm", [HIDDEN]), "self_attn.q_proj": ("attn_q", [8, HIDDEN]), "self_attn.k_proj": ("attn_k", [4, HIDDEN]),
    "self_attn.v_proj": ("attn_v", [4, HIDDEN]), "self_attn.o_proj": ("attn_output", [HIDDEN, 8]),
    "post_attention_layernorm": ("ffn_norm", [HIDDEN]), "mlp.gate_proj": ("ffn_gate", [8, HIDDEN]), "mlp.up_proj": ("ffn_up", [8, HIDDEN]),
    "mlp.down_proj": ("ffn_down", [HIDDEN, 8]),
}  # fmt: skip
SHAPES: dict[str, list[int]] = {"model.embed_tokens.weight": [VOCAB, HIDDEN], "model.norm.weight": [HIDDEN]}
SHAPES |= {f"model.layers.0.{name}.weight": shape for name, (_, shape) in _LAYER.items()}
GGUF_SHAPES = {"token_embd.weight": [VOCAB, HIDDEN], "output_norm.weight": [HIDDEN]}
GGUF_SHAPES |= {f"blk.0.{name}.weight": shape for name, shape in _LAYER.values()}


def num_bytes(shape: list[int]) -> int:
    size = 4
    for length in shape:
        size *= length
    return size


def changed(original: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at `path`, such as "model.merges.0"."""
    copied = copy.deepcopy(dict(original))
    *way, last = path.split(".")
    place: Any = copied
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place[step]
    place[int(last) if isinstance(place, list) else last] = value
    return copied


# -- the folder


def weight_header(names: list[str] | None = None) -> dict[str, Any]:
    """What a safetensors header says of these weights, one after the other."""
    header, end = {}, 0
    for name in SHAPES if names is None else names:
        start, end = end, end + num_bytes(SHAPES[name])
        header[name] = {"dtype": "F32", "shape": SHAPES[name], "data_offsets": [start, end]}
    return header


def safetensors_bytes(header: Any, data: bytes | None = None, length: int | None = None) -> bytes:
    """A file with this header (an object, or text as it stands), and as much data as a sound one describes."""
    raw = (header if isinstance(header, str) else json.dumps(header)).encode()
    if data is None:
        data = bytes(max((entry["data_offsets"][1] for entry in header.values()), default=0))
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def folder_files() -> dict[str, bytes]:
    texts = {"config.json": CONFIG, "generation_config.json": GENERATION}
    texts |= {"tokenizer.json": TOKENIZER, "tokenizer_config.json": TOKENIZER_CONFIG}
    return {name: json.dumps(value).encode() for name, value in texts.items()} | {"model.safetensors": safetensors_bytes(weight_header())}


def sharded_files() -> dict[str, bytes]:
    """The same weights in two files and an index."""
    files = folder_files()
    del files["model.safetensors"]
    names = list(SHAPES)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    index = {"metadata": {"total_size": 1}, "weight_map": {name: shard for shard, part in parts.items() for name in part}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    return files | {shard: safetensors_bytes(weight_header(part)) for shard, part in parts.items()}


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


# -- the GGUF file

Keys = dict[str, bytes]


def gguf_keys() -> Keys:
    """Every key of a byte-level model, encoded, by its name."""
    keys = {
        "general.architecture": string("general.architecture", "llama"),
        "general.alignment": u32("general.alignment", 32),
        "llama.attention.layer_norm_rms_epsilon": f32("llama.attention.layer_norm_rms_epsilon", 1e-5),
        "llama.rope.freq_base": f32("llama.rope.freq_base", 10000.0),
        "tokenizer.ggml.model": string("tokenizer.ggml.model", "gpt2"),
        "tokenizer.ggml.pre": string("tokenizer.ggml.pre", "gpt-2"),
        "tokenizer.ggml.tokens": strings("tokenizer.ggml.tokens", TOKENS),
        "tokenizer.ggml.token_type": numbers("tokenizer.ggml.token_type", [1] * 14 + [3, 3]),
        "tokenizer.ggml.merges": strings("tokenizer.ggml.merges", MERGES),
        "tokenizer.chat_template": string("tokenizer.chat_template", TEMPLATE),
    }
    integers = {
        "llama.block_count": 1, "llama.context_length": CONTEXT, "llama.embedding_length": HIDDEN, "llama.feed_forward_length": HIDDEN,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS, "llama.rope.dimension_count": 4,
        "tokenizer.ggml.bos_token_id": 15, "tokenizer.ggml.eos_token_id": 14,
    }  # fmt: skip
    return keys | {name: u32(name, value) for name, value in integers.items()}


def sentencepiece_keys() -> Keys:
    """The same with scores instead of merges."""
    keys = gguf_keys()
    del keys["tokenizer.ggml.merges"], keys["tokenizer.ggml.pre"]
    keys["tokenizer.ggml.model"] = string("tokenizer.ggml.model", "llama")
    scores = struct.pack("<16f", *(-float(i) for i in range(16)))
    return keys | {"tokenizer.ggml.scores": array("tokenizer.ggml.scores", F32, 16, scores)}


def strings(name: str, values: list[str]) -> bytes:
    return array(name, STRING, len(values), b"".join(map(text, values)))


def numbers(name: str, values: list[int]) -> bytes:
    return array(name, U32, len(values), struct.pack(f"<{len(values)}I", *values))


def gguf_tensors(shapes: Mapping[str, list[int]] = GGUF_SHAPES) -> tuple[dict[str, bytes], int]:
    """Entries of the tensor list by name, and the size of their data: F32, one after the other, each on 32 bytes."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        entries[name] = tensor(name, shape[::-1], offset=end)
        end += -(-num_bytes(shape) // 32) * 32
    return entries, end


def gguf_file(keys: Keys | None = None, tensors: Mapping[str, bytes] | None = None, size: int | None = None) -> bytes:
    entries, end = gguf_tensors()
    chosen = entries if tensors is None else tensors
    return gguf_bytes(list((gguf_keys() if keys is None else keys).values()), list(chosen.values()), bytes(end if size is None else size))
