"""A Ray cluster: connects to it, refuses with a one-line error if it cannot be used, and places ranks and engines on its nodes.

    RayCluster   the ranks of an engine, spread over the nodes
    Spot         one of several engines, on a CPU of the node that has the fewest engines

Ray is imported only here, and only if it is used. Any host that can reach Ray's ports can run code on its nodes, so these ports are
logged.
"""

import importlib.util
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from octavo.child import is_stopped_here
from octavo.config import ray_address
from octavo.errors import ConfigError
from octavo.log import logger
from octavo.version import __version__
from octavo.worker.ray_actor import Node, RankActor

CONNECT_SECONDS = 5.0
PLACE_SECONDS = 60.0  # time that Ray may need to find room: it takes a while to detect that a node is gone
LOOK_SECONDS = 120.0  # time that an actor may need to start
SPOT_SECONDS = 5.0  # time limit for the node with the fewest engines; after that any other node is used
SILENT_SECONDS = 120.0  # how long an unresponsive node is avoided; after that the cluster has detected it
SHOWN_NODES = 4
NODE_LABEL = "ray.io/node-id"
INSTALL = 'pip install "octavo[ray]"'
DOCS = "docs/distributed.md"
PORTS = {
    "NodeManagerPort": "node manager", "ObjectManagerPort": "object manager", "RuntimeEnvAgentPort": "runtime environments",
    "DashboardAgentListenPort": "dashboard agent", "MetricsExportPort": "metrics",
}  # fmt: skip
START = "ray start --head, then ray start --address=HOST:6379 on every other node"


class Member:
    """This process as a member of a cluster, with the actors that it has started there."""

    def __init__(self) -> None:
        self.ray = _import_ray()
        self._ours = not self.ray.is_initialized()
        self.address = connect(self.ray) if self._ours else self.ray.get_runtime_context().gcs_address
        self.here: str = self.ray.get_runtime_context().get_node_id()
        self.actors: list[Any] = []
        self._group: Any = None

    def alive(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def reserve(self, need: dict[str, float], labels: list[dict[str, str]], name: str, seconds: float) -> list[str]:
        """Reserves `need` once for each of `labels`, which a node must have. Returns the nodes, or none if there is no room."""
        from ray.util.placement_group import placement_group, placement_group_table

        self._group = placement_group([need] * len(labels), strategy="SPREAD", bundle_label_selector=labels, name=name)
        if not self._group.wait(seconds):
            return []
        found = placement_group_table(self._group)["bundles_to_node_id"]
        return [found[place] for place in range(len(labels))]

    def start(self, kind: type, place: int, gpus: bool) -> None:
        """Starts an actor in one of the reserved places. A separate thread of it answers calls of the group `answers`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place)
        make = self.ray.remote(
            num_cpus=1, num_gpus=int(gpus), max_restarts=0, concurrency_groups={"answers": 1}, scheduling_strategy=strategy
        )(kind)  # fmt: skip
        self.actors.append(make.remote())

    def answer_of(self, asked: Any, who: str) -> Node:
        """Returns the properties of an actor's node, from a pending call."""
        try:
            node = msgspec.json.decode(self.ray.get(asked, timeout=LOOK_SECONDS), type=Node)
        except Exception as error:  # Ray raises many kinds of errors
            raise ConfigError(f"{who} cannot start: {one_line(error)}") from error
        if node.version != __version__:
            raise ConfigError(f"{who} has Octavo {node.version}, this machine {__version__}: install the same")
        return node

    def release(self) -> None:
        """Releases the reservation."""
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with suppress(Exception):
                remove_placement_group(self._group)

    def leave(self) -> None:
        """Kills the actors, releases the reservation, and disconnects if this process had connected."""
        for actor in self.actors:
            with suppress(Exception):
                self.ray.kill(actor)
        self.release()
        if self._ours:
            self.ray.shutdown()


class RayCluster(Member):
    """The actors of all ranks but the first, each on its node. `hosts`: the address of every rank's node"""

    def __init__(self, ranks: int, gpus: bool) -> None:
        super().__init__()
        try:
            nodes = self.alive()
            check_room(nodes, self.here, self.address, ranks, gpus)
            logger.warning("%s", ports_line(self.address, nodes, token_authentication()))
            self._place(ranks, gpus, {node["NodeID"]: node["NodeManagerAddress"] for node in nodes})
        except BaseException:
            self.leave()
            raise

    def _place(self, ranks: int, gpus: bool, addresses: dict[str, str]) -> None:
        """Reserves a CPU for each rank, that of the first on this node, and starts the actors of the others, spread over the nodes."""
        labels = [{NODE_LABEL: self.here}, *({} for _ in range(ranks - 1))]
        self.nodes = self.reserve(need_of(gpus), labels, "", PLACE_SECONDS)
        if not self.nodes:
            free = self.ray.available_resources().get("CPU", 0)
            raise ConfigError(
                f"Ray has no room for {ranks} ranks, each of one CPU{' and one GPU' * gpus}: {free:g} CPUs are free; "
                "ray status says who holds the others"
            )
        self.hosts = [addresses.get(node, node) for node in self.nodes]
        for rank in range(1, ranks):
            self.start(RankActor, rank, gpus)

    def look(self) -> list[Node]:
        """Returns the properties of the nodes of ranks 1, 2, ..."""
        asked = [actor.look.remote() for actor in self.actors]
        return [self.answer_of(answer, f"rank {rank} on {self.hosts[rank]}") for rank, answer in enumerate(asked, 1)]

    def ask_whether_stopped(self, rank: int, pid: int) -> Any:
        """Asks the node of a rank, in another process there, whether the rank's process is stopped. Returns the pending answer."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(self.nodes[rank], soft=False)
        return self.ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(is_stopped_here).remote(pid)


def need_of(gpus: bool) -> dict[str, float]:
    return {"CPU": 1.0} | ({"GPU": 1.0} if gpus else {})


def own_address() -> dict[str, str]:
    """Returns the cluster of an actor, as an environment variable for its children. They might find another one on their host."""
    import ray

    return {"RAY_ADDRESS": ray.get_runtime_context().gcs_address} if ray.is_initialized() else {}


def _import_ray() -> Any:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"distributed_executor_backend is ray, which is not installed: {INSTALL}")
    import ray

    return ray


def connect(ray: Any) -> str:
    """Connects to the cluster that runs here or at RAY_ADDRESS. Returns its address."""
    asked = ray_address()
    address = _found(asked)
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "://" in address:
        raise ConfigError(f"RAY_ADDRESS must be HOST:PORT of a cluster's head node, such as 10.0.0.1:6379, got {asked!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise ConfigError(f"no Ray cluster can be reached at {address} ({error}): start one ({START}) or set RAY_ADDRESS") from error
    try:
        if address == asked:
            _knock(address)
        with _own_signals():
            ray.init(address=asked or "auto", configure_logging=False, log_to_driver=True)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"Ray refuses to join the cluster at {address}: {_why(error)}") from error
    return address


def _knock(address: str) -> None:
    """Raises the cluster's error for a wrong token. `ray.init` would retry for 20 seconds, and not report why it gave up.

    This is not needed for a cluster that Ray finds itself: `ray.init` then finds its token, too.
    """
    import ray._raylet

    raylet: Any = ray._raylet
    raylet.GcsClient(address=address)


def _found(asked: str | None) -> str:
    if asked and asked != "auto":
        return asked
    from ray._private.services import canonicalize_bootstrap_address

    try:
        address = canonicalize_bootstrap_address("auto")
    except ConnectionError:
        address = None
    if address is None:
        raise ConfigError(f"no Ray cluster runs on this host: start one ({START}) or set RAY_ADDRESS")
    return str(address)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restores the SIGTERM handler that Ray replaces: the process that runs the engine decides how to handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _why(error: BaseException) -> str:
    if type(error).__name__ == "AuthenticationError":
        return f"it requires another token: set RAY_AUTH_MODE and RAY_AUTH_TOKEN as on its nodes ({DOCS})"
    return one_line(error)


def check_room(nodes: list[dict[str, Any]], here: str, address: str, ranks: int, gpus: bool) -> None:
    """Refuses more ranks than the cluster could ever hold, and a node without a CPU for rank 0 here."""
    check_count(nodes, address, ranks, gpus, "ranks", "tensor_parallel_size or pipeline_parallel_size")
    for kind in need_of(gpus):
        if not any(node["NodeID"] == here and node["Resources"].get(kind, 0) >= 1 for node in nodes):
            raise ConfigError(f"this node gives Ray no {kind}, and rank 0 needs one: start Ray here with --num-{kind.lower()}s=1 or more")


def check_count(nodes: list[dict[str, Any]], address: str, count: int, gpus: bool, what: str, setting: str) -> None:
    """Refuses more ranks or engines than the cluster could ever hold. `setting`: the one to lower"""
    for kind in need_of(gpus):
        there = sum(int(node["Resources"].get(kind, 0)) for node in nodes)
        if there < count:
            raise ConfigError(
                f"the Ray cluster at {address} has {there} {kind}s on {len(nodes)} nodes, and {count} {what} need one each: "
                f"add nodes (ray start --address={address}), or lower {setting}"
            )


def token_authentication() -> bool | None:
    """Whether this process authenticates to Ray with a token. None: this version of Ray does not support tokens"""
    import ray._raylet

    raylet: Any = ray._raylet
    if not hasattr(raylet, "AuthenticationMode"):
        return None
    return bool(raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN)


def ports_line(address: str, nodes: list[dict[str, Any]], token: bool | None) -> str:
    """Returns the listening ports and how they are protected."""
    told = [
        f"{node['NodeManagerAddress']}: " + ", ".join(f"{node[key]} ({what})" for key, what in PORTS.items() if node.get(key, -1) > 0)
        for node in nodes[:SHOWN_NODES]
    ]
    more = [f"{len(nodes) - SHOWN_NODES} nodes more"] if len(nodes) > SHOWN_NODES else []
    listens = "; ".join([f"{address} (GCS)", *told, *more])
    how = {
        True: "Ray asks for a token; the connections between ranks do not",
        False: f"Whoever reaches them can run code there: set RAY_AUTH_MODE=token on all nodes ({DOCS})",
        None: "Whoever reaches them can run code there, and this version of Ray has no tokens: keep them to a network of your own",
    }
    return f"Ray listens at {listens}; workers and ranks on further ports. {how[token]}"


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def reason_of(error: Exception) -> str:
    """Returns the sentence of Ray's error report that describes the cause."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line.startswith("The actor") or "died" in line or "unavailable" in line]
    return " ".join((said[-1] if said else one_line(error)).split())[:200]


# -- the place of one of several engines
#
# Every engine has a bridge process on the server's host (`engine/ray_engine.py`), which finds the place and reserves it. Bridges do
# not communicate. Each reads from the cluster where the other engines are, and all assign the rest by the same rule.


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
