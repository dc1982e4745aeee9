"""/v1/completions through the openai client: what the engine says offline, in the forms clients rely on."""

import asyncio
import json
import threading
from typing import Any

import openai
import pytest

from octavo import SamplingParams
from octavo.messages import AddRequest, LifeRecord
from octavo.outputs import TextDelta
from octavo.server import requests
from octavo.server.generation import Tally
from octavo.text.prompt import PromptEncoder
from tests.server.conftest import Served

PROMPTS = ["Once upon a time", "The dog was", "Lily said"]


# promise: v1-completions, extra-body-prompt
def test_prompts_in_every_form_are_answered_in_order(served: Served) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    wanted = [output.outputs[0].text for output in served.offline.generate(PROMPTS, greedy, use_tqdm=False)]
    ids = [served.llm.encoder.encode(prompt)[1] for prompt in PROMPTS]
    create = served.client.completions.create
    forms: list[tuple[Any, list[str]]] = [(PROMPTS[0], wanted[:1]), (ids[0], wanted[:1]), (PROMPTS, wanted), (ids, wanted)]
    for form, texts in forms:
        answer = create(model="stories", prompt=form, temperature=0, max_tokens=12)
        assert [choice.text for choice in answer.choices] == texts
        assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
        assert [choice.finish_reason for choice in answer.choices] == ["length"] * len(texts)
        assert answer.usage and answer.usage.prompt_tokens == sum(map(len, ids[: len(texts)]))
        assert answer.usage.completion_tokens == 12 * len(texts)
    several = create(model="stories", prompt=PROMPTS, temperature=0, max_tokens=12, n=2)
    assert [(choice.index, choice.text) for choice in several.choices] == [(i, wanted[i // 2]) for i in range(6)]
    assert several.usage and several.usage.prompt_tokens == sum(map(len, ids)), "a prompt counts once"
    assert several.usage.completion_tokens == 72 and several.usage.total_tokens == 72 + sum(map(len, ids))


# promise: completions-logprobs-text, lm-eval-local
def test_echo_with_logprobs_is_what_an_evaluation_reads(served: Served) -> None:
    """As lm-eval's local-completions asks: the logprobs of each prompt's own tokens, found by index."""
    ids = [served.llm.encoder.encode(prompt)[1] for prompt in PROMPTS]
    answer = served.client.completions.create(model="stories", prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=5)
    offline = served.offline.generate(ids, SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1), use_tqdm=False)
    for choice, prompt, output, text in zip(sorted(answer.choices, key=lambda c: c.index), ids, offline, PROMPTS, strict=True):
        found = choice.logprobs
        assert found and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
        assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == len(prompt) + 1
        assert found.token_logprobs[0] is None and found.top_logprobs[0] is None and output.prompt_logprobs
        for place, choices in enumerate([*output.prompt_logprobs[1:], *(output.outputs[0].logprobs or [])], 1):
            token = (prompt + output.outputs[0].token_ids)[place]
            assert choices and found.token_logprobs[place] == pytest.approx(choices[token].logprob, abs=1e-6)
            assert found.top_logprobs[place] and len(found.top_logprobs[place]) == len(choices)
            assert found.top_logprobs[place][found.tokens[place]] == found.token_logprobs[place]
        assert choice.text == text + output.outputs[0].text
        shown = list(zip(found.text_offset, found.tokens, strict=True))[1:]  # the first is <s>, which is no text
        assert all(choice.text.startswith(token.lstrip() if not offset else token, offset) for offset, token in shown)


def test_a_token_that_is_part_of_a_character_is_spelled_in_bytes(served: Served) -> None:
    half = next(token for token in range(512) if served.llm.tokenizer.token_bytes(token) == b"\xe2")
    answer = served.client.completions.create(
        model="stories", prompt="a", max_tokens=2, logprobs=0, extra_body={"allowed_token_ids": [half]}
    )
    found = answer.choices[0].logprobs
    assert found and found.tokens == ["bytes:\\xe2"] * 2 and found.text_offset == [0, 0]
    assert answer.choices[0].text == "��" and json.loads(answer.to_json())["choices"][0]["stop_reason"] is None


# promise: body-extra-include, usage-always-carries, extra-body-cache, cached-tokens-always-every
def test_cached_tokens_and_timings_are_told(served: Served) -> None:
    body = {"prompt": "Once upon a time there was a little dog who", "max_tokens": 3, "include_timings": True, "temperature": 0}

    def ask(**more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        answer = served.server.post("/v1/completions", body | more).json()
        return answer["usage"], answer["timings"]

    cold, again, salted = ask(), ask(), ask(cache_salt="mine")
    cached = again[0]["prompt_tokens_details"]["cached_tokens"]
    assert 4 <= cached < again[0]["prompt_tokens"] and cached % 4 == 0
    assert (cold[1]["cached_tokens"], again[1]["cached_tokens"], salted[1]["cached_tokens"]) == (0, cached, 0)
    assert (cold[1]["hit_reason"], again[1]["hit_reason"], salted[1]["hit_reason"]) == ("cold", "end", "cold")
    for usage, timings in (cold, again, salted):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
        assert set(timings) == {"queue_ms", "prefill_ms", "decode_ms", "cached_tokens", "preemptions", "hit_reason"}
        assert all(0 <= timings[name] < 10_000 for name in ("queue_ms", "prefill_ms", "decode_ms")) and timings["preemptions"] == 0
    assert "timings" not in served.server.post("/v1/completions", body | {"include_timings": False}).json()


def test_timings_name_the_tokens_in_the_cache_whose_state_was_not_kept() -> None:
    tally = Tally([AddRequest("", [1] * 50, SamplingParams())])
    for common in (16, 32):
        life = LifeRecord(0.0, cached_tokens=16, common_tokens=common, hit_reason="no_state")
        tally.count([TextDelta("", 0, "", [1], life=life)])
        assert tally.timings().get("common_tokens") == (32 if common > 16 else None)


# promise: finish-reason-stop
def test_a_stop_string_is_told(served: Served) -> None:
    answer = served.server.post("/v1/completions", {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 30, "stop": ["xyz", " little"]})
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (", there was a", "stop", " little")


def test_long_texts_are_encoded_in_a_thread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    encode = PromptEncoder.encode

    def watched(*args: Any) -> Any:
        loop = asyncio._get_running_loop()
        threads.append(loop is None and threading.current_thread() is not threading.main_thread())
        return encode(*args)

    monkeypatch.setattr(PromptEncoder, "encode", watched)
    monkeypatch.setattr(requests, "SHORT_CHARS", 20)
    for prompt in (PROMPTS[0], PROMPTS[0] * 2, PROMPTS):
        served.client.completions.create(model="stories", prompt=prompt, max_tokens=1)
    assert threads == [False, True, True, True, True]


# promise: openai-python-works
def test_async_client(served: Served) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0) as client:
            asked = [client.completions.create(model="stories", prompt=prompt, temperature=0, max_tokens=5) for prompt in PROMPTS]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    alone = [output.outputs[0].text for output in served.offline.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=5), False)]
    assert asyncio.run(ask()) == alone
