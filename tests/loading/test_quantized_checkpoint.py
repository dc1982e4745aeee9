"""AWQ and GPTQ folders as checkpoints: one weight for each module, and whatever does not fit refused by its headers."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from octavo.errors import LoadError
from octavo.loading.checkpoint import SafetensorsCheckpoint
from octavo.loading.files import read_header
from octavo.loading.resolve import open_checkpoint, resolve_model
from octavo.loading.shape import StoredWeight, model_shape
from octavo.quant.fp8 import Fp8Weight
from octavo.sizing.model_size import Codes
from tests.support.packers import published
from tests.support.quantized_models import SHAPES, Kind, write_both, write_model
from tests.support.tiny_files import write_files
from tests.support.tiny_quantized import ITEM_BYTES, LAYER, MODULES, Shapes, quantized_files, safetensors, shapes, write_safetensors

KINDS = [Kind(), Kind("gptq", 8, 64, act_order=True, architecture="Qwen2ForCausalLM")]
QUERY = "model.layers.0.self_attn.q_proj"


# promise: model-folder-quantised
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_module_is_one_weight_in_codes_and_in_floats(tmp_path: Path, kind: Kind, sharded: bool) -> None:
    """Also where its tensors lie in different files."""
    quantized, floats = write_both(tmp_path, kind)
    if sharded:
        stored = load_file(quantized / "model.safetensors")
        (quantized / "model.safetensors").unlink()
        weight_map = {name: f"{number % 3}.safetensors" for number, name in enumerate(sorted(stored))}
        for shard in set(weight_map.values()):
            save_file({name: stored[name] for name in stored if weight_map[name] == shard}, quantized / shard)
        (quantized / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint, expected = open_checkpoint(resolve_model(str(quantized))), load_file(floats / "model.safetensors")
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, weight in expected.items():
        assert checkpoint.shape(name) == weight.shape and torch.equal(checkpoint.read(name), weight)
        packed = checkpoint.packed(name)
        assert (packed is not None) == any(name.endswith(f"{module}.weight") for module in SHAPES)
        if packed is not None:
            assert (packed.bits, packed.group, packed.order is not None) == (kind.bits, kind.group_size, kind.act_order)
            assert (packed.dequantize() - weight).abs().max() <= weight.abs().max() * 2**-10


def test_headers_tell_a_plan_what_is_stored(tmp_path: Path) -> None:
    """Codes with the order of their columns, one for projections of the same input; all else as it is."""
    quantized, _ = write_both(tmp_path, KINDS[1])
    found = {weight.name: weight for weight in model_shape(str(quantized)).weights}
    query, key, output = (found[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qko")
    assert query.codes and key.codes and output.codes
    assert query == StoredWeight(f"{QUERY}.weight", "GPTQ", 128 * 128, Codes(8, 64, query.codes.order))
    assert query.codes.order == key.codes.order != "" and output.codes.order not in ("", query.codes.order)
    assert found[f"{QUERY}.bias"] == StoredWeight(f"{QUERY}.bias", "F32", 128) and len(found) == 2 * (7 + 3 + 2) + 3
    alone = {weight.name: weight for weight in model_shape(str(quantized / "config.json")).weights}
    assert alone.keys() == {name for name, weight in found.items() if weight.codes}
    (quantized / "model.safetensors").unlink()
    assert model_shape(str(quantized)).weights == model_shape(str(quantized / "config.json")).weights
    plain, _ = write_both(tmp_path / "plain", Kind("gptq"))
    assert all(weight.codes is None or weight.codes.order == "" for weight in model_shape(str(plain)).weights)


# promise: model-folder-compressed
def test_floats_of_8_bits_are_one_weight_in_codes_and_in_floats(tmp_path: Path) -> None:
    """The headers tell a plan what becomes of them. Scales of activations and of a cache in FP8 belong to nothing."""
    quantized, floats = write_both(tmp_path, Kind("fp8", 8, 64, sym=True))
    stored = load_file(quantized / "model.safetensors")
    extra = {f"{QUERY}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(stored | extra, quantized / "model.safetensors")
    checkpoint, expected = open_checkpoint(resolve_model(str(quantized))), load_file(floats / "model.safetensors")
    assert sorted(checkpoint.names()) == sorted(expected)
    assert all(torch.equal(checkpoint.read(name), weight) for name, weight in expected.items())
    packed = checkpoint.packed(f"{QUERY}.weight")
    assert isinstance(packed, Fp8Weight) and (packed.fold().bits, packed.fold().group) == (8, 32)
    found = {weight.name: weight for weight in model_shape(str(quantized)).weights}
    assert found[f"{QUERY}.weight"] == StoredWeight(f"{QUERY}.weight", "FP8", 128 * 128, Codes(8, 32, fp8_span=128))


def test_words_tell_a_plan_what_is_stored(tmp_path: Path) -> None:
    quantized, _ = write_both(tmp_path, Kind("words", group_size=64))
    for path in (quantized, quantized / "config.json"):
        found = {weight.name: weight for weight in model_shape(str(path)).weights}
        down = "model.layers.1.mlp.down_proj.weight"
        assert found[down] == StoredWeight(down, "W4A16", 128 * 256, Codes(4, 64))


def test_numbers_that_no_header_shows_are_refused_when_they_are_read(tmp_path: Path) -> None:
    source = published(16, 64, 32, 4, seed=1, act_order=True)
    tensors = source.gptq(QUERY, first_format=True)
    tensors[f"{QUERY}.scales"][1, 3] = torch.inf
    config = {"quantization_config": Kind("gptq", act_order=True).config}
    checkpoint = open_checkpoint(resolve_model(str(write_model(tmp_path / "scales", config, tensors))))
    for read in (checkpoint.read, checkpoint.packed):
        with pytest.raises(LoadError, match=rf"^{tmp_path}/scales: {QUERY}.scales: a scale .*is not finite"):
            read(f"{QUERY}.weight")
    tensors = source.gptq(QUERY, first_format=True) | {f"{QUERY}.g_idx": torch.full((64,), 2**30, dtype=torch.int32)}
    checkpoint = open_checkpoint(resolve_model(str(write_model(tmp_path / "order", config, tensors))))
    with pytest.raises(LoadError, match=f"^{tmp_path}/order: {QUERY}.g_idx does not put 32 of 64 input columns into each group"):
        checkpoint.read(f"{QUERY}.weight")


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[str, str, str, Shapes]:
    """(method, module, part, tensors) with one tensor of a module left out or made something else."""
    method = draw(st.sampled_from(["awq", "gptq"]))
    module = LAYER + draw(st.sampled_from([name for name in MODULES if name != "self_attn.o_proj"]))
    part = draw(st.sampled_from(["qweight", "qzeros", "scales"]))
    tensors = shapes(method)
    dtype, shape = tensors.pop(f"{module}.{part}")
    size = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 24, 32, 64, 1000])
    other = draw(st.none() | st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.just(shape) | st.lists(size, max_size=3)))
    if other is not None and other != (dtype, shape):
        tensors[f"{module}.{part}"] = other
    return method, module, part, tensors


# promise: model-folder-quantised
@given(spoiled())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
def test_a_spoiled_tensor_is_refused_by_the_name_of_its_module_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str, str, Shapes]
) -> None:
    method, module, part, tensors = case
    monkeypatch.setattr(SafetensorsCheckpoint, "_stored", lambda *_: pytest.fail("a weight was read"))
    folder = write_files(tmp_path / "model", quantized_files(method))
    write_safetensors(folder / "model.safetensors", tensors)
    try:
        checkpoint = open_checkpoint(resolve_model(str(folder)))
        model_shape(str(folder))
    except LoadError as error:
        assert module in str(error) and str(folder) in str(error)
        return
    opened = tensors.get(f"{module}.{part}")
    if part == "qweight":  # nothing says any more that it is quantised: no model knows the names that are left
        assert opened is None and f"{module}.qzeros" in checkpoint.names()
    else:  # scales of another float type
        assert part == "scales" and opened is not None and opened[0] in ("F16", "F32")
        assert checkpoint.shape(f"{module}.weight") == MODULES[module.removeprefix(LAYER)]


def test_a_header_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(shapes("gptq")))
    found, begin = read_header(path)
    assert {name: (entry.dtype, list(entry.shape)) for name, entry in found.items()} == shapes("gptq")
    assert begin + max(entry.stop for entry in found.values()) == path.stat().st_size
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LoadError, match=r"pipe: not a valid safetensors file \(not a regular file\)"):
        read_header(tmp_path / "pipe")
    for content in (b"", b"\xff" * 16, (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"a": {}}'):
        path.write_bytes(content)
        with pytest.raises(LoadError, match=f"^{path}: not a valid safetensors file"):
            read_header(path)
