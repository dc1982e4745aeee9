"""Tiny random Llama, Qwen2 and Qwen3 against `transformers`, run as an engine would: several rows, chunks, decode."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.attention.backend import load_backend
from octavo.comm.comm import NullComm
from octavo.errors import LoadError
from octavo.loading.loader import load_weights
from octavo.loading.requantized import DummyCheckpoint
from octavo.model_config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model, cache_specs, describe, read_config
from octavo.policy.cache_spec import Buffer, LayerCacheSpec
from octavo.sizing.model_size import weight_bytes
from tests.support.batches import DictCheckpoint, Pool, run_steps
from tests.support.layer_fields import changed

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# What is special about a model, in the words of its config.json
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("Llama", {"head_dim": 32}),
    "llama all heads": ("Llama", {"num_key_value_heads": 6}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "llama llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 16}),
    "llama yarn mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}, "head_dim": 16}),
    "llama yarn attention factor": ("Llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0}}),
    "qwen2": ("Qwen2", {}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 12}),
    "qwen3 biases": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 window": ("Qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
}
LENGTHS = (41, 33, 5)


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    import transformers

    return transformers


def reference(transformers: ModuleType, family: str, fields: dict[str, Any]) -> tuple[ModelConfig, Any]:
    hf_config = getattr(transformers, f"{family}Config")(**{**TINY, **fields})
    torch.manual_seed(1)
    hf = getattr(transformers, f"{family}ForCausalLM")(hf_config).float().eval()
    for parameter in hf.parameters():  # norms that are not one, biases that are not zero, logits that are not all alike
        parameter.data.normal_(0, 0.15)
    return read_config({**hf_config.to_dict(), "architectures": [f"{family}ForCausalLM"]}, "test"), hf


def ours(config: ModelConfig, dtype: torch.dtype = torch.float32, backend: str = "cpu") -> Decoder:
    return build_model(config, dtype, load_backend(backend), NullComm(), max_len=96)


def new_pool(config: ModelConfig) -> Pool:
    return Pool(config.num_layers, config.attention().num_kv_heads, config.attention().head_dim, max_len=96)


def prompts() -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(3)
    return {row: torch.randint(0, 97, (length,), generator=generator).tolist() for row, length in enumerate(LENGTHS)}


def in_chunks(texts: dict[int, list[int]]) -> list[dict[int, list[int]]]:
    """Row 0 in chunks and then decoded, row 1 whole but for one token, row 2 late: chunk, prompt and decode share steps."""
    first, second, third = texts[0], texts[1], texts[2]
    return [
        {0: first[:17], 1: second[:-1]},
        {2: third[:-1], 1: second[-1:], 0: first[17:38]},
        *[{0: [token], **extra} for token, extra in zip(first[38:], [{2: third[-1:]}, {}, {}])],
    ]


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_transformers(transformers: ModuleType, case: str) -> None:
    config, hf = reference(transformers, *CASES[case])
    model = ours(config)
    load_weights(model, DictCheckpoint(hf.state_dict()))
    texts = prompts()
    logits = run_steps(model, load_backend("cpu"), new_pool(config), in_chunks(texts))
    with torch.inference_mode():
        for row, text in texts.items():
            expected = hf(torch.tensor([text])).logits[0]
            assert expected.std() > 0.1
            torch.testing.assert_close(logits[row], expected, atol=1e-4, rtol=1e-4)


def small_config(**fields: Any) -> ModelConfig:
    return read_config({**TINY, "architectures": ["LlamaForCausalLM"], **fields}, "test")


def complete_weights(config: ModelConfig) -> dict[str, Tensor]:
    hidden, size = config.hidden_size, config.layers[0].mlp.inner
    q_size, kv_size = config.attention().q_size, config.attention().kv_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config.num_layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (q_size, hidden),
                "self_attn.k_proj": (kv_size, hidden),
                "self_attn.v_proj": (kv_size, hidden),
                "self_attn.o_proj": (hidden, q_size),
                "mlp.gate_proj": (size, hidden),
                "mlp.up_proj": (size, hidden),
                "mlp.down_proj": (hidden, size),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def load_error(config: ModelConfig, weights: dict[str, Tensor]) -> str:
    with pytest.raises(LoadError) as caught:
        load_weights(ours(config), DictCheckpoint(weights))
    return str(caught.value)


def test_a_missing_weight_is_named_with_the_part_it_should_fill() -> None:
    weights = complete_weights(small_config())
    del weights["model.layers.1.self_attn.k_proj.weight"], weights["lm_head.weight"]
    message = load_error(small_config(), weights)
    assert "2 missing" in message and "lm_head.weight" in message
    assert "model.layers.1.self_attn.k_proj.weight (for layers.1.attention.qkv.weight[k])" in message


def test_unknown_weights_are_named_up_to_eight_and_counted() -> None:
    weights = complete_weights(small_config())
    # a bias, a norm and a layer this model does not have
    weights |= {f"model.layers.{layer}.self_attn.{name}": torch.zeros(1) for layer in range(5) for name in ("q_proj.bias", "q_norm.weight")}
    message = load_error(small_config(), weights)
    assert "10 unknown" in message and "model.layers.0.self_attn.q_proj.bias" in message and "and 2 more" in message


def test_a_wrong_shape_is_told_with_both_shapes() -> None:
    weights = complete_weights(small_config())
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(80, 47)
    message = load_error(small_config(), weights)
    assert "model.layers.2.mlp.up_proj.weight" in message and "[80, 47]" in message and "[80, 48]" in message


def test_a_name_given_twice_is_refused() -> None:
    checkpoint = DictCheckpoint(complete_weights(small_config()))
    names = checkpoint.names()
    checkpoint.names = lambda: [*names, names[3]]  # type: ignore[method-assign]
    with pytest.raises(LoadError, match=f"1 given twice: {names[3]}"):
        load_weights(ours(small_config()), checkpoint)


def test_what_follows_from_the_rest_is_tolerated() -> None:
    config = small_config(tie_word_embeddings=True)
    extra = {"lm_head.weight": torch.ones(97, 48), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    bias = "model.layers.1.mlp.down_proj.bias"
    extra[bias] = torch.zeros(48)
    model = ours(config)
    load_weights(model, DictCheckpoint(complete_weights(config) | extra))
    assert model.head.matrix is model.embed and model.embed.weight.count_nonzero() == 0
    extra[bias][47] = 1e-9
    assert f"1 unknown to this model: {bias}" in load_error(config, complete_weights(config) | extra)


@pytest.mark.parametrize("case", ["llama", "llama tied", "llama biases", "llama wide heads", "qwen2", "qwen3", "qwen3 biases"])
def test_weight_bytes_counts_what_the_model_holds(case: str) -> None:
    family, fields = CASES[case]
    config = small_config(**{**fields, "architectures": [f"{family}ForCausalLM"]})
    model = ours(config, torch.bfloat16)
    assert weight_bytes(describe(config), "bfloat16") == sum(p.numel() * p.element_size() for p in model.parameters())
    assert describe(config).num_parameters == sum(p.numel() for p in model.parameters())


def test_cache_specs_describe_one_token_of_each_layer() -> None:
    config = changed(small_config(), windows=(None, 7, None))
    token = Buffer((2, 8), "bfloat16")
    expected = [LayerCacheSpec(layer, {"k": token, "v": token}, window) for layer, window in enumerate((None, 7, None))]
    assert cache_specs(config, "bfloat16") == expected
    codes, scale = Buffer((2, 8), "int8"), Buffer((2,), "float32")
    buffers = {"k": codes, "v": codes, "k_scale": scale, "v_scale": scale}
    assert cache_specs(config, "int8")[1] == LayerCacheSpec(1, buffers, 7)


def test_dummy_weights_repeat_for_a_seed_and_give_finite_logits_on_both_backends() -> None:
    config = small_config(vocab_size=9001)
    models = [ours(config), ours(config), ours(config, backend="contiguous")]
    for model, seed in zip(models, (7, 8, 7)):
        load_weights(model, DummyCheckpoint(model, seed))
    layers = models[0].layers
    assert not torch.equal(layers[0].mlp.gate_up.weight, layers[1].mlp.gate_up.weight)
    steps = in_chunks(prompts())
    first = run_steps(models[0], load_backend("cpu"), new_pool(config), steps)
    other = run_steps(models[1], load_backend("cpu"), new_pool(config), steps)
    again = run_steps(models[2], load_backend("contiguous"), new_pool(config), steps)
    for row in first:
        assert first[row].isfinite().all() and first[row].std() > 0
        assert torch.equal(first[row], again[row]) and not torch.equal(first[row], other[row])
