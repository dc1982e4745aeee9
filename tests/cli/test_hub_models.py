"""Models of the hub as users meet them: a name on the command line, a download at the terminal, the list of what is here."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.loading.hub_client import Hub
from tests.cli.processes import Typist, octavo
from tests.support.http_server import wait_for
from tests.support.hub import FakeHub, Repo, digest
from tests.support.story_folder import story_folder

PROMPT = "Once upon a time"
WORDS = ("generate", PROMPT, "--max-tokens", "12", "--temperature", "0", "--dtype", "float32", "--kv-cache-memory-bytes", "8m")


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return story_folder(tmp_path_factory.mktemp("stories"))


@pytest.fixture
def server(stories: Path) -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in stories.iterdir()}
    with FakeHub({"octo/stories": Repo(files, tags=("v1",))}) as served:
        yield served


# promise: model-owner-name, downloads-use-hf, revision, environment-hf-home
@pytest.mark.soak
def test_a_name_is_downloaded_at_the_terminal_and_then_needs_no_hub(stories: Path, server: FakeHub, tmp_path: Path) -> None:
    with LLM(str(stories), dtype="float32", kv_cache_memory_bytes=2**23) as llm:
        (expected,) = llm.generate(PROMPT, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)
    text = expected.outputs[0].text
    home = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}
    server.pause["model.safetensors"] = 0.03
    with Typist(*WORDS, "--model", "octo/stories@v1", cwd=tmp_path, env=home) as typist:
        shown = typist.expect(r"\r\x1b\[Kdownloading octo/stories, 1\.1 MB\r\x1b\[Kdownloading octo/stories, \d+ % of 1\.1 MB")
        assert shown.startswith("loading stories@v1 ...")
        shown = typist.expect(text.strip()[:20])
        assert typist.process.wait(60) == 0
    assert "\r\x1b[K\r\x1b[K" in shown and "downloaded" not in shown  # both lines have gone
    server.requests.clear()
    run = octavo(*WORDS, "--model", "octo/stories", "--revision", "v1", cwd=tmp_path, env=home | {"HF_HUB_OFFLINE": "1"})
    assert run.returncode == 0 and run.stdout.strip() == text.strip()
    assert server.requests == []
    (warning,) = run.stderr.splitlines()
    snapshot = tmp_path / "hub" / "models--octo--stories" / "snapshots" / ("c" * 40)
    assert warning.endswith(f"octo/stories: {server.url} cannot be reached; using the copy in {snapshot}")


# promise: llm-revision
def test_an_llm_takes_a_name_and_a_revision(server: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(Hub, "from_environment", lambda: Hub(endpoint=server.url, cache=tmp_path, timeout=30))
    with LLM("octo/stories", revision="v1", load_format="dummy", kv_cache_memory_bytes=2**23) as llm:
        assert llm.model_name == "octo/stories"
        assert llm.generate(PROMPT, SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
    assert server.requests[0].path == "/api/models/octo/stories/revision/v1"
    assert "model.safetensors" not in [name for name, _ in server.downloads()]  # random weights need none


# promise: hub-gated-found
def test_what_is_wrong_is_one_line(server: FakeHub, tmp_path: Path) -> None:
    home = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}
    run = octavo("chat", "octo/story", "Hello?", cwd=tmp_path, env=home)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        f"octavo: error: octo/story: not a folder on this machine, and not found on the hub at {server.url}; did you mean octo/stories? "
        "(if it is private: `hf auth login`, or set HF_TOKEN)\n"
    )


@pytest.mark.soak
def test_a_name_is_planned_from_its_headers_and_no_weight_is_fetched(stories: Path, server: FakeHub, tmp_path: Path) -> None:
    """The same plan before a download, after it without the hub, and for the folder it came from."""
    home = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}
    words = ("plan", "--memory", "2GiB", "--json")
    far = octavo(*words, "octo/stories", "--revision", "v1", cwd=tmp_path, env=home)
    assert far.returncode == 0, far.stderr
    assert {span for name, span in server.downloads() if name == "model.safetensors"} == {"bytes=0-65535"}, "its header alone"
    assert octavo(*WORDS, "--model", "octo/stories@v1", cwd=tmp_path, env=home).returncode == 0
    server.requests.clear()
    cached = octavo(*words, "octo/stories@v1", cwd=tmp_path, env=home | {"HF_HUB_OFFLINE": "1"})
    local = octavo(*words, str(stories), cwd=tmp_path)
    plans = [json.loads(run.stdout) for run in (far, cached, local)]
    assert server.requests == [] and [plan.pop("model") for plan in plans] == ["octo/stories", "octo/stories", stories.name]
    assert [plan["weights_bytes"] for plan in plans] == [plans[0]["weights_bytes"]] * 3
    assert [plan["num_blocks"] for plan in plans] == [plans[0]["num_blocks"]] * 3
    missing = octavo(*words, "octo/storys", cwd=tmp_path, env=home)
    assert missing.returncode == 1 and missing.stderr.count("\n") == 1 and "octo/stories" in missing.stderr


# promise: octavo-pull-model
def test_a_model_is_pulled_in_two_goes_listed_and_removed(stories: Path, server: FakeHub, tmp_path: Path) -> None:
    home = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}
    size = sum(path.stat().st_size for path in stories.iterdir()) / 10**6
    folder = tmp_path / "cache" / "models--octo--stories"
    weights = "model.safetensors"
    server.pause[weights] = 0.5  # seconds between pieces of it
    part = folder / "blobs" / f"{digest(weights, (stories / weights).read_bytes())}.incomplete"
    server.repos["octo/bert"] = Repo({"config.json": b'{"architectures": ["BertModel"]}', "model.safetensors": b"weights"})
    refused = octavo("pull", "octo/bert", cwd=tmp_path, env=home)
    assert refused.returncode == 1 and refused.stderr.startswith("octavo: error: octo/bert/config.json: ") and "BertModel" in refused.stderr
    assert server.downloads() == [("config.json", None)], "its weights were not asked for"
    with Typist("pull", "octo/stories", cwd=tmp_path, env=home) as typist:
        typist.expect(r"downloading octo/stories, \d+ % of 1\.1 MB, [\d.]+ [kM]B/s, \d+ s left")
        wait_for(lambda: part.exists() and part.stat().st_size > 0)
        typist.type("\x03")
        assert typist.process.wait(60) == 130
    assert "octo/stories: not complete, `octavo pull` continues the download" in octavo("list", env=home).stdout
    server.pause.clear()
    server.requests.clear()
    had = part.stat().st_size
    pulled = octavo("pull", "octo/stories", cwd=tmp_path, env=home)
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout == f"octo/stories is ready: {size:.1f} MB in {folder}/snapshots/{'c' * 40}\n"
    assert (weights, f"bytes={had}-") in server.downloads()
    listed = octavo("list", env=home).stdout
    assert re.search(rf"^octo/stories +{size:.1f} MB  Llama safetensors  less than an hour ago$", listed, re.MULTILINE)
    assert re.search(r"^SmolLM2-135M-Instruct +98 MB  Llama GGUF", listed, re.MULTILINE)

    outside = tmp_path / "outside.txt"
    outside.write_text("kept")
    (folder / "snapshots" / ("c" * 40) / "link.json").symlink_to(outside)
    refused = octavo("rm", "octo/stories", env=home)
    assert (refused.returncode, refused.stdout) == (1, "") and "give --yes" in refused.stderr and folder.exists()
    for answer, code, said in (("n", 1, "nothing was removed"), ("y", 0, "removed octo/stories, 1.1 MB")):
        with Typist("rm", "octo/stories", cwd=tmp_path, env=home) as typist:
            typist.expect(rf"Remove octo/stories, 1\.1 MB, from {tmp_path}/cache\? Other programs share this cache\. \[y/N\] ")
            assert folder.exists()
            typist.type(f"{answer}\r")
            typist.expect(said)
            assert typist.process.wait(60) == code
    assert not folder.exists() and outside.read_text() == "kept"
    assert octavo("rm", "octo/stories", "--yes", env=home).stderr.startswith("octavo: error: octo/stories is not in the cache")
