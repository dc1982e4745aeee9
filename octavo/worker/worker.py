"""`Worker`: from a model's files to a runner that is ready: device, dtype, backend, cache, weights, warm-up, in that order.

It implements the runner seam of the executor and hands every plan on to `ModelRunner`.
"""

from collections import Counter

import torch

from octavo.attention.backend import choose_backend
from octavo.attention.contiguous import ContiguousBackend
from octavo.attention.triton import TritonRegions
from octavo.child import give_back_freed_memory
from octavo.config import Debug, EngineConfig
from octavo.errors import ConfigError
from octavo.kernels.cpu.levels import open_native
from octavo.kernels.cpu.library import NativeLibrary
from octavo.kernels.cpu.sampling import NativeSampling
from octavo.kernels.reference import sampling as torch_sampling
from octavo.kernels.row_words import RowLayout
from octavo.layers.comm import NullComm
from octavo.layers.rotary import build_rope
from octavo.loading.dummy import DummyCheckpoint
from octavo.loading.loader import load_weights
from octavo.loading.native_loader import NativeWeights, StoredParameters
from octavo.loading.packed_loader import load_packed
from octavo.loading.requantized import as_wanted
from octavo.loading.resolve import ModelSource, open_checkpoint
from octavo.loading.shape import ModelShape, shape_of
from octavo.log import Stopwatch, logger
from octavo.messages import StepPlan
from octavo.model_config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.policy.auto import check_cache_dtype, resolved
from octavo.policy.cache_spec import CacheGeometry
from octavo.policy.gpu_size import captured_tokens
from octavo.policy.memory_plan import plan_memory
from octavo.policy.model_size import Kept
from octavo.quant.device_packed import Packed
from octavo.worker.compilers import Compilers, Wanted
from octavo.worker.device import device_here, start_lines
from octavo.worker.device_program import DeviceProgram, Steps
from octavo.worker.device_rows import DeviceRows
from octavo.worker.device_runner import DeviceRunner
from octavo.worker.executor import Masks, Promise
from octavo.worker.faults import Faults
from octavo.worker.kv_store import ContiguousStore, KVStore, PagedStore
from octavo.worker.machine import num_cpus, num_threads, refuse_float16, resolve_dtype
from octavo.worker.memory import memory, out_of_memory_explained
from octavo.worker.model_runner import ModelRunner
from octavo.worker.native_program import NativeProgram
from octavo.worker.program import Eager, Program
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import Sampling
from octavo.worker.shadow import Shadow, ShadowedProgram, ShadowedSteps, ShadowedStore, shadowed
from octavo.worker.warm_up import warm_up

GIB = 2**30


class Worker:
    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        model_config: ModelConfig,
        debug: Debug,
        shadow: bool = False,
        compilers: Compilers | None = None,
    ) -> None:
        """With `shadow`, every step is proven against a contiguous cache: slow, and exact. `compilers`: for a GPU's kernels"""
        watch = Stopwatch()
        choice = device_here(config.device)
        if choice.device == "cuda":
            logger.info("Starting CUDA took %.2f seconds", watch.total())
        for line in start_lines(choice):
            logger.info(line)
        self.config = config = resolved(debug.overrule(config), choice.device)
        self.source = source
        self.model_config = model_config
        self.compilers = compilers or Compilers()
        self.debug = debug
        self.faults = Faults(debug)
        self._shadow_wanted = shadow
        self.device = torch.device(config.device)
        self.on_device = config.device == "cuda" or debug.runner == "device"  # the runner that never waits, on the CPU with kernels' twins
        self.library = self._open_native()
        level = self.library.level if self.library else None
        refuse_float16(config, config.device, level)
        self.dtype = resolve_dtype(config.dtype, model_config.dtype, config.device, level)
        check_cache_dtype(config, config.device, self.dtype)
        threads = self.library.threads if self.library else 0
        shape = self._shape()
        self.needs = shape.needs(self.dtype, config.quantization, config.kv_cache_dtype, threads, config.device)
        self.kept = self._kept(shape)
        self._floats = self._kept_as_floats(shape)
        self.specs = self.needs.specs
        self.backend = choose_backend(config, self.dtype, self.on_device)
        if shadow and self.backend.name == "flashinfer":
            raise ConfigError("--attention-backend flashinfer cannot be verified, for it has no contiguous form: leave it at auto")

    def start(self) -> CacheGeometry:
        torch.set_num_threads(num_threads() if self.library is None else 1)  # the native library has threads of its own
        geometry = self.plan_cache()
        if self.device.type == "cuda":
            self._compile_ahead(geometry)
        stored = self._open_stored()
        if self._floats:
            logger.warning(self._floats)
        with out_of_memory_explained(self.needs, self.config, self.stop):
            self._build(geometry, stored)
        return geometry

    def _build(self, geometry: CacheGeometry, stored: StoredParameters) -> None:
        self.runner: ModelRunner | DeviceRunner
        if self.on_device:
            self._build_on_device(geometry, stored)
            return
        self._reserve(geometry)
        program = self._load(geometry, stored)
        give_back_freed_memory()
        sampling: Sampling = torch_sampling if self.library is None else NativeSampling(self.library)
        self._log(geometry)
        blocks = -(-geometry.max_model_len // geometry.block_size)
        self.table = RequestTable(self.config.max_num_seqs, geometry.max_model_len, blocks)
        processed = self.config.logprobs_mode == "processed"
        self.runner = ModelRunner(program, sampling, self.store, self.table, geometry.block_size, self.faults, processed)
        if not self._shadow_wanted:  # it would compare the warm-up with a cache that has not seen it
            watch = Stopwatch()
            warm_up(program, sampling, self.specs, geometry, self.backend.paged)
            logger.info("Warm-up took %.2f seconds", watch.total())

    def _reserve(self, geometry: CacheGeometry) -> None:
        watch = Stopwatch()
        self.store: KVStore = self._make_store(geometry)
        logger.info("Reserving the KV cache took %.2f seconds", watch.total())
        if self._shadow_wanted:
            self._add_shadow(geometry)

    def _build_on_device(self, geometry: CacheGeometry, stored: StoredParameters) -> None:
        size = geometry.block_size
        layout = RowLayout(-(-geometry.max_model_len // size), geometry.max_model_len + 1)
        if self._shadow_wanted:
            self._reserve(geometry)  # the model is built around the shadow
        watch = Stopwatch()
        model = self._load_model(geometry.max_model_len, stored)
        logger.info("Model loading took %.2f GiB and %.2f seconds", model.nbytes / GIB, watch.total())
        torch.cuda.empty_cache()  # what was held on the way is no part of the plan
        if not self._shadow_wanted:
            self._reserve(geometry)
        self._log(geometry)
        rows = DeviceRows(self.config.max_num_seqs, layout, self.device)
        program = DeviceProgram(model, self.backend, self.store.caches, rows, size, self.config.max_num_batched_tokens)
        captured, settings = captured_tokens(self.model_config), self.config
        steps = Steps(program, settings.max_num_seqs, settings.max_num_batched_tokens, captured)
        watched = ShadowedSteps(steps, self.shadow) if self._shadow_wanted else steps
        self.runner = DeviceRunner(watched, self.store, rows, self.faults, self.config.logprobs_mode == "processed")
        if self.device.type == "cuda":
            self._warm_up(steps, self.runner)

    def _warm_up(self, steps: Steps, runner: DeviceRunner) -> None:
        watch = Stopwatch()
        with self.compilers.awaited():
            steps.warm_up()
            warm = watch.total()
            if not self.config.enforce_eager:
                watch = Stopwatch()
                steps.capture()
                logger.info("Graph capturing took %.2f seconds", watch.total())
            watch = Stopwatch()
            runner.warm_up(getattr(torch, self.dtype))  # last: its kernels take longest to compile
        waited = self.compilers.seconds_waited
        logger.info("Waiting for kernels to be compiled took %.2f seconds", waited)
        logger.info("Warm-up took %.2f seconds", warm + watch.total() - waited)

    def _compile_ahead(self, geometry: CacheGeometry) -> None:
        """Kernels are compiled while weights are read."""
        major, minor = torch.cuda.get_device_capability(self.device)
        codes = [(one.matrix, one.codes) for one in self.kept if one.codes]
        packed = {
            (one.rows, one.columns, form.bits, form.group, one.bias, one.name == "gate_up") for one, form in codes
        }
        self.compilers.compile(
            Wanted(
                self.model_config, self.dtype, geometry.block_size, geometry.max_model_len, self.config.kv_cache_layout,
                10 * major + minor, processes=num_cpus(), packed=tuple(sorted(packed)),
            )
        )  # fmt: skip

    def forward(self, plan: StepPlan) -> None:
        self.runner.forward(plan)

    def sample(self, masks: Masks | None = None) -> Promise:
        return self.runner.sample(masks)

    def stop(self) -> None:
        """Drop every reference, so that all memory goes."""
        for name in ("runner", "store", "table", "shadow"):
            if name in self.__dict__:
                delattr(self, name)

    def plan_cache(self) -> CacheGeometry:
        """What fits, counted before anything is loaded; a refusal says what to turn."""
        plan = plan_memory(self.needs, self.config, memory(self.config))
        if plan.refusal is not None:
            raise ConfigError(plan.refusal)
        return plan.geometry

    def _shape(self) -> ModelShape:
        """Of the weights there are; random ones are floats."""
        if self.config.load_format == "dummy":
            return ModelShape(self.source.name, self.model_config)
        shape, asked = shape_of(self.source, self.model_config), self.config.quantization
        if shape.packed and asked in ("int8", "int4"):
            logger.warning("The weights are quantised already and are quantised again; --quantization auto keeps them as they are")
        if self.library is None and not self.on_device and asked in ("int8", "int4"):
            logger.warning("--quantization %s saves no memory here: torch computes with floats", asked)
        return shape

    @property
    def _form(self) -> str:
        """Whose codes floats become."""
        return "cuda" if self.on_device else "cpu"

    def _kept(self, shape: ModelShape) -> list[Kept]:
        """What becomes of each matrix, where codes are computed with."""
        if self.library is None and not self.on_device:
            return []
        return shape.kept(self.dtype, self.config.quantization, self._form)

    def _kept_as_floats(self, shape: ModelShape) -> str:
        """What is to be said of matrices that should be codes and cannot be."""
        asked = self.config.quantization
        wanted = [one for one in self.kept if asked in ("int8", "int4") or shape.expands(one, asked)]
        floats = Counter(one.matrix.name for one in wanted if one.codes is None)
        names = ", ".join(f"{count} {name}" for name, count in floats.items())
        why = "their parts cannot be merged, or their rows are not of whole groups"
        return names and f"Some matrices are kept as {self.dtype}, not quantised: {names} ({why})"

    def _make_store(self, geometry: CacheGeometry) -> KVStore:
        if self.backend.paged:
            return PagedStore(self.specs, geometry.num_blocks, geometry.block_size, self.device, self.config.kv_cache_layout)
        regions, blocks = self.config.max_num_seqs + self.on_device, -(-geometry.max_model_len // geometry.block_size)
        return ContiguousStore(self.specs, regions, blocks * geometry.block_size, self.device)  # on a device the last is padding's

    def _add_shadow(self, geometry: CacheGeometry) -> None:
        self.shadow = Shadow(self.specs, self.config.max_num_seqs, geometry.max_model_len, geometry.block_size, self.device)
        self.shadow.watches = not self.on_device  # there a step is computed once more for it
        self.store = ShadowedStore(self.store, self.shadow)
        self.backend = shadowed(self.backend, self.shadow, TritonRegions if self.on_device else ContiguousBackend)

    def _open_stored(self) -> StoredParameters:
        """Names and shapes are compared with a model without memory: a file that does not fit costs none."""
        with torch.device("meta"):
            empty = build_model(self.model_config, torch.float32, self.backend, NullComm(), max_len=1)
        dummy = self.config.load_format == "dummy"
        found = DummyCheckpoint(empty, self.config.seed, self.device) if dummy else open_checkpoint(self.source)
        return StoredParameters(empty, as_wanted(found, self.config.quantization, self.model_config, self.device, self._form))

    def _open_native(self) -> NativeLibrary | None:
        """The native kernels, if they are wanted."""
        if not self.config.wants_native or self.on_device:
            return None
        watch = Stopwatch()
        library = open_native(self.config.cpu_isa, num_threads())
        if library is not None:
            logger.info("Checking the native kernels took %.2f seconds (%s, threads: %d)", watch.total(), library.level, library.threads)
        return library

    def _load(self, geometry: CacheGeometry, stored: StoredParameters) -> Program:
        watch = Stopwatch()
        with torch.inference_mode():
            program: Program
            if self.library is not None:
                program = self._load_native(geometry, stored, self.library)
            else:
                program = Eager(self._load_model(geometry.max_model_len, stored), self.backend)
        logger.info("Model loading took %.2f GiB and %.2f seconds", program.nbytes / GIB, watch.total())
        return program

    def _load_model(self, max_len: int, stored: StoredParameters) -> Decoder:
        packed = self.on_device and any(one.codes for one in self.kept)
        dtype, scheme = getattr(torch, self.dtype), Packed() if packed else None
        with self.device:  # not while files are read: that is done on the host
            model = build_model(self.model_config, dtype, self.backend, NullComm(), max_len, scheme)
        if packed:
            load_packed(model, stored)
        else:
            load_weights(model, stored.checkpoint)
        return model

    def _load_native(self, geometry: CacheGeometry, stored: StoredParameters, library: NativeLibrary) -> Program:
        rope = build_rope(self.model_config.rope, self.model_config.head_dim, geometry.max_model_len)
        weights = NativeWeights(stored, library, self.dtype)
        program = NativeProgram(self.model_config, weights, rope, library, geometry.block_size)
        return ShadowedProgram(program, self.store.caches, self.shadow) if self._shadow_wanted else program

    def _log(self, geometry: CacheGeometry) -> None:
        tokens = (geometry.num_blocks - 1) * geometry.block_size
        logger.info("Available KV cache memory: %.2f GiB", tokens * geometry.bytes_per_token / GIB)
        logger.info(
            "KV cache size: %s tokens (%s blocks of %d), maximum concurrency for %s tokens per request: %.2fx",
            f"{tokens:,}", f"{geometry.num_blocks - 1:,}", geometry.block_size, f"{geometry.max_model_len:,}",
            tokens / geometry.max_model_len,
        )  # fmt: skip
        logger.info("Longest sequence: %s tokens (the model's own maximum is %s)", f"{geometry.max_model_len:,}",
                    f"{self.model_config.max_position:,}")  # fmt: skip

