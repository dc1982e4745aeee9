"""Mixtures as files have them: stacks of all experts, quantised ones, and what ranks have of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.attention.backend import load_backend
from octavo.comm.comm import Comm, NullComm
from octavo.errors import ConfigError, LoadError
from octavo.kernels.device_codes import DeviceCodes
from octavo.kernels.fp8_matrix import Fp8Matrix
from octavo.loading.checkpoint import Checkpoint, FileCheckpoint
from octavo.loading.loader import StoredParameters, load_packed, load_weights
from octavo.loading.requantized import DummyCheckpoint, as_wanted
from octavo.loading.resolve import load_model_config, open_checkpoint, resolve_model
from octavo.loading.shape import dummy_shape, model_shape
from octavo.loading.sharded import of_rank
from octavo.loading.views import unstacked
from octavo.model_config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model, rank_config
from octavo.models.split import Part
from octavo.quant.fp8 import folded
from octavo.quant.schemes import UNQUANTIZED, Packed, repack
from tests.support.batches import Pool, run_steps
from tests.support.mixtures import MIXTURES, fused, plain_folder, to_mixture_gguf, to_mxfp4
from tests.support.packers import published
from tests.support.quantized_models import Kind, fp8_config, in_fp8, write_model
from tests.support.ranks import on_ranks

BACKEND = load_backend("cpu")
TEXTS = [[(7 * row + 3 * i * i) % 97 for i in range(20)] for row in range(2)]
STEPS = [{0: TEXTS[0][:18]}, {0: TEXTS[0][18:19], 1: TEXTS[1][:19]}, {0: TEXTS[0][19:], 1: TEXTS[1][19:]}]
IN_GGUF: dict[str, dict[str, Any]] = {
    "Qwen2MoeForCausalLM": {"shared_expert_intermediate_size": 64},  # whole groups
    "Qwen3MoeForCausalLM": {"mlp_only_layers": []},  # no converter writes layers with plain MLPs
}
Build = Callable[[ModelConfig, Checkpoint, Comm], Decoder]


def opened(path: Path) -> tuple[ModelConfig, FileCheckpoint]:
    source = resolve_model(str(path))
    config = load_model_config(source)
    return config, unstacked(open_checkpoint(source), config)


def in_floats(config: ModelConfig, stored: Checkpoint, comm: Comm) -> Decoder:
    model = build_model(config, torch.float32, BACKEND, comm, 64)
    load_weights(model, stored)
    return model


def in_codes(config: ModelConfig, stored: Checkpoint, comm: Comm) -> Decoder:
    with torch.device("meta"):
        empty = build_model(config, torch.float32, BACKEND, comm, max_len=1)
    model = build_model(config, torch.float32, BACKEND, comm, 64, Packed())
    load_packed(model, StoredParameters(empty, stored))
    return model


def logits(model: Decoder) -> Tensor:
    config: Any = model.config
    spec = config.attention()
    rows = run_steps(model, BACKEND, Pool(config.num_layers, spec.num_kv_heads, spec.head_dim, max_len=64), STEPS)
    return torch.cat([rows[0], rows[1]])


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> bool:
    assert expected.std() > 0.1
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.mark.parametrize("whole", [False, True], ids=["parts of experts", "whole experts"])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_ranks_give_the_logits_of_the_whole_model(architecture: str, whole: bool, tmp_path: Path) -> None:
    config, stored = opened(plain_folder(tmp_path, architecture))
    sizes = {"context": 1, "expert_ranks": 2 if whole else 1}
    own = rank_config(config, 2, **sizes)

    def work(comm: Comm) -> tuple[int, Tensor]:
        model = in_floats(own, of_rank(stored, config, 2, comm.rank, **sizes), comm)
        return model.layers[0].mlp.experts.down.weight.numel(), logits(model)  # type: ignore[union-attr]

    (one, first), (other, second) = on_ranks(2, work)
    assert one == other == 4 * 64 * 32 // 2
    assert close(torch.cat([first, second], dim=-1), logits(in_floats(config, stored, NullComm())))


def test_experts_that_cannot_be_dealt_out_are_refused(tmp_path: Path) -> None:
    config, _ = opened(plain_folder(tmp_path / "mixture", "MixtralForCausalLM"))
    with pytest.raises(ConfigError, match="4 experts cannot be divided among tensor_parallel_size 3: sizes that can: 1, 2, 4"):
        rank_config(config, 3, 1, 3)
    config, _ = opened(plain_folder(tmp_path / "dense", "MixtralForCausalLM", architectures=["LlamaForCausalLM"]))
    with pytest.raises(ConfigError, match="enable_expert_parallel is set, and models of the family llama have no experts"):
        rank_config(config, 2, 1, 2)


@pytest.mark.parametrize(("kind", "build"), [("F32", in_floats), ("Q8_0", in_codes)])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_stacks_of_gguf_files_are_the_experts_of_the_folder(architecture: str, kind: str, build: Build, tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "hf", architecture, **IN_GGUF.get(architecture, {}))
    config, stored = opened(to_mixture_gguf(folder, tmp_path / "m.gguf", kind))
    weights = load_file(folder / "model.safetensors")
    assert set(stored.names()) == set(weights)
    for name, weight in weights.items():
        assert stored.shape(name) == weight.shape
        assert (stored.read(name) - weight).abs().max() <= (0 if kind == "F32" else 0.02) * weight.abs().max(), name
    codes = logits(build(config, stored, NullComm()))
    floats = logits(in_floats(config, stored, NullComm()))
    assert close(codes, floats)
    expected = logits(in_floats(*opened(folder), NullComm()))
    assert close(floats, expected) or kind != "F32"


def test_quantised_experts_stay_codes_in_one_stack(tmp_path: Path) -> None:
    """GPTQ quantises each expert by itself, and leaves the router."""
    folder = plain_folder(tmp_path, "MixtralForCausalLM")
    weights, stored, floats = load_file(folder / "model.safetensors"), {}, {}
    for number, (name, weight) in enumerate(weights.items()):
        stored[name] = floats[name] = weight
        if "experts" in name:
            made = published(*weight.shape, 32, 4, seed=number)
            stored |= {one: tensor.contiguous() for one, tensor in made.gptq(name.removesuffix(".weight"), True).items()}
            floats[name] = made.weight()
            del stored[name]
    save_file(floats, folder / "model.safetensors")
    expected = logits(in_floats(*opened(folder), NullComm()))
    save_file(stored, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    (folder / "config.json").write_text(json.dumps(raw | {"quantization_config": quantized}))
    model = in_codes(*opened(folder), NullComm())
    mlp: Any = model.layers[0].mlp
    assert isinstance(mlp.experts.gate_up.codes, DeviceCodes) and len(mlp.experts.gate_up.codes) == 4 * 2 * 32
    assert mlp.router.scheme is UNQUANTIZED
    assert close(logits(model), expected, tolerance=2e-3)  # offsets are rounded to float16


def test_experts_in_fp8_become_codes_and_the_rest_stays_8_bit_floats(tmp_path: Path) -> None:
    """They say what those codes say in floats."""
    folder, kind = plain_folder(tmp_path, "MixtralForCausalLM"), Kind("fp8", 8, scales="rows")
    raw, stored = json.loads((folder / "config.json").read_text()), {}
    for name, weight in load_file(folder / "model.safetensors").items():
        in_eight = "experts" in name or "self_attn" in name
        stored |= in_fp8(name.removesuffix(".weight"), weight, kind)[0] if in_eight else {name: weight}
    quantized = write_model(tmp_path / "fp8", raw | {"quantization_config": fp8_config(kind)}, stored)
    config, checkpoint = opened(quantized)
    model = in_codes(config, checkpoint, NullComm())
    layer: Any = model.layers[0]
    assert isinstance(layer.mlp.experts.down.codes, DeviceCodes) and layer.mlp.experts.down.codes.bits == 8
    assert isinstance(layer.attention.qkv.fp8, Fp8Matrix) and layer.mlp.router.scheme is UNQUANTIZED
    packed = {name: checkpoint.packed(name) for name in checkpoint.names() if "experts" in name}
    floats = {name: folded(packed[name]).dequantize() if name in packed else checkpoint.read(name) for name in checkpoint.names()}  # type: ignore[arg-type]
    assert close(logits(model), logits(in_floats(*opened(write_model(tmp_path / "floats", raw, floats)), NullComm())), tolerance=1e-4)
    planned = {one.matrix.name: one.codes for one in model_shape(str(quantized)).kept("float32", "auto", "cuda")}
    assert planned["qkv"] and planned["qkv"].fp8_span and planned["experts_down"] and not planned["experts_down"].fp8_span


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_quantised_at_load_and_routers_are_not(quantization: Any, tmp_path: Path) -> None:
    config, stored = opened(plain_folder(tmp_path, "Qwen2MoeForCausalLM", shared_expert_intermediate_size=32))
    wanted = as_wanted(stored, quantization, config)
    model = in_codes(config, wanted, NullComm())
    mlp: Any = model.layers[0].mlp
    for linear in (mlp.experts.gate_up, mlp.experts.down, mlp.shared.gate_up, mlp.shared.down):
        assert isinstance(linear.codes, DeviceCodes) and linear.codes.bits == int(quantization[3:])
    assert mlp.router.scheme is UNQUANTIZED and mlp.shared_gate.scheme is UNQUANTIZED
    assert close(logits(model), logits(in_floats(config, wanted, NullComm())))


# -- gpt-oss: one tensor for all experts


def test_one_tensor_of_all_experts_is_taken_apart(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "m", "GptOssForCausalLM")
    expected, weights = logits(in_floats(*opened(folder), NullComm())), load_file(folder / "model.safetensors")
    config, stored = opened(fused(folder))
    assert set(stored.names()) == set(weights)
    assert all(torch.equal(stored.read(name), weight) and stored.shape(name) == weight.shape for name, weight in weights.items())
    assert torch.equal(logits(in_floats(config, stored, NullComm())), expected)


def test_dummy_experts_are_mxfp4_where_the_config_says_so(tmp_path: Path) -> None:
    """Random codes of the published form, in whole and in the parts that ranks have; all other weights are floats."""
    folder = plain_folder(tmp_path, "GptOssForCausalLM")
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(raw))
    source = resolve_model(str(folder))
    config = load_model_config(source)
    forms = {weight.name: weight.codes for weight in dummy_shape(source, config).weights if weight.codes is not None}
    with torch.device("meta"):
        model = build_model(config, torch.float32, BACKEND, NullComm(), max_len=1)
    dummy = DummyCheckpoint(model, seed=3, codes=forms)
    packed = {name: dummy.packed(name) for name in dummy.names()}
    assert {name for name, one in packed.items() if one is not None} == {n for n in packed if ".experts." in n and n.endswith(".weight")}
    name = "model.layers.1.mlp.experts.2.gate_proj.weight"
    whole = packed[name]
    assert whole is not None and repack(whole, torch.device("cpu")).floats
    values = whole.dequantize()
    assert torch.equal(dummy.read(name), values) and 0.01 < float(values.std()) < 0.04
    columns = range(values.shape[1] // 2, values.shape[1])
    part = dummy.packed_part(name, Part(columns=columns))
    assert part is not None and torch.equal(part.dequantize(), values[:, columns.start :])
    assert dummy.packed_part(name, Part(columns=range(8, values.shape[1]))) is None  # no whole groups


def test_mxfp4_blocks_stay_codes_and_are_what_transformers_reads(tmp_path: Path) -> None:
    folder = fused(plain_folder(tmp_path / "floats", "GptOssForCausalLM"))
    blocks = to_mxfp4(folder, tmp_path / "blocks")
    (config, stored), (_, floats) = opened(blocks), opened(folder)
    assert set(stored.names()) == set(floats.names())
    assert all(torch.equal(stored.read(name), floats.read(name)) for name in floats.names())
    model = in_codes(config, stored, NullComm())
    assert isinstance(model.layers[0].mlp.experts.down.codes, DeviceCodes)  # type: ignore[union-attr]
    expected = logits(in_floats(config, floats, NullComm()))
    assert close(logits(model), expected)
    ranks = [of_rank(stored, config, 2, rank, 1, 2) for rank in range(2)]
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    assert torch.equal(ranks[1].read(name), floats.read(name.replace("experts.1", "experts.3")))
    with pytest.raises(ConfigError, match="down_proj cannot be split over tensor_parallel_size 2: 16 columns are not whole groups of 32"):
        of_rank(stored, config, 2, 0)


@pytest.mark.parametrize(
    ("end", "shape", "words"),
    [
        ("", (4, 64), "gate_up_proj has shape .*, which is not a weight of each expert"),
        ("", (4, 64, 63), "gate_up_proj has shape .*, which is not a weight of each expert"),
        ("", (2000, 1, 2), "gate_up_proj has shape .*, which is not a weight of each expert"),
        ("_blocks", (4, 64, 2, 16), "gate_up_proj_blocks has shape .*, and its scales have None"),
        ("", (5, 64, 64), "unknown to this model: model.layers.0.mlp.experts.4.gate_proj.weight"),
    ],
)
def test_a_stack_of_another_shape_is_refused(end: str, shape: tuple[int, ...], words: str, tmp_path: Path) -> None:
    folder = fused(plain_folder(tmp_path, "GptOssForCausalLM"))
    weights, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts.gate_up_proj"
    del weights[name]
    weights[name + end] = torch.zeros(shape, dtype=torch.uint8 if end else torch.float32)
    save_file(weights, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(LoadError, match=words):
        config, stored = opened(folder)
        in_floats(config, stored, NullComm())
