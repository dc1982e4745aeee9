"""The runtime config, resolved at start before anything is loaded: device, dtype, programs, backend, storage format of the weights."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import torch

from octavo.attention.capabilities import Device
from octavo.attention.context_parallel import over_context
from octavo.comm.comm import Comm
from octavo.comm.gloo import GlooComm
from octavo.comm.shared_memory import SharedMemoryComm
from octavo.config import Debug, EngineConfig, ResolvedConfig
from octavo.errors import ConfigError
from octavo.kernels.cpu.levels import open_native
from octavo.kernels.cpu.library import NativeLibrary
from octavo.kernels.fp8_matrix import FP8_EXACT_ROWS, rounds_x
from octavo.loading.resolve import ModelSource, open_checkpoint
from octavo.loading.shape import ModelShape, dummy_shape, shape_of
from octavo.log import Stopwatch, logger
from octavo.model_config import ModelConfig
from octavo.models.description import ModelDescription
from octavo.models.registry import describe, rank_config
from octavo.models.stages import of_stage
from octavo.policy.cache_spec import CacheGeometry, slot_bytes, token_bytes
from octavo.sizing.auto import resolved, suited, with_room_for_states
from octavo.sizing.memory_plan import Memory, ModelNeeds, fullest, plan_stages
from octavo.sizing.model_size import Kept
from octavo.worker.backends import Backends, Run, choose_backends, load_backends, log_choices
from octavo.worker.device import device_here, start_lines
from octavo.worker.machine import num_threads, refuse_float16, resolve_dtype
from octavo.worker.memory import memory
from octavo.worker.program import ALONE, Place


@dataclass(frozen=True, slots=True)
class Facts:
    config: ResolvedConfig
    source: ModelSource
    place: Place  # its rank context, if the model is split
    layers: range  # of the whole model, on this rank
    whole: ModelConfig
    model_config: ModelConfig  # of this rank, like all that follows
    model: ModelDescription
    device: torch.device
    on_device: bool  # GPU kernels compute, or the reference kernels on a CPU
    library: NativeLibrary | None  # native kernels compute
    dtype: str
    needs: ModelNeeds
    all_needs: list[ModelNeeds]  # of each stage of the pipeline
    kept: list[Kept]  # the storage format of each matrix, if quantised weights are used directly
    shape: ModelShape
    backends: Backends
    engines: int = 1  # engines with the whole model that share this host's memory

    @property
    def kernel_device(self) -> Device:
        """The device whose kernels compute: it decides on backends, and on the quantised format that floats are converted to."""
        return "cuda" if self.on_device else "cpu"

    @property
    def kernels(self) -> str:
        if self.library is not None:
            return f"native {self.library.level}"
        return "Triton" if self.device.type == "cuda" else "torch"

    @property
    def comm(self) -> Comm:
        return self.place.comm

    def fingerprint(self) -> bytes:
        """Returns an identifier of the weights."""
        return b"dummy%d" % self.config.seed if self.config.load_format == "dummy" else open_checkpoint(self.source).fingerprint()

    def positions(self, max_len: int) -> str:
        """Returns what determines how all layers of the whole model encode positions, if sequences have at most this length."""
        return " ".join(sorted({repr(layer.mixer.positions(max_len)) for layer in describe(self.whole).kinds}))

    def plan_cache(self, alike: bool = True) -> CacheGeometry:
        """Computes how much cache fits, before anything is loaded. A refusal names the setting to change.

        `alike`: all ranks share the memory that this one detects, so it plans for all stages; otherwise each plans for itself
        """
        needs = self.all_needs if alike else [self.needs]
        plans = plan_stages(needs, self.config, _memory(self.config, self.place, self.engines))
        return self.own_cache(plans[fullest(plans)].accepted())

    def own_cache(self, geometry: CacheGeometry) -> CacheGeometry:
        """Returns the common cache geometry, with the layers of this rank."""
        specs, groups = self.needs.specs, self.needs.groups
        return replace(geometry, groups=groups, bytes_per_token=token_bytes(specs, groups), state_bytes=slot_bytes(specs))

    def warn_of_floats(self) -> None:
        """Logs which matrices should be quantised but cannot be."""
        quantization = self.config.quantization
        kept = [one for one in self.kept if not one.matrix.heads]  # the others are always floats
        wanted = [one for one in kept if quantization in ("int8", "int4") or self.shape.expands(one, quantization)]
        floats = Counter(one.matrix.name for one in wanted if one.codes is None)
        names = ", ".join(f"{count} {name}" for name, count in floats.items())
        why = "their parts cannot be merged or split, or their rows are not of whole groups"
        if names:
            logger.warning("Some matrices are kept as %s, not quantised: %s (%s)", self.dtype, names, why)

    def tell_of_windows(self) -> None:
        """Logs why blocks behind windows are kept, if they are."""
        if self.needs.one_table is not None and any(spec.window is not None for spec in self.needs.specs):
            logger.info("Blocks behind windows are not freed: %s", self.needs.one_table)

    def tell_of_fp8(self) -> None:
        """Logs how many matrices stay 8-bit floats, and the dtype of the other factor."""
        count = sum(one.codes is not None and one.codes.fp8_span > 0 for one in self.kept)
        if not count:
            return
        known = self.device.type == "cpu" or torch.cuda.get_device_capability(self.device) >= (8, 9)
        rounded = known and rounds_x(FP8_EXACT_ROWS + 1, getattr(torch, self.dtype))
        by = f"8-bit floats in steps of more than {FP8_EXACT_ROWS} tokens, padding included" if rounded else self.dtype
        logger.info("Matrices of 8-bit floats: %d of %d, multiplied by %s", count, len(self.kept), by)


def settle(
    config: EngineConfig, source: ModelSource, whole: ModelConfig, debug: Debug, place: Place = ALONE, engines: int = 1
) -> Facts:
    """Resolves everything that does not depend on the weights, in the order of the dependencies.

    `place`: the rank context if the model is split; the result is then that of this rank. `engines`: as in `Facts`
    """
    sizes = place.comm.size, place.context.size, config.expert_ranks
    stage, own = place.stage, rank_config(whole, *sizes)  # first, since it may be refused
    device = _choose_device(config)
    settled = suited(resolved(debug.overrule(config), device), describe(own))
    on_device = device == "cuda" or debug.runner == "device"
    if device == "cuda" and not _captures(place):
        settled = replace(settled, enforce_eager=True)
    library = _open_native(settled) if settled.wants_native and not on_device and _meets_natively(place) else None
    level = library.level if library else None
    if settled.deterministic:
        _refuse_what_is_not_deterministic(settled, device, library)
    refuse_float16(settled, device, level)
    dtype = resolve_dtype(settled.dtype, own.dtype, device, level)
    backends = _backends(settled, dtype, own, place, device, "cuda" if on_device else "cpu", logged=library is None)
    if device == "cuda" and not settled.enforce_eager and backends.graphs == "none":
        logger.info("CUDA graphs are off: not all attention backends support them")
        settled = replace(settled, enforce_eager=True)
    all_layers = _shape(settled, source, whole, sizes, computes_codes=library is not None or on_device)
    shapes, threads = all_layers.stages(stage.count), library.threads if library else 0
    shape = shapes[stage.index]
    all_needs = [one.needs(dtype, settled.quantization, settled.kv_cache_dtype, threads, device) for one in shapes]
    if any(slot_bytes(one.specs) for one in all_needs):
        asked, available = debug.overrule(config), _memory(settled, place, engines)
        settled, why = with_room_for_states(settled, asked, all_needs[stage.index], available)
        if why is not None:
            logger.info("%s; --max-num-seqs overrules this", why)
    return Facts(
        config=settled,
        source=source,
        place=place,
        layers=all_layers.stage_layers(stage.count)[stage.index],
        whole=whole,
        model_config=shape.config,
        model=of_stage(describe(shape.config), stage),
        device=torch.device(device),
        on_device=on_device,
        library=library,
        dtype=dtype,
        needs=all_needs[stage.index],
        all_needs=all_needs,
        kept=shape.kept(dtype, settled.quantization, "cuda" if on_device else "cpu") if library or on_device else [],
        shape=shape,
        backends=backends,
        engines=engines,
    )


def _memory(config: ResolvedConfig, place: Place, engines: int) -> Memory:
    """Returns the memory of one rank."""
    return memory(config).share((place.on_host or config.num_ranks) * (engines if config.device == "cpu" else 1))


def _refuse_what_is_not_deterministic(config: ResolvedConfig, device: str, library: NativeLibrary | None) -> None:
    if device == "cuda" and torch.cuda.get_device_capability()[0] == 10:
        raise ConfigError(
            "deterministic is True, and GPUs of compute capability 10 multiply small and large batches with different instructions, "
            "whose bits were never compared: set deterministic to False"
        )
    if device == "cuda" and config.num_ranks > 1:
        raise ConfigError(
            f"deterministic is True, and the model is split over {config.num_ranks} GPUs, which was never tried: set "
            "tensor_parallel_size and pipeline_parallel_size to 1, or deterministic to False"
        )
    if device == "cpu" and library is None:
        raise ConfigError(
            "deterministic is True, and torch computes, whose sums depend on the other rows: use the native kernels, or set it to False"
        )


def _meets_natively(place: Place) -> bool:
    """Whether the native step can communicate with the other ranks: it supports only shared memory."""
    if place.comm.size == 1 or isinstance(place.comm, SharedMemoryComm):
        return True
    if place.comm.rank == 0:
        logger.warning("torch computes: the native kernels support ranks that share a layer only in the memory of one host")
    return False


def _backends(config: ResolvedConfig, dtype: str, model: ModelConfig, place: Place, device: str, kernels: Device, logged: bool) -> Backends:
    """Returns the attention backends of a rank's layers. `kernels`: the device whose kernels compute, or their references"""
    choices = choose_backends(Run(config, dtype, kernels, references=device != kernels), describe(model))
    if logged:
        log_choices(choices)
    return load_backends(choices).each(lambda backend: over_context(backend, place.context))


def _captures(place: Place) -> bool:
    """Whether steps can be captured on a GPU: ranks that communicate through the host must wait for the device."""
    if place.stage.count == 1 and not isinstance(place.comm, GlooComm):
        return True
    logger.info("CUDA graphs are off: ranks communicate through the host")
    return False


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


def _shape(config: ResolvedConfig, source: ModelSource, model: ModelConfig, ranks: tuple[int, ...], computes_codes: bool) -> ModelShape:
    """Returns the shape of the stored weights, or of random ones.

    `ranks`: the number of ranks that split the model, that share a context, and that have whole experts
    """
    if config.load_format == "dummy":
        return dummy_shape(source, model).of_rank(*ranks)
    shape, quantization = shape_of(source, model).of_rank(*ranks), config.quantization
    if shape.packed and quantization in ("int8", "int4"):
        logger.warning("The weights are quantised already and are quantised again; --quantization auto keeps them as they are")
    if not computes_codes and quantization in ("int8", "int4"):
        logger.warning("--quantization %s saves no memory here: torch computes with floats", quantization)
    return shape
