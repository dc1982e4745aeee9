"""Every operation of the schema, with what fits it and with what does not: no answer is a failure of the server."""

import json
from collections.abc import Iterator
from urllib.parse import quote

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.core import NotSet

from octavo.server.app import build_app
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.support.bad_inputs_watch import TELLTALES
from tests.support.server_process import ServerProcess
from tests.support.stand_in_llm import StandInLLM
from tests.support.story_folder import story_folder

SCHEMA = build_app(Server(StandInLLM(), ServerConfig(), "m")).openapi()  # type: ignore[arg-type]
ENDLESS = {"/v1/view"}  # a stream that ends with its reader
OPERATIONS = [(method, path) for path, operations in SCHEMA["paths"].items() if path not in ENDLESS for method in operations]
MODES = list(GenerationMode)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    model = str(story_folder(tmp_path_factory.mktemp("stories")))
    flags = ("--max-model-len", "64", "--num-gpu-blocks-override", "200", "--block-size", "4", "--max-num-seqs", "16")
    env = {"OCTAVO_DEBUG": "check=1", "OCTAVO_LOG_LEVEL": "ERROR"}
    with ServerProcess(f"octavo serve {model}", *flags, env=env) as server:
        with httpx.Client(base_url=f"http://{server.host}:{server.port}", timeout=60) as client:
            assert client.get("/openapi.json").json()["paths"].keys() == SCHEMA["paths"].keys()
            yield client
            assert client.get("/health").json() == {"status": "ready"}
        assert "Traceback" not in server.stderr, server.stderr[-3000:]


def check(http: httpx.Client, case: Case) -> None:
    content = b"" if isinstance(case.body, NotSet) else case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    path = quote(case.formatted_path, safe="/%")
    answer = http.request(case.method, path, content=content, headers={"content-type": "application/json"})
    # a body may ask for a timeout that this machine cannot keep
    is_late = answer.status_code == 504 and answer.json()["error"]["code"] == "deadline_exceeded" and json.loads(content).get("timeout")
    assert answer.status_code < 500 or is_late, (case.method, path, content[:2000], answer.text)
    assert answer.status_code < 400 or set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert not TELLTALES.search(answer.text.replace(path, "")) or answer.status_code == 200, answer.text


def run(http: httpx.Client, method: str, path: str, mode: GenerationMode, examples: int) -> None:
    operation = schemathesis.openapi.from_dict(SCHEMA)[path][method]

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def try_case(case: Case) -> None:
        check(http, case)

    try_case()


CASES = [
    pytest.param(method, path, mode, id=f"{mode.value} {method} {path}")
    for method, path in OPERATIONS
    for mode in MODES
    if mode is GenerationMode.POSITIVE or "requestBody" in SCHEMA["paths"][path][method]  # any text fits a path
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_answer_is_a_failure_of_the_server(http: httpx.Client, method: str, path: str, mode: GenerationMode) -> None:
    run(http, method, path, mode, 10)


@pytest.mark.soak
@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_answer_is_a_failure_of_the_server_at_length(http: httpx.Client, method: str, path: str, mode: GenerationMode) -> None:
    run(http, method, path, mode, 1000)
