"""Section A: HTTP itself, in raw bytes."""

import gzip
import json
import re
import time
from collections.abc import Callable

from tests.support.bad_inputs_row import CHAT, COMPLETIONS, SOUND, Attempt, Row, acted, row
from tests.support.bad_inputs_watch import Watched
from tests.support.server_process import Reply, read_replies

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MOST_FOR_A_HEAD = 10 * 2**20


def refused(reply: Reply, status: int, kind: str = "") -> Reply:
    wanted = kind or {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}.get(status, "invalid_request_error")
    assert reply.status == status and reply.error["type"] == wanted and reply.headers["x-request-id"].startswith("req-"), reply
    return reply


def sent_to_the_end(server: Watched, data: bytes) -> list[Reply]:
    """A client that says all it has to say before it listens: it must get to read the answer."""
    start = time.monotonic()
    with server.process.connect() as sock:
        sock.sendall(data)
        return [server.seen(reply, start) for reply in read_replies(sock, 1)]


def _head(header: bytes) -> Callable[[Watched], None]:
    data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + header + b"\r\n"

    def act(server: Watched) -> None:
        before = server.process.memory("VmRSS")
        (reply,) = sent_to_the_end(server, data)
        assert refused(reply, 431).headers["connection"] == "close"
        assert server.process.memory("VmHWM") - before < MOST_FOR_A_HEAD

    return act


def _hosts(server: Watched) -> None:
    for host in ("x/v1/models?", "x#", "x y", "a@b", "localhost:99999999", "", "[::1", "\xe9"):
        refused(server.ask("GET", "/v1/models", host=host), 400)
    for twice in (b"Host: localhost\r\nHost: evil\r\n", b"Host: localhost\r\nAuthorization: a\r\nAuthorization: b\r\n"):
        (reply,) = server.send(b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n" + twice + b"\r\n")
        refused(reply, 400)


def _declared(server: Watched) -> None:
    for head in (b"", b"Expect: 100-continue\r\n"):
        (reply,) = server.send(POST + head + b"Content-Length: 1073741824\r\n\r\n", most=1)
        assert refused(reply, 413).error["code"] == "body_too_large" and reply.headers["connection"] == "close"
    (reply,) = sent_to_the_end(server, POST + b"Content-Length: 16777216\r\n\r\n" + b" " * 2**24)
    refused(reply, 413)


def _endless(server: Watched) -> None:
    start = time.monotonic()
    with server.process.connect() as sock:
        sock.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b"a" * 2**20 + b"\r\n"
        try:
            while time.monotonic() - start < 5:
                sock.sendall(piece)
        except (ConnectionResetError, BrokenPipeError):
            pass
        (reply,) = read_replies(sock)
    refused(server.seen(reply, start), 413)


def _slow(server: Watched) -> None:
    """500 connections, of which some are slow with their heads, some with their bodies, some say nothing at all."""
    begun = [b"GET /health HTTP/1.1\r\nX: ", POST + b"Content-Length: 99\r\n\r\n", b""]
    socks = [(server.process.connect(5), begun[number % 3]) for number in range(500)]
    start = time.monotonic()
    for sock, data in socks:
        sock.sendall(data)
    while time.monotonic() - start < 0.8:
        for sock, data in socks:
            if data:
                sock.sendall(b"1")
        time.sleep(0.2)
    for sock, data in socks:
        replies = read_replies(sock)
        assert [reply.status for reply in replies] == ([408] if data else []), replies
        sock.close()
        if data:
            refused(server.seen(replies[0], start), 408)


def _bomb(server: Watched) -> Callable[[], None]:
    bomb = gzip.compress(b'{"prompt": "' + b"a" * 2**26 + b'"}')

    def act() -> None:
        for encoding in ("gzip", "br", "deflate", "GZIP, identity"):
            refused(server.ask("POST", COMPLETIONS, bomb, content_encoding=encoding), 415)

    return act


def _texts(*bodies: bytes, path: str = COMPLETIONS) -> list[Attempt]:
    return [Attempt(path, body, param="*") for body in bodies]


def _last_of_equal_keys(server: Watched) -> None:
    refused(server.ask("POST", COMPLETIONS, b'{"prompt": "a", "n": 1, "n": 99999}'), 400)
    refused(server.ask("POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": 1, "prompt": ""}'), 400)
    assert server.ask("POST", COMPLETIONS, b'{"prompt": "a", "max_tokens": 1, "n": 99999, "n": 1}').status == 200


SURROGATE = b'"\\ud83d"'
SURROGATES = [
    Attempt(COMPLETIONS, b'{"prompt": ' + SURROGATE + b"}"),
    Attempt(COMPLETIONS, b'{"prompt": "a", "stop": [' + SURROGATE + b"]}"),
    Attempt(COMPLETIONS, b'{"prompt": "a", "model": "\\udc00\\ud83d"}'),
    Attempt(COMPLETIONS, b'{"prompt": "a", ' + SURROGATE + b": 1}"),
    Attempt(CHAT, b'{"messages": [{"role": "user", "content": ' + SURROGATE + b"}]}"),
    Attempt(CHAT, b'{"messages": [{"role": ' + SURROGATE + b', "content": "a"}]}'),
    Attempt(CHAT, json.dumps(SOUND[CHAT]).encode()[:-1] + b', "tools": [{"type": "function", "function": {"name": ' + SURROGATE + b"}}]}"),
]


def _kinds(server: Watched) -> None:
    for kind in ("text/plain", "", "application/x-www-form-urlencoded", "application/json; charset=latin-1", "multipart/form-data"):
        refused(server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS], content_type=kind), 415)
    assert server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS], content_type="Application/JSON; charset=UTF-8").status == 200
    assert server.ask("POST", COMPLETIONS, SOUND[COMPLETIONS], content_type="-").status == 200  # none at all
    refused(server.ask("POST", COMPLETIONS, b"prompt=Once", content_type="-"), 400)


def _first_lines(server: Watched) -> None:
    for first, status in (
        (b"GET /nothing HTTP/1.1", 404),
        (b"POST /health HTTP/1.1", 405),
        (b"DELETE /v1/models HTTP/1.1", 405),
        (b"GET /v1/chat/completions HTTP/1.1", 405),
        *((b"GET %s HTTP/1.1" % path, 404) for path in (
            b"/v1//models", b"//v1/models", b"/v1/models/../health", b"/v1/models//x", b"/v1/../admin", b"/v1/../health",
            b"/v1/%2e%2e/health", b"/v1/..%2fhealth", b"/health/", b"/docs", b"/redoc", b"/v1/models/%2e%2e%2fetc",
        )),
        (b"GET /he\x00lth HTTP/1.1", 400),
        (b"GET /\xff HTTP/1.1", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"NONSENSE", 400),
        (b"OPTIONS * HTTP/1.1", 404),
    ):  # fmt: skip
        (reply,) = server.send(first + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        refused(reply, status)


def _long_urls(server: Watched) -> None:
    for path in (b"/", b"/health?", b"/v1/models/"):
        (reply,) = sent_to_the_end(server, b"GET " + path + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        refused(reply, 414)


def _pipelined(server: Watched) -> None:
    second = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: second\r\n\r\n"
    for first, status in (
        (b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (POST + b"Content-Length: 1\r\n\r\n{", 400),
        (POST.replace(b"application/json", b"text/plain") + b"Content-Length: 5\r\n\r\nhello", 415),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    ):
        replies = server.send(first + second)
        assert replies[0].status == status and len(replies) <= 2
        if len(replies) == 2:
            assert replies[1].json == {"status": "ready"} and replies[1].headers["x-request-id"] == "second"
        else:
            assert replies[0].headers["connection"] == "close"
    replies = server.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n\x00garbage")
    assert [reply.status for reply in replies] == [200, 400]
    refused(replies[1], 400)


def _not_ours(server: Watched) -> None:
    """Other protocols, other codings, chunks that are none: never a second request, and never the bytes of a body."""
    body = json.dumps(SOUND[COMPLETIONS]).encode()
    wish = POST + b"Connection: close, upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(body)
    (reply,) = server.send(wish + body + b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert reply.status == 200
    for data, status in (
        (b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloworld", 400),
    ):
        (reply,) = server.send(data)
        refused(reply, status)


def _many(items: bytes, *fields: tuple[str, str]) -> list[Attempt]:
    """These, as a field of a path that does not take them."""
    prompt = {COMPLETIONS: b'"prompt": "a", '}
    return [Attempt(path, b'{%b"%b": %b}' % (prompt.get(path, b""), name.encode(), items), param=name) for path, name in fields]


def _routes_of_others(server: Watched) -> None:
    """What this server does not do is said by name, whatever is sent."""
    names = {"/v1/embeddings": "embeddings", "/v1/audio/speech": "audio", "/v1/audio/transcriptions": "audio", "/v1/rerank": "reranking",
             "/v1/images/generations": "image generation", "/v1/score": "scoring", "/score": "scoring", "/v1/moderations": "moderation",
             "/v1/files": "files", "/v1/batches": "batches", "/v1/messages": "Anthropic's API", "/api/chat": "Ollama's API"}  # fmt: skip
    for path, name in names.items():
        for method in ("POST", "GET"):
            error = refused(server.ask(method, path, {"model": "x", "input": "a"} if method == "POST" else b""), 404).error
            assert re.match(rf"{name} (is|are) not supported; this server answers /v1/chat/completions", error["message"]), error
    for path in ("/v1/embeddingsx", "/nothing", "/v1", "/apis"):
        assert refused(server.ask("GET", path), 404).error["message"] == "there is no such route"


ROWS: list[Row] = [
    acted(1, "a header of 8 MiB", _head(b"X-Forwarded-For: " + b"A" * 2**23 + b"\r\n")),
    acted(2, "10,000 headers", _head(b"".join(b"X-%d: a\r\n" % number for number in range(10_000)))),
    acted(3, "hosts that are none", _hosts),
    acted(4, "a body of 1 GiB by its own word", _declared),
    acted(5, "a body without end", _endless),
    acted(6, "500 slow clients", _slow),
    Row(7, "a gzip bomb", _bomb),
    row(8, "no JSON", _texts(
        b'{"prompt": "a"', b'{"prompt": "a"} x', b'{"prompt": "a"}{}', b'\xef\xbb\xbf{"prompt": "a"}', b"{", b"'", b" ",
        '{"prompt": "a"}'.encode("utf-16"), b'{"prompt": "a", "extra": 1' + b"0" * 5000 + b"}",
    )),
    acted(8, "no body", lambda server: Attempt(COMPLETIONS, b"").check(server.ask("POST", COMPLETIONS))),
    row(9, "no object", _texts(b"[]", b'"x"', b"1", b"-0.5e3", b"null", b"true")),
    row(10, "100,000 levels", _texts(
        b"[" * 100_000, b'{"prompt": ' * 100_000, b'{"prompt": "a", "extra": ' + b"[" * 250 + b"]" * 250 + b"}",
    )),
    row(10, "almost 200 levels", _texts(
        b'{"messages": ' + b"[" * 190 + b"]" * 190 + b"}", b'{"messages": [{"role": "user", "content": ' + b'[{"text": ' * 90, path=CHAT,
    )),
    row(10, "150,000 wrong items", lambda: [
        *_many(b"[" + b"null," * 150_000 + b"null]", *((COMPLETIONS, name) for name in ("stop", "stop_token_ids", "bad_words"))),
        *_many(b"[" + b"null," * 150_000 + b"null]", (CHAT, "messages"), ("/tokenize", "messages"), ("/detokenize", "tokens")),
        *_many(b"{" + b",".join(b'"%d":""' % number for number in range(80_000)) + b"}", (COMPLETIONS, "logit_bias")),
    ]),
    acted(11, "equal keys", _last_of_equal_keys),
    row(12, "invalid UTF-8", _texts(b'{"prompt": "\xff"}', b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\xc0\x80"}')),
    row(13, "halves of surrogate pairs", SURROGATES),
    row(14, "control characters", [
        Attempt(COMPLETIONS, SOUND[COMPLETIONS] | {"prompt": "".join(map(chr, range(32))) + "\x7f\u2028\ufffe"}, 200),
        Attempt(CHAT, SOUND[CHAT] | {"messages": [{"role": "user", "content": "a\x00b"}]}, 200),
    ]),
    acted(15, "other kinds of bodies", _kinds),
    acted(16, "paths and methods that are none", _first_lines),
    acted(16, "routes of other servers", _routes_of_others),
    acted(17, "a URL of 100 KB", _long_urls),
    acted(18, "two in a pipeline", _pipelined),
    acted(18, "other protocols and codings", _not_ours),
]  # fmt: skip
