"""The native program with other ranks: one that adds nothing changes no bit, and one that gives up ends the step with an error."""

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from octavo import LLM
from octavo.errors import RankLost
from octavo.layers.shared_comm import SharedMemoryComm
from octavo.worker.native_program import NativeProgram
from tests.support.models import tiny_model
from tests.worker.test_native_layers import LONG, new_pool, steps

SLOT_BYTES = 1 << 12


@contextmanager
def opened(path: Path) -> Iterator[NativeProgram]:
    with LLM(str(path), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=80, max_model_len=LONG, max_num_seqs=4) as llm:
        yield llm._core.executor.program  # type: ignore[attr-defined]


def computed(program: NativeProgram) -> list[tuple[Tensor, ...]]:
    pool = new_pool(program, torch.float32)
    program.model = program.over(pool.paged)
    with torch.inference_mode():
        return [program.compute(step) for step in steps(pool, program.vocab_size)]


def add_nothing(comm: SharedMemoryComm) -> None:
    """Meets the others for one slot at a time, with zeros, until they end that."""
    zeros = torch.zeros(SLOT_BYTES // 4)
    while not comm._call.octavo_reduce(ctypes.byref(comm.group), zeros.zero_().data_ptr(), len(zeros)):
        pass


def test_a_rank_that_adds_nothing_changes_no_bit_and_one_that_gives_up_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model(tmp_path / "model", "Qwen2ForCausalLM", seed=5, context=LONG)
    with opened(path) as alone:
        expected = computed(alone)
    fd = SharedMemoryComm.create(2, SLOT_BYTES)
    comm, other = SharedMemoryComm.join(fd, 0, 2, 20), SharedMemoryComm.join(fd, 1, 2, 20)
    os.close(fd)
    thread = threading.Thread(target=add_nothing, args=(other,), daemon=True)
    thread.start()
    monkeypatch.setattr("octavo.worker.build.NativeProgram", functools.partial(NativeProgram, comm=comm))
    with opened(path) as program:
        for mine, theirs in zip(computed(program), expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        other.abort()
        thread.join()
        with pytest.raises(RankLost, match="rank 1 gave up, so rank 0 cannot go on"):
            computed(program)
