"""Puts an engine together: worker, pool, manager, scheduler, core. The one place that knows all the parts."""

import secrets
from dataclasses import dataclass

from octavo.config import Debug, EngineConfig
from octavo.engine.core import EngineCore
from octavo.loading.resolve import ModelSource, open_checkpoint
from octavo.log import Stopwatch, logger
from octavo.model_config import ModelConfig
from octavo.policy.block_pool import BlockPool, Event, OnEvent
from octavo.policy.cache_spec import CacheGeometry
from octavo.policy.door import Limits
from octavo.policy.kv_manager import KVManager
from octavo.policy.scheduler import Scheduler
from octavo.worker.compilers import Compilers
from octavo.worker.executor import Inproc, Runner
from octavo.worker.fake_runner import FakeRunner
from octavo.worker.faults import Faults
from octavo.worker.kv_store import PagedStore, poison
from octavo.worker.worker import Worker


@dataclass(slots=True)
class Engine:
    core: EngineCore
    geometry: CacheGeometry
    runner: Runner


def build_engine(
    config: EngineConfig,
    source: ModelSource,
    model: ModelConfig,
    debug: Debug,
    worker: Worker | None = None,
    on_event: OnEvent | None = None,
    compilers: Compilers | None = None,
) -> Engine:
    """An engine that is ready. `worker` and `on_event` are for those who watch it, such as `octavo verify`."""
    watch = Stopwatch()
    worker = worker or Worker(config, source, model, debug, compilers=compilers)
    runner: Runner = worker if debug.runner != "fake" else FakeRunner(worker.plan_cache(), model.vocab_size, Faults(debug))
    settled = worker.config  # with nothing left open
    executor = Inproc(lambda: runner)
    geometry = executor.start()
    pool = BlockPool(geometry.num_blocks, on_event or _poison_taken(runner, debug))
    kv = KVManager(
        pool,
        geometry.block_size,
        caching=config.enable_prefix_caching,
        key=secrets.token_bytes(32),
        identity=_identity(config, source, runner, geometry),
        force_miss=debug.cache_force_miss,
    )
    limits = Limits(
        max_num_seqs=settled.max_num_seqs,
        max_num_batched_tokens=settled.max_num_batched_tokens,
        max_model_len=geometry.max_model_len,
        vocab_size=model.vocab_size,
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
    )
    scheduler = Scheduler(
        kv,
        limits,
        by_priority=config.scheduling_policy == "priority",
        end_ids=tuple(token for token in model.eos_token_ids if token < model.vocab_size),
        seed=config.seed,
        preempt_every=debug.preempt_every,
    )
    logger.info("init engine took %.2f seconds", watch.total())
    return Engine(EngineCore(scheduler, executor, settled.pipeline_depth, debug.check), geometry, runner)


def _identity(config: EngineConfig, source: ModelSource, runner: Runner, geometry: CacheGeometry) -> bytes:
    """What must be equal for two caches to hold the same bytes for the same tokens."""
    dtypes = f"{runner.dtype} {runner.needs.kv_cache_dtype}" if isinstance(runner, Worker) else "fake"
    weights = b"dummy%d" % config.seed if config.load_format == "dummy" else open_checkpoint(source).fingerprint()
    settings = (source.name, dtypes, config.quantization, str(geometry.block_size))
    return b"\0".join([weights, *(setting.encode() for setting in settings)])


def _poison_taken(runner: Runner, debug: Debug) -> OnEvent | None:
    """In debug mode a block handed out is full of NaN until it is written."""
    if not debug.check or not isinstance(runner, Worker) or not isinstance(runner.store, PagedStore):
        return None
    caches = runner.store.caches

    def on_event(event: Event, block: int, digest: bytes | None) -> None:
        if event == "take":
            poison(caches, block)

    return on_event
