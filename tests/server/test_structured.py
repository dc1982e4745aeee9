"""Answers of a form, over a real server: what cannot be had is a 400 in time, and what is had fits, whatever a tiny model would say."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from octavo.grammar.child import trial_guide
from octavo.grammar.text import grammar_text
from octavo.server.answer_form import AnswerForm, chat_grammar
from octavo.structured_outputs import structured_outputs
from octavo.text.tools import ToolChoice, check_tools
from tests.grammar.test_checker import BAD
from tests.server.test_serve_cli import family, gone
from tests.support.server_process import ServerProcess
from tests.support.soaked import rarely
from tests.support.story_folder import TEMPLATE, story_folder

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
# by which it is known that it thinks, if it is told to, and calls
SPOKEN = '{% if enable_thinking %}<think>\n{% else %}</think>\n{% endif %}{# <tool_call>\n{"name" #}'
ASKED: Any = {"model": "stories", "messages": [{"role": "user", "content": "Once"}], "temperature": 1.5}
DEAD_END = 'start: "a" NOTHING\nNOTHING: /x/ & /y/'


class Small(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Step(Small):
    name: str = Field(pattern="^[a-z]{2,5}$")
    count: int = Field(ge=0, le=99)


class Plan(Small):
    kind: Literal["walk", "swim"]
    steps: list[Step] = Field(min_length=1, max_length=3)
    done: bool | None


def tool(name: str, **properties: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("weather", city={"enum": ["Paris", "Oslo"]}), tool("add", a={"type": "integer", "minimum": 0, "maximum": 999})]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """In the end nobody is left, also of those that tried out grammars."""
    folder = story_folder(tmp_path_factory.mktemp("stories"))
    (folder / "chat_template.jinja").write_text(TEMPLATE + SPOKEN)
    with ServerProcess(f"octavo serve {folder}", "--served-model-name", "stories", "--num-gpu-blocks-override", "200") as server:
        yield server
        pids = family(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0 and gone(pids)
        assert "Traceback" not in server.stderr, server.stderr


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.host}:{server.port}/v1", api_key="none", max_retries=0)


# ---- what cannot be had


def refused(server: ServerProcess, path: str, body: dict[str, Any], param: str | None) -> str:
    """What took too long to check would be a 503."""
    answer = server.ask("POST", path, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body[:500]
    assert server.ask("POST", TEXT, {"prompt": "Once", "max_tokens": 1}).status == 200, "the next one is served"
    return str(answer.json["error"]["message"])


@pytest.fixture
def room_to_write() -> Iterator[None]:
    """Bodies that are deeper than Python writes them by itself."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5_000)
    yield
    sys.setrecursionlimit(limit)


# promise: extra-body-structured
@pytest.mark.usefixtures("room_to_write")
@pytest.mark.parametrize("row", sorted({row for row, _ in BAD}))
def test_a_form_that_cannot_be_had_is_refused_in_time_by_name(server: ServerProcess, row: int) -> None:
    for asked in [asked for number, asked in BAD if number == row]:
        schema = {"type": "json_schema", "name": "x", "schema": asked.get("json")}
        ways: list[tuple[str, dict[str, Any], str]] = [(TEXT, {"prompt": "Once", "structured_outputs": asked}, "structured_outputs")]
        if "json" in asked:
            ways.append((CHAT, {**ASKED, "response_format": {"type": "json_schema", "json_schema": schema}}, "response_format"))
            ways.append((RESPONSES, {"input": "Once", "text": {"format": schema}}, "text.format"))
        for path, body, param in ways:
            too_deep = json.dumps(body).count('"properties"') > 400  # no schema is the matter, but the body
            said = refused(server, path, body, None if too_deep else param)
            assert too_deep or said.startswith(param), said


# promise: response-format-text
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"response_format": {"type": "yaml"}}, "response_format"),
        (TEXT, {"response_format": "json"}, "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}}, "response_format"),
        (CHAT, {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (CHAT, {"response_format": {"type": "json_object"}, "bad_words": ["a"]}, "bad_words"),
        (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sing"}}}, "tool_choice"),
        (CHAT, {"tools": [tool("f", a={"contains": {}, "type": "array"})], "tool_choice": "required"}, "tools"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (RESPONSES, {"text": 5}, "text"),
    ],
)
def test_words_without_meaning_are_refused_by_name(server: ServerProcess, path: str, body: dict[str, Any], param: str) -> None:
    refused(server, path, {CHAT: ASKED, TEXT: {"prompt": "Once"}, RESPONSES: {"input": "Once"}}[path] | body, param)


def children(server: ServerProcess) -> list[int]:
    """Those that try out grammars."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(server.process.pid) if Path(f"/proc/{pid}").exists()}
    return [pid for pid, line in lines.items() if b"grammar.child" in line]


# promise: extra-body-structured
def test_a_form_that_takes_for_ever_costs_its_own_request_alone(server: ServerProcess) -> None:
    def choose(*words: str) -> int:
        return server.ask("POST", TEXT, {"prompt": "Once", "structured_outputs": {"choice": words}}).status

    assert choose("a", "b") == 200
    (child,) = children(server)
    os.kill(child, signal.SIGSTOP)
    answer = server.ask("POST", TEXT, {"prompt": "Once", "structured_outputs": {"choice": ["c", "d"]}})
    assert (answer.status, answer.json["error"]["code"]) == (503, "grammar_busy") and int(answer.headers["retry-after"]) >= 1
    assert choose("c", "d") == 200, "it was not its fault"
    (another,) = children(server)
    assert another != child and not Path(f"/proc/{child}").exists()


@pytest.mark.timed("how long other clients wait next to heavy grammars")
def test_heavy_forms_hold_up_nobody(server: ServerProcess) -> None:
    """Each of them took seconds in the event loop, or in a step of the engine, for every prompt or sample."""
    schema = {"name": "x", "schema": {"type": "string", "pattern": "[" * 16_000}}
    tools = [tool("f", a={"type": "string", "pattern": "(a?){2000}"})]
    heavy: list[tuple[str, dict[str, Any], int]] = [
        (TEXT, {"prompt": "Once", "structured_outputs": {"regex": "[" * 16_000}}, 400),
        (CHAT, {**ASKED, "response_format": {"type": "json_schema", "json_schema": schema}}, 400),
        (CHAT, {**ASKED, "max_tokens": 1, "tools": tools, "tool_choice": "required"}, 200),
        (TEXT, {"prompt": ["Once"] * 16, "max_tokens": 1, "structured_outputs": {"grammar": "\n" * 10_000 + 'start: "a"'}}, 200),
        (TEXT, {"prompt": ["Once"] * 2, "n": 64, "structured_outputs": {"regex": "(a{1000}){1000}"}}, 400),
        (TEXT, {"prompt": ["Once"] * 2, "n": 64, "structured_outputs": {"grammar": "start: /(a{1000}){1000}/"}}, 400),
        (TEXT, {"prompt": "Once", "n": 64, "max_tokens": 2, "structured_outputs": {"regex": "(a{100}){100}"}}, 200),
    ]
    with ThreadPoolExecutor(1) as thread:
        told = thread.submit(lambda: [server.ask("POST", path, body).status for path, body, _ in heavy])
        slowest, rounds = 0.0, 0
        while not told.done() or rounds < 3:
            start, rounds = time.monotonic(), rounds + 1
            assert server.ask("GET", "/health").status == 200
            assert server.ask("POST", TEXT, {"prompt": "Once", "max_tokens": 1}).status == 200
            slowest = max(slowest, time.monotonic() - start)
    assert told.result() == [status for _, _, status in heavy] and slowest < 3


def test_a_choice_of_thousands_and_an_object_of_hundreds_are_served(server: ServerProcess) -> None:
    """They were let in, and always failed."""
    words = [f"word {number}" for number in range(9_000)]
    said = server.ask("POST", TEXT, {"prompt": "Once", "max_tokens": 60, "structured_outputs": {"choice": words}}).json
    assert said["choices"][0]["text"] in words
    optional = {"type": "object", "properties": {f"p{number}": {"type": "boolean"} for number in range(500)}}
    answer = server.ask("POST", TEXT, {"prompt": "Once", "max_tokens": 60, "temperature": 1.5, "structured_outputs": {"json": optional}})
    assert answer.status == 200 and answer.json["choices"][0]["text"].startswith("{")


# promise: extra-body-structured
def test_a_dead_end_and_what_is_refused_fail_alone(server: ServerProcess) -> None:
    def ask(structured: dict[str, Any]) -> tuple[int, Any]:
        answer = server.ask("POST", TEXT, {"prompt": "Once", "max_tokens": 40, "temperature": 1.5, "structured_outputs": structured})
        return answer.status, answer.json

    bad = [{"grammar": DEAD_END}, {"regex": "["}]
    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(ask, [*bad, {"regex": "[a-c]{9}"}, {"choice": ["north", "south"]}] * 4))
    for dead, wrong, matching, chosen in zip(*(told[place::4] for place in range(4)), strict=True):
        assert dead[0] == 400 and dead[1]["error"]["code"] == "grammar_error" and "leads nowhere" in dead[1]["error"]["message"]
        assert wrong[0] == 400
        assert re.fullmatch("[a-c]{9}", matching[1]["choices"][0]["text"])
        assert chosen[1]["choices"][0]["text"] in ("north", "south") and chosen[1]["choices"][0]["finish_reason"] == "stop"


# ---- what is had


# promise: response-format-text
def test_answers_are_json_of_their_schema(client: openai.OpenAI) -> None:
    for seed in range(3):
        parsed = client.chat.completions.parse(**ASKED, response_format=Plan, seed=seed)
        assert isinstance(parsed.choices[0].message.parsed, Plan) and parsed.choices[0].finish_reason == "stop"
        assert isinstance(client.responses.parse(model="stories", input="Once", text_format=Plan, temperature=1.5).output_parsed, Plan)
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": Step.model_json_schema(), "strict": True}}
    stream = client.chat.completions.create(**ASKED, response_format=schema, stream=True, n=2)
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(Step.model_validate_json(text) for text in texts)


# promise: extra-body-structured, response-format-text
def test_every_kind_of_form_in_every_route(server: ServerProcess) -> None:
    """Of any JSON the shortest: what closes it is made likely."""
    (closing,) = server.ask("POST", "/tokenize", {"prompt": "}", "add_special_tokens": False}).json["tokens"][-1:]
    kinds = [
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" y\ny: "y" | "z"'}}, "xy|xz"),
        ({"structured_outputs": {"json": Step.model_json_schema()}}, r"\{.*\}"),
        ({"structured_outputs": {"json_object": True}, "logit_bias": {str(closing): 100}}, r"\{ ?\}"),
        ({"response_format": {"type": "json_object"}, "logit_bias": {str(closing): 100}}, r"\{ ?\}"),
    ]
    for asked, pattern in kinds:
        said = [server.ask("POST", CHAT, ASKED | asked).json["choices"][0]["message"]["content"]]
        said.append(server.ask("POST", TEXT, {"prompt": "Once", "max_tokens": 200} | asked).json["choices"][0]["text"])
        if "response_format" in asked:
            asked = {"text": {"format": asked["response_format"]}, "logit_bias": asked["logit_bias"]}
        response = server.ask("POST", RESPONSES, {"input": "Once"} | asked).json
        said.append(response["output"][0]["content"][0]["text"])
        assert all(re.fullmatch(pattern, text, re.DOTALL) for text in said), (asked, said)
    assert response["text"] == {"format": {"type": "json_object"}}


# promise: tool-choice-auto, langchain-works-context
@pytest.mark.parametrize("choice", ["required", "add"])
def test_a_forced_call_is_one_whole_and_streamed(client: openai.OpenAI, choice: str) -> None:
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    forced: Any = {**ASKED, "tools": TOOLS, "tool_choice": named, "parallel_tool_calls": False if choice == "required" else None}
    for seed in range(3):
        answer = client.chat.completions.create(**forced, seed=seed).choices[0]
        assert answer.finish_reason == "tool_calls" and not answer.message.content
        (call,) = answer.message.tool_calls or []
        assert call.type == "function"
        check_call(call.function.name, call.function.arguments, choice)
        name, arguments, ends = "", "", list[str]()
        for chunk in client.chat.completions.create(**forced, seed=seed, stream=True):
            for each in chunk.choices:
                ends += [each.finish_reason] if each.finish_reason else []
                for delta in each.delta.tool_calls or []:
                    assert delta.index == 0 and delta.function and not each.delta.content
                    name, arguments = name + (delta.function.name or ""), arguments + (delta.function.arguments or "")
        assert ends == ["tool_calls"] and (name, arguments) == (call.function.name, call.function.arguments)
    flat: Any = [{"type": "function", **one["function"]} for one in TOOLS]
    mode: Any = choice if choice == "required" else {"type": "function", "name": choice}
    (item,) = client.responses.create(model="stories", input="Once", tools=flat, tool_choice=mode, parallel_tool_calls=False).output
    assert item.type == "function_call" and item.status == "completed"
    check_call(item.name, item.arguments, choice)


def check_call(name: str, arguments: str, choice: str) -> None:
    value = json.loads(arguments)
    assert name == choice or choice == "required"
    assert value in ({"city": "Paris"}, {"city": "Oslo"}) if name == "weather" else set(value) == {"a"} and 0 <= value["a"] <= 999


# promise: forced-call-whole
@pytest.mark.parametrize("choice", [*rarely("required"), "weather"])
def test_a_forced_call_that_is_cut_off_is_left_out_and_no_text_either(client: openai.OpenAI, choice: str) -> None:
    """A stop string ends no call: the client does not see the text that it would be found in."""
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    flat: Any = [{"type": "function", **one["function"]} for one in TOOLS]
    mode: Any = choice if choice == "required" else {"type": "function", "name": choice}
    numbers = set()
    for most in (1, 4, 12, 24, 40, 60, 90):
        forced: Any = {**ASKED, "tools": TOOLS, "tool_choice": named, "max_tokens": most, "stop": ["\n", '"'], "seed": 5}
        answer = client.chat.completions.create(**forced).choices[0]
        text, calls, end = joined(client.chat.completions.create(**forced, stream=True))
        whole = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or []]  # type: ignore[union-attr]
        assert (text, calls, end) == (answer.message.content or "", whole, answer.finish_reason) and not text
        said: Any = {"input": "Once", "tools": flat, "tool_choice": mode, "max_output_tokens": most, "temperature": 1.5}
        response = client.responses.create(model="stories", **said)
        whole += [(item.name, item.arguments) for item in response.output if item.type == "function_call"]
        for name, arguments in whole:
            check_call(name, arguments, choice)
        assert not response.output_text and all(item.type != "function_call" or item.status == "completed" for item in response.output)
        numbers.add(len(calls))
        assert end == "length" if not calls else end in ("length", "tool_calls")
    assert len(numbers) > 1


def joined(stream: Any) -> tuple[str, list[tuple[str, str]], str]:
    """The text, the calls and the finish reason of a stream."""
    text, calls, end = "", list[tuple[str, str]](), ""
    for choice in (choice for chunk in stream for choice in chunk.choices):
        text, end = text + (choice.delta.content or ""), choice.finish_reason or end
        for delta in choice.delta.tool_calls or []:
            calls += [("", "")] * (delta.index == len(calls))
            name, arguments = calls[delta.index]
            calls[delta.index] = (name + (delta.function.name or ""), arguments + (delta.function.arguments or ""))
    return text, calls, end


# promise: tool-choice-auto
def test_several_calls_may_be_forced_at_once(client: openai.OpenAI) -> None:
    forced: Any = {**ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    answers = [client.chat.completions.create(**forced, seed=seed).choices[0].message for seed in range(3)]
    assert max(len(answer.tool_calls or []) for answer in answers) > 1


# ---- behind a thought


def test_a_thought_is_free(client: openai.OpenAI) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = client.chat.completions.create(**ASKED, response_format={"type": "json_object"}, max_tokens=20, extra_body=thinking).choices[0]
    thought = (answer.message.model_extra or {})["reasoning_content"]
    assert answer.finish_reason == "length" and not answer.message.content and re.search("[a-z] [a-z]", thought)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 3}}\n</tool_call>'
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}}, '{"a": 1}'),
    ({"json_object": True}, '{"b": [null]}'),
    ({"regex": "[a-c]+"}, "abc"),
    ({"choice": ["yes", "no"]}, "no"),
    ({"grammar": 'start: "x" y\ny: "y"'}, "xy"),
]


# promise: tool-choice-auto
@pytest.mark.parametrize(("asked", "fits"), FORMS)
@pytest.mark.parametrize("reasoning", ["think", "none"])
@pytest.mark.parametrize("mode", ["auto", "none", "required"])
def test_an_answer_has_the_form_or_is_a_call_and_may_think_before(
    asked: dict[str, Any], fits: str, reasoning: str, mode: Literal["auto", "none", "required"]
) -> None:
    choice = ToolChoice(mode)
    tools = choice.offered(check_tools(TOOLS))
    form = AnswerForm(reasoning, "hermes", ("weather", "add") if tools else (), True)
    thoughts = [("", "", True), ("", "<think>\nHm { ?\n</think>\n\n", reasoning == "think")]
    thoughts += [("<think>\n", "Hm</think>", True), ("<think>\n", "", False)] if reasoning == "think" else []
    for prompt, thought, may_think in thoughts:
        structured = chat_grammar(structured_outputs(asked), form, tools, choice, prompt)
        assert structured is not None
        compiled = trial_guide([]).compile(grammar_text(structured))
        for text in [text for _, text in FORMS] + [CALL, f"{CALL}\n{CALL}", f"{fits}{CALL}", "Hello", f"\n{fits}"]:
            matcher = compiled.copy()
            matcher.advance(list((thought + text).encode()))
            may_call = mode != "none" and text in (CALL, f"{CALL}\n{CALL}")
            spaced = text == f"\n{fits}" and thought  # white space is the tag's, where there is one
            may_say = mode != "required" and bool(text == fits or spaced or ("json_object" in asked and text == '{"a": 1}'))
            assert (not matcher.failed and matcher.accepting) == (may_think and (may_call or may_say)), (prompt, thought, text)
