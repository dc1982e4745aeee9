"""What a start settles before anything is loaded: device, dtype, programs, backend, and what the weights become."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

from octavo.attention.backend import AttentionBackend, choose_backend
from octavo.config import Debug, EngineConfig, ResolvedConfig
from octavo.errors import ConfigError
from octavo.kernels.cpu.levels import open_native
from octavo.kernels.cpu.library import NativeLibrary
from octavo.layers.comm import Comm, NullComm
from octavo.layers.context_parallel import over_context
from octavo.layers.shared_comm import SharedMemoryComm
from octavo.loading.resolve import ModelSource, open_checkpoint
from octavo.loading.shape import ModelShape, shape_of
from octavo.log import Stopwatch, logger
from octavo.model_config import ModelConfig
from octavo.models.registry import describe, rank_config
from octavo.policy.auto import check_cache_dtype, resolved, suited
from octavo.policy.cache_spec import CacheGeometry
from octavo.policy.description import ModelDescription
from octavo.policy.memory_plan import ModelNeeds, plan_memory
from octavo.policy.model_size import Kept
from octavo.worker.device import device_here, start_lines
from octavo.worker.machine import num_threads, refuse_float16, resolve_dtype
from octavo.worker.memory import memory


@dataclass(frozen=True, slots=True)
class Facts:
    config: ResolvedConfig
    source: ModelSource
    comm: Comm  # with the other ranks, where the model is split
    context: Comm  # with those of them that share a context with this one
    whole: ModelConfig
    model_config: ModelConfig  # of this rank, as all that follows
    model: ModelDescription
    device: torch.device
    on_device: bool  # kernels of a GPU compute, or on a CPU their twins
    library: NativeLibrary | None  # native kernels compute
    dtype: str
    needs: ModelNeeds
    kept: list[Kept]  # what becomes of each matrix, where codes are computed with
    shape: ModelShape
    backend: type[AttentionBackend]

    @property
    def form(self) -> str:
        """Whose codes floats become."""
        return "cuda" if self.on_device else "cpu"

    @property
    def kernels(self) -> str:
        if self.library is not None:
            return f"native {self.library.level}"
        return "Triton" if self.device.type == "cuda" else "torch"

    @property
    def shared_comm(self) -> SharedMemoryComm | None:
        """To the other ranks, if there are any."""
        return self.comm if isinstance(self.comm, SharedMemoryComm) else None

    def fingerprint(self) -> bytes:
        """Returns what identifies the weights."""
        return b"dummy%d" % self.config.seed if self.config.load_format == "dummy" else open_checkpoint(self.source).fingerprint()

    def plan_cache(self) -> CacheGeometry:
        """Counts what fits, before anything is loaded; a refusal says which setting to change."""
        return plan_memory(self.needs, self.config, memory(self.config).share(self.comm.size)).accepted()

    def warn_of_floats(self) -> None:
        """Logs which matrices should be codes and cannot be."""
        asked = self.config.quantization
        wanted = [one for one in self.kept if asked in ("int8", "int4") or self.shape.expands(one, asked)]
        floats = Counter(one.matrix.name for one in wanted if one.codes is None)
        names = ", ".join(f"{count} {name}" for name, count in floats.items())
        why = "their parts cannot be merged, or their rows are not of whole groups"
        if names:
            logger.warning("Some matrices are kept as %s, not quantised: %s (%s)", self.dtype, names, why)


def settle(
    config: EngineConfig, source: ModelSource, whole: ModelConfig, debug: Debug, comm: Comm | None = None, context: Comm | None = None
) -> Facts:
    """Settles everything that needs no weights, in the order in which one thing decides on the next.

    `comm`: with the other ranks, where the model is split; the facts are then those of one rank. `context`: with those that share a context
    """
    comm, context = comm or NullComm(), context or NullComm()
    model_config = rank_config(whole, comm.size, context.size)  # before anything is looked at: it may not be possible
    device, model = _choose_device(config), describe(model_config)
    settled = suited(resolved(debug.overrule(config), device), model)
    on_device = device == "cuda" or debug.runner == "device"
    if device == "cuda" and comm.size > 1:
        raise ConfigError(f"tensor_parallel_size is {comm.size}, and a model is split on a CPU only: set it to 1, or device to cpu")
    library = _open_native(settled) if settled.wants_native and not on_device else None
    level = library.level if library else None
    refuse_float16(settled, device, level)
    dtype = resolve_dtype(settled.dtype, model_config.dtype, device, level)
    check_cache_dtype(settled, device, dtype)
    shape = _shape(settled, source, whole, (comm.size, context.size), computes_codes=library is not None or on_device)
    threads = library.threads if library else 0
    return Facts(
        config=settled,
        source=source,
        comm=comm,
        context=context,
        whole=whole,
        model_config=model_config,
        model=model,
        device=torch.device(device),
        on_device=on_device,
        library=library,
        dtype=dtype,
        needs=shape.needs(dtype, settled.quantization, settled.kv_cache_dtype, threads, device),
        kept=shape.kept(dtype, settled.quantization, "cuda" if on_device else "cpu") if library or on_device else [],
        shape=shape,
        backend=over_context(choose_backend(settled, dtype, on_device), context),
    )


def _choose_device(config: EngineConfig) -> Literal["cpu", "cuda"]:
    watch = Stopwatch()
    choice = device_here(config.device)
    if choice.device == "cuda":
        logger.info("Starting CUDA took %.2f seconds", watch.total())
    for line in start_lines(choice):
        logger.info(line)
    return choice.device


def _open_native(config: ResolvedConfig) -> NativeLibrary | None:
    watch = Stopwatch()
    library = open_native(config.cpu_isa, num_threads())
    if library is not None:
        logger.info("Checking the native kernels took %.2f seconds (%s, threads: %d)", watch.total(), library.level, library.threads)
    return library


def _shape(config: ResolvedConfig, source: ModelSource, model: ModelConfig, ranks: tuple[int, int], computes_codes: bool) -> ModelShape:
    """Returns the shape of the weights there are; random ones are floats. `ranks`: that share the model, and that share a context"""
    if config.load_format == "dummy":
        return ModelShape(source.name, model).of_rank(*ranks)
    shape, asked = shape_of(source, model).of_rank(*ranks), config.quantization
    if shape.packed and asked in ("int8", "int4"):
        logger.warning("The weights are quantised already and are quantised again; --quantization auto keeps them as they are")
    if not computes_codes and asked in ("int8", "int4"):
        logger.warning("--quantization %s saves no memory here: torch computes with floats", asked)
    return shape
