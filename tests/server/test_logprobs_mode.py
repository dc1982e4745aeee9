"""`octavo serve --logprobs-mode processed`: chat and completions tell how likely a token was among those it was drawn from."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.outputs import RequestOutput
from tests.server.conftest import Served
from tests.support.server_process import ServerProcess
from tests.support.story_folder import story_folder

TEMPERATURE, KEPT, SHOWN = 1.5, 3, 5
SAMPLING: dict[str, Any] = {"temperature": TEMPERATURE, "top_k": KEPT, "seed": 3, "max_tokens": 8, "ignore_eos": True}
STORY = "Once upon a time"
CUT = -9999.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = story_folder(tmp_path_factory.mktemp("stories"))
    flags = "--max-model-len", "256", "--num-gpu-blocks-override", "50", "--logprobs-mode", "processed"
    with ServerProcess("octavo serve", str(folder), *flags, env={"OCTAVO_LOG_LEVEL": "ERROR"}) as server:
        yield server


def answered(server: ServerProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = server.ask("POST", path, SAMPLING | body)
    answer = json.loads(reply.body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert reply.status == 200, answer
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def scaled(raw: RequestOutput) -> Iterator[tuple[float, list[float]]]:
    """What the raw logprobs of each token become: its own, and those of all that were kept, best first."""
    sample = raw.outputs[0]
    for token, choices in zip(sample.token_ids, sample.logprobs or [], strict=True):
        best = sorted(choices.items(), key=lambda one: -one[1].logprob)[:KEPT]
        total = math.log(sum(math.exp(found.logprob / TEMPERATURE) for _, found in best))
        logprobs = {other: found.logprob / TEMPERATURE - total for other, found in best}
        yield logprobs[token], list(logprobs.values())


# promise: logprobs-raw-default
def test_completions_tell_them_and_prompts_stay_raw(server: ServerProcess, served: Served) -> None:
    params = SamplingParams(**SAMPLING, logprobs=SHOWN, prompt_logprobs=SHOWN)
    (raw,) = served.offline.generate([STORY], params, use_tqdm=False)
    choice = answered(server, "/v1/completions", {"prompt": STORY, "logprobs": SHOWN, "echo": True})
    assert choice["text"] == STORY + raw.outputs[0].text, "what is told changes nothing"
    first, found = len(raw.prompt_token_ids), choice["logprobs"]
    prompt = [choices[token].logprob for token, choices in zip(raw.prompt_token_ids, raw.prompt_logprobs or []) if choices]
    assert found["token_logprobs"][1:first] == pytest.approx(prompt, abs=1e-3)
    for own, tops, (logprob, kept) in zip(found["token_logprobs"][first:], found["top_logprobs"][first:], scaled(raw), strict=True):
        assert own == pytest.approx(logprob, abs=1e-3)
        assert sorted(tops.values(), reverse=True) == pytest.approx([*kept, *[CUT] * (SHOWN - KEPT)], abs=1e-3)


# promise: logprobs-raw-default
def test_chat_tells_them(server: ServerProcess, served: Served) -> None:
    messages: list[Any] = [{"role": "user", "content": STORY}]
    (raw,) = served.offline.chat([messages], SamplingParams(**SAMPLING, logprobs=SHOWN), use_tqdm=False)
    choice = answered(server, "/v1/chat/completions", {"messages": messages, "logprobs": True, "top_logprobs": SHOWN})
    assert choice["message"]["content"] == raw.outputs[0].text
    for entry, (logprob, kept) in zip(choice["logprobs"]["content"], scaled(raw), strict=True):
        assert entry["logprob"] == pytest.approx(logprob, abs=1e-3)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx([*kept, *[CUT] * (SHOWN - KEPT)], abs=1e-3)
