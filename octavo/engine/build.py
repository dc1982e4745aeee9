"""Puts an engine together: a runner, the policy around it, and the step loop.

    model      the worker resolves the runtime config, loads weights and warms up; torch is imported here and nowhere earlier
    FakeKV     a pool planned as for the model, without weights and torch (`OCTAVO_DEBUG=runner=fake`)
"""

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from octavo.config import Debug, EngineConfig, ResolvedConfig
from octavo.engine.core import EngineCore
from octavo.engine.trace import StepTrace
from octavo.errors import LoadError, OctavoError
from octavo.grammar.grammars import Grammars
from octavo.loading.resolve import ModelSource
from octavo.loading.shape import dummy_shape, shape_of
from octavo.log import Stopwatch, logger
from octavo.messages import Limits
from octavo.model_config import ModelConfig
from octavo.policy.block_pool import BlockKey, BlockPool, Event, OnEvent
from octavo.policy.cache_spec import CacheGeometry
from octavo.policy.kv_manager import KVManager
from octavo.policy.scheduler import Scheduler
from octavo.policy.state_pool import OnStateEvent, StateEvent
from octavo.policy.states import States
from octavo.sizing.auto import most_pinned, resolved
from octavo.sizing.memory_plan import plan_memory
from octavo.text.tokenizer import Tokenizer
from octavo.version import __version__
from octavo.worker.device import compilers_for, device_here
from octavo.worker.executor import Executor
from octavo.worker.fake_runner import FakeRunner
from octavo.worker.faults import Faults
from octavo.worker.machine import resolve_dtype
from octavo.worker.memory import host_memory
from octavo.worker.roster import Roster

if TYPE_CHECKING:
    from octavo.worker.compilers import Compilers
    from octavo.worker.facts import Facts
    from octavo.worker.host_ranks import Meeting
    from octavo.worker.model_runner import ModelRunner
    from octavo.worker.program import Place
    from octavo.worker.ranks import RankedRunner


@dataclass(frozen=True, slots=True)
class Share:
    """What an engine shares with the other engines of a server."""

    engines: int = 1  # engines that share the host's memory
    digest_key: bytes = b""  # key of the block digests; empty: each engine has its own
    weights: bytes = b""  # identifies the weights that all engines must have; empty: any
    clock_ahead: float = 0.0  # seconds by which the clients' clock is ahead of this host's

    def check_weights(self, facts: "Facts") -> None:
        if self.weights and facts.fingerprint() != self.weights:
            raise LoadError(f"{facts.source.path}: holds other weights than engine 0 found there")

    def clock(self) -> Callable[[], float]:
        """Returns the clock for request records, which clients compare with their own clock."""
        ahead = self.clock_ahead
        return (lambda: time.monotonic() + ahead) if ahead else time.monotonic


ALL = Share()
GiveTokenizer = Callable[[], Tokenizer]


@dataclass(slots=True)
class Started:
    """A runner that is ready, and what the policy needs to know about it."""

    config: ResolvedConfig
    executor: Executor
    geometry: CacheGeometry
    identity: bytes  # two caches hold the same bytes for the same tokens only if their identities are equal
    key: bytes  # key of the digests
    on_event: OnEvent | None = None
    roster: Roster = field(default_factory=Roster)
    weights: bytes = b""  # identifies the weights; empty: there are none
    on_state_event: OnStateEvent | None = None


def build_engine(
    config: EngineConfig, source: ModelSource, model: ModelConfig, debug: Debug, tokenizer: GiveTokenizer | None = None, epoch: int = 1,
    on_lost: Callable[[OctavoError], None] = lambda error: None, share: Share = ALL,
) -> EngineCore:  # fmt: skip
    """Returns an engine that is ready. Its trace is opened before anything is loaded.

        `tokenizer` is called when the first request with a grammar arrives; without it, such requests are refused.
        `epoch` counts the starts of this engine. `on_lost` is called in another thread if the engine loses a rank and cannot continue.
    """
    trace = None if config.trace is None else StepTrace(config.trace, goes_on=epoch > 1)
    fake = debug.runner == "fake"
    if fake:
        started = _start_fake(config, source, model, debug, share)
    else:
        started = _start_model(config, source, model, debug, on_lost, share)
    core = assemble(started, model, debug, tokenizer, share.clock())
    core.roster, core.weights = started.roster, started.weights
    if trace is not None:
        core.traces.append(trace)
        trace.follow(started.roster)
    return core


def _start_model(
    config: EngineConfig, source: ModelSource, model: ModelConfig, debug: Debug, on_lost: Callable[[OctavoError], None], share: Share
) -> Started:
    with compilers_for(config.device) as compilers:
        watch = Stopwatch()
        from octavo.worker.build import build_runner
        from octavo.worker.facts import settle

        logger.info("Importing torch and the engine took %.2f seconds", watch.total())
        watch = Stopwatch()
        if config.num_ranks > 1:
            return _start_ranks(config, source, model, debug, compilers, on_lost, share)
        facts = settle(config, source, model, debug, _alone(debug), share.engines)
        share.check_weights(facts)
        geometry = facts.plan_cache()
        runner = build_runner(facts, geometry, debug, compilers)
        logger.info("init engine took %.2f seconds", watch.total())
    start = started(facts, geometry, runner, _poison_taken(runner) if debug.check else None, share)
    return replace(start, on_state_event=_poison_taken_state(runner) if debug.check else None)


def _start_ranks(
    config: EngineConfig, source: ModelSource, model: ModelConfig, debug: Debug, compilers: "Compilers",
    on_lost: Callable[[OctavoError], None], share: Share,
) -> Started:  # fmt: skip
    watch = Stopwatch()
    facts, ranked = open_ranks(config, source, model, debug, compilers, on_lost, share=share)
    logger.info("init engine took %.2f seconds", watch.total())
    return replace(started(facts, ranked.geometry, ranked, ranked.on_event if debug.check else None, share), roster=ranked.roster)


def open_ranks(
    config: EngineConfig, source: ModelSource, model: ModelConfig, debug: Debug, compilers: "Compilers",
    on_lost: Callable[[OctavoError], None] = lambda error: None, verify: bool = False, share: Share = ALL,
) -> "tuple[Facts, RankedRunner]":  # fmt: skip
    """Returns a ready runner of all ranks. `verify`: every rank verifies its steps."""
    from octavo.worker.build import build_proven
    from octavo.worker.facts import settle
    from octavo.worker.ranks import with_ranks

    meeting = _meeting(config, debug)
    try:
        facts = settle(config, source, model, debug, meeting.place, share.engines)
        share.check_weights(facts)
        build = partial(build_proven, facts, debug=debug, compilers=compilers, verify=verify)
        return facts, with_ranks(facts, meeting, build, on_lost, verify)
    except BaseException:
        meeting.leave()
        raise


def _alone(debug: Debug) -> "Place":
    from octavo.worker.program import ALONE

    if debug.comm != "nccl":
        return ALONE
    from octavo.worker.host_ranks import alone_with_nccl

    return alone_with_nccl()


def _meeting(config: EngineConfig, debug: Debug) -> "Meeting":
    if config.distributed_executor_backend == "ray":
        from octavo.worker.ray_ranks import RayMeeting

        return RayMeeting(config)
    from octavo.worker.host_ranks import GpuMeeting, HostMeeting

    return GpuMeeting(config, debug) if device_here(config.device).device == "cuda" else HostMeeting(config)


def started(
    facts: "Facts", geometry: CacheGeometry, executor: Executor, on_event: OnEvent | None = None, share: Share = ALL
) -> Started:
    """Returns what the policy needs to know about a runner. `on_event` is called with every event of a block."""
    key = share.digest_key or secrets.token_bytes(32)
    weights = facts.fingerprint()
    return Started(facts.config, executor, geometry, _identity(facts, geometry, weights), key, on_event, weights=weights)


def _identity(facts: "Facts", geometry: CacheGeometry, weights: bytes) -> bytes:
    """Returns the identity of the cache: it contains everything that changes the cached bytes."""
    config = facts.config
    dtypes = f"{facts.dtype} {facts.needs.kv_cache_dtype}"
    numbers = f"{geometry.block_size} {config.tensor_parallel_size} {config.decode_context_parallel_size} {config.expert_ranks}"
    overrides = json.dumps(config.hf_overrides, sort_keys=True)
    positions = facts.positions(geometry.max_model_len)
    kernels = f"{facts.kernels} {facts.on_device and config.deterministic}"
    made = __version__, facts.source.name, dtypes, kernels, config.kv_cache_layout, config.quantization, numbers, overrides, positions
    return b"\0".join([weights, *(one.encode() for one in made)])


def _poison_taken(runner: "ModelRunner") -> OnEvent | None:
    """Returns a function for debug mode that fills a block with NaN when it is allocated."""
    from octavo.worker.kv_store import PagedStore, poison

    if not isinstance(runner.store, PagedStore):
        return None
    caches = runner.store.caches

    def on_event(event: Event, block: int, key: BlockKey | None) -> None:
        if event == "take":
            poison(caches, block)

    return on_event


def _poison_taken_state(runner: "ModelRunner") -> OnStateEvent:
    """As `_poison_taken`, for state slots."""
    from octavo.worker.kv_store import poison

    states = runner.store.states

    def on_event(event: StateEvent, slot: int, key: bytes | None) -> None:
        if event == "take":
            poison(states, slot)

    return on_event


def _start_fake(config: EngineConfig, source: ModelSource, model: ModelConfig, debug: Debug, share: Share) -> Started:
    settled = resolved(debug.overrule(config), "cpu")
    shape = (dummy_shape if config.load_format == "dummy" else shape_of)(source, model)
    needs = shape.needs(resolve_dtype(config.dtype, model.dtype, "cpu", None), config.quantization, config.kv_cache_dtype)
    geometry = plan_memory(needs, settled, host_memory().share(share.engines)).accepted()
    runner = FakeRunner(geometry, model.vocab_size, Faults(debug))
    # FakeKV's text depends on the digests, so their key is the same after every start, also in another process
    return Started(settled, runner, geometry, identity=b"fake", key=b"fake")


def assemble(
    started: Started, model: ModelConfig, debug: Debug, tokenizer: GiveTokenizer | None = None, clock: Callable[[], float] = time.monotonic
) -> EngineCore:
    """Builds the pool, KV manager, scheduler and step loop around a ready runner."""
    config, geometry = started.config, started.geometry
    caching = config.enable_prefix_caching
    states = None
    if geometry.num_states:
        sizes = geometry.num_states, config.max_num_seqs, geometry.block_size, geometry.max_model_len
        states = States(*sizes, caching, started.on_state_event)
    kv = KVManager(
        BlockPool(geometry.num_blocks, started.on_event),
        geometry.block_size,
        caching=caching,
        key=started.key,
        identity=started.identity,
        force_miss=debug.cache_force_miss,
        groups=geometry.groups,
        step_tokens=config.max_num_batched_tokens,
        states=states,
    )
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=geometry.max_model_len,
        vocab_size=model.vocab_size,
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        model_max_len=model.max_position,
        max_pinned_blocks=most_pinned(config, geometry.num_blocks),
    )
    scheduler = Scheduler(
        kv,
        limits,
        by_priority=config.scheduling_policy == "priority",
        end_ids=tuple(token for token in model.eos_token_ids if token < model.vocab_size),
        seed=config.seed,
        preempt_every=debug.preempt_every,
        stages=config.pipeline_parallel_size,
        clock=clock,
    )
    grammars = Grammars(tokenizer, model.vocab_size, scheduler.end_ids, debug.grammar_timeout)
    return EngineCore(scheduler, started.executor, config.pipeline_depth, debug.check, grammars)
