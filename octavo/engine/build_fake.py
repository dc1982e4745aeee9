"""Puts an engine together around FakeKV: a pool planned as for the model, no weights, and no torch to import."""

from collections.abc import Callable

from octavo.config import Debug, EngineConfig
from octavo.engine.assemble import Engine, assemble
from octavo.errors import ConfigError
from octavo.loading.resolve import ModelSource
from octavo.loading.shape import ModelShape, shape_of
from octavo.model_config import ModelConfig
from octavo.policy.auto import resolved
from octavo.policy.memory_plan import plan_memory
from octavo.text.tokenizer import Tokenizer
from octavo.worker.executor import Inproc
from octavo.worker.fake_runner import FakeRunner
from octavo.worker.faults import Faults
from octavo.worker.machine import resolve_dtype
from octavo.worker.memory import host_memory


def build_fake(
    config: EngineConfig, source: ModelSource, model: ModelConfig, debug: Debug, tokenizer: Callable[[], Tokenizer] | None
) -> Engine:
    settled = resolved(debug.overrule(config), "cpu")
    shape = ModelShape(source.name, model) if config.load_format == "dummy" else shape_of(source, model)
    needs = shape.needs(resolve_dtype(config.dtype, model.dtype, "cpu", None), config.quantization, config.kv_cache_dtype)
    plan = plan_memory(needs, settled, host_memory())
    if plan.refusal is not None:
        raise ConfigError(plan.refusal)
    runner = FakeRunner(plan.geometry, model.vocab_size, Faults(debug))
    executor = Inproc(lambda: runner)
    # the digests are part of its text: the same after every start, also of another process
    return assemble(settled, model, debug, executor.start(), runner, executor, identity=b"fake", key=b"fake", tokenizer=tokenizer)
