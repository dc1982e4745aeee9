"""One decode step of few rows on a GPU, checked and timed: `python bench/gpu_few.py [--model 0.6B|8B] [--seconds 60]`.

Checks small models of odd sizes against the twins, then 1,000 decode steps with dependent launch against as many without, bit for
bit. Then, for random weights of a shape: the step as one CUDA graph with and without dependent launch, tiles tried one kernel at
a time in whole steps (coordinate descent, so many seconds), the best of them, and each kernel alone over the weights of all layers.
Times are medians of replays. A choice that fails is named and passed over. `--tiny` is for the interpreter: the checks alone.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from octavo.attention.backend import Rope, load_backend
from octavo.attention.forward_batch import ForwardBatch
from octavo.comm.comm import NullComm
from octavo.kernels.reference import attention as plain_attention
from octavo.kernels.reference import layer as plain
from octavo.kernels.reference import sampling as plain_sampling
from octavo.kernels.triton.attention import fused_decode
from octavo.kernels.triton.gemv import products
from octavo.kernels.triton.gemv.tiles import DecodeTiles, ProductTiles, decode_tiles, merge_tiles, product_tiles
from octavo.kernels.triton.sampling import sample as sampling
from octavo.model_config import RopeConfig
from octavo.models.dense import DenseModel
from octavo.models.dense_family import DenseConfig, dense_config
from octavo.models.description import NormShape

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BLOCK = 16
CONTEXTS = (384, 2000)


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    family: str = "Qwen3"

    def config(self) -> DenseConfig:
        return dense_config({
            "architecture": f"{self.family}ForCausalLM", "vocab_size": self.vocab, "hidden_size": self.hidden, "inner": self.intermediate,
            "num_layers": self.layers, "num_heads": self.heads, "num_kv_heads": self.kv_heads, "head_dim": self.head_dim,
            "max_position": 4096, "norm": NormShape(1e-6), "rope": RopeConfig(theta=1e6), "tie_embeddings": self.tied,
            "qkv_bias": self.family == "Qwen2", "output_bias": False, "mlp_bias": False, "dtype": None, "eos_token_ids": (),
            "qk_norm": "heads" if self.family == "Qwen3" else None, "bos_token_id": None,
        })  # fmt: skip


SHAPES = {
    "0.6B": Shape(1024, 3072, 28, 16, 8, 128, 151_936, tied=True),
    "8B": Shape(4096, 12_288, 36, 32, 8, 128, 151_936, tied=False),
}
SMALL = [
    (Shape(576, 1536, 2, 9, 3, 64, 4000, tied=True, family="Llama"), torch.bfloat16),
    (Shape(896, 4864, 2, 14, 2, 64, 3001, tied=True, family="Qwen2"), torch.bfloat16),
    (Shape(2560, 9728, 2, 32, 8, 128, 5000, tied=True), torch.float16),
    (Shape(320, 768, 2, 6, 2, 64, 999, tied=False), torch.float32),
]
TINY = [(Shape(48, 80, 2, 6, 2, 16, 99, tied=False, family="Qwen2"), torch.float32)]


@dataclass
class Kernels:
    """The Triton kernels with chosen tiles."""

    pdl: bool = True
    tiles: dict[str, Any] = field(default_factory=dict)

    def norm_linear(self, *given: Any) -> tuple[Tensor, Tensor]:
        return products.norm_linear(*given, tiles=self.tiles.get("qkv"), pdl=self.pdl)

    def decode_attention_parts(self, *given: Any) -> tuple[Tensor, Tensor]:
        return fused_decode.decode_attention_parts(*given, tiles=self.tiles.get("decode"), pdl=self.pdl)

    def merge_linear(self, *given: Any) -> Tensor:
        return products.merge_linear(*given, tiles=self.tiles.get("merge"), pdl=self.pdl)

    def norm_gate_up(self, *given: Any) -> tuple[Tensor, Tensor]:
        return products.norm_gate_up(*given, tiles=self.tiles.get("gate_up"), pdl=self.pdl)

    def linear(self, *given: Any) -> Tensor:
        return products.linear(*given, tiles=self.tiles.get("down"), pdl=self.pdl)

    def head(self, *given: Any) -> tuple[Tensor, Tensor]:
        return products.head(*given, tiles=self.tiles.get("head"), pdl=self.pdl)

    sample = staticmethod(sampling.sample)


class Twins:
    norm_linear, norm_gate_up = staticmethod(plain.norm_linear), staticmethod(plain.norm_gate_up)
    merge_linear = staticmethod(plain.merge_linear)
    linear, head, sample = staticmethod(plain.linear), staticmethod(plain.head), staticmethod(plain_sampling.sample)
    decode_attention_parts = staticmethod(plain_attention.decode_attention_parts)


class Bench:
    """A model of random weights, rows of one context over a shuffled pool, and the tensors of a step."""

    def __init__(self, shape: Shape, dtype: torch.dtype, rows: int, context: int, max_len: int) -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = DenseModel(shape.config(), dtype, load_backend("cpu"), NullComm(), max_len)
            for name, parameter in self.model.named_parameters():
                parameter.normal_().mul_(parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1)
                if name.endswith("norm.weight"):
                    parameter.add_(1)
            for layer in self.model.layers:
                layer.attention.rope = Rope(layer.attention.rope.cos.to(DEVICE), layer.attention.rope.sin.to(DEVICE))
            self.shape, self.dtype, self.width = shape, dtype, -(-max_len // BLOCK)
            self.caches = [
                {name: torch.randn(4 * self.width + 1, BLOCK, shape.kv_heads, shape.head_dim, dtype=dtype) for name in "kv"}
                for _ in range(shape.layers)
            ]
            self.pool = torch.randperm(4 * self.width).view(4, -1).int() + 1
            self.set(rows, context)

    def set(self, rows: int, context: int) -> None:
        with torch.device(DEVICE):
            self.rows = rows
            self.tokens = torch.randint(0, self.shape.vocab, (rows,))
            self.batch = ForwardBatch(
                token_ids=self.tokens, cache_index=torch.zeros(rows, dtype=torch.int32),
                positions=torch.zeros(1, rows, dtype=torch.int32), rows=torch.arange(rows),
                query_start=torch.arange(rows + 1), context_len=torch.zeros(rows, dtype=torch.int32), tables=self.pool[:rows],
                slots=torch.zeros(rows, dtype=torch.int64), sample_index=torch.arange(rows),
                caches=self.caches, block_size=BLOCK,
            )  # fmt: skip
            self.temperature = torch.zeros(rows)
            self.noise = torch.randint(0, 2**31, (rows, 4), dtype=torch.int64)
            self.zeros = torch.zeros(rows, self.shape.hidden, dtype=self.dtype)
        self.place(context)

    def place(self, context: int) -> None:
        """Places the new token of each row at the end of its context. The lengths of rows differ a little."""
        self.batch.context_len.copy_(context - torch.arange(self.rows, dtype=torch.int32))
        self.follow()

    def follow(self) -> None:
        """Computes positions and slots from lengths."""
        last = self.batch.context_len.long() - 1
        self.batch.cache_index.copy_(last)
        self.batch.positions.copy_(last)
        blocks = self.batch.tables.gather(1, last[:, None] // BLOCK)[:, 0].long()
        self.batch.slots.copy_(blocks * BLOCK + last % BLOCK)

    def step(self, kernels: Any) -> tuple[Tensor, Tensor]:
        model = self.model
        x, residual = F.embedding(self.tokens, model.embed.weight), self.zeros
        for layer in model.layers:
            own, norm, mlp_norm = layer.attention, layer.attention_norm, layer.mlp_norm
            qkv, residual = kernels.norm_linear(x, residual, norm.weight, norm.eps, own.qkv.weight, own.qkv.bias)
            x = kernels.merge_linear(*self.attend(layer, qkv, kernels), own.output.weight, own.output.bias)
            gated, residual = kernels.norm_gate_up(x, residual, mlp_norm.weight, mlp_norm.eps, layer.mlp.gate_up.weight)
            x = kernels.linear(gated, layer.mlp.down.weight, layer.mlp.down.bias)
        logits, hidden = kernels.head(x, residual, model.norm.weight, model.norm.eps, model.head.matrix.weight)
        self.tokens.copy_(kernels.sample(logits, self.temperature, self.noise, self.batch.rope_positions))
        return logits, hidden

    def attend(self, layer: Any, qkv: Tensor, kernels: Any) -> tuple[Tensor, Tensor]:
        own, batch = layer.attention, self.batch
        norms = None if own.norms is None else (own.norms.q_weight, own.norms.k_weight, own.norms.eps)
        place = batch.rope_positions, batch.slots, batch.tables, batch.context_len
        cache, spec, attend = batch.caches[layer.layer], own.backend.spec, kernels.decode_attention_parts
        parts: tuple[Tensor, Tensor] = attend(
            qkv, norms, own.rope.cos, own.rope.sin, *place, cache["k"], cache["v"], spec.scale, spec.window
        )
        return parts

    def graph(self, run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph

    def microseconds(self, kernels: Any, milliseconds: int = 100) -> float:
        return replay_time(self.graph(lambda: self.step(kernels)), milliseconds)

    @property
    def weight_bytes(self) -> int:
        embedding = 0 if self.shape.tied else self.model.embed.weight.nbytes
        return sum(parameter.nbytes for parameter in self.model.parameters()) - embedding


def replay_time(graph: torch.cuda.CUDAGraph, milliseconds: int = 100) -> float:
    return float(triton.testing.do_bench(graph.replay, warmup=20, rep=milliseconds, return_mode="median")) * 1e3


def distance(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def check(cases: list[tuple[Shape, torch.dtype]]) -> int:
    """Compares small models with their twins over a few steps, and prints the worst error. Returns how many fail."""
    failed = 0
    for shape, dtype in cases:
        for rows, context in ((1, 5), (2, 70), (3, 900), (4, 300))[: None if ON_GPU else 2]:
            try:
                worst = _compare(shape, dtype, rows, context)
            except Exception as error:
                print(f"check {shape} {dtype} {rows} rows: {type(error).__name__}: {error}", flush=True)
                failed += 1
                continue
            good = worst <= (1e-4 if dtype == torch.float32 else 2e-2)
            failed += not good
            name = f"{shape.family} {shape.hidden}/{shape.intermediate}, {shape.heads}/{shape.kv_heads} heads of {shape.head_dim}"
            print(f"check {name}, {dtype}, {rows} rows x {context}: {'ok' if good else 'WRONG'} {worst:.1e}", flush=True)
    return failed


def _compare(shape: Shape, dtype: torch.dtype, rows: int, context: int) -> float:
    bench = Bench(shape, dtype, rows, context, 1024 if ON_GPU else 96)
    before = [{name: buffer.clone() for name, buffer in cache.items()} for cache in bench.caches]
    tokens, results = bench.tokens.clone(), []
    if rows > 1:
        bench.batch.context_len[-1] = 0  # padding
    for kernels in (Kernels(), Twins()):
        for cache, old in zip(bench.caches, before):
            for name, buffer in cache.items():
                buffer.copy_(old[name])
        bench.tokens.copy_(tokens)
        logits, hidden = bench.step(kernels)
        results.append([logits, hidden, *(cache[name] for cache in bench.caches for name in "kv")])
        results[-1] = [tensor.clone() for tensor in results[-1]]
    return max(distance(got, exact) for got, exact in zip(*results))


def race(bench: Bench, steps: int = 1000) -> bool:
    """Whether so many steps over a growing cache give the same bits with dependent launch as without it."""
    start = 300
    seen: list[Tensor] = []
    tokens = bench.tokens.clone()
    for pdl in (False, True):
        kernels, kept = Kernels(pdl), torch.empty(steps, bench.rows, bench.shape.hidden, dtype=bench.dtype, device=DEVICE)
        number = torch.zeros(1, dtype=torch.int64, device=DEVICE)

        def run(kernels: Kernels = kernels, kept: Tensor = kept, number: Tensor = number) -> None:
            _, hidden = bench.step(kernels)
            kept.index_copy_(0, number, hidden[None])
            number.add_(1)
            bench.batch.context_len.add_(1)
            bench.follow()

        bench.place(start)
        graph = bench.graph(run)
        bench.place(start)
        bench.tokens.copy_(tokens)
        number.zero_()
        for _ in range(steps):
            graph.replay()
        torch.cuda.synchronize()
        seen.append(kept)
    different = int((seen[0] != seen[1]).any(-1).any(-1).sum())
    print(f"race: {steps} steps of {bench.rows} rows, {different} differ with dependent launch", flush=True)
    return different == 0


def choices(bench: Bench) -> Iterator[tuple[str, list[Any]]]:
    """Yields tiles to try for each kernel: (columns, warps, turns). All turns above 1 share one program, so they need not be compiled."""
    small = bench.shape.hidden <= 2048

    def products(*tried: tuple[int, int, int]) -> list[ProductTiles]:
        return [ProductTiles(*one) for one in tried]

    decode = [(64, 4, 8, 128), (64, 4, 8, 64), (64, 4, 16, 64), (64, 4, 16, 128), (64, 4, 4, 128), (32, 4, 8, 64), (32, 4, 16, 64)]
    decode += [(64, 8, 8, 64), (128, 8, 8, 128), (128, 8, 16, 128), (32, 2, 16, 64)]
    yield "decode", [DecodeTiles(keys, warps, max(few, 8), few, share, 512) for keys, warps, few, share in decode]
    if small:
        yield "gate_up", products((4, 4, 1), (2, 4, 1), (8, 8, 1), (4, 8, 1), (2, 4, 2), (2, 4, 4), (4, 4, 2), (4, 8, 2), (8, 4, 1))
        yield "qkv", products((4, 4, 1), (8, 8, 1), (16, 8, 1), (2, 4, 1), (4, 4, 2), (2, 4, 2), (2, 4, 4))
        yield "down", products((2, 4, 1), (2, 8, 1), (4, 8, 1), (1, 4, 1), (4, 16, 1), (1, 4, 2), (2, 8, 2))
        yield "merge", products((2, 4, 1), (4, 8, 1), (8, 8, 1), (8, 4, 1))
        yield "head", products((4, 4, 1), (16, 8, 1), (16, 4, 1), (4, 4, 8), (4, 4, 32), (8, 4, 8), (8, 8, 16))
    else:
        yield "gate_up", products((1, 4, 1), (1, 8, 1), (1, 4, 4), (1, 4, 8), (1, 4, 16), (1, 8, 8), (1, 8, 16), (2, 8, 4), (2, 4, 1))
        yield "down", products((1, 8, 1), (1, 16, 1), (1, 16, 4), (1, 16, 8), (2, 16, 1), (1, 8, 4), (1, 8, 8))
        yield "qkv", products((2, 4, 1), (2, 8, 1), (4, 8, 1), (1, 4, 8), (2, 8, 4), (2, 8, 8))
        yield "merge", products((2, 4, 1), (2, 8, 1), (4, 8, 1), (1, 4, 1))
        yield "head", products((2, 4, 1), (4, 8, 1), (2, 8, 4), (2, 8, 16), (2, 8, 64), (1, 4, 16))


def defaults(bench: Bench) -> dict[str, Any]:
    shape, padded = bench.shape, triton.next_power_of_2
    return {
        "qkv": product_tiles(padded(shape.hidden), (shape.heads + 2 * shape.kv_heads) * shape.head_dim, False),
        "decode": decode_tiles(bench.dtype, bench.rows, bench.width * BLOCK, shape.head_dim, shape.heads, shape.kv_heads),
        "merge": merge_tiles(padded(shape.heads * shape.head_dim), bench.rows),
        "gate_up": product_tiles(padded(shape.hidden), shape.intermediate, True),
        "down": product_tiles(padded(shape.intermediate), shape.hidden, False),
        "head": product_tiles(padded(shape.hidden), shape.vocab, False),
    }


def sweep(bench: Bench, seconds: float) -> Kernels:
    """Returns the best tiles, found by coordinate descent in whole steps. The context of attention is the mean of both."""
    deadline = time.monotonic() + seconds
    best = Kernels(tiles=defaults(bench))

    def cost(kernels: Kernels, contexts: tuple[int, ...]) -> float:
        total = 0.0
        for context in contexts:
            bench.place(context)
            total += bench.microseconds(kernels, 60 if bench.shape.hidden <= 2048 else 120)
        return total / len(contexts)

    for name, tiles in choices(bench):
        contexts = CONTEXTS if name == "decode" else CONTEXTS[:1]
        found = [(cost(best, contexts), best.tiles[name])]
        for choice in tiles:
            if time.monotonic() > deadline:
                print(f"{name}: time is up", flush=True)
                break
            try:
                found.append((cost(replace(best, tiles={**best.tiles, name: choice}), contexts), choice))
            except Exception as error:
                print(f"{name} {choice}: {type(error).__name__} {str(error).strip().splitlines()[-1:]}", flush=True)
        start = found[0][0]
        found.sort(key=lambda one: one[0])
        best = replace(best, tiles={**best.tiles, name: found[0][1]})
        print(f"{name:8s} {start:7.1f} us by rule; " + "; ".join(f"{spent:.1f} {_short(tiles)}" for spent, tiles in found[:4]), flush=True)
    return best


def _short(tiles: Any) -> str:
    if isinstance(tiles, ProductTiles):
        return f"{tiles.columns}c {tiles.warps}w {tiles.turns}t"
    return f"{tiles.keys}k {tiles.warps}w {tiles.few_splits}/{tiles.splits}s {tiles.least_share}-{tiles.long_share}"


def alone(bench: Bench, kernels: Kernels, context: int) -> None:
    """Times each kernel alone, over the weights of all layers. In a step more of them overlap."""
    bench.place(context)
    model, batch, shape = bench.model, bench.batch, bench.shape
    rows, like = bench.rows, {"dtype": bench.dtype, "device": DEVICE}
    x, wide = torch.randn(rows, shape.hidden, **like), torch.randn(rows, shape.intermediate, **like)
    qkv = torch.randn(rows, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, **like)

    def decode(layer: Any) -> tuple[Tensor, Tensor]:
        own = layer.attention
        norms = (own.norms.q_weight, own.norms.k_weight, own.norms.eps)
        place = batch.rope_positions, batch.slots, batch.tables, batch.context_len
        cache = batch.caches[layer.layer]
        return kernels.decode_attention_parts(qkv, norms, own.rope.cos, own.rope.sin, *place, cache["k"], cache["v"], 0.1, None)

    parts = decode(model.layers[0])
    runs: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Tensor | None]]] = {
        "qkv": (lambda own: kernels.norm_linear(x, x, own.attention_norm.weight, 1e-6, own.attention.qkv.weight, None),
                lambda own: own.attention.qkv.weight),
        "decode": (decode, lambda own: None),
        "merge": (lambda own: kernels.merge_linear(*parts, own.attention.output.weight, None), lambda own: own.attention.output.weight),
        "gate_up": (lambda own: kernels.norm_gate_up(x, x, own.mlp_norm.weight, 1e-6, own.mlp.gate_up.weight),
                    lambda own: own.mlp.gate_up.weight),
        "down": (lambda own: kernels.linear(wide, own.mlp.down.weight, None), lambda own: own.mlp.down.weight),
    }  # fmt: skip
    cache_bytes = 2 * rows * context * shape.kv_heads * shape.head_dim * bench.dtype.itemsize
    said = []
    for name, (run, weight_of) in runs.items():
        spent = replay_time(bench.graph(lambda run=run: [run(layer) for layer in model.layers])) / shape.layers
        weight = weight_of(model.layers[0])
        said.append(f"{name} {spent:.2f} us {(cache_bytes if weight is None else weight.nbytes) / spent / 1e6:.2f} TB/s")
    spent = replay_time(bench.graph(lambda: kernels.head(x, x, model.norm.weight, 1e-6, model.head.matrix.weight)))
    said.append(f"head {spent:.1f} us {model.head.matrix.weight.nbytes / spent / 1e6:.2f} TB/s")
    logits = torch.randn(rows, shape.vocab, **like)
    spent = replay_time(bench.graph(lambda: sampling.sample(logits, bench.temperature, bench.noise, batch.rope_positions)))
    said.append(f"sample {spent:.1f} us")
    print(f"alone, pdl={kernels.pdl}, {context}: " + ", ".join(said), flush=True)


def measure(name: str, seconds: float) -> bool:
    bench = Bench(SHAPES[name], torch.bfloat16, 1, CONTEXTS[0], 4096)
    print(f"--- {name}: {bench.weight_bytes / 1e9:.2f} GB of weights", flush=True)
    good = race(bench) if bench.shape.hidden <= 2048 else race(bench, 200)

    def report(kernels: Kernels, title: str) -> None:
        for context in CONTEXTS:
            bench.place(context)
            spent = {on: bench.microseconds(replace(kernels, pdl=on), 200) for on in (False, True)}
            rate = bench.weight_bytes / spent[True] / 1e6
            print(f"{name} {bench.rows} rows x {context}, {title}: {spent[False]:.0f} us plain, {spent[True]:.0f} us pdl = "
                  f"{bench.rows * 1e6 / spent[True]:.0f} tok/s, {rate:.2f} TB/s", flush=True)  # fmt: skip

    report(Kernels(), "tiles by rule")
    alone(bench, Kernels(pdl=False), CONTEXTS[0])
    best = sweep(bench, seconds)
    report(best, "best tiles")
    for on in (False, True):
        alone(bench, replace(best, pdl=on), CONTEXTS[0])
    alone(bench, best, CONTEXTS[1])
    print(f"{name} best: {best.tiles}", flush=True)
    for rows in (2, 4):
        bench.set(rows, CONTEXTS[0])
        report(Kernels(), "tiles by rule")
    return good


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(SHAPES), help="one shape; else both")
    parser.add_argument("--seconds", type=float, default=60, help="of trying tiles, each shape")
    parser.add_argument("--tiny", action="store_true", help="a small check, for the interpreter")
    options = parser.parse_args(arguments)
    with torch.inference_mode():
        failed = check(TINY if options.tiny else SMALL)
        if not options.tiny:
            for name in [options.model] if options.model else SHAPES:
                failed += not measure(name, options.seconds)
    print(f"{failed} failed" if failed else "all agree with their twins")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
