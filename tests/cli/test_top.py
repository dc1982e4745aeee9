"""`octavo top`: a server's view at a terminal and in a pipe, against one that shows its frames to a script."""

import asyncio
import fcntl
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli import top
from octavo.cli.main import main
from octavo.cli.top_picture import KINDS, SIGNS, figures_line, picture, plain
from octavo.client.api import RemoteServer
from octavo.client.http import parse_url
from octavo.errors import RemoteError
from octavo.inspector import remote
from octavo.inspector.remote import Watch
from tests.cli.processes import SECONDS, Typist, environment
from tests.support.fair_clock import FairClock
from tests.support.view_host import Shown, view_host

HEAD: dict[str, Any] = {
    "kind": "head", "version": 1, "model": "m", "block_size": 16, "num_blocks": 41, "epoch": 1, "started": 0.0,
    "version_of": "octavo 0.1.0", "lesson": False,
}  # fmt: skip
EMPTY: dict[str, Any] = {"kind": "full", "at": 0.0, "blocks": [], "seqs": [], "gone": [], "steps": [], "events": [], "lost": 0}


def sequence(number: int, **changed: Any) -> dict[str, Any]:
    told = {
        "seq": number, "request": f"cmpl-{number}", "sample": 0, "state": "running", "prompt": 40, "tokens": 53, "computed": 52,
        "cached": 32, "reason": "differs", "preemptions": 0, "from": 0, "table": [1, 2, 3, 4],
    }  # fmt: skip
    return told | changed


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\nfake\u202e\t漢e\u0301"
BLOCKS = [[1, 2, 1, "ab", ["a"], 0.1], [2, 1, 1, "cd", None, 0.1], [3, 1, 0, "", None, 0.2], [9, 0, 1, "ef", None, 0.3]]
STEP = [7, 0.5, 3.25, 30, 2, 3, 2, 1, 3, 1, 32, 40]
FRAMES: list[tuple[float, Any]] = [
    (0, HEAD),
    (0, EMPTY | {"at": 0.2}),
    (0, {
        "kind": "delta", "at": 1.2, "blocks": BLOCKS, "steps": [STEP, [8, 0.9, 1.0, 0, 3, 3, 2, 1, 3, 0, 0, 0]],
        "seqs": [sequence(1), sequence(2, request="cmpl-two", sample=1, table=[1, 9]), sequence(3, state="waiting", table=[], cached=0),
                 sequence(4, digests=["ef"])],  # it came and went
        "gone": [[4, "stop"]],
        "events": [[7, 0.5, "copy", 1, 3, 2], [7, 0.5, "preempt", 3], [8, 0.9, "note", "a note"], [8, 0.9, "unheard of", 1]],
    }),
]  # fmt: skip


def watch_of(*frames: dict[str, Any]) -> Watch:
    watch = Watch(RemoteServer(parse_url("http://127.0.0.1:8000"), None), comes_back=True)
    for frame in frames:
        watch._take(frame)
    return watch


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "ONCE_SECONDS", 0.5)
    monkeypatch.setattr(remote, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(remote, "SILENCE_SECONDS", 1.0)


# promise: octavo-top-url, server-url-word
def test_one_picture_says_what_the_frames_say(hurried: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    with view_host(Shown(FRAMES), key="secret") as server:
        assert main(["top", server.url.removeprefix("http://"), "--once"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0] == f"m  {server.url}" and server.asked == ["/v1/view"]
    assert lines[1] == "running 2  waiting 1  KV cache 8%  prompt 30 tok/s  output 5 tok/s  cache hits 80%  preempted 1"
    assert "· free 36  ░ cached 1  ▒ in use 2  █ shared 1" in said
    assert "█▒▒·····░" + "·" * 31 in lines
    assert "tokens of each step, max 32  last step: 3 tokens in 1.0 ms, 3 sequences" in said and "█▁" in lines
    assert re.search(r"^cmpl-1 +running +53 +4 +80% +0$", said, re.MULTILINE)
    assert re.search(r"^cmpl-two #1 +running +53 +2 +80% +0$", said, re.MULTILINE)
    assert re.search(r"^cmpl-3 +waiting +53 +0 +0% +0\ncmpl-4 +ended \(stop\) +53 +4 +80% +0$", said, re.MULTILINE)
    assert re.search(r"^step 7  block 1 copied to 3, so that 2 can write to it\nstep 7  3 preempted\nstep 8  a note$", said, re.MULTILINE)


# promise: engines-watched
def test_one_of_several_engines_is_chosen_and_its_number_and_how_many_are_ready_are_told(
    hurried: None, capsys: pytest.CaptureFixture[str]
) -> None:
    several = Shown([(0, HEAD | {"engine": 2, "engines": 3}), (0, EMPTY)])
    with view_host(several) as server:
        server.engines = {"ready": 2, "all": 3}
        assert main(["top", "--url", server.url, "--once", "--engine", "2"]) == 0
        assert server.asked == ["/v1/view?engine=2", "/health"]
    assert capsys.readouterr().out.splitlines()[0] == f"m  {server.url}  engine 2 of 3  2 of 3 ready"
    absent = Shown(status=400, error={"message": "there is no engine '7'; they are numbered from 0 to 2"})
    with view_host(absent) as server:
        assert main(["top", server.url, "--engine", "7"]) == 1
    assert capsys.readouterr().err.endswith("answers 400: there is no engine '7'; they are numbered from 0 to 2\n")
    watch = watch_of(HEAD | {"engine": HOSTILE, "engines": HOSTILE}, EMPTY)
    assert all(line.isprintable() for line in [*plain(picture(watch, 80, 24)), figures_line(watch)])
    watch = watch_of(HEAD | {"engine": 1, "engines": 2}, EMPTY)
    watch.ready = (1, 2)
    assert figures_line(watch).startswith("engine 1 of 2  1 of 2 ready  running 0")


def test_state_slots_are_a_figure_and_four_counts() -> None:
    watch = watch_of(HEAD, EMPTY)
    assert "states" not in figures_line(watch)
    watch._take({"kind": "delta", "at": 1.0, "states": [1200, 3, 12, 2]})
    assert "  states 3 live, 12 kept of 1,200  prompt " in figures_line(watch)
    for wrong in ([1, 2, 3], ["many", 1, 1, 1]):
        with pytest.raises(ValueError):
            watch._take({"kind": "delta", "at": 2.0, "states": wrong})


# promise: octavo-top-url
def test_in_a_pipe_it_is_a_line_a_second_and_a_server_that_went_is_waited_for() -> None:
    again = [(0.0, HEAD), (0.0, EMPTY | {"at": 0.1, "seqs": [sequence(1)], "steps": [STEP]})]
    code = "import sys; sys.modules['torch'] = None; from octavo.cli.main import main; sys.exit(main(sys.argv[1:]))"
    with view_host(Shown([*FRAMES, (1.5, {"kind": "delta", "at": 2.0})], then="cut"), Shown(status=503), Shown(again)) as server:
        command = [sys.executable, "-c", code, "top", server.url]
        process = subprocess.Popen(command, env=environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        seen = [process.stdout.readline()]
        while "running 1" not in seen[-1]:
            seen.append(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130 and err == ""
    assert re.fullmatch(r"\d\d:\d\d:\d\d running 2  waiting 1  KV cache 8% .*\n", seen[0])
    told = [line[9:] for line in seen if "waiting: " in line]
    assert len(told) == len(set(told)) and "closed the connection" in told[0] and "503" in "".join(told[1:])
    assert "preempted 1" in seen[-1], "what was counted stays"


# promise: octavo-top-url
def test_at_a_terminal_it_is_redrawn_in_place_until_q(tmp_path: Path) -> None:
    more = [(0.6, {"kind": "delta", "at": 2.0, "gone": [[1, "stop"], [2, "stop"], [3, "stop"]]})]
    for key, code in (("q", 0), ("\x03", 130)):
        env = {"TERM": "xterm-256color", "NO_COLOR": "1"}
        with view_host(Shown([*FRAMES, *more])) as server, Typist("top", server.url, cwd=tmp_path, env=env) as terminal:
            fcntl.ioctl(terminal._master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
            before = termios.tcgetattr(terminal._master)
            first = terminal.expect("cmpl-two #1", 30)
            assert "\x1b[?1049h" in first and "running 2  waiting 1" in first  # a screen of its own
            assert "\x1b[H" in terminal.expect("running 0  waiting 0", 30)  # over the one before
            terminal.type(key)
            terminal.expect(re.escape("\x1b[?1049l"), 30)  # the screen from before
            assert terminal.process.wait(SECONDS) == code
            assert termios.tcgetattr(terminal._master) == before
            assert "Traceback" not in terminal.transcript


@pytest.mark.soak
def test_at_a_terminal_that_cannot_be_redrawn_or_with_plain_it_is_lines(tmp_path: Path) -> None:
    for words, term in ((("--plain",), "xterm"), ((), "dumb")):
        with view_host(Shown(FRAMES)) as server, Typist("top", server.url, *words, cwd=tmp_path, env={"TERM": term}) as terminal:
            assert "\x1b" not in terminal.expect(r"running 2 .*\n")


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# promise: octavo-top-url
@pytest.mark.parametrize("words", [(), ("--once",)])
def test_what_is_wrong_is_one_line_with_what_to_do(
    words: tuple[str, ...], hurried: None, silent: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    other = Shown([(0, HEAD | {"version": 2}), (0, EMPTY)])
    strange = Shown([(0, HEAD), (0, EMPTY | {"seqs": [sequence(1, state=None)], "steps": [[1]]})])
    missing = Shown([(0, HEAD), (0, EMPTY | {"blocks": [[99, 1, 0, "", None, None]]})])
    cases = [
        (Shown(status=404), "has no live view: it was started with --no-inspector, or it is not an Octavo server"),
        (Shown(status=401, error={"message": "wrong key"}), "answers 401: wrong key; give its key with --api-key or OCTAVO_API_KEY"),
        *((Shown([(0, line)]), "does not answer /v1/view as Octavo does") for line in (b"[]\n", b"{\n")),
        *((answer, "does not answer /v1/view as Octavo does") for answer in (other, strange, missing)),
    ]  # fmt: skip
    for answer, told in cases:
        with view_host(answer) as server:
            assert main(["top", server.url, *words]) == 1
        assert capsys.readouterr().err == f"octavo: error: {'the server at ' if 'as Octavo' in told else ''}{server.url} {told}\n"
    assert main(["top", nobody, *words]) == 1
    assert capsys.readouterr().err.endswith("(Connection refused); is the server running there?\n")
    assert main(["top", silent, *words]) == 1
    assert "has sent nothing for" in capsys.readouterr().err
    assert main(["top", "ftp://x", *words]) == 1
    assert "the URL 'ftp://x': must be like localhost:8000 or http://127.0.0.1:8000" in capsys.readouterr().err


def test_silence_after_a_while_is_no_end(hurried: None) -> None:
    async def watched(url: str) -> list[str | None]:
        watch, seen = Watch(RemoteServer(parse_url(url), None), comes_back=True), list[str | None]()
        task = asyncio.create_task(watch.run())
        while len(server.asked) < 3 or watch.trouble is not None:
            await asyncio.sleep(0.01)
            assert not task.done()
            seen += [watch.trouble] if watch.trouble not in seen[-1:] else []
        task.cancel()
        return seen

    with view_host(Shown(FRAMES, then="silence"), Shown(FRAMES, then="end"), Shown(FRAMES)) as server:
        seen = [trouble for trouble in asyncio.run(watched(server.url)) if trouble is not None]
    assert [trouble.partition(" has ")[2] for trouble in seen] == ["sent nothing for 1 seconds", "closed the view"]


@pytest.mark.timed("start-up time")
def test_it_starts_in_half_a_second_and_the_engine_is_started_again_in_between() -> None:
    code = "import sys; from octavo.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    again = [(0, HEAD | {"num_blocks": 5, "epoch": 2}), (0, EMPTY)]
    with view_host(Shown([*FRAMES, *again])) as server:
        clock = FairClock()
        run = subprocess.run([sys.executable, "-c", code, "top", server.url, "--once"], env=environment({}), capture_output=True, text=True)
        assert clock.seconds() < 5  # with a second of watching
    assert run.returncode == 0, run.stderr
    assert "free 4" in run.stdout and "cmpl-1" not in run.stdout


TEXT = st.text(max_size=30) | st.just(HOSTILE)
SEQUENCES = st.builds(
    lambda number, request, waits, table, prompt: sequence(
        number, request=request, state="waiting" if waits else "running", table=[] if waits else table, prompt=prompt
    ),
    st.integers(0, 10**6), TEXT, st.booleans(), st.lists(st.integers(1, 40), max_size=5), st.integers(0, 10**6),
)  # fmt: skip
EVENTS = st.one_of(
    st.builds(lambda text: [1, 0.1, "note", text], TEXT), st.builds(lambda text: [1, 0.1, "hit", 1, 32, text], TEXT),
    st.builds(lambda text: [text, 0.1, "evict", text, text], TEXT),
)  # fmt: skip


# promise: octavo-top-url
@given(
    width=st.integers(40, 200), height=st.integers(1, 80), model=TEXT, sequences=st.lists(SEQUENCES, max_size=40),
    events=st.lists(EVENTS, max_size=10), blocks=st.integers(2, 3000), steps=st.lists(st.integers(0, 5000), max_size=80),
)  # fmt: skip
def test_a_picture_fits_any_terminal_and_steers_none(
    width: int, height: int, model: str, sequences: list[dict[str, Any]], events: list[Any], blocks: int, steps: list[int]
) -> None:
    told = [[number, 0.1, 1.0, tokens, 0, 1, 1, 0, 1, 0, 0, 0] for number, tokens in enumerate(steps)]
    held = [[number, number % 3, number % 2, "", [HOSTILE], None] for number in range(1, blocks, 3)]
    note = {"kind": "note", "at": 0.1, "scene": 1, "of": 2, "title": model, "text": model}
    full = EMPTY | {"seqs": sequences, "events": events, "steps": told, "blocks": held}
    seqs = [one | {"table": [block % blocks for block in one["table"]]} for one in sequences]
    watch = watch_of(HEAD | {"model": model, "num_blocks": blocks}, full | {"seqs": seqs}, note)
    watch.trouble = model
    lines = picture(watch, width, height)
    assert len(lines) <= height
    for line in plain(lines):
        assert len(line) <= width
        assert all(char.isprintable() and unicodedata.east_asian_width(char) not in "WF" for char in line)
    assert figures_line(watch).isprintable()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 100), st.integers(40, 200))
def test_the_map_is_what_most_blocks_are(some: list[int], times: int, width: int) -> None:
    kinds = some * times
    told = [[block, (0, 0, 1, 2)[kind], int(kind == 1), "", None, None] for block, kind in enumerate(kinds, 1)]
    watch = watch_of(HEAD | {"num_blocks": len(kinds) + 1}, EMPTY | {"blocks": told})
    lines = picture(watch, width, 24)
    text = " ".join(plain(lines))
    assert all(f"{sign} {name} {kinds.count(kind):,}" in text for kind, (sign, name) in enumerate(zip(SIGNS, KINDS)))
    signs = "".join(piece for line in lines for piece, style in line if style in KINDS and set(piece) <= set(SIGNS))
    found = re.search(r"([\d,]+) blocks each", text)
    each = int(found[1].replace(",", "")) if found else 1
    assert len(signs) == -(-len(kinds) // each)
    for place, sign in enumerate(signs):
        group = kinds[place * each : (place + 1) * each]
        assert group.count(SIGNS.index(sign)) == max(map(group.count, range(4)))


def test_a_hundred_thousand_blocks_and_ten_thousand_requests_are_drawn_at_once() -> None:
    told = [[block, 1, 0, "", None, None] for block in range(1, 60_001)]
    seqs = [sequence(number, table=[number]) for number in range(10_000)]
    watch = watch_of(HEAD | {"num_blocks": 100_001}, EMPTY | {"blocks": told, "seqs": seqs})
    start = time.process_time()
    lines = plain(picture(watch, 120, 40))
    assert time.process_time() - start < 1
    assert sum("▒" in line for line in lines) >= 7 and "and 9,9" in " ".join(lines) and len(lines) <= 40


# promise: every-sequence-seen
def test_who_ended_is_listed_where_those_who_are_there_leave_room() -> None:
    seqs = [sequence(number) for number in range(60)]
    watch = watch_of(HEAD, EMPTY | {"seqs": seqs, "gone": [[number, "length"] for number in range(50)]})
    shown = [plain(picture(watch, 80, height)) for height in range(1, 80)]
    for lines in shown:
        live = [line for line in lines if "running " in line and "cmpl" in line]
        ended = [line.split()[0] for line in lines if "ended (length)" in line]
        assert ended == [f"cmpl-{number}" for number in range(49, 49 - len(ended), -1)] and (not ended or len(live) == 10)
        assert any("more" in line for line in lines) == (0 < len(live) < 10)
    assert any("cmpl-18 " in line for line in shown[-1]) and not any("cmpl-17 " in line for line in shown[-1]), "32 are remembered"


def test_a_pool_is_drawn_in_letters_where_signs_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.top_picture.can_show", lambda signs: False)
    assert all(line.isascii() for line in plain(picture(watch_of(*(frame for _, frame in FRAMES)), 80, 40)))


def test_a_view_that_makes_no_sense_when_drawn_is_an_error() -> None:
    with pytest.raises(RemoteError, match="does not answer /v1/view as Octavo does"):
        picture(watch_of(HEAD, EMPTY | {"seqs": [{"seq": 1, "from": 0, "table": []}]}), 80, 40)


# promise: ranks-watched
def test_ranks_are_a_line_each_as_far_as_there_is_room() -> None:
    same = {"stages": 2, "device": "cpu"}
    ranks = [{"rank": rank, "stage": rank % 2, "layers": [3 * rank, 3], "cores": f"{rank}", **same} for rank in range(9)]
    ranks[2]["host"] = "second"
    rows = [[rank, 10, 0.5, 7.2 if rank == 1 else 0.3] for rank in range(9)]
    frames = [frame for _, frame in FRAMES]
    told = {"head": {"ranks": ranks}, "full": {"ranks": rows}}
    full = [{**frame, **told.get(frame["kind"], {})} for frame in frames]
    tall, low = (plain(picture(watch_of(*full), 100, height)) for height in (60, 12))
    found = [line for line in tall if line.startswith("rank ")]
    assert len(found) == 9 and found[0] == "rank 0  stage 0  layers 0-2  cores 0   50% in steps"
    assert found[1] == "rank 1  stage 1  layers 3-5  cores 1   50% in steps  silent for 7 s"
    assert found[2] == "rank 2  stage 0  layers 6-8  cores 2 on second   50% in steps"
    assert sum(line.startswith("rank ") for line in low) == 3 and "and 6 more ranks" in low
    assert not any("rank" in line for line in plain(picture(watch_of(*frames), 100, 60)))
