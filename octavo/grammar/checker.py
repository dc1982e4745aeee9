"""Checks grammars before the engine sees them: each one is compiled and tried once, in a child process.

A grammar may run forever, take all memory, or crash the process. Then the child ends, the request is refused, and the next request
gets a new child. Verdicts are kept, so a schema that comes with every request is checked once.

A verdict depends on the grammar alone: signals show whether the child ended by its own limits of CPU time and memory. If another
process stopped or killed it, or it got no CPU time, there is no verdict: the client is asked to try again, and nothing is kept. The
same is true for a request that waits too long for its turn. Clients take turns.
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
from octavo.grammar.text import need_library
from octavo.log import logger
from octavo.structured_outputs import PARAM, StructuredOutputsParams
from octavo.text.tokenizer import Tokenizer

CPU_SECONDS = 2.0  # that one grammar may take
SECONDS = 4.0  # until the child answers; a request waits twice as long for its turn
START_SECONDS = 30.0
LAST_SECONDS = 1.0  # that a child has to end by itself
VERDICTS = 4096  # how many are kept; each is a digest and at most a line
PIECES = 16_000  # how many tokens of the vocabulary a grammar is tried on
MOST_WAITING = 64  # grammars of one client that may wait
BY_TIME = (signal.SIGPROF,)  # signals that end the child if the grammar is at fault
BY_SIZE = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


class GrammarChecker:
    def __init__(
        self,
        special_tokens: Sequence[str] = (),
        pieces: Callable[[], Sequence[bytes]] = tuple,
        seconds: float = SECONDS,
        cpu_seconds: float = CPU_SECONDS,
    ) -> None:
        """`special_tokens`: those of the model, which a grammar may name. `pieces`: returns some of its vocabulary; called in a thread."""
        self._special_tokens = list(special_tokens)
        self._pieces = pieces
        self._seconds = seconds
        self._cpu_seconds = cpu_seconds
        self._child: asyncio.subprocess.Process | None = None
        self._turns = Turns(MOST_WAITING)  # the child tries one at a time
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()  # digest of the question -> what is wrong with it
        self._trials: dict[tuple[str, bytes], asyncio.Task[str | None]] = {}  # client and digest -> a check that waits or runs

    async def check(self, structured: StructuredOutputsParams, client: str = "") -> None:
        """Raises RequestError for what cannot be compiled, within limits of time and memory. `client`: who sends the request."""
        need_library()
        question = json.dumps([structured.kind, getattr(structured, structured.kind)]).encode()
        digest = blake2b(question).digest()
        if digest in self._verdicts:
            self._verdicts.move_to_end(digest)
            wrong = self._verdicts[digest]
        else:  # further requests of this client with the same grammar wait for the same trial
            wrong = await asyncio.shield(self._trials.get((client, digest)) or self._begin(client, digest, question))
        if wrong is not None:
            raise RequestError(wrong, PARAM)

    async def close(self) -> None:
        """Ends all checks and the child."""
        for trial in list(self._trials.values()):
            trial.cancel()
        await asyncio.gather(*self._trials.values(), return_exceptions=True)
        await self._kill()

    def _begin(self, client: str, digest: bytes, question: bytes) -> "asyncio.Task[str | None]":
        trial = self._trials[client, digest] = asyncio.create_task(self._trial(client, digest, question))

        def ended(trial: "asyncio.Task[str | None]") -> None:
            del self._trials[client, digest]
            if not trial.cancelled():
                trial.exception()  # read, so that asyncio does not complain if every waiting request has left

        trial.add_done_callback(ended)
        return trial

    async def _trial(self, client: str, digest: bytes, question: bytes) -> str | None:
        await self._take_turn(client)
        try:
            if digest in self._verdicts:  # another client has sent the same grammar, and had its turn before
                return self._verdicts[digest]
            wrong = self._verdicts[digest] = await self._try(question)
            if len(self._verdicts) > VERDICTS:
                self._verdicts.popitem(last=False)
            return wrong
        finally:
            self._turns.release()

    async def _take_turn(self, client: str) -> None:
        try:
            async with asyncio.timeout(2 * self._seconds):
                if not await self._turns.take(client):
                    raise self._busy(f"{MOST_WAITING} others of this client are waiting")
        except TimeoutError:
            raise self._busy(f"it did not get its turn within {2 * self._seconds:g} s") from None

    async def _try(self, question: bytes) -> str | None:
        """Returns what is wrong with the grammar, or None."""
        child = self._child if self._child is not None and self._child.returncode is None else await self._start()
        try:
            async with asyncio.timeout(self._seconds):
                return await _exchange(child, question)
        except BaseException as error:  # the child is killed: a late answer would be taken for the next grammar's
            if isinstance(error, EOFError):
                await _ended(child)  # its exit code is the verdict
            await self._kill()
            if isinstance(error, TimeoutError):
                raise self._busy(f"there was no answer within {self._seconds:g} s") from None
            if isinstance(error, EOFError):
                return self._judged(child.returncode or 0)
            raise

    def _judged(self, returncode: int) -> str:
        """Returns what is wrong with a grammar on which the child died. Raises UnavailableError if another process killed the child."""
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
        words = command("octavo.grammar.child", "main", os.getpid())
        first = await asyncio.to_thread(self._first_line)
        self._child = child = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=nowhere)
        try:
            async with asyncio.timeout(START_SECONDS):
                await _exchange(child, first)
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
    """Returns the first tokens of the vocabulary: enough to show what a mask costs, few enough for a quick start of the child."""
    ids = (token for token in range(min(tokenizer.vocab_size, PIECES)) if token not in tokenizer.special_ids)
    return [piece for piece in map(tokenizer.token_bytes, ids) if piece]


async def _ended(child: asyncio.subprocess.Process) -> None:
    """Waits for the end of a child that has closed its output, for LAST_SECONDS at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_SECONDS):
            await child.wait()


async def _exchange(child: asyncio.subprocess.Process, question: bytes) -> str | None:
    """Sends a line, and returns the answer. Raises EOFError if the child ended instead."""
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
    """Lets clients take turns at something that serves one request at a time, so that a busy client does not keep others waiting.

    A client that has had a turn goes behind all others, also behind those that came during its turn.
    """

    def __init__(self, most_waiting: int) -> None:
        """`most_waiting`: how many requests of one client may wait."""
        self._most_waiting = most_waiting
        self._holder: str | None = None  # the client whose turn it is
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by client; the first one is next

    async def take(self, client: str) -> bool:
        """Waits for a turn and returns True; then the caller must call `release`. Returns False at once if too many of this client wait."""
        if self._holder is None:
            self._holder = client
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
            else:  # the turn came at the same moment
                self.release()
            raise
        return True

    def release(self) -> None:
        assert self._holder is not None
        if self._holder in self._waiting:
            self._waiting.move_to_end(self._holder)
        self._holder = None
        while self._waiting and self._holder is None:
            client, queue = next(iter(self._waiting.items()))
            turn = queue.popleft()
            if not queue:
                del self._waiting[client]
            if not turn.done():  # a turn that is done was cancelled: its client is leaving
                turn.set_result(None)
                self._holder = client

    def _leave(self, client: str, turn: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(client, deque())
        if turn in queue:
            queue.remove(turn)
        if not queue:
            self._waiting.pop(client, None)
