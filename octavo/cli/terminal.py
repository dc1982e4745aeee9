"""The terminal: what it can show, and for a chat reading lines, with history, and writing text, dim where it is not the answer."""

import contextlib
import sys

from octavo.config import no_color, state_dir
from octavo.text.reasoning import Piece

QUOTES = '"""'
HISTORY_LINES = 1000
# Characters that control a terminal, alone or at the start of a sequence: all control characters but new line and tab.
STEERING = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
STEERING |= dict.fromkeys(range(0x80, 0xA0), "\N{REPLACEMENT CHARACTER}") | {0x7F: "\N{SYMBOL FOR DELETE}"}


def can_show(signs: str) -> bool:
    try:
        signs.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def for_stdout(text: str) -> str:
    """Text of a model or a server, made harmless for a terminal. A file or a pipe gets it unchanged."""
    return text.translate(STEERING) if sys.stdout.isatty() else text


class Terminal:
    def __init__(self) -> None:
        self._colour = sys.stdout.isatty() and not no_color()

    def write(self, piece: Piece) -> None:
        text = for_stdout(piece.text)
        print(text if piece.kind == "content" else self._dim(text), end="", flush=True)

    def say(self, note: str) -> None:
        """A line of Octavo's own, which may hold words of a server."""
        print(self._dim(for_stdout(note)), flush=True)

    def _dim(self, text: str) -> str:
        return f"\033[2m{text}\033[0m" if self._colour else text


class LineReader:
    """`input` with editing and a history that is kept between runs; without readline or a folder to write to, plain `input`."""

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
