"""Requests as well-known programs send them, and answers as they read them; docs/clients.md tells of those that were run themselves."""

import json
from typing import Any

import httpx2 as httpx
import pytest

from octavo import SamplingParams
from tests.server.conftest import Served

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]


# promise: vllm-bench-serve
@pytest.mark.parametrize("bias", [{}, {2: 100}], ids=["words", "ends"])  # 2: the end of a text, which does not end this one
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": 12, "logprobs": None}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 12}),
    ],
)
def test_vllm_bench_serve_counts_every_token(served: Served, path: str, asked: dict[str, Any], bias: dict[int, float]) -> None:
    """Its clock stops at chunks that have choices; tokens are those of the usage, which is read only where there are none."""
    body = {"model": "stories", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0, **asked}
    answer = served.server.post(path, body | {"logit_bias": bias})
    events = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    counted = [chunk["usage"] for chunk in chunks if not chunk["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for chunk in chunks for choice in chunk["choices"])
    ids = served.llm.asked[-1].prompt_token_ids
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias=bias)
    assert text == served.offline.generate([ids], params, use_tqdm=False)[0].outputs[0].text
    assert [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in counted] == [(len(ids), 12)]


# promise: open-webui-works
def test_open_webui_has_its_answer_streamed_and_tools_of_its_own_change_nothing(served: Served) -> None:
    """It offers tools with every question, to any model, and reads a stream until [DONE]."""
    clock = {"type": "function", "function": {"name": "clock", "parameters": {"properties": {}, "type": "object"}}}
    body = {"stream": True, "model": "stories", "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 12}
    *events, done = served.server.post("/v1/chat/completions", body | {"tools": [clock]}).text.strip().split("\n\n")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    (offline,) = served.offline.chat([body["messages"]], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert "".join(choice["delta"].get("content", "") for choice in choices) == offline.outputs[0].text
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"] and done == "data: [DONE]"


# promise: lm-eval-local
@pytest.mark.parametrize("stop", [[], ["\n"], [".", "</s>"]])
def test_lm_eval_has_its_batches_answered_up_to_the_stop(served: Served, stop: list[str]) -> None:
    prompts = [served.llm.encoder.encode(prompt)[1] for prompt in (PROMPT, "Lily said")]
    body = {"prompt": prompts, "model": "stories", "max_tokens": 24, "temperature": 0, "stop": stop, "seed": 1234}
    choices = served.server.post("/v1/completions", body).json()["choices"]
    offline = served.offline.generate(prompts, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    said = {choice["index"]: choice["text"] for choice in choices}
    for index, output in enumerate(offline):
        whole = output.outputs[0].text
        ends = [place for word in stop if (place := whole.find(word)) >= 0]
        assert said[index] == whole[: min(ends, default=len(whole))]


# promise: tokenize-detokenize-tokenizer, lm-eval-local
def test_lm_eval_finds_the_tokenizer_at_the_server(served: Served) -> None:
    """It asks for the end's text, and for the id of that."""
    told = httpx.get(f"{served.server.url}/tokenizer_info").json()
    tokenizer = served.llm.tokenizer
    assert told == {"bos_token": "<s>", "eos_token": "</s>"}
    for name, token_id in (("bos_token", tokenizer.bos_token_id), ("eos_token", tokenizer.eos_token_ids[0])):
        assert served.server.post("/tokenize", {"prompt": told[name], "add_special_tokens": False}).json()["tokens"] == [token_id]
