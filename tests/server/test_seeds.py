"""Every answer says which seed it was sampled with, and with this seed it can be repeated."""

from typing import Any

import pytest

from octavo.policy.request import given_seed
from tests.server.conftest import Served

SAMPLED = {"temperature": 2.0, "ignore_eos": True}
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once upon a time", "n": 2, "max_tokens": 12}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Once upon a time"}], "n": 2, "max_tokens": 12}),
    ("/v1/responses", {"input": "Once upon a time", "max_output_tokens": 12}),
]


def texts_of(answer: dict[str, Any]) -> list[str]:
    if "output" in answer:
        return [part["text"] for item in answer["output"] for part in item["content"]]
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in answer["choices"]]


# promise: seed-in-answers
@pytest.mark.parametrize(("route", "body"), ROUTES, ids=["completions", "chat", "responses"])
def test_the_seed_of_an_answer_repeats_it(served: Served, route: str, body: dict[str, Any]) -> None:
    def answer(**more: object) -> dict[str, Any]:
        reply = served.server.post(route, {**body, **SAMPLED, **more})
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    first, second = answer(), answer()
    assert first["seed"] != second["seed"] and texts_of(first) != texts_of(second)
    again = answer(seed=first["seed"])
    assert (texts_of(again), again["seed"]) == (texts_of(first), first["seed"])
    assert first["system_fingerprint"] == again["system_fingerprint"] and first["system_fingerprint"].startswith("fp_")
    record = served.server.http.get(f"/v1/requests/{first['id']}").json()
    assert [prompt["seed"] for prompt in record["prompts"]] == [first["seed"]]


def test_chunks_have_the_seed_too(served: Served) -> None:
    with served.client.completions.create(model="stories", prompt="Once", max_tokens=4, seed=9, stream=True) as stream:
        chunks = [chunk.model_dump() for chunk in stream]
    assert {chunk["seed"] for chunk in chunks} == {9} and len({chunk["system_fingerprint"] for chunk in chunks}) == 1


def test_equal_prompts_of_one_body_are_sampled_with_seeds_of_their_own(served: Served) -> None:
    answer = served.server.post("/v1/completions", {"prompt": ["Once upon a time"] * 3, "max_tokens": 12, **SAMPLED}).json()
    texts = texts_of(answer)
    record = served.server.http.get(f"/v1/requests/{answer['id']}").json()
    seeds = [prompt["seed"] for prompt in record["prompts"]]
    assert len(set(texts)) == 3 and answer["seed"] == seeds[0]
    for text, seed in zip(texts, seeds, strict=True):
        alone = served.server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 12, "seed": seed, **SAMPLED}).json()
        assert texts_of(alone) == [text]


def test_given_seeds_differ_between_requests_and_engines_and_survive_json() -> None:
    seeds = [given_seed(engine, number) for engine in (0, 1, 2**64 - 1) for number in range(1000)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**53 for seed in seeds)
    assert seeds[0] == given_seed(0, 0)
