"""A memory plan as text: a table, a bar of where the memory goes, and one sentence.

    ██▓▓▓▓▓▓▓▓▓▓▓▓▒▒░░··································╱╱      the whole bar is the memory that this process may use
"""

from typing import TYPE_CHECKING

from octavo.cli.plan_weights import matrix_forms, stored
from octavo.config import ResolvedConfig
from octavo.policy.memory_plan import MemoryPlan, ModelNeeds, shown

if TYPE_CHECKING:
    from octavo.loading.shape import ModelShape

WIDTH = 72
# part of the memory: block, letter where blocks cannot be drawn, colour
MARKS = {
    "weights": ("█", "W", 34),
    "KV cache": ("▓", "K", 36),
    "activations": ("▒", "A", 33),
    "rows, other": ("░", "o", 35),
    "free": ("·", ".", 2),
    "other processes": ("╱", "x", 31),
}


def plan_head(shape: "ModelShape", needs: ModelNeeds, config: ResolvedConfig, level: str | None) -> str:
    """The model, and what computes it. `level`: of the native kernels, where they compute."""
    by = "on a GPU" if config.device == "cuda" else f"on the CPU by {f'native kernels ({level})' if level else 'torch'}"
    return f"{shape.name}: {shape.config.architecture}, {needs.model.num_parameters:,} parameters, {needs.dtype}, {by}"


def plan_text(
    head: str, shape: "ModelShape", needs: ModelNeeds, config: ResolvedConfig, plan: MemoryPlan, plain: bool, colour: bool
) -> str:
    lines = [head, ""]
    lines += [f"  {name:<17}{value:>12}   {note}".rstrip() for name, value, note in plan_rows(shape, needs, config, plan)]
    lines += ["", *_bar(plan, plain, colour), ""]
    return "\n".join([*lines, plan_sentence(plan)])


def plan_rows(shape: "ModelShape", needs: ModelNeeds, config: ResolvedConfig, plan: MemoryPlan) -> list[tuple[str, str, str]]:
    """Rows of name, size and note."""
    use, geometry, memory = plan.use, plan.geometry, plan.memory
    token = f"{geometry.bytes_per_token:,} bytes per token" + ("" if needs.kv_cache_dtype == needs.dtype else f" in {needs.kv_cache_dtype}")
    blocks = f"{geometry.num_blocks:,} blocks of {geometry.block_size} tokens, {token}"
    on_gpu = memory.gpu is not None
    whole = ""
    if memory.gpu is not None:
        size = shown(memory.gpu)
        share = f"; GPU and CPU share {size} of memory" if memory.unified else f" of {size}"
        whole = f" (--gpu-memory-utilization {config.gpu_memory_utilization}{share})"
    own = [*(["CUDA and its libraries"] if on_gpu else []), *(["Python, libraries, tokenizer"] if memory.unified or not on_gpu else [])]
    held = f", {shown(memory.others)} of it held by other processes" if memory.others else ""
    return [
        ("weights", shown(use.weights), stored(shape, needs, config)),
        *(("", shown(form.nbytes), f"of it {form}") for form in matrix_forms(shape, needs, config)),
        ("KV cache", shown(use.kv_cache), blocks if on_gpu else f"{blocks}; allocated as it is used"),
        ("activations", shown(use.activations), f"steps of {config.max_num_batched_tokens:,} tokens, {config.max_num_seqs:,} sequences"),
        *([("graphs", shown(use.graphs), "CUDA graphs, estimated")] if use.graphs else []),
        ("rows", shown(use.rows), f"{config.max_num_seqs:,} sequences of {geometry.max_model_len:,} tokens: ids and block tables"),
        ("other", shown(use.other), "; ".join(own)),
        ("total", shown(use.total), f"of {shown(memory.total)}{whole}{held}"),
        ("context length", f"{geometry.max_model_len:,}", f"tokens (the model's own maximum is {shape.config.max_position:,})"),
        ("at that length", f"{plan.concurrency:,.1f}", "sequences at the same time"),
    ]


def plan_sizes(plan: MemoryPlan) -> dict[str, int]:
    """The parts of the bar, in bytes."""
    use = plan.use
    sizes = dict(zip(MARKS, (use.weights, use.kv_cache, use.activations + use.graphs, use.rows + use.other, 0, plan.memory.others)))
    return sizes | {"free": max(plan.memory.total - sum(sizes.values()), 0)}


def _bar(plan: MemoryPlan, plain: bool, colour: bool) -> list[str]:
    sizes = plan_sizes(plan)
    marks = {name: block if not plain else letter for name, (block, letter, _) in MARKS.items()}
    paint = {name: f"\033[{code}m" if colour else "" for name, (_, _, code) in MARKS.items()}
    end = "\033[0m" if colour else ""
    drawn = {name: paint[name] + marks[name] * cells + end for name, cells in _cells(sizes).items() if cells}
    legend = [f"{paint[name]}{marks[name]}{end} {name}" for name in drawn]
    return ["  " + "".join(drawn.values()), "  " + "   ".join(legend)]


def _cells(sizes: dict[str, int]) -> dict[str, int]:
    """Cells of the bar in proportion to the sizes; every part gets at least one."""
    whole = sum(sizes.values())
    cells = {name: max(round(WIDTH * size / whole), 1) if size else 0 for name, size in sizes.items()}
    widest = max(cells, key=lambda name: cells[name])
    cells[widest] += WIDTH - sum(cells.values())
    return cells


def plan_sentence(plan: MemoryPlan) -> str:
    if plan.refusal is not None:
        return f"It does not fit: {plan.refusal}."
    return f"It fits: {shown(plan.memory.free - plan.use.total)} stay free when all of it is in use."
