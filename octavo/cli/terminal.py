"""The user's side: what a terminal can show; in a chat, lines typed in, with history, and text written out, dim where it is no answer."""

import contextlib
import sys

from octavo.config import no_color, state_dir
from octavo.text.reasoning import Piece

QUOTES = '"""'
HISTORY_LINES = 1000
# Characters that steer a terminal, each on its own or as the first of a sequence: all control characters but new line and tab.
STEERING = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
STEERING |= dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}") | {0x7F: "\N{SYMBOL FOR DELETE}"}


def can_show(signs: str) -> bool:
    try:
        signs.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def for_stdout(text: str) -> str:
    """Text of a model or a server, harmless where a terminal shows it. A file or a pipe gets it as it is."""
    return text.translate(STEERING) if sys.stdout.isatty() else text


class Terminal:
    def __init__(self) -> None:
        self._colour = sys.stdout.isatty() and not no_color()

    def write(self, piece: Piece) -> None:
        text = for_stdout(piece.text)
        print(text if piece.kind == "content" else self._dim(text), end="", flush=True)

    def say(self, note: str) -> None:
        """A line that is not the model's, though words of a server may be in it."""
        print(self._dim(for_stdout(note)), flush=True)

    def _dim(self, text: str) -> str:
        return f"\033[2m{text}\033[0m" if self._colour else text


class LineReader:
    """`input` with editing and a history that survives; without readline or a place to write, it is `input` alone."""

    def __init__(self) -> None:
        self._file = state_dir() / "history"
        try:
            import readline
        except ImportError:  # a Python built without it
            self._readline = None
            return
        self._readline = readline
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            readline.read_history_file(self._file)

    def message(self) -> str:
        """One line, or several between triple quotes."""
        line = self._line(">>> ")
        if not line.startswith(QUOTES):
            return line.strip()
        lines = [line.removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(self._line("... "))
        return "\n".join(lines).rstrip().removesuffix(QUOTES).strip()

    def _line(self, prompt: str) -> str:
        line = input(prompt)
        if self._readline is not None:
            with contextlib.suppress(OSError):
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._readline.write_history_file(self._file)
        return line
