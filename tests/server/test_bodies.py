"""Bodies and the plain routes, at a real server: what is no request is a 400 that says where, and what is one is answered."""

import json
import math
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from octavo import __version__
from octavo.server.body import LARGE_BYTES, _is_longer
from octavo.server.fields import ChatBody, CompletionBody, ResponseBody
from octavo.server.tokens import MOST_CHARS, MOST_TOKENS, Detokenize, Tokenize
from tests.support.server_process import STAND_IN, ServerProcess
from tests.support.stand_in_llm import StandInLLM

TOKENIZER = StandInLLM().tokenizer


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(STAND_IN, "--served-model-name", "org/name") as server:
        yield server
        assert "Traceback" not in server.stderr, server.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty"),
        (b'{"prompt": "a"', "EOF while parsing"),
        (b'{"prompt": "a"} x', "trailing characters at line 1 column 17"),
        (b'{"prompt": "a"}{}', "trailing characters"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "expected value at line 1 column 1"),
        ('{"prompt": "a"}'.encode("utf-16"), "expected value"),
        (b'{"prompt": "\xff"}', "invalid unicode"),
        (b'{"prompt": "\xed\xa0\x80"}', "invalid unicode"),
        (b'{"prompt": "\\ud83d"}', "hex escape"),
        (b'{"prompt": "\\udc00\\ud83d"}', "surrogate"),
        (b'{"\\ud83d": 1}', "hex escape"),
        (b'{"model": "\\ud83d", "prompt": "a"}', "hex escape"),
        (b"[" * 100_000, "recursion limit"),
        (b'{"prompt": ' * 100_000, "recursion limit"),
        (b'{"prompt": "a", "extra": ' + b"[" * 250 + b"]" * 250 + b"}", "recursion limit"),
        (b'{"prompt": nan}', "expected ident"),
        (b"[]", "not a list"),
        (b'"x"', "not a text"),
        (b"1", "not a number"),
        (b"-0.5e3", "not a number"),
        (b"null", "not null"),
        (b"true", "not true or false"),
        (b'{"prompt": "a", "extra": 1' + b"0" * 5000 + b"}", "number out of range"),
    ],
    ids=lambda value: repr(value[:24]),
)
def test_what_is_no_object_is_told_with_its_place(server: ServerProcess, body: bytes, said: str) -> None:
    reply = server.ask("POST", "/tokenize", body, content_type="application/json")
    assert reply.status == 400 and reply.error["type"] == "invalid_request_error" and said in reply.error["message"]
    assert len(reply.body) < 300


# promise: what-built-does-exist, known-parameter-supported
@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": True}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/tokenize", {"messages": "hello"}, "messages"),
        ("/tokenize", {"messages": [5]}, "messages[0]"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}, {"role": "wizard", "content": "a"}]}, "messages[1].role"),
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, None),
        ("/tokenize", {"prompt": "a", "model": "../../etc"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, "2"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [0, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [512]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**63]}, "tokens[0]"),
        ("/slow", {"words": 1, "either": [1, "x"]}, "either[1]"),
        ("/slow", {"words": 1, "either": {"a": 1, "b": "x"}}, "either.b"),
        ("/slow", {"words": 1, "either": "x"}, "either"),
        ("/slow", {"words": 1, "unbounded": math.inf}, "unbounded"),
        ("/slow", {"words": math.nan}, "words"),
        ("/slow", {"words": 1, "either": [1, -math.inf]}, "either[1]"),
        ("/tokenize", {"prompt": "a", "extra": {"deep": [1.5, {"er": math.nan}]}}, "extra.deep[1].er"),
        ("/tokenize", {"prompt": "a", "best_of": 2}, "best_of"),
        ("/tokenize", {"prompt": "a", "audio": {}}, "audio"),
        ("/tokenize", {"prompt": "a", "use_beam_search": True}, "use_beam_search"),
        ("/tokenize", {"messages": [], "tools": [{}]}, "tools"),
    ],
    ids=repr,
)
def test_a_wrong_field_is_named(server: ServerProcess, path: str, body: dict[str, object], param: str | None) -> None:
    reply = server.ask("POST", path, body)
    wanted = ("not_found_error", 404) if param == "model" else ("invalid_request_error", 400)
    assert (reply.error["type"], reply.status) == wanted and reply.error["param"] == param
    assert param is None or param in reply.error["message"]


@pytest.mark.parametrize("model", [ChatBody, CompletionBody, ResponseBody, Tokenize, Detokenize])
def test_of_many_wrong_items_the_first_is_the_error(model: type[BaseModel]) -> None:
    """Whatever the field: an error object for each would be gigabytes."""
    for name, field in model.model_fields.items():
        for item in (None, 1, "x", {}, [], True, 10**400):
            for wrong in ([item] * 1000, dict.fromkeys(map(str, range(1000)), item)):
                try:
                    model.model_validate({field.alias or name: wrong})
                except ValidationError as error:
                    found = [mistake for mistake in error.errors() if mistake["loc"][0] == name]
                    assert len(found) <= 3, (name, item, len(found))  # one of each kind that a union has
                    assert all(mistake["loc"][-1] in (0, "0") or len(mistake["loc"]) < 3 for mistake in found)


def test_fields_that_nobody_reads_are_looked_at_no_further_than_their_limit() -> None:
    many = [1] * 3_000_000
    start = time.process_time()
    for value in (many, {"a": [many, many]}, [[many]] * 100):
        assert _is_longer(value, 65_536)
    assert time.process_time() - start < 0.5
    assert not _is_longer({"a" * 100: ["b" * 100, 1.5, None]}, 202) and _is_longer({"a" * 100: ["b" * 100, 1.5, None]}, 201)


@pytest.mark.parametrize("rest", [b"", b" " * 2 * LARGE_BYTES])
def test_numbers_beyond_floats_are_not_finite_and_refused(server: ServerProcess, rest: bytes) -> None:
    """Also in fields that nobody reads: an answer that repeated them would be no JSON."""
    for name in ("unbounded", "metadata"):
        reply = server.ask("POST", "/slow", b'{"words": 1, "%s": 1e400}' % name.encode() + rest, content_type="application/json")
        assert reply.status == 400 and reply.error["param"] == name


def test_of_equal_keys_the_last_is_checked_and_counts(server: ServerProcess) -> None:
    assert server.ask("POST", "/detokenize", b'{"tokens": [9999999], "tokens": [403]}').json == {"prompt": "Once"}
    reply = server.ask("POST", "/detokenize", b'{"tokens": [403], "tokens": [9999999]}')
    assert reply.status == 400 and reply.error["param"] == "tokens[0]"


# promise: unknown-extra-field, user-metadata-store
def test_what_nobody_knows_is_ignored_and_warned_about_once(server: ServerProcess) -> None:
    for _ in range(3):
        body = {"prompt": "Once", "foo\nbar": 1, "user": "me", "metadata": {}, "store": True, "service_tier": "auto", "functions": None}
        assert server.ask("POST", "/tokenize", body).json["tokens"] == [1, 403]
    for number in range(300):
        server.ask("POST", "/tokenize", {"prompt": "Once", f"made up {number}": 1})
    assert server.stderr.count("foo\\nbar") == 1 and "metadata" not in server.stderr
    assert 200 < server.stderr.count("of a request is unknown and ignored") < 260  # names are not kept without end


# promise: tokenize-detokenize-tokenizer
@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_any_text_has_the_tokens_its_tokenizer_gives_it(server: ServerProcess, text: str) -> None:
    answer = server.ask("POST", "/tokenize", {"prompt": text, "return_token_strs": True}).json
    tokens = TOKENIZER.encode(text)
    assert answer == {"count": len(tokens), "max_model_len": 256, "tokens": tokens, "token_strs": [TOKENIZER.token(one) for one in tokens]}
    back = server.ask("POST", "/detokenize", {"tokens": tokens}).json
    assert back == {"prompt": TOKENIZER.decode(tokens, skip_special_tokens=False)}


# promise: tokenize-detokenize-tokenizer
def test_tokens_of_a_prompt_and_of_a_conversation(server: ServerProcess) -> None:
    def tokens(body: dict[str, object]) -> list[int]:
        ids: list[int] = server.ask("POST", "/tokenize", {"model": "org/name", **body}).json["tokens"]
        return ids

    assert tokens({"prompt": "Once"}) == [1, 403] and tokens({"prompt": "Once", "add_special_tokens": False}) == [403]
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert tokens({"messages": messages}) == TOKENIZER.encode("<user>Hi", add_special_tokens=False)
    assert tokens({"messages": messages, "add_special_tokens": True}) == TOKENIZER.encode("<user>Hi")
    assert server.ask("POST", "/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_what_is_too_long_to_be_tokenised_at_once_is_refused_by_its_length(server: ServerProcess) -> None:
    for path, body, param, most in (
        ("/tokenize", {"prompt": "a" * (MOST_CHARS + 1)}, "prompt", MOST_CHARS),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * MOST_CHARS}]}, "messages", MOST_CHARS),
        ("/detokenize", {"tokens": [403] * (MOST_TOKENS + 1)}, "tokens", MOST_TOKENS),
    ):
        reply = server.ask("POST", path, body)
        assert reply.status == 400 and reply.error["param"] == param and f"at most {most:,}" in reply.error["message"]
    assert server.ask("POST", "/tokenize", {"prompt": "a" * 9000}).json["tokens"] == TOKENIZER.encode("a" * 9000)


# promise: served-model-name, v1-models, health, version, open-webui-works, guidellm-works-health
def test_models_health_and_version(server: ServerProcess) -> None:
    assert server.ask("GET", "/health").json == {"status": "ready"}
    assert server.ask("GET", "/version").json == {"version": __version__}
    listed = server.ask("GET", "/v1/models").json
    (model,) = listed["data"]
    assert listed["object"] == "list" and model.items() >= {"id": "org/name", "object": "model", "max_model_len": 256}.items()
    assert server.ask("GET", "/v1/models/org/name").json == model
    reply = server.ask("GET", "/v1/models/other")
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")


def test_the_schema_is_whole(server: ServerProcess) -> None:
    schema = server.ask("GET", "/openapi.json").json
    text = json.dumps(schema)
    assert "422" not in text and "$defs" not in text
    assert '"#/components/schemas/Inner"' in text and schema["components"]["schemas"]["Inner"]["required"] == ["number"]
    body = schema["paths"]["/detokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["tokens"] and set(schema["paths"]["/health"]["get"]["responses"]) >= {"default"}


def test_a_conversation_of_too_many_messages_is_refused_by_their_number(server: ServerProcess) -> None:
    message = {"role": "user", "content": "a"}
    for path, field in (("/tokenize", "messages"), ("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        reply = server.ask("POST", path, {field: [message] * 16_385})
        assert reply.status == 400 and reply.error["param"] == field
        assert reply.error["message"] == f"{field} has 16,385 items, at most 16,384 are allowed"
    assert server.ask("POST", "/tokenize", {"messages": [message] * 16_384}).status == 200


@pytest.mark.timed("how long other clients wait next to large bodies")
def test_large_bodies_of_mistakes_do_not_hold_up_others(server: ServerProcess) -> None:
    """Many wrong items, names that nobody knows, and answers that are longer than their questions."""
    bodies = [
        ("/detokenize", b'{"tokens": [' + b'"",' * 700_000 + b'""]}', 400),
        ("/tokenize", b'{"messages": [' + b"1," * 700_000 + b"1]}", 400),
        ("/v1/completions", b'{"prompt": "a", "stop": [' + b"1," * 700_000 + b"1]}", 400),
        ("/v1/completions", b'{"prompt": "a", "logit_bias": {' + b",".join(b'"%d":""' % n for n in range(200_000)) + b"}}", 400),
        ("/tokenize", b'{"prompt": "a",' + b",".join(b'"%d":1' % n for n in range(200_000)) + b"}", 200),
    ]
    lags, over = list[float](), threading.Event()

    def look() -> None:
        while not over.is_set():
            start = time.monotonic()
            assert server.ask("GET", "/health").status == 200
            lags.append(time.monotonic() - start)

    looking = threading.Thread(target=look)
    looking.start()
    before = server.memory("VmRSS")
    for path, body, status in bodies:
        assert server.ask("POST", path, body, content_type="application/json").status == status, path
    over.set()
    looking.join()
    assert max(lags) < 1.5 and server.memory("VmHWM") - before < 500 * 2**20, (max(lags), server.memory("VmHWM") - before)
