"""Whole models of codes, AWQ, GPTQ and GGUF, beside the same models in the floats that the codes stand for: the same to the bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo.attention.backend import load_backend
from octavo.comm.comm import NullComm
from octavo.layers.linear import Embedding, Linear, LMHead
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.loader import StoredParameters, load_packed, load_weights
from octavo.loading.requantized import as_wanted
from octavo.loading.resolve import load_model_config, open_checkpoint, resolve_model
from octavo.model_config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.quant.packed import PackedWeight
from octavo.quant.schemes import UNQUANTIZED, Packed
from tests.support.batches import Pool, run_steps
from tests.support.models import tiny_model, to_gguf
from tests.support.quantized_models import Kind, write_both

BACKEND = load_backend("cpu")
FOLDERS = {
    "AWQ with biases": Kind(group_size=64, architecture="Qwen2ForCausalLM"),
    "AWQ tied": Kind(group_size=128, tie=True),
    "GPTQ with act-order": Kind("gptq", group_size=32, act_order=True),
    "GPTQ of 8 bits": Kind("gptq", 8, 64, sym=True, act_order=True),
    "GPTQ with orders that differ": Kind("gptq", group_size=32, act_order=True, own_orders=True),
}
PARTS = {"embed": ("embed_tokens",), "qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj")}
MIXED = {"attn_v": "F16", "ffn_up": "Q8_0", "ffn_down": "Q5_0"}


class AsCodesSay:
    """A checkpoint whose floats are what its codes stand for, by way of the packed form, but for matrices that become floats."""

    def __init__(self, stored: Checkpoint, floats: set[str]) -> None:
        self.source, self.names, self.shape, self.packed, self.fingerprint = (
            stored.source, stored.names, stored.shape, stored.packed, stored.fingerprint,
        )  # fmt: skip
        self._stored, self._exact = stored, [part for name in floats for part in PARTS.get(name, ())]

    def read(self, name: str) -> Tensor:
        packed: PackedWeight | None = self._stored.packed(name)
        exact = packed is None or any(part in name for part in self._exact)
        return self._stored.read(name) if packed is None or exact else packed.dequantize()


def open_model(path: Path, quantization: str) -> tuple[ModelConfig, Checkpoint]:
    source = resolve_model(str(path))
    config = load_model_config(source)
    return config, as_wanted(open_checkpoint(source), quantization, config)  # type: ignore[arg-type]


def packed_model(config: ModelConfig, stored: Checkpoint, dtype: torch.dtype) -> Decoder:
    with torch.device("meta"):
        empty = build_model(config, torch.float32, BACKEND, NullComm(), max_len=1)
    model = build_model(config, dtype, BACKEND, NullComm(), 64, Packed())
    load_packed(model, StoredParameters(empty, stored))
    return model


def logits(model: Decoder, config: ModelConfig, dtype: torch.dtype) -> dict[int, Tensor]:
    pool = Pool(config.num_layers, config.attention().num_kv_heads, config.attention().head_dim, max_len=64, dtype=dtype)
    texts = [[(7 * row + 3 * i * i) % 300 for i in range(20)] for row in range(2)]
    steps = [{0: texts[0][:18]}, {0: texts[0][18:19], 1: texts[1][:19]}, {0: texts[0][19:], 1: texts[1][19:]}]
    return run_steps(model, BACKEND, pool, steps)


def assert_same(path: Path, quantization: str, dtype: torch.dtype, floats: set[str]) -> Decoder:
    config, stored = open_model(path, quantization)
    model, dense = packed_model(config, stored, dtype), build_model(config, dtype, BACKEND, NullComm(), 64)
    load_weights(dense, AsCodesSay(stored, floats))
    found, expected = logits(model, config, dtype), logits(dense, config, dtype)
    for row in expected:
        assert torch.equal(found[row], expected[row]) and expected[row].std() > 0.01
    kept = {
        name.split(".")[-1]
        for name, module in model.named_modules()
        if isinstance(module, (Linear, Embedding, LMHead)) and module.scheme is UNQUANTIZED
    }
    assert kept == floats
    return model


# promise: quantised-weights-stay
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_codes_runs_unexpanded_and_says_what_its_floats_say(tmp_path: Path, name: str) -> None:
    kind = FOLDERS[name]
    ends = {"embed"} if kind.tie else {"embed", "head"}
    model = assert_same(write_both(tmp_path, kind)[0], "auto", torch.float32, ends | ({"qkv", "gate_up"} if kind.own_orders else set()))
    layers = 2 * (128 * 256 + 128 * 128 + 3 * 256 * 128)
    matrices = [p for n, p in model.named_parameters() if "norm" not in n and "embed" not in n and "head" not in n and "bias" not in n]
    if not kind.own_orders:
        assert sum(p.nbytes for p in matrices) < layers * (kind.bits + 1.5) / 8  # of 32 bits a weight


@pytest.mark.parametrize(("kind", "kinds", "floats"), [("Q4_0", {}, {"embed"}), ("Q8_0", {}, {"embed"}), ("Q4_0", MIXED, {"embed", "qkv"})])
def test_a_gguf_file_runs_unexpanded(tmp_path: Path, kind: str, kinds: dict[str, str], floats: set[str]) -> None:
    path = to_gguf(tiny_model(tmp_path / "hf", "LlamaForCausalLM", seed=5), tmp_path / "m.gguf", kind, kinds=kinds)
    assert_same(path, "auto", torch.float32, floats)


def test_a_packed_head_that_is_tied_gives_the_embedding_its_rows(tmp_path: Path) -> None:
    path = to_gguf(tiny_model(tmp_path / "hf", "Qwen2ForCausalLM", seed=5, tie=True), tmp_path / "m.gguf", "Q8_0")
    model = assert_same(path, "auto", torch.bfloat16, set())
    assert model.head.matrix is model.embed and not list(model.head.parameters(recurse=False))


@pytest.mark.parametrize(
    ("quantization", "floats"), [("int8", {"embed"}), ("int4", {"embed"}), ("none", {"embed", "head", "qkv", "output", "gate_up", "down"})]
)
def test_quantization_means_what_it_means_natively(tmp_path: Path, quantization: str, floats: set[str]) -> None:
    assert_same(tiny_model(tmp_path, "Qwen3ForCausalLM", seed=5), quantization, torch.bfloat16, floats)
