"""Mutants through the door, in this process: only errors of ours may come out.

    python -m tests.support.fuzz SEED FIRST LAST      mutants FIRST to LAST - 1; one of them alone replays a failure

The process may take 1 GiB more than it starts with, and a mutant 5 s; past either it ends, with the mutant's number as the
last line of stdout. The very last line is a JSON object: how many opened, how many were refused, and what went wrong.
"""

import faulthandler
import json
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from octavo.config import EngineConfig
from octavo.errors import ConfigError, LoadError, RequestError, TemplateError
from octavo.llm import LLM
from tests.support import tiny_files as tiny
from tests.support.mutants import Mutant, mutant

MAX_SECONDS = 5  # of CPU time
PATIENCE = 120  # by the clock, until it hangs
MAX_BYTES = 2**30
MAX_FAILURES = 20
TEXT = "abc <s>é 12  dd"
MESSAGES = [{"role": "user", "content": TEXT}]


class Folder:
    """A sound model in which one file at a time is replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        plain = tiny.folder_files() | {"tokenizer_config.json": json.dumps(tiny.TOKENIZER_CONFIG | {"chat_template": None}).encode()}
        self._whole = tiny.write_files(path / "whole", plain)
        self._sharded = tiny.write_files(path / "sharded", tiny.sharded_files() | {"tokenizer_config.json": plain["tokenizer_config.json"]})
        self._sound = plain

    def open(self, changed: Mutant) -> None:
        sharded = changed.file.endswith("index.json")
        home = self._path if changed.file == "model.gguf" else self._sharded if sharded else self._whole
        file = home / changed.file
        file.write_bytes(changed.content)
        try:
            try_to_open(file if changed.file == "model.gguf" else home)
        finally:
            if changed.file in self._sound:
                file.write_bytes(self._sound[changed.file])
            elif not sharded:
                file.unlink()


def try_to_open(model: Path) -> None:
    """As `LLM` opens it. What opens must also encode: ids of the model's, or a refusal of this text."""
    config = EngineConfig(model=str(model), kv_cache_memory_bytes=2**16, max_num_seqs=2)
    with LLM.from_config(config, log_default="ERROR") as llm:
        rows = llm._core.scheduler.limits.vocab_size
        for encode, given in ((llm.encoder.encode, TEXT), (llm.encoder.encode_chat, MESSAGES)):
            try:
                _, ids = encode(given)  # type: ignore[arg-type]
            except (RequestError, TemplateError):
                continue
            assert all(token < rows for token in ids), f"ids {ids} in a vocabulary of {rows}"


def main(seed: int, first: int, last: int) -> None:
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        folder.open(Mutant("config.json", json.dumps(tiny.CONFIG).encode()))  # what is imported once is imported now
        limit = _address_space() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        start = time.process_time()
        for number in range(first, last):
            os.write(1, b"%d\n" % number)  # past all buffers: it must be there if this is the last thing we do
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            before = time.process_time()
            try:
                folder.open(mutant(seed, number))
                outcomes["opened"] += 1
            except (LoadError, ConfigError, TemplateError) as error:
                outcomes[type(error).__name__] += 1
            except BaseException:
                replay = f"python -m tests.support.fuzz {seed} {number} {number + 1}"
                failures.append(f"replay with `{replay}`\n{traceback.format_exc()[-1500:]}")
            if (used := time.process_time() - before) > MAX_SECONDS:
                failures.append(f"mutant {number} of seed {seed} took {used:.1f} s of CPU time")
            if len(failures) == MAX_FAILURES:
                break
        faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"outcomes": outcomes, "failures": failures, "seconds": time.process_time() - start}))


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    faulthandler.enable()
    main(*map(int, sys.argv[1:4]))
