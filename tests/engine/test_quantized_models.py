"""AWQ and GPTQ folders say what their floats say: torch to the last bit, the native program on codes nearly; and `quantization`."""

import json
import logging
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.loading.requantized import as_wanted
from octavo.loading.resolve import load_model_config, open_checkpoint, resolve_model
from octavo.loading.shape import model_shape
from octavo.outputs import RequestOutput
from octavo.sizing.model_size import Codes
from tests.cli.processes import octavo
from tests.support.models import tiny_model, to_gguf
from tests.support.quantized_models import Kind, write_both
from tests.support.rounding import PRODUCTS, assert_near, both, share_of_float, share_of_float32, share_of_int4, share_of_int8
from tests.support.soaked import one_in

QWEN = "Qwen2ForCausalLM"  # with biases
KINDS = {
    "AWQ of 32": Kind(),
    "AWQ of 64, with biases": Kind(group_size=64, architecture=QWEN),
    "AWQ of 128": Kind(group_size=128, tie=True),
    "AWQ of whole rows": Kind(group_size=-1),
    "GPTQ of 128": Kind("gptq", group_size=128, sym=True),
    "GPTQ of 32 with act-order and biases": Kind("gptq", group_size=32, act_order=True, architecture=QWEN),
    "GPTQ v2 of 64 with act-order": Kind("gptq", group_size=64, sym=True, act_order=True, first_format=False),
    "GPTQ of 8 bits and whole rows": Kind("gptq", 8, -1),
    "GPTQ of 8 bits with act-order": Kind("gptq", 8, 64, sym=True, act_order=True, tie=True),
    "GPTQ with spawn that differ": Kind("gptq", group_size=32, act_order=True, own_orders=True),
    "compressed words of 4 bits": Kind("words", group_size=64, architecture=QWEN),
    "compressed words of 8 bits and whole rows": Kind("words", 8, -1, sym=True),
    "compressed words with act-order": Kind("words", group_size=32, act_order=True, tie=True),
    "compressed bytes": Kind("bytes", 8, -1, sym=True),
    "FP8 in blocks": Kind("fp8", 8, 64, sym=True),
}
PROMPTS = [[(7 * i + j * j) % 300 for j in range(5 + 20 * i)] for i in range(3)]
LAYERS = 2
# tests/support/rounding.py derives the bounds. The native program multiplies weights in codes by activations that are rounded to 8 bits in
# groups of 32. On some levels it multiplies in bfloat16 in steps of more than 16 tokens, which rounds 14 times in a layer: both factors of
# five products, queries, keys, values and weights of attention. Unquantised, it computes in float32: sums of up to 256 terms.
ROUNDED, EXACT = both(sqrt(14 / PRODUCTS) * share_of_float(7), share_of_int8(32)), share_of_float32(256)
AS_INT8, AS_INT4 = both(ROUNDED, share_of_int8(32)), both(ROUNDED, share_of_int4(32))  # what rounding the weights adds
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=2)


def run(folder: Path, **engine: Any) -> tuple[list[RequestOutput], int]:
    """Outputs, and the bytes of the weights."""
    settings = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 60, "max_num_seqs": 4, "dtype": "float32", **engine}
    with LLM(str(folder), **settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return outputs, llm._core.executor.program.nbytes  # type: ignore[attr-defined]


def numbers(outputs: list[RequestOutput]) -> list[object]:
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What was said about weights. A thread of an earlier test may say something else."""
    caplog.set_level(logging.WARNING, "octavo")
    return lambda: [text for text in caplog.messages if "quanti" in text]


# promise: model-folder-quantised
@pytest.mark.parametrize("name", one_in(2, KINDS))
def test_a_quantised_folder_says_what_its_floats_say(
    tmp_path: Path, name: str, record_property: Callable[[str, object], None]
) -> None:
    kind = KINDS[name]
    quantized, floats = write_both(tmp_path, kind)
    reference, _ = run(floats, native=False)
    assert numbers(run(quantized, native=False)[0]) == numbers(reference)
    packed, nbytes = run(quantized)
    weights = share_of_int8(32) if kind.method == "fp8" else 0.0
    record_property(name, assert_near(packed, reference, both(ROUNDED, weights), LAYERS))
    small, _ = run(quantized, max_num_batched_tokens=16)
    record_property(f"{name}, in small steps", assert_near(small, reference, both(ROUNDED, weights), LAYERS))
    assert nbytes == model_shape(str(quantized)).needs("float32", native_threads=1).weights
    dense, dense_bytes = run(quantized, quantization="none")
    assert_near(dense, reference, EXACT, LAYERS)
    layers = 2 * (128 * 256 + 128 * 128 + 3 * 256 * 128)  # weights of linear layers
    saved = 2 * (128 * 128 + 256 * 128) if kind.own_orders else layers  # q, k, v and gate, up become floats there
    assert dense_bytes - nbytes > saved * (4 - kind.bits / 8 - 0.3)


MISTAKES: dict[str, tuple[Kind, str, Callable[[Tensor], Tensor]]] = {
    "zero points off by one": (Kind(), "mlp.down_proj.qzeros", lambda zeros: zeros + 0x11111111),
    "scales of other groups": (Kind(), "self_attn.o_proj.scales", lambda scales: scales.roll(1, 0)),
    "words in another order": (Kind(), "self_attn.v_proj.qweight", lambda words: words.roll(1, 1)),
    "groups transposed": (Kind("words", group_size=64), "self_attn.o_proj.weight_scale", lambda scales: scales.T.reshape(scales.shape)),
    "a block's scale halved": (Kind("fp8", 8, 64, sym=True), "mlp.down_proj.weight_scale_inv", lambda scale: scale / torch.tensor([2, 1])),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_one_matrix_is_larger_than_rounding(tmp_path: Path, mistake: str) -> None:
    kind, name, spoil = MISTAKES[mistake]
    quantized, floats = write_both(tmp_path, kind)
    weights = {key: weight.clone() for key, weight in load_file(quantized / "model.safetensors").items()}
    weights[f"model.layers.0.{name}"] = spoil(weights[f"model.layers.0.{name}"]).contiguous()
    save_file(weights, quantized / "model.safetensors")
    reference, share = run(floats, native=False)[0], AS_INT8 if kind.method == "fp8" else ROUNDED
    with pytest.raises(AssertionError, match="of the bound"):
        assert_near(run(quantized)[0], reference, share, LAYERS)


# promise: llm-quantization
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
@pytest.mark.parametrize(("quantization", "bits", "share"), [("int8", 9.2, AS_INT8), ("int4", 6.5, AS_INT4)], ids=["int8", "int4"])
def test_floats_are_quantised_at_load_and_take_less(
    tmp_path: Path, architecture: str, quantization: str, bits: float, share: float, record_property: Callable[[str, object], None]
) -> None:
    """Groups of 32 take 5 bits a weight, the head, a quarter of this model, 8.5."""
    folder = tiny_model(tmp_path, architecture, seed=5, tie=architecture == "Qwen2ForCausalLM")
    reference, floats = run(folder, native=False)
    packed, nbytes = run(folder, quantization=quantization)
    record_property(quantization, assert_near(packed, reference, share, LAYERS))
    assert nbytes == pytest.approx(model_shape(str(folder)).needs("float32", quantization, native_threads=1).weights, rel=0.01)  # type: ignore[arg-type]
    embedding = 0 if architecture == "Qwen2ForCausalLM" else 320 * 64 * 4
    assert nbytes - embedding < (floats - embedding) / 32 * bits
    again, same = run(folder, native=False, quantization=quantization)
    assert same == floats, "torch saves nothing"
    assert_near(packed, again, ROUNDED, LAYERS)  # nearer to the numbers that codes stand for than to the floats


# promise: llm-quantization
def test_torch_gets_the_numbers_that_the_codes_stand_for(tmp_path: Path) -> None:
    """Every matrix but an embedding of its own; a width that is no whole group stays floats."""
    source = resolve_model(str(tiny_model(tmp_path, "LlamaForCausalLM", seed=5)))
    stored, config = open_checkpoint(source), load_model_config(source)
    for quantization, bits in (("int8", 8), ("int4", 4)):
        wanted = as_wanted(stored, quantization, config)  # type: ignore[arg-type]
        for name in stored.names():
            packed, plain = wanted.packed(name), stored.read(name)
            assert (packed is None) == (plain.dim() == 1 or name == "model.embed_tokens.weight")
            assert torch.equal(wanted.read(name), plain if packed is None else packed.dequantize())
            if packed is not None:
                assert (packed.bits, packed.group) == ((8, 64) if bits == 8 or name == "lm_head.weight" else (4, 32))
                assert (packed.dequantize() - plain).abs().max() < plain.abs().max() * (1 / 250 if packed.bits == 8 else 2 / 15)


def test_what_does_not_divide_into_groups_stays_floats_and_runs(tmp_path: Path) -> None:
    """Rows of 24 and 72: no whole groups; and a width of the MLP, 40, that fills no panel."""
    for hidden, inner in ((24, 72), (32, 40)):
        folder = tmp_path / str(hidden)
        folder.mkdir()
        shape = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12}
        config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 320, "num_hidden_layers": 2, **shape}
        (folder / "config.json").write_text(json.dumps(config))
        found, nbytes = run(folder, load_format="dummy", quantization="int4")
        assert_near(found, run(folder, load_format="dummy", native=False, quantization="int4")[0], ROUNDED, LAYERS)
        planned = model_shape(str(folder / "config.json")).needs("float32", "int4", native_threads=1).weights
        assert nbytes == pytest.approx(planned, rel=0.05)


# promise: llm-quantization
def test_codes_are_quantised_again_and_torch_saves_nothing_with_a_warning_each(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    path = to_gguf(tiny_model(tmp_path / "hf", "LlamaForCausalLM", seed=5), tmp_path / "m.gguf", "Q8_0")
    as_is, nbytes = run(path)
    assert not warnings()
    fewer, fewer_bytes = run(path, quantization="int4")
    assert_near(fewer, as_is, AS_INT4, LAYERS)
    assert fewer_bytes < nbytes and len(warnings()) == 1
    run(path, native=False, quantization="int8")
    assert "The weights are quantised already and are quantised again; --quantization auto keeps them as they are" in warnings()[0]
    assert "--quantization int8 saves no memory here" in warnings()[2] and len(warnings()) == 3


def test_parts_that_are_not_of_one_kind_are_merged_or_floats_as_planned(tmp_path: Path) -> None:
    """q and k in 4 bits beside v in floats: floats; gate in 4 bits beside up in 8: 8."""
    kinds = {"attn_v": "F16", "ffn_up": "Q8_0", "ffn_down": "Q5_0"}
    path = to_gguf(tiny_model(tmp_path / "hf", "Qwen2ForCausalLM", seed=5), tmp_path / "m.gguf", "Q4_0", kinds=kinds)
    shape = model_shape(str(path))
    kept = {one.matrix.name: one.codes for one in shape.kept("float32", "auto")}
    assert kept == {"qkv": None, "output": Codes(4, 32), "gate_up": Codes(8, 32), "down": Codes(8, 32), "head": Codes(4, 32)}
    found, nbytes = run(path)
    assert nbytes == pytest.approx(shape.needs("float32", native_threads=1).weights, rel=0.01)
    assert_near(found, run(path, native=False)[0], ROUNDED, LAYERS)


# promise: quantization-q-auto
def test_names_of_other_engines_are_refused_with_what_to_say_instead() -> None:
    said = r"^quantization must be one of auto, none, int8, int4, got 'awq': auto reads what the file holds \(awq, gptq, fp8, gguf\)$"
    with pytest.raises(ConfigError, match=said):
        LLM(quantization="awq")  # type: ignore[arg-type]
    refused = octavo("generate", "x", "-q", "gptq")
    said = "invalid choice: 'gptq' (choose from auto, none, int8, int4): auto reads what the file holds"
    assert refused.returncode == 2 and said in refused.stderr


# promise: quantization-q-auto
@pytest.mark.soak
def test_the_command_line_quantises_the_default_model() -> None:
    run = octavo("generate", "Hello", "-q", "int4", "--max-tokens", "2", env={"OCTAVO_LOG_LEVEL": "INFO"})
    assert run.returncode == 0 and "quantised already and are quantised again" in run.stderr and "Model loading took 0.09 GiB" in run.stderr
