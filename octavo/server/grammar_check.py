"""The server's door for grammars: what a request asks for is compiled once, in a child process, before the engine hears of it.

A grammar may take for ever, all memory, or the process with it: the child is killed, the request refused, and the next one gets a
new child. Verdicts are kept, so that a schema which comes with every request is tried once. Whoever waits too long for the child is
told to come back.
"""

import asyncio
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b

from octavo.child import command
from octavo.errors import RequestError, UnavailableError
from octavo.structured_outputs import PARAM, StructuredOutputs
from octavo.text.grammar_limits import check_limits, need_library
from octavo.text.grammar_text import grammar_text

SECONDS = 4.0  # for one grammar, and as long for its turn
START_SECONDS = 30.0
VERDICTS = 4096  # kept, each a digest and a line at most


class GrammarChecker:
    def __init__(self, special_tokens: Sequence[str] = (), seconds: float = SECONDS) -> None:
        """`special_tokens`: the model's, which a grammar may name."""
        self._special_tokens = list(special_tokens)
        self._seconds = seconds
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()  # the child tries one at a time
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # digest of the text -> what is wrong with it

    async def check(self, structured: StructuredOutputs) -> None:
        """Raises RequestError for what cannot be compiled, within limits of time and memory."""
        need_library()
        check_limits(structured)
        text = grammar_text(structured)
        digest = blake2b(text.encode()).digest()
        if digest not in self._verdicts:
            await self._take_turn()
            try:
                if digest not in self._verdicts:  # others brought the same meanwhile
                    self._verdicts[digest] = await self._try(text)
            finally:
                self._turn.release()
            if len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(digest)
        if (wrong := self._verdicts[digest]) is not None:
            raise RequestError(wrong, PARAM)

    async def close(self) -> None:
        """No child is left."""
        async with self._turn:
            await self._kill()

    async def _take_turn(self) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._turn.acquire()
        except TimeoutError:
            text = f"{PARAM} could not be tried within {self._seconds:g} s: others are being compiled, try again later"
            raise UnavailableError(text, self._seconds, "grammar_busy") from None

    async def _try(self, text: str) -> str | None:
        """What is wrong with it."""
        child = self._child or await self._start()
        try:
            async with asyncio.timeout(self._seconds):
                return await _ask(child, text)
        except BaseException as error:  # also where the client has gone: an answer to come would be taken for the next one's
            await self._kill()
            if isinstance(error, TimeoutError):
                return f"{PARAM} takes more than {self._seconds:g} s to compile"
            if isinstance(error, EOFError):
                return f"{PARAM} takes too much memory to compile, or is nested too deeply"
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        words = command("octavo.server.grammar_child", "main", os.getpid())
        self._child = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=nowhere)
        try:
            async with asyncio.timeout(START_SECONDS):
                await _ask(self._child, [self._seconds + 1, self._special_tokens])
        except BaseException:
            await self._kill()
            raise
        return self._child

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()


async def _ask(child: asyncio.subprocess.Process, question: object) -> str | None:
    """A line for a line. EOFError where the child died of it."""
    assert child.stdin is not None and child.stdout is not None
    with suppress(ConnectionError):
        child.stdin.write(json.dumps(question).encode() + b"\n")
        await child.stdin.drain()
    line = await child.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer: str | None = json.loads(line)
    return answer
