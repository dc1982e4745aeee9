"""Reads traces, which are lengths of requests that a real service recorded, and makes workloads of them.

    Azure CSV         TIMESTAMP,ContextTokens,GeneratedTokens
    Mooncake JSONL    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, ...]}

A trace has no text, so ids are drawn at random. A Mooncake hash id stands for 512 tokens of a prompt and all tokens before them.
Equal hash ids become equal tokens, so prompts share the same prefixes as in the service. A trace may lack times of arrival.
"""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from random import Random
from typing import TextIO

from octavo.bench.workload import Ids, Workload, random_ids
from octavo.errors import ConfigError

HASHED = 512  # tokens that a Mooncake hash id stands for
MOST = 2**31 - 1  # tokens
AZURE_FIELDS = ("ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS = ("input_length", "output_length")


@dataclass(frozen=True, slots=True)
class Traced:
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()  # one for each 512 tokens of the prompt, if the trace has them
    arrival: float | None = None  # in seconds; only differences mean something


def read_trace(path: str, most: int | None = None) -> list[Traced]:
    """Returns the first `most` requests of a trace, or all."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            is_json = file.read(1) == "{"
            file.seek(0)
            requests = list(islice(_mooncake(file, path) if is_json else _azure(file, path), most))
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--trace {path} is not UTF-8 text (byte {error.start})") from error
    if not requests:
        raise ConfigError(f"--trace {path} holds no requests")
    return requests


def traced(path: str, requests: list[Traced], vocab_size: int, longest: int, seed: int) -> Workload:
    """Returns the requests of a trace as a workload. If a request is longer than the context, the end of its prompt is cut off."""
    made, clipped = [], 0
    blocks: dict[int, Ids] = {}
    for number, request in enumerate(requests):
        wanted = min(request.output_length, longest - 1)
        length = min(request.input_length, longest - wanted)
        clipped += (length, wanted) != (request.input_length, request.output_length)
        if request.hash_ids:
            hashes = request.hash_ids[: -(-length // HASHED)]
            for one in hashes:
                if one not in blocks:
                    blocks[one] = random_ids(Random(f"{seed} hash {one}"), HASHED, vocab_size)
            ids = [token for one in hashes for token in blocks[one]][:length]
        else:
            ids = random_ids(Random(f"{seed} request {number}"), length, vocab_size)
        made.append((ids, wanted))
    times = [request.arrival for request in requests if request.arrival is not None]
    return Workload(Path(path).stem, made, clipped=clipped, arrivals=times if len(times) == len(requests) else None)


def _azure(file: TextIO, path: str) -> Iterator[Traced]:
    lines = csv.DictReader(file)
    try:
        if not set(AZURE_FIELDS) <= set(lines.fieldnames or ()):
            raise _wrong(path, 1, "wanted the columns TIMESTAMP,ContextTokens,GeneratedTokens, or JSON objects")
        for fields in lines:
            input_length, output_length = (_length(fields[name], name, path, lines.line_num) for name in AZURE_FIELDS)
            yield Traced(input_length, output_length, arrival=_azure_time(fields.get("TIMESTAMP")))
    except csv.Error as error:
        raise _wrong(path, lines.line_num, str(error)) from error


def _mooncake(file: TextIO, path: str) -> Iterator[Traced]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _wrong(path, number, "not valid JSON") from error
        if not isinstance(fields, dict):
            raise _wrong(path, number, "wanted an object with input_length, output_length and hash_ids")
        input_length, output_length = (_length(fields.get(name), name, path, number) for name in MOONCAKE_FIELDS)
        hashes = fields.get("hash_ids")
        if not isinstance(hashes, list) or not all(type(one) is int for one in hashes):
            raise _wrong(path, number, "hash_ids must be a list of integers")
        if len(hashes) != -(-input_length // HASHED):
            raise _wrong(path, number, f"{len(hashes)} hash_ids for {input_length} tokens; wanted one for each {HASHED}")
        stamp = fields.get("timestamp")  # in milliseconds
        yield Traced(input_length, output_length, tuple(hashes), stamp / 1000 if isinstance(stamp, int | float) else None)


def _azure_time(text: str | None) -> float | None:
    """Reads 2023-11-16 18:15:46.6805900. The time zone does not matter, for only differences are used."""
    try:
        return datetime.fromisoformat(text or "").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _length(value: object, name: str, path: str, line: int) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not 1 <= value <= MOST:
        raise _wrong(path, line, f"{name} must be an integer from 1 to {MOST}, got {value!r:.40}")
    return value


def _wrong(path: str, line: int, what: str) -> ConfigError:
    return ConfigError(f"{path} line {line}: {what}")
