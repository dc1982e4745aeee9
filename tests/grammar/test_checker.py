"""Grammars at the server's door: what cannot be served is refused in time, with the field's name, and the next request is."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import RequestError, UnavailableError
from octavo.grammar.checker import MOST_WAITING, GrammarChecker
from octavo.grammar.text import _TOKEN, check_limits, grammar_text
from octavo.structured_outputs import StructuredOutputsParams, structured_outputs

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
    (74, {"choice": ["a" * 10_001]}),
    (74, {"json": {"const": "a" * 10_001}}),
    (70, {"regex": "[" * 9_000}),
    (70, {"regex": "[" * 16_000}),
    (70, {"json": {"type": "string", "pattern": "[" * 9_000}}),
    (70, {"regex": r"\p{" * 3_000}),
    (70, {"regex": "(?" * 5_000}),
    (71, {"regex": "(a{1000}){1000}"}),
    (71, {"grammar": "start: /(a{1000}){1000}/"}),
    (72, {"grammar": json.dumps({"grammars": [{"json_schema": nested(100)}]})}),
    (72, {"grammar": json.dumps({"grammars": [{"lark_grammar": chain(5_000)}]})}),
    (74, {"json": {"type": "object", "properties": {f"p{n}": {} for n in range(501)}}}),
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
            with pytest.raises(RequestError) as refused:  # one that took too long would be an UnavailableError
                await checker.check(structured_outputs(bad))
            said = str(refused.value)
            assert refused.value.param == "structured_outputs", f"row {row}: {said}"
            assert len(said) < 500 and "Traceback" not in said and "0x" not in said and str(Path.home()) not in said, said
        assert alive(checker) == child, "limits are met before the child dies"
        await checker.check(structured_outputs({"grammar": 'start: <|tool|> "x" list\nlist: list "," /[0-9]/ | /[0-9]/'}))
        await checker.close()

    run(work())


def test_a_child_that_hangs_or_dies_costs_its_own_request_alone() -> None:
    async def work() -> None:
        checker = GrammarChecker(seconds=2)
        await checker.check(structured_outputs(FINE))
        for blow in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM):
            child = alive(checker)
            os.kill(child, signal.SIGSTOP)
            asked = asyncio.create_task(checker.check(structured_outputs({"regex": f"a{blow:d}"})))
            await asyncio.sleep(0.05)
            os.kill(child, blow)
            with suppress(ProcessLookupError):  # it may be gone already
                os.kill(child, signal.SIGSTOP if blow == signal.SIGSTOP else signal.SIGCONT)
            with pytest.raises(UnavailableError, match="could not be checked") as told:
                await asked
            assert (told.value.code, told.value.retry_after) == ("grammar_busy", 2)
            with pytest.raises(ProcessLookupError):
                os.kill(child, 0)
            await checker.check(structured_outputs({"regex": f"a{blow:d}"}))  # it was not the grammar's fault
        os.kill(alive(checker), signal.SIGKILL)
        assert checker._child is not None
        await checker._child.wait()
        await checker.check(structured_outputs({"regex": "idle"}))  # nobody asked it meanwhile
        await checker.close()

    run(work())


def reference_chain(length: int) -> dict[str, Any]:
    """Flat to look at; following it is what is deep."""
    steps = {f"a{n}": {"$ref": f"#/$defs/a{n + 1}"} for n in range(length)}
    return {"json": {"$defs": {**steps, f"a{length}": {"type": "integer"}}, "$ref": "#/$defs/a0"}}


OF_MANY = {"type": "object", "properties": {f"property{n}": {"type": "string"} for n in range(500)}}


@pytest.mark.parametrize(
    ("cpu_seconds", "asked", "said"),
    [
        (2, reference_chain(5_000), "nested too deeply"),
        (0.1, {"json": {"type": "object", "properties": dict.fromkeys("abcdefgh", OF_MANY)}}, "more than 0.1 s"),
    ],
    ids=["stack", "time"],
)
def test_what_a_grammar_does_to_the_child_is_a_verdict_that_is_kept(cpu_seconds: float, asked: dict[str, Any], said: str) -> None:
    async def work() -> None:
        checker = GrammarChecker(seconds=20, cpu_seconds=cpu_seconds)  # on a busy machine time passes that is not the grammar's
        await checker.check(structured_outputs(FINE))
        child = alive(checker)
        for _ in range(2):
            with pytest.raises(RequestError, match=said):
                await checker.check(structured_outputs(asked))
            assert checker._child is None, "the second time, nobody is asked"
        assert not Path(f"/proc/{child}").exists()
        await checker.check(structured_outputs(FINE))
        await checker.close()

    run(work())


def test_an_answer_nobody_waited_for_is_not_taken_for_the_next_one() -> None:
    async def work() -> None:
        checker = GrammarChecker(seconds=1)
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


# promise: grammars-fair
def test_another_client_waits_for_one_grammar_of_a_busy_one_and_equal_ones_are_tried_once() -> None:
    async def work() -> None:
        checker = GrammarChecker(seconds=4)
        await checker.check(structured_outputs(FINE))
        tried, ask = list[bytes](), checker._try

        all_have_asked = asyncio.Event()

        async def count(question: bytes) -> str | None:
            tried.append(question)
            await all_have_asked.wait()
            return await ask(question)

        checker._try = count  # type: ignore[method-assign]

        def asked_by(client: str, regex: str) -> asyncio.Task[None]:
            return asyncio.create_task(checker.check(structured_outputs({"regex": regex}), client))

        many = [asked_by("greedy", f"a{number}") for number in range(MOST_WAITING + 10)]
        await asyncio.sleep(0.01)
        others = [asked_by("one", "b"), asked_by("two", "a60")]  # the second one is also the last that waits of the busy client
        await asyncio.sleep(0.01)
        all_have_asked.set()
        told = await asyncio.gather(*many, *others, return_exceptions=True)
        refused = [error for error in told if isinstance(error, UnavailableError)]
        assert len(refused) == 9 and not any(told[-2:])
        assert len(tried) == MOST_WAITING + 2
        assert all((error.code, error.retry_after) == ("grammar_busy", 4) for error in refused)
        assert [json.loads(question)[1] for question in tried[:4]] == ["a0", "b", "a60", "a1"]
        tried.clear()
        await asyncio.gather(*(checker.check(structured_outputs({"regex": "together"})) for _ in range(50)))
        assert len(tried) == 1
        await checker.close()

    run(work())


def test_who_waits_too_long_for_a_turn_is_told_to_come_back() -> None:
    async def work() -> None:
        checker = GrammarChecker(seconds=0.2)
        assert await checker._turns.take("somebody")
        with pytest.raises(UnavailableError, match=r"did not get its turn within 0\.4 s"):
            await checker.check(structured_outputs({"regex": "a"}))
        checker._turns.release()
        checker._seconds = 4
        await checker.check(structured_outputs({"regex": "a"}))
        await checker.close()

    run(work())


def test_a_wrong_start_of_the_child_is_told_as_such() -> None:
    async def work() -> None:
        checker = GrammarChecker(pieces=lambda: [b"x"])
        checker._first_line = lambda: b"no JSON"  # type: ignore[method-assign]
        with pytest.raises(UnavailableError, match="did not start"):
            await checker.check(structured_outputs({"regex": "a"}))
        del checker._first_line
        await checker.check(structured_outputs({"regex": "a"}))
        await checker.close()

    run(work())


def test_checks_read_a_text_once() -> None:
    """Sizes beyond the limits: going back at every character would take minutes."""
    lark = StructuredOutputsParams(grammar="\n" * 40_000 + 'start: "a"')
    start = time.process_time()
    for unclosed in ("[", "[^", r"\p{", "(?", "[[:", "(?a"):
        text = unclosed * (40_000 // len(unclosed))
        with pytest.raises(RequestError):
            check_limits(StructuredOutputsParams(json=json.dumps({"pattern": text})))
        grammar_text(StructuredOutputsParams(regex=text))
        list(_TOKEN.finditer(text))
    check_limits(lark)
    assert time.process_time() - start < 5


PARENT = """
import asyncio, time
from octavo.grammar.checker import GrammarChecker
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
    for _ in range(2000):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            return
        time.sleep(0.03)
    raise AssertionError("the child lives on")


def test_checking_needs_no_torch() -> None:
    code = "import octavo.grammar.checker, octavo.grammar.child, sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
