"""Tiny models with recurrent layers, of odd shapes, and steps over them with state slots given by hand."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.attention.cpu import CpuBackend
from octavo.comm.comm import NullComm
from octavo.loading.loader import load_weights
from octavo.loading.resolve import load_model_config, open_checkpoint, resolve_model
from octavo.loading.views import reordered, taken_apart, under_rules, unstacked
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model, cache_specs, family_of
from octavo.step.step_tensors import NO_STATE, StepStates
from octavo.worker.kv_store import PagedStore
from tests.support.batches import Pool
from tests.support.families import Tiny, fill, sizes
from tests.support.story_folder import story_folder

LINEAR, FULL = "linear_attention", "full_attention"
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}


def delta_heads(k_heads: int, v_heads: int, k_dim: int, v_dim: int, width: int = 4) -> dict[str, int]:
    return {
        "linear_num_key_heads": k_heads, "linear_num_value_heads": v_heads, "linear_key_head_dim": k_dim, "linear_value_head_dim": v_dim,
        "linear_conv_kernel_dim": width,
    }  # fmt: skip


HYBRIDS = {
    "qwen3.5": Tiny("Qwen3_5ForCausalLM", sizes(4, 48, 4, 2, head_dim=32) | delta_heads(2, 6, 16, 48), "qwen35", less=1.0),
    "qwen3.5, tied": Tiny(
        "Qwen3_5ForCausalLM",
        sizes(3, 40, 3, 1, head_dim=16) | delta_heads(3, 3, 24, 16, width=2)
        | {"layer_types": [FULL, LINEAR, LINEAR], "tie_word_embeddings": True, "attention_bias": True},
        less=1.0,
    ),
    "qwen3.5 moe": Tiny(
        "Qwen3_5MoeForCausalLM", sizes(4, 48, 4, 1, head_dim=32) | delta_heads(4, 8, 16, 32) | _EXPERTS, "qwen35moe", less=1.0
    ),
    "qwen3-next": Tiny(
        "Qwen3NextForCausalLM", sizes(4, 48, 4, 2, head_dim=32) | delta_heads(2, 6, 32, 16) | _EXPERTS, "qwen3next", less=1.0,
    ),
    "qwen3-next, some mlps": Tiny(
        "Qwen3NextForCausalLM",
        sizes(4, 48, 4, 2, head_dim=32) | delta_heads(1, 4, 64, 16) | _EXPERTS | {"mlp_only_layers": [1], "full_attention_interval": 2},
        less=1.0,
    ),
}  # fmt: skip

SMALLEST = Tiny(
    "Qwen3_5ForCausalLM",
    sizes(2, 32, 2, 1, head_dim=16) | delta_heads(1, 2, 16, 16, width=3) | {"layer_types": [LINEAR, FULL], "max_position_embeddings": 1024},
    less=1.0,
)  # that the native kernels support


def for_a_gpu(tiny: Tiny) -> Tiny:
    """Returns the model with k heads of a multiple of 16, as kernels of a GPU take them."""
    return replace(tiny, options=tiny.options | {"linear_key_head_dim": -(-tiny.options["linear_key_head_dim"] // 16) * 16})


def with_images(folder: Path, tiny: Tiny, seed: int) -> Tiny:
    """Writes the model as the text part of one of text and images. Returns that."""
    import transformers

    prefix = tiny.architecture.removesuffix("ForCausalLM")
    images = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": tiny.options["hidden_size"],
        "patch_size": 4, "num_position_embeddings": 16,
    }  # fmt: skip
    config = getattr(transformers, f"{prefix}Config")(text_config=dict(tiny.options), vision_config=images)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    fill(model, seed, tiny)
    model.save_pretrained(folder)
    return replace(tiny, architecture=f"{prefix}ForConditionalGeneration")


def hybrid_story_folder(folder: Path) -> Path:
    """The shape of a tiny model, with the tokenizer and the chat template of the stories. It has no weights: they are to be dummies."""
    story_folder(folder)
    (folder / "model.safetensors").unlink()
    config = SMALLEST.options | {"vocab_size": 512, "architectures": [SMALLEST.architecture]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened(path: Path) -> tuple[Any, Any]:
    """Returns the config of a folder or a GGUF file, and its weights as the engine sees them."""
    source = resolve_model(str(path))
    config = load_model_config(source)
    stored = taken_apart(unstacked(under_rules(open_checkpoint(source), family_of(config).rules), config), config)
    return config, stored if source.kind == "gguf" else reordered(stored, config)


def load(path: Path) -> Decoder:
    config, stored = opened(path)
    with torch.inference_mode():
        model = build_model(config, torch.float32, CpuBackend, NullComm(), max_len=config.max_position)
        load_weights(model, stored)
    return model


@dataclass(frozen=True)
class Row:
    """What a step computes of a sequence."""

    row: int
    tokens: Sequence[int]
    read: int
    write: int = NO_STATE
    checkpoints: Sequence[tuple[int, int]] = ()  # tokens of this step that it covers, and its slot


@dataclass
class Steps:
    """A model with rows of blocks and slots of states. A slot that was never written has NaN, except the null one."""

    model: Decoder
    num_states: int = 12
    max_len: int = 128
    pool: Pool = field(init=False)

    def __post_init__(self) -> None:
        config: Any = self.model.config
        spec = next(layer.mixer for layer in config.layers if layer.mixer.kind == "attention")
        self.pool = Pool(config.num_layers, spec.num_kv_heads, spec.head_dim, max_len=self.max_len)
        self.states = PagedStore(cache_specs(config, "float32"), 1, 1, num_states=self.num_states).states
        for layer, states in enumerate(self.states):
            for buffer in states.values():
                buffer[1:] = torch.nan
            if states:
                self.pool.paged[layer] = states

    def run(self, *rows: Row, sampled: bool = False) -> list[Tensor]:
        """Returns the logits of each row's tokens, or of its last one only."""
        tokens = {row.row: list(row.tokens) for row in rows}
        batch = self.pool.batch(CpuBackend, tokens)
        start = batch.query_start.tolist()
        checkpoints = [(start[at] + end, slot) for at, row in enumerate(rows) for end, slot in row.checkpoints]
        first = [0]
        for row in rows:
            first.append(first[-1] + len(row.checkpoints))
        covered = batch.context_len - batch.query_start.diff()
        read, write = (torch.tensor(slots, dtype=torch.int32) for slots in ([row.read for row in rows], [row.write for row in rows]))
        words = [torch.tensor(values, dtype=torch.int32) for values in (covered.tolist(), first, checkpoints)]
        batch.states = StepStates(read, write, words[0], words[1], words[2].view(-1, 2))
        with torch.inference_mode():
            hidden = self.model.sampled(batch)[0] if sampled else self.model(batch)
            logits = self.model.head(hidden).float()
        self.pool.advance(tokens)
        return list(logits.split(1 if sampled else [len(row.tokens) for row in rows]))

    def again(self, *rows: Row) -> list[Tensor]:
        """Computes the last step once more."""
        for row in rows:
            self.pool.lengths[row.row] -= len(row.tokens)
        return self.run(*rows)
