"""Quantised models as a GPU keeps them, codes that stay codes and 8-bit floats, on the runner of a device: the kernels' twins compute.

They say what the same models in the floats of those codes say, they take the bytes that were planned, and paging stays invisible.
"""

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.config import EngineConfig, Quantization
from octavo.engine.verify import verify
from octavo.loading import requantized
from octavo.loading.requantized import as_wanted
from octavo.loading.resolve import load_model_config, open_checkpoint, resolve_model
from octavo.loading.shape import model_shape
from octavo.models.decoder import Decoder
from tests.support.greedy import same_greedy_text
from tests.support.models import tiny_model, to_gguf
from tests.support.quantized_models import Kind, write_both, write_model
from tests.support.soaked import rarely

PROMPTS = [[(7 * i + j * j) % 300 for j in range(3 + 20 * i)] for i in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=4)


@dataclass(frozen=True)
class Form:
    """A checkpoint of a test, and how it is to be kept."""

    folder: Kind | None = None  # AWQ, GPTQ or FP8
    gguf: str | None = None  # or a GGUF file of this kind, or floats
    kinds: dict[str, str] = field(default_factory=dict)
    tie: bool = False
    quantization: Quantization = "auto"
    floats: str = ""  # what the log says of matrices that cannot be codes

    def write(self, folder: Path) -> Path:
        if self.folder is not None:
            return write_both(folder, self.folder)[0]
        tiny = tiny_model(folder / "hf", "Qwen2ForCausalLM", seed=5, tie=self.tie)
        return tiny if self.gguf is None else to_gguf(tiny, folder / "m.gguf", self.gguf, kinds=self.kinds)


FORMS = {
    "AWQ with biases": Form(Kind(group_size=64, architecture="Qwen2ForCausalLM")),
    "GPTQ with act-order": Form(Kind("gptq", group_size=32, act_order=True)),
    "GPTQ with spawn that differ": Form(Kind("gptq", group_size=32, act_order=True, own_orders=True), floats="2 qkv, 2 gate_up"),
    "GGUF, also the vocabulary": Form(gguf="Q8_0", tie=True),
    "GGUF of several kinds": Form(gguf="Q4_0", kinds={"attn_v": "F16", "ffn_up": "Q8_0", "ffn_down": "Q5_0"}, floats="2 qkv"),
    "FP8 in blocks": Form(Kind("fp8", 8, 64, sym=True)),
    "FP8 by rows, with biases": Form(Kind("fp8", 8, 64, sym=True, scales="rows", compressed=True, architecture="Qwen2ForCausalLM")),
    "FP8 of whole matrices": Form(Kind("fp8", 8, 64, sym=True, scales="tensor")),
    "int4 of floats": Form(quantization="int4"),
    "int8 of codes": Form(gguf="Q4_0", quantization="int8"),
    "floats of codes": Form(gguf="Q8_0", quantization="none"),
}


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=device,check=1")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "octavo")
    return caplog


def heads(said: pytest.LogCaptureFixture) -> list[str]:
    """Warnings up to their reasons, but for that of a debugging switch."""
    warnings = [record.message for record in said.records if record.levelno == logging.WARNING]
    return [re.split(r" \(|; --quantization", message)[0] for message in warnings if not message.startswith("OCTAVO_DEBUG")]


def run(path: Path, **engine: Any) -> tuple[list[RequestOutput], Decoder]:
    settings = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 60, "max_num_seqs": 4, "dtype": "float32", **engine}
    with LLM(str(path), **settings) as llm:
        model = llm._core.executor.program.eager.model  # type: ignore[attr-defined]
        return llm.generate(PROMPTS, PARAMS, use_tqdm=False), model


def in_floats(path: Path, quantization: Quantization, folder: Path) -> Path:
    """A folder with the very numbers that codes stand for; what cannot be codes as it is stored."""
    source = resolve_model(str(path))
    config = load_model_config(source)
    stored = as_wanted(open_checkpoint(source), quantization, config, form="cuda")
    kept = {part for one in model_shape(str(path)).kept("float32", quantization, "cuda") if one.codes for part in one.matrix.parts}
    packed = {name: stored.packed(name) if name in kept else None for name in stored.names()}
    floats = {name: stored.read(name) if codes is None else codes.dequantize() for name, codes in packed.items()}
    spec = config.attention()
    shape = {
        "hidden_size": config.hidden_size, "intermediate_size": config.layers[0].mlp.inner, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "num_hidden_layers": config.num_layers, "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm.eps, "tie_word_embeddings": config.tie_embeddings, "max_position_embeddings": config.max_position,
        "head_dim": spec.head_dim, "rope_theta": spec.rope.theta,
    }  # fmt: skip
    weights = {name: weight.float() for name, weight in floats.items()}
    return write_model(folder, {"architectures": [config.architecture], **shape}, weights)


def small_shape(folder: Path, hidden: int, inner: int) -> Path:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 320, **shape}))
    return folder


# promise: quantised-weights-stay
@pytest.mark.parametrize("name", FORMS)
def test_codes_say_what_their_floats_say_and_take_what_was_planned(tmp_path: Path, name: str, said: pytest.LogCaptureFixture) -> None:
    form = FORMS[name]
    path = form.write(tmp_path)
    found, model = run(path, quantization=form.quantization)
    reference, floats = run(in_floats(path, form.quantization, tmp_path / "in floats"))
    assert all(same_greedy_text(one, other) for one, other in zip(reference, found, strict=True))
    needs = model_shape(str(path)).needs("float32", form.quantization, device="cuda")
    assert model.nbytes == needs.weights and needs.keeps_codes
    assert (model.nbytes < 0.8 * floats.nbytes) == (form.quantization != "none")
    assert {layer.small_batch.rows for layer in model.layers} == {floats.layers[0].small_batch.rows} != {0}  # of the fused kernels
    expected = [f"Some matrices are kept as float32, not quantised: {form.floats}"] if form.floats else []
    assert heads(said) == (expected if name != "int8 of codes" else ["The weights are quantised already and are quantised again"])


# promise: quantised-weights-stay
@pytest.mark.parametrize(
    ("name", "depth"), [("GPTQ with spawn that differ", 1), ("FP8 in blocks", 2), *rarely(("GGUF, also the vocabulary", 2))]
)
def test_paging_is_invisible(tmp_path: Path, name: str, depth: int) -> None:
    path = FORMS[name].write(tmp_path)
    source = resolve_model(str(path))
    verified = verify(EngineConfig(model=str(path), dtype="float32", block_size=4), source, load_model_config(source), depth, 16)
    assert verified.compared.cache_values > 10_000


def test_rows_that_are_no_whole_groups_stay_floats_and_it_is_said(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    _, model = run(small_shape(tmp_path, 64, 72), load_format="dummy", quantization="int4")
    assert heads(said) == ["Some matrices are kept as float32, not quantised: 2 down"]
    assert model.nbytes == model_shape(str(tmp_path / "config.json")).needs("float32", "int4", device="cuda").weights


def test_dummy_weights_of_one_group_are_the_same_for_every_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"load_format": "dummy", "quantization": "int4", "seed": 3}
    found, _ = run(small_shape(tmp_path, 96, 160), **settings)  # rows of no more than groups of 32
    monkeypatch.setenv("OCTAVO_DEBUG", "native=off")
    with LLM(str(tmp_path), **settings, dtype="float32", skip_tokenizer_init=True) as llm:
        plain = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert all(same_greedy_text(one, other) for one, other in zip(plain, found, strict=True))


def test_floats_become_codes_in_groups_of_128_where_rows_allow_it(tmp_path: Path) -> None:
    _, model = run(small_shape(tmp_path, 128, 192), load_format="dummy", quantization="int4")
    mlp = model.layers[0].mlp
    assert (mlp.gate_up.codes.group, mlp.down.codes.group) == (128, 64)
    assert model.nbytes == model_shape(str(tmp_path / "config.json")).needs("float32", "int4", device="cuda").weights


def test_dummy_weights_are_drawn_as_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is quantised, and codes spread as the floats do."""
    monkeypatch.setattr(requantized, "quantize", None)
    tiny = tiny_model(tmp_path, "Qwen3ForCausalLM", seed=5)
    spread = {}
    for quantization in ("auto", "int8", "int4"):
        found, model = run(tiny, load_format="dummy", quantization=quantization, seed=3)
        assert model.nbytes == model_shape(str(tiny / "config.json")).needs("float32", quantization, device="cuda").weights  # type: ignore[arg-type]
        down = model.layers[1].mlp.down
        spread[quantization] = float(down(torch.eye(128)).std())
        again, _ = run(tiny, load_format="dummy", quantization=quantization, seed=3)
        other, _ = run(tiny, load_format="dummy", quantization=quantization, seed=4)
        ids = [[output.outputs[0].token_ids for output in outputs] for outputs in (found, again, other)]
        assert ids[0] == ids[1] != ids[2]
    assert spread["int8"] == pytest.approx(spread["auto"], rel=0.1) and spread["int4"] == pytest.approx(spread["auto"], rel=0.1)
