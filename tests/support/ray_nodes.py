"""A Ray cluster of three nodes on this host that asks for a token, for tests, and where engines are on it."""

import os
import platform
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

HAS_WHEEL = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64") and sys.version_info < (3, 14)
NEEDS_RAY = pytest.mark.skipif(not HAS_WHEEL, reason="Ray has no wheel for this platform")
TOKEN = secrets.token_hex(32)  # Ray keeps the first that a process has seen, so all clusters have the same


def node(cpus: int) -> dict[str, Any]:
    return {"num_cpus": cpus, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@contextmanager
def three_nodes(cpus: int) -> Iterator[Any]:
    with patch.dict(os.environ, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}):
        from ray.cluster_utils import Cluster

        made = Cluster(initialize_head=True, head_node_args=node(cpus))
        try:
            for _ in range(2):
                made.add_node(wait=False, **node(cpus))
            made.wait_for_nodes()
            with patch.dict(os.environ, {"RAY_ADDRESS": made.address, "PYTHONPATH": os.pathsep.join(sys.path)}):
                yield made
        finally:
            made.shutdown()


def nodes_of_engines(cluster: Any) -> dict[int, Any]:
    """Returns the node of each engine of the server that runs, by its number."""
    nodes = {node.node_id: node for node in cluster.list_all_nodes()}
    found = {int(group["name"].rpartition("/")[2]): group["bundles_to_node_id"][0] for group in _groups(cluster) if "/" in group["name"]}
    return {number: nodes[node] for number, node in found.items() if node in nodes}


def node_of_rank(cluster: Any, rank: int) -> Any:
    """Returns the node on which Ray has placed a rank of the engine that runs."""
    placed = _groups(cluster)[-1]["bundles_to_node_id"][rank]
    return next(node for node in cluster.list_all_nodes() if node.node_id == placed)


def _groups(cluster: Any) -> list[dict[str, Any]]:
    """Returns what Ray has placed, and where."""
    import ray

    ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
    try:
        return [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]
    finally:
        ray.shutdown()


def rank_actors() -> set[int]:
    """Returns the processes of actors that are ranks, on any node."""
    return {pid for pid, line in _commands() if line.startswith(b"ray::RankActor")}


def engine_actors() -> set[int]:
    """Returns the processes of actors that have engines, on any node."""
    return {pid for pid, line in _commands() if line.startswith(b"ray::EngineActor")}


def engines_on_nodes() -> set[int]:
    """Returns the engine processes that such actors have started."""
    actors = engine_actors()
    return {pid for pid, line in _commands() if b"octavo.engine.process" in line and _parent(pid) in actors}


def processes_of(node: Any) -> list[int]:
    """Returns the processes of a node and all that they have started."""
    parents = {pid: _parent(pid) for pid, _ in _commands()}
    found = [info.process.pid for infos in node.all_processes.values() for info in infos]
    for pid in found:  # it grows
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def _commands() -> Iterator[tuple[int, bytes]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            yield int(path.parent.name), path.read_bytes()


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
