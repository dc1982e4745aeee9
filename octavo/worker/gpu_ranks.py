"""Ranks of one host with one GPU each, as seen by the parent: processes as on a CPU, which communicate through NCCL.

    rank 0     the first GPU, in the engine's own process
    rank r     the r-th GPU that CUDA shows

Stages of a pipeline pass hidden states through the host, so their steps are not captured.
With `OCTAVO_DEBUG=comm=gloo` all ranks share the first GPU and communicate through local connections: to test results, not speed.
"""

import tempfile
from pathlib import Path

import msgspec
import torch

from octavo.comm.gloo import GlooComm
from octavo.comm.nccl import NcclComm
from octavo.config import Debug, EngineConfig
from octavo.errors import ConfigError
from octavo.worker.host_ranks import START_SECONDS, HostMeeting, OnAnswer, OnEnd, Peer, ProcessPeer
from octavo.worker.places import FILE, LOCAL, nccl_place, place_of
from octavo.worker.program import Place
from octavo.worker.rank_process import RankOrders


def check_gpus(config: EngineConfig, debug: Debug) -> None:
    """Refuses more ranks than GPUs, before anything starts."""
    there = torch.cuda.device_count()
    if config.num_ranks > there and debug.comm != "gloo":
        sizes = f"tensor_parallel_size {config.tensor_parallel_size} and pipeline_parallel_size {config.pipeline_parallel_size}"
        raise ConfigError(f"{sizes} need {config.num_ranks} GPUs, and CUDA shows {there}: lower them, or set device to cpu")


def alone_with_nccl() -> Place:
    """Returns the rank context of a single rank that calls NCCL nevertheless, to measure its cost."""
    return Place(NcclComm.join(str(Path(tempfile.mkdtemp(prefix="octavo-")) / "store"), 0, 1))


class GpuMeeting(HostMeeting):
    alike = False  # GPUs may differ, and other processes may use some of their memory

    def __init__(self, config: EngineConfig, debug: Debug) -> None:
        check_gpus(config, debug)
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-")
        self._whole: NcclComm | GlooComm
        if debug.comm == "gloo":
            self._whole = GlooComm.create(LOCAL, config.num_ranks, START_SECONDS)
            self._address = self._whole.address
        else:
            store = str(Path(self._folder.name) / "store")
            self._whole, self._address = NcclComm.join(store, 0, config.num_ranks), f"{FILE}{store}"
        super().__init__(config, shares_memory=False)

    def _join(self, config: EngineConfig) -> Place:
        if isinstance(self._whole, GlooComm):
            return place_of(self._whole, config, on_host=config.num_ranks)
        return nccl_place(self._whole, self.ends[0], config)

    def peer(self, orders: RankOrders, on_answer: OnAnswer, on_end: OnEnd) -> Peer:
        return ProcessPeer(msgspec.structs.replace(orders, ends=self.ends[orders.rank], address=self._address), on_answer, on_end)

    def abort(self) -> None:
        self._whole.abort()
        super().abort()

    def leave(self) -> None:
        super().leave()
        self._whole.abort()
        self._folder.cleanup()
