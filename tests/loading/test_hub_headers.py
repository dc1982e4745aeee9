"""Headers of models on the hub: everything but the weights, for the price of the headers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from octavo.errors import LoadError
from octavo.loading import hub as hub_module
from octavo.loading.gguf import read_gguf
from octavo.loading.hub import fetch_headers
from octavo.loading.hub_client import Hub
from octavo.loading.names import HubName
from octavo.loading.resolve import load_model_config, open_checkpoint, resolve_model
from octavo.models.registry import read_config
from tests.support.gguf_bytes import f32, gguf_bytes, string, tensor, u32
from tests.support.hub import FakeHub, Repo
from tests.support.models import stories260k, to_gguf

NAME = HubName("octo/tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In two shards and an index."""
    made = stories260k(tmp_path_factory.mktemp("shards"))
    weights = load_file(made / "model.safetensors")
    (made / "model.safetensors").unlink()
    weight_map = {name: f"{number % 2}.safetensors" for number, name in enumerate(weights)}
    for shard in set(weight_map.values()):
        save_file({name: weights[name] for name in weights if weight_map[name] == shard}, made / shard)
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return made


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = stories260k(tmp_path_factory.mktemp("whole"))
    return to_gguf(made, made / "tiny-F16.gguf", "F16")


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with FakeHub({}) as served:
        yield served


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return Hub(endpoint=server.url, cache=tmp_path / "cache", timeout=30, waits=(0,))


def repo_of(folder: Path) -> Repo:
    return Repo({path.name: path.read_bytes() for path in folder.iterdir()})


@pytest.mark.parametrize("first_bytes", [8, 2**16])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_folder_is_told_from_the_headers_of_its_shards(
    first_bytes: int, ranges: bool, folder: Path, server: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repos["octo/tiny"], server.ranges = repo_of(folder), ranges
    monkeypatch.setattr(hub_module, "SAFETENSORS_FIRST_BYTES", first_bytes)
    headers = fetch_headers(NAME, hub)
    source = resolve_model(str(folder))
    checkpoint = open_checkpoint(source)
    assert {name: shape for name, (_, shape) in headers.tensors.items()} == {name: checkpoint.shape(name) for name in checkpoint.names()}
    assert {dtype for dtype, _ in headers.tensors.values()} == {"F32"}
    assert headers.weight_bytes == sum(checkpoint.read(name).nbytes for name in checkpoint.names())
    assert read_config(headers.config, headers.source) == load_model_config(source)
    assert not list(hub.cache.rglob("*.safetensors"))
    assert all(wanted is not None for name, wanted in server.downloads() if name.endswith(".safetensors"))


@pytest.mark.parametrize("first_bytes", [24, 1000, 2**21])
def test_a_gguf_file_is_told_from_its_header_however_it_is_cut(
    first_bytes: int, gguf_file: Path, server: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repos["octo/tiny"] = Repo({gguf_file.name: gguf_file.read_bytes()})
    monkeypatch.setattr(hub_module, "GGUF_FIRST_BYTES", first_bytes)
    headers = fetch_headers(HubName("octo/tiny", quant="F16"), hub)
    whole = read_gguf(gguf_file)
    assert headers.tensors == {tensor.name: (tensor.kind, tensor.shape) for tensor in whole.tensors.values()}
    assert headers.weight_bytes == sum(tensor.num_bytes for tensor in whole.tensors.values())
    assert read_config(headers.config, headers.source) == load_model_config(resolve_model(str(gguf_file)))
    fetched = sum(int(wanted[6:].split("-")[1]) - int(wanted[6:].split("-")[0]) + 1 for _, wanted in server.downloads() if wanted)
    assert fetched < 6 * max(first_bytes, whole.header_bytes)


def test_a_header_cut_anywhere_is_read_on(server: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64, "attention.head_count": 2}
    keys = [string("general.architecture", "llama"), f32("llama.attention.layer_norm_rms_epsilon", 1e-5)]
    keys += [u32(f"llama.{name}", value) for name, value in sizes.items()]
    embedding = tensor("token_embd.weight", (32, 8), kind=8)  # Q8_0; what is cut off reads as zeros, and kind 0 is F32
    server.repos["octo/tiny"] = Repo({"t.gguf": gguf_bytes(keys, [embedding], bytes(32 * 8 * 4))})
    whole = fetch_headers(NAME, hub)
    assert (whole.tensors, whole.weight_bytes) == ({"token_embd.weight": ("Q8_0", (8, 32))}, 8 * 34)
    end = len(gguf_bytes(keys, [embedding], alignment=1))
    for cut in [*range(24, end, 37), *range(end - 13, end)]:
        monkeypatch.setattr(hub_module, "GGUF_FIRST_BYTES", cut)
        assert fetch_headers(NAME, hub) == whole


def test_headers_that_are_damaged_name_the_file(folder: Path, server: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def entry(**changes: object) -> bytes:
        text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}).encode()
        return len(text).to_bytes(8, "little") + text + bytes(8)

    cut = [b"", b"\1", b"\xff" * 8 + b"{}", (4).to_bytes(8, "little") + b"[[[["]
    for content in [*cut, entry(shape=[-1]), entry(shape=None), entry(data_offsets=[1])]:
        server.repos["octo/tiny"] = Repo({"config.json": b"{}", "model.safetensors": content})
        with pytest.raises(LoadError, match=r"octo/tiny: model\.safetensors is not a valid safetensors file"):
            fetch_headers(NAME, hub)
    server.repos["octo/tiny"] = Repo({"model.safetensors": entry()})
    with pytest.raises(LoadError, match=r"octo/tiny: has no config\.json"):
        fetch_headers(NAME, hub)
    monkeypatch.setattr(hub_module, "GGUF_MAX_BYTES", 2**22)
    server.repos["octo/tiny"] = Repo({"t.gguf": b"GGUF" + bytes(5 * 2**20)})
    with pytest.raises(LoadError, match=r"octo/tiny/t\.gguf: GGUF version 0 is not supported"):
        fetch_headers(NAME, hub)
    assert len([name for name, _ in server.downloads() if name == "t.gguf"]) == 1
