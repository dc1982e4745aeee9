"""Section D: prompts, token ids, messages; and the rows of F that concern a model of text alone."""

from collections.abc import Callable
from typing import Any

from octavo.server_config import ServerConfig
from tests.support.bad_inputs_http import refused
from tests.support.bad_inputs_row import CHAT, COMPLETIONS, RESPONSES, SOUND, Attempt, Row, acted, fields, row
from tests.support.bad_inputs_watch import Watched

ALL = (COMPLETIONS, CHAT, RESPONSES)
MAX_LEN, VOCAB = 256, 512
MOST_BYTES, MOST_LAG_MS = ServerConfig().max_body_bytes, 200
SMALL_POOL = 32 * 4  # tokens that the blocks of the small server hold
PICTURE_TOKEN = "<|image_pad|>"  # of the tokenizer of stories, too, in place of a letter nobody uses
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


def _lengths(server: Watched) -> None:
    for length, max_tokens, status in (
        (MAX_LEN - 1, 1, 200), (MAX_LEN - 2, 2, 200), (MAX_LEN - 1, 2, 400), (MAX_LEN, 1, 400), (MAX_LEN + 1, 1, 400), (MAX_LEN, 2, 400),
    ):  # fmt: skip
        reply = server.ask("POST", COMPLETIONS, {"prompt": [7] * length, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True})
        assert reply.status == status, (length, max_tokens, reply)
        if status == 200:
            assert reply.json["choices"][0]["finish_reason"] == "length" and reply.json["usage"]["completion_tokens"] == max_tokens
        else:
            error = reply.error
            assert error["code"] == "context_length_exceeded"
            assert error["message"].startswith(f"This model's maximum context length is {MAX_LEN} tokens. However, you requested ")


def _larger_than_the_pool() -> list[Attempt]:
    sound = SOUND[COMPLETIONS]
    return [
        Attempt(COMPLETIONS, {"prompt": [7] * (SMALL_POOL + 8), "max_tokens": 1}),
        Attempt(COMPLETIONS, {"prompt": [7] * 8, "max_tokens": SMALL_POOL}),
        Attempt(COMPLETIONS, sound, 200),
    ]


def spelled(text: str, status: int = 400) -> list[Attempt]:
    return [
        Attempt(COMPLETIONS, {"prompt": text, "max_tokens": 1}, status, "prompt"),
        Attempt(COMPLETIONS, {"prompt": ["a", text], "max_tokens": 1}, status, "prompt"),
        Attempt(CHAT, SOUND[CHAT] | {"messages": [user(text)]}, status, "messages"),
        Attempt(CHAT, SOUND[CHAT] | {"messages": [user([{"type": "text", "text": text}])]}, status, "messages"),
        Attempt(RESPONSES, SOUND[RESPONSES] | {"input": text}, status, "input"),
    ]


def _special_tokens() -> list[Attempt]:
    """In a text they are what transformers makes of them; one that stands for a picture is refused, for there is none."""
    words = ("<s></s><unk>", "<|im_end|><|endoftext|>", "<image>", "<|image_pad >", "<s>" * 100)
    pictures = (PICTURE_TOKEN, f"Who is {PICTURE_TOKEN}?", PICTURE_TOKEN * 20)
    return [attempt for text in words for attempt in spelled(text, 200)] + [attempt for text in pictures for attempt in spelled(text)]


def _escaped(server: Watched) -> Callable[[], None]:
    """As large as a body may be by default, and all of it escapes: the parser has the interpreter for itself, but not for long."""
    bodies = [b'{"prompt": "' + escape * (MOST_BYTES // len(escape) - 8) + b'"}' for escape in (b"\\u0061", b"\\ud83d\\ude00")]

    def act() -> None:
        for body in bodies:
            lags = []
            for _ in range(3):
                server.watch()
                Attempt(COMPLETIONS, body, 400, "prompt", "context_length_exceeded").check(server.ask("POST", COMPLETIONS, body))
                lags.append(server.watch()["lag_ms"])
            assert min(lags) < MOST_LAG_MS, lags
        Attempt(COMPLETIONS, b"", 413).check(server.ask("POST", COMPLETIONS, bodies[0] + b" " * 200))

    return act


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _media(server: Watched) -> None:
    """What is no text is refused by its name."""
    kinds = {"image_url": "images are", "input_image": "images are", "input_audio": "audio is", "file": "files are"}
    for kind, said in kinds.items():
        for path, name, place in ((CHAT, "messages", "messages[0].content[1]"), (RESPONSES, "input", "input[0].content[1]")):
            text = {"type": "text" if path == CHAT else "input_text", "text": "What is this?"}
            error = refused(server.ask("POST", path, SOUND[path] | {name: [user([text, {"type": kind}])]}), 400).error
            assert error["message"] == f"{place} has the type {kind}: {said} not supported yet; send text", error
            assert (error["param"], error["code"]) == (place, "unsupported_parameter")


def _enormous() -> list[Attempt]:
    return [
        Attempt(path, SOUND[path] | {name: value}, code="context_length_exceeded")
        for text in ("a" * 10_000_000, "\U0001f600" * 2_500_000)
        for path, name, value in ((COMPLETIONS, "prompt", text), (CHAT, "messages", [user(text)]), (RESPONSES, "input", text))
    ]


MESSAGES: list[tuple[str, list[Any]]] = [  # the place at fault, and conversations with it
    ("messages[0].role", [[{"role": "robot", "content": "x"}], [{"content": "x"}], [{"role": 5, "content": "x"}]]),
    ("messages[0].content", [[{"role": "user"}], [user(5)], [user({})], [{"role": "assistant", "content": None}]]),
    ("messages[0].content[0]", [[user([5])], [user([{"type": "text"}])], [user([{"type": "text", "text": 5}])]]),
    ("messages[0].tool_call_id", [[{"role": "tool", "content": "x"}]]),
    ("messages[0].tool_calls", [[{"role": "assistant", "tool_calls": [5]}], [{"role": "assistant", "tool_calls": "x"}]]),
    ("messages", ["hi", 5, {}, [5], [None]]),
]
PROMPTS: dict[tuple[int, str], list[Attempt]] = {
    (52, "nothing"): fields("prompt", ["", [], [[]], None, ["a", ""], [[1], []]], COMPLETIONS)
    + fields("messages", [[], None], CHAT)
    + fields("input", ["", [], None], RESPONSES),
    (53, "ids that are none"): fields(
        "prompt", [[-1], [-(2**31)], [VOCAB], [VOCAB + 1], [[1], [999_999]], [2**63], [2**64], [1, 10**300]], COMPLETIONS
    ),
    (55, "lists of other things"): fields(
        "prompt", [[["a"]], [[1], "a"], [1, 2.0], [True], [[1, True]], [1, [2]], [1, None], {"a": 1}, [[[1]]]], COMPLETIONS
    ),
    (62, "messages"): [Attempt(CHAT, SOUND[CHAT] | {"messages": value}, 400, place) for place, values in MESSAGES for value in values],
    (63, "a template of the client's"): fields("chat_template", ["{{ x }}"], CHAT, RESPONSES),
    (64, "template variables"): fields(
        "chat_template_kwargs", [{"tokenize": True}, {"messages": []}, {"__class__": 1}, {"enable_thinking": 1}, [], "x"], CHAT, RESPONSES
    ),
    (65, "embeddings"): fields("prompt_embeds", ["gASV", [], [[0.5]], {"shape": [1]}], *ALL),
    (66, "models"): [
        Attempt(path, SOUND[path] | {"model": name}, 404, "model", "model_not_found")
        for path in ALL
        for name in ("", "../../etc", "nothing", "x" * 2**20)
    ]
    + fields("model", [5, ["stories"]], *ALL)
    + fields("model", [None, "stories"], *ALL, status=200),
    (67, "cache_salt"): fields("cache_salt", ["", "x" * 2**20, 5], *ALL),
    (93, "pictures for a model of text"): [
        Attempt(CHAT, SOUND[CHAT] | {"messages": [{"role": role, "content": [*before, *[PICTURE] * many]}]}, 400, "messages[0].content")
        for role in ("user", "system")
        for before in ([], [{"type": "text", "text": "What is this?"}])
        for many in (1, 1000)
    ]
    + [Attempt(RESPONSES, SOUND[RESPONSES] | {"input": [user([{"type": "input_image", "image_url": "x"}])]}, 400, "input")],
}  # fmt: skip

ROWS: list[Row] = [
    *(row(number, name, attempts) for (number, name), attempts in PROMPTS.items()),
    row(56, "100,000 prompts", lambda: fields("prompt", [["a"] * 100_000, ["a"] * 1025, [[1]] * 1025], COMPLETIONS)),
    acted(57, "lengths at the edge", _lengths),
    row(58, "larger than the pool", _larger_than_the_pool, place="small"),
    row(59, "10 MB of one letter", _enormous),
    Row(59, "8 MiB of escapes", _escaped, "optimized"),
    row(60, "text that spells special tokens", _special_tokens),
    row(61, "10,000 pictures spelled", lambda: [one for many in (200, 10_000, 100_000) for one in spelled(PICTURE_TOKEN * many)]),
    acted(93, "images, audio, video and files", _media),
    row(68, "labels of 10 MB", lambda: fields("user", ["x" * 10**7], *ALL) + fields("metadata", [{"a": {"b": ["x" * 10**7]}}], *ALL)),
]
