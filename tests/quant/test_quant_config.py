"""quantization_config of quantised models: what is read, and what is refused by name."""

from typing import Any

import pytest

from octavo.errors import LoadError
from octavo.quant.quant_config import QuantConfig, read_quant_config

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "damp_percent": 0.1, "dynamic": {}}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "actorder": None, "dynamic": False}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*gate$"], "sparsity_config": {},
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}},
}  # fmt: skip


def compressed(form: str = "pack-quantized", **weights: object) -> dict[str, Any]:
    return COMPRESSED | {"format": form, "config_groups": {"group_0": {"weights": WEIGHTS | weights}}}


def read(table: object) -> QuantConfig | None:
    return read_quant_config({"quantization_config": table}, "model/config.json")


def test_configs_of_both_methods_are_read() -> None:
    assert read_quant_config({"hidden_size": 64}, "c") is None and read(None) is None
    assert read(AWQ) == QuantConfig("awq", 4, 128)
    assert read({**AWQ, "version": "GEMM", "group_size": -1}) == QuantConfig("awq", 4, -1)
    assert read(GPTQ) == QuantConfig("gptq", 4, 128, sym=True, desc_act=True, stored_minus_one=True)
    assert read({"quant_method": "gptq", "bits": 8, "group_size": 32}) == QuantConfig("gptq", 8, 32, sym=True, stored_minus_one=True)
    second = {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False}
    assert read(second) == QuantConfig("gptq", 4, 128, desc_act=True)
    some = read({**GPTQ, "dynamic": {"lm_head": {}, "-:.*attn.*": {}, "-:.*mtp.*": True, "+:.*down.*": {"bits": 4}}})
    assert some is not None and some.converts("model.layers.0.mlp.up_proj") and not some.converts("model.layers.0.linear_attn.out_proj")
    config = read({**AWQ, "modules_to_not_convert": ["lm_head", "visual"]})
    assert config is not None and config.converts("model.layers.0.mlp.up_proj") and not config.converts("visual.blocks.0.proj")


def test_floats_of_8_bits_are_read() -> None:
    assert read(FP8) == QuantConfig("fp8", 8, -1, sym=True, block=(128, 128))
    rows = read({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})
    assert rows == QuantConfig("fp8", 8, -1, sym=True, modules_to_not_convert=("lm_head",))
    floats = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    config = read(floats)
    assert config is not None and (config.layout, config.bits, config.group_size, config.block, config.shown) == ("fp8", 8, -1, None, "FP8")
    blocks = read(compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 64]))
    assert blocks is not None and blocks.block == (128, 64)


def test_compressed_tensors_are_read() -> None:
    config = read(COMPRESSED)
    assert config is not None and (config.layout, config.bits, config.group_size, config.shown) == ("words", 4, 128, "W4A16") and config.sym
    assert not config.converts("model.layers.0.mlp.gate") and not config.converts("lm_head")
    assert config.converts("model.layers.0.mlp.gate_proj")
    assert read_quant_config({"compression_config": {**COMPRESSED, "quant_method": None}}, "c") == config
    by_byte = read(compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False, actorder="group"))
    assert by_byte is not None and (by_byte.layout, by_byte.group_size, by_byte.sym, by_byte.desc_act) == ("bytes", -1, False, False)
    ordered = read(compressed(actorder="group"))
    assert ordered is not None and ordered.desc_act and not config.desc_act


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("awq", "quantization_config must be an object, got 'awq'"),
        ({"bits": 4}, r"quantization_config.quant_method is '\(missing\)', supported: awq, gptq, fp8, mxfp4, compressed-tensors"),
        ({**AWQ, "quant_method": "hqq"}, "quant_method is 'hqq', supported: awq, gptq, fp8, mxfp4, compressed-tensors"),
        ({**AWQ, "quant_method": ["awq"]}, "quant_method is "),
        ({**AWQ, "bits": 8}, "bits is 8, supported: 4"),
        ({**AWQ, "bits": True}, "bits is True"),
        ({**AWQ, "version": "gemv"}, "version is 'gemv', supported: gemm"),
        ({**AWQ, "zero_point": False}, "zero_point is False, supported: true"),
        ({**AWQ, "group_size": 0}, "group_size is 0, supported: -1 or"),
        ({**AWQ, "group_size": "128"}, "group_size is '128'"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ({**AWQ, "modules_to_not_convert": [""]}, "modules_to_not_convert is "),
        ({**GPTQ, "bits": 3}, "bits is 3, supported: 4, 8"),
        ({**GPTQ, "bits": 2}, "bits is 2, supported: 4, 8"),
        ({**GPTQ, "bits": 4.0}, "bits is 4.0"),
        ({**GPTQ, "group_size": -2}, "group_size is -2"),
        ({**GPTQ, "sym": "yes"}, "sym is 'yes', supported: true, false"),
        ({**GPTQ, "desc_act": 1}, "desc_act is 1"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', supported: gptq, gptq_v2"),
        ({**GPTQ, "dynamic": [".*down.*"]}, "dynamic is .*supported: an object"),
        ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic has {'bits': 8} for '\+:.*down.*', supported: modules in floats"),
        ({**GPTQ, "dynamic": {".*down.*": {"rotation": None}}}, "dynamic has {'rotation': None} for "),
        ({**GPTQ, "dynamic": {".*down.*": 4}}, "dynamic has 4 for "),
        ({**FP8, "fmt": "e5m2"}, "fmt is 'e5m2', supported: e4m3"),
        ({**FP8, "activation_scheme": 1}, "activation_scheme is 1, supported: dynamic, static"),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\], supported: two numbers"),
        ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size is "),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is .*supported: none"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"u": {}}}}, "transform_config is "),
        ({**COMPRESSED, "config_groups": {}}, "config_groups is {}, supported: one group of settings"),
        ({**COMPRESSED, "config_groups": {"a": {"weights": WEIGHTS}, "b": {"weights": WEIGHTS}}}, "config_groups is "),
        ({**COMPRESSED, "config_groups": {"a": {"weights": None}}}, "config_groups.a.weights is None"),
        (compressed("nvfp4-pack-quantized"), "config_groups.group_0.format is 'nvfp4-pack-quantized', supported: pack-quantized, int-"),
        (compressed("marlin-24"), "format is 'marlin-24'"),
        (compressed(num_bits=3), "weights.num_bits is 3, supported: 4, 8"),
        (compressed("int-quantized"), "weights.num_bits is 4, supported: 8"),
        (compressed(type="float"), "weights.type is 'float', supported: what its format pack-quantized has"),
        (compressed(strategy="tensor_group"), "weights.strategy is 'tensor_group', supported: tensor, channel, group"),
        (compressed(group_size=None), "weights.group_size is None"),
        (compressed("float-quantized", type="float", num_bits=8, strategy="block"), "weights.block_structure is "),
        (compressed("float-quantized", type="float", num_bits=8, strategy="tensor", symmetric=False), "weights.symmetric is False"),
        (compressed(actorder=True), "weights.actorder is True"),
    ],
)
def test_configs_we_would_read_wrongly_are_refused_by_name(table: object, message: str) -> None:
    with pytest.raises(LoadError, match=f"^model/config.json: .*{message}"):
        read(table)
