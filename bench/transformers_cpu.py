"""Octavo beside transformers' `generate` on the CPU loads, in one process, one after the other, medians of several rounds.

    python bench/transformers_cpu.py [--loads batch32 single] [--rounds 3] [--dtype bfloat16]

Both run the default model's weights (dequantised), greedy, ending ids ignored, two threads or what the machine gives.
Figures are output tokens a second of one call over the whole load, prefill included; compare the ratio, not the figure.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from octavo import LLM  # noqa: E402
from octavo.bench.measure import run_round  # noqa: E402
from octavo.bench.text import text_ids  # noqa: E402
from octavo.bench.workload import TEXT_LOADS, Workload, text_loads  # noqa: E402
from octavo.loading.resolve import resolve_model  # noqa: E402
from tests.support.smollm2 import reference_smollm2  # noqa: E402


@torch.inference_mode()
def run_transformers(model: Any, workload: Workload) -> float:
    """One left-padded batch, as its users run it; each request is cut at its own length afterwards, so only useful tokens count."""
    load = workload.requests
    longest, count = max(len(ids) for ids, _ in load), max(count for _, count in load)
    padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _ in load])
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in load])
    start = time.perf_counter()
    model.generate(padded, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", default=["batch32"], choices=TEXT_LOADS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    args = parser.parse_args()
    with LLM(dtype=args.dtype) as llm:
        loads = text_loads(text_ids(llm.get_tokenizer()))
        warm_up = Workload("warm-up", [(loads["batch32"].requests[0][0][:64], 4)])
        model = reference_smollm2(resolve_model(None).path).to(getattr(torch, args.dtype))
        run_round(llm, warm_up)
        run_transformers(model, warm_up)
        print(f"{args.dtype}, {torch.get_num_threads()} threads, medians of {args.rounds}; output tokens/s (prefill: input tokens/s)")
        print(f"{'load':12}{'octavo':>12}{'transformers':>16}{'ratio':>10}")
        for name in args.loads:
            load = loads[name]
            tokens = load.input_tokens if name == "prefill" else load.output_tokens
            pairs = [(tokens / run_round(llm, load).seconds, tokens / run_transformers(model, load)) for _ in range(args.rounds)]
            ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            print(f"{name:12}{ours:>12.1f}{theirs:>16.1f}{ratio:>9.2f}x", flush=True)


if __name__ == "__main__":
    main()
