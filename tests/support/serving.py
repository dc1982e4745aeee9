"""The engine on FakeKV with the text side on top, put together as `LLM` does it, with a real tokenizer.

Unlike `FakeEngine` it keeps nothing of what has ended, so that whatever grows with the number of requests is the engine's.
"""

from octavo.config import Debug
from octavo.engine.core import EngineCore
from octavo.engine.output import OutputProcessor
from octavo.messages import AddRequest, Limits
from octavo.outputs import RequestOutput, TextDelta
from octavo.policy.block_pool import BlockPool
from octavo.policy.cache_spec import CacheGeometry
from octavo.policy.kv_manager import KVManager
from octavo.policy.scheduler import Scheduler
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.worker.executor import Inproc
from octavo.worker.fake_runner import FakeRunner
from octavo.worker.faults import Faults
from tests.support.tokenizers import stories_metadata


class FakeService:
    def __init__(self, *, block_size: int = 4, num_blocks: int = 200, rows: int = 8, budget: int = 64, depth: int = 1) -> None:
        self.tokenizer = Tokenizer.from_gguf(stories_metadata(), "tok512.bin")
        vocab, max_len = self.tokenizer.vocab_size, (num_blocks - 1) * block_size + 1
        self.pool = BlockPool(num_blocks)
        kv = KVManager(self.pool, block_size, True, b"k" * 16, b"model")
        limits = Limits(rows, budget, max_len, vocab, num_blocks, block_size)
        self.scheduler = Scheduler(kv, limits, end_ids=self.tokenizer.eos_token_ids)
        runner = FakeRunner(CacheGeometry(num_blocks, block_size, max_len, 1), vocab, Faults(Debug()))
        self.core = EngineCore(self.scheduler, Inproc(lambda: runner), depth)
        self.processor = OutputProcessor(self.tokenizer)

    def add(self, name: str, prompt: list[int], params: SamplingParams, salt: str = "") -> None:
        request = AddRequest(name, prompt, params, cache_salt=salt)
        self.core.add(request)
        self.processor.add(request, None)

    def step(self) -> tuple[list[TextDelta], list[RequestOutput]]:
        processed = self.processor.process(self.core.step())
        for request_id, index in processed.aborts:
            self.core.abort(request_id, index)
        return processed.deltas, processed.finished

    def drop(self, name: str) -> None:
        """The client has left."""
        self.core.abort(name)
        self.processor.drop(name)

    def run(self) -> tuple[list[TextDelta], list[RequestOutput]]:
        deltas, finished = list[TextDelta](), list[RequestOutput]()
        while self.core.has_work:
            news = self.step()
            deltas, finished = deltas + news[0], finished + news[1]
        return deltas, finished

    def is_idle(self) -> bool:
        nothing = not (self.core.has_work or self.processor._requests or self.scheduler._planned or self.scheduler.kv.pending)
        return nothing and not any(self.pool.ref) and len(self.scheduler.rows.free) == self.scheduler.limits.max_num_seqs
