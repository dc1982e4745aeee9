"""The process that tries out grammars, so that one that never ends, or takes all memory, takes nobody with it.

    in     [5, ["<|im_end|>", ...]]  seconds for each, and the special tokens a grammar may name; then one grammar text a line, as JSON
    out    "ready"                   then for each text null, or why it cannot be compiled

It tries them on a vocabulary of single bytes, with less stack than the engine has, under limits of memory and, by an alarm that
nothing can hold up, of time. It ends with its parent.
"""

import json
import resource
import signal
import sys

from octavo.child import die_with
from octavo.errors import RequestError
from octavo.text.guidance import Guide

MEMORY_BYTES = 1024 * 2**20  # of addresses; those it starts with are some 500 MiB


def main(parent: int) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes this one's input
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = iter(sys.stdin.buffer)
    seconds, special_tokens = json.loads(next(lines))
    guide = byte_guide([text.encode() for text in special_tokens])
    _say("ready")
    for line in lines:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            guide.compile(json.loads(line))
            _say(None)
        except RequestError as error:
            _say(str(error))
        signal.setitimer(signal.ITIMER_REAL, 0)


def byte_guide(special_tokens: list[bytes]) -> Guide:
    """A vocabulary of all bytes and the special tokens, which a grammar may name."""
    tokens = [bytes([byte]) for byte in range(256)] + special_tokens + [b"<end>"]
    special = range(256, len(tokens))
    return Guide(tokens, special, [special[-1]], list)


def _say(answer: str | None) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
