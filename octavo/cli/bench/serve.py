"""`octavo bench serve` measures a running server as its clients see it."""

import argparse
import asyncio
import math
import sys
from collections.abc import Callable

from octavo.bench.figures import Result, by_result, number, words
from octavo.bench.picture import Bar, Panel, heading
from octavo.bench.serving import Load, client_here, drive, failures, poisson, probe, replayed, result_of, slo
from octavo.bench.traces import MOST
from octavo.bench.workload import Workload, check_fits
from octavo.cli.bench.output import Shown, add_target_flags, check_targets, count, publish
from octavo.cli.bench.workloads import DEFAULT_PROMPTS, add_workload_flags, check_choice, maker
from octavo.cli.opening import DEFAULT_URL, add_server_word, open_remote, server_url
from octavo.client.api import RemoteServer
from octavo.errors import RemoteError
from octavo.sampling_params import SamplingParams

DEFAULT_VOCABULARY = 10_001  # the published loads have ids from 0 to 10,000
FACTS = ("requests", "failed", "input_tokens", "output_tokens")
ONCE = ("output_throughput", "input_throughput", "request_throughput", "goodput", "within_slo", "wall", "behind_schedule", "cache_hit_rate")
TIMES = ("first_token", "inter_token", "per_output_token", "end_to_end")
STATISTICS = ("median", "p90", "p99")
ROWS = [(name, "median") for name in ONCE] + [(name, statistic) for name in TIMES for statistic in STATISTICS]


EXAMPLES = """examples:
  octavo bench serve --request-rate 4 --num-prompts 100                   the server at http://127.0.0.1:8000
  octavo bench serve gpu-7:8000 --load batch32 --concurrency 8
  octavo bench serve gpu-7:8000 --trace azure.csv --speedup 10 --slo ttft:500ms,itl:50ms"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [URL] [options]"
    parser.epilog = EXAMPLES
    add_server_word(parser, "a running server, Octavo's or another with OpenAI's API")
    parser.add_argument("--model", metavar="NAME", help="the model's name on the server (default: its only one)")
    add_target_flags(parser)
    add_workload_flags(parser, "chosen lengths", "requests arrive at its times, unless --request-rate is given")
    group = parser.add_argument_group("arrivals")
    text = "requests per second on average, a Poisson process; inf: all at once (default: inf, or the times of a trace)"
    group.add_argument("--request-rate", type=_above_zero(may_be_infinite=True), metavar="X", help=text)
    text = "replay a trace this many times faster (default: 1)"
    group.add_argument("--speedup", type=_above_zero(may_be_infinite=False), metavar="X", help=text)
    group.add_argument("--concurrency", type=count, metavar="N", help="maximum number of requests at the same time (default: no limit)")
    group.add_argument("--seed", type=int, metavar="N", default=0, help="seed of random ids, lengths and arrivals (default: 0)")
    text = f"random ids are below this number (default: {DEFAULT_VOCABULARY})"
    group.add_argument("--vocab-size", type=count, metavar="N", default=DEFAULT_VOCABULARY, help=text)
    text = "limits for goodput, such as ttft:500ms,itl:50ms; also tpot and e2e. itl is for every gap between tokens, tpot for their average"
    parser.add_argument("--slo", type=slo, metavar="BOUNDS", help=text)


def run(args: argparse.Namespace) -> int:
    check_choice(args)
    if args.speedup is not None and (args.trace is None or args.request_rate is not None):
        args.fail("--speedup needs --trace, without --request-rate")
    check_targets(args)
    SamplingParams(temperature=args.temperature)
    if args.load is None and args.trace is None:
        args.num_prompts = args.num_prompts or DEFAULT_PROMPTS
    make = maker(args, args.vocab_size, args.seed)
    url = server_url(args, args.server) or DEFAULT_URL
    with asyncio.Runner() as runner, open_remote(url, args.api_key) as server:
        model = runner.run(server.model(args.model))
        longest = model.max_model_len or MOST
        runner.run(probe(server, model.name, args.vocab_size - 1))
        workloads = make(longest, lambda: _RemoteTokenizer(runner, server, model.name))
        for workload in workloads:
            check_fits(workload.name, workload.longest, longest)
        loads = [Load(one, _due(args, one), model.name, args.concurrency, args.temperature) for one in workloads]
        results = [_measured(runner, server, load, args) for load in loads]
    facts = (*FACTS, "clipped") if any(workload.clipped for workload in workloads) else FACTS
    head = "times are over all requests that were answered; throughput counts to the end of the last"
    verdict = "; ".join(f"{result.name}: {_rates(result)}" for result in results)
    shown = Shown(verdict, head, by_result(results, facts, ROWS), _panels(results))
    publish(args, "serve", client_here(model.name, str(server.address)), results, shown)
    return 0


def _measured(runner: asyncio.Runner, server: RemoteServer, load: Load, args: argparse.Namespace) -> Result:
    seconds, requests = runner.run(drive(server, load))
    result = result_of(load, seconds, requests, args.slo)
    for failure in failures(requests):
        print(f"{load.workload.name}: {failure}", file=sys.stderr)
    got, wanted = result.facts["output_tokens"], result.facts["output_tokens_wanted"]
    if not result.facts["failed"] and got != wanted:
        print(f"{load.workload.name}: {got:,} tokens came, but {wanted:,} were requested; does it support ignore_eos?", file=sys.stderr)
    return result


def _due(args: argparse.Namespace, workload: Workload) -> list[float]:
    if args.trace is not None and args.request_rate is None:
        return replayed(args.trace, workload.arrivals, args.speedup or 1.0)
    return poisson(len(workload.requests), math.inf if args.request_rate is None else args.request_rate, args.seed)


class _RemoteTokenizer:
    """The tokenizer of the server, over /tokenize. vLLM has this route too, OpenAI's API does not."""

    def __init__(self, runner: asyncio.Runner, server: RemoteServer, model: str) -> None:
        self._runner = runner
        self._server = server
        self._model = model

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        body: dict[str, object] = {"model": self._model, "prompt": text, "add_special_tokens": add_special_tokens}
        try:
            return list(self._runner.run(self._server.post("/tokenize", body))["tokens"])
        except (RemoteError, TypeError, KeyError) as error:
            raise RemoteError(f"a load of text needs the server's /tokenize ({error}); choose lengths with --input-len") from error


def _rates(result: Result) -> str:
    found = [(name, result.figures[name]) for name in ("output_throughput", "goodput") if name in result.figures]
    return ", ".join(f"{words(name)} {number(figure.statistic('median'))} {figure.unit}" for name, figure in found)


def _panels(results: list[Result]) -> list[Panel]:
    """Returns a panel of throughput with a bar for each workload, and a panel for each time with a bar for each statistic."""
    rate = [(result.name, result.figures["output_throughput"]) for result in results]
    values = [(name, figure.statistic("median")) for name, figure in rate]
    panels = [Panel(heading("output_throughput", rate[0][1]), [Bar(name, value, value, value) for name, value in values])]
    for result in results:
        for name in TIMES:
            if figure := result.figures.get(name):
                title = heading(name, figure) if len(results) == 1 else f"{result.name}: {heading(name, figure)}"
                shown = [(statistic, figure.statistic(statistic)) for statistic in STATISTICS]
                panels.append(Panel(title, [Bar(statistic, value, value, value) for statistic, value in shown]))
    return panels


def _above_zero(may_be_infinite: bool) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not value > 0 or (math.isinf(value) and not may_be_infinite):
            raise argparse.ArgumentTypeError(f"must be a number above 0{', or inf' if may_be_infinite else ''}, got {text!r:.40}")
        return value

    return convert
