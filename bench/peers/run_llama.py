"""llama.cpp through its own library, by the low-level half of llama-cpp-python.

Sequences share batches: up to n_batch tokens of prompts, then one token of each a step. Logits of the last tokens only, and their
argmax: no sampler chain. A beginning that all prompts share is computed once, and copied to the other sequences. Two settings are
left to whoever compares: `flash`, its flash attention, which made prefill faster and one stream slower where we tried it; `unified`, one
KV stream in which every row looks through the cells of all sequences, instead of one stream each.
"""

import ctypes
import time
from typing import Any, NamedTuple

import llama_cpp as lib
import numpy as np
from serve import Answers, Requests, serve

BATCH = 2048  # tokens of one llama_decode, as Octavo's default
SHARED = 32  # tokens: a shorter common beginning is not worth a copy


class Entry(NamedTuple):
    token: int
    position: int
    row: int
    wanted: bool  # its logits


class Llama:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._threads: int = settings["threads"]
        self._unified: bool = settings["unified"]
        self._flash: bool = settings["flash"]
        lib.llama_backend_init()
        self._model = lib.llama_model_load_from_file(settings["model"].encode(), lib.llama_model_default_params())
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(BATCH, 0, 1)
        self._context: Any = None
        self.times: list[list[float]] = []

    def prepare(self, requests: Requests) -> None:
        """A context as large as this call needs: it is fresh, and holds no more memory than it must."""
        if self._context is not None:
            lib.llama_free(self._context)
        params = lib.llama_context_default_params()
        longest = max(len(ids) + count for ids, count in requests)
        params.n_ctx = len(requests) * ((longest + 255) // 256 * 256)  # it cuts this into equal streams, of multiples of 256
        params.n_batch = BATCH
        params.n_seq_max = len(requests)
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = self._unified
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if self._flash else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.no_perf = True
        self._context = lib.llama_init_from_model(self._model, params)

    def generate(self, requests: Requests) -> Answers:
        prompts = [ids for ids, _ in requests]
        answers: Answers = [[] for _ in requests]
        self.times = [[] for _ in requests]
        rows = list(range(len(requests)))
        for row, token in self._prefill(prompts):
            self._take(answers, row, token)
        while rows := [row for row in rows if len(answers[row]) < requests[row][1]]:
            entries = [Entry(answers[row][-1], len(prompts[row]) + len(answers[row]) - 1, row, True) for row in rows]
            for row, token in self._decode_all(entries):
                self._take(answers, row, token)
        return answers

    def _take(self, answers: Answers, row: int, token: int) -> None:
        answers[row].append(token)
        self.times[row].append(time.perf_counter())

    def _prefill(self, prompts: list[list[int]]) -> list[tuple[int, int]]:
        """(row, first token of its answer)"""
        shared = _shared_tokens(prompts)
        self._decode_all([Entry(token, position, 0, False) for position, token in enumerate(prompts[0][:shared])])
        for row in range(1, len(prompts)) if shared else ():
            lib.llama_memory_seq_cp(lib.llama_get_memory(self._context), 0, row, -1, -1)
        return self._decode_all([
            Entry(ids[position], position, row, position == len(ids) - 1)
            for row, ids in enumerate(prompts)
            for position in range(shared, len(ids))
        ])  # fmt: skip

    def _decode_all(self, entries: list[Entry]) -> list[tuple[int, int]]:
        """In batches; (row, next token) of those wanted."""
        found = []
        for start in range(0, len(entries), BATCH):
            part = entries[start : start + BATCH]
            found += zip([entry.row for entry in part if entry.wanted], self._decode(part))
        return found

    def _decode(self, entries: list[Entry]) -> list[int]:
        """The likeliest next tokens of those wanted."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, entry in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = entry.token, entry.position, entry.wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, entry.row
        code = lib.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}")
        count = sum(entry.wanted for entry in entries)
        if not count:
            return []
        logits = ctypes.cast(lib.llama_get_logits(self._context), ctypes.POINTER(ctypes.c_float * (count * self._vocab_size)))
        rows = np.frombuffer(logits.contents, dtype=np.float32).reshape(count, self._vocab_size)
        return [int(token) for token in rows.argmax(axis=1)]


def _shared_tokens(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with, the last one of each left out: it has logits to give."""
    if len(prompts) == 1:
        return 0
    least, most = min(prompts), max(prompts)
    differ = (index for index, (a, b) in enumerate(zip(least, most)) if a != b)
    shared = min(next(differ, len(least)), *(len(ids) - 1 for ids in prompts))
    return shared if shared >= SHARED else 0


if __name__ == "__main__":
    serve(Llama)
