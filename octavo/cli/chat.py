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
from octavo.cli.opening import add_remote_flags, open_remote, opened, server_url
from octavo.cli.words import looks_like_model, looks_like_server, may_name_model
from octavo.config import no_color
from octavo.errors import OctavoError, RequestError, nearest
from octavo.loading.names import NAME
from octavo.loading.ollama_names import meant_on_hub
from octavo.own_file import state_dir
from octavo.sampling_params import SamplingParams
from octavo.text.tags import Piece

COMMANDS = {
    "/help": "show this list",
    "/system [TEXT]": "show the system prompt, or set it; - removes it",
    "/clear": "forget the conversation, keep the system prompt",
    "/retry": "ask the last question again",
    "/save FILE": "write the conversation to a file, as JSON",
    "/stats": "speed and cache use of the last answer",
    "/bye": "end the chat; /exit, /quit and Ctrl-D do the same",
}
ENDS = ("/bye", "/exit", "/quit")
KEYS = 'Ctrl-C stops an answer, """ begins and ends a message of several lines'
EXAMPLES = f"""examples:
  octavo chat                               chat with the default model
  octavo chat "Why is the sky blue?"        one answer, then the end
  octavo chat Qwen/Qwen3-0.6B               chat with a model of the hub, downloaded first
  echo "Name three primes." | octavo chat   the question from a pipe
  octavo chat localhost:8000                chat with a running server

In the chat: {", ".join(COMMANDS)}.
{KEYS}."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [MODEL or URL] [QUESTION]"
    parser.epilog = EXAMPLES
    parser.set_defaults(program=parser.prog)
    text = (
        f"a model (a folder, a .gguf file, owner/name on the hub or {NAME}) or the URL of a running server, and a question. "
        "Without a model, the default one answers. Without a question, the chat begins. A question of a single word, such as hello, "
        "needs a model before it, since it could be a model's name itself"
    )
    parser.add_argument("words", nargs="*", metavar="MODEL QUESTION", help=text)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    add_remote_flags(parser, "ask this running server, Octavo's or another with OpenAI's API, such as localhost:8000")
    add_sampling_flags(parser, CHAT_DEFAULTS)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    word = args.words.pop(0) if args.words and looks_like_server(args.words[0]) else None
    args.url = server_url(args, word)
    model, question = _model_and_question(args)
    params = SamplingParams(**sampling_values(args))
    config = engine_config(args, model) if args.url is None else None
    if config is None:
        _check_no_engine(args)
    elif args.api_key is not None:
        args.fail("--api-key is for a running server, given with --url")
    if question is None and not sys.stdin.isatty():
        question = read_stdin()
    if question is not None and not question.strip():
        raise RequestError("the question is empty", "question")
    if config is None:
        return _remotely(args, model, question)
    with opened(config) as llm:
        return _talk(LocalAnswers(llm, chat_params(llm, params)), args.system, question)


def _remotely(args: argparse.Namespace, model: str | None, question: str | None) -> int:
    with asyncio.Runner() as runner, open_remote(args.url, args.api_key) as server:
        found = runner.run(server.model(model))
        return _talk(RemoteAnswers(runner, server, found, sampling_values(args)), args.system, question)


def _check_no_engine(args: argparse.Namespace) -> None:
    """Refuses settings of an engine, for a running server has its own."""
    given = [name for name in vars(args) if name in args.settings and name != "model"]
    given += ["config"] * (args.config is not None) + ["show_config"] * args.show_config
    if given:
        args.fail(f"--{given[0].replace('_', '-')} does not go with a running server, which has its own settings")


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
    if len(words) > 1:
        wanted = "QUESTION" if model is not None else "MODEL and QUESTION"
        args.fail(f"{len(words)} words instead of {wanted}; put the question in quotes")
    if not words or model is not None:
        return model, words[0] if words else None
    if looks_like_model(words[0]):
        return words[0], None
    return _chosen(args, words[0]) if may_name_model(words[0]) else (None, words[0])


def _chosen(args: argparse.Namespace, word: str) -> tuple[str | None, str | None]:
    """Returns a word that may be a model or a question as what the user says it is. Without a terminal to ask at, the command fails."""
    program, url, found = args.program, args.url, meant_on_hub(word)
    if url is not None:
        model, question = f"{program} --url {url} --model {word}", f"echo {word} | {program} --url {url}"
        found = None  # the server has names of its own
    else:
        model, question = f"{program} {found or f'OWNER/{word}'}", f"{program} {NAME} {word}"
    answer = _choose(word, found)
    if answer is None:
        rows = f"\n  {model:50}  the model\n  {question:50}  the question"
        args.fail(f"{word} may be a model or a question; write one of these{rows}")
    return (found or word, None) if answer == "m" else (None, word)


def _choose(word: str, on_hub: str | None) -> str | None:
    """Returns m for a model, q for a question, or None if there is no terminal to ask at, or no answer."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return None
    print(f"{word} may be a model or a question.\n  m  open the model{'' if on_hub is None else f' {on_hub}'}\n  q  ask the question")
    try:
        while (answer := input("m or q? ").strip().lower()) not in ("m", "q"):
            pass
    except EOFError:
        print()
        return None
    return answer


class ChatLoop:
    """Reads messages until /bye or Ctrl-D. Each is answered, or run as a command."""

    def __init__(self, session: ChatSession, terminal: "Terminal") -> None:
        self._session = session
        self._terminal = terminal
        self._say = terminal.say
        self._reader = LineReader()

    def run(self) -> int:
        model, context = self._session.answerer.model_name, self._session.answerer.max_model_len
        size = "" if context is None else f", context of {context} tokens"
        self._say(f"{model}{size}; /help for help, /bye to end")
        while True:
            try:
                if (message := self._reader.message()) in ENDS:
                    return 0
                if message:
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
        if re.fullmatch(r"/\w+|/\?", first):
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
            case "/help" | "/?":
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
