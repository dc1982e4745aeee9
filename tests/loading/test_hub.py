"""Models from the hub, against an imitation of it: what is downloaded, how it survives trouble, and each refusal in one line."""

import errno
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
import torch
from safetensors.torch import save

from octavo.errors import ConfigError, LoadError
from octavo.loading.checkpoint import SafetensorsCheckpoint
from octavo.loading.hub import fetch_model
from octavo.loading.hub_client import Hub
from octavo.loading.names import HubName
from octavo.loading.resolve import resolve_model
from tests.support.hub import FakeHub, Repo, digest

ROOT = Path(__file__).resolve().parents[2]
NAME = HubName("octo/tiny")
SECRET = "hf_abcdefghijklmnopqrstuvwxyz"
WEIGHTS = random.Random(7).randbytes(1_500_000)
CONFIG = json.dumps(
    {"architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
     "num_attention_heads": 4, "num_key_value_heads": 2}
).encode()  # fmt: skip
FOLDER = {"config.json": CONFIG, "tokenizer.json": b"[]", "model.safetensors": WEIGHTS}


@pytest.fixture
def server() -> Iterator[FakeHub]:
    with FakeHub({"octo/tiny": Repo(dict(FOLDER), tags=("v1",)), "octo/large": Repo({})}) as served:
        yield served


@pytest.fixture
def hub(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    return Hub(endpoint=server.url, cache=tmp_path / "cache", timeout=30, waits=(0, 0))


def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- what comes


# promise: hf-overrides
def test_the_config_is_checked_with_its_overrides_before_weights_come(server: FakeHub, hub: Hub) -> None:
    unknown = json.loads(CONFIG) | {"hidden_act": "relu"}
    server.repos["octo/tiny"].files["config.json"] = json.dumps(unknown).encode()
    with pytest.raises(LoadError, match="relu"):
        fetch_model(NAME, hub=hub)
    with pytest.raises(ConfigError, match="hf_overrides has 'hidden_akt'"):
        fetch_model(NAME, hub=hub, overrides={"hidden_act": "silu", "hidden_akt": "silu"})
    assert (fetch_model(NAME, hub=hub, overrides={"hidden_act": "silu"}) / "model.safetensors").read_bytes() == WEIGHTS


# promise: model-owner-name, downloads-take-only
def test_only_what_makes_up_the_model_is_downloaded_and_once(server: FakeHub, hub: Hub) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": save({f"w{i}": torch.full((4,), float(i))}) for i in (1, 2)}
    index = {"weight_map": {f"w{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}}
    wanted = {"config.json": CONFIG, "chat_template.jinja": b"x", "model.safetensors.index.json": json.dumps(index).encode(), **shards}
    others = ["pytorch_model.bin", "modeling.py", "consolidated.safetensors", "original/model.safetensors", "onnx/config.json"]
    server.repos["octo/tiny"].files = wanted | dict.fromkeys(others, b"never")
    folder = fetch_model(NAME, hub=hub)
    assert contents(folder) == wanted
    assert Counter(server.downloads()) == Counter((name, None) for name in wanted)
    assert {request.token for request in server.requests} == {SECRET}
    checkpoint = SafetensorsCheckpoint(folder)  # through the links of the cache
    assert {name: checkpoint.read(name).tolist() for name in checkpoint.names()} == {"w1": [1.0] * 4, "w2": [2.0] * 4}
    server.requests.clear()
    assert fetch_model(NAME, hub=hub) == folder
    assert [request.path for request in server.requests] == ["/api/models/octo/tiny"]


# promise: model-owner-name-q4
def test_a_gguf_file_comes_alone_and_a_revision_is_its_own(server: FakeHub, hub: Hub) -> None:
    server.repos["octo/tiny"].files = {"config.json": CONFIG, "t-Q8_0.gguf": b"eight", "t-Q4_0.gguf": b"four"}
    assert fetch_model(replace(NAME, quant="q4_0"), hub=hub).read_bytes() == b"four"
    assert server.downloads() == [("t-Q4_0.gguf", None)]
    server.repos["octo/tiny"].files["t-Q4_0.gguf"] = b"other"
    server.repos["octo/tiny"].commit = "d" * 40
    assert fetch_model(HubName("octo/tiny", "c" * 40, "Q4_0"), hub=replace(hub, endpoint=nobody())).read_bytes() == b"four"
    assert fetch_model(HubName("octo/tiny", "v1", "Q4_0"), hub=hub).read_bytes() == b"other"


def test_without_weights_the_rest_of_a_folder_comes(server: FakeHub, hub: Hub) -> None:
    wanted = {"config.json": CONFIG, "tokenizer.json": b"[]"}
    for weights in ("model.safetensors", "pytorch_model.bin"):
        server.repos["octo/tiny"].files = wanted | {weights: b"never"}
        assert contents(fetch_model(NAME, weights=False, hub=hub)) == wanted


# promise: environment-hf-home
def test_the_token_stays_with_the_hub_where_bytes_come_from_elsewhere(server: FakeHub, hub: Hub) -> None:
    with FakeHub(server.repos) as storage:
        server.elsewhere = storage.url
        storage.cuts["model.safetensors"] = [1000]
        assert contents(fetch_model(NAME, hub=hub)) == FOLDER
    assert {request.token for request in server.requests} == {SECRET} and {request.token for request in storage.requests} == {None}
    assert storage.downloads()[-2:] == [("model.safetensors", None), ("model.safetensors", "bytes=1000-")]


def test_a_cache_that_cannot_be_written_serves_what_it_has(server: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch_model(NAME, hub=hub)

    def refuse(path: Path, text: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert fetch_model(replace(NAME, revision="v1"), hub=hub) == folder


# -- trouble on the way


# promise: downloads-use-hf
def test_a_broken_connection_is_taken_up_where_it_broke(server: FakeHub, hub: Hub) -> None:
    server.cuts["model.safetensors"] = [100_000, 0, 400_000, 1]
    assert (fetch_model(NAME, hub=hub) / "model.safetensors").read_bytes() == WEIGHTS
    starts = [int((wanted or "bytes=0-")[6:-1]) for name, wanted in server.downloads() if name == "model.safetensors"]
    assert starts == [0, 100_000, 100_000, 500_000, 500_001]


def test_a_part_that_is_too_long_is_begun_again(server: FakeHub, hub: Hub) -> None:
    blob = hub.folder("octo/tiny") / "blobs" / digest("model.safetensors", WEIGHTS)
    blob.parent.mkdir(parents=True)
    blob.with_name(f"{blob.name}.incomplete").write_bytes(WEIGHTS + b"more")
    assert contents(fetch_model(NAME, hub=hub)) == FOLDER


def test_a_server_without_ranges_sends_all_of_it_again(server: FakeHub, hub: Hub) -> None:
    server.cuts["model.safetensors"], server.ranges = [100_000], False
    assert (fetch_model(NAME, hub=hub) / "model.safetensors").read_bytes() == WEIGHTS


def test_an_answer_of_later_is_asked_again_but_not_for_ever(server: FakeHub, hub: Hub) -> None:
    server.refusals = [503, 429]
    assert contents(fetch_model(NAME, hub=hub)) == FOLDER
    assert [name for name, _ in server.downloads()] == ["config.json"] * 3 + ["tokenizer.json", "model.safetensors"]
    shutil.rmtree(hub.cache)
    server.refusals = [500] * 3
    assert "(500)" in refusal(NAME, hub)
    server.refusals = [403, 500]
    assert "(403)" in refusal(NAME, hub) and server.refusals == [500]


SCRIPT = """
import sys
from octavo.loading.hub import fetch_model
from octavo.loading.names import parse_hub_name
print(fetch_model(parse_hub_name(sys.argv[1])))
"""


def start(hub: Hub, name: str = "octo/tiny") -> subprocess.Popen[str]:
    """A process that fetches a model with the settings of its environment."""
    home = {"HF_HOME": str(hub.cache.parent / "home"), "HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, name], env={**os.environ, **home}, text=True, cwd=ROOT, **pipes)  # type: ignore[call-overload, no-any-return]


# promise: downloads-use-hf
def test_a_killed_download_goes_on_in_the_next_process(server: FakeHub, hub: Hub) -> None:
    server.pause["model.safetensors"] = 0.05
    parts = hub.cache.parent / "home" / "hub" / "models--octo--tiny" / "blobs"
    first = start(hub)
    deadline = time.monotonic() + 60
    while sum(part.stat().st_size for part in parts.glob("*.incomplete")) < 300_000:
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    server.pause.clear()
    second = start(hub)
    out, err = second.communicate(timeout=60)
    assert (Path(out.strip()) / "model.safetensors").read_bytes() == WEIGHTS
    begun, resumed = (wanted for name, wanted in server.downloads() if name == "model.safetensors")
    assert begun is None and resumed is not None and int(resumed[6:-1]) >= 200_000
    assert re.fullmatch(r"downloading octo/tiny, 1\.5 MB\ndownloaded octo/tiny in \d+ s\n", err)


def test_two_processes_at_once_share_one_download(server: FakeHub, hub: Hub) -> None:
    server.pause["model.safetensors"] = 0.02
    both = [start(hub), start(hub)]
    folders = {process.communicate(timeout=60)[0] for process in both}
    assert len(folders) == 1 and contents(Path(folders.pop().strip())) == FOLDER
    assert [name for name, _ in server.downloads()].count("model.safetensors") == 1


# -- without the hub


@pytest.mark.parametrize("how", ["no connection", "switched off", "down"])
def test_without_the_hub_the_cache_answers_with_one_warning(
    how: str, server: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fetch_model(NAME, hub=hub)
    if how == "switched off":
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    server.status = 503 if how == "down" else None
    cut_off = replace(hub, endpoint=nobody()) if how == "no connection" else hub
    server.requests.clear()
    assert fetch_model(NAME, hub=cut_off) == folder
    warning = f"octo/tiny: {cut_off.endpoint} cannot be reached; using the copy in {folder}"
    assert [record.getMessage() for record in caplog.records] == [warning]
    assert len(server.requests) == (how == "down")
    (folder / "model.safetensors").unlink()
    with pytest.raises(LoadError, match="octo/tiny: "):
        fetch_model(NAME, hub=cut_off)
    assert fetch_model(NAME, weights=False, hub=cut_off) == folder


def test_shards_that_are_not_all_there_are_no_model_without_the_hub(server: FakeHub, hub: Hub) -> None:
    index = json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode()
    files = {"config.json": CONFIG, "model.safetensors.index.json": index, "1.safetensors": b"1", "2.safetensors": b"2"}
    server.repos["octo/tiny"].files = files
    folder, cut_off = fetch_model(NAME, hub=hub), replace(hub, endpoint=nobody())
    assert fetch_model(NAME, hub=cut_off) == folder
    (folder / "2.safetensors").unlink()
    assert "no connection" in refusal(NAME, cut_off)


def test_an_interrupted_update_leaves_the_old_model_to_use_and_is_taken_up_later(server: FakeHub, hub: Hub) -> None:
    old = fetch_model(NAME, hub=hub)
    files = FOLDER | {"model.safetensors": b"new" * 1000}
    server.repos["octo/tiny"] = Repo(files, commit="d" * 40)
    server.cuts["model.safetensors"] = [10, 0, 0]
    assert fetch_model(NAME, hub=hub) == old and server.cuts["model.safetensors"] == []
    assert fetch_model(NAME, hub=replace(hub, endpoint=nobody())) == old
    new = fetch_model(NAME, hub=hub)
    assert contents(new) == files and server.downloads()[-1] == ("model.safetensors", "bytes=10-")
    assert fetch_model(NAME, hub=replace(hub, endpoint=nobody())) == new


def test_a_connection_that_goes_at_the_last_step_is_told(server: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*args: object, **settings: object) -> None:  # as the library tells it
        raise LocalEntryNotFoundError("An error happened while trying to locate the file on the Hub") from httpx2.ConnectError("refused")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    assert "no connection to" in refusal(NAME, hub)


# -- refusals


def refusal(name: HubName, hub: Hub) -> str:
    with pytest.raises(LoadError) as caught:
        fetch_model(name, hub=hub)
    message = str(caught.value)
    assert "\n" not in message and SECRET not in message and len(message) < 400
    return message


# promise: hub-gated-found
def test_what_the_hub_does_not_give_is_told_with_what_helps(server: FakeHub, hub: Hub) -> None:
    assert "octo/tinny: not a folder on this machine, and not found on the hub at http" in refusal(HubName("octo/tinny"), hub)
    assert "; did you mean octo/tiny? (if it is private: `hf auth login`, or set HF_TOKEN)" in refusal(HubName("octo/tinny"), hub)
    assert "did you mean octo/tiny?" in refusal(HubName("oct/tiny"), hub)
    assert "did you mean" not in refusal(HubName("zzz/qqqqqq"), hub)
    assert refusal(replace(NAME, revision="v9"), hub) == (
        f"octo/tiny: has no revision 'v9'; {server.url}/octo/tiny/tree/main lists branches and tags"
    )
    server.repos["octo/tiny"].gated = True
    assert refusal(NAME, hub) == f"octo/tiny: gated: accept its licence at {server.url}/octo/tiny, then `hf auth login`, or set HF_TOKEN"
    server.repos["octo/tiny"].token = "another"
    assert "not found on the hub" in refusal(NAME, hub)


# promise: hub-gated-found
@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, r"refused access \(401\): the token is wrong or may not read this: `hf auth login`, or set HF_TOKEN"),
        (403, r"refused access \(403\)"),
        (429, r"accepts no more requests for now \(429\): wait a few minutes"),
        (500, r"answered with an error \(500\): try again later"),
        (503, r"answered with an error \(503\)"),
        (418, r"answered with an error \(418\)"),
    ],
)
def test_a_refusing_hub_is_quoted_by_its_number(status: int, reason: str, server: FakeHub, hub: Hub) -> None:
    server.status = status
    with pytest.raises(LoadError, match=reason):
        fetch_model(NAME, hub=hub)


# promise: hub-gated-found
def test_silence_and_absence_of_the_hub_are_told_apart(server: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/api/models/octo/tiny", f"/octo/tiny/resolve/{'c' * 40}/config.json"):
        server.wait = (path, 1.5)  # other answers take less than the limit on a busy machine, too
        assert f"{server.url} did not answer in 0.5 s: try again; HF_HUB_DOWNLOAD_TIMEOUT" in refusal(NAME, replace(hub, timeout=0.5))
        assert server.requests[-1].path == path
    gone = nobody().replace("//", "//user:secret@")
    message = refusal(NAME, replace(hub, endpoint=gone))
    assert f"no connection to {gone.replace('user:secret@', '')}, and not complete in the cache {hub.cache}: check the network" in message
    named = refusal(HubName("HuggingFaceTB/SmolLM2-135M-Instruct"), replace(hub, endpoint=gone))
    assert "no connection to" in named
    assert named.endswith("; SmolLM2-135M-Instruct alone is the default model, which needs no hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert refusal(NAME, hub) == f"octo/tiny: not complete in the cache {hub.cache}, and HF_HUB_OFFLINE is set: unset it to download"


def test_a_damaged_file_is_thrown_away_and_comes_right_the_next_time(server: FakeHub, hub: Hub) -> None:
    for wrong, reason in (
        (b"\0" + WEIGHTS[1:], "model.safetensors was damaged on the way (its digest differs)"),
        (WEIGHTS[:-5], "model.safetensors has 1,500,000 bytes, but 1,499,995 came"),
        (WEIGHTS + b"more", "model.safetensors has 1,500,000 bytes, but 1,500,004 came"),
    ):
        server.served["model.safetensors"] = wrong
        assert reason in refusal(NAME, hub)
        assert not list(hub.cache.rglob("*.incomplete")) and not list(hub.cache.rglob("model.safetensors"))
    server.served["config.json"] = CONFIG[::-1]
    shutil.rmtree(hub.cache)
    assert "config.json was damaged on the way" in refusal(NAME, hub)
    server.served.clear()
    assert contents(fetch_model(NAME, hub=hub)) == FOLDER


# promise: downloads-use-hf
def test_a_disk_that_is_too_small_is_told_before_anything_comes(server: FakeHub, hub: Hub) -> None:
    server.repos["octo/tiny"].said_sizes["model.safetensors"] = 9 * 10**18
    message = refusal(NAME, hub)
    assert "octo/tiny: 9000000000 GB to download, but " in message
    assert f"free on the disk of {hub.cache}: free some space, or set HF_HOME" in message
    assert server.downloads() == [("config.json", None)]  # a few bytes, to see whether it is a model for Octavo at all


def test_a_disk_that_fills_up_or_cannot_be_written_is_told(server: FakeHub, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full(path: Path, mode: str = "r") -> object:
        if mode == "ab":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode)

    monkeypatch.setattr(Path, "open", full)
    assert f"octo/tiny: the disk of {hub.cache} is full: free some space, or set HF_HOME" in refusal(NAME, hub)
    monkeypatch.undo()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (hub.cache.parent / "file").write_text("")
    assert "cannot use the cache" in refusal(NAME, replace(hub, cache=hub.cache.parent / "file"))


def test_an_answer_from_something_else_than_a_hub_is_told(server: FakeHub, hub: Hub) -> None:
    server.repos["octo/tiny"].commit = "../../../x"
    assert "sent an answer that cannot be read (ValueError): check HF_ENDPOINT, or a proxy" in refusal(NAME, hub)
    server.repos["octo/tiny"] = Repo(FOLDER | {"../evil.gguf": b"x"})
    assert "has no GGUF file" in refusal(replace(NAME, quant="evil"), hub)


# -- where names are taken


# promise: among-these-order, revision
def test_what_is_here_comes_before_the_hub_and_has_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "octo" / "tiny").mkdir(parents=True)
    assert (resolve_model("octo/tiny").kind, resolve_model("octo/tiny").name) == ("folder", "tiny")
    for model in ("octo/tiny", None):
        with pytest.raises(ConfigError, match=r"--revision 'v1' is for models of the hub, but .* is on this machine: leave it out"):
            resolve_model(model, "v1")
    with pytest.raises(ConfigError, match="o/n names revision 'v1', but the setting revision is 'v2'"):
        resolve_model("o/n@v1", "v2")


def test_without_the_library_it_is_named_and_local_models_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys
sys.modules["huggingface_hub"] = sys.modules["httpx2"] = None
from octavo.loading import hub, names
for fetch in (hub.fetch_model, hub.fetch_headers):
    try:
        fetch(names.parse_hub_name("o/n"))
    except ValueError as error:
        print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout.splitlines() == ["models of the hub need the package huggingface_hub: pip install huggingface_hub"] * 2, run.stderr
    for module in ("huggingface_hub", "httpx2"):
        monkeypatch.setitem(sys.modules, module, None)
    assert (resolve_model(str(tmp_path)).kind, resolve_model(None).kind) == ("folder", "gguf")
