"""Grammars at the server's door: what cannot be served is refused in time, with the field's name, and the next request is."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import RequestError, UnavailableError
from octavo.server.grammar_check import GrammarChecker
from octavo.structured_outputs import structured_outputs

FINE = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def chain(rules: int) -> str:
    return "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(rules)) + f'\nr{rules}: "a"'


# the row of the table of bad inputs -> what is asked for
BAD = [
    (69, {"json": None}),
    (69, {"json": ""}),
    (69, {"json": '{"type":"str"}'}),
    (69, {"json": '{"type": '}),
    (69, {"json": {"type": 5}}),
    (69, {"json": {"type": "array", "contains": {"type": "integer"}}}),  # a keyword that would be ignored in silence
    (70, {"regex": "("}),
    (70, {"regex": "^+a"}),
    (70, {"regex": "^{2}x"}),
    (70, {"regex": "(?<=a)b"}),
    (70, {"regex": "a\0b"}),
    (71, {"regex": "((a{1,1000}){1,1000}){1,1000}"}),
    (71, {"regex": "(a+)+$"}),
    (71, {"json": {"type": "string", "pattern": "(a+)+$"}}),
    (72, {"grammar": "start: " + "(" * 60_000 + '"a"' + ")" * 60_000}),
    (72, {"grammar": chain(5_000)}),
    (72, {"grammar": "start: start"}),
    (72, {"grammar": 'start: start "a"'}),
    (72, {"grammar": "root ::= root"}),
    (73, {"json": '{"a":' * 10_000 + "{}" + "}" * 10_000}),
    (73, {"json": nested(500)}),
    (73, {"json": {"$ref": "#"}}),
    (73, {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}),
    (73, {"json": {"$ref": "http://127.0.0.1:9/schema.json"}}),
    (73, {"json": {"properties": {"a": {"$ref": "file:///etc/passwd"}}}}),
    (74, {"json": {"enum": list(range(10**6))}}),
    (74, {"json": {"type": "array", "minItems": 10**9}}),
    (74, {"json": {"type": "string", "maxLength": 10**9}}),
    (74, {"choice": [str(n) for n in range(20_000)]}),
    (74, {"grammar": 'start: "' + "a" * 2_000_000 + '"'}),
]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def alive(checker: GrammarChecker) -> int:
    assert checker._child is not None and checker._child.returncode is None
    return checker._child.pid


def test_every_bad_grammar_is_refused_in_time_by_name_and_the_next_one_served() -> None:
    async def work() -> None:
        checker = GrammarChecker(["<|tool|>"])
        await checker.check(structured_outputs(FINE))
        child = alive(checker)
        for row, bad in BAD:
            start = time.monotonic()
            with pytest.raises(RequestError) as refused:
                await checker.check(structured_outputs(bad))
            said, taken = str(refused.value), time.monotonic() - start
            assert refused.value.param == "structured_outputs" and taken < 5, f"row {row}: {said} after {taken:.1f} s"
            assert len(said) < 500 and "Traceback" not in said and "0x" not in said and str(Path.home()) not in said, said
        assert alive(checker) == child, "limits are met before the child is"
        await checker.check(structured_outputs({"grammar": 'start: <|tool|> "x" list\nlist: list "," /[0-9]/ | /[0-9]/'}))
        await checker.close()

    run(work())


def test_a_child_that_hangs_or_dies_costs_its_own_request_alone() -> None:
    async def work() -> None:
        checker = GrammarChecker(seconds=1)
        await checker.check(structured_outputs(FINE))
        for blow, said in ((signal.SIGSTOP, "takes more than 1 s"), (signal.SIGKILL, "too much memory")):
            child = alive(checker)
            os.kill(child, blow)
            with pytest.raises(RequestError, match=said):
                await checker.check(structured_outputs({"regex": f"a{blow:d}"}))
            with pytest.raises(ProcessLookupError):
                os.kill(child, 0)
            await checker.check(structured_outputs({"regex": f"b{blow:d}"}))
        await checker.close()

    run(work())


def test_what_overflows_the_stack_takes_the_child_alone() -> None:
    """Past the door's limits, as if nobody had thought of it."""

    async def work() -> None:
        checker = GrammarChecker()
        assert "nested too deeply" in (await checker._try(chain(20_000)) or "")
        await checker.check(structured_outputs(FINE))
        await checker.close()

    run(work())


def test_an_answer_nobody_waited_for_is_not_taken_for_the_next_one() -> None:
    async def work() -> None:
        checker = GrammarChecker()
        await checker.check(structured_outputs(FINE))
        os.kill(alive(checker), signal.SIGSTOP)
        gone = asyncio.create_task(checker.check(structured_outputs({"regex": "("})))
        await asyncio.sleep(0.05)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await checker.check(structured_outputs({"regex": "a"}))
        await checker.close()

    run(work())


def test_a_schema_that_comes_with_every_request_is_tried_once() -> None:
    async def work() -> None:
        checker = GrammarChecker()
        await checker.check(structured_outputs(FINE))
        await checker.close()  # whoever is asked again starts a new child
        await checker.check(structured_outputs(FINE))
        assert checker._child is None

    run(work())


def test_who_waits_too_long_for_the_child_is_told_to_come_back_and_equal_ones_are_tried_once() -> None:
    async def work() -> None:
        checker = GrammarChecker(seconds=0.5)
        await checker.check(structured_outputs(FINE))
        os.kill(alive(checker), signal.SIGSTOP)
        start = time.monotonic()
        slow, *behind = [asyncio.create_task(checker.check(structured_outputs({"regex": f"a{number}"}))) for number in range(40)]
        equal = [asyncio.create_task(checker.check(structured_outputs({"regex": "a0"}))) for _ in range(3)]
        with pytest.raises(RequestError, match="takes more than"):
            await slow
        told = await asyncio.gather(*behind, *equal, return_exceptions=True)
        assert time.monotonic() - start < 3
        busy = [error for error in told if isinstance(error, UnavailableError)]
        assert len(busy) > 30 and {(error.code, error.retry_after) for error in busy} == {("grammar_busy", 0.5)}
        await checker.check(structured_outputs({"regex": "b"}))
        tried, ask = list[str](), checker._try

        async def count(text: str) -> str | None:
            tried.append(text)
            return await ask(text)

        checker._try = count  # type: ignore[method-assign]
        await asyncio.gather(*(checker.check(structured_outputs({"regex": "together"})) for _ in range(8)))
        assert len(tried) == 1
        await checker.close()

    run(work())


PARENT = """
import asyncio, time
from octavo.server.grammar_check import GrammarChecker
from octavo.structured_outputs import structured_outputs
async def work():
    checker = GrammarChecker()
    await checker.check(structured_outputs({"regex": "a"}))
    print(checker._child.pid, flush=True)
    time.sleep(60)
asyncio.run(work())
"""


def test_the_child_does_not_outlive_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, signal.SIGSTOP)  # so that it does not notice by itself
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.03)
    raise AssertionError("the child lives on")


def test_checking_needs_no_torch() -> None:
    code = "import octavo.server.grammar_check, octavo.server.grammar_child, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
