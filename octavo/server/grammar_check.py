"""The server's door for grammars: what a request asks for is compiled once, in a child process, before the engine hears of it.

A grammar may take for ever, all memory, or the process with it: the child is killed, the request refused, and the next one gets a
new child. Verdicts are kept, so that a schema which comes with every request is tried once.
"""

import asyncio
import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from importlib.util import find_spec

from octavo.errors import RequestError
from octavo.structured_outputs import PARAM, StructuredOutputs
from octavo.text.grammar_limits import check_limits
from octavo.text.grammar_text import grammar_text

SECONDS = 4.0  # for one grammar: an answer is due within five
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
        if find_spec("llguidance") is None:
            raise RequestError(f"{PARAM} needs the package llguidance, which is not installed: pip install llguidance", PARAM)
        check_limits(structured)
        text = grammar_text(structured)
        digest = blake2b(text.encode()).digest()
        if digest not in self._verdicts:
            async with self._turn:
                self._verdicts[digest] = await self._try(text)
            if len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
        self._verdicts.move_to_end(digest)
        if (wrong := self._verdicts[digest]) is not None:
            raise RequestError(wrong, PARAM)

    async def close(self) -> None:
        """No child is left."""
        async with self._turn:
            await self._kill()

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
        words = "-m", "octavo.server.grammar_child", str(self._seconds + 1)
        self._child = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe, stderr=nowhere)
        try:
            async with asyncio.timeout(START_SECONDS):
                await _ask(self._child, self._special_tokens)
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
