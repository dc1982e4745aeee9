"""What a benchmark sends in: published loads as they were published, a text for any tokenizer, and traces of real services."""

import hashlib
import json
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.bench import loads
from octavo.bench.traces import HASHED, MOST, Traced, read_trace, traced
from octavo.bench.workload import RANDOM_LOADS, TEXT_LOADS, Lengths, drawn, random_load, text_ids, text_loads
from octavo.errors import ConfigError
from octavo.loading.resolve import resolve_model
from octavo.loading.text_side import load_tokenizer
from octavo.text.tokenizer import Tokenizer
from tests.support.tokenizers import stories_metadata

TRACES = Path(__file__).parents[1] / "data/traces"
AZURE, MOONCAKE = str(TRACES / "azure_conversation_2023.csv"), str(TRACES / "mooncake_conversation.jsonl")


# promise: octavo-bench-takes
def test_the_published_loads_are_unchanged() -> None:
    source = Path(loads.__file__).read_bytes()
    assert hashlib.sha256(source).hexdigest() == "cea80c480b465c9f34a2cc477b55669c1a38033fdf2bab3d49d1d6e5e72a9fd1"


@pytest.mark.parametrize(
    ("tokenizer", "digest"),
    [
        (lambda: Tokenizer.from_gguf(stories_metadata(), "tok512.bin"), "d1a75c6a71447532"),
        (lambda: load_tokenizer(resolve_model(None)), "f84ba2da7832df50"),
    ],
    ids=["tok512", "smollm2"],
)
def test_any_tokenizer_gets_a_long_text_and_the_same_ids_every_time(tokenizer: Callable[[], Tokenizer], digest: str) -> None:
    ids = text_ids(tokenizer())
    assert 20_000 < len(ids) < 40_000
    assert hashlib.sha256(array("i", ids).tobytes()).hexdigest()[:16] == digest
    cut = text_loads(ids)
    assert tuple(cut) == TEXT_LOADS and all(workload.is_text for workload in cut.values())
    beginnings = [tuple(prompt[:16]) for prompt, _ in cut["batch32"].requests]
    assert len(set(beginnings)) == 32  # nothing is found in the cache by accident


def test_a_load_of_random_ids_needs_a_vocabulary_that_holds_them() -> None:
    assert list(RANDOM_LOADS) == ["gpu-single", "nano256", "many1024", "gpu-prefill", "prefix"]
    assert random_load("nano256", 10_001).output_tokens == 133_966  # as published
    with pytest.raises(ConfigError, match="load nano256 draws token ids up to 10,000, this model's vocabulary has 10,000; choose other"):
        random_load("nano256", 10_000)


# promise: octavo-bench-takes
def test_chosen_lengths_are_drawn_from_their_ranges_and_follow_the_seed() -> None:
    workload = drawn(Lengths(3, 9), Lengths(2, 4), 200, vocab_size=50, max_model_len=13, seed=7)
    assert {len(ids) for ids, _ in workload.requests} == set(range(3, 10))
    assert {count for _, count in workload.requests} == {2, 3, 4}
    assert {token for ids, _ in workload.requests for token in ids} == set(range(50))
    assert workload == drawn(Lengths(3, 9), Lengths(2, 4), 200, 50, 13, seed=7) != drawn(Lengths(3, 9), Lengths(2, 4), 200, 50, 13, seed=8)
    with pytest.raises(ConfigError, match="3-9 in, 2-4 out: a sequence may grow to 13 tokens, max_model_len is 12"):
        drawn(Lengths(3, 9), Lengths(2, 4), 200, 50, 12, seed=7)


def test_an_azure_trace_gives_its_lengths_and_prompts_that_share_nothing() -> None:
    requests = read_trace(AZURE)
    assert [(one.input_length, one.output_length) for one in requests[:3]] == [(374, 44), (396, 109), (879, 55)]
    assert len(requests) == 8 and len(read_trace(AZURE, 3)) == 3
    workload = traced(AZURE, requests, vocab_size=512, longest=4096, seed=0)
    assert [(len(ids), count) for ids, count in workload.requests] == [(one.input_length, one.output_length) for one in requests]
    assert (workload.clipped, workload.name) == (0, "azure_conversation_2023")
    assert len({tuple(ids[:16]) for ids, _ in workload.requests}) == 8
    assert workload == traced(AZURE, requests, 512, 4096, seed=0) != traced(AZURE, requests, 512, 4096, seed=1)


def test_equal_hash_ids_of_a_mooncake_trace_are_equal_tokens() -> None:
    requests = [Traced(1100, 1, (5, 6, 7)), Traced(1100, 1, (5, 6, 8)), Traced(600, 1, (9, 6))]
    (first, second, third), _ = zip(*traced("t", requests, 512, 4096, seed=0).requests, strict=True)
    assert first[: 2 * HASHED] == second[: 2 * HASHED] and first[2 * HASHED :] != second[2 * HASHED :]
    assert third[:HASHED] != first[:HASHED] != first[HASHED : 2 * HASHED] and third[HASHED:] == first[HASHED:600]
    assert [len(first), len(second), len(third)] == [1100, 1100, 600]


def test_what_is_longer_than_the_context_loses_the_end_of_its_prompt_first() -> None:
    requests = [Traced(90, 10), Traced(91, 10), Traced(50, 500)]
    workload = traced("t", requests, 512, longest=100, seed=0)
    assert [(len(ids), count) for ids, count in workload.requests] == [(90, 10), (90, 10), (1, 99)]
    assert workload.clipped == 2
    shared = traced(MOONCAKE, read_trace(MOONCAKE), 512, longest=2048, seed=0)
    assert shared.clipped == 6 and shared.longest == 2048
    assert len({tuple(ids[:HASHED]) for ids, _ in shared.requests}) == 1  # what they shared they still share


COLUMNS = "TIMESTAMP,ContextTokens,GeneratedTokens"


def mooncake(**changed: object) -> str:
    fields = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], **changed}
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([COLUMNS, "t,10,5", "t,0,5"], f"line 3: ContextTokens must be an integer from 1 to {MOST}, got 0"),
        ([COLUMNS, "t,10,-5"], f"line 2: GeneratedTokens must be an integer from 1 to {MOST}, got '-5'"),
        ([COLUMNS, "t,10"], f"line 2: GeneratedTokens must be an integer from 1 to {MOST}, got None"),
        ([COLUMNS, "t,ten,5"], f"line 2: ContextTokens must be an integer from 1 to {MOST}, got 'ten'"),
        (["TIMESTAMP,Context,Generated", "t,10,5"], "line 1: wanted the columns TIMESTAMP,ContextTokens,GeneratedTokens"),
        ([COLUMNS], "holds no requests"),
        ([""], "line 1: wanted the columns"),
        ([mooncake(), "{"], "line 2: not valid JSON"),
        ([mooncake(), "", "[1]"], "line 3: wanted an object"),
        ([mooncake(output_length=0)], f"line 1: output_length must be an integer from 1 to {MOST}, got 0"),
        ([mooncake(input_length=True)], f"line 1: input_length must be an integer from 1 to {MOST}, got True"),
        ([mooncake(input_length=600.0)], f"line 1: input_length must be an integer from 1 to {MOST}, got 600.0"),
        ([mooncake(hash_ids=[1])], "line 1: 1 hash_ids for 600 tokens; wanted one for each 512"),
        ([mooncake(hash_ids="12")], "line 1: hash_ids must be a list of integers"),
        ([mooncake(input_length=10**400, hash_ids=[1])], f"line 1: input_length must be an integer from 1 to {MOST}, got 1000"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, lines: list[str], said: str) -> None:
    (tmp_path / "trace").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as refused:
        read_trace(str(tmp_path / "trace"))
    assert said in str(refused.value) and str(tmp_path / "trace") in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, said in (("absent", "No such file"), ("", "Is a directory"), ("bytes", "is not UTF-8 text")):
        with pytest.raises(ConfigError, match=f"--trace .*{said}"):
            read_trace(str(tmp_path / name))
