"""quantization_config of AWQ and GPTQ models: what is read, and what is refused by name."""

import pytest

from octavo.errors import LoadError
from octavo.quant.quant_config import QuantConfig, read_quant_config

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "damp_percent": 0.1, "dynamic": {}}


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
    config = read({**AWQ, "modules_to_not_convert": ["lm_head", "visual"]})
    assert config is not None and config.converts("model.layers.0.mlp.up_proj") and not config.converts("visual.blocks.0.proj")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("awq", "quantization_config must be an object, got 'awq'"),
        ({"bits": 4}, r"quantization_config.quant_method is '\(missing\)', supported: awq, gptq"),
        ({**AWQ, "quant_method": "fp8"}, "quant_method is 'fp8', supported: awq, gptq"),
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
        ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, "dynamic is "),
    ],
)
def test_configs_we_would_read_wrongly_are_refused_by_name(table: object, message: str) -> None:
    with pytest.raises(LoadError, match=f"^model/config.json: .*{message}"):
        read(table)


def test_another_scheme_is_refused_by_name() -> None:
    with pytest.raises(LoadError, match=r"^model/config.json: compression_config is not supported; supported: .*awq, gptq"):
        read_quant_config({"compression_config": {"format": "pack-quantized"}}, "model/config.json")
