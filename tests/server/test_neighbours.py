"""Servers beside each other on one machine and one model folder: each has its own port and its own engine, all say the same."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.server.test_serve_cli import family, gone
from tests.support.open_streams import text
from tests.support.server_process import ServerProcess


@pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_servers_start_at_once_on_one_model_folder(endless: str, count: int) -> None:
    env = {"OCTAVO_DEBUG": "runner=fake", "OCTAVO_LOG_LEVEL": "ERROR"}

    def start(number: int) -> ServerProcess:
        return ServerProcess("octavo serve", endless, "--num-gpu-blocks-override", "100", env=env, forks=False)

    with ThreadPoolExecutor(count) as pool:
        servers = list(pool.map(start, range(count)))
    try:
        pids = set[int]().union(*(family(server.process.pid) for server in servers))
        assert len({server.port for server in servers}) == count and len(pids) == 2 * count
        assert len({text(server) for server in servers}) == 1
        servers[0].process.kill()  # its neighbours do not notice
        assert len({text(server) for server in servers[1:]}) == 1
        for server in servers[1:]:
            server.process.send_signal(signal.SIGTERM)
        assert [server.ended() for server in servers[1:]] == [0] * (count - 1) and gone(pids)
    finally:
        for server in servers:
            server.__exit__(None, None, None)
