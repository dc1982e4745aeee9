"""Creates the context of a rank: the communicators that connect it with the others.

    join          processes of one host: shared memory, unnamed sockets
    place_of      several hosts: gloo connections
    nccl_place    one GPU each: NCCL; stages still pass hidden states through sockets
"""

import torch
from msgspec import Struct

from octavo.comm.comm import Channel, Comm, NullComm
from octavo.comm.gloo import GlooComm
from octavo.comm.nccl import NcclComm
from octavo.comm.shared_memory import SharedMemoryComm
from octavo.comm.socket_channel import SocketChannel
from octavo.config import EngineConfig
from octavo.models.stages import Stage
from octavo.worker.program import Place

FILE = "file:"  # prefix of the path of NCCL's store; any other address is that of a gloo group
LOCAL = "127.0.0.1"


class Ends(Struct, frozen=True):
    """The file descriptors that connect a rank with others on its host. -1: none"""

    memory: int = -1  # shared memory of its stage
    context: int = -1  # shared memory of the ranks that share a context with it
    before: int = -1  # a socket from the previous stage
    after: int = -1  # a socket, to the next stage

    def open_ones(self) -> list[int]:
        return [end for end in (self.memory, self.context, self.before, self.after) if end >= 0]


def take_place(ends: Ends, rank: int, config: EngineConfig, seconds: float, address: str) -> Place:
    """Returns the context of a process that is not the first rank on this host, and selects its GPU, if any."""
    if not address:
        return join(ends, rank, config, seconds)
    if not address.startswith(FILE):
        return place_of(GlooComm.join(address, LOCAL, rank, config.num_ranks, seconds), config, on_host=config.num_ranks)
    torch.cuda.set_device(rank)
    return nccl_place(NcclComm.join(address.removeprefix(FILE), rank, config.num_ranks), ends, config)


def join(ends: Ends, rank: int, config: EngineConfig, seconds: float) -> Place:
    """Returns the context of a rank that communicates through these descriptors, and takes ownership of those of sockets."""
    size = config.tensor_parallel_size

    def comm(memory: int, size: int) -> Comm:
        return NullComm() if memory < 0 else SharedMemoryComm.join(memory, rank % size, size, seconds, first=rank // size * size)

    before, after = channels(ends, rank, size)
    return Place(
        comm=comm(ends.memory, size),
        context=comm(ends.context, config.decode_context_parallel_size),
        stage=Stage(rank // size, config.pipeline_parallel_size),
        before=before,
        after=after,
    )


def channels(ends: Ends, rank: int, size: int) -> tuple[Channel | None, Channel | None]:
    """Returns the channels to the neighbouring stages, which have `size` ranks each. Takes ownership of the descriptors."""
    return (
        None if ends.before < 0 else SocketChannel(ends.before, rank - size),
        None if ends.after < 0 else SocketChannel(ends.after, rank + size),
    )


def place_of(whole: GlooComm, config: EngineConfig, on_host: int) -> Place:
    """Returns the context of a rank that communicates only through connections. `on_host`: ranks that share its host's memory"""
    size, stages, rank, shares = config.tensor_parallel_size, config.pipeline_parallel_size, whole.rank, config.decode_context_parallel_size
    stage = Stage(rank // size, stages)
    members = range(stage.index * size, (stage.index + 1) * size)
    sharers = range(rank // shares * shares, (rank // shares + 1) * shares)
    return Place(
        comm=whole if stages == 1 else NullComm() if size == 1 else whole.part(f"stage {stage.index}", members),
        context=NullComm() if shares == 1 else whole.part(f"context {rank // shares}", sharers),
        stage=stage,
        before=whole.channel(rank - size) if stage.index else None,
        after=None if stage.last else whole.channel(rank + size),
        on_host=on_host,
    )


def nccl_place(whole: NcclComm, ends: Ends, config: EngineConfig) -> Place:
    size, shares, count, rank = config.tensor_parallel_size, config.decode_context_parallel_size, config.num_ranks, whole.rank
    before, after = channels(ends, rank, size)

    def part(name: str, size: int) -> NcclComm:
        number = rank // size
        return whole.part(f"{name} {number}", range(number * size, (number + 1) * size))

    return Place(
        comm=whole if size == count else NullComm() if size == 1 else part("stage", size),
        context=NullComm() if shares == 1 else part("context", shares),
        stage=Stage(rank // size, config.pipeline_parallel_size),
        before=before,
        after=after,
        on_host=1,  # each rank has the memory of a GPU to itself
    )
