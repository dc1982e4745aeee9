"""The hub's cache as a list of models, and what is removed of it."""

import os
from pathlib import Path

import pytest

from octavo.errors import LoadError
from octavo.loading.hub_cache import cached_repositories, removal
from octavo.loading.names import HubName, default_model

OLD, NEW = "a" * 40, "b" * 40


def add(folder: Path, commit: str, name: str, blob: str, content: bytes | Path) -> Path:
    """A file of a repository, as the hub's library keeps it; from a path, its blob is a link there."""
    target, link = folder / "blobs" / blob, folder / "snapshots" / commit / name
    for path in (target, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        target.symlink_to(content)
    elif not target.exists():
        target.write_bytes(content)
    link.symlink_to(os.path.relpath(target, link.parent))
    return link


def test_every_gguf_of_every_revision_has_a_name_to_type_and_what_cannot_be_opened_has_none(tmp_path: Path) -> None:
    model = default_model()
    assert model is not None
    folder = tmp_path / "models--o--n"
    add(folder, NEW, "Tiny.Q4_1.gguf", "1", model)
    add(folder, NEW, "Tiny.Q8_0.gguf", "2", b"GGUF, but no more than that")
    add(folder, OLD, "sub/Tiny.Q4_1.gguf", "1b", model)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(NEW)
    add(tmp_path / "models--o--bert", OLD, "config.json", "3", b'{"architectures": ["BertModel"]}')
    add(tmp_path / "models--o--bert", OLD, "model.safetensors", "4", b"none")
    for name in ("datasets--o--d", "models--alone", "models--o--n--x", "models--o--a b"):
        (tmp_path / name).mkdir()
    bert, found = cached_repositories(tmp_path)
    assert (bert.repo, bert.models, bert.is_incomplete) == ("o/bert", [], False)
    assert sorted(model.name for model in found.models) == ["o/n:Q4_1", f"o/n@{OLD}:Q4_1"]
    assert {(one.kind, one.size) for one in found.models} == {("Llama GGUF", model.stat().st_size)}
    assert cached_repositories(tmp_path / "absent") == []


# promise: octavo-pull-model
def test_one_gguf_goes_in_every_revision_and_what_others_need_stays(tmp_path: Path) -> None:
    folder, outside = tmp_path / "models--o--n", tmp_path / "outside"
    outside.write_bytes(b"not ours")
    gone = [add(folder, OLD, "T.Q8_0.gguf", "old", b"12345"), add(folder, NEW, "T.Q8_0.gguf", "new", b"123456")]
    kept = [add(folder, OLD, "copy.txt", "old", b""), add(folder, NEW, "T.Q4_0.gguf", "four", b"1234")]
    found = removal(tmp_path, HubName("o/n", quant="q8_0"))
    assert found.size == 6 + sum(path.lstat().st_size for path in gone)  # the other blob is needed by a second name
    found.execute()
    assert not any(path.is_symlink() for path in gone) and all(path.is_file() for path in kept)
    assert sorted(path.name for path in (folder / "blobs").iterdir()) == ["four", "old"]

    for path in (*kept, folder / "blobs" / "old"):
        path.unlink()
    (folder / "blobs" / "four").unlink()
    add(folder, NEW, "T.Q4_0.gguf", "out", outside)  # the last one: nothing of the repository is left
    removal(tmp_path, HubName("o/n", quant="Q4_0")).execute()
    assert not folder.exists() and outside.read_bytes() == b"not ours"


def test_what_is_not_in_the_cache_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "snapshots").mkdir(parents=True)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "models--o--link").symlink_to(tmp_path / "elsewhere")
    for name, reason in ((HubName("o/link"), "is a link to another place"), (HubName("o/absent"), "o/absent is not in the cache")):
        with pytest.raises(LoadError, match=reason):
            removal(cache, name)
    assert (tmp_path / "elsewhere" / "snapshots").is_dir()
