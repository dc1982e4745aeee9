"""Puts an engine together around a model: the one place that knows worker and policy both. Importing it imports torch."""

import secrets
from collections.abc import Callable

from octavo.config import Debug, EngineConfig
from octavo.engine.assemble import Engine, assemble
from octavo.loading.resolve import ModelSource, open_checkpoint
from octavo.log import Stopwatch, logger
from octavo.model_config import ModelConfig
from octavo.policy.block_pool import BlockKey, Event, OnEvent
from octavo.policy.cache_spec import CacheGeometry
from octavo.text.tokenizer import Tokenizer
from octavo.worker.compilers import Compilers
from octavo.worker.executor import Inproc
from octavo.worker.kv_store import PagedStore, poison
from octavo.worker.worker import Worker


def build_engine(
    config: EngineConfig,
    source: ModelSource,
    model: ModelConfig,
    debug: Debug,
    worker: Worker | None = None,
    on_event: OnEvent | None = None,
    compilers: Compilers | None = None,
    tokenizer: Callable[[], Tokenizer] | None = None,
) -> Engine:
    """An engine that is ready. `worker` and `on_event` are for those who watch it, such as `octavo verify`."""
    watch = Stopwatch()
    runner = worker or Worker(config, source, model, debug, compilers=compilers)
    executor = Inproc(lambda: runner)
    geometry = executor.start()
    identity, key = _identity(config, source, runner, geometry), secrets.token_bytes(32)
    on_event = on_event or _poison_taken(runner, debug)
    engine = assemble(runner.config, model, debug, geometry, runner, executor, identity, key, on_event, tokenizer)
    logger.info("init engine took %.2f seconds", watch.total())
    return engine


def _identity(config: EngineConfig, source: ModelSource, worker: Worker, geometry: CacheGeometry) -> bytes:
    """What must be equal for two caches to hold the same bytes for the same tokens."""
    dtypes = f"{worker.dtype} {worker.needs.kv_cache_dtype}"
    weights = b"dummy%d" % config.seed if config.load_format == "dummy" else open_checkpoint(source).fingerprint()
    settings = (source.name, dtypes, config.quantization, str(geometry.block_size))
    return b"\0".join([weights, *(setting.encode() for setting in settings)])


def _poison_taken(worker: Worker, debug: Debug) -> OnEvent | None:
    """In debug mode a block handed out is full of NaN until it is written."""
    if not debug.check or not isinstance(worker.store, PagedStore):
        return None
    caches = worker.store.caches

    def on_event(event: Event, block: int, key: BlockKey | None) -> None:
        if event == "take":
            poison(caches, block)

    return on_event
