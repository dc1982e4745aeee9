"""Places one of several engines in a Ray cluster: on a CPU of the node that has the fewest engines.

Every engine has a bridge process on the server's host (`engine/ray_engine.py`), which finds the place and reserves it. Bridges do not
communicate. Each reads from the cluster where the other engines are, and all assign the rest by the same rule.
"""

import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.log import logger
from octavo.worker.ray_cluster import NODE_LABEL, PLACE_SECONDS, Member, check_count, need_of, ports_line, token_authentication

SPOT_SECONDS = 5.0  # time limit for the node with the fewest engines; after that any other node is used
SILENT_SECONDS = 120.0  # how long an unresponsive node is avoided; after that the cluster has detected it


def deal(engines: int, nodes: list[str], taken: dict[int, str]) -> list[str]:
    """Returns the node of every engine: its present one, or else the first of those with the fewest engines."""
    found = dict(taken)
    for number in range(engines):
        if number not in found:
            count = Counter(found.values())
            found[number] = min(nodes, key=lambda node: count[node])
    return [found[number] for number in range(engines)]


def taken_spots(groups: list[dict[str, Any]], server: str, alive: set[str]) -> dict[int, str]:
    """Returns the nodes of the engines of a server that are already placed, by engine number."""
    found = {}
    for group in groups:
        name, _, number = group["name"].rpartition("/")
        if name == server and group["state"] == "CREATED" and (node := group["bundles_to_node_id"].get(0)) in alive:
            found[int(number)] = node
    return found


class Marks:
    """Files next to the engines' sockets: the node of each engine, and the nodes that stopped responding.

    A machine that disappears or hangs stays in the cluster for a minute or more. A request to Ray for room on it waits that long, and
    blocks the requests queued behind it.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._folder, self._own = folder, folder / f"node-{number}"

    def fell_silent(self) -> None:
        """Marks the node on which the previous engine stopped responding."""
        with suppress(OSError):
            (self._folder / f"silent-{self._own.read_text()}").touch()

    def silent(self) -> set[str]:
        """Returns the nodes that recently stopped responding."""
        late = time.time() - SILENT_SECONDS
        return {path.name.removeprefix("silent-") for path in self._folder.glob("silent-*") if path.stat().st_mtime > late}

    def settle(self, node: str) -> None:
        with suppress(OSError):  # the folder may have been removed: then it is created again, without the marks
            self._own.write_text(node)


class Spot(Member):
    """`host`: the address of the node. `on_host`: engines of this server on that host. `place`: index of this one among them"""

    def __init__(self, kind: type, folder: Path, engines: int, number: int, gpus: bool, most: int, silent: bool) -> None:
        """`kind`: of the actor. `folder`: of the server's sockets. `silent`: the previous engine stopped responding
        `most`: CPUs that all engines of the server need with their ranks; 0: they had room before, so the check is skipped
        """
        super().__init__()
        self._marks = Marks(folder, number)
        if silent:
            self._marks.fell_silent()
        try:
            if most:
                nodes = self.alive()
                what = "engines" if most == engines else "actors and ranks of engines"
                check_count(nodes, self.address, most, gpus, what, "data_parallel_size")
                logger.warning("%s", ports_line(self.address, nodes, token_authentication()))
            self._find(folder.name, engines, number, gpus)
            self.start(kind, 0, gpus)
            self.answer_of(self.actors[0].look.remote(), f"engine {number} on {self.host}")
        except BaseException:
            self.leave()
            raise

    def _find(self, server: str, engines: int, number: int, gpus: bool) -> None:
        taken = self._taken(server)
        taken.pop(number, None)  # the previous engine's
        taken[number] = self._reserve(deal(engines, self._fit(gpus), taken)[number], f"{server}/{number}", gpus)
        hosts = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in self.alive()}
        dealt = [hosts.get(node, node) for node in deal(engines, self._fit(gpus), taken)]
        self._marks.settle(taken[number])
        self.host = dealt[number]
        same = [each for each, host in enumerate(dealt) if host == self.host]
        self.on_host, self.place = len(same), same.index(number)

    def _fit(self, gpus: bool) -> list[str]:
        """Returns the nodes that can hold an engine: this one first, then the others in an order that is the same for all."""
        fit = [node["NodeID"] for node in self.alive() if all(node["Resources"].get(kind, 0) >= 1 for kind in need_of(gpus))]
        heard = set(fit) - self._marks.silent()
        return sorted(heard or fit, key=lambda node: (node != self.here, node)) or [self.here]

    def _taken(self, server: str) -> dict[int, str]:
        from ray.util.placement_group import placement_group_table

        return taken_spots(list(placement_group_table().values()), server, {node["NodeID"] for node in self.alive()})

    def _reserve(self, wanted: str, name: str, gpus: bool) -> str:
        """Returns a node with room: the wanted one, or any."""
        need, others = need_of(gpus), [node for node in self._fit(gpus) if node != wanted]
        found = self.reserve(need, [{NODE_LABEL: wanted}], name, SPOT_SECONDS if others else PLACE_SECONDS)
        if not found and others:
            self.release()
            found = self.reserve(need, [{NODE_LABEL: f"in({','.join(others)})"}], name, PLACE_SECONDS)
        if not found:
            raise ConfigError(
                f"Ray has no room for an engine of one CPU{' and one GPU' * gpus}: "
                f"{self.ray.available_resources().get('CPU', 0):g} CPUs are free; ray status says who holds the others"
            )
        return found[0]
