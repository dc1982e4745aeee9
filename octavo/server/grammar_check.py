"""Checks grammars before the engine sees them: each one is compiled and tried once, in a child process.

A grammar may run for ever, take all memory, or crash the process. Then the child ends, the request is refused, and the next one gets a
new child. Verdicts are kept, so a schema that comes with every request is checked once.

A verdict depends on the grammar alone: signals show whether the child ended by its own limits of CPU time and memory. If it was stopped or
killed by somebody else, or got no CPU time, there is no verdict: the client is asked to try again, and nothing is kept. The same
holds for a request that waits too long for its turn. Clients take turns.
"""

import asyncio
import json
import os
import signal
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b

from octavo.child import command
from octavo.errors import RequestError, UnavailableError
from octavo.log import logger
from octavo.server.access import current_arrival
from octavo.structured_outputs import PARAM, StructuredOutputs
from octavo.text.grammar_limits import need_library
from octavo.text.tokenizer import Tokenizer

CPU_SECONDS = 2.0  # for one grammar
SECONDS = 4.0  # until the child answers; as long again for a turn
START_SECONDS = 30.0
LAST_SECONDS = 1.0  # for a child that is ending
VERDICTS = 4096  # kept, each a digest and a line at most
PIECES = 16_000  # of the vocabulary, that grammars are tried on
MOST_WAITING = 64  # of one client, each with another grammar
BY_TIME = (signal.SIGPROF,)  # how the child ends where the grammar is at fault
BY_SIZE = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


class GrammarChecker:
    def __init__(
        self,
        special_tokens: Sequence[str] = (),
        pieces: Callable[[], Sequence[bytes]] = tuple,
        seconds: float = SECONDS,
        cpu_seconds: float = CPU_SECONDS,
    ) -> None:
        """`special_tokens`: the model's, which a grammar may name. `pieces`: of its vocabulary, asked for in a thread."""
        self._special_tokens = list(special_tokens)
        self._pieces = pieces
        self._seconds = seconds
        self._cpu_seconds = cpu_seconds
        self._child: asyncio.subprocess.Process | None = None
        self._turns = Turns(MOST_WAITING)  # the child tries one at a time
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # digest of the question -> what is wrong with it
        self._trials: dict[bytes, asyncio.Task[str | None]] = {}  # those that are going on

    async def check(self, structured: StructuredOutputs) -> None:
        """Raises RequestError for what cannot be compiled, within limits of time and memory."""
        need_library()
        question = json.dumps([structured.kind, getattr(structured, structured.kind)]).encode()
        digest = blake2b(question).digest()
        if digest in self._verdicts:
            self._verdicts.move_to_end(digest)
            wrong = self._verdicts[digest]
        else:  # whoever brings the same meanwhile waits for the same trial
            wrong = await asyncio.shield(self._trials.get(digest) or self._begin(digest, question))
        if wrong is not None:
            raise RequestError(wrong, PARAM)

    async def close(self) -> None:
        """No child is left."""
        for trial in list(self._trials.values()):
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)
        await self._kill()

    def _begin(self, digest: bytes, question: bytes) -> "asyncio.Task[str | None]":
        trial = self._trials[digest] = asyncio.create_task(self._trial(digest, question))

        def ended(trial: "asyncio.Task[str | None]") -> None:
            del self._trials[digest]
            if not trial.cancelled():
                trial.exception()  # everybody may have left

        trial.add_done_callback(ended)
        return trial

    async def _trial(self, digest: bytes, question: bytes) -> str | None:
        await self._take_turn(current_arrival().caller.name)
        try:
            wrong = await self._try(question)
        finally:
            self._turns.release()
        self._verdicts[digest] = wrong
        if len(self._verdicts) > VERDICTS:
            self._verdicts.popitem(last=False)
        return wrong

    async def _take_turn(self, client: str) -> None:
        try:
            async with asyncio.timeout(2 * self._seconds):
                if not await self._turns.take(client):
                    raise self._busy(f"{MOST_WAITING} others of this client are waiting")
        except TimeoutError:
            raise self._busy(f"it did not get its turn within {2 * self._seconds:g} s") from None

    async def _try(self, question: bytes) -> str | None:
        """What is wrong with it."""
        child = self._child if self._child is not None and self._child.returncode is None else await self._start()
        try:
            async with asyncio.timeout(self._seconds):
                return await _ask(child, question)
        except BaseException as error:  # an answer to come would be taken for the next one's
            if isinstance(error, EOFError):
                await _ended(child)  # how it ended is the verdict
            await self._kill()
            if isinstance(error, TimeoutError):
                raise self._busy(f"there was no answer within {self._seconds:g} s") from None
            if isinstance(error, EOFError):
                return self._judged(child.returncode or 0)
            raise

    def _judged(self, returncode: int) -> str:
        """What a child that ended by itself says of the grammar."""
        if -returncode in BY_TIME:
            return f"{PARAM} takes more than {self._cpu_seconds:g} s of CPU time to compile"
        if -returncode in BY_SIZE:
            return f"{PARAM} takes too much memory to compile, or is nested too deeply"
        logger.warning("the process that checks grammars was killed from outside (exit code %d)", returncode)
        raise self._busy("the process that checks it was killed")

    def _busy(self, why: str) -> UnavailableError:
        return UnavailableError(f"{PARAM} could not be checked: {why}; try again later", self._seconds, "grammar_busy")

    async def _start(self) -> asyncio.subprocess.Process:
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        words = command("octavo.server.grammar_child", "main", os.getpid())
        first = await asyncio.to_thread(self._first_line)
        self._child = child = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=nowhere)
        try:
            async with asyncio.timeout(START_SECONDS):
                await _ask(child, first)
        except BaseException as error:
            await self._kill()
            if isinstance(error, (TimeoutError, EOFError)):
                logger.warning("the process that checks grammars did not start (%s)", type(error).__name__)
                raise self._busy("the process that checks it did not start") from None
            raise
        return child

    def _first_line(self) -> bytes:
        pieces = [piece.decode("latin-1") for piece in self._pieces()]
        return json.dumps([self._cpu_seconds, self._special_tokens, pieces]).encode()

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()


def first_pieces(tokenizer: Tokenizer) -> list[bytes]:
    """Of the vocabulary: as many as show what a mask costs, and make a child start no later."""
    ids = (token for token in range(min(tokenizer.vocab_size, PIECES)) if token not in tokenizer.special_ids)
    return [piece for piece in map(tokenizer.token_bytes, ids) if piece]


async def _ended(child: asyncio.subprocess.Process) -> None:
    """It will say no more: it ends, or has to be killed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_SECONDS):
            await child.wait()


async def _ask(child: asyncio.subprocess.Process, question: bytes) -> str | None:
    """A line for a line. EOFError where the child died of it."""
    assert child.stdin is not None and child.stdout is not None
    with suppress(ConnectionError):
        child.stdin.write(question + b"\n")
        await child.stdin.drain()
    line = await child.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    answer: str | None = json.loads(line)
    return answer


class Turns:
    def __init__(self, most_waiting: int) -> None:
        """`most_waiting`: of one client."""
        self._most_waiting = most_waiting
        self._taken = False
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by client, the next one first

    async def take(self, client: str) -> bool:
        """Waits for a turn; whoever got one calls `release`. False, at once, where too many of this client wait already."""
        if not self._taken:
            self._taken = True
            return True
        queue = self._waiting.setdefault(client, deque())
        if len(queue) >= self._most_waiting:
            return False
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(client, turn)
            else:  # it came at the same time
                self.release()
            raise
        return True

    def release(self) -> None:
        while self._waiting:
            client, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind the others
            if not turn.done():  # else whoever waited is about to leave
                turn.set_result(None)
                return
        self._taken = False

    def _leave(self, client: str, turn: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(client, deque())
        if turn in queue:
            queue.remove(turn)
        if not queue:
            self._waiting.pop(client, None)
