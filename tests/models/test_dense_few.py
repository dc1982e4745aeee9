"""The five kernels of a few rows mean what a layer means: a whole model by way of their twins, against its own forward."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.backend import load_backend
from octavo.attention.forward_batch import ForwardBatch
from octavo.attention.triton import TritonBackend
from octavo.comm.comm import NullComm
from octavo.models.dense import DenseModel
from octavo.models.registry import read_config
from octavo.quant.packed import quantize
from octavo.quant.schemes import Packed
from tests.support.batches import Pool
from tests.support.layer_fields import changed

RAW = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 96, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}


def model_of(family: str, difference: dict[str, Any] | None = None, **fields: object) -> DenseModel:
    """`difference`: fields of the config as it was read that are changed"""
    config = read_config({**RAW, "architectures": [f"{family}ForCausalLM"], **fields}, "test")
    config = changed(config, **difference or {})
    model = DenseModel(config, torch.float32, load_backend("triton"), NullComm(), 96)
    torch.manual_seed(4)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.2)
    return model


def hidden_of(model: DenseModel, batch: ForwardBatch) -> Tensor:
    x = model.embed(batch.token_ids)
    residual = torch.zeros_like(x)
    for layer in model.layers:
        assert layer.small_batch.rows >= len(x)
        x, residual = layer.small_batch(x, residual, batch)
    return model.norm(x, residual)[0]


@pytest.mark.parametrize(
    ("family", "fields"), [("Llama", {}), ("Llama", {"attention_bias": True}), ("Qwen2", WINDOW), ("Qwen3", {})], ids=str
)
def test_a_decode_step_gives_the_hidden_states_and_caches_of_forward(family: str, fields: dict[str, object]) -> None:
    check_decode_step(model_of(family, **fields))


@pytest.mark.parametrize(
    "difference",
    [
        {"norms": "both"}, {"norms": "after"}, {"wide_norms": True}, {"residual_scale": 0.5}, {"activation": "geglu"}, {"soft_cap": 3.0},
        {"rotary_dim": 8}, {"rope": None},
    ],
    ids=str,
)  # fmt: skip
def test_so_does_one_of_a_layer_that_is_not_plain(difference: dict[str, Any]) -> None:
    check_decode_step(model_of("Llama", difference))


def check_decode_step(model: DenseModel) -> None:
    pools = [Pool(3, kv_heads=2, head_dim=16, num_rows=3, max_len=96) for _ in range(2)]
    with torch.inference_mode():
        for pool in pools:
            prompts = {0: list(range(20)), 2: [7], 1: list(range(33))}
            model(pool.batch(TritonBackend, prompts))
            pool.advance(prompts)
        for tokens in ({0: [3], 2: [4], 1: [5]}, {0: [6], 2: [7], 1: [8]}):
            ours, exact = (pool.batch(TritonBackend, tokens) for pool in pools)
            torch.testing.assert_close(hidden_of(model, ours), model(exact), atol=1e-4, rtol=1e-4)
            for pool in pools:
                pool.advance(tokens)
    for one, other in zip(*(pool.paged for pool in pools)):
        for name in "kv":
            torch.testing.assert_close(one[name], other[name], equal_nan=True, atol=1e-4, rtol=1e-4)


def test_codes_are_multiplied_beside_floats() -> None:
    """Matrices of either kind in one layer, some of them in an order of their own."""
    model, exact = model_of("Qwen3", intermediate_size=96), model_of("Qwen3", intermediate_size=96)
    for layer, floats in zip(model.layers, exact.layers):
        for name in ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"):
            if layer is model.layers[1] and name in ("attention.output", "mlp.gate_up"):
                continue
            linear, twin = layer.get_submodule(name), floats.get_submodule(name)
            codes = quantize(twin.weight, 4, 16)
            codes = replace(codes, order=torch.randperm(codes.shape[1], dtype=torch.int32)) if name != "attention.qkv" else codes
            linear.scheme = Packed()
            linear.scheme.fill(linear, codes, torch.device("cpu"))
            del linear.weight
            twin.weight.copy_(codes.dequantize())
    pools = [Pool(3, kv_heads=2, head_dim=16, num_rows=3, max_len=96) for _ in range(2)]
    tokens = {0: [3], 2: [4], 1: [5]}
    with torch.inference_mode():
        ours, theirs = (pool.batch(TritonBackend, tokens) for pool in pools)
        torch.testing.assert_close(hidden_of(model, ours), exact(theirs), atol=1e-4, rtol=1e-4)


def test_what_the_kernels_cannot_compute_they_are_not_given() -> None:
    assert model_of("Llama", mlp_bias=True).layers[0].small_batch.rows == 0
    assert model_of("Llama", head_dim=24).layers[0].small_batch.rows == 0


@pytest.mark.parametrize(
    "difference",
    [{"mlp_bias": True}, {"qk_norm": "whole"}],
    ids=str,
)
def test_a_layer_with_something_that_they_lack_is_not_theirs(difference: dict[str, object]) -> None:
    plain = read_config({**RAW, "architectures": ["LlamaForCausalLM"]}, "test")
    for config, theirs in ((plain, True), (changed(plain, **difference), False)):
        with torch.device("meta"):
            model = DenseModel(config, torch.bfloat16, load_backend("triton"), NullComm(), 96)
        assert [layer.small_batch.rows > 0 for layer in model.layers] == [theirs] * 3
