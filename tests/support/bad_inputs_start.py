"""Section J as far as it is of `octavo serve`: servers that must not start, beside one that runs and must not notice."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from tests.cli.processes import ROOT, SECONDS, environment
from tests.support.bad_inputs_row import Row, acted
from tests.support.bad_inputs_watch import Watched
from tests.support.forked import run_forked
from tests.support.hub import FakeHub, Repo
from tests.support.server_process import ServerProcess

POOL = ("--block-size", "4", "--kv-cache-memory-bytes", "64k")
FAKE = {"OCTAVO_DEBUG": "runner=fake"}
NOBODY = 65534
# With an argument in front, root becomes nobody once a first try has imported all that nobody may be unable to read.
PROGRAM = f"""
import os, resource, sys
from octavo.cli.main import main
if sys.argv.pop(1) == "nobody" and os.geteuid() == 0:
    sys.stderr = open(os.devnull, "w")
    main(["serve", "--port", "0", "no/such/model"])
    sys.stderr = sys.__stderr__
    os.seteuid({NOBODY})
before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
code = main(["serve", "--port", "0", *sys.argv[1:]])
print(resource.getrusage(resource.RUSAGE_SELF).ru_utime - before)
sys.exit(code)
"""


def refused(*words: str, user: str = "", env: dict[str, str] | None = None) -> str:
    """The last line `octavo serve` says, within a second of its own CPU time, before it touches weights."""
    command = [sys.executable, "-c", PROGRAM, user, *words]
    given = environment({**FAKE, "OCTAVO_LOG_LEVEL": "ERROR", **(env or {})})
    run = run_forked(command, "", SECONDS, cwd=ROOT, env=given, text=True)
    *_, last = run.stderr.splitlines()
    assert run.returncode == 1 and last.startswith("octavo: error: ") and "Traceback" not in run.stderr, run.stderr
    assert float(run.stdout) < 1, f"{run.stdout} s"
    return last


def _small_pool(server: Watched) -> None:
    """The largest length that fits is told; it does fit, and one more does not."""
    said = refused(server.model, "--max-model-len", "256", *POOL)
    found = re.search(r"--max-model-len is 256, .*largest --max-model-len that fits is (\d+)", said)
    assert found is not None, said
    fits = int(found[1])
    with ServerProcess("octavo serve", server.model, "--max-model-len", str(fits), *POOL, env=FAKE) as small:
        reply = small.ask("POST", "/v1/completions", {"prompt": [7] * (fits - 1), "max_tokens": 1})
        assert reply.status == 200, reply
    assert f"--max-model-len is {fits + 1}" in refused(server.model, "--max-model-len", str(fits + 1), *POOL)


def _forbidden(server: Watched) -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)  # whoever is not root must get as far as what is forbidden
        folder = Path(place) / "model"
        shutil.copytree(server.model, folder)
        for name in ("config.json", "tokenizer.json", "."):
            (folder / name).chmod(0)
            said = refused(str(folder), user="nobody")
            assert "Permission denied" in said and (name in said or "cannot be read" in said), said
            (folder / name).chmod(0o755)


def _port_in_use(server: Watched) -> None:
    port = str(server.process.port)
    assert f"port {port} of 127.0.0.1 is in use" in refused(server.model, "--port", port)


def _full_disk(server: Watched) -> None:
    """More than the cache's disk has, by the hub's word; and a cache where nothing can be written."""
    files = {path.name: path.read_bytes() for path in Path(server.model).iterdir()}
    repo = Repo(files, said_sizes={"model.safetensors": 9 * 10**18})
    with FakeHub({"octo/stories": repo}) as hub, tempfile.TemporaryDirectory() as place:
        env = {"HF_HOME": place, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "OCTAVO_DEBUG": ""}
        said = refused("octo/stories", env=env)
        assert "9000000000 GB to download" in said and "free some space, or set HF_HOME" in said, said
        repo.said_sizes.clear()
        (Path(place) / "file").mkdir()
        (Path(place) / "file" / "hub").write_text("a file, where the cache should be")
        assert "cannot use the cache" in refused("octo/stories", env=env | {"HF_HOME": f"{place}/file"})
        assert {name for name, _ in hub.downloads()} <= {"config.json"}, hub.downloads()


ROWS: list[Row] = [
    acted(129, "a pool too small for one request", _small_pool, canary=False),
    acted(130, "a port in use", _port_in_use, canary=False),
    acted(130, "files that may not be read", _forbidden, canary=False),
    acted(130, "a full disk", _full_disk, canary=False),
]
