"""The process that tries out grammars, so that one that never ends, or takes all memory, takes nobody with it.

    in     [2, ["<|im_end|>", ...], ["the", ...]]   CPU seconds for each, the special tokens a grammar may name, pieces of the vocabulary
           ["regex", "[a-z]+"]                      then one form a line: the field of `StructuredOutputs`, and its value
    out    "ready"                                  then for each form null, or what is wrong with it

Here a form is checked for its limits, compiled, and followed for some tokens, on a vocabulary of all single bytes and the model's
first pieces, with less stack than the engine has. Memory is limited by the system, and so is time: the CPU time that this process
itself has used, so that a machine that is busy, or somebody who stops the process, is no fault of the grammar. It ends with its parent.
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
from octavo.structured_outputs import PARAM, structured_outputs
from octavo.text.grammar_limits import check_limits
from octavo.text.grammar_text import grammar_text
from octavo.text.guidance import Guide, Matcher

MEMORY_BYTES = 1024 * 2**20  # of addresses; those it starts with are some 500 MiB
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
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        said = wrong_with(guide, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _say(said)


def wrong_with(guide: Guide, line: bytes) -> str | None:
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
    """Says some tokens that are allowed, drawn by chance: what is slow, or beyond a limit, shows at the first ones."""
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
        if matcher.failed and not matcher.dead_end:  # a dead end is told with the text that leads there
            raise RequestError(f"{PARAM} cannot be followed: {matcher.failed}", PARAM)


def trial_guide(special_tokens: Sequence[bytes], pieces: Sequence[bytes] = ()) -> Guide:
    """A vocabulary of all bytes, so that every text can be spelled, and of what is given."""
    single = [bytes([byte]) for byte in range(256)]
    tokens = [*dict.fromkeys([*single, *pieces]), *special_tokens, b"<end>"]
    special = range(len(tokens) - len(special_tokens) - 1, len(tokens))
    return Guide(tokens, special, [special[-1]], list)


def _say(answer: str | None) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
