"""What mixtures are made of: the numbers of real ones, what ranks and stages have of them, and what `octavo plan` says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.attention.backend import load_backend
from octavo.cli.main import main
from octavo.comm.comm import NullComm
from octavo.errors import LoadError
from octavo.loading.shape import model_shape
from octavo.model_config import ConfigReader
from octavo.models.mixture_family import read_qwen
from octavo.models.registry import build_model, describe, rank_config, read_config, stage_config
from octavo.sizing.model_size import Codes
from octavo.sizing.native_size import native_refusal
from tests.support.mixtures import MIXTURES, fused, plain_folder, to_mixture_gguf, to_mxfp4

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
    "rope_theta": 1e6, "sliding_window": None,
}  # fmt: skip
QWEN2 = {
    "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    "vocab_size": 151936, "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32,
    "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131072, "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "all_of_them", "idle"),
    [
        (MIXTRAL, 46_702_792_704, 32 * 6 * 3 * 4096 * 14336),  # Mixtral-8x7B
        (QWEN2, 14_315_784_192, 24 * 56 * 3 * 2048 * 1408),  # Qwen1.5-MoE-A2.7B
        (QWEN3, 30_532_122_624, 48 * 120 * 3 * 2048 * 768),  # Qwen3-30B-A3B
        (GPT_OSS, 20_914_757_184, 24 * 28 * (3 * 2880 * 2880 + 3 * 2880)),  # gpt-oss-20b
    ],
    ids=["Mixtral", "Qwen2", "Qwen3", "gpt-oss"],
)
def test_real_mixtures_have_the_parameters_that_they_are_said_to_have(raw: dict[str, Any], all_of_them: int, idle: int) -> None:
    """As the files on the hub have them. Idle are those of the experts that a token does not choose."""
    model = describe(read_config(raw, "test"))
    assert (model.num_parameters, model.active_parameters) == (all_of_them, all_of_them - idle)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_a_description_has_the_parameters_of_the_module(architecture: str, tmp_path: Path) -> None:
    """Also of a rank, whose experts are parts or whole ones, and of a stage."""
    config = read_config(json.loads((plain_folder(tmp_path, architecture) / "config.json").read_text()), "test")
    for own in (config, rank_config(config, 2), rank_config(config, 2, 1, 2), stage_config(config, range(1, 2))):
        with torch.device("meta"):
            model = build_model(own, torch.float32, load_backend("cpu"), NullComm(), max_len=1)
        described = describe(own)
        matrices = [*described.matrices, *([described.lookup] if described.lookup else [])]
        shapes: dict[str, tuple[int, ...]] = {f"{one.module}.weight": (one.rows, one.columns) for one in matrices}
        shapes |= {f"{one.module}.bias": (one.rows,) for one in matrices if one.bias}
        shapes |= {one.module if one.name == "sinks" else f"{one.module}.weight": (one.size,) for one in described.vectors}
        assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == shapes
        assert described.num_parameters == sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_windows_of_gpt_oss_leave_half_of_the_cache(device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a sequence of 32k tokens: half of the layers read 128 of them. Stages keep all, since they share a table."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT_OSS))
    flags = ["--device", device, "--memory", "200g", "--kv-cache-memory-bytes", "64g", "--max-model-len", "32768"]
    whole, stage = (planned(capsys, str(path), *flags, "-pp", stages) for stages in "12")
    token = 2 * 8 * 64 * 2  # bytes of a layer
    layers = 24, max(one["num_layers"] for one in stage["stages"])
    shares = [one["kv_cache_bytes"] / one["concurrency"] / (32768 * count * token) for one, count in zip((whole, stage), layers)]
    assert 0.5 < shares[0] <= 0.52 and shares[1] == pytest.approx(1, abs=0.01)
    assert (whole["graphs_bytes"] > 0) == (device == "cuda"), "graphs are captured"


def test_matrices_of_a_mixture_are_named_after_what_they_are(tmp_path: Path) -> None:
    model = describe(read_config(QWEN2, "test"))
    layer = {matrix.name: matrix for matrix in model.matrices if matrix.layer == 3}
    assert list(layer) == ["qkv", "output", "router", "experts_gate_up", "experts_down", "shared_gate_up", "shared_down", "shared_gate"]
    assert list(layer["experts_gate_up"].parts)[:3] == [
        "model.layers.3.mlp.experts.0.gate_proj.weight",
        "model.layers.3.mlp.experts.0.up_proj.weight",
        "model.layers.3.mlp.experts.1.gate_proj.weight",
    ]
    assert list(layer["experts_down"].parts)[59] == "model.layers.3.mlp.experts.59.down_proj.weight"
    assert layer["experts_gate_up"].module == "layers.3.mlp.experts.gate_up" and layer["experts_gate_up"].rows == 60 * 2 * 1408
    assert native_refusal(model) is None


def test_some_layers_have_a_plain_mlp() -> None:
    raw = QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [3], "num_hidden_layers": 6}
    config = read_qwen(ConfigReader(raw, "test"), "Qwen3MoeForCausalLM")
    assert [layer.mlp.experts is not None for layer in config.layers] == [False, True, False, False, False, True]
    assert [matrix.name for matrix in describe(config).matrices if matrix.layer == 0] == ["qkv", "output", "gate_up", "down"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_experts_per_tok": 129}, "num_experts_per_tok must be an integer from 1 to 128, got 129"),
        ({"num_experts": 10**6}, "num_experts must be an integer from 1 to 1024"),
        ({"num_experts": 1024, "num_hidden_layers": 200}, "200 layers of 1024 experts; all layers together may have 131072"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layers, got 'all'"),
        ({"decoder_sparse_step": 100}, "decoder_sparse_step and mlp_only_layers leave no layer with experts"),
    ],
)
def test_numbers_that_no_mixture_has_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        read_config(QWEN3 | fields, "test")


def test_another_clamp_is_refused() -> None:
    with pytest.raises(LoadError, match=r"swiglu_limit must be 7\.0, got 5\.0"):
        read_config(GPT_OSS | {"swiglu_limit": 5.0}, "test")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["plan", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plan_counts_all_experts_and_says_how_many_are_active(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}))
    main(["plan", str(path), "--memory", "80g", "--device", "cuda"])
    assert re.search(r"^  active parameters 12,879,925,248 +of each token$", capsys.readouterr().out, re.MULTILINE)
    whole = planned(capsys, str(path), "--memory", "80g", "--device", "cuda")
    assert (whole["parameters"], whole["active_parameters"]) == (46_702_792_704, 12_879_925_248)
    assert 0.5 < whole["weights_bytes"] / whole["parameters"] < 0.56  # 4 bits, a scale for 128
    dealt = planned(capsys, str(path), "--memory", "80g", "--device", "cuda", "-tp", "2", "--enable-expert-parallel")
    split = planned(capsys, str(path), "--memory", "80g", "--device", "cuda", "-tp", "2")
    assert dealt["weights_bytes"] == split["weights_bytes"] < 0.51 * whole["weights_bytes"]


@pytest.mark.parametrize("form", ["gguf", "mxfp4"])
def test_stacks_in_files_are_planned_as_the_codes_of_all_experts(form: str, tmp_path: Path) -> None:
    """A GPU keeps them as codes; torch on a CPU as floats."""
    if form == "gguf":
        path = to_mixture_gguf(plain_folder(tmp_path / "hf", "MixtralForCausalLM"), tmp_path / "m.gguf", "Q8_0")
    else:
        path = to_mxfp4(fused(plain_folder(tmp_path / "hf", "GptOssForCausalLM")), tmp_path / "m")
    shape = model_shape(str(path))
    stacks = [one for one in shape.kept("bfloat16", "auto", "cuda") if one.matrix.name.startswith("experts")]
    kept = Codes(8, 32) if form == "gguf" else Codes(4, 32, table="FP4")  # a table does not make them wider
    assert [one.codes for one in stacks] == [kept] * 4
    known = {part for matrix in shape.model.matrices for part in matrix.parts}
    assert {weight.name for weight in shape.weights if ".experts." in weight.name and weight.codes} <= known
    assert shape.needs("float32").weights == shape.model.num_parameters * 4
