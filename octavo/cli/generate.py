"""`octavo generate`: complete prompts, all in one batch. Texts are written while they come, in the order of the prompts."""

import argparse
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from octavo.cli.args import add_engine_flags, add_sampling_flags, engine_config, sampling_values
from octavo.cli.chat import chat_params
from octavo.cli.opening import opened
from octavo.cli.prompt_rows import Row, named, read_stdin, rows_of_file, rows_of_words
from octavo.cli.targets import check_target
from octavo.errors import RequestError
from octavo.progress import GenerateProgress
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.cli.generate_output import Answer, Writer
    from octavo.llm import LLM

EXAMPLES = """examples:
  octavo generate "Once upon a time"                          the default model continues the text
  octavo generate "Once upon a time" "The sea" --max-tokens 40
  octavo generate --model Qwen/Qwen3-0.6B --chat "Name three primes."
  octavo generate --file prompts.jsonl --output answers.jsonl

Texts are written to stdout while they come, in the order of the prompts, with a line --- between two of them.
Ctrl-C ends the command; what was written stays."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] PROMPT... | --file FILE"
    parser.epilog = EXAMPLES
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="a prompt; - reads one from stdin")
    text = "a .txt file with one prompt per line, a .jsonl file (prompt or messages, and sampling fields), or - for stdin"
    parser.add_argument("--file", metavar="FILE", help=text)
    text = "write one JSON object per prompt (prompt, outputs, usage) to this file; - is stdout"
    parser.add_argument("--output", metavar="FILE", help=text)
    parser.add_argument("--chat", action="store_true", help="answer each prompt as a chat message, with the chat template")
    add_sampling_flags(parser, {})
    parser.add_argument("-n", type=int, metavar="N", default=argparse.SUPPRESS, help="samples per prompt (default: 1)")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    flags = sampling_values(args)
    if bool(args.words) == (args.file is not None):
        args.fail("give prompts as words, or a file of prompts with --file")
    words = [read_stdin() if word == "-" else word for word in args.words]
    rows = rows_of_file(args.file, flags) if args.file else rows_of_words(words, flags)
    if args.output != "-":
        check_target("--output", args.output)
    with opened(config) as llm:
        answers = _generate(llm, rows, args)
    return _report_errors(rows, answers)


def _generate(llm: "LLM", rows: Sequence[Row], args: argparse.Namespace) -> "list[Answer]":
    from octavo.cli.generate_output import Answer, Sample

    prompts = [row.encode(llm.encoder, args.chat) for row in rows]
    params = [_params(llm, row, args.chat) for row in rows]
    answers = [Answer(row.given, len(ids), [Sample() for _ in range(one.n)]) for row, ids, one in zip(rows, prompts, params, strict=True)]
    with _writer(args.output, answers) as writer, GenerateProgress(len(rows), _writes_a_file(args.output)) as progress:
        try:
            with closing(llm.stream_batch(prompts, params)) as deltas:
                for index, delta in deltas:
                    answers[index].take(delta)
                    writer.advance()
                    ended = delta.finish_reason is not None and answers[index].is_finished
                    progress.count(int(ended), len(prompts[index]) if ended else 0, len(delta.token_ids))
                    progress.show()
        except RequestError as error:
            with named("" if error.index is None else rows[error.index].place):
                raise
    return answers


def _writes_a_file(target: str | None) -> bool:
    """Then progress is shown. At a terminal and in a pipe the texts themselves show it, and a bar would stand between them."""
    return target not in (None, "-") or stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)


def _writer(target: str | None, answers: "list[Answer]") -> "Writer":
    from octavo.cli.generate_output import JsonWriter, TextWriter

    return TextWriter(answers) if target is None else JsonWriter(answers, target)


def _params(llm: "LLM", row: Row, as_chat: bool) -> SamplingParams:
    """What neither a flag nor the line sets is taken from the model's recommended values."""
    return chat_params(llm, row.params) if as_chat or "messages" in row.given else row.params.with_defaults(llm.sampling_defaults)


def _report_errors(rows: Sequence[Row], answers: "Sequence[Answer]") -> int:
    failed = [
        f"{row.place or 'the prompt'}: {sample.error}"
        for row, answer in zip(rows, answers, strict=True)
        for sample in answer.samples
        if sample.finish_reason == "error"
    ]
    for line in failed:
        print(f"octavo: error: {line}", file=sys.stderr)
    return 1 if failed else 0
