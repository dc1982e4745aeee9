"""`octavo generate`: complete prompts, all in one batch.

    octavo generate "Once upon a time" "The sea"             texts on stdout, --- between them
    octavo generate --file prompts.jsonl --output out.jsonl  an object a line, in the order of the prompts
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.args import add_engine_flags, add_sampling_flags, engine_config, sampling_values
from octavo.cli.chat import chat_params
from octavo.cli.opening import opened
from octavo.cli.prompt_rows import Row, named, read_stdin, rows_of_file, rows_of_words
from octavo.cli.terminal import for_stdout
from octavo.errors import ConfigError, RequestError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput

SEPARATOR = "---"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "octavo generate [options] PROMPT... | --file FILE"
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="a prompt; - is all of stdin as one")
    text = ".txt: one prompt a line; .jsonl: objects with prompt or messages, and sampling fields; -: stdin"
    parser.add_argument("--file", metavar="FILE", help=text)
    text = "write JSONL here (prompt, outputs, usage), - for stdout; without it, texts go to stdout"
    parser.add_argument("--output", metavar="FILE", help=text)
    parser.add_argument("--chat", action="store_true", help="each prompt is a question, answered as `octavo chat` would")
    add_sampling_flags(parser, {})
    parser.add_argument("-n", type=int, metavar="N", default=argparse.SUPPRESS, help="samples per prompt (default: 1)")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    flags = sampling_values(args)
    if bool(args.words) == (args.file is not None):
        args.fail("prompts come as words or with --file, one of the two")
    words = [read_stdin() if word == "-" else word for word in args.words]
    rows = rows_of_file(args.file, flags) if args.file else rows_of_words(words, flags)
    if args.output not in (None, "-"):
        _check_writable(Path(args.output))
    with opened(config) as llm:
        prompts = [{"prompt_token_ids": row.encode(llm.encoder, args.chat)} for row in rows]
        try:
            outputs = llm.generate(prompts, [_params(llm, row, args.chat) for row in rows])
        except RequestError as error:
            with named("" if error.index is None else rows[error.index].place):
                raise
    _write(args.output, rows, outputs)
    return _report_errors(rows, outputs)


def _params(llm: "LLM", row: Row, as_chat: bool) -> SamplingParams:
    """What neither a flag nor the line sets is the model's own."""
    return chat_params(llm, row.params) if as_chat or "messages" in row.given else row.params.with_defaults(llm.sampling_defaults)


def _check_writable(path: Path) -> None:
    """Now, not after the work is done."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--output {path} cannot be written")


def _write(target: str | None, rows: Sequence[Row], outputs: Sequence["RequestOutput"]) -> None:
    if target is None:
        texts = [sample.text for output in outputs for sample in output.outputs]
        print(for_stdout(f"\n{SEPARATOR}\n".join(texts)))
        return
    lines = "".join(json.dumps(_record(row, output), ensure_ascii=False) + "\n" for row, output in zip(rows, outputs, strict=True))
    if target == "-":
        print(for_stdout(lines), end="")
        return
    try:
        Path(target).write_text(lines, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {target}: {error.strerror}") from error


def _record(row: Row, output: "RequestOutput") -> dict[str, object]:
    samples = [{"text": one.text, "finish_reason": one.finish_reason, "tokens": len(one.token_ids)} for one in output.outputs]
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": sum(len(one.token_ids) for one in output.outputs),
        "cached_tokens": output.num_cached_tokens,
    }
    return {**row.given, "outputs": samples, "usage": usage}


def _report_errors(rows: Sequence[Row], outputs: Sequence["RequestOutput"]) -> int:
    failed = [
        f"{row.place or 'the prompt'}: {sample.stop_reason}"
        for row, output in zip(rows, outputs, strict=True)
        for sample in output.outputs
        if sample.finish_reason == "error"
    ]
    for line in failed:
        print(f"octavo: error: {line}", file=sys.stderr)
    return 1 if failed else 0
