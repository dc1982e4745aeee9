"""Several engines of one server on the nodes of a real Ray cluster, three of them on this host.

Requests go on when a node, an engine or its bridge dies, with the text they would have had, and nothing is left running.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.async_llm import AsyncLLM
from octavo.engine.supervisor import Serving
from octavo.errors import ConfigError, LoadError
from octavo.outputs import TextDelta
from tests.engine.test_replicas import questions, samples
from tests.server.test_replica_storm import survives
from tests.support.engine_process import ask, engine_process, exists, is_idle, read, tokens, until
from tests.support.models import tiny_model
from tests.support.ray_nodes import NEEDS_RAY, engine_actors, engines_on_nodes, node, nodes_of_engines, processes_of
from tests.support.server_process import ServerProcess
from tests.support.story_folder import story_folder

pytestmark = NEEDS_RAY

CPUS = 4  # of a node of `cluster`
AGAIN_SECONDS = 120  # within which an engine that was lost serves again
THREE = Serving(engines=3, max_restarts=100, beat_timeout=5.0)
TWO = Serving(engines=2, max_restarts=100, beat_timeout=3.0)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(story_folder(tmp_path_factory.mktemp("endless") / "endless", end_ids=[]))


@asynccontextmanager
async def engines_on_ray(folder: str, serving: Serving = THREE, **settings: Any) -> AsyncIterator[AsyncLLM]:
    """Ready, and checked to leave nothing behind."""
    settings = {"max_num_seqs": 8, "distributed_executor_backend": "ray"} | settings
    async with engine_process(folder, "forward.sleep=50", serving, **settings) as llm:
        yield llm
        left = engine_actors() | engines_on_nodes() | {replica.pid for replica in llm.replicas if replica.pid is not None}
        assert len(left) >= 3 * serving.engines
    await until(lambda: not any(map(exists, left)), 30.0, "what served is gone")
    assert not engine_actors()


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 3 * AGAIN_SECONDS))


def lives_of(found: list[list[TextDelta]]) -> list[Any]:
    return [[delta.life for delta in deltas if delta.life is not None][-1] for deltas in found]


async def quiet_then(llm: AsyncLLM, blow: Any) -> list[list[TextDelta]]:
    """Asks twice, the second time with a blow in mid-stream, and compares the texts. Returns what came the second time."""
    quiet = [samples(deltas) for deltas in await asyncio.gather(*(read(llm, each) for each in questions()))]
    llm._count = 0  # the same numbers again, so the same noise without a seed
    streams = [asyncio.create_task(read(llm, each)) for each in questions()]
    await until(lambda: llm.stats.running >= 8, 10.0, "the streams run")
    await blow()
    found = await asyncio.gather(*streams)
    assert [samples(deltas) for deltas in found] == quiet
    return found


# promise: distributed-executor-backend
@pytest.mark.parametrize("how", ["killed", pytest.param("frozen", marks=pytest.mark.soak)])
def test_no_stream_is_lost_with_a_node_and_its_engine_serves_again_elsewhere(cluster: Any, endless: str, how: str) -> None:
    """A frozen node is as a machine that vanished: it says nothing, and the cluster does not know it yet."""
    frozen: list[int] = []

    async def main() -> None:
        async with engines_on_ray(endless, THREE) as llm:
            nodes = await asyncio.to_thread(nodes_of_engines, cluster)
            assert len(set(nodes.values())) == 3, "engines are not spread over the nodes"
            victim = next(number for number, node in nodes.items() if node is not cluster.head_node)
            killed = 0.0

            async def blow() -> None:
                nonlocal killed
                killed = time.monotonic()
                if how == "frozen":
                    frozen.extend(processes_of(nodes[victim]))
                    for pid in frozen:
                        os.kill(pid, signal.SIGSTOP)
                else:
                    await asyncio.to_thread(cluster.remove_node, nodes[victim], allow_graceful=False)

            found = await quiet_then(llm, blow)
            told = time.monotonic() - killed
            lives = lives_of(found)
            assert sum(life.resumed > 0 for life in lives) >= 1, "no request was moved"
            await until(lambda: all(replica.state == "ready" for replica in llm.replicas), AGAIN_SECONDS, "the engine serves again")
            again = time.monotonic() - killed
            print(f"all texts came {told:.1f} s after the node was {how}, the engine served again after {again:.1f} s")
            assert [replica.facts.epoch for replica in llm.replicas if replica.facts] == [1 + (n == victim) for n in range(3)]
            left = await asyncio.to_thread(nodes_of_engines, cluster)
            assert set(left) == {0, 1, 2} and nodes[victim] not in left.values()
            await until(lambda: is_idle(llm), 5.0)
            for life in lives:
                assert killed - 60 < life.queued <= life.first_scheduled <= life.first_token <= life.finished < time.monotonic()
            for pid in frozen:  # its engine has lost its bridge, and ends as soon as it can
                os.kill(pid, signal.SIGCONT)

    try:
        run(main())
    finally:
        for pid in filter(exists, frozen):
            os.kill(pid, signal.SIGCONT)
        if len(cluster.list_all_nodes()) < 3:
            cluster.add_node(wait=False, **node(CPUS))
        cluster.wait_for_nodes(AGAIN_SECONDS)  # also until the cluster has noticed that a node is gone


# promise: distributed-executor-backend
@pytest.mark.soak
@pytest.mark.parametrize("processes", ["1", "2"])
def test_no_client_of_64_sees_nodes_die(cluster: Any, endless: str, processes: str, capsys: pytest.CaptureFixture[str]) -> None:
    def kill_a_node(_: ServerProcess, rng: random.Random) -> None:
        nodes = [each for each in nodes_of_engines(cluster).values() if each is not cluster.head_node]
        cluster.remove_node(rng.choice(nodes), allow_graceful=False)
        cluster.add_node(wait=False, **node(CPUS))

    flags = ("--distributed-executor-backend", "ray", "--api-processes", processes)
    told = survives(endless, 64, 60, 2, *flags, blow=kill_a_node)
    with capsys.disabled():
        print(f"\nstorm of nodes: {told}")


@pytest.mark.soak
@pytest.mark.parametrize("how", ["engine killed", "engine stopped", "bridge killed"])
def test_no_stream_is_lost_when_an_engine_or_its_bridge_dies(cluster: Any, endless: str, how: str) -> None:
    async def main() -> None:
        async with engines_on_ray(endless, TWO) as llm:
            before = engines_on_nodes()
            assert len(before) == 2

            async def blow() -> None:
                pid = llm.replicas[1].pid if how == "bridge killed" else max(before)
                assert pid is not None
                os.kill(pid, signal.SIGSTOP if how == "engine stopped" else signal.SIGKILL)

            await quiet_then(llm, blow)
            await until(lambda: all(replica.state == "ready" for replica in llm.replicas), AGAIN_SECONDS, "the engine serves again")
            assert sum(map(exists, before)) == 1, "the engine of a bridge that is gone is gone too"
            assert len(engines_on_nodes()) == 2

    run(main())


# promise: distributed-executor-backend, tensor-parallel-size
@pytest.mark.soak
def test_engines_of_several_ranks_say_what_they_would_when_a_rank_is_killed(cluster: Any, tmp_path: Path) -> None:
    folder = str(tiny_model(tmp_path, "LlamaForCausalLM", seed=3))
    model: dict[str, Any] = {"runner": "model", "skip_tokenizer_init": True, "max_model_len": 320}
    asked = [ask([number, 7, 8], 60, temperature=0, detokenize=False) for number in range(6)]

    async def main() -> None:
        async with engine_process(folder, **model) as llm:
            alone = await asyncio.gather(*(tokens(llm, each) for each in asked))
        async with engines_on_ray(folder, TWO, tensor_parallel_size=2, **model) as llm:
            ranks = [[rank.pid for rank in replica.facts.ranks] for replica in llm.replicas if replica.facts]
            assert list(map(len, ranks)) == [2, 2]
            streams = [asyncio.create_task(read(llm, each)) for each in asked]
            await until(lambda: llm.stats.running >= 6, 10.0, "the streams run")
            os.kill(ranks[1][1], signal.SIGKILL)
            found = await asyncio.gather(*streams)
            assert [[token for delta in deltas for token in delta.token_ids] for deltas in found] == alone
            assert any(life.resumed for life in lives_of(found)), "no request was moved"
            await until(lambda: all(replica.state == "ready" for replica in llm.replicas), AGAIN_SECONDS, "the engine serves again")
        await until(lambda: not any(exists(pid) for pids in ranks for pid in pids), 20.0, "the ranks are gone")

    run(main())


def refused(folder: str, engines: int, **settings: Any) -> Exception:
    async def main() -> Exception:
        with pytest.raises((ConfigError, LoadError)) as raised:
            async with engine_process(folder, "", Serving(engines=engines), distributed_executor_backend="ray", **settings):
                pass
        assert "\n" not in str(raised.value)
        await until(lambda: not engine_actors(), 20.0, "the actors are gone")
        return raised.value

    return asyncio.run(asyncio.wait_for(main(), AGAIN_SECONDS))


def test_what_cannot_work_is_refused_in_one_line(cluster: Any, endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = str(refused(endless, 13))
    assert few.startswith(f"the Ray cluster at {cluster.address} has 12 CPUs on 3 nodes, and 13 engines need one each: add nodes ")
    assert few.endswith("or lower data_parallel_size")
    ranks = str(refused(endless, 5, tensor_parallel_size=2))
    assert "has 12 CPUs on 3 nodes, and 15 actors and ranks of engines need one each: " in ranks
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert str(refused(endless, 2)).startswith("no Ray cluster can be reached at 127.0.0.1:1 ")


def test_a_node_without_the_model_names_the_engine_and_the_node(cluster: Any, endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    told = AsyncLLM._orders
    monkeypatch.setattr(AsyncLLM, "_orders", lambda *given: msgspec.structs.replace(told(*given), path="/nowhere/model"))
    error = refused(endless, 2)
    assert isinstance(error, LoadError)
    assert str(error).startswith(f"engine 0 on {cluster.address.partition(':')[0]}: /nowhere/model")
