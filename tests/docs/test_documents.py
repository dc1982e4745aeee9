"""Every code block of the README, CONTRIBUTING and docs/ does what it says: it runs, in a folder that has nothing but examples/.

Blocks of Python run as they stand. Those of the shell run without the default model's weights, but for `octavo verify`, which has a smaller
model's; by hand (`-m soak`) they run as they stand, too. Servers have the default model, and are forked (tests/support/forked.py).
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.cli.processes import FAKE
from tests.docs.blocks import Block, code_blocks, targets_of
from tests.support.forked import run_forked
from tests.support.server_process import ServerProcess
from tests.support.story_folder import story_folder

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for path in DOCUMENTS if path.exists() for block in code_blocks(path.relative_to(ROOT).as_posix(), path.read_text())]
SECONDS = 240  # on a machine that is busy with other tests
MOST_NOT_RUN = 15
PRINTED = {  # by examples that call tools, besides what the model likes to say
    "langchain_chat.py": [
        r"invoke .*'output_tokens': \d+", r"stream .*'output_tokens': \d+", r"batch  .*\[.*, .*\]",
        r"(tools|streamed) .*'name': 'weather', 'args': \{'city': '.*', 'days': \d+\}", r"structured Person\(name='.*', age=\d+\)",
        "too long   400 context_length_exceeded",
    ],
    "agents_tools.py": [r"(whole|streamed) .*weather\(\{.*\}\) \| -> \d+ sunny days in .* \| \w", "ChatCompletions", "Responses"],
}  # fmt: skip
NOT_WATCHED = "loop.slow=60000,step.slow=60000"  # the model is a real one
CURL = "silent\nshow-error\nfail-with-body\n"  # an answer that is an error is a failure


def run(block: Block, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a block in `folder`, with this interpreter's commands first on the path and nothing on stdin."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "CURL_HOME": str(folder), **more}
    (folder / ".curlrc").write_text(CURL)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    if block.language == "python":
        return run_forked([sys.executable, "-c", block.text], None, SECONDS, cwd=folder, env=env, text=True)
    command = ["bash", "-euo", "pipefail", "-c", block.script]
    return subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)


RUNNABLE = [block for block in BLOCKS if not block.reason]
Serving = Callable[[Block], Block]


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """Starts the server that a block needs, or finds the one that runs with the same flags; gives the block with its address."""
    with ExitStack() as stack:

        @cache
        def address(words: tuple[str, ...]) -> str:
            server = stack.enter_context(ServerProcess("octavo serve", *words, watch=NOT_WATCHED))
            return f"{server.host}:{server.port}"

        yield lambda block: block if block.server is None else block.at(address(block.server))


# promise: documents-run, langchain-works-context, agents-works, tools-default-model
@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: block.name)
def test_block_runs(block: Block, tmp_path: Path, serving: Serving) -> None:
    block, more = serving(block), {}
    if block.language == "bash":
        assert block.unknown_commands == [], "not run here; add <!-- no-run: reason --> above the block"
        if "octavo verify" in block.script:
            model = story_folder(tmp_path / "model", end_ids=[])
            block = replace(block, text=block.text.replace("octavo verify", f"octavo verify {model}"))
        else:
            more = FAKE
    result = run(block, tmp_path, **more)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in [line for script, lines in PRINTED.items() if script in block.script for line in lines]:
        assert re.search(line, result.stdout), f"{line} is not in {result.stdout}"


@pytest.mark.soak
@pytest.mark.parametrize("block", [block for block in RUNNABLE if block.language == "bash"], ids=lambda block: block.name)
def test_block_runs_as_it_stands(block: Block, tmp_path: Path, serving: Serving) -> None:
    result = run(serving(block), tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=lambda block: block.name)
def test_make_targets_exist(block: Block) -> None:
    assert set(block.make_targets) <= targets_of((ROOT / "Makefile").read_text())


# promise: documents-run
def test_few_blocks_are_not_run() -> None:
    assert len([block for block in BLOCKS if block.reason]) <= MOST_NOT_RUN


def test_readme_shows_runnable_python_and_shell() -> None:
    shown = {block.language for block in BLOCKS if block.name.startswith("README.md") and not block.reason}
    assert shown == {"python", "bash"}


SAMPLE = """
```python
print("runs")
```
<!-- no-run: needs a network -->
```bash
git clone somewhere
make chat  # a target
```
<!-- no-run: -->
```bash
echo one \\
  two; ls
WORKERS=4 make test
rm -rf octavo
```
```
for the eye
```
"""


def test_blocks_are_read_as_they_stand() -> None:
    first, cloned, mixed = code_blocks("a.md", SAMPLE)
    assert (first.name, first.text, first.reason) == ("a.md:2", 'print("runs")\n', "")
    assert (cloned.reason, cloned.make_targets) == ("needs a network", ["chat"])
    assert mixed.reason == ""  # an opt-out without a reason is none
    assert mixed.commands[0] == "echo one two; ls"
    assert mixed.make_targets == ["test"]
    assert mixed.unknown_commands == ["rm -rf octavo"]


def test_a_block_says_which_server_it_talks_to() -> None:
    ask = "curl http://127.0.0.1:8000/health"
    texts = (f"octavo serve --port 8000  # in another terminal\n{ask}", ask, "octavo serve --config a.toml --show-config")
    flags, plain, none = (Block("a.md:1", "bash", text, "") for text in texts)
    assert (flags.server, plain.server, none.server) == (("--port", "8000"), (), None)
    assert flags.at("127.0.0.1:1234").script == "curl http://127.0.0.1:1234/health"


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    assert run(Block("a.md:1", "python", "import octavo.attic", ""), tmp_path).returncode != 0
    assert run(Block("a.md:1", "bash", "python -c 'import sys; sys.exit(3)' | cat\npython --version", ""), tmp_path).returncode == 3
    assert run(Block("a.md:1", "bash", "python -c 'import octavo, os; open(\"made\", \"w\")'", ""), tmp_path).returncode == 0
    assert (tmp_path / "made").exists()  # in the empty folder, not in the tree
