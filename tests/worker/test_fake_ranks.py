"""Ranks that die, stall and are slow, on FakeKV: the real executor and the real messages, with threads in the place of processes.

A rank is a FakeKV that is told what every rank is told. One that is not of the last stage gets its tokens with the next plan, as real ones
do: a token that is lost, doubled or of another row changes the text. When the group is lost, all of it is started again, and who had not
been answered asks again.
"""

import queue
import threading
import time
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.errors import OctavoError, RankLost
from octavo.messages import StepPlan
from octavo.models.stages import Stage
from octavo.policy import invariants
from octavo.policy.cache_spec import CacheGeometry
from octavo.sampling_params import SamplingParams
from octavo.worker.executor import Kept, Masks
from octavo.worker.fake_runner import FakeRunner
from octavo.worker.host_ranks import Peer
from octavo.worker.program import NOBODY, Place
from octavo.worker.rank_process import (
    LENGTH_BYTES,
    Answer,
    Forward,
    RankOrders,
    Ready,
    Result,
    Room,
    Sample,
    answer,
    encode,
    masks_of,
    order,
)
from octavo.worker.ranks import with_ranks
from octavo.worker.request_table import SampledToken
from tests.support.fake import VOCAB, ChosenFaults, FakeEngine

BLOCK, BLOCKS, ROWS, LONGEST = 4, 30, 5, 60
STALL_SECONDS = 0.03  # after which a rank that says nothing is given up


class Troubles:
    """What goes wrong with a rank, by dice that all ranks share."""

    def __init__(self, seed: int, deaths: float, stalls: float, pauses: float) -> None:
        self.dice, self.odds = Random(seed), (deaths, stalls, pauses)
        self.seen = {"dies": 0, "stalls": 0, "is slow": 0}
        self._lock = threading.Lock()

    def next(self) -> str | None:
        with self._lock:
            drawn = self.dice.random()
            for (name, _), odds in zip(self.seen.items(), self.odds):
                if drawn < odds:
                    self.seen[name] += 1
                    return name
                drawn -= odds
        return None


class FakeStage(FakeRunner):
    """FakeKV as one rank. Where it is not of the last stage, a row has only the tokens that it was told."""

    last = True

    @property
    def table(self) -> "FakeStage":
        return self

    @property
    def program(self) -> Any:
        return SimpleNamespace(nbytes=0)

    def learn(self, sampled: list[SampledToken]) -> None:
        for row, position, token in sampled if not self.last else []:
            tokens = self.rows[row].tokens
            assert len(tokens) >= position, "a token before this one was lost"
            tokens[position:] = tokens[position:position]
            tokens.append(token)

    def sample(self, masks: Masks | None = None) -> Kept:
        plan: StepPlan = self._plan
        lengths = {row: len(self.rows[row].tokens) for row in plan.row}
        made = super().sample(masks)
        if not self.last:
            for row, length in lengths.items():
                del self.rows[row].tokens[length:]
        return made


class ThreadPeer:
    """A rank in a thread of its own, behind the messages of a process."""

    def __init__(
        self, orders: RankOrders, troubles: Troubles, on_answer: Callable[[Peer, Answer], None], on_end: Callable[[Peer], None]
    ) -> None:
        self.rank, self.ended, self._how = orders.rank, False, "ended"
        stage = Stage(orders.rank // orders.config.tensor_parallel_size, orders.config.pipeline_parallel_size)
        self._last = stage.last
        self._reports = stage.last and stage.count > 1 and orders.rank % orders.config.tensor_parallel_size == 0
        self._troubles, self._on_answer, self._on_end = troubles, on_answer, on_end
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def tell(self, message: bytes) -> None:
        if self.ended:
            raise self.why()
        self._messages.put(message)

    def why(self) -> OctavoError:
        return RankLost(f"rank {self.rank} {self._how}")

    def stop(self) -> None:
        self._messages.put(None)
        self._thread.join()

    def _say(self, message: Answer) -> None:
        self._on_answer(self, answer(encode(message)[LENGTH_BYTES:]))

    def _serve(self) -> None:
        self._say(Room(BLOCKS + self.rank, LONGEST + self.rank))
        if (agreed := self._messages.get()) is None:
            return
        room = order(agreed[LENGTH_BYTES:])
        assert isinstance(room, Room)
        runner = FakeStage(CacheGeometry(room.num_blocks, BLOCK, room.max_model_len, 1), VOCAB, ChosenFaults())
        runner.last = self._last
        self._say(Ready(self.rank, 0, "here", [], "cpu", "fake", 0, 0, 0))
        while (body := self._messages.get()) is not None:
            trouble = self._troubles.next()
            if trouble == "dies" or trouble == "stalls":
                if trouble == "stalls":
                    time.sleep(STALL_SECONDS)
                self._how = "was killed" if trouble == "dies" else f"did not answer for {STALL_SECONDS} s"
                break
            if trouble == "is slow":
                time.sleep(self._troubles.dice.random() * 0.002)
            message = order(body[LENGTH_BYTES:])
            if isinstance(message, Forward):
                runner.learn(message.sampled)
                runner.forward(message.plan)
                if message.plan.mask_rows:
                    continue
            made = runner.sample(masks_of(message) if isinstance(message, Sample) else None)
            if self._reports:
                self._say(Result(made.result()))
        self.ended = True
        self._on_end(self)


class ThreadMeeting:
    alike = False

    def __init__(self, config: EngineConfig, troubles: Troubles) -> None:
        self.place = Place(NOBODY, stage=Stage(0, config.pipeline_parallel_size))
        self._troubles = troubles

    def cpus_of(self, rank: int) -> list[int]:
        return []

    def peer(self, orders: RankOrders, on_answer: Callable[[Peer, Answer], None], on_end: Callable[[Peer], None]) -> Peer:
        return ThreadPeer(orders, self._troubles, on_answer, on_end)

    def give_out(self) -> None: ...

    def wait_at_most(self, seconds: float) -> None: ...

    def abort(self) -> None: ...

    def leave(self) -> None: ...


def opened(config: EngineConfig, troubles: Troubles) -> FakeEngine:
    stages = config.pipeline_parallel_size
    engine = FakeEngine(
        block_size=BLOCK, num_blocks=BLOCKS, rows=ROWS, budget=12 * stages, most_len=LONGEST, check=False, stages=stages, preempt_every=13
    )
    geometry = CacheGeometry(BLOCKS, BLOCK, engine.max_len, 1)
    facts: Any = SimpleNamespace(
        config=config, source=SimpleNamespace(path="", kind="folder", name="fake"), fingerprint=lambda: b"", device="cpu", kernels="fake",
        layers=range(1), plan_cache=lambda alike: geometry,
    )  # fmt: skip
    first = FakeStage(geometry, VOCAB, engine.faults)
    first.last = stages == 1
    runner: Any = first
    executor: Any = with_ranks(facts, ThreadMeeting(config, troubles), lambda geometry: (runner, None))
    engine.runner, engine.executor.runner = first, executor
    return engine


def asked(dice: Random) -> tuple[list[int], SamplingParams]:
    shared = [(7 * at) % VOCAB for at in range(20)]
    prompt = shared[: dice.choice([0, 8, 20])] + [dice.randrange(VOCAB) for _ in range(dice.randint(1, 6))]
    return prompt, SamplingParams(n=dice.choice([1, 1, 2]), max_tokens=dice.randint(1, 24), seed=dice.choice([None, 3]))


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("steps", [1_500, pytest.param(35_000, marks=pytest.mark.soak)])
def test_no_token_is_lost_doubled_or_wrong_whatever_happens_to_ranks(ranks: int, stages: int, steps: int) -> None:
    """Steps of all three together: 4,500 here, 100,000 in the long run."""
    config = EngineConfig(tensor_parallel_size=ranks, pipeline_parallel_size=stages)
    dice, troubles = Random(ranks * 10 + stages), Troubles(5, deaths=0.0008, stalls=0.0004, pauses=0.01)
    done = answered = losses = number = 0
    again: list[tuple[list[int], SamplingParams]] = []
    while done < steps or not losses:
        engine, lost = opened(config, troubles), False
        while not lost and (done < steps or engine.core.has_work or again):
            while again or (done < steps and len(engine.scheduler.requests) < 6 and dice.random() < 0.4):
                number += 1
                engine.add(f"r{number}", *(again.pop() if again else asked(dice)))
            done += 1
            try:
                engine.step()
            except RankLost as error:
                assert str(error).startswith("rank ") and ("was killed" in str(error) or "did not answer" in str(error))
                lost = True
                losses += 1
            invariants.check(engine.scheduler)
        engine._record(engine.core._given_out())  # what came before the end
        for (name, index), tokens in engine.tokens.items():
            text, reason = engine.expected(name, index)
            assert tokens == text[: len(tokens)], f"{name}/{index} is wrong"
            end = engine.ends.get((name, index))
            if end is None or end.finish_reason == "error":
                assert lost, f"{name}/{index} has no end, and no rank was lost"
            else:
                assert (tokens, end.finish_reason) == (text, reason)
                answered += 1
        open_ones = {name for name, index in engine.tokens if (end := engine.ends.get((name, index))) is None or end.error}
        again = [(message.prompt_token_ids, message.params) for name, (message, _) in engine.asked.items() if name in open_ones]
        engine.core.close()
    assert losses > 1 and answered > steps // 20 and all(troubles.seen.values())
