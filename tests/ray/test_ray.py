"""Ranks and engines on the nodes of a real Ray cluster, three of them on this host, that asks for a token.

Ranks: the texts of one process, what is said when something is wrong, and what happens when a node dies. Engines of one server: requests
go on when a node, an engine or its bridge dies, with the text they would have had, and nothing is left running.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.supervisor import Serving
from octavo.errors import ConfigError, LoadError, RankLost, UnavailableError
from octavo.outputs import TextDelta
from octavo.worker import ray_cluster, ray_ranks
from octavo.worker.ray_cluster import check_room, connect, ports_line
from tests.engine.test_replicas import questions, samples
from tests.server.test_replica_storm import survives
from tests.support.engine_process import ask, engine_process, exists, is_idle, read, tokens, until
from tests.support.models import tiny_model
from tests.support.ray_nodes import (
    NEEDS_RAY,
    engine_actors,
    engines_on_nodes,
    node,
    node_of_rank,
    nodes_of_engines,
    processes_of,
    rank_actors,
    three_nodes,
)
from tests.support.server_process import ServerProcess
from tests.support.soaked import rarely
from tests.support.story_folder import story_folder

pytestmark = NEEDS_RAY

CPUS = 4  # of a node
AGAIN_SECONDS = 120  # within which what was lost serves again
FEW = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)  # a busy machine takes long for each
PROMPTS = [[1, 2, 3], list(range(40)), [7] * 21]
THREE = Serving(engines=3, max_restarts=100, beat_timeout=5.0)
TWO = Serving(engines=2, max_restarts=100, beat_timeout=3.0)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with three_nodes(CPUS) as made:
        yield made


@pytest.fixture
def cluster(nodes: Any) -> Any:
    """Whole, whatever the test before has killed, and aware of it."""
    if len(nodes.list_all_nodes()) < 3:
        nodes.add_node(wait=False, **node(CPUS))
    nodes.wait_for_nodes(AGAIN_SECONDS)
    return nodes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", seed=3)


def opened(folder: Path, **settings: Any) -> LLM:
    limits: dict[str, Any] = {"num_gpu_blocks_override": 40, "max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 320}
    return LLM(str(folder), skip_tokenizer_init=True, **(limits | settings))


def texts(llm: LLM) -> list[list[int]]:
    params = [FEW, SamplingParams(temperature=0.8, seed=5, top_k=9, max_tokens=12, ignore_eos=True, detokenize=False), FEW]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def gone(holds: Callable[[], object], seconds: float = 20) -> None:
    start = time.monotonic()
    while holds():
        assert time.monotonic() - start < seconds, "something is left running"
        time.sleep(0.05)


# promise: distributed-executor-backend, llm-distributed-executor-backend
@pytest.mark.parametrize(
    "split",
    [
        {"tensor_parallel_size": 2},
        *rarely({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2}),
    ],
)
def test_ranks_on_different_nodes_say_together_what_one_says(split: dict[str, int], cluster: Any, folder: Path) -> None:
    """Of four ranks on three nodes, stages and the ranks of a stage meet across nodes, too."""
    ranks = prod(split.values())
    cpus = os.sched_getaffinity(0)
    with opened(folder) as llm:
        alone = texts(llm)
    start = time.monotonic()
    with opened(folder, distributed_executor_backend="ray", **split) as llm:
        print(f"started on Ray in {time.monotonic() - start:.1f} s")
        executor: Any = llm._core.executor  # type: ignore[attr-defined]
        nodes = executor._meeting._cluster.nodes
        assert len(nodes) == ranks and len(set(nodes)) == min(ranks, 3) and nodes[0] != nodes[1]
        assert len(rank_actors()) == ranks - 1 and executor.ranks.rooms.keys() == set(range(1, ranks))
        assert texts(llm) == alone
    gone(rank_actors)
    assert os.sched_getaffinity(0) == cpus


# promise: rank-lost
@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGSTOP, "was stopped"), pytest.param(signal.SIGKILL, "is gone: ", marks=pytest.mark.soak)]
)
def test_a_rank_that_is_stopped_or_killed_ends_the_engine_with_its_name(number: int, words: str, cluster: Any, folder: Path) -> None:
    """Also while it is idle. Without a question to its node, a stopped one would be noticed after a minute."""
    llm = opened(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    llm.generate(PROMPTS[:1], FEW, use_tqdm=False)
    executor: Any = llm._core.executor  # type: ignore[attr-defined]
    (peer,), (pid,) = executor.ranks.peers, rank_actors()
    start = time.monotonic()
    os.kill(pid, number)
    gone(lambda: not peer.ended, 30)
    print(f"noticed after {time.monotonic() - start:.1f} s")
    assert str(peer.why()).startswith(f"rank 1 on {cluster.address.partition(':')[0]} {words}")
    assert "\n" not in str(peer.why())
    with pytest.raises(RankLost, match=rf"^rank 1 on \S+ {words}"):
        llm.generate(PROMPTS[:1], FEW, use_tqdm=False)
    llm.close()
    gone(rank_actors)


@pytest.mark.soak
def test_a_rank_that_finds_no_model_names_itself_and_its_node(cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = ray_ranks.RayPeer.__init__

    def elsewhere(self: Any, ray: Any, actor: Any, host: str, ask: Any, orders: Any, *called: Any) -> None:
        started(self, ray, actor, host, ask, msgspec.structs.replace(orders, path="/nowhere/model"), *called)

    monkeypatch.setattr(ray_ranks.RayPeer, "__init__", elsewhere)
    with pytest.raises(LoadError, match=r"^rank 1 on \S+: /nowhere/model.*$"):
        opened(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    gone(rank_actors)


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        opened(folder, distributed_executor_backend="ray", **({"tensor_parallel_size": 2} | settings))
    assert not rank_actors()
    return str(error.value)


def test_what_cannot_work_is_said_in_one_line_before_anything_loads(cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.build.build_runner", None)
    start = time.monotonic()
    few = refused(folder, tensor_parallel_size=4, pipeline_parallel_size=4)
    assert few.startswith(f"the Ray cluster at {cluster.address} has 12 CPUs on 3 nodes, and 16 ranks need one each: add nodes ")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert refused(folder).startswith("no Ray cluster can be reached at 127.0.0.1:1 ([Errno 111] Connection refused): start one ")
    monkeypatch.setenv("RAY_ADDRESS", "ray://127.0.0.1:10001")
    assert refused(folder).startswith("RAY_ADDRESS must be HOST:PORT of a cluster's head node")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused(folder) == 'distributed_executor_backend is ray, which is not installed: pip install "octavo[ray]"'
    assert time.monotonic() - start < 30


# promise: environment-ray
def test_without_its_token_a_cluster_lets_nobody_in(cluster: Any) -> None:
    program = "import ray; from octavo.worker.ray_cluster import connect; connect(ray)"
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")} | {"RAY_AUTH_MODE": "disabled"}
    done = subprocess.run([sys.executable, "-c", program], env=without, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert f"ConfigError: Ray refuses to join the cluster at {cluster.address}: it requires another token: " in done.stderr.splitlines()[-1]


class Refusing:
    """A Ray of another version."""

    def init(self, **settings: Any) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.0.0\nThis process has:\n    Ray: 2.60.0\n")


def test_another_version_and_a_node_without_cpus_are_refused_in_one_line(cluster: Any) -> None:
    with pytest.raises(ConfigError, match=r"^Ray refuses to join .*: Version mismatch: .* Ray: 2.0.0 This process .*$"):
        connect(Refusing())
    nodes = [{"NodeID": "a", "Resources": {"CPU": 0.0}}, {"NodeID": "b", "Resources": {"CPU": 8.0, "GPU": 1.0}}]
    with pytest.raises(ConfigError, match="this node gives Ray no CPU, and rank 0 needs one"):
        check_room(nodes, "a", "10.0.0.1:6379", 2, gpus=False)
    with pytest.raises(ConfigError, match="has 1 GPUs on 2 nodes, and 2 ranks need one each"):
        check_room(nodes, "b", "10.0.0.1:6379", 2, gpus=True)


def test_the_log_tells_what_listens_and_what_protects_it() -> None:
    node = {"NodeManagerAddress": "10.0.0.2", "NodeManagerPort": 111, "ObjectManagerPort": 222, "MetricsExportPort": -1}
    line = ports_line("10.0.0.1:6379", [node] * 6, token=False)
    assert line.startswith("Ray listens at 10.0.0.1:6379 (GCS); 10.0.0.2: 111 (node manager), 222 (object manager); ")
    assert "2 nodes more" in line and "RAY_AUTH_MODE=token" in line
    assert "Ray asks for a token" in ports_line("10.0.0.1:6379", [node], token=True)


# promise: distributed-executor-backend
@pytest.mark.soak
def test_a_node_that_dies_ends_open_requests_and_the_engine_serves_again_on_another(cluster: Any, folder: Path) -> None:
    config = EngineConfig(
        model=str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=40, max_model_len=320, tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )  # fmt: skip

    async def work() -> None:
        llm = AsyncLLM(config, Serving(), lambda error: None)
        try:
            await llm.start()
            calm = await tokens(llm, ask([1, 2, 3], 8, temperature=0))
            node, first = await asyncio.to_thread(node_of_rank, cluster, 1), llm.engine_pid
            open_ones = [asyncio.create_task(tokens(llm, ask([number], 300))) for number in range(4)]
            await asyncio.sleep(0.3)
            killed = time.monotonic()
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            for error in await asyncio.gather(*open_ones, return_exceptions=True):
                assert isinstance(error, UnavailableError) and str(error).startswith("the engine died: "), error
            told = time.monotonic() - killed
            await until(lambda: llm.state == "ready" and llm.engine_pid != first, "the engine is ready", AGAIN_SECONDS)
            assert await tokens(llm, ask([1, 2, 3], 8, temperature=0)) == calm
            print(f"requests failed {told:.1f} s after the node, served again after {time.monotonic() - killed:.1f} s")
            assert await asyncio.to_thread(node_of_rank, cluster, 1) is not node
            left = rank_actors()
            assert len(left) == 1 and llm.engine_pid is not None
            os.kill(llm.engine_pid, signal.SIGKILL)  # nothing outlives its parent
            await until(lambda: not any(map(exists, left)), "the ranks of a killed engine are gone")
        finally:
            await llm.close()

    asyncio.run(asyncio.wait_for(work(), 3 * AGAIN_SECONDS))
    gone(rank_actors)


def test_ray_is_not_imported_where_it_is_not_asked_for() -> None:
    program = "import sys, octavo, octavo.worker.ranks, octavo.engine.build; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert not hasattr(ray_cluster, "ray")


# -- several engines of one server


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(story_folder(tmp_path_factory.mktemp("endless") / "endless", end_ids=[]))


def engines_refused(folder: str, engines: int, **settings: Any) -> Exception:
    async def main() -> Exception:
        with pytest.raises((ConfigError, LoadError)) as raised:
            async with engine_process(folder, "", Serving(engines=engines), distributed_executor_backend="ray", **settings):
                pass
        assert "\n" not in str(raised.value)
        await until(lambda: not engine_actors(), "the actors are gone")
        return raised.value

    return asyncio.run(asyncio.wait_for(main(), AGAIN_SECONDS))


def test_engines_that_cannot_work_are_refused_in_one_line(cluster: Any, endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = str(engines_refused(endless, 13))
    assert few.startswith(f"the Ray cluster at {cluster.address} has 12 CPUs on 3 nodes, and 13 engines need one each: add nodes ")
    assert few.endswith("or lower data_parallel_size")
    ranks = str(engines_refused(endless, 5, tensor_parallel_size=2))
    assert "has 12 CPUs on 3 nodes, and 15 actors and ranks of engines need one each: " in ranks
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert str(engines_refused(endless, 2)).startswith("no Ray cluster can be reached at 127.0.0.1:1 ")


@pytest.mark.soak
def test_a_node_without_the_model_names_the_engine_and_the_node(cluster: Any, endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = AsyncLLM._orders
    monkeypatch.setattr(AsyncLLM, "_orders", lambda *given: msgspec.structs.replace(told(*given), path="/nowhere/model"))
    error = engines_refused(endless, 2)
    assert isinstance(error, LoadError)
    assert str(error).startswith(f"engine 0 on {cluster.address.partition(':')[0]}: /nowhere/model")


@asynccontextmanager
async def engines_on_ray(folder: str, serving: Serving = THREE, **settings: Any) -> AsyncIterator[AsyncLLM]:
    """Ready, and checked to leave nothing behind."""
    settings = {"max_num_seqs": 8, "distributed_executor_backend": "ray"} | settings
    async with engine_process(folder, "forward.sleep=50", serving, **settings) as llm:
        yield llm
        left = engine_actors() | engines_on_nodes() | {replica.pid for replica in llm.replicas if replica.pid is not None}
        assert len(left) >= 3 * serving.engines
    await until(lambda: not any(map(exists, left)), "what served is gone")
    assert not engine_actors()


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work, 3 * AGAIN_SECONDS))


def lives_of(found: list[list[TextDelta]]) -> list[Any]:
    return [[delta.life for delta in deltas if delta.life is not None][-1] for deltas in found]


async def quiet_then(llm: AsyncLLM, blow: Any) -> list[list[TextDelta]]:
    """Asks twice, the second time with a blow in mid-stream, and compares the texts. Returns what came the second time."""
    quiet = [samples(deltas) for deltas in await asyncio.gather(*(read(llm, each) for each in questions()))]
    llm._num_seeds = 0  # requests get the same seeds again
    streams = [asyncio.create_task(read(llm, each)) for each in questions()]
    await until(lambda: llm.stats.running >= 8, "the streams run")
    await blow()
    found = await asyncio.gather(*streams)
    assert [samples(deltas) for deltas in found] == quiet
    return found


# promise: distributed-executor-backend
@pytest.mark.soak
@pytest.mark.parametrize("how", ["killed", "frozen"])
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
            await until(lambda: all(replica.state == "ready" for replica in llm.replicas), "the engine serves again", AGAIN_SECONDS)
            again = time.monotonic() - killed
            print(f"all texts came {told:.1f} s after the node was {how}, the engine served again after {again:.1f} s")
            assert [replica.facts.epoch for replica in llm.replicas if replica.facts] == [1 + (n == victim) for n in range(3)]
            left = await asyncio.to_thread(nodes_of_engines, cluster)
            assert set(left) == {0, 1, 2} and nodes[victim] not in left.values()
            await until(lambda: is_idle(llm))
            for life in lives:
                assert killed - 60 < life.queued <= life.first_scheduled <= life.first_token <= life.finished < time.monotonic()
            for pid in frozen:  # its engine has lost its bridge, and ends as soon as it can
                os.kill(pid, signal.SIGCONT)

    try:
        run(main())
    finally:
        for pid in filter(exists, frozen):
            os.kill(pid, signal.SIGCONT)


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


# promise: distributed-executor-backend
@pytest.mark.parametrize("how", ["engine killed", *rarely("engine stopped", "bridge killed")])
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
            await until(lambda: all(replica.state == "ready" for replica in llm.replicas), "the engine serves again", AGAIN_SECONDS)
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
            await until(lambda: llm.stats.running >= 6, "the streams run")
            os.kill(ranks[1][1], signal.SIGKILL)
            found = await asyncio.gather(*streams)
            assert [[token for delta in deltas for token in delta.token_ids] for deltas in found] == alone
            assert any(life.resumed for life in lives_of(found)), "no request was moved"
            await until(lambda: all(replica.state == "ready" for replica in llm.replicas), "the engine serves again", AGAIN_SECONDS)
        await until(lambda: not any(exists(pid) for pids in ranks for pid in pids), "the ranks are gone")

    run(main())
