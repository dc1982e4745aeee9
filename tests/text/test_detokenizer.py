"""A stream of tokens and the whole of them give the same text, whatever the ids."""

import random
import time
from functools import cache

import pytest

from octavo.text.detokenizer import IncrementalDetokenizer
from octavo.text.tokenizer import Tokenizer
from tests.support.tokenizers import gpt2_metadata, smollm2_metadata, stories_metadata

METADATA = {"smollm2": smollm2_metadata, "gpt-2": gpt2_metadata, "stories": stories_metadata}
EMOJI = "naïve 🦙🦙 日本語 👩‍👩‍👧 ½"


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(METADATA[name](), f"{name}.gguf")


def random_ids(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Any ids, ids of broken characters, or real text with a hole in it; sometimes beyond the vocabulary."""
    kind = rng.randrange(3)
    if kind == 0:
        return [rng.randrange(tokenizer.vocab_size + 5) for _ in range(rng.randrange(12))]
    if kind == 1:
        return [rng.randrange(300) for _ in range(rng.randrange(20))]
    ids = tokenizer.encode(EMOJI * 2)
    start = rng.randrange(len(ids))
    return ids[start : start + rng.randrange(12)] + ids[rng.randrange(len(ids)) :]


def random_pushes(rng: random.Random, ids: list[int]) -> list[list[int]]:
    pushes, at = [], 0
    while at < len(ids):
        size = rng.choice((1, 1, 1, 2, 5))
        pushes.append(ids[at : at + size])
        at += size
    return pushes


@pytest.mark.parametrize("name", METADATA)
def test_deltas_joined_are_the_decoded_whole(name: str) -> None:
    tokenizer, rng = tokenizer_of(name), random.Random(name)
    for _ in range(3000):
        ids = random_ids(rng, tokenizer)
        stream = IncrementalDetokenizer(tokenizer)
        text = "".join(map(stream.push, random_pushes(rng, ids))) + stream.flush()
        assert text == tokenizer.decode(ids), ids
        if name != "stories":  # on a broken byte sentencepiece's decoder gives up the good ones around it too; ours does not
            assert text == tokenizer._backend.decode(ids, skip_special_tokens=True), ids


@pytest.mark.parametrize("name", METADATA)
def test_characters_never_come_in_halves(name: str) -> None:
    tokenizer = tokenizer_of(name)
    stream = IncrementalDetokenizer(tokenizer)
    deltas = [stream.push([token_id]) for token_id in tokenizer.encode(EMOJI)]
    assert "".join(deltas) == EMOJI and not any("\ufffd" in delta for delta in deltas)
    assert "" in deltas and stream.flush() == ""


@pytest.mark.parametrize("name", METADATA)
def test_deltas_continue_the_prompt(name: str) -> None:
    tokenizer, rng = tokenizer_of(name), random.Random(name)
    ids = tokenizer.encode("Hello  wide world, " + EMOJI)
    for _ in range(100):
        cut = rng.randrange(len(ids) + 1)
        whole_characters = IncrementalDetokenizer(tokenizer)
        prompt = whole_characters.push(ids[:cut])
        stream = IncrementalDetokenizer(tokenizer, prompt_ids=ids[:cut])
        assert prompt + stream.push(ids[cut:]) + stream.flush() == tokenizer.decode(ids)


def test_sentencepiece_drops_one_leading_space_at_the_start_of_a_text_only() -> None:
    tokenizer = tokenizer_of("stories")
    once = tokenizer.encode("Once", add_special_tokens=False)
    assert IncrementalDetokenizer(tokenizer).push(once) == "Once"
    assert IncrementalDetokenizer(tokenizer, prompt_ids=[1]).push(once) == "Once"
    assert IncrementalDetokenizer(tokenizer, prompt_ids=[1, *once]).push(once) == " Once"


@pytest.mark.timed("the CPU time of a token")
def test_a_push_costs_the_same_late_as_early() -> None:
    tokenizer = tokenizer_of("smollm2")
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. ") * 2000
    stream = IncrementalDetokenizer(tokenizer)
    start = time.process_time()
    for token_id in ids:
        stream.push((token_id,))
    assert (time.process_time() - start) / len(ids) < 15e-6
