"""The parts of an engine around a runner: pool, manager, scheduler, core."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.config import Debug, ResolvedConfig
from octavo.engine.core import EngineCore
from octavo.engine.grammar import Grammars
from octavo.messages import EngineFacts, Limits
from octavo.model_config import ModelConfig
from octavo.policy.block_pool import BlockPool, OnEvent
from octavo.policy.cache_spec import CacheGeometry
from octavo.policy.kv_manager import KVManager
from octavo.policy.scheduler import Scheduler
from octavo.text.tokenizer import Tokenizer
from octavo.worker.executor import Executor, Runner


@dataclass(slots=True)
class Engine:
    core: EngineCore
    geometry: CacheGeometry
    runner: Runner

    def facts(self, model_name: str, epoch: int) -> EngineFacts:
        return EngineFacts(model_name, epoch, self.core.scheduler.limits)


def assemble(
    config: ResolvedConfig,
    model: ModelConfig,
    debug: Debug,
    geometry: CacheGeometry,
    runner: Runner,
    executor: Executor,
    identity: bytes,
    key: bytes,
    on_event: OnEvent | None = None,
    tokenizer: Callable[[], Tokenizer] | None = None,
) -> Engine:
    """`executor` has been started. `identity`: what must be equal for two caches to hold the same bytes for the same tokens.

    `key`: of the digests. `tokenizer`: called when the first request with a grammar comes; without it, such requests are refused.
    """
    kv = KVManager(
        BlockPool(geometry.num_blocks, on_event),
        geometry.block_size,
        caching=config.enable_prefix_caching,
        key=key,
        identity=identity,
        force_miss=debug.cache_force_miss,
        groups=geometry.groups,
        step_tokens=config.max_num_batched_tokens,
    )
    limits = Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=geometry.max_model_len,
        vocab_size=model.vocab_size,
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_size,
        model_max_len=model.max_position,
    )
    scheduler = Scheduler(
        kv,
        limits,
        by_priority=config.scheduling_policy == "priority",
        end_ids=tuple(token for token in model.eos_token_ids if token < model.vocab_size),
        seed=config.seed,
        preempt_every=debug.preempt_every,
    )
    grammars = Grammars(tokenizer, model.vocab_size, scheduler.end_ids, debug.grammar_timeout)
    return Engine(EngineCore(scheduler, executor, config.pipeline_depth, debug.check, grammars), geometry, runner)
