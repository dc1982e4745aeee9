"""Ranks that do not find the same memory: pool and limits are those of the smallest, and one that has too little says so."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import LLM
from octavo.errors import ConfigError, RankLost
from octavo.worker.host_ranks import HostMeeting
from octavo.worker.rank_process import LENGTH_BYTES, Room, Sample, _agreed, encode
from tests.support.models import tiny_model
from tests.support.rank_code import change_ranks

MIB = 2**20
# as on another host: what it finds is not what rank 0 finds
SMALLER = """
from octavo.sizing.memory_plan import Memory
from octavo.worker import facts
facts.memory = lambda config: Memory({} * 2**20)
"""


def opened(folder: Path, **settings: Any) -> LLM:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "native": False}
    return LLM(str(folder), skip_tokenizer_init=True, **(limits | settings))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model", "LlamaForCausalLM", seed=3)


# promise: distributed-executor-backend
@pytest.mark.parametrize("split", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_the_pool_is_that_of_the_rank_with_the_least_memory(
    split: dict[str, int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HostMeeting, "alike", False)
    change_ranks(SMALLER.format(420), tmp_path, monkeypatch)
    with caplog.at_level(logging.INFO, "octavo"), opened(folder, **split) as llm:
        executor: Any = llm._core.executor  # type: ignore[attr-defined]
        (room,) = executor.ranks.rooms.values()
        pool = llm._core.scheduler.kv.pool  # type: ignore[attr-defined]
        assert pool.num_blocks == executor.geometry.num_blocks == room.num_blocks
        assert len(executor.runner.store.caches[0]["k"]) == room.num_blocks
        assert llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0].token_ids
    assert f"Rank 1 has room for the fewest blocks, {room.num_blocks}, " in caplog.text


def test_a_rank_with_too_little_memory_says_so_and_names_itself(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMeeting, "alike", False)
    change_ranks(SMALLER.format(100), tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"^rank 1: this needs .*this process may use 50\.0 MiB"):
        opened(folder, tensor_parallel_size=2)


def test_a_rank_takes_the_size_that_all_have_room_for() -> None:
    from octavo.policy.cache_spec import CacheGeometry

    said: list[Any] = []
    facts: Any = SimpleNamespace(plan_cache=lambda alike: CacheGeometry(50, 16, 700, 8, num_states=40))
    found = _agreed(facts, iter([encode(Room(20, 300, 16))[LENGTH_BYTES:]]), said.append)
    assert said == [Room(50, 700, 40)] and found == CacheGeometry(20, 16, 300, 8, num_states=16)
    for other in ([], [encode(Sample())[LENGTH_BYTES:]]):
        with pytest.raises(RankLost, match="rank 0 did not say how large the cache is"):
            _agreed(facts, iter(other), said.append)
