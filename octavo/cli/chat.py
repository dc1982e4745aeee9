"""`octavo chat`: a conversation at the terminal, or one answer for a script."""

import argparse
import asyncio
import contextlib
import json
import re
import sys
from pathlib import Path

from octavo.cli.args import add_engine_flags, add_sampling_flags, engine_config, sampling_values
from octavo.cli.chat_session import CHAT_DEFAULTS, Answerer, ChatSession, LocalAnswers, RemoteAnswers, chat_params
from octavo.cli.in_out import for_stdout, read_stdin
from octavo.cli.opening import add_remote_flags, open_remote, opened
from octavo.config import no_color
from octavo.errors import OctavoError, RequestError, nearest
from octavo.loading.names import NAME, is_default_name
from octavo.own_file import state_dir
from octavo.sampling_params import SamplingParams
from octavo.text.pieces import Piece

COMMANDS = {
    "/help": "show this list",
    "/system [TEXT]": "show the system prompt, or set it; - removes it",
    "/clear": "forget the conversation, keep the system prompt",
    "/retry": "ask the last question again",
    "/save FILE": "write the conversation to a file, as JSON",
    "/stats": "speed and cache use of the last answer",
}
KEYS = 'Ctrl-C stops an answer, Ctrl-D ends the chat, """ begins and ends a message of several lines'
EXAMPLES = f"""examples:
  octavo chat                               chat with the default model
  octavo chat "Why is the sky blue?"        one answer, then the end
  octavo chat Qwen/Qwen3-0.6B               chat with a model of the hub, downloaded first
  echo "Name three primes." | octavo chat   the question from a pipe
  octavo chat --url http://127.0.0.1:8000   chat with a running server

In the chat: {", ".join(COMMANDS)}.
{KEYS}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [MODEL] [QUESTION]"
    parser.epilog = EXAMPLES
    text = (
        "a model and a question. With one of the two, it is the model if it is a folder, a .gguf file, owner/name on the hub or "
        f"{NAME}, else the question. Without a model, the default one answers. Without a question, the chat begins"
    )
    parser.add_argument("words", nargs="*", metavar="MODEL QUESTION", help=text)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    add_remote_flags(parser, required=False)
    add_sampling_flags(parser, CHAT_DEFAULTS)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    model, question = _model_and_question(args)
    params = SamplingParams(**sampling_values(args))
    config = engine_config(args, model) if args.url is None else None
    if config is None:
        _check_no_engine(args)
    elif args.api_key is not None:
        args.fail("--api-key goes with --url")
    if question is None and not sys.stdin.isatty():
        question = read_stdin()
    if question is not None and not question.strip():
        raise RequestError("the question is empty", "question")
    if config is None:
        return _remotely(args, model, question)
    with opened(config) as llm:
        return _talk(LocalAnswers(llm, chat_params(llm, params)), args.system, question)


def _remotely(args: argparse.Namespace, model: str | None, question: str | None) -> int:
    with asyncio.Runner() as runner, open_remote(args) as server:
        found = runner.run(server.model(model))
        return _talk(RemoteAnswers(runner, server, found, sampling_values(args)), args.system, question)


def _check_no_engine(args: argparse.Namespace) -> None:
    """Refuses settings of an engine, for a running server has its own."""
    given = [name for name in vars(args) if name in args.settings and name != "model"]
    given += ["config"] * (args.config is not None) + ["show_config"] * args.show_config
    if given:
        args.fail(f"--{given[0].replace('_', '-')} does not go with --url: the server has its own settings")


def _talk(answerer: Answerer, system: str | None, question: str | None) -> int:
    terminal = Terminal()
    session = ChatSession(answerer, system, terminal.say)
    if question is None:
        return ChatLoop(session, terminal).run()
    for piece in session.ask(question.strip()):
        terminal.write(piece)
    print()
    return 0


def _model_and_question(args: argparse.Namespace) -> tuple[str | None, str | None]:
    words, model = args.words, args.model
    if model is None and len(words) == 2:
        return words[0], words[1]
    if model is None and len(words) == 1 and looks_like_model(words[0]):
        return words[0], None
    if len(words) > 1:
        wanted = "QUESTION" if model is not None else "MODEL and QUESTION"
        args.fail(f"{len(words)} words instead of {wanted}; put the question in quotes")
    return model, words[0] if words else None


# Single words such as llama3.2 or qwen3:0.6b, which are names of models in ollama. An error that no such model is found is better
# than an answer of the default model to that word.
_FAMILIES = "tinyllama|llama|smollm|qwen|mistral|mixtral|gemma|phi|deepseek|gpt-oss|granite|olmo"
_MODEL_WORD = re.compile(rf"({_FAMILIES})[\w.-]*[\d:][\w.:-]*", re.IGNORECASE)


def looks_like_model(word: str) -> bool:
    """Whether a single word names a model. If it does not, it is a question."""
    if word.endswith(".gguf") or is_default_name(word) or _MODEL_WORD.fullmatch(word):
        return True
    if re.search(r"[\s?]", word) is None and ("/" in word or "\\" in word):
        return True
    try:
        return word != "" and Path(word).is_dir()
    except OSError:  # the word is too long for a file name
        return False


class ChatLoop:
    """Reads messages until Ctrl-D. Each is answered, or run as a command."""

    def __init__(self, session: ChatSession, terminal: "Terminal") -> None:
        self._session = session
        self._terminal = terminal
        self._say = terminal.say
        self._reader = LineReader()

    def run(self) -> int:
        model, context = self._session.answerer.model_name, self._session.answerer.max_model_len
        size = "" if context is None else f", context of {context} tokens"
        self._say(f"{model}{size}; /help for help, Ctrl-D to end")
        while True:
            try:
                if message := self._reader.message():
                    self._take(message)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:  # Ctrl-C while typing begins a new line
                print()
            except UnicodeDecodeError as error:
                self._say(f"error: that line is not {error.encoding} text")
            except OctavoError as error:
                self._say(f"error: {error}")

    def _take(self, message: str) -> None:
        first, _, rest = message.partition(" ")
        if re.fullmatch(r"/\w+", first):
            self._command(first, rest.strip())
        else:
            self._answer(message)

    def _answer(self, question: str) -> None:
        pieces = self._session.ask(question)
        try:
            for piece in pieces:
                self._terminal.write(piece)
            print()
        except KeyboardInterrupt:
            pieces.close()
            print()
            self._say("stopped")

    def _command(self, command: str, rest: str) -> None:
        names = [name.split()[0] for name in COMMANDS]
        match command:
            case "/help":
                self._say("\n".join([*(f"{name:16}{text}" for name, text in COMMANDS.items()), KEYS]))
            case "/system":
                self._system(rest)
            case "/clear":
                self._session.turns.clear()
                self._say("the conversation is cleared")
            case "/retry":
                question = self._session.take_back()
                if question is None:
                    self._say("no question to ask again")
                else:
                    self._answer(question)
            case "/save":
                self._save(rest)
            case "/stats":
                stats = self._session.stats
                self._say("no answer yet" if stats is None else "\n".join(stats.lines()))
            case _:
                self._say(f"unknown command {command}{nearest(command, names)}")

    def _system(self, text: str) -> None:
        if text:
            self._session.system = None if text == "-" else text
        self._say("no system prompt" if self._session.system is None else f"system prompt: {self._session.system}")

    def _save(self, name: str) -> None:
        if not name:
            self._say("give a file name: /save FILE")
            return
        try:
            with Path(name).open("x", encoding="utf-8") as file:  # fails if the file exists
                file.write(json.dumps({"messages": self._session.messages()}, ensure_ascii=False) + "\n")
            self._say(f"saved {len(self._session.turns)} turns to {name}")
        except OSError as error:
            self._say(f"error: {name}: {error.strerror}")


# -- the terminal

QUOTES = '"""'
HISTORY_LINES = 1000


class Terminal:
    """Writes a chat to stdout. What is not part of the answer, such as thinking, is dim."""

    def __init__(self) -> None:
        self._colour = sys.stdout.isatty() and not no_color()

    def write(self, piece: Piece) -> None:
        text = for_stdout(piece.text)
        print(text if piece.kind == "content" else self._dim(text), end="", flush=True)

    def say(self, note: str) -> None:
        """Writes a line that is Octavo's own. It may quote a server, so it is made harmless, too."""
        print(self._dim(for_stdout(note)), flush=True)

    def _dim(self, text: str) -> str:
        return f"\033[2m{text}\033[0m" if self._colour else text


class LineReader:
    """Reads lines with `input`.

    With readline, lines can be edited, and a history is kept between runs. If the history cannot be read or written, there is none.
    """

    def __init__(self) -> None:
        self._file = state_dir() / "history"
        try:
            import readline
        except ImportError:  # this Python was built without it
            self._readline = None
            return
        self._readline = readline
        readline.set_history_length(HISTORY_LINES)
        with contextlib.suppress(OSError):
            readline.read_history_file(self._file)

    def message(self) -> str:
        """Returns one line, or all lines between triple quotes."""
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
