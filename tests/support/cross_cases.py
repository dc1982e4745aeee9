"""What every kernel must give on every machine, by the torch and numpy twins alone: `python -m tests.support.cross_cases FILE`

The native library has no part in it, and the file says all that a machine without Python needs: `make cross` runs it on an
emulated one. A product may be made in several forms of arithmetic, and each has a result of its own here, so that tolerances
stay near rounding: what is off by more is a mistake.
"""

import itertools
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from octavo.config import CpuIsa
from octavo.kernels.cpu import packing
from octavo.kernels.cpu.attention_case import AttentionCase, Cache, from_bf16, to_bf16
from octavo.kernels.cpu.delta_net_case import DeltaNetCase, Entry, States, StepArrays
from octavo.kernels.cpu.library import ACTIVATIONS, BF16, F16, F32, NORMS, Q4, Q8
from octavo.kernels.cpu.packing import Floats
from tests.support.case_file import Case, Expected, write_cases
from tests.support.cross_sampling import sampling_cases
from tests.support.draws import make_logits
from tests.support.native_attention import (
    MANY_TOGETHER,
    MIXED,
    TOGETHER,
    attended_twin,
    in_halves,
    rounds,
    stored_twin,
    tree_of_rows,
    written_twin,
)
from tests.support.native_delta_net import DeltaNetWeights, delta_net_twin
from tests.support.native_latent import NEAR as NEAR_LATENTS
from tests.support.native_latent import LatentCase
from tests.support.native_mixture import Choice, MixtureWeights
from tests.support.native_step import BATCHES, HIDDEN, INNER, KINDS, Decoder, Multiply
from tests.support.native_weights import FEW_ROWS, TOLERANCE, NormWeights, Weights, form_of, gated, make_weights

LEVELS = get_args(CpuIsa)[1:]
KIND_NAMES = {F32: "float32", BF16: "bfloat16", F16: "float16", Q8: "8-bit", Q4: "4-bit"}
CACHES = {"float32": F32, "bfloat16": BF16, "float16": F16, "8-bit": Q8}
WEIGHTS = [(F32, 0), (BF16, 0), (F16, 0), *((kind, group) for kind in (Q8, Q4) for group in (16, 32, 64, 128))]
ROW_COUNTS = (tuple(range(1, FEW_ROWS + 1)), (17, 18, 19, 20, 33, 40))  # a level may multiply few rows with another kernel than many

# How far off a result may be, beside TOLERANCE for products. Measured, on x86-64 and on an emulated ARM: at most 2.3e-6 for attention,
# 4.4e-7 for norms and turned heads, 2.3e-6 for experts (whose second product rounds what the first gave: more if it falls to the other
# side of an edge), 4e-5 through the three layers of a step in float32. A norm that is another layer's is off by 1.7.
NEAR, NORM, ROUNDED_QUERIES, SUMS_IN_HALVES, EXPERTS, STEP = 1e-5, 1e-6, 1e-2, 5e-3, 3e-2, 1e-4


def levels_by_form(kind: int) -> dict[str, tuple[str, ...]]:
    """The forms of a product -> the levels that multiply like that."""
    found: dict[str, tuple[str, ...]] = {}
    for level in LEVELS:
        form = form_of(level, kind)
        found[form] = (*found.get(form, ()), level)
    return found


def with_weights(case: Case, weights: Weights, prefix: str = "") -> None:
    n, k = weights.exact.shape
    numbers = {"kind": weights.kind, "group": weights.group, "n": n, "k": k, "factor": weights.factor}
    if weights.kind == F16:
        numbers["factor"] = packing._half_factor(weights.exact)
    case.numbers |= {prefix + name: value for name, value in numbers.items()}
    beside = {"bias": weights.bias, "order": weights.order, "table": weights.table}
    case.arrays |= {prefix + name: array for name, array in {**weights.source, **beside}.items()}


# ---- products


def product_cases() -> Iterator[Case]:
    for kind, group in WEIGHTS:
        random = np.random.default_rng(kind * 1000 + group)
        name = KIND_NAMES[kind] + (f" in groups of {group}" if group else "")
        for n, k, plain in ((1, 1, True), (17, 7, False), (33, 65, False), (48, 128, True), (100, 257, False)):
            yield from products(random, f"{name}, {n} x {k}", make_weights(None, random, n, k, kind, group, plain), False)
        for n, k, plain in ((32, 65, False), (96, 128, True)):
            yield from products(random, f"{name}, {n} x {k}", make_weights(None, random, n, k, kind, group, plain), True)
        for bad in (np.nan, np.inf):
            yield from products(random, f"{name} with {bad} in a row", make_weights(None, random, 48, 128, kind, group, True), False, bad)
        if kind != F32:
            yield from products(random, f"{name}, large", enlarged(make_weights(None, random, 40, 200, kind, group)), False)
    for kind in (Q8, Q4):
        yield picked_rows_case(np.random.default_rng(kind), kind)


def tabled_cases() -> Iterator[Case]:
    """Codes of 4 bits that stand for the numbers of a table; and gates of other kinds."""
    random = np.random.default_rng(16)
    for group in (16, 32, 128):
        for n, k, plain in ((17, 7, False), (48, 128, True), (100, 257, False)):
            weights = make_weights(None, random, n, k, Q4, group, plain, tabled=True)
            yield from products(random, f"4-bit by a table in groups of {group}, {n} x {k}", weights, False)
        weights = make_weights(None, random, 96, 65, Q4, group, tabled=True)
        yield from products(random, f"4-bit by a table in groups of {group}", weights, True)
    for activation in ("geglu", "clamped", "gelu"):
        for kind, group in ((F32, 0), (BF16, 0), (Q8, 32)):
            weights = make_weights(None, random, 96, 100, kind, group)
            yield from products(random, f"{KIND_NAMES[kind]}, {activation}", weights, True, activation=activation)


def products(
    random: np.random.Generator, name: str, weights: Weights, gate: bool, bad: float = 0.0, activation: str = "swiglu"
) -> Iterator[Case]:
    for rows in ROW_COUNTS:
        x = random.standard_normal((rows[-1], weights.exact.shape[1]), np.float32)
        case = Case("gate_up" if gate else "product", name, {"gate": gate}, {"x": x, "counts": np.array(rows)})
        case.numbers["activation"] = ACTIVATIONS[activation]
        with_weights(case, weights)
        for form, levels in levels_by_form(weights.kind).items():
            y = weights.product(x, form)
            tolerance = TOLERANCE[form] * (2 if gate else 1)
            case.expected.append(Expected("y", form, gated(y, activation) if gate else y, "largest", tolerance, levels))
        if bad:
            at = rows[0] - 1  # in every count
            case.arrays["x"] = x = x.copy()
            x[at, 77] = bad
            for each in case.expected:
                each.values[at] = np.nan
        yield case


def enlarged(weights: Weights) -> Weights:
    """So large that sums in float16 would not hold them as they are."""
    source = {name: array if name == "codes" else array * array.dtype.type(8192) for name, array in weights.source.items()}
    return replace(weights, exact=weights.exact * np.float32(8192), source=source)


def picked_rows_case(random: np.random.Generator, kind: int) -> Case:
    """Rows of the codes in another order, one twice, some zeros: as embeddings shared with a padded head are packed."""
    weights = make_weights(None, random, 30, 64, kind, 32, plain=True)
    rows = np.array([29, 3, 3, -1, 0, *range(10, 29), -1])
    picked = replace(weights, exact=weights.exact[rows] * (rows >= 0)[:, None])
    x = random.standard_normal((3, 64), np.float32)
    case = Case("product", f"{KIND_NAMES[kind]}, of picked rows", {"gate": False}, {"x": x, "counts": np.array([1, 3]), "rows": rows})
    with_weights(case, picked)
    case.expected.append(Expected("y", "codes", picked.product(x, "codes"), "largest", TOLERANCE["codes"]))
    return case


# ---- mixtures


def mixture_cases() -> Iterator[Case]:
    random, tokens = np.random.default_rng(8), (1, 2, 40)
    for choice in (Choice(16, 2), Choice(9, 4, normed=False, shared_inner=32), Choice(5, 3, over_all=False)):
        for kind, group in ((F32, 0), (BF16, 0), (F16, 0), (Q8, 32), (Q4, 16)):
            weights = MixtureWeights.make(None, random, choice, HIDDEN, INNER, kind, group, plain=choice.count == 16, tabled=kind == Q4)
            for count in tokens:
                x = random.standard_normal((count, HIDDEN), np.float32)
                title = f"{choice.chosen} of {choice.count} experts, {KIND_NAMES[kind]}"
                case = Case("mixture", title, {"activation": 0}, {"x": x, "counts": np.array([count])})
                with_mixture(case, weights)
                for form, levels in levels_by_form(kind).items():
                    y = weights.twin(x, "swiglu", multiply_as(levels[0]))
                    case.expected.append(Expected("y", form, y, "largest", NEAR if kind == F32 else EXPERTS, levels))
                yield case


def multiply_as(level: str) -> Multiply:
    return lambda weights, x, rows: weights.product(x, form_of(level, weights.kind))


def with_mixture(case: Case, weights: MixtureWeights, prefix: str = "") -> None:
    case.numbers |= {prefix + name: value for name, value in asdict(weights.choice).items()}
    for name, part in weights.parts.items():
        with_weights(case, part, f"{prefix}{name}.")


# ---- norms


def norm_cases() -> Iterator[Case]:
    random = np.random.default_rng(5)
    for kind, (rows, size) in itertools.product(NORMS, ((1, 2), (3, 15), (7, 16), (2, 31), (40, 576))):
        stream, x = random.standard_normal((2, rows, size), np.float32)
        weight, bias = random.standard_normal((2, size), np.float32)
        for added, norm in itertools.product((None, x), (NormWeights(weight, None, kind), NormWeights(weight, bias, kind))):
            total = stream if added is None else stream + added
            expected = [Expected("stream", "floats", total), Expected("y", "floats", norm.twin(total), "largest", NORM)]
            title = f"{kind}, {rows} x {size}{'' if added is None else ' added'}{'' if norm.bias is None else ' with biases'}"
            case = Case("norm", title, {"rows": rows, "size": size}, {"stream": stream, "x": added}, expected)
            with_norm(case, norm, "norm")
            yield case


def with_norm(case: Case, norm: NormWeights, name: str) -> None:
    case.numbers |= {f"{name}.kind": NORMS[norm.kind], f"{name}.eps": norm.eps}
    case.arrays |= {f"{name}.weight": norm.weight, f"{name}.bias": norm.bias}


# ---- attention


def attention_cases() -> Iterator[Case]:
    for name, kind in CACHES.items():
        base = AttentionCase(rows=MIXED, cache_kind=kind)
        mixes = [replace(base, block_size=size, seed=size) for size in (1, 4, 32, 256)]
        mixes += [replace(base, head_dim=dim, qk_norm=dim % 32 == 0, seed=dim) for dim in (16, 32, 48, 64, 80, 96, 128, 256)]
        groups = ((1, 1), (1, 3), (3, 1), (5, 3), (7, 1), (8, 1))  # heads that share a kv head, and how many of these there are
        mixes += [replace(base, heads=group * kv, kv_heads=kv, qk_norm=kv == 1, seed=group) for group, kv in groups]
        mixes += [replace(base, window=window, seed=window) for window in (1, 15, 17, 64, 100)]
        mixes += [replace(base, rotary_dim=dim, qk_norm=True, whole_norm=dim != 8, seed=dim) for dim in (0, 8, 20)]
        mixes += [replace(base, alibi=True, window=window, rotary_dim=0) for window in (0, 20)]
        mixes += [replace(base, output_gate=True, head_dim=dim, rotary_dim=16, qk_norm=True) for dim in (32, 80, 256)]
        mixes += [replace(base, soft_cap=cap, sinks=cap != 2, window=20 if cap else 0) for cap in (0.0, 0.5, 2.0)]
        longer = []
        for rows in (((511, 1),), ((512, 1),), ((2055, 1),), ((1299, 1), (700, 1)), ((900, 33),), ((0, 300),)):
            longer += [replace(base, rows=rows, heads=2, kv_heads=1, window=window) for window in (0, 300)]
        beside = {"rows": ((1299, 1), (900, 33)), "sinks": True}
        longer += [replace(base, soft_cap=cap, window=window, **beside) for cap, window in ((0.0, 0), (1.0, 300))]  # type: ignore[arg-type]
        longer += [replace(base, rows=rows, heads=6, output_gate=True) for rows in (((1299, 1), (700, 1)), ((900, 33),))]
        longer += [replace(base, rows=TOGETHER[0], shared=TOGETHER[1], heads=6, window=window) for window in (0, 100)]
        longer += [replace(base, rows=MANY_TOGETHER[0], shared=MANY_TOGETHER[1], heads=6, alibi=alibi) for alibi in (False, True)]
        longer += [replace(tree_of_rows(window, heads=6, cache_kind=kind), window=window) for window in (0, 120)]
        for case in mixes + longer:
            yield attend_case(case, name, title_of(case))
            if case in mixes:
                yield write_case(case, name, title_of(case), exact=False)
        unturned = replace(base, seed=99)
        unturned.angles[:] = 0  # so that keys are stored as they came, and every bit counts
        unturned.projected[::9] *= 1e5  # beyond float16, which saturates
        yield write_case(unturned, name, "unturned", exact=True)
        large = replace(base, seed=97)
        values = large.projected[:, -large.kv_heads :]
        values[:] = np.abs(values) * 2e4  # float16 ends at 65,504: what a few of them sum up to passes it, their mean does not
        yield attend_case(large, name, "with large values")
        for rows in (MIXED, ((0, 4), (3, 2), (10, 9))):  # many queries at once, and few
            some = replace(base, rows=rows, seed=96)
            some.projected[:, : some.heads] *= 2
            values = some.projected[:, -some.kv_heads :]
            values[:] = np.abs(values) * np.where(some.cache_index % 8 < 5, 30, 36_000)[:, None, None]
            yield attend_case(some, name, f"with large values that {len(some.positions)} queries weight differently")
        spoiled = replace(base, seed=98)
        spoiled.projected[38, spoiled.heads] = np.nan  # a key that all queries of the third row see
        yield attend_case(spoiled, name, "with NaN in a row")


def title_of(case: AttentionCase) -> str:
    rows = f"{case.rows[0][1]} after {case.rows[0][0]}" + (f" and {len(case.rows) - 1} more rows" if len(case.rows) > 1 else "")
    asides = [f"window {case.window}"] * bool(case.window) + ["normed"] * case.qk_norm + ["shared"] * bool(case.shared)
    asides += ["as one"] * case.whole_norm + [f"rotated {case.rotated}"] * (case.rotary_dim is not None)
    asides += [f"capped at {case.soft_cap}"] * bool(case.soft_cap) + ["sinks"] * case.sinks + ["ALiBi"] * case.alibi
    asides += ["gates"] * case.output_gate
    return ", ".join([f"heads {case.heads}/{case.kv_heads} of {case.head_dim}", f"blocks of {case.block_size}", rows, *asides])


def write_case(case: AttentionCase, name: str, title: str, exact: bool) -> Case:
    """v is stored as it came, so bits are equal; a k may be turned into the neighbour of the twin's."""
    qkv, before = written_twin(case), case.past()
    k, v = stored_twin(case, before, qkv)
    written = attention_case("write", f"into {name}, {title}", case, case.projected, before)
    near = ("exact", 0.0) if exact else ("largest", {F32: NORM, BF16: 2.0**-7, F16: 2.0**-10, Q8: 1.01 / 127}[case.cache_kind])
    written.expected.append(Expected("qkv", "floats", qkv, *(("exact", 0.0) if exact else ("largest", NORM))))
    written.expected += [Expected("k_cache", "floats", k.values, *near), Expected("v_cache", "floats", v.values)]
    if k.scale is not None and v.scale is not None:
        written.expected.append(Expected("k_scale", "floats", k.scale, *(("exact", 0.0) if exact else ("each", NORM))))
        written.expected.append(Expected("v_scale", "floats", v.scale))
    return written


def attend_case(case: AttentionCase, name: str, title: str) -> Case:
    qkv = written_twin(case)
    caches = stored_twin(case, case.past(), qkv)
    attended = attention_case("attend", f"over {name}, {title}", case, qkv, caches)
    rounding = tuple(level for level in LEVELS if rounds(level, case))
    halving = tuple(level for level in LEVELS if in_halves(level, case))
    exact = tuple(level for level in LEVELS if level not in rounding + halving)
    out = attended_twin(case, qkv, *caches)
    attended.expected.append(Expected("out", "floats", out, "largest", NEAR, exact))
    if halving:
        attended.expected.append(Expected("out", "halves", out, "largest", SUMS_IN_HALVES, halving))
    if rounding:
        out = attended_twin(case, from_bf16(to_bf16(qkv)), *caches)
        attended.expected.append(Expected("out", "bf16", out, "largest", ROUNDED_QUERIES, rounding))
    return attended


def attention_case(kernel: str, title: str, case: AttentionCase, qkv: Floats, caches: tuple[Cache, Cache]) -> Case:
    found = Case(kernel, title, model_numbers(case), step_arrays(case))
    found.arrays |= {"qkv": qkv, **cache_arrays(caches)}
    shared = case.shared_keys
    found.arrays |= {"shared_start": shared.start, "shared_nodes": shared.nodes, "shared_rows": shared.rows}
    with_attention(found, case)
    if case.norms is not None:
        for name, weight in zip(("q_norm", "k_norm"), case.norms):
            with_norm(found, NormWeights(weight), f"layer0.{name}")
    return found


def with_attention(found: Case, case: AttentionCase, layer: int = 0) -> None:
    """What a layer's attention is, beside what all layers have alike."""
    numbers = {"window": case.window, "rotary_dim": case.rotated, "whole_norm": case.whole_norm, "soft_cap": case.soft_cap}
    numbers["output_gate"] = case.output_gate
    arrays = {"cos": np.cos(case.angles), "sin": np.sin(case.angles), "sinks": case.sink_scores, "alibi": case.slopes}
    found.numbers |= {f"layer{layer}.{name}": number for name, number in numbers.items()}
    found.arrays |= {f"layer{layer}.{name}": array for name, array in arrays.items() if array is None or array.size}


def model_numbers(case: AttentionCase) -> dict[str, float]:
    return {
        "num_layers": 1, "heads": case.heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim, "block_size": case.block_size,
        "cache_kind": case.cache_kind, "attention_scale": case.head_dim**-0.5,
    }  # fmt: skip


def step_arrays(case: AttentionCase) -> dict[str, NDArray[Any] | None]:
    return {
        "cache_index": case.cache_index, "positions": case.positions, "slots": case.new_slots, "query_start": case.query_start,
        "context_len": case.context_len, "tables": case.tables,
    }  # fmt: skip


def cache_arrays(caches: tuple[Cache, Cache], layer: int = 0) -> dict[str, NDArray[Any] | None]:
    k, v = caches
    names = {"k_cache": k.values, "v_cache": v.values, "k_scale": k.scale, "v_scale": v.scale}
    return {f"layer{layer}.{name}": array for name, array in names.items()}


# ---- Gated DeltaNet


def delta_net_cases() -> Iterator[Case]:
    heads, sizes = ((1, 1), (1, 3), (2, 4)), ((16, 16), (48, 80), (128, 128), (256, 48))
    for number, ((k_heads, v_heads), (k_dim, v_dim)) in enumerate(itertools.product(heads, sizes)):
        net = DeltaNetCase(65, k_heads, v_heads, k_dim, v_dim, conv_width=2 + number % 4, seed=number)
        yield delta_net_case(net, net.states(2), Entry(0, 65, 0, 1))
        chunks = Entry(2, 20, 2, 6, ((3, 7), (17, 8))), Entry(7, 9, 3, 9, ((8, 10),))
        yield delta_net_case(net, net.states(11, 1, 2, 3), Entry(0, 33, 0, 4), Entry(33, 34, 1, 5), *chunks, Entry(0, 1, 0, -1))


def delta_net_case(net: DeltaNetCase, states: States, *entries: Entry) -> Case:
    title = f"{net.k_heads}/{net.v_heads} heads of {net.k_dim}x{net.v_dim}, width {net.conv_width}, {len(entries)} rows"
    case = Case("delta_net", title, {}, with_rows(entries))
    with_delta_net(case, net, states.copy())
    products = [np.concatenate([rows[entry.begin : entry.end] for entry in entries]) for rows in (net.qkvz, net.gates)]
    case.arrays |= dict(zip(("qkvz", "gates"), products))
    out = delta_net_twin(net, states, *entries)
    found = {"out": out, "recurrent_state": states.recurrent}
    case.expected = [Expected(name, "floats", values, "largest", NEAR) for name, values in found.items()]
    case.expected.append(Expected("conv_state", "floats", states.conv))
    return case


def with_rows(entries: tuple[Entry, ...]) -> dict[str, NDArray[Any] | None]:
    return dict(vars(StepArrays(entries)))


def with_delta_net(case: Case, net: DeltaNetCase, states: States, prefix: str = "") -> None:
    numbers = {name: getattr(net, name) for name in ("k_heads", "v_heads", "k_dim", "v_dim", "conv_width")}
    arrays = {"conv": net.conv, "decay": net.decay, "dt_bias": net.dt_bias, "conv_state": states.conv, "recurrent_state": states.recurrent}
    case.numbers |= {prefix + name: number for name, number in numbers.items()}
    case.arrays |= {prefix + name: array for name, array in arrays.items()}
    with_norm(case, NormWeights(net.norm, eps=net.eps), f"{prefix}norm")


# ---- latent attention


def latent_cases() -> Iterator[Case]:
    """Heads of whole panels, so that the matrices of all heads are one matrix. From the product of the layer's input to values."""
    for name, kind in CACHES.items():
        if kind == Q8:  # whose scale latents and rotary keys cannot share
            continue
        long = (900, 33), (511, 1)
        for rows, sizes in ((MIXED, {"q_rank": 21}), (long, {"heads": 8, "group": 8}), (MIXED, {"rank": 128, "rotary": 16})):
            case = LatentCase(rows, kind, **{"rank": 48, "values": 32} | sizes)
            yield latent_case(case, f"over {name}, {case.heads} heads over latents of {case.rank} and {case.rotary}")


def latent_case(case: LatentCase, title: str) -> Case:
    tokens = case.tokens
    found = Case("latent", title, model_numbers(tokens), step_arrays(tokens))
    found.numbers |= {"attention_scale": case.scale, "kv_heads": case.heads // case.group}
    found.numbers |= {"plain_dim": case.plain, "value_dim": case.values}
    with_attention(found, tokens)
    found.arrays |= {"layer0.k_cache": tokens.past()[0].values, "down": case.weights["down"]}
    matrices = {name: by_head.reshape(-1, by_head.shape[2]) for name, by_head in case.stacks.items()}
    for name, matrix in (matrices | ({"q_up": case.weights["q_up"]} if case.q_rank else {})).items():
        exact = np.ascontiguousarray(matrix)
        with_weights(found, Weights(None, exact, F32, 0, None, None, {"values": exact}), f"{name}.")
    for name in ("q_norm", "k_norm") if case.q_rank else ("k_norm",):
        with_norm(found, NormWeights(case.weights[name]), f"layer0.{name}")
    near, names = NEAR_LATENTS[case.cache_kind], ("latents", "values")
    found.expected = [Expected(name, "floats", part, "largest", near) for name, part in zip(names, case.references())]
    return found


# ---- whole steps


def step_cases() -> Iterator[Case]:
    """In float32 a step is near its twins. With rounding, a number that falls to the other side of an edge moves all that follows.

    So such a step is compared with its parts, bit for bit; of each part there are cases above.
    """
    kinds = [(F32, 0, F32, F32), (BF16, 0, BF16, BF16), (F16, 0, F16, F16), (F16, 0, Q8, Q8)]  # weights, group, embeddings, cache
    kinds += [(Q8, 32, Q8, Q8), (Q8, 128, BF16, F32), (Q4, 32, F32, BF16), (Q4, 64, Q8, Q8)]
    for kind, group, embed_kind, cache_kind in kinds:
        decoder = Decoder(None, kind, group, embed_kind, cache_kind)
        for rows in BATCHES:
            yield step_case(decoder, rows)
    for name, shape in KINDS.items():
        for kind, group, cache_kind in ((F32, 0, F32), (Q4, 32, Q8)):
            decoder = Decoder(None, kind, group, F32, cache_kind, shape=shape)
            yield from (step_case(decoder, rows, f"as {name}, ") for rows in BATCHES)


def step_case(decoder: Decoder, rows: tuple[tuple[int, int], ...], name: str = "") -> Case:
    run, shape = decoder.step(rows), decoder.shape
    title = f"{name}{KIND_NAMES[decoder.kind]} weights, {len(run.ids)} tokens in {len(rows)} rows"
    case = Case("step", title, model_numbers(run.case), step_arrays(run.case))
    case.numbers |= {"num_layers": len(decoder.layers), "hidden": HIDDEN, "vocab": decoder.vocab, "embed_kind": decoder.embed_kind}
    case.numbers |= {"activation": ACTIVATIONS[shape.activation], "residual_scale": shape.residual_scale, "logit_cap": shape.logit_cap}
    case.numbers |= {"embedding_scale": shape.embedding_scale, "logit_scale": shape.logit_scale, "parallel": shape.parallel}
    case.arrays |= {"token_ids": run.ids, "sample_index": run.samples, "embed": run.embed}
    if any(shape.recurrent):
        case.arrays |= with_rows(run.entries)
    with_norm(case, decoder.norm, "norm")
    if decoder.embedding_norm is not None:
        with_norm(case, decoder.embedding_norm, "embedding_norm")
    with_weights(case, decoder.head, "head.")
    for index, (parts, caches) in enumerate(zip(decoder.layers, run.caches)):
        case.arrays |= cache_arrays(caches, index)
        with_attention(case, run.cases[index], index)
        for part_name, part in parts.items():
            if isinstance(part, Weights):
                with_weights(case, part, f"layer{index}.{part_name}.")
            elif isinstance(part, MixtureWeights):
                with_mixture(case, part, f"layer{index}.mixture.")
            elif isinstance(part, DeltaNetWeights):
                states, prefix = run.states[index], f"layer{index}.delta_net."
                assert states is not None
                with_delta_net(case, part.case, states.copy(), prefix)
                with_weights(case, part.qkvz, f"{prefix}qkvz.")
                with_weights(case, part.gates, f"{prefix}gates.")
            else:
                with_norm(case, part, f"layer{index}.{part_name}")
    case.arrays["embedded"] = run.embedded()
    if decoder.kind == decoder.cache_kind == F32:
        run.by_twins(lambda weights, x, _: weights.product(x, "floats"))
        case.expected += [Expected(name, "floats", getattr(run, name), "largest", STEP) for name in ("hidden", "logits")]
    return case


def argmax_cases() -> Iterator[Case]:
    """A step without layers whose logits are 8 times a column of the head, so that any row of logits can be asked for, bit for bit."""
    for vocab in (1, 2, 15, 16, 17, 33, 1000):
        for kind in ("normal", "ties", "equal", "zeros", "masked", "one", "peak"):
            logits = make_logits(kind, vocab, vocab)
            head, one = np.zeros((vocab, 64), np.float32), np.zeros((1, 64), np.float32)
            head[:, 0], one[0, 0] = logits / 8, 1
            case = Case("argmax", f"{kind} logits of {vocab}", {"hidden": 64, "vocab": vocab, "embed_kind": F32, "num_layers": 0})
            zero, first = np.zeros(1, np.int64), np.zeros(1, np.int32)
            ends = {"query_start": np.arange(2, dtype=np.int32), "context_len": np.ones(1, np.int32), "tables": np.zeros((1, 1), np.int32)}
            case.arrays |= {"token_ids": zero, "cache_index": first, "positions": first, "slots": zero, "sample_index": zero, **ends}
            case.arrays |= {"embed": one}
            with_norm(case, NormWeights(np.ones(64, np.float32), eps=0), "norm")
            with_weights(case, Weights(None, head, F32, 0, None, None, {"values": head}), "head.")
            case.expected.append(Expected("logits", "floats", logits[None], "largest", 0.0))  # a zero may lose its sign
            case.expected.append(Expected("best", "floats", logits[None].argmax(1)))
            yield case


def all_cases() -> Iterator[Case]:
    for some in (product_cases, tabled_cases, mixture_cases, norm_cases, attention_cases, delta_net_cases, latent_cases, step_cases):
        yield from some()
    yield from argmax_cases()
    yield from sampling_cases()


def main(arguments: Iterable[str]) -> None:
    (path,) = arguments
    print(f"{write_cases(Path(path), all_cases())} cases written")


if __name__ == "__main__":
    main(sys.argv[1:])
