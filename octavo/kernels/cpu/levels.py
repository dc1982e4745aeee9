"""Selects the kernels: the best level of this machine, after its results have been compared with the portable level.

    x86-64     amx  ->  avx512bf16  ->  avx512  ->  avx2  ->  portable
    aarch64    i8mm  ->  neon  ->  portable

A level with wrong results is replaced by the next lower one, with a warning.

Otherwise a compiler bug, a hypervisor that hides half of an instruction set, or a kernel bug on a CPU we could not test
would make the model generate nonsense. The check uses the same few inputs every time and takes some tens of milliseconds.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.errors import ConfigError
from octavo.kernels.cpu.attention_case import AttentionCase, norm_struct
from octavo.kernels.cpu.delta_net_case import DeltaNetCase, Entry
from octavo.kernels.cpu.library import ACTIVATIONS, BF16, F16, F32, NORMS, Q4, Q8, Mixture, NativeLibrary, Norm, address, find_library
from octavo.kernels.cpu.packing import Floats, PackedMatrix, pack_codes, pack_float
from octavo.kernels.cpu.sampling import NativeSampling
from octavo.kernels.reference.sampling import Draws
from octavo.log import logger

KINDS = {"float32": F32, "bfloat16": BF16, "float16": F16, "8-bit": Q8, "4-bit": Q4, "tabled": Q4}

# How far a level may deviate from the portable one, relative to the largest number of a result. They differ in rounding: where
# one multiplies floats, another multiplies float16 or bfloat16. A bug causes an error of a whole product or more.
EXACT, ROUNDED, CODES = 1e-5, 5e-3, 2e-2


class Sample(NamedTuple):
    kernel: str
    result: Floats
    tolerance: float


def open_native(isa: str, threads: int) -> NativeLibrary | None:
    """Returns the library at the level `isa` ("auto": the best), checked, with this many threads. Returns None and logs the reason if it
    is absent, or if `auto` finds only the portable level: torch is faster than that."""
    library = find_library()
    if isinstance(library, str):
        _say_once(f"Native kernels are off, torch computes alone: {library}")
        return None
    wanted = library.levels[-1] if isa == "auto" else isa
    if wanted not in library.levels:
        raise ConfigError(f"cpu_isa is {isa}, this machine offers {', '.join(library.levels)} (cpu_isa auto takes the last)")
    library.set_threads(threads)
    use_best_level(library, wanted)
    if isa == "auto" and library.level == "portable":
        _say_once("Native kernels are off, torch computes alone: this CPU runs their portable level only (cpu_isa portable takes that)")
        return None
    return library


def use_best_level(library: NativeLibrary, wanted: str) -> None:
    """Sets the level to `wanted`, or to the next lower one whose results match those of the portable level."""
    library.set_level("portable")
    expected = sample_results(library)
    for level in reversed(library.levels[1 : library.levels.index(wanted) + 1]):
        library.set_level(level)
        wrong = first_difference(expected, sample_results(library))
        if wrong is None:
            return
        logger.warning("CPU level %s is not used: its %s differs from the portable kernel's; please report it", level, wrong)
    library.set_level("portable")


def first_difference(expected: list[Sample], got: list[Sample]) -> str | None:
    """Returns the name of the first kernel whose result deviates too much, or None."""
    for good, other in zip(expected, got):
        if not np.abs(other.result - good.result).max() <= good.tolerance * np.abs(good.result).max():  # also detects NaN
            return good.kernel
    return None


def sample_results(library: NativeLibrary) -> list[Sample]:
    """Runs products, gates, norms, rotation, caches, attention, MoE, recurrence and sampling on small inputs, the same ones every time."""
    random = np.random.default_rng(7)
    samples = []
    for name, kind in KINDS.items():
        packed = _sample_matrix(library, random, 64, 200, kind, name == "tabled")
        for rows in (1, 5, 37):  # one, a few, and enough for tiles
            x = random.standard_normal((rows, 200), np.float32)
            tolerance = EXACT if kind == F32 else ROUNDED if kind in (BF16, F16) else CODES
            samples.append(Sample(f"{name} product of {rows} rows", matmul(library, packed, x), tolerance))
            for activation in ACTIVATIONS if kind in (F32, BF16) else ("swiglu",):
                gated = gate_up(library, packed, x / np.float32(2), activation)
                samples.append(Sample(f"{name} {activation} of {rows} rows", gated, tolerance))
    for norm in NORMS:
        stream, x, weight, bias = (random.standard_normal(shape, np.float32) for shape in ((3, 200), (3, 200), (200,), (200,)))
        normed = add_norm(library, norm_struct(weight, bias, norm), stream, x)
        samples += [Sample(f"{norm} norm", normed, EXACT), Sample(f"sum before the {norm} norm", stream, EXACT)]
    for name, tolerance in (("float32", EXACT), ("bfloat16", ROUNDED), ("float16", ROUNDED), ("8-bit", CODES)):
        case = AttentionCase(rows=((30, 40), (600, 1)), cache_kind=KINDS[name], qk_norm=True, window=500)
        qkv, out, k, v = case.run(library)
        samples.append(Sample("rotation", qkv, EXACT))
        samples.append(Sample(f"writing into a {name} cache", np.nan_to_num(np.stack((k.numbers(), v.numbers()))), tolerance))
        samples.append(Sample(f"attention over a {name} cache", out, min(tolerance, ROUNDED)))
        case = AttentionCase(rows=((30, 40), (600, 1)), cache_kind=KINDS[name], soft_cap=2.0, sinks=True, rotary_dim=16, output_gate=True)
        samples.append(Sample(f"capped and gated attention over a {name} cache", case.run(library)[1], min(tolerance, ROUNDED)))
        case = AttentionCase(rows=((30, 40), (600, 1)), cache_kind=KINDS[name], alibi=True, rotary_dim=0)
        samples.append(Sample(f"attention with ALiBi over a {name} cache", case.run(library)[1], min(tolerance, ROUNDED)))
    return samples + _mixed(library, random) + _recurrent(library) + _sampled(library, random)


def _mixed(library: NativeLibrary, random: np.random.Generator) -> list[Sample]:
    """One token and several, each with two of four experts. Scores are so far apart that rounding does not change the choice."""
    parts = {"experts_gate_up": (4 * 64, 96), "experts_down": (4 * 96, 32), "shared_gate_up": (64, 96), "shared_down": (96, 32)}
    packed = {name: _sample_matrix(library, random, *shape, Q4) for name, shape in parts.items()}
    packed["router"] = pack_float(library, np.eye(4, 96, dtype=np.float32))
    packed["shared_gate"] = pack_float(library, random.standard_normal((1, 96), np.float32) / np.float32(8))
    mixture = Mixture(count=4, chosen=2, held=4, over_all=1, **{name: part.struct for name, part in packed.items()})
    x = random.standard_normal((20, 96), np.float32)
    x[:, :4] = [random.permutation(4) for _ in x]
    return [Sample(f"mixture of {tokens} tokens", mix(library, mixture, x[:tokens].copy()), CODES) for tokens in (1, 20)]


def _recurrent(library: NativeLibrary) -> list[Sample]:
    """A prompt with a checkpoint, and a token after a state."""
    case = DeltaNetCase()
    case.norm[:] = case.qkvz[:, case.channels :] = 1  # so that results are neither very large nor very small
    states = case.states(4, 1)
    out = case.run(library, states, Entry(0, 39, 0, 2, ((20, 3),)), Entry(39, 40, 1, -1))
    return [Sample("Gated DeltaNet", out, EXACT), Sample("states of Gated DeltaNet", states.recurrent[2:, 0], EXACT)]


def _sampled(library: NativeLibrary, random: np.random.Generator) -> list[Sample]:
    """Rows sampled without filters, and with each filter. The ids must be equal, so these are exact."""
    sampling, rows, vocab = NativeSampling(library), 8, 3000
    logits = torch.from_numpy(random.standard_normal((rows, vocab), np.float32) * np.float32(4))
    top_k, top_p, min_p = torch.tensor([0, 0, 0, 9, 700, 0, 0, 40]), torch.ones(rows), torch.zeros(rows)
    top_p[5:], min_p[6:] = 0.8, 0.01
    noise = torch.from_numpy(random.integers(0, 2**32, (rows, 4)))
    ids = sampling.draw(logits, Draws(torch.full((rows,), 0.7), top_k, top_p, min_p, noise, torch.arange(rows)))
    ranking = sampling.rank(logits, ids, 20)
    uniform = np.empty(vocab, np.float32)
    library.call.octavo_uniform(noise.data_ptr(), 5, address(uniform), vocab)
    return [
        Sample("noise", uniform, EXACT),
        Sample("draw", ids.numpy().astype(np.float32), EXACT),
        Sample("order of the best", ranking.near_ids.numpy().astype(np.float32), EXACT),
        Sample("mass of a row", ranking.totals.numpy().astype(np.float32), EXACT),
    ]


def matmul(library: NativeLibrary, packed: PackedMatrix, x: Floats, tokens: int = 0) -> Floats:
    """x [rows, k] -> [rows, n], computed as rows of a step with this many tokens; by default `rows`."""
    y = np.full((len(x), packed.struct.n), np.nan, np.float32)
    library.call.octavo_matmul(ctypes.byref(packed.struct), address(x), address(y), len(x), tokens or len(x))
    return y


def gate_up(library: NativeLibrary, packed: PackedMatrix, x: Floats, activation: str = "swiglu") -> Floats:
    """x [rows, k] -> gated values [rows, n / 2]; the rows of the weight alternate, 16 of gate, 16 of up. "gelu" has no gate: [rows, n]"""
    y = np.full((len(x), packed.struct.n // (1 if activation == "gelu" else 2)), np.nan, np.float32)
    library.call.octavo_gate_up(ctypes.byref(packed.struct), ACTIVATIONS[activation], address(x), address(y), len(x), len(x))
    return y


def add_norm(library: NativeLibrary, norm: Norm, stream: Floats, x: Floats | None) -> Floats:
    """Adds x to the stream [rows, size] in place. Returns the stream, normed."""
    y = np.full(stream.shape, np.nan, np.float32)
    library.call.octavo_add_norm(address(stream), address(x), ctypes.byref(norm), address(y), *stream.shape)
    return y


def mix(library: NativeLibrary, mixture: Mixture, x: Floats, activation: str = "swiglu") -> Floats:
    """x [tokens, hidden] -> the weighted outputs of each token's experts, [tokens, hidden]"""
    y = np.full(x.shape, np.nan, np.float32)
    library.call.octavo_mix(ctypes.byref(mixture), ACTIVATIONS[activation], address(x), address(y), len(x))
    return y


def _sample_matrix(library: NativeLibrary, random: np.random.Generator, n: int, k: int, kind: int, tabled: bool = False) -> PackedMatrix:
    bias = random.standard_normal(n, np.float32)
    group = 32
    if kind in (F32, BF16, F16):
        return pack_float(library, random.standard_normal((n, k), np.float32) / np.float32(8), kind, bias)
    middle = 128 if kind == Q8 or tabled else 8
    codes: NDArray[Any] = random.integers(0, 256 if kind == Q8 else 16, (n, k), np.uint8)
    scale = (random.uniform(0.5, 1, (n, -(-k // group))) / (8 * middle)).astype(np.float16)
    table: NDArray[Any] | None = random.integers(0, 256, 16, np.uint8) if tabled else None
    return pack_codes(library, codes, scale, (-middle * scale).astype(np.float16), group, kind, 1.5, bias, table=table)


@functools.cache
def _say_once(line: str) -> None:
    logger.warning("%s", line)
