"""The process that tries grammars. If a grammar never ends or takes all memory, only this process dies.

    in     [2, ["<|im_end|>", ...], ["the", ...]]   CPU seconds for each, the special tokens a grammar may name, pieces of the vocabulary
           ["regex", "[a-z]+"]                      then one grammar per line: the field of `StructuredOutputsParams`, and its value
    out    "ready"                                  then for each grammar null, or what is wrong with it

A grammar is checked for its limits, compiled, and followed for some tokens, on a vocabulary of all single bytes and the model's first
pieces, with a smaller stack than the engine has. The system limits memory and the CPU time of this process itself, so a grammar is
not blamed for a busy machine or a stopped process. The process ends with its parent.
"""

import json
import random
import resource
import signal
import sys
from collections.abc import Sequence

import numpy as np

from octavo.child import die_with
from octavo.errors import RequestError
from octavo.grammar.guidance import Guide, Matcher
from octavo.grammar.text import check_limits, grammar_text
from octavo.structured_outputs import PARAM, structured_outputs

MEMORY_BYTES = 1024 * 2**20  # of address space; about 500 MiB of it are in use at the start
WALKS, STEPS = 2, 16
TOO_LARGE = f"{PARAM} takes too much memory to compile, or is nested too deeply"


def main(parent: int) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes this one's input
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    lines = iter(sys.stdin.buffer)
    seconds, special_tokens, pieces = json.loads(next(lines))
    guide = trial_guide([text.encode() for text in special_tokens], [text.encode("latin-1") for text in pieces])
    _say("ready")
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # when the time is over, its signal ends the process
        problem = wrong_with(guide, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(problem)


def wrong_with(guide: Guide, line: bytes) -> str | None:
    """Returns what is wrong with the form in a line, or None."""
    try:
        kind, value = json.loads(line)
        structured = structured_outputs({kind: value})
        check_limits(structured)
        walk(guide, guide.compile(grammar_text(structured)))
    except RequestError as error:
        return str(error)
    except MemoryError:
        return TOO_LARGE
    return None


def walk(guide: Guide, compiled: Matcher) -> None:
    """Follows the grammar for some random tokens: one that is slow, or beyond a limit, shows it at the first tokens."""
    dice, masks = random.Random(0), np.zeros((1, guide.num_words), np.int32)
    for _ in range(WALKS):
        matcher = compiled.copy()
        for _ in range(STEPS):
            guide.fill([(0, matcher)], masks)
            allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
            if matcher.failed or not len(allowed):
                break
            matcher.advance([int(dice.choice(allowed))])
            if matcher.failed or matcher.ended:
                break
        if matcher.failed and not matcher.dead_end:  # a request that runs into a dead end gets an error with the text that led there
            raise RequestError(f"{PARAM} cannot be followed: {matcher.failed}", PARAM)


def trial_guide(special_tokens: Sequence[bytes], pieces: Sequence[bytes] = ()) -> Guide:
    """Returns a guide for a vocabulary of all single bytes, so that every text can be written, and of what is given."""
    single = [bytes([byte]) for byte in range(256)]
    tokens = [*dict.fromkeys([*single, *pieces]), *special_tokens, b"<end>"]
    special = range(len(tokens) - len(special_tokens) - 1, len(tokens))
    return Guide(tokens, special, [special[-1]], list)


def _say(answer: str | None) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
