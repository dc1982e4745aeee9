"""Builds a runner from the runtime config: weights, cache, program, shadow, warm-up.

    native    one call per step, if the native library supports the model
    graph     on a GPU, or on a CPU with the reference kernels
    eager     otherwise
"""

from array import array
from dataclasses import replace

import torch

from octavo.attention.backend import AttentionBackend, NewBackend, load_backend
from octavo.attention.context_parallel import over_regions
from octavo.child import give_back_freed_memory
from octavo.comm.comm import NullComm
from octavo.config import Debug
from octavo.errors import ConfigError
from octavo.kernels import ops
from octavo.kernels.cpu.library import NativeLibrary
from octavo.kernels.cpu.sampling import NativeSampling
from octavo.kernels.ops import invariant_delta_net, invariant_expand
from octavo.layers.delta_net import DeltaNet
from octavo.layers.latent_attention import LatentAttention
from octavo.loading.checkpoint import FileCheckpoint
from octavo.loading.loader import NativeWeights, StoredParameters, load_packed, load_weights, weight_targets
from octavo.loading.requantized import DummyCheckpoint, as_wanted
from octavo.loading.resolve import open_checkpoint
from octavo.loading.shape import dummy_shape
from octavo.loading.sharded import of_rank, of_stage
from octavo.loading.views import reordered, taken_apart, under_rules, unstacked
from octavo.log import Stopwatch, logger
from octavo.messages import NoiseKey, RowWrite, StepPlan
from octavo.models.decoder import Decoder
from octavo.models.dense import DenseLayer
from octavo.models.registry import build_model, family_of
from octavo.policy.cache_spec import CacheGeometry
from octavo.quant.schemes import Packed, make_invariant
from octavo.sampling_params import SamplingParams
from octavo.sizing.gpu_size import captured_tokens
from octavo.step.step_tensors import RowLayout
from octavo.worker.compilers import Compilers, Wanted
from octavo.worker.facts import Facts
from octavo.worker.faults import Faults
from octavo.worker.graph_program import Graph
from octavo.worker.kernel_shapes import kernel_shapes
from octavo.worker.kv_store import ContiguousStore, KVStore, PagedStore
from octavo.worker.machine import num_cpus, num_threads
from octavo.worker.memory import out_of_memory_explained
from octavo.worker.model_runner import ModelRunner
from octavo.worker.native_program import NativeProgram
from octavo.worker.program import Eager, Program
from octavo.worker.rank_sampling import RankSampling
from octavo.worker.request_table import RequestTable
from octavo.worker.sampler import Sampling
from octavo.worker.shadow import Shadow, ShadowedStore, shadowed
from octavo.worker.shadow_program import watched_native, watched_torch
from octavo.worker.twice import computed_twice

GIB = 2**30


def build_runner(facts: Facts, geometry: CacheGeometry, debug: Debug, compilers: Compilers, shadow: Shadow | None = None) -> ModelRunner:
    """With `shadow`, every step is verified bit for bit against a contiguous cache, which is slow. `compilers`: for GPU kernels"""
    if shadow and (name := facts.backends.unverified) is not None:
        raise ConfigError(f"--attention-backend {name} cannot be verified, because it has no contiguous form: leave it at auto")
    if shadow:
        facts = replace(facts, place=computed_twice(facts.place))
    torch.set_num_threads(num_threads() if facts.library is None else 1)  # the native library has its own threads
    if facts.device.type == "cuda":
        _compile_ahead(facts, geometry, compilers)
    stored = _open_stored(facts)
    facts.warn_of_floats()
    facts.tell_of_fp8()
    facts.tell_of_windows()
    with out_of_memory_explained(facts.needs, facts.config):
        return _build(facts, geometry, stored, Faults.of(debug), compilers, shadow)


def build_proven(
    facts: Facts, geometry: CacheGeometry, debug: Debug, compilers: Compilers, verify: bool
) -> tuple[ModelRunner, Shadow | None]:
    """Returns a runner, and its shadow if every step is verified."""
    shadow = _make_shadow(facts, geometry) if verify else None
    return build_runner(facts, geometry, debug, compilers, shadow), shadow


def _make_shadow(facts: Facts, geometry: CacheGeometry) -> Shadow:
    limits = facts.config.max_num_seqs, geometry.max_model_len, geometry.block_size
    return Shadow(facts.needs.specs, *limits, facts.device, geometry.groups, facts.place.context, geometry.num_states)


def _build(
    facts: Facts, geometry: CacheGeometry, stored: StoredParameters, faults: Faults | None, compilers: Compilers, shadow: Shadow | None
) -> ModelRunner:
    links = tuple(group.links for group in geometry.groups)
    if facts.device.type == "cuda" and max(links) > 1:
        raise ConfigError("layers of this model need different numbers of bytes per token, which no GPU kernel supports: set device to cpu")
    layout = RowLayout(-(-geometry.max_model_len // geometry.block_size), geometry.max_model_len + 1, links, geometry.num_states > 0)
    table = RequestTable(facts.config.max_num_seqs, layout, facts.device)
    sampling: Sampling = ops if facts.library is None else NativeSampling(facts.library)
    if facts.comm.size > 1:
        sampling = RankSampling(facts.comm, facts.model.vocab_size)
    processed = facts.config.logprobs_mode == "processed"
    if facts.library is not None:
        program, store = _native(facts, geometry, stored, facts.library, table, shadow)
        runner = ModelRunner(program, sampling, store, table, faults, processed)
    else:
        eager, store = _eager(facts, geometry, stored, table, shadow)
        # the stages of a pipeline capture graphs of different shapes, but a step must have the same size on all of them
        graph = _graph(facts, eager) if facts.on_device and facts.place.stage.count == 1 else None
        program = eager if graph is None else graph
        runner = ModelRunner(watched_torch(program, eager, shadow) if shadow else program, sampling, store, table, faults, processed)
        if graph is not None and facts.device.type == "cuda":
            _warm_up_graph(facts, graph, runner, compilers)
    give_back_freed_memory()
    _log(facts, geometry)
    warm = facts.device.type == "cuda" and facts.place.stage.count == 1
    if not warm and not shadow:  # the shadow would compare the warm-up with a cache that did not see it
        _warm_up(runner, geometry)
    return runner


def _native(
    facts: Facts, geometry: CacheGeometry, stored: StoredParameters, library: NativeLibrary, table: RequestTable, shadow: Shadow | None
) -> tuple[Program, KVStore]:
    store, watch, tokens = _reserve(facts, geometry), Stopwatch(), facts.config.max_num_batched_tokens
    with torch.inference_mode():
        weights = NativeWeights(stored, library, facts.dtype)
        limits = geometry.block_size, geometry.max_model_len, tokens
        program = NativeProgram(facts.model, weights, library, store.caches, table, *limits, geometry.groups, facts.place, store.states)
    _log_loading(program, watch)
    if shadow is None:
        return program, store
    return watched_native(program, store, shadow), ShadowedStore(store, shadow)


def _eager(
    facts: Facts, geometry: CacheGeometry, stored: StoredParameters, table: RequestTable, shadow: Shadow | None
) -> tuple[Eager, KVStore]:
    backends, watch = facts.backends, Stopwatch()
    if shadow is not None:
        layers = iter([spec.layer for spec in facts.needs.specs if spec.buffers])  # in the order in which backends are built
        backends = backends.each(lambda backend: shadowed(backend, shadow, layers, _plain_backend(facts, backend)))
    with torch.inference_mode(facts.device.type == "cpu"):
        model = _load_model(facts, backends, geometry.max_model_len, stored)
    _log_loading(model, watch)
    torch.cuda.empty_cache()  # memory that was held while loading is not in the plan
    store = _reserve(facts, geometry)
    limits = geometry.block_size, facts.config.max_num_batched_tokens
    caches = [cache | state for cache, state in zip(store.caches, store.states, strict=True)]
    eager = Eager(model, backends.of, caches, table, *limits, geometry.groups, facts.place)
    return eager, store if shadow is None else ShadowedStore(store, shadow)


def _plain_backend(facts: Facts, paged: type[AttentionBackend]) -> type[AttentionBackend]:
    """Returns the contiguous backend that computes the same bits as the paged one."""
    if facts.place.context.size > 1:
        return over_regions(paged, facts.place.context)
    return load_backend("contiguous", facts.kernel_device, paged.capabilities.deterministic)


def _load_model(facts: Facts, backends: NewBackend, max_len: int, stored: StoredParameters) -> Decoder:
    packed = any(one.codes for one in facts.kept)
    with facts.device:  # only while the model is built: files are read on the host
        model = build_model(facts.model_config, getattr(torch, facts.dtype), backends, facts.comm, max_len, Packed() if packed else None)
        model.keep(facts.place.stage)
    if packed:
        load_packed(model, stored)
    else:
        load_weights(model, stored.checkpoint)
    if facts.on_device and facts.config.deterministic:
        make_invariant(model)
        for module in model.modules():
            if isinstance(module, DeltaNet):
                module.recur = invariant_delta_net
            elif isinstance(module, LatentAttention):
                module.expand = invariant_expand
            elif isinstance(module, DenseLayer):
                module.make_invariant()
    return model


def _graph(facts: Facts, eager: Eager) -> Graph:
    mixed = captured_tokens(facts.model) if facts.backends.graphs == "every" else 0
    return Graph(eager, facts.config.max_num_seqs, facts.config.max_num_batched_tokens, mixed)


def _reserve(facts: Facts, geometry: CacheGeometry) -> KVStore:
    config, specs, size, watch = facts.config, facts.needs.specs, geometry.kept_tokens, Stopwatch()
    store: KVStore
    if facts.backends.paged:
        layout = config.kv_cache_layout
        store = PagedStore(specs, geometry.num_blocks, size, facts.device, layout, geometry.groups, geometry.num_states)
    else:
        regions, blocks = config.max_num_seqs + facts.on_device, -(-geometry.max_model_len // size)
        limits = regions, blocks * size  # on a device the last region is for padding
        store = ContiguousStore(specs, *limits, facts.device, geometry.num_states)
    logger.info("Reserving the KV cache took %.2f seconds", watch.total())
    return store


def _open_stored(facts: Facts) -> StoredParameters:
    """Names and shapes are checked against a model on the meta device: a file that does not match uses no memory."""
    config = facts.config
    with torch.device("meta"):
        empty = build_model(facts.model_config, torch.float32, facts.backends, facts.comm, max_len=1)
        empty.keep(facts.place.stage)
        whole = empty if config.num_ranks == 1 else build_model(facts.whole, torch.float32, facts.backends, NullComm(), max_len=1)
    dummy = config.load_format == "dummy"
    if dummy:
        codes = {weight.name: weight.codes for weight in dummy_shape(facts.source, facts.whole).weights if weight.codes is not None}
        stored: FileCheckpoint = DummyCheckpoint(whole, config.seed, facts.device, codes, facts.source.quantization)
    else:
        named = unstacked(under_rules(open_checkpoint(facts.source), family_of(facts.whole).rules), facts.whole)
        named = taken_apart(named, facts.whole)
        stored = named if facts.source.kind == "gguf" else reordered(named, facts.whole)
    found = of_rank(stored, facts.whole, facts.comm.size, facts.comm.rank, facts.place.context.size, config.expert_ranks)
    if facts.place.stage.count > 1:
        elsewhere = weight_targets(whole).keys() - weight_targets(empty).keys()
        found = of_stage(found, facts.layers, elsewhere, facts.place.stage.last)
    return StoredParameters(empty, as_wanted(found, config.quantization, facts.model_config, facts.device, facts.kernel_device))


def _compile_ahead(facts: Facts, geometry: CacheGeometry, compilers: Compilers) -> None:
    """Starts compiling kernels while weights are read. Those of `deterministic` are compiled when steps are warmed up."""
    known = facts.place.context.size == 1 and not facts.config.deterministic
    shapes = kernel_shapes(facts.model, facts.kept) if known else None
    if shapes is None:
        compilers.close()
        return
    major, minor = torch.cuda.get_device_capability(facts.device)
    layout, capability = facts.config.kv_cache_layout, 10 * major + minor
    limits = geometry.block_size, geometry.max_model_len
    compilers.compile(Wanted(shapes, facts.dtype, *limits, layout, capability, processes=num_cpus()))


def _warm_up_graph(facts: Facts, graph: Graph, runner: ModelRunner, compilers: Compilers) -> None:
    watch = Stopwatch()
    with compilers.awaited():
        graph.warm_up()
        warm = watch.total()
        if not facts.config.enforce_eager:
            watch = Stopwatch()
            graph.capture()
            logger.info("Graph capturing took %.2f seconds", watch.total())
        watch = Stopwatch()
        runner.warm_up(getattr(torch, facts.dtype))  # last, since its kernels take longest to compile
    waited = compilers.seconds_waited
    logger.info("Waiting for kernels to be compiled took %.2f seconds", waited)
    logger.info("Warm-up took %.2f seconds", warm + watch.total() - waited)


def _warm_up(runner: ModelRunner, geometry: CacheGeometry) -> None:
    """Runs one prefill, one decode step and their sampling, so that the first request pays no one-time costs.

    The warm-up uses row 0 and the first blocks and state slots, which are still free, and clears them: no digest, count or arrival number
    of the engine is affected. A model that cannot run at all fails here, before the engine reports that it is ready.
    """
    watch, size, groups = Stopwatch(), geometry.block_size, geometry.groups
    tokens = min(3, geometry.max_model_len, (geometry.num_blocks - 1) // len(groups) * size)
    prompt = max(tokens - 1, 1)
    write = RowWrite(0, 0, array("q", [0] * prompt), prompt, 0, [[] for _ in groups], SamplingParams(), (), [], NoiseKey((0, 0), 0, 0), b"")
    entries = [(group, index) for group in range(len(groups)) for index in range(-(-tokens // (groups[group].links * size)))]
    new_blocks = [(0, *entry, block) for block, entry in enumerate(entries, 1)]
    states = [[(0, 1)], [(1, 2)]] if geometry.num_states else [[], []]
    plans = [StepPlan(1, [0], [0], [0], [prompt], [True], new_blocks=new_blocks, row_writes=[write], states=states[0])]
    if tokens > prompt:
        plans.append(StepPlan(2, [0], [0], [prompt], [1], [True], states=states[1]))
    faults, runner.faults = runner.faults, None
    for plan in plans:
        runner.forward(plan)
        runner.sample()
    runner.faults = faults
    runner.table.words[0] = 0
    for buffer in (buffer for cache in runner.store.caches for buffer in cache.values()):
        buffer[1 : 1 + len(new_blocks)] = 0
    for buffer in (buffer for state in runner.store.states for buffer in state.values()):
        buffer[1:3] = 0
    logger.info("Warm-up took %.2f seconds", watch.total())


def _log_loading(loaded: Decoder | Program, watch: Stopwatch) -> None:
    logger.info("Model loading took %.2f GiB and %.2f seconds", loaded.nbytes / GIB, watch.total())


def _log(facts: Facts, geometry: CacheGeometry) -> None:
    blocks, sequences = geometry.num_blocks - 1, geometry.concurrency(facts.config.max_num_batched_tokens)
    logger.info("Available KV cache memory: %.2f GiB", blocks * geometry.kept_tokens * geometry.bytes_per_token / GIB)
    logger.info(
        "KV cache size: %s tokens (%s blocks of %d), maximum concurrency for %s tokens per request: %.2fx",
        f"{round(sequences * geometry.max_model_len):,}", f"{blocks:,}", geometry.block_size, f"{geometry.max_model_len:,}", sequences,
    )  # fmt: skip
    if geometry.num_states:
        rows = facts.config.max_num_seqs
        logger.info(
            "State slots: %s of %.1f MiB, two for each of %s sequences and %s for prompts to continue from",
            f"{geometry.num_states - 1:,}", geometry.state_bytes / 2**20, f"{rows:,}", f"{geometry.num_states - 1 - 2 * rows:,}",
        )  # fmt: skip
    logger.info("Longest sequence: %s tokens (the model's own maximum is %s)", f"{geometry.max_model_len:,}",
                f"{facts.model_config.max_position:,}")  # fmt: skip
