"""Latent attention (MLA) on one NVIDIA GPU, in the shapes of GLM-4.7-Flash, DeepSeek-V2-Lite and V3: `python -m bench.gpu_latent`.

    decode    attention of decode steps at 128 rows x 4,096 tokens, with every choice of tiles; then other numbers of rows
    prompt    attention of a prompt of 8,192 tokens, with every choice of tiles, beside the matrix products of a layer
    loads     whole engines with random weights on published loads, beside the least time that reading and multiplying take

`--parts decode,prompt,loads --models GLM-4.7-Flash,...`. Kernels are compared with the reference first, and each choice of tiles again.
Times are medians of CUDA graphs replayed. `--tiny` is for the interpreter: small sizes, times without meaning.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from bench.gpu_hybrid import MULTIPLIED, READ, random_model
from bench.gpu_kernels import DEVICE, DTYPE, distance, microseconds, random
from octavo.kernels.reference import latent as plain
from octavo.kernels.triton.latent.inputs import expand, write_latent
from octavo.kernels.triton.latent.launch import latent_attention, latent_shares
from octavo.kernels.triton.latent.tiles import LatentTiles, decode_tiles, prefill_tiles
from octavo.kernels.triton.target import SHARED_MEMORY, capability
from octavo.models.description import EXPERT_STACKS, ModelDescription
from octavo.models.registry import describe, read_config

ERROR = 1.5e-2  # relative, of results in 16 bits
BLOCK = 16
COMMON: dict[str, Any] = {
    "hidden_act": "silu", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "GLM-4.7-Flash": COMMON | {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "hidden_size": 2048,
        "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.8, "topk_method": "noaux_tc", "vocab_size": 154880, "rope_theta": 1000000,
    },
    "V2-Lite": COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy", "vocab_size": 102400, "rope_theta": 10000,
    },
    "V3, 4 layers": COMMON | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 4, "hidden_size": 7168,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "vocab_size": 129280, "rope_theta": 10000,
    },
}  # fmt: skip
AIMS = {20: ("TB/s", 3.0, 3.4), 16: ("TB/s", 3.0, 3.4), 128: ("TFLOP/s", 300, 400)}  # by heads: the unit, the aim and the goal


@dataclass(frozen=True)
class Heads:
    """What of a model decides on its attention."""

    heads: int
    plain: int
    values: int
    rank: int = 512
    rotary: int = 64

    @property
    def dim(self) -> int:
        return self.rank + self.rotary

    @property
    def flops(self) -> int:
        """For each pair of a query and a key."""
        return 2 * (self.dim + self.rank) * self.heads

    @staticmethod
    def of(config: dict[str, Any]) -> "Heads":
        return Heads(config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"])


TINY = Heads(3, 16, 16, 32, 16)


class Rows:
    """Rows of one length over a shuffled pool of blocks. The last tokens of each are queries."""

    def __init__(self, of: Heads, rows: int, context: int, queries: int = 1) -> None:
        width = -(-context // BLOCK)
        self.of, self.pairs = of, rows * sum(range(context - queries + 1, context + 1))
        self.tables = (torch.randperm(rows * width, device=DEVICE, dtype=torch.int32) + 1).view(rows, width)
        self.cache = random(rows * width + 1, BLOCK, 1, of.dim)
        self.q = random(rows * queries, of.heads, of.dim)
        self.query_start = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32) * queries
        self.context_len = torch.full((rows,), context, device=DEVICE, dtype=torch.int32)
        self.out = torch.full((rows * queries, of.heads, of.rank), torch.nan, device=DEVICE, dtype=DTYPE)
        self.most, self.bytes = queries, rows * context * of.dim * 2
        self.given = self.q, self.cache, self.tables, self.query_start, self.context_len, of.dim**-0.5, self.out

    def runner(self, tiles: LatentTiles | None = None) -> Any:
        """Work items are found once for a step, not in each layer."""
        own = tiles if self.most == 1 else None
        shares = latent_shares(self.query_start, self.context_len, self.cache, self.of.heads, own)
        return partial(latent_attention, *self.given, self.most, shares, True, tiles)

    def error(self, tiles: LatentTiles | None = None) -> float:
        self.out.fill_(torch.nan)
        found = self.runner(tiles)().clone()
        return distance(found, plain.latent_attention(*self.given[:-1], torch.empty_like(self.out)))


def check(of: Heads) -> bool:
    """Prints the errors of all kernels against the reference."""
    small = of == TINY
    errors = {
        "decode, few rows": Rows(of, 2, 70 if small else 3000).error(),
        "decode, many rows": Rows(of, 3 if small else 300, 30).error(),
        "prompts": Rows(of, 2, 50 if small else 700, 33 if small else 500).error(),
        "inputs": max(Inputs(of, 5).errors()),
    }
    for name, error in errors.items():
        print(f"{of.heads:4} heads, {name:20} {'ok' if error <= ERROR else 'WRONG'}   {error:.1e}", flush=True)
    return all(error <= ERROR for error in errors.values())


class Inputs:
    """What is around attention: the products of each head, and the kernel between them."""

    def __init__(self, of: Heads, tokens: int) -> None:
        self.of = of
        self.q, self.kv = random(tokens, of.heads * (of.plain + of.rotary)), random(tokens, of.dim)
        self.k_up, self.v_up = random(of.heads * of.plain, of.rank), random(of.heads * of.values, of.rank)
        self.norm, angle = (random(of.rank), 1e-6), torch.randn(64, of.rotary // 2, device=DEVICE)
        self.turns, self.positions = (angle.cos(), angle.sin()), torch.arange(tokens, device=DEVICE, dtype=torch.int32) % 64
        self.slots, self.mixed = torch.arange(tokens, device=DEVICE), random(tokens, of.heads, of.rank)
        self.cache = torch.zeros(-(-tokens // BLOCK), BLOCK, 1, of.dim, device=DEVICE, dtype=DTYPE)

    def run(self, write: Any = write_latent, values: Any = expand) -> tuple[Tensor, Tensor]:
        q = write(self.q, self.kv, self.k_up, self.norm, *self.turns, self.positions, self.slots, self.cache)
        return q, values(self.mixed, self.v_up)

    def errors(self) -> list[float]:
        found = *self.run(), self.cache.clone()
        expected = *self.run(plain.write_latent, plain.expand), self.cache
        return [distance(one, other) for one, other in zip(found, expected)]


# -- choices of tiles


def fits(tiles: LatentTiles, of: Heads) -> bool:
    """Whether q and the tiles of keys fit in shared memory, as far as one can tell before they are compiled.

    Two stages are for the table and the product. Products of 64 lines are asynchronous on Hopper, and need one more tile.
    """
    buffers = max((tiles.stages - 1) // 2, 1) + (tiles.lines == 64)
    return (tiles.lines + buffers * tiles.keys) * of.dim * 2 * tiles.programs <= SHARED_MEMORY.get(capability(), 99 * 1024)


def decode_choices(of: Heads) -> Iterator[LatentTiles]:
    """Of lines, keys, warps, stages, programs on a multiprocessor, and work items."""
    lines = [16] if of.heads <= 16 else [32, 64]
    for line, keys, warps, stages, programs in product(lines, (32, 64), (4, 8), (3, 5, 7), (1, 2)):
        if line * 512 // (warps * 32) <= 128 and not (programs == 2 and warps == 8 and line > 16):  # registers
            yield LatentTiles(line, keys, warps, stages, programs)


def prompt_choices() -> Iterator[LatentTiles]:
    for lines, keys, warps, stages in product((32, 64), (32, 64), (4, 8), (2, 3, 5)):
        if lines * 512 // (warps * 32) <= 128 and (lines == 64 or stages == 3):
            yield LatentTiles(lines, keys, warps, stages)


def rate(case: Rows, took: float) -> str:
    return f"{took:9.1f} us {case.bytes / took / 1e6:6.2f} TB/s {case.pairs * case.of.flops / took / 1e6:7.1f} TFLOP/s"


def timed(case: Rows, small: Rows, tiles: LatentTiles, spent: int) -> float | None:
    """Returns the microseconds with these tiles, or None, said why, if they do not run or are wrong."""
    try:
        if (error := small.error(tiles)) > ERROR:
            print(f"  {tiles}   WRONG {error:.1e}", flush=True)
            return None
        return microseconds([case.runner(tiles)], spent)
    except Exception as error:
        print(f"  {tiles}   {type(error).__name__}: {str(error)[:80]}", flush=True)
        return None


def sweep(name: str, case: Rows, small: Rows, choices: list[LatentTiles], own: LatentTiles, spent: int) -> LatentTiles:
    """Times every choice, prints the best ones, and returns the best."""
    found = {}
    for tiles in dict.fromkeys([own, *(one for one in choices if fits(one, case.of))]):
        if (took := timed(case, small, tiles, spent)) is not None:
            found[tiles] = took
    best = sorted(found, key=lambda tiles: found[tiles])
    print(f"{name}: {len(found)} choices of tiles ran; as the engine does: {rate(case, found[own]) if own in found else 'NOT'}", flush=True)
    for tiles in best[:6]:
        print(f"  {rate(case, found[tiles])}   {tiles}", flush=True)
    return best[0] if best else own


def print_decode(name: str, of: Heads, sweeps: bool, tiny: bool) -> None:
    case, small = Rows(of, *((3, 70) if tiny else (128, 4096))), Rows(of, *((2, 40) if tiny else (4, 1000)))
    own, label = decode_tiles(DTYPE, of.heads, capability()), f"{name} decode, {of.heads} heads, {len(case.context_len)} rows"
    best = own
    if sweeps:
        best = sweep(label, case, small, [] if tiny else list(decode_choices(of)), own, 30)
        items = [replace(best, shares=shares, grain=grain) for shares, grain in product((1, 2, 4), (4, 8, 16))]
        best = sweep(f"{label}, work items", case, small, [] if tiny else items, best, 30)
    took = min(microseconds([case.runner(tiles)]) for tiles in (own, best))
    unit, aim, goal = AIMS.get(of.heads, AIMS[20])
    reached = case.bytes / took / 1e6 if unit == "TB/s" else case.pairs * of.flops / took / 1e6
    print(f"{label}: {reached:.2f} {unit}, {reached / aim:.0%} of the aim {aim}, {reached / goal:.0%} of the goal {goal}", flush=True)
    for rows, context in ((2, 33),) if tiny else ((1, 500), (1, 4096), (1, 32768), (8, 4096), (32, 4096), (256, 1024)):
        case = Rows(of, rows, context)
        print(f"{name} decode, {rows:4} rows x {context:6,}   {rate(case, microseconds([case.runner()]))}", flush=True)
    for tokens in (1, 3) if tiny else (1, 32, 128):
        around = microseconds([Inputs(of, tokens).run])
        print(f"{name} q W_UK, norm, rotation, cache and W_UV of {tokens} tokens   {around:9.1f} us", flush=True)


def print_prompt(name: str, of: Heads, model: ModelDescription | None, sweeps: bool, tiny: bool) -> None:
    tokens = 40 if tiny else 8192
    case, small = Rows(of, 1, tokens, tokens), Rows(of, 2, *((30, 20) if tiny else (500, 300)))
    own = prefill_tiles(DTYPE, capability())
    best = sweep(f"{name} prompt", case, small, [] if tiny or not sweeps else list(prompt_choices()), own, 60)
    took, around, products = microseconds([case.runner(best)]), microseconds([Inputs(of, tokens).run]), 0.0
    if model is not None:
        wide = [one for one in model.matrices if one.layer == len(model.layers) - 1 and one.name not in EXPERT_STACKS and not one.heads]
        for matrix in wide:
            products += microseconds([partial(F.linear, random(tokens, matrix.columns), random(matrix.rows, matrix.columns))])
    print(
        f"{name} a prompt of {tokens:,} tokens, a layer   attention {rate(case, took)}   around it {around:9.1f} us   "
        f"products beside experts {products:9.1f} us",
        flush=True,
    )


# -- whole engines


@dataclass(frozen=True)
class Model:
    name: str
    config: dict[str, Any]

    @cached_property
    def description(self) -> ModelDescription:
        return describe(read_config(self.config, self.name))

    def read(self, rows: float) -> float:
        """The numbers of the matrices that a step of so many rows reads, if each row chooses its experts at random."""
        numbers = 0.0
        for matrix in self.description.matrices:
            experts = None if matrix.layer is None else self.description.layers[matrix.layer].mlp.experts
            share = 1 - (1 - experts.chosen / experts.count) ** rows if experts is not None and matrix.name in EXPERT_STACKS else 1
            numbers += share * matrix.numbers
        return numbers

    def least_seconds(self, requests: list[tuple[list[int], int]]) -> float:
        """Steps read the matrices, and the latents of their rows; prompts are multiplied by the matrices, without attention."""
        prompts, answers = sum(len(ids) for ids, _ in requests), sum(count for _, count in requests)
        steps = max(max(count for _, count in requests), answers / min(len(requests), 256))
        latents = sum(count * (len(ids) + count / 2) for ids, count in requests) * 576 * len(self.description.layers)
        beside = self.description.active_parameters - 2 * self.description.vocab_size * self.description.hidden_size
        return 2 * (steps * self.read(answers / steps) + latents) / READ + 2 * prompts * beside / MULTIPLIED


def print_loads(model: Model, wanted: list[str], busy: bool, settings: dict[str, Any]) -> None:
    from bench.gpu_loads import print_busy, run
    from octavo.bench import loads

    with random_model(model.config, settings) as llm:
        for load in wanted:
            requests = loads.GPU[load]()
            run(llm, [(ids[:64], min(count, 4)) for ids, count in requests[:64]], 0)
            seconds = [run(llm, requests, 0.6) for _ in range(2)]
            tokens = sum(len(ids) for ids, _ in requests) if load == "prefill" else sum(count for _, count in requests)
            took, least = statistics.median(seconds), model.least_seconds(requests)
            rounds = f"rounds {' '.join(f'{one:.2f}' for one in seconds)} s, least {least:.2f} s: {least / took:4.0%}"
            print(f"{model.name} {load:8} {tokens / took:10,.0f} tok/s   {rounds}", flush=True)
            if busy:
                print_busy(llm, requests, 0.6)


def print_kernels(models: dict[str, Model], parts: list[str], sweeps: bool, tiny: bool) -> bool:
    """Returns whether all kernels agree with the reference."""
    shapes = {"tiny": TINY} if tiny else {name: Heads.of(model.config) for name, model in models.items()}
    agree = [check(of) for of in shapes.values()]
    if not all(agree):
        return False
    for name, of in shapes.items():
        if "decode" in parts:
            print_decode(name, of, sweeps, tiny)
        if "prompt" in parts:
            print_prompt(name, of, None if tiny else models[name].description, sweeps, tiny)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()  # for the engine, which plans with what is free
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--parts", default="decode,prompt,loads")
    parser.add_argument("--models", default=";".join(MODELS), help="names, with ; between them")
    parser.add_argument("--loads", default="single,nano256,prefill,prefix")
    parser.add_argument("--no-sweep", action="store_true", help="only the tiles of the engine")
    parser.add_argument("--busy", action="store_true", help="how long the device computes in a round, by kernel")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for the interpreter")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the engine")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    parts, models = args.parts.split(","), {name: Model(name, MODELS[name]) for name in args.models.split(";")}
    place = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU"
    print(f"torch {torch.__version__}, triton {triton.__version__}, {place}, {DTYPE}")
    with torch.inference_mode():
        if not print_kernels(models, parts, not args.no_sweep, args.tiny):
            return 1
    settings = {key: json.loads(value) if value[0].isdigit() else value for key, value in (item.split("=", 1) for item in args.set)}
    if "loads" in parts:
        for model in models.values():
            print_loads(model, args.loads.split(","), args.busy, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
