"""Life records: by the id of an answer alone, true while it runs and after, without a word of what was said, and not for ever."""

import json
import re
import time
from typing import Any

import pytest

from octavo.errors import OverloadError
from octavo.server import records
from octavo.server.records import Arrival, Prompt, Record, Records, Sample
from tests.server.conftest import Served
from tests.support.http_server import wait_for

TIMES = ("queued", "first_scheduled", "first_token", "finished")


def record_of(served: Served, answer_id: str) -> dict[str, Any]:
    reply = served.server.http.get(f"/v1/requests/{answer_id}")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


# promise: life-records-v1
@pytest.mark.parametrize(
    ("route", "body", "form"),
    [
        ("/v1/completions", {"prompt": ["Once upon a time", "Then"], "n": 2}, "cmpl-"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Once upon a time"}], "n": 2}, "chatcmpl-"),
        ("/v1/responses", {"input": "Once upon a time"}, "resp_"),
    ],
    ids=["completions", "chat", "responses"],
)
def test_a_record_says_what_the_answer_says_and_when_it_happened(served: Served, route: str, body: dict[str, Any], form: str) -> None:
    longest = "max_output_tokens" if form == "resp_" else "max_tokens"
    before = time.time()
    reply = served.server.http.post(route, json={**body, longest: 5, "ignore_eos": True}, headers={"x-request-id": "mine"})
    took, answer = time.time() - before, reply.json()
    assert re.fullmatch(form + "[0-9a-f]{32}", answer["id"])
    record = record_of(served, answer["id"])
    assert (record["id"], record["state"], record["error"], record["request_id"]) == (answer["id"], "finished", None, "mine")
    assert before - 0.01 <= record["created"] <= before + took
    usage = answer["usage"]
    assert sum(prompt["prompt_tokens"] for prompt in record["prompts"]) == usage.get("prompt_tokens", usage.get("input_tokens"))
    samples = [sample for prompt in record["prompts"] for sample in prompt["samples"]]
    assert samples == [{"generated_tokens": 5, "finish_reason": "length"}] * (len(served.llm.asked) * body.get("n", 1))
    for prompt in record["prompts"]:
        times = [prompt[name] for name in TIMES]
        assert times == sorted(times) and 0 < times[0] and times[-1] <= took
        assert (prompt["cached_tokens"], prompt["preemptions"], prompt["recomputed_tokens"]) == (0, 0, 0)
    assert record["prompts"][0]["hit_reason"] == "cold"
    assert not re.search("Once|upon|Then", json.dumps(record)), "no text"


# promise: life-records-v1
def test_a_stream_has_a_record_from_its_first_chunk_on_and_one_that_was_left_is_over(served: Served) -> None:
    served.llm.pause = 0.01
    body = {"prompt": "Once", "max_tokens": 200, "stream": True, "ignore_eos": True}
    with served.server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        answer_id = json.loads(next(lines).removeprefix("data: "))["id"]
        first, (prompt,) = record_of(served, answer_id), record_of(served, answer_id)["prompts"]
        assert first["state"] == "running" and prompt["first_token"] > 0 and prompt["finished"] is None
        assert prompt["samples"][0]["generated_tokens"] >= 1 and prompt["samples"][0]["finish_reason"] is None
    wait_for(lambda: record_of(served, answer_id)["state"] == "finished")
    (prompt,) = record_of(served, answer_id)["prompts"]
    assert prompt["finished"] > prompt["first_token"] and prompt["samples"][0]["finish_reason"] == "abort"


def test_what_fails_says_so(served: Served) -> None:
    served.llm.trouble = (2, OverloadError("full", 1))
    lines = served.server.post("/v1/completions", {"prompt": "Once", "max_tokens": 9, "stream": True, "ignore_eos": True}).text
    record = record_of(served, json.loads(lines.splitlines()[0].removeprefix("data: "))["id"])
    assert (record["state"], record["error"]) == ("finished", "overloaded")
    assert record["prompts"][0]["samples"][0]["finish_reason"] == "error"


def test_an_id_that_is_not_known_is_told_in_the_form_of_errors(served: Served) -> None:
    for unknown in ("chatcmpl-" + "0" * 32, "%00", "x" * 500):
        reply = served.server.http.get(f"/v1/requests/{unknown}")
        assert reply.status_code == 404 and set(reply.json()["error"]) == {"message", "type", "param", "code"}


# promise: life-records-v1
def test_the_oldest_are_forgotten_by_the_number_of_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MOST_SAMPLES", 10)
    kept, sizes = Records(), [4, 4, 2, 1, 3, 20, 1]
    left = []
    for number, size in enumerate(sizes):
        prompt = Prompt(1, size)
        kept.add(Record(str(number), Arrival(), size, [prompt], [Sample(prompt) for _ in range(size)]))
        left.append([each for each in range(number + 1) if kept.get(str(each))])
    assert left == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [1, 2, 3, 4], [5], [6]]
