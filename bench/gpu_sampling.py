"""Sampling on a GPU beyond the graph, checked against its twins and timed: `python bench/gpu_sampling.py [--sweep] [--tiny]`.

First the checks: rows of all kinds are drawn, ranked and adjusted as by the twins, which run on the CPU. A drawn id may differ
where float64 arithmetic with a little slack allows both: those are counted. Then what each kernel of a draw takes, and the table:
microseconds on the device (a CUDA graph replayed) and of the host for launching it. `--sweep` does neither, but draws with other
tilings, checks each against the twin too and tells what some draws and the kernels of the last take, the best first. `--tiny` is for the
interpreter: small sizes, times without meaning.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import numpy as np
import torch
import triton
from torch import Tensor

from octavo.kernels.reference import sampling as plain_sampling
from octavo.kernels.reference.philox import uniform
from octavo.kernels.reference.sampling import Draws
from octavo.kernels.triton.sampling.draw import TILING, Tiling, draw
from octavo.kernels.triton.sampling.logit_edits import edit_logits
from octavo.kernels.triton.sampling.rank import rank
from octavo.sampling_params import SamplingParams
from octavo.step.logit_edits import pack, unpack
from octavo.worker.kernel_calls import kernel_keys

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SLACK = 1e-5
SECONDS = 55  # no case begins later
FILTERS = {  # top_k, top_p, min_p
    "temperature": (0, 1.0, 0.0),
    "top_k 50": (50, 1.0, 0.0),
    "top_p 0.9": (0, 0.9, 0.0),
    "top_k 50, top_p 0.9": (50, 0.9, 0.0),
    "min_p 0.05": (0, 1.0, 0.05),
}
TILINGS = [
    TILING,
    *(replace(TILING, programs=programs) for programs in (1024, 4096, 2**20)),
    *(replace(TILING, gather_warps=warps, weigh_warps=warps) for warps in (2, 8)),
    *(replace(TILING, survey_warps=warps) for warps in (4, 16)),
    replace(TILING, tile=1024, gather_warps=2, weigh_warps=2),
    replace(TILING, tile=1024, gather_warps=2, weigh_warps=2, programs=4096),
    replace(TILING, tile=4096, gather_warps=8, weigh_warps=8),
]
WIDE = {"top_k 5000": (5000, 1.0, 0.0), "top_k 5000, top_p 0.9": (5000, 0.9, 0.0), "all three": (100, 0.95, 0.001)}


def rows_of(kind: str, rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(len(kind) + rows)
    logits = torch.randn(rows, vocab, generator=generator)
    if kind == "random":
        logits *= 3
    if kind == "peaked":
        logits *= 2
        logits[:, 7::1001] += 14 * torch.rand(rows, 1, generator=generator)
    if kind == "ties":
        logits = logits.mul_(2).round_()
    if kind == "equal":
        logits[:] = 1.5
    if kind == "masked":
        logits[:, 3:] = -torch.inf
    return logits.to(dtype)


def draws_of(filters: list[tuple[int, float, float]], rows: int) -> Draws:
    """Returns draws that take the filters in turn."""
    chosen = [filters[row % len(filters)] for row in range(rows)]
    generator = torch.Generator().manual_seed(rows)
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*chosen, strict=True))
    noise = torch.randint(0, 2**32, (rows, 4), generator=generator)
    return Draws(torch.full((rows,), 0.8), top_k, top_p.float(), min_p.float(), noise, torch.arange(rows) + 40)


def there(draws: Draws) -> Draws:
    return Draws(*(getattr(draws, field.name).to(DEVICE) for field in fields(draws)))


def excused(logits: Tensor, draws: Draws, row: int, found: int) -> bool:
    """Whether an id is as right as the expected one within the precision of float32."""
    some = draws.take(torch.tensor([row]))
    distance = plain_sampling.distances(logits[row : row + 1].float(), some.temperature)
    ids = np.argsort(distance[0].numpy(), kind="stable")
    mass = np.exp(-distance[0].double().numpy()[ids])
    score = (-torch.log(-torch.log(uniform(some.noise, some.positions, logits.shape[1]).double())) - distance.double())[0].numpy()[ids]
    kept = []
    for slack in (-SLACK, SLACK):
        keep = mass >= float(some.min_p) * (1 - slack)
        keep &= (np.arange(len(ids)) < int(some.top_k)) | (int(some.top_k) == 0)
        total = (mass * keep).sum()
        before = (mass * keep).cumsum() - mass * keep
        keep &= (before < (float(some.top_p) + slack) * total) | (float(some.top_p) >= 1)
        keep[0] = True
        kept.append(keep)
    best = score[kept[0]].max()
    mine = int(np.nonzero(ids == found)[0][0])
    return bool(kept[1][mine] and score[mine] >= best - SLACK * max(1, abs(best)))


def check_draw(kind: str, vocab: int, dtype: torch.dtype, rows: int, tiling: Tiling = TILING) -> str:
    logits, draws = rows_of(kind, rows, vocab, dtype), draws_of([*FILTERS.values(), *WIDE.values()], rows)
    found, expected = draw(logits.to(DEVICE), there(draws), tiling).cpu(), plain_sampling.draw(logits, draws)
    differing = (found != expected).nonzero().flatten().tolist()
    wrong = [row for row in differing if not excused(logits, draws, row, int(found[row]))]
    return f"{len(differing) - len(wrong)} near ties" if not wrong else f"WRONG rows {wrong[:8]}"


def check_broken(vocab: int, rows: int) -> str:
    logits, draws = rows_of("random", rows, vocab, torch.float32), draws_of([*FILTERS.values(), *WIDE.values()], rows)
    whole = draw(logits.to(DEVICE), there(draws)).cpu()
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = logits.clone()
        broken[::2] = bad
        broken[::4, ::3] = 0.5
        found = draw(broken.to(DEVICE), there(draws)).cpu()
        if not ((found >= 0) & (found < vocab)).all() or not torch.equal(found[1::2], whole[1::2]):
            return f"WRONG with {bad}"
    return "ok"


def check_rank(kind: str, vocab: int, dtype: torch.dtype, rows: int, count: int) -> str:
    logits = rows_of(kind, rows, vocab, dtype)
    ids = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(1))
    found, expected = rank(logits.to(DEVICE), ids.to(DEVICE), count), plain_sampling.rank(logits, ids, count)
    for name in ("chosen", "ranks", "near", "near_ids"):
        if not torch.equal(getattr(found, name).cpu(), getattr(expected, name)):
            return f"WRONG {name}"
    off = ((found.totals.cpu() - expected.totals).double() / expected.totals).abs().max()
    return "ok" if off < 2e-6 else f"WRONG totals by {off:.1e}"


class Asking:
    """Rows of ids whose requests use all logit edits, each with other values."""

    def __init__(self, rows: int, vocab: int, length: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.token_ids = torch.randint(0, min(vocab, 3 * length), (rows, length + 1), generator=generator).int()
        self.num_prompt, self.positions = torch.full((rows,), length // 2).int(), [length] * rows
        params = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.3, min_tokens=length, max_tokens=None)
        some = SamplingParams(allowed_token_ids=list(range(5, vocab, 7)), logit_bias={5: 2.0, 12: -1.5, 13: 9.0}, frequency_penalty=0.5)
        words = [[int(self.token_ids[0, length - 1]), 9], [11]]
        packed = [pack(params, (3, 4), words) if row % 8 < 7 else pack(some, (5,), words) for row in range(rows)]
        self.packed = packed

    def edit_logits(self, logits: Tensor, kernel: Callable[..., Tensor], device: str) -> Callable[[], Tensor]:
        every = list(range(len(self.packed)))
        step = len(self.token_ids[0])
        token_ids, num_prompt = torch.stack([self.token_ids, self.num_prompt[:, None].expand(-1, step)]).contiguous().to(device)
        edits = [unpack(one) if kernel is plain_sampling.edit_logits else torch.from_numpy(one).to(device) for one in self.packed]
        return lambda: kernel(logits, every, every, self.positions, edits, token_ids, num_prompt[:, 0])


def check_edits(vocab: int, dtype: torch.dtype, rows: int, length: int) -> str:
    logits, asking = rows_of("random", rows, vocab, dtype), Asking(rows, vocab, length)
    found = asking.edit_logits(logits.to(DEVICE), edit_logits, DEVICE)().cpu()
    expected = asking.edit_logits(logits, plain_sampling.edit_logits, "cpu")()
    return "ok" if torch.allclose(found, expected, rtol=1e-6, atol=1e-6) else f"WRONG by {(found - expected).abs().nan_to_num().max():.1e}"


def checks(tiny: bool) -> Iterator[tuple[str, Callable[[], str]]]:
    vocab, rows = (5000, 8) if tiny else (151_936, 16)
    for kind in ("flat",) if tiny else ("random", "peaked", "flat", "ties", "equal", "masked"):
        for dtype in (torch.bfloat16,) if tiny else (torch.bfloat16, torch.float32):
            yield f"draw {kind} {dtype}", lambda k=kind, d=dtype: check_draw(k, vocab, d, rows)
    yield "draw broken", lambda: check_broken(vocab, 2 if tiny else rows)
    for kind in ("ties",) if tiny else ("random", "ties", "equal", "masked"):
        for count in (5, 1000) if tiny else (0, 5, 20, 63, 1000):
            yield f"rank {kind} {count}", lambda k=kind, c=count: check_rank(k, vocab, torch.bfloat16, rows // 4, c)
    yield "edit_logits", lambda: check_edits(vocab, torch.bfloat16, 8 if tiny else 64, 40 if tiny else 2000)


def microseconds(run: Callable[[], object]) -> tuple[float, float]:
    """Returns the microseconds of the device and of the host for one run."""
    start = time.perf_counter()
    run()
    if not ON_GPU:
        return (time.perf_counter() - start) * 1e6, 0.0
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        run()
    host = (time.perf_counter() - start) * 1e5
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay: Callable[[], object] = graph.replay
    except RuntimeError:  # what uploads cannot be captured
        replay = run
    return float(triton.testing.do_bench(replay, warmup=10, rep=60, return_mode="median")) * 1e3, host


def kernel_times(run: Callable[[], object], runs: int = 5) -> dict[str, float]:
    """Returns the microseconds of each kernel in one run, over all its launches."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            run()
        torch.cuda.synchronize()
    return {event.key.split("(")[0][-24:]: event.device_time_total / runs for event in profile.key_averages() if event.device_time_total}


def by_kernel(rows: int = 256) -> Iterator[str]:
    """Yields a line for each filter."""
    for spread in ("random", "flat"):
        logits = rows_of(spread, rows, 151_936, torch.bfloat16).to(DEVICE)
        for name, filters in FILTERS.items():
            draws = there(draws_of([filters], rows))
            taken = kernel_times(lambda lo=logits, d=draws: draw(lo, d))
            yield f"{spread}, {name}: " + ", ".join(f"{kernel} {time:.1f}" for kernel, time in taken.items())


def sweep(tiny: bool) -> int:
    """Prints a line for each tiling, ordered by the sum of its draws. Returns how many failed."""
    vocab, rows, checked = (5000, 1, 3) if tiny else (151_936, 256, 8)
    logits = rows_of("flat", rows, vocab, torch.bfloat16).to(DEVICE)
    cases = {name: there(draws_of([FILTERS[name]], rows)) for name in ("temperature", "top_k 50", "top_p 0.9")}
    deadline, failed, lines = time.monotonic() + SECONDS, 0, []
    for tiling in TILINGS[:2] if tiny else TILINGS:
        if time.monotonic() > deadline:
            print("time is up, the rest is left out")
            break
        try:
            said = check_draw("flat", vocab, torch.bfloat16, checked, tiling)
            taken = {name: microseconds(lambda d=draws, t=tiling: draw(logits, d, t))[0] for name, draws in cases.items()}
            kernels = kernel_times(lambda t=tiling: draw(logits, cases["top_p 0.9"], t)) if ON_GPU else {}
        except Exception as error:
            print(f"{tiling} FAILED {type(error).__name__}: {str(error).strip().splitlines()[-1:]}", flush=True)
            failed += 1
            continue
        failed += "WRONG" in said
        times = ", ".join(f"{name} {time:.1f}" for name, time in (taken | kernels).items())
        lines.append((sum(taken.values()), f"{tiling}: {said}; {times}"))
    print(*(line for _, line in sorted(lines)), sep="\n", flush=True)
    return failed


def timings(tiny: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    vocab = 5000 if tiny else 151_936
    for rows in (1,) if tiny else (256, 32, 1):
        mixed = {"mixed": list(FILTERS.values())}
        for spread in ("random", "flat"):
            logits = rows_of(spread, rows, vocab, torch.bfloat16).to(DEVICE)
            for name, filters in ({n: [f] for n, f in FILTERS.items()} | mixed).items():
                draws = there(draws_of(filters, rows))
                yield f"draw {rows} {spread}, {name}", lambda lo=logits, d=draws: draw(lo, d)
            if spread == "random":
                ids = torch.arange(rows, device=DEVICE)
                yield f"rank {rows}, 5", lambda lo=logits, i=ids: rank(lo, i, 5)
                yield f"edit_logits {rows}, 2000 ids", Asking(rows, vocab, 40 if tiny else 2000).edit_logits(logits, edit_logits, DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    tiny = arguments.tiny
    if ON_GPU:
        kernel_keys()  # as an engine does before it launches any
    if arguments.sweep:
        sys.exit(sweep(tiny) > 0)
    deadline, failed = time.monotonic() + SECONDS, 0
    for name, check in checks(tiny):
        try:
            said = check()
        except Exception as error:
            traceback.print_exc()
            said = f"FAILED {type(error).__name__}"
        failed += "WRONG" in said or "FAILED" in said
        print(f"{name:28s} {said}", flush=True)
    print(f"{failed} checks failed\n" if failed else "all agree with their twins\n", flush=True)
    try:
        for line in by_kernel() if ON_GPU else ():
            print(line, flush=True)
    except Exception:
        traceback.print_exc()
    for name, run in timings(tiny):
        if time.monotonic() > deadline:
            print("time is up, the rest is left out")
            break
        try:
            device, host = microseconds(run)
            print(f"{name:40s} {device:9.1f} us, host {host:7.1f} us", flush=True)
        except Exception as error:
            print(f"{name:40s} FAILED {type(error).__name__}: {str(error).strip().splitlines()[-1:]}", flush=True)


if __name__ == "__main__":
    main()
