"""Ranks on the nodes of a real Ray cluster, three of them on this host, that asks for a token.

The texts of one process, what is said when something is wrong, and what happens when a node dies.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
from octavo.worker import ray_cluster, ray_ranks
from octavo.worker.ray_cluster import check_room, connect, ports_line
from tests.support.engine_process import ask, exists, tokens, until
from tests.support.models import tiny_model
from tests.support.ray_nodes import NEEDS_RAY

pytestmark = NEEDS_RAY

CPUS = 2  # of a node of `cluster`
AGAIN_SECONDS = 120  # within which an engine that lost a node serves again
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
PROMPTS = [[1, 2, 3], list(range(40)), [7] * 21]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", seed=3)


def opened(folder: Path, **settings: Any) -> LLM:
    limits: dict[str, Any] = {"num_gpu_blocks_override": 40, "max_num_seqs": 12, "max_num_batched_tokens": 64, "max_model_len": 320}
    return LLM(str(folder), skip_tokenizer_init=True, **(limits | settings))


def texts(llm: LLM) -> list[list[int]]:
    params = [LONG, SamplingParams(temperature=0.8, seed=5, top_k=9, max_tokens=40, ignore_eos=True, detokenize=False), LONG]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def actors() -> set[int]:
    """The processes of ranks on any node."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            named = path.read_bytes().startswith(b"ray::RankActor")
        except OSError:
            continue
        if named:
            found.add(int(path.parent.name))
    return found


def gone(holds: Callable[[], object], seconds: float = 20) -> None:
    start = time.monotonic()
    while holds():
        assert time.monotonic() - start < seconds, "something is left running"
        time.sleep(0.05)


# promise: distributed-executor-backend, llm-distributed-executor-backend
@pytest.mark.parametrize(
    "split",
    [
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.soak),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.soak),
    ],
)
def test_ranks_on_different_nodes_say_together_what_one_says(split: dict[str, int], cluster: Any, folder: Path) -> None:
    """Of four ranks on three nodes, stages and the ranks of a stage meet across nodes."""
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
        assert len(actors()) == ranks - 1 and executor.ranks.rooms.keys() == set(range(1, ranks))
        assert texts(llm) == alone
    gone(actors)
    assert os.sched_getaffinity(0) == cpus


def test_a_rank_that_is_killed_ends_the_engine_with_its_name(cluster: Any, folder: Path) -> None:
    llm = opened(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    llm.generate(PROMPTS[:1], LONG, use_tqdm=False)
    (pid,) = actors()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RankLost, match=r"rank [01] "):
        for _ in range(2):
            llm.generate(PROMPTS[:1], LONG, use_tqdm=False)
    executor: Any = llm._core.executor  # type: ignore[attr-defined]
    (peer,) = executor.ranks.peers
    gone(lambda: not peer.ended)
    assert str(peer.why()).startswith(f"rank 1 on {cluster.address.partition(':')[0]} is gone: ")
    assert "\n" not in str(peer.why())
    llm.close()
    gone(actors)


def test_a_rank_that_finds_no_model_names_itself_and_its_node(cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = ray_ranks.RayPeer.__init__

    def elsewhere(self: Any, ray: Any, actor: Any, host: str, orders: Any, *called: Any) -> None:
        started(self, ray, actor, host, msgspec.structs.replace(orders, path="/nowhere/model"), *called)

    monkeypatch.setattr(ray_ranks.RayPeer, "__init__", elsewhere)
    with pytest.raises(LoadError, match=r"^rank 1 on \S+: /nowhere/model.*$"):
        opened(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    gone(actors)


def refused(folder: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        opened(folder, distributed_executor_backend="ray", **({"tensor_parallel_size": 2} | settings))
    assert not actors()
    return str(error.value)


def test_what_cannot_work_is_said_in_one_line_before_anything_loads(cluster: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.build.build_runner", None)
    start = time.monotonic()
    few = refused(folder, tensor_parallel_size=4, pipeline_parallel_size=2)
    assert few.startswith(f"the Ray cluster at {cluster.address} has 6 CPUs on 3 nodes, and 8 ranks need one each: add nodes ")
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
    assert f"ConfigError: Ray refuses to join the cluster at {cluster.address}: it wants another token: " in done.stderr.splitlines()[-1]


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


def node_of_rank(cluster: Any, rank: int) -> Any:
    """The node on which Ray has placed a rank of the engine that runs."""
    import ray

    ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
    try:
        groups = [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
        return next(node for node in cluster.list_all_nodes() if node.node_id == groups[-1]["bundles_to_node_id"][rank])
    finally:
        ray.shutdown()


# promise: distributed-executor-backend
def test_a_node_that_dies_ends_open_requests_and_the_engine_serves_again_on_another(cluster: Any, folder: Path) -> None:
    config = EngineConfig(
        model=str(folder), skip_tokenizer_init=True, num_gpu_blocks_override=40, max_model_len=320, tensor_parallel_size=2,
        distributed_executor_backend="ray",
    )  # fmt: skip

    async def work() -> None:
        llm = AsyncLLM(config, Serving(), lambda error: None)
        try:
            await llm.start()
            calm = await tokens(llm, ask([1, 2, 3], 20, temperature=0))
            node, first = await asyncio.to_thread(node_of_rank, cluster, 1), llm.engine_pid
            open_ones = [asyncio.create_task(tokens(llm, ask([number], 300))) for number in range(4)]
            await asyncio.sleep(0.3)
            killed = time.monotonic()
            await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
            for error in await asyncio.gather(*open_ones, return_exceptions=True):
                assert isinstance(error, UnavailableError) and str(error).startswith("the engine died: "), error
            told = time.monotonic() - killed
            await until(lambda: llm.state == "ready" and llm.engine_pid != first, AGAIN_SECONDS, "the engine is ready")
            assert await tokens(llm, ask([1, 2, 3], 20, temperature=0)) == calm
            print(f"requests failed {told:.1f} s after the node, served again after {time.monotonic() - killed:.1f} s")
            assert await asyncio.to_thread(node_of_rank, cluster, 1) is not node
            left = actors()
            assert len(left) == 1 and llm.engine_pid is not None
            os.kill(llm.engine_pid, signal.SIGKILL)  # nothing outlives its parent
            await until(lambda: not any(map(exists, left)), 20, "the ranks of a killed engine are gone")
        finally:
            await llm.close()

    asyncio.run(asyncio.wait_for(work(), 3 * AGAIN_SECONDS))
    gone(actors)


def test_ray_is_not_imported_where_it_is_not_asked_for() -> None:
    program = "import sys, octavo, octavo.worker.ranks, octavo.engine.build; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert not hasattr(ray_cluster, "ray")
