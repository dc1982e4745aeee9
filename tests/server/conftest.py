"""One server for all tests of routes that generate: stories260K behind the real app."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import openai
import pytest

from octavo import LLM
from octavo.server.app import build_app
from octavo.server.records import Observer
from octavo.server.state import Server
from octavo.server_config import ServerConfig
from tests.support.http_server import HttpServer, wait_for
from tests.support.stand_in_llm import InprocLLM
from tests.support.story_folder import story_folder


@dataclass
class Served:
    server: HttpServer
    llm: InprocLLM
    offline: LLM
    observer: Observer

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = story_folder(tmp_path_factory.mktemp("stories"))
    with LLM(str(folder), max_model_len=256, num_gpu_blocks_override=200, block_size=4, max_num_seqs=16) as offline:
        llm = InprocLLM(offline)
        state = Server(llm, ServerConfig(), "stories")  # type: ignore[arg-type]
        with HttpServer(build_app(state)) as server:
            yield Served(server, llm, offline, state.observer)


@pytest.fixture
def served(_served: Served) -> Iterator[Served]:
    """After every test the engine is idle and holds nothing."""
    _served.offline.reset_prefix_cache()
    _served.llm.asked.clear()
    yield _served
    _served.llm.pause, _served.llm.trouble, _served.llm.script = 0.0, None, []
    wait_for(lambda: _served.llm.is_idle)


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A story model that nothing ends but its length."""
    return str(story_folder(tmp_path_factory.mktemp("endless") / "endless", end_ids=[]))
