"""The table of bad inputs at real servers: each row gets its answer, and six things hold after it (tests/support/bad_inputs_watch.py).

Rows proved elsewhere: 29 the default bind (test_serve_cli.py), 54 ids of padding rows (tests/engine/test_vocabularies.py), 102 loading and
draining (test_stopping.py), 108 digests of prefixes (tests/policy/test_kv_manager.py), 113 banned calls (tests/house), 115 to 128 files of
models (tests/loading/test_hostile.py).
Row 110, blocks that are read before they are written, is every row here: the server of stories fills free blocks with NaN.
"""

from collections.abc import Callable, Iterator

import pytest

from tests.support import bad_inputs_forms as forms
from tests.support import bad_inputs_http as http
from tests.support import bad_inputs_keys as keys
from tests.support import bad_inputs_life as life
from tests.support import bad_inputs_params as params
from tests.support import bad_inputs_prefixes as prefixes
from tests.support import bad_inputs_prompts as prompts
from tests.support import bad_inputs_sockets as sockets
from tests.support import bad_inputs_start as start
from tests.support import bad_inputs_tools as tools
from tests.support.bad_inputs_row import Place, Row
from tests.support.bad_inputs_watch import ADMIN_KEY, KEY, OTHER_KEY, SECRETS, Watched
from tests.support.story_folder import story_folder

ROWS: list[Row] = [row for section in (http, keys, params, prompts, prefixes, tools, forms, life, sockets) for row in section.ROWS]
SMALL = ("--max-model-len", "256", "--block-size", "4", "--served-model-name", "stories")
SERVERS: dict[Place, Callable[[str], Watched]] = {
    "stories": lambda model: Watched(
        model, *SMALL, "--num-gpu-blocks-override", "600", "--max-num-seqs", "16", "--read-timeout", "1",
        "--write-timeout", "0.5", "--max-body-bytes", "12m",
        "--tool-call-parser", "llama3_json",
        "--allowed-origins", "https://good.example", "--allowed-hosts", "named", debug="check=1",
    ),
    "optimized": lambda model: Watched(
        model, *SMALL, "--num-gpu-blocks-override", "200", "--max-num-seqs", "16", "--chat-template", f"{model}/no_tools.jinja",
        debug="runner=fake", env={"PYTHONOPTIMIZE": "1"},
    ),
    "locked": lambda model: Watched(
        model, *SMALL, "--num-gpu-blocks-override", "200", "--api-key", KEY, "--api-key", OTHER_KEY, "--admin-key", ADMIN_KEY,
        "--enable-log-requests", debug="runner=fake", env=SECRETS, key=KEY,
    ),
    "small": lambda model: Watched(
        model, *SMALL, "--num-gpu-blocks-override", "33", "--max-num-seqs", "2", "--max-queue", "1", "--queue-timeout", "0.4",
        "--max-num-batched-tokens", "8",
        debug="runner=fake,forward.sleep=15", one_canary=True,
    ),
    "faulty": lambda model: Watched(model, *SMALL, "--num-gpu-blocks-override", "200", debug=f"check=1,{life.FAULTS}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = story_folder(tmp_path_factory.mktemp("stories"), last_token=prompts.PICTURE_TOKEN)
    (folder / "chat_template.jinja").write_text(tools.TEMPLATE)
    (folder / "no_tools.jinja").write_text(tools.TEMPLATE.replace(tools.WITH_TOOLS, ""))
    return str(folder)


@pytest.fixture(scope="module")
def servers(model: str) -> Iterator[Callable[[Place], Watched]]:
    started: dict[Place, Watched] = {}

    def server(place: Place) -> Watched:
        if place not in started:
            started[place] = SERVERS[place](model)
        return started[place]

    yield server
    for watched in started.values():
        watched.close()
    for place, watched in started.items():
        assert place == "faulty" or "Traceback" not in watched.process.stderr, watched.process.stderr[-3000:]


# promise: api-key, enable-log-requests, queue-timeout, admin-key, allowed-hosts, allowed-origins, max-body-bytes, errors-always-error
# promise: overload-429-503, x-request-id, admin-key-opens, open-without-key, docs-redoc-off, what-cannot-honoured
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
@pytest.mark.timed("answers within 5 s, idle within 1 s, neighbours at most twice as slow")
def test_a_bad_input_gets_its_answer_and_leaves_no_trace(servers: Callable[[Place], Watched], row: Row) -> None:
    server = servers(row.place)
    server.withstand(row.make(server), row.canary)


# promise: what-cannot-honoured
@pytest.mark.parametrize("row", start.ROWS, ids=lambda row: row.id)
def test_a_start_that_cannot_work_ends_in_one_line_and_disturbs_no_server(servers: Callable[[Place], Watched], row: Row) -> None:
    server = servers(row.place)
    row.make(server)()
    assert server.process.ask("GET", "/health").status == 200
