"""`octavo bench serve`: figures that add up against a real server, and that are right against one whose delays are known."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.bench.figures import number
from octavo.bench.serving import TimedRequest, keeps, poisson, slo
from octavo.bench.traces import read_trace, traced
from octavo.bench.workload import RANDOM_LOADS, Lengths, drawn
from octavo.cli.args import Parser
from octavo.cli.bench.serve import DEFAULT_VOCABULARY, add_arguments
from octavo.cli.bench.workloads import maker
from octavo.cli.main import main
from octavo.client.api import RemoteServer
from octavo.client.http import EventLines, Reply, parse_url
from octavo.errors import RemoteError
from tests.bench.test_commands import pictured, rows
from tests.cli.processes import FAKE, ROOT, SECONDS, environment
from tests.support.scripted_server import Script, ScriptedServer, spoken
from tests.support.server_process import ServerProcess

AZURE = str(ROOT / "tests/data/traces/azure_conversation_2023.csv")


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    with ServerProcess("octavo serve", "--api-key", "secret", env=FAKE) as server:
        yield f"http://127.0.0.1:{server.port}/v1"


def measured(folder: Path, url: str, *words: str) -> dict[str, Any]:
    """The one result of a run."""
    assert main(["bench", "serve", "--url", url, *words, "--json", str(folder / "out.json"), "--picture", str(folder / "out.svg")]) == 0
    found = json.loads((folder / "out.json").read_text())
    assert found["kind"] == "serve" and found["machine"]["server"] == url.removesuffix("/v1") and "octavo bench serve" in found["command"]
    (result,) = found["results"]
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("load", RANDOM_LOADS)
def test_published_loads_of_random_ids_are_drawn_from_the_default_vocabulary(load: str) -> None:
    parser = Parser(prog="octavo bench serve", allow_abbrev=False)
    add_arguments(parser)
    args = parser.parse_args(["--url", "http://127.0.0.1:1", "--load", load])
    (workload,) = maker(args, args.vocab_size, args.seed)(10**6, lambda: pytest.fail("it needs no tokenizer"))
    assert workload.requests == RANDOM_LOADS[load]()


# promise: octavo-bench-serve
def test_what_comes_is_what_was_asked_for(
    served: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    words = ("--input-len", "8-40", "--output-len", "1-30", "--num-prompts", "20", "--request-rate", "40", "--seed", "7")
    result = measured(tmp_path, served, *words, "--slo", "e2e:100s")
    asked = drawn(Lengths(8, 40), Lengths(1, 30), 20, DEFAULT_VOCABULARY, 8192, 7).requests
    each, figures = result["each_request"], result["figures"]
    assert [(one["input_tokens"], one["output_tokens"]) for one in each] == [(len(ids), wanted) for ids, wanted in asked]
    assert (result["requests"], result["failed"]) == (20, 0)
    assert result["output_tokens"] == sum(wanted for _, wanted in asked) == pytest.approx(
        figures["output_throughput"]["median"] * figures["wall"]["median"]
    )
    assert [one["due"] for one in each] == poisson(20, 40.0, 7)
    for one, first, end in zip(each, figures["first_token"]["samples"], figures["end_to_end"]["samples"], strict=True):
        assert one["due"] <= one["sent"] < one["pieces"][0] <= one["pieces"][-1] <= one["ended"] <= figures["wall"]["median"]
        assert 0 < first <= end and len(one["pieces"]) <= one["output_tokens"]
        assert first == pytest.approx(1000 * (one["pieces"][0] - one["sent"]))
    assert len(figures["inter_token"]["samples"]) == sum(len(one["pieces"]) - 1 for one in each)
    assert figures["within_slo"]["median"] == 100 and figures["cache_hit_rate"]["median"] == 0
    table = rows(capsys.readouterr().out)
    assert table["output tokens"] == [f"{result['output_tokens']:,}"] and table["goodput, requests/s"]
    assert table["end to end p99, ms"] == [number(figures["end_to_end"]["p99"])]
    assert number(figures["first_token"]["p90"]) in pictured(tmp_path)


# promise: octavo-bench-serve
def test_a_load_of_text_and_a_traces_own_times(served: str, tmp_path: Path) -> None:
    text = measured(tmp_path, served, "--load", "single", "--api-key", "secret")
    assert (text["input_tokens"], text["output_tokens"]) == (128, 128)
    trace = measured(tmp_path, served, "--trace", AZURE, "--num-prompts", "3", "--speedup", "100", "--api-key", "secret")
    seen = read_trace(AZURE, 3)
    start = seen[0].arrival or 0.0
    assert [one["due"] for one in trace["each_request"]] == [pytest.approx(((one.arrival or 0) - start) / 100) for one in seen]
    assert trace["each_request"][1]["due"] == pytest.approx(0.04314579, abs=1e-6)  # 46.6805900 and 50.9951690 in the file
    assert trace["output_tokens"] == sum(one.output_length for one in seen)


# promise: octavo-bench-serve
def test_arrivals_follow_rate_and_seed(tmp_path: Path) -> None:
    times = poisson(4000, 25.0, 3)
    assert times == poisson(4000, 25.0, 3) != poisson(4000, 25.0, 4)
    assert times[0] == 0 and times == sorted(times) and times[-1] == pytest.approx(4000 / 25, rel=0.1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    spread = sum((gap - 0.04) ** 2 for gap in gaps) / len(gaps)
    assert spread == pytest.approx(0.04**2, rel=0.2)  # as wide as their mean: nobody knows when the next one comes
    assert poisson(3, float("inf"), 3) == [0, 0, 0]
    (tmp_path / "no_times.csv").write_text("ContextTokens,GeneratedTokens\n4,5\n")
    assert traced("t", read_trace(str(tmp_path / "no_times.csv")), 100, 100, 0).arrivals is None


def test_a_request_keeps_all_bounds_or_none() -> None:
    answered = TimedRequest(due=0, sent=1.0, pieces=[1.25, 1.5, 2.5], ended=3.0, output_tokens=3, status=200)
    for bound, seconds in {"ttft": 0.25, "itl": 1.0, "tpot": 0.875, "e2e": 2.0}.items():
        roomy = {"ttft": 9.0, "itl": 9.0, "tpot": 9.0, "e2e": 9.0}
        assert keeps(answered, roomy | {bound: seconds}) and not keeps(answered, roomy | {bound: seconds - 0.01})
    assert keeps(TimedRequest(due=0, sent=1.0, pieces=[1.0], ended=1.0, output_tokens=1), slo("itl:1ms,tpot:0.5ms"))  # nothing to wait for
    assert not keeps(replace(answered, error="it broke"), {"ttft": 9.0})


# promise: octavo-bench-serve
def test_goodput_counts_those_that_keep_every_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late, halting, refused = spoken(1.6, 0, 0), spoken(0, 1.6, 0), Script(status=429, error={"message": "too many", "code": "overloaded"})
    scripts = iter([spoken(0), spoken(0.1, 0.1, 0), late, halting, refused])  # the first is that which tries the server out
    with ScriptedServer(lambda _body: next(scripts)) as server:
        words = ("--num-prompts", "4", "--concurrency", "1", "--slo", "ttft:1500ms,itl:1.5s")
        result = measured(tmp_path, server.url, *words, "--output-len", "3")
    figures = result["figures"]
    assert (result["requests"], result["failed"], figures["within_slo"]["median"]) == (4, 1, 25)
    assert figures["goodput"]["median"] * figures["wall"]["median"] == pytest.approx(1)
    first, late_first, halting_first = figures["first_token"]["samples"]
    assert 90 <= first < 1500 and late_first > 1500 and halting_first < 1500  # the client's clock starts a little later
    assert figures["inter_token"]["max"] > 1500 and len(figures["inter_token"]["samples"]) == 2 + 2 + 2
    assert figures["per_output_token"]["samples"][2] > 750
    assert [one["status"] for one in result["each_request"]] == [200, 200, 200, 429]
    assert "128 in, 3 out: 429: 1 (first: " in (said := capsys.readouterr().err) and "too many" in said


# promise: octavo-bench-serve
def test_no_more_are_in_flight_than_allowed_and_connections_are_kept(tmp_path: Path) -> None:
    for words, together in ((("--concurrency", "3"), 3), ((), 12)):
        bodies: list[dict[str, Any]] = []

        def answer(body: dict[str, Any], bodies: list[dict[str, Any]] = bodies, together: int = together) -> Script:
            bodies.append(body)
            return replace(spoken(0.01, 0.01), together=together if len(bodies) > 1 else 1)  # the first tries the server out

        with ScriptedServer(answer) as server:
            measured(tmp_path, server.url, "--num-prompts", "12", *words, "--output-len", "2")
            assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in bodies)
            assert (server.most_in_flight, server.connections) == (together, together)


def test_a_connection_the_server_closed_is_not_the_requests_fault() -> None:
    async def ask(url: str, pause: float) -> None:
        remote = RemoteServer(parse_url(url), None)
        for _ in range(3):
            assert (await remote.model(None)).name == "m"
            await asyncio.sleep(pause)
        remote.close()

    for pause in (0.0, 0.05):
        with ScriptedServer(lambda _body: spoken(0), close_idle=True) as server:
            asyncio.run(ask(server.url, pause))
            assert server.connections == 3


def test_an_answer_that_breaks_off_is_a_failure(tmp_path: Path) -> None:
    cut = Script(spoken(0, 0).events, cut_after=True)
    failing = Script([*spoken(0).events, (0, {"error": {"message": "it broke", "code": "internal_error"}})])
    strange = Script([(0, {"choices": ["text"], "usage": 5})])
    scripts = iter([spoken(0), spoken(0, 0), cut, failing, strange])
    with ScriptedServer(lambda _body: next(scripts)) as server:
        result = measured(tmp_path, server.url, "--num-prompts", "4", "--concurrency", "1", "--output-len", "2")
    assert result["failed"] == 3 and result["output_tokens"] == 2
    _, broken, failed, strangely = result["each_request"]
    assert "does not answer /v1/completions as OpenAI's API does" in strangely["error"]
    assert "closed the connection before its answer was complete" in broken["error"] and "it broke" in failed["error"]


EVENTS = [b"data: one\n\n", b": a comment\n\n", b"data:two\r\n\r\n", b"event: x\ndata: [DONE]\n\n"]


@given(cuts=st.lists(st.integers(0, 400), max_size=12), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), chunked=st.booleans())
def test_an_answer_is_read_however_it_is_cut(cuts: list[int], sizes: list[int], chunked: bool) -> None:
    body, head = b"".join(EVENTS), "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX-A: b\r\n"
    if chunked:
        pieces, at = [], 0
        while at < len(body):
            size = sizes[len(pieces) % len(sizes)]
            pieces.append(body[at : at + size])
            at += size
        data = b"".join(b"%X;x=y\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: t\r\n\r\n"
        data = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + data
    else:
        data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    reply, lines, found, got = Reply(), EventLines(), list[bytes](), b""
    places = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    for start, end in pairwise(places):
        assert not reply.done
        new = reply.feed(data[start:end])
        got, found = got + new, found + lines.feed(new)
    assert reply.done and reply.status == 200 and reply.headers["x-a"] == "b"
    assert got == body and found == [b"one", b"two", b"[DONE]"]


@given(st.binary(max_size=60))
def test_noise_is_refused_or_waited_on(noise: bytes) -> None:
    for start in (b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"):
        try:
            Reply().feed(start + noise)
        except RemoteError as error:
            assert "does not speak HTTP" in str(error)


@pytest.fixture(scope="module")
def banner() -> Iterator[str]:
    """Something that listens and is no HTTP server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                    connection.recv(1000)

        threading.Thread(target=greet, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# promise: server-there-wants
@pytest.mark.parametrize("command", [["bench", "serve"], ["chat", "Hello!"]])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9 (Connection refused); is the server running there?"),
        (["--url", "SERVED"], "answers 401: "),
        (["--url", "SERVED", "--api-key", "wrong"], "; give its key with --api-key or OCTAVO_API_KEY"),
        (["--url", "SERVED", "--api-key", "secret", "--model", "gpt"], "there is no model 'gpt' at http://127.0.0.1:"),
        (["--url", "SERVED/other", "--api-key", "secret"], "does not answer /v1/models as OpenAI's API does"),
        (["--url", "BANNER"], "what listens there does not speak HTTP/1.1"),
        (["--url", "127.0.0.1:9"], "no server answers at http://127.0.0.1:9 (Connection refused)"),
        (["--url", "http:/127.0.0.1:9"], "must be like localhost:8000 or http://127.0.0.1:8000"),
        (["--url", "http://me:word@host"], "it may have a host, a port and a path, and nothing else"),
        (["--url", "SERVED", "--api-key", "a\nb"], "the API key has characters that no header can have"),
    ],
)
def test_what_is_wrong_with_a_server_is_one_line(
    command: list[str], words: list[str], said: str, served: str, banner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"SERVED": served, "SERVED/other": f"{served.removesuffix('/v1')}/other", "BANNER": banner}
    assert main([*command, *(known.get(word, word) for word in words)]) == 1
    heard = capsys.readouterr()
    assert heard.out == "" and said in heard.err and len(heard.err.splitlines()) == 1
    assert "secret" not in heard.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--slo", "ttfb:5ms"], 2, "wanted bounds like ttft:500ms,itl:50ms, of ttft, itl, tpot, e2e, each once; got 'ttfb:5ms'"),
        (["--request-rate", "0"], 2, "must be a number above 0, or inf, got '0'"),
        (["--speedup", "2"], 2, "--speedup needs --trace"),
        (["--input-len", "9000", "--api-key", "secret"], 1, "may grow to 9,064 tokens, max_model_len is 8,192"),
        (["--vocab-size", "49153", "--api-key", "secret"], 1, "token id 49152 in prompt is out of vocabulary"),
    ],
)
def test_what_is_wrong_with_a_run_is_said_before_it(
    words: list[str], code: int, said: str, served: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main(["bench", "serve", "--url", served, *words]) == code
    except SystemExit as left:
        assert left.code == code
    heard = capsys.readouterr()
    assert heard.out == "" and said in heard.err.splitlines()[0]


NO_ENGINE = """
import sys
for name in ("torch", "numpy", "rich", "huggingface_hub", "httpx", "msgspec", "zmq", "fastapi", "uvicorn", "pydantic"):
    sys.modules[name] = None
from octavo.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


# promise: octavo-chat-url, server-url-word
@pytest.mark.parametrize("command", [["bench", "serve", "SERVED", "--num-prompts", "2"], ["chat", "SERVED", "Hello!", "--max-tokens", "3"]])
def test_a_client_needs_neither_torch_nor_the_servers_libraries(command: list[str], served: str) -> None:
    words = [sys.executable, "-c", NO_ENGINE, *(served.removeprefix("http://") if word == "SERVED" else word for word in command)]
    env = environment({"OCTAVO_API_KEY": "secret"})
    run = subprocess.run(words, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)
    assert run.returncode == 0 and run.stdout.strip(), run.stderr
