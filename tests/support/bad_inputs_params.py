"""Section C: sampling parameters. Each is a 400 that names its field, in completions and in chat."""

from dataclasses import replace
from typing import Any

from octavo.server.fields import FIELDS
from tests.support.bad_inputs_row import CHAT, COMPLETIONS, RESPONSES, SOUND, Attempt, Row, acted, fields, numbers, row
from tests.support.bad_inputs_watch import Watched

BOTH = (COMPLETIONS, CHAT)
ALL = (COMPLETIONS, CHAT, RESPONSES)

# What beam search does not have, or has no use for without use_beam_search.
UNSEARCHED: dict[str, Any] = {"beam_width": 2, "length_penalty": 0.5, "early_stopping": True}
UNSEARCHABLE: dict[str, list[Any]] = {
    "beam_width": [0, -1, 2**31, 129, 1.5, True], "n": [0, 3, 129], "length_penalty": ["1", 17, -17, 10**400],
    "early_stopping": ["always", 1, []], "stream": [True], "presence_penalty": [1], "frequency_penalty": [-1], "repetition_penalty": [1.1],
    "min_tokens": [1], "logit_bias": [{"5": 1}], "allowed_token_ids": [[5]], "bad_words": [["a"]], "stop": ["a"], "stop_token_ids": [[5]],
    "response_format": [{"type": "json_object"}], "structured_outputs": [{"regex": "a"}],
}  # fmt: skip


def _search(path: str, name: str, value: Any) -> Attempt:
    return Attempt(path, SOUND[path] | {"use_beam_search": True, "beam_width": 2, name: value}, param=name)


ATTEMPTS: dict[tuple[int, str], list[Attempt]] = {
    (30, "temperature"): numbers("temperature", *ALL) + fields("temperature", ["1", True, -0.1, 2.1, [1], {}], *ALL),
    (31, "repetition_penalty"): numbers("repetition_penalty", *BOTH) + fields("repetition_penalty", [0, -1, "1"], *ALL),
    (32, "presence and frequency"): [
        attempt
        for name in ("presence_penalty", "frequency_penalty")
        for attempt in numbers(name, *BOTH) + fields(name, [-2.1, 2.1, True, "0"], *BOTH)
    ],
    (33, "top_p"): numbers("top_p", *BOTH) + fields("top_p", [0, -1, 1.01], *ALL),
    (34, "top_k"): fields("top_k", [-2, 1.5, 2**63, True], *ALL),
    (35, "min_p"): numbers("min_p", *BOTH) + fields("min_p", [-0.1, 1.1], *ALL),
    (36, "n"): fields("n", [0, -1, 2**31, 10**9, 129, 17, 1.0, True], *BOTH),
    (38, "best_of and beams"): fields("best_of", [10**9, 2], *BOTH)
    + fields("use_beam_search", ["yes", 1], *BOTH)
    + fields("use_beam_search", [True], RESPONSES)
    + [attempt for name, value in UNSEARCHED.items() for attempt in fields(name, [value], *BOTH)]
    + [_search(path, name, value) for name, values in UNSEARCHABLE.items() for value in values for path in BOTH],
    (39, "max_tokens"): numbers("max_tokens", *BOTH)
    + fields("max_tokens", [0, -1, 2**63, "5", 1.5], *BOTH)
    + fields("max_completion_tokens", [0, -1, 2**63, "5"], CHAT)
    + fields("max_output_tokens", [0, -1, 2**63, "5"], RESPONSES)
    + [Attempt(COMPLETIONS, SOUND[COMPLETIONS] | {"max_tokens": 10**6}, 400, "*", "context_length_exceeded")]
    + [Attempt(CHAT, SOUND[CHAT] | {"max_tokens": 10**6}, 400, "*", "context_length_exceeded")],
    (40, "min_tokens"): fields("min_tokens", [-1, 3, 2**63], *BOTH),
    (41, "logprobs"): fields("logprobs", [-2, 21, 10**6, "x", True], COMPLETIONS)
    + fields("logprobs", [5, "x"], CHAT)
    + [Attempt(CHAT, SOUND[CHAT] | {"logprobs": True, "top_logprobs": many}, param="top_logprobs") for many in (-2, 21, 10**6, "x")]
    + fields("top_logprobs", [3], CHAT),
    (43, "stop"): fields("stop", [["a"] * 5, "", [""], "x" * 2**20, 5, [5], [None]], *ALL),
    (44, "stop_token_ids"): fields("stop_token_ids", [[-1], [512], [2**63], [1.5], [True], 5, [1] * 300], *ALL),
    (45, "logit_bias"): numbers("logit_bias", *BOTH)
    + fields("logit_bias", [{"abc": 1}, {"-1": 1}, {"1000000000": 1}, {"5": 1000}, {"5": -101}, {"5": "1"}, {"5": True}, [5]], *BOTH)
    + [Attempt(COMPLETIONS, b'{"prompt": "a", "logit_bias": {"5": 1e400}}', param="logit_bias")],
    (46, "bad_words"): fields("bad_words", [["a"] * 10_000, [""], "word", ["a" * 2000], ["a" * 129], ["a" * 128] * 129], *ALL)
    + fields("allowed_token_ids", [[], [-1], [512], ["5"], [5] * 16_385], *ALL),
    (47, "seed"): fields("seed", [-1, 2**64, 1.5, "1"], *ALL),
    (48, "priority and time"): fields("priority", [-1, -(2**63), 2**63, 1.5], *ALL) + fields("timeout", [0, -1, "5"], *ALL),
    (50, "stream"): fields("stream", ["yes", 1], *ALL) + fields("stream_options", [{"include_usage": True}], *BOTH),
}  # fmt: skip


def _equal_samples(server: Watched) -> None:
    """Decided: n samples of a temperature of 0 are n equal answers."""
    reply = server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS] | {"n": 4, "temperature": 0, "max_tokens": 8})
    assert reply.status == 200 and len({choice["text"] for choice in reply.json["choices"]}) == 1 and len(reply.json["choices"]) == 4


def _too_many_prompt_logprobs() -> list[Attempt]:
    """As many prompts of as many tokens as are taken, with the logprobs of each; one token too many; and 100,000 in one prompt."""
    body: dict[str, Any] = {"prompt": [[5] * 250] * 1024, "max_tokens": 1, "echo": True, "logprobs": 1}
    edge = [[5] * 247] * 48 + [[5]]  # each with a token of an answer, of 21 numbers each
    return [
        Attempt(COMPLETIONS, body, 400, "logprobs"),
        Attempt(COMPLETIONS, body | {"prompt": edge, "logprobs": 20}, 400, "logprobs"),
        Attempt(COMPLETIONS, body | {"prompt": [5] * 100_000}, 400, "prompt", "context_length_exceeded"),
        Attempt(COMPLETIONS, body | {"prompt": "a " * 100_000}, 400, "prompt", "context_length_exceeded"),
    ]


def _too_much_in_all() -> list[Attempt]:
    """Every prompt and every number may be; all together are too much to keep, or to answer."""
    words = [f"{number} and " + "w" * 70 for number in range(200)]
    many: dict[str, Any] = {"prompt": ["a"] * 1024, "max_tokens": 2}
    pattern = {"regex": "a|" * 50_000 + "b"}
    return [
        Attempt(COMPLETIONS, many | {"bad_words": words}, param="bad_words"),
        Attempt(COMPLETIONS, many | {"logit_bias": {str(token): 1 for token in range(512)}}, param="logit_bias"),
        Attempt(COMPLETIONS, many | {"prompt": "a", "n": 17, "allowed_token_ids": [5] * 16_384}, param="allowed_token_ids"),
        Attempt(CHAT, SOUND[CHAT] | {"n": 17, "allowed_token_ids": [5] * 16_384}, param="allowed_token_ids"),
        Attempt(COMPLETIONS, many | {"stop_token_ids": [5] * 256, "allowed_token_ids": [5]}, param="stop_token_ids"),
        Attempt(COMPLETIONS, many | {"max_tokens": 12, "logprobs": 20}, param="logprobs"),
        Attempt(CHAT, SOUND[CHAT] | {"n": 128, "max_tokens": 100, "logprobs": True, "top_logprobs": 20}, param="top_logprobs"),
        Attempt(COMPLETIONS, many | {"prompt": [[5] * 250] * 1024, "echo": True}, param="echo"),
        Attempt(COMPLETIONS, many | {"prompt": ["a"] * 50, "structured_outputs": pattern}, param="structured_outputs"),
    ]


def _many_prompt_logprobs(server: Watched) -> None:
    """A third of what is given at most: all of it, within the memory and the time that all rows have."""
    prompts = [[5 + number % 3] * 248 for number in range(16)]  # 83,328 numbers
    body = {"prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 20, "temperature": 0, "ignore_eos": True}
    reply = server.ask("POST", COMPLETIONS, body)
    assert reply.status == 200, reply
    for choice in reply.json["choices"]:
        found = choice["logprobs"]["top_logprobs"]
        assert len(found) == 249 and found[0] is None and all(20 <= len(each) <= 21 for each in found[1:])


# Fields of other servers: a value that is refused, and what to use instead, as the message says it.
JSON_FORM = 'use structured_outputs {"json": ...} or response_format'
NO_BACKEND = "leave it out: every form is compiled by llguidance"
OTHERS: dict[str, tuple[Any, str]] = {
    "guided_json": ({"type": "object"}, JSON_FORM),
    "guided_regex": ("a+", 'use structured_outputs {"regex": ...}'),
    "guided_choice": (["a", "b"], 'use structured_outputs {"choice": ...}'),
    "guided_grammar": ('start: "a"', 'use structured_outputs {"grammar": ...}'),
    "guided_json_object": (True, 'use response_format {"type": "json_object"}'),
    "guided_decoding_backend": ("outlines", NO_BACKEND),
    "guided_whitespace_pattern": (" ", NO_BACKEND),
    "json_schema": ({}, JSON_FORM),
    "regex": ("a", 'use structured_outputs {"regex": ...}'),
    "ebnf": ('root ::= "a"', 'use structured_outputs {"grammar": ...}'),
    "grammar": ('root ::= "a"', 'use structured_outputs {"grammar": ...}'),
    "structural_tag": ({}, "use structured_outputs or tools"),
    "audio": ({}, "this server takes and writes text"),
    "modalities": (["text", "audio"], "this server writes text"),
    "prediction": ({}, ""),
    "web_search_options": ({}, ""),
    "functions": ([{"name": "f"}], "use tools"),
    "function_call": ("auto", "use tool_choice"),
    "best_of": (2, "use n for several samples, beam_width for beam search"),
    "prompt_logprobs": (0, "use /v1/completions with echo and logprobs"),
    "truncate_prompt_tokens": (5, "shorten the prompt; /tokenize counts its tokens"),
    "prompt_embeds": ("gASV", "send text or token ids"),
    "logits_processors": (["x"], "use logit_bias, bad_words or structured_outputs"),
    "chat_template": ("{{ x }}", "the server has one template (--chat-template)"),
    "documents": ([{"text": "a"}], "put them into a message"),
    "mm_processor_kwargs": ({}, "images, audio and video are not supported yet"),
    "add_generation_prompt": (False, 'use chat_template_kwargs {"add_generation_prompt": ...}'),
    "continue_final_message": (True, 'use chat_template_kwargs {"continue_final_message": ...}'),
    "n_predict": (5, "use max_tokens"),
}
HARMLESS: list[tuple[str, Any]] = [
    ("modalities", ["text"]), ("best_of", 1), ("use_beam_search", False), ("guided_json", None), ("length_penalty", 1.0),
    ("length_penalty", 1), ("early_stopping", False), ("guided_json_object", False), ("add_generation_prompt", True),
    ("continue_final_message", False),
]  # fmt: skip


def _of_other_servers() -> list[Attempt]:
    """What changes an answer is refused by name, and what asks for nothing is not."""
    named = [attempt for name, (value, _) in OTHERS.items() for attempt in fields(name, [value], *ALL)]
    named += fields("best_of", [True, 1.0], *ALL)  # equal to 1, but not the harmless 1
    named += fields("suffix", ["x"], COMPLETIONS) + fields("max_output_tokens", [5], CHAT) + fields("echo", [True], CHAT)
    own = {"max_tokens": 5, "max_completion_tokens": 5, "response_format": {"type": "json_object"}, "top_logprobs": 5, "background": True,
           "previous_response_id": "resp_1", "conversation": "c", "prompt": {"id": "p"}, "truncation": "auto"}  # fmt: skip
    named += [attempt for name, value in own.items() for attempt in fields(name, [value], RESPONSES)]
    refused = [replace(attempt, code="unsupported_parameter") for attempt in named]
    return refused + [attempt for name, value in HARMLESS for attempt in fields(name, [value], *ALL, status=200)]


def _what_to_use_instead(server: Watched) -> None:
    assert OTHERS.keys() == FIELDS.keys()
    for name, (value, instead) in OTHERS.items():
        said = server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS] | {name: value}).error["message"]
        assert said == f"{name} is not supported" + (f"; {instead}" if instead else ""), said


def _optimized() -> list[Attempt]:
    return [attempt for attempts in ATTEMPTS.values() for attempt in attempts]


ROWS: list[Row] = [
    *(row(number, name, attempts) for (number, name), attempts in ATTEMPTS.items()),
    acted(37, "n of temperature 0", _equal_samples),
    row(42, "too many prompt logprobs", _too_many_prompt_logprobs),
    row(46, "too much in all", _too_much_in_all),
    acted(42, "many prompt logprobs", _many_prompt_logprobs, canary=False),
    row(38, "fields of other servers", _of_other_servers),
    acted(38, "fields of other servers, and what to use instead", _what_to_use_instead),
    row(49, "unknown fields", fields("foo", [1, None, {"a": [1]}], *ALL, status=200)),
    row(51, "all of these under python -O", _optimized, place="optimized"),
]
