"""Checkpoints: every weight comes back under its Hugging Face name, and a damaged folder or file is refused by name."""

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import LoadError
from octavo.kernels.reference.dequant import QUANTISED, SUPPORTED_KINDS
from octavo.loading.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint
from octavo.loading.gguf import KINDS, read_gguf
from octavo.loading.resolve import load_model_config, resolve_model
from tests.support.models import tiny_model, to_gguf

ARCHITECTURES = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def all_weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    assert all(checkpoint.shape(name) == weight.shape for name, weight in weights.items())
    return weights


def assert_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, expected[name]), name


# -- GGUF


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tie", [False, True])
def test_gguf_gives_back_the_weights_and_the_config_it_was_made_of(tmp_path: Path, architecture: str, tie: bool) -> None:
    folder = tiny_model(tmp_path / "hf", architecture, seed=3, tie=tie)
    path = to_gguf(folder, tmp_path / "m.gguf", "F32")
    assert_equal(all_weights(GGUFCheckpoint(read_gguf(path))), load_file(folder / "model.safetensors"))
    from_folder, from_gguf = (load_model_config(resolve_model(str(source))) for source in (folder, path))
    assert from_gguf.norm.eps == pytest.approx(from_folder.norm.eps) and from_gguf.dtype is None
    layers = tuple(replace(layer, norm=from_folder.norm) for layer in from_gguf.layers)  # an epsilon is a float32 there
    assert replace(from_gguf, norm=from_folder.norm, layers=layers, dtype=from_folder.dtype) == from_folder


# Kind, and the dtype it is or the part of the largest weight that it may be off
STORED: list[tuple[str, torch.dtype | float]] = [
    ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", 0.01), ("Q5_1", 0.08), ("Q5_0", 0.08), ("Q4_1", 0.15), ("Q4_0", 0.15),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stored"), STORED)
def test_gguf_of_every_kind_is_near_the_original(tmp_path: Path, kind: str, stored: torch.dtype | float) -> None:
    folder = tiny_model(tmp_path / "hf", "LlamaForCausalLM", seed=4)
    original = load_file(folder / "model.safetensors")
    for name, weight in all_weights(GGUFCheckpoint(read_gguf(to_gguf(folder, tmp_path / "m.gguf", kind)))).items():
        expected = original[name]
        if expected.dim() == 1:
            assert torch.equal(weight, expected)
        elif isinstance(stored, torch.dtype):
            assert torch.equal(weight, expected.to(stored))
        else:
            assert weight.dtype == torch.float32
            assert (weight - expected).abs().max() < expected.abs().max() * stored


def random_rows(kind: str, rows: int, groups: int) -> np.ndarray:
    group_bytes = next(num_bytes for name, _, num_bytes in KINDS.values() if name == kind)
    return np.random.default_rng(rows).integers(0, 256, (rows, groups * group_bytes), dtype=np.uint8)


def test_gguf_of_mixed_kinds_gives_each_tensor_its_own_numbers(tmp_path: Path) -> None:
    import gguf

    folder = tiny_model(tmp_path / "hf", "LlamaForCausalLM", seed=8)
    packed = {layer: (kind, random_rows(kind, 3 + layer, 2)) for layer, kind in enumerate(QUANTISED, 2)}
    extra = {f"blk.{layer}.ffn_down.weight": stored for layer, stored in packed.items()}
    checkpoint = GGUFCheckpoint(read_gguf(to_gguf(folder, tmp_path / "m.gguf", "Q8_0", packed=extra)))
    for layer, (kind, rows) in packed.items():
        with np.errstate(all="ignore"):  # some of the random scales are infinite
            expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        assert checkpoint.shape(name) == expected.shape
        assert np.array_equal(checkpoint.read(name).numpy(), expected, equal_nan=True), kind


def test_gguf_llama_biases_are_put_in_order_too(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "hf", "LlamaForCausalLM", seed=5)
    weights = load_file(folder / "model.safetensors")
    for layer in range(2):
        for part, width in (("q_proj", 64), ("k_proj", 32), ("v_proj", 32), ("o_proj", 64)):
            weights[f"model.layers.{layer}.self_attn.{part}.bias"] = torch.randn(width)
    save_file(weights, folder / "model.safetensors")
    path = to_gguf(folder, tmp_path / "m.gguf", "F32")
    assert_equal(all_weights(GGUFCheckpoint(read_gguf(path))), weights)
    config = load_model_config(resolve_model(str(path)))
    assert config.qkv_bias and config.output_bias and not config.mlp_bias


def test_gguf_tensors_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "hf", "LlamaForCausalLM", seed=6)

    def open_with(name: str, weight: torch.Tensor) -> GGUFCheckpoint:
        return GGUFCheckpoint(read_gguf(to_gguf(folder, tmp_path / "m.gguf", "F32", extra={name: weight})))

    assert "rope" not in "".join(open_with("rope_freqs.weight", torch.ones(8)).names())
    with pytest.raises(LoadError, match=r"rope_freqs\.weight is of kind F32 and shape .4097.; it must be F32, and have at most 4096"):
        open_with("rope_freqs.weight", torch.ones(4097))
    with pytest.raises(LoadError, match=r"blk\.0\.ffn_gate_exps\.weight"):
        open_with("blk.0.ffn_gate_exps.weight", torch.ones(4, 4))


@pytest.mark.parametrize("kind", sorted({name for name, _, _ in KINDS.values()} - set(SUPPORTED_KINDS)))
def test_gguf_kinds_that_are_not_supported_are_named(tmp_path: Path, kind: str) -> None:
    folder = tiny_model(tmp_path / "hf", "LlamaForCausalLM", seed=6)
    path = to_gguf(folder, tmp_path / "m.gguf", "F32", packed={"blk.1.ffn_up.bias": (kind, random_rows(kind, 4, 1))})
    with pytest.raises(LoadError) as refusal:
        GGUFCheckpoint(read_gguf(path))
    supported = "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, "
    supported += "IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, TQ1_0, TQ2_0"
    assert str(refusal.value).endswith(f"tensor 'blk.1.ffn_up.bias' is of kind {kind}; supported: {supported}")


# -- safetensors

WEIGHTS = {f"w{i}": torch.full((4, 8), float(i)) for i in range(4)}


def sharded(folder: Path, **weight_map: str) -> Path:
    """w0, w1 in a.safetensors and w2, w3 in b.safetensors, under an index that says `weight_map` of them."""
    folder.mkdir(exist_ok=True)
    for shard, names in (("a", ("w0", "w1")), ("b", ("w2", "w3"))):
        save_file({name: WEIGHTS[name] for name in names}, folder / f"{shard}.safetensors")
    right = {"w0": "a.safetensors", "w1": "a.safetensors", "w2": "b.safetensors", "w3": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": right | weight_map}))
    return folder


def test_shards_are_read_as_one_checkpoint(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(sharded(tmp_path))
    assert_equal(all_weights(checkpoint), WEIGHTS)
    assert checkpoint.fingerprint() == SafetensorsCheckpoint(tmp_path).fingerprint()


def test_shards_that_transformers_wrote(tmp_path: Path) -> None:
    whole = tiny_model(tmp_path / "whole", "Qwen2ForCausalLM", seed=7)
    parts = tiny_model(tmp_path / "parts", "Qwen2ForCausalLM", seed=7, max_shard_size="100KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    assert_equal(all_weights(SafetensorsCheckpoint(parts)), all_weights(SafetensorsCheckpoint(whole)))


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"w9": "absent.safetensors"}, r"absent\.safetensors: not found"),
        ({"w9": "a.safetensors"}, r"a\.safetensors: lacks .*w9"),
        ({"w0": "b.safetensors"}, r"a\.safetensors: has .*w0"),
        ({"w0": "../a.safetensors"}, "out of the model folder"),
        ({"w0": "sub/../a.safetensors"}, "out of the model folder"),
        ({"w0": "/etc/passwd"}, "out of the model folder"),
        ({"w0": "link.safetensors"}, "out of the model folder"),
        ({"w0": ""}, "out of the model folder"),
        ({"w0": 3}, "weight_map"),
    ],
)
def test_index_that_does_not_fit_its_shards_is_refused(tmp_path: Path, weight_map: dict[str, Any], reason: str) -> None:
    save_file({"w0": WEIGHTS["w0"]}, tmp_path / "outside.safetensors")
    folder = sharded(tmp_path / "m", **weight_map)
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(LoadError, match=reason):
        SafetensorsCheckpoint(folder)


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = sharded(tmp_path / "snapshots").rename(tmp_path / "files")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    for file in snapshot.iterdir():
        file.rename(tmp_path / "blobs" / f"digest-{file.name}")
        (tmp_path / "snapshots" / "abc" / file.name).symlink_to(f"../../blobs/digest-{file.name}")
    assert_equal(all_weights(SafetensorsCheckpoint(tmp_path / "snapshots" / "abc")), WEIGHTS)


def test_links_into_the_store_that_repositories_of_a_hub_cache_share_are_followed_and_no_others(tmp_path: Path) -> None:
    repo = tmp_path / "models--o--n"
    snapshot, blob = repo / "snapshots" / "abc", repo / "blobs" / "digest"
    for folder in (snapshot, blob.parent, tmp_path / "blobs" / "ab", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    for store, refused in (("blobs/ab", False), ("elsewhere", True)):
        save_file({"w0": WEIGHTS["w0"]}, tmp_path / store / "digest")
        blob.unlink(missing_ok=True)
        blob.symlink_to(tmp_path / store / "digest")
        if not (snapshot / "model.safetensors").is_symlink():
            (snapshot / "model.safetensors").symlink_to(blob)
        if refused:
            with pytest.raises(LoadError, match="out of the model folder"):
                SafetensorsCheckpoint(snapshot)
        else:
            assert_equal(all_weights(SafetensorsCheckpoint(snapshot)), {"w0": WEIGHTS["w0"]})
    repo.rename(tmp_path / "downloads")  # what only looks a little like a hub cache
    (tmp_path / "downloads" / "blobs" / "digest").unlink()
    (tmp_path / "downloads" / "snapshots" / "abc" / "model.safetensors").unlink()
    (tmp_path / "downloads" / "snapshots" / "abc" / "model.safetensors").symlink_to(tmp_path / "blobs" / "ab" / "digest")
    with pytest.raises(LoadError, match="out of the model folder"):
        SafetensorsCheckpoint(tmp_path / "downloads" / "snapshots" / "abc")


def safetensors_bytes(header: str, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header.encode() + data


def entry(dtype: str = "F32", start: int = 0, end: int = 16, count: int = 4) -> str:
    return json.dumps({"dtype": dtype, "shape": [count], "data_offsets": [start, end]})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2",
        safetensors_bytes("{}", length=2**40),
        safetensors_bytes("{}", length=2**64 - 1),
        safetensors_bytes("{]"),
        safetensors_bytes("[" * 100000),
        safetensors_bytes(f'{{"w": {entry()}}}', bytes(15)),
        safetensors_bytes(f'{{"w": {entry()}}}', bytes(17)),
        safetensors_bytes(f'{{"w": {entry(count=5)}}}', bytes(16)),
        safetensors_bytes(f'{{"w": {entry()}, "v": {entry(start=8, end=24)}}}', bytes(24)),
        safetensors_bytes(f'{{"w": {entry(end=2**63)}}}', bytes(16)),
        safetensors_bytes(f'{{"w": {entry(dtype="X9")}}}', bytes(16)),
        safetensors_bytes(f'{{"w": {entry(dtype="I32")}}}', bytes(16)),
    ],
)
def test_damaged_safetensors_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoadError, match=r"model\.safetensors: ") as caught:
        SafetensorsCheckpoint(tmp_path)
    assert "\n" not in str(caught.value)


# promise: path-found-nearest
def test_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"is not a model: .* model\.safetensors or .* has none of these"):
        SafetensorsCheckpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(LoadError, match="convert"):
        SafetensorsCheckpoint(tmp_path)


def test_fingerprint_tells_weights_names_and_shapes_apart(tmp_path: Path) -> None:
    seen = set()
    variants = [{"w": torch.zeros(64, 64)}, {"w": torch.ones(64, 64)}, {"v": torch.ones(64, 64)}, {"w": torch.ones(32, 128)}]
    for weights in variants:
        save_file(weights, tmp_path / "model.safetensors")
        seen.add(SafetensorsCheckpoint(tmp_path).fingerprint())
    assert len(seen) == len(variants)
