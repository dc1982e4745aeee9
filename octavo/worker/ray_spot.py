"""The spot of one of several engines in a Ray cluster: a CPU on the node that has the fewest of them.

Every engine has a bridge on the server's host (`engine/ray_engine.py`), which finds the spot and holds it. Bridges do not talk to each
other. They read in the cluster where the other engines are, and all deal out the rest in the same way.
"""

from collections import Counter
from typing import Any

from octavo.errors import ConfigError
from octavo.log import logger
from octavo.worker.ray_cluster import NODE_LABEL, PLACE_SECONDS, Member, check_count, need_of, ports_line, token_authentication

SPOT_SECONDS = 5.0  # that the node with the fewest engines may need; then any other will do


def deal(engines: int, nodes: list[str], taken: dict[int, str]) -> list[str]:
    """Returns the node of every engine: the one where it is, or else the first of those with the fewest engines."""
    found = dict(taken)
    for number in range(engines):
        if number not in found:
            count = Counter(found.values())
            found[number] = min(nodes, key=lambda node: count[node])
    return [found[number] for number in range(engines)]


def taken_spots(groups: list[dict[str, Any]], server: str, alive: set[str]) -> dict[int, str]:
    """Returns the nodes of the engines of a server that are placed, by their numbers."""
    found = {}
    for group in groups:
        name, _, number = group["name"].rpartition("/")
        if name == server and group["state"] == "CREATED" and (node := group["bundles_to_node_id"].get(0)) in alive:
            found[int(number)] = node
    return found


class Spot(Member):
    """`host`: the address of the node. `on_host`: engines of this server on that host, `place`: of this one among them"""

    def __init__(self, kind: type, server: str, engines: int, number: int, gpus: bool, most: int) -> None:
        """`kind`: of the actor. `server`: a name that no other server has. `most`: CPUs that all engines of the server need with their
        ranks; 0: they had room before, and will have it again when a node comes back
        """
        super().__init__()
        try:
            if most:
                nodes = self.alive()
                what = "engines" if most == engines else "actors and ranks of engines"
                check_count(nodes, self.address, most, gpus, what, "data_parallel_size")
                logger.warning("%s", ports_line(self.address, nodes, token_authentication()))
            self._find(server, engines, number, gpus)
            self.start(kind, 0, gpus)
            self.answer_of(self.actors[0].look.remote(), f"engine {number} on {self.host}")
        except BaseException:
            self.leave()
            raise

    def _find(self, server: str, engines: int, number: int, gpus: bool) -> None:
        taken = self._taken(server)
        taken.pop(number, None)  # of the engine before this one
        taken[number] = self._reserve(deal(engines, self._fit(gpus), taken)[number], f"{server}/{number}", gpus)
        hosts = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in self.alive()}
        dealt = [hosts.get(node, node) for node in deal(engines, self._fit(gpus), taken)]
        self.host = dealt[number]
        same = [each for each, host in enumerate(dealt) if host == self.host]
        self.on_host, self.place = len(same), same.index(number)

    def _fit(self, gpus: bool) -> list[str]:
        """Returns the nodes that can have an engine: this one first, then the others in an order that is the same for all."""
        fit = [node["NodeID"] for node in self.alive() if all(node["Resources"].get(kind, 0) >= 1 for kind in need_of(gpus))]
        return sorted(fit, key=lambda node: (node != self.here, node)) or [self.here]

    def _taken(self, server: str) -> dict[int, str]:
        from ray.util.placement_group import placement_group_table

        return taken_spots(list(placement_group_table().values()), server, {node["NodeID"] for node in self.alive()})

    def _reserve(self, wanted: str, name: str, gpus: bool) -> str:
        """Returns the node on which there is room: the one that is wanted, or any."""
        need = need_of(gpus)
        found = self.reserve(need, [{NODE_LABEL: wanted}], name, SPOT_SECONDS)
        if not found:
            self.release()
            found = self.reserve(need, [{}], name, PLACE_SECONDS)
        if not found:
            raise ConfigError(
                f"Ray has no room for an engine of one CPU{' and one GPU' * gpus}: "
                f"{self.ray.available_resources().get('CPU', 0):g} CPUs are free; ray status says who holds the others"
            )
        return found[0]
