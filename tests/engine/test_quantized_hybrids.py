"""Quantised folders of models with recurrent layers, with the modules in codes that published ones have, against their floats.

    FP8 (Qwen)     all matrices except embeddings, the head, gates, routers and the convolution; the layers that predict further tokens, too
    GPTQ (Qwen)    only MLPs or experts; `dynamic` lists what is not in codes
    AWQ, W4A16     all but gates, convolution and routers, named by `modules_to_not_convert` or `ignore`
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, RequestOutput, SamplingParams
from octavo.kernels.reference import layer, products
from octavo.loading.packed_modules import PackedModule
from octavo.loading.shape import model_shape
from octavo.models.split import Part
from octavo.quant import schemes
from octavo.quant.fp8 import folded
from tests.support.families import Tiny, family_model
from tests.support.hybrids import HYBRIDS, with_images
from tests.support.quantized_models import Kind, quantise
from tests.support.rounding import differences
from tests.support.soaked import rarely

WHOLE_GROUPS = {"hidden_size": 64, "intermediate_size": 64}
EXPERTS = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
ALL_BUT_GATES = r"(linear_attn\.(in_proj_(qkv|z|qkvz)|out_proj)|self_attn\.._proj|(gate|up|down)_proj)$"
LEFT = ["lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", "conv1d", "mlp.gate", "shared_expert_gate", "visual"]
DYNAMIC = {"lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}}
CASES: dict[str, tuple[str, Kind, str, dict[str, Any]]] = {
    "AWQ": ("qwen3.5", Kind(), ALL_BUT_GATES, {"modules_to_not_convert": LEFT}),
    "GPTQ of experts, with images": ("qwen3.5 moe", Kind("gptq", sym=True), r"mlp\.experts\.", {"dynamic": DYNAMIC | {"-:.*visual.*": {}}}),
    "FP8": ("qwen3-next", Kind("fp8", 8, 64, sym=True), ALL_BUT_GATES, {"modules_to_not_convert": LEFT}),
    "FP8, with images": ("qwen3.5", Kind("fp8", 8, 64, sym=True), ALL_BUT_GATES, {"modules_to_not_convert": LEFT}),
    "GPTQ with act-order": ("qwen3-next", Kind("gptq", act_order=True), ALL_BUT_GATES, {}),
    "compressed words": ("qwen3.5", Kind("words", group_size=32), ALL_BUT_GATES, {"ignore": LEFT}),
    "compressed bytes": ("qwen3-next", Kind("bytes", 8, -1, sym=True), ALL_BUT_GATES, {"ignore": LEFT}),
}  # fmt: skip
OFTEN = ("AWQ", "GPTQ of experts, with images", "FP8")
PROMPTS = [[(7 * i + j * j) % 60 + 3 for j in range(5 + 20 * i)] for i in range(3)]
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 4, "dtype": "float32"}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=2)


def tiny_of(name: str) -> Tiny:
    tiny = HYBRIDS[name]
    return replace(tiny, options=tiny.options | WHOLE_GROUPS | (EXPERTS if "num_experts" in tiny.options else {}))


def run(folder: Path, **engine: Any) -> list[RequestOutput]:
    with LLM(str(folder), **SETTINGS, **engine) as llm:
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def numbers(outputs: list[RequestOutput]) -> list[object]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


def with_further_layer(folder: Path) -> None:
    """A layer that predicts further tokens, beside the model: a copy of the last one."""
    weights = load_file(folder / "model.safetensors")
    last = max(name.partition(".layers.")[2].partition(".")[0] for name in weights if ".layers." in name)
    of_last = {name.partition(f".layers.{last}.")[2]: weight for name, weight in weights.items() if f".layers.{last}." in name}
    weights |= {f"mtp.layers.0.{name}": weight.clone() for name, weight in of_last.items()}
    hidden = len(of_last["input_layernorm.weight"])
    save_file(weights | {"mtp.fc.weight": torch.zeros(hidden, 2 * hidden)}, folder / "model.safetensors", metadata={"format": "pt"})


def rounded(folder: Path, quantization: str, patch: pytest.MonkeyPatch) -> list[RequestOutput]:
    """The outputs of torch with the numbers that the native kernels multiply: codes of weights, and of activations in groups of 32.

    Comparing with unrounded ones proves little: a delta net divides by norms of sums that cancel, so that rounding goes a long way.
    """
    shape, storages = model_shape(str(folder)), set[int]()
    in_codes = {f"{one.matrix.module}.weight" for one in shape.kept("float32", quantization) if one.codes is not None}  # type: ignore[arg-type]
    assert in_codes and not any("gates" in name or "router" in name for name in in_codes)

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() in storages:
            groups = x.view(len(x), -1, 32)
            scale = groups.abs().amax(-1, keepdim=True) / 127
            x = ((groups / scale.where(scale > 0, 1)).round() * scale).view(x.shape)
        return products.multiply(x, weight, bias, out)

    def floats(module: PackedModule, read: Callable[[str], Tensor], part: Part) -> Tensor:
        codes = module.codes(read, part)
        assert codes is not None
        return folded(codes).dequantize()  # on a CPU, 8-bit floats become integers

    with patch.context() as context:
        context.setattr(PackedModule, "floats", floats)
        context.setattr(schemes, "multiply", multiply)
        context.setattr(layer, "multiply", multiply)
        with LLM(str(folder), **SETTINGS, native=False, quantization=quantization) as llm:  # type: ignore[arg-type]
            program: Any = llm._core.executor.program  # type: ignore[attr-defined]
            storages |= {weight.untyped_storage().data_ptr() for name, weight in program.model.named_parameters() if name in in_codes}
            assert len(storages) == len(in_codes)
            return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def assert_same_numbers(found: list[RequestOutput], reference: list[RequestOutput]) -> str:
    """Up to the order of sums, and the few activations that this moves to the next code: by less than a tenth of what rounding does."""
    off = torch.tensor(differences(found, reference))
    rms = float(off.square().mean().sqrt())
    assert len(off) > 100 and rms < 0.02, rms
    return f"{rms:.2g}"


# promise: model-folder-quantised
@pytest.mark.parametrize("name", [name if name in OFTEN else rarely(name)[0] for name in CASES])
def test_a_quantised_hybrid_says_what_its_floats_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    of_model, kind, chosen, table = CASES[name]
    source, tiny = tmp_path / "source", tiny_of(of_model)
    if "images" in name:
        with_images(source, tiny, seed=41)
    else:
        family_model(source, tiny, seed=41)
    with_further_layer(source)
    quantized, floats = quantise(source, tmp_path, kind, chosen, table)
    assert numbers(run(quantized, native=False)) == numbers(run(floats, native=False))
    if kind.act_order:  # each module has an order of its own here, so merged ones become floats
        return
    shape = model_shape(str(quantized))
    assert not any(shape.expands(one, "auto") for one in shape.kept("float32", "auto"))
    record_property(name, assert_same_numbers(run(quantized), rounded(quantized, "auto", monkeypatch)))


# promise: llm-quantization
@pytest.mark.parametrize(("name", "quantization"), [("qwen3.5", "int4"), *rarely(("qwen3-next", "int4"), ("qwen3.5 moe", "int8"))])
def test_a_hybrid_is_quantised_at_load(name: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family_model(tmp_path / "model", tiny_of(name), seed=42)
    assert_same_numbers(run(folder, quantization=quantization), rounded(folder, quantization, monkeypatch))
