"""`octavo plan` tells how much memory a model needs. It reads the config and headers of the model, and no weights.

The engine starts by the same plan (`sizing/memory_plan.py`). Flags ask "what if": another memory size, context length,
batch, dtype or quantization. The plan is printed as text or as JSON, and can be written as a report.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from octavo.cli.args import add_engine_flags, engine_config
from octavo.cli.config_file import size
from octavo.cli.in_out import add_report_flag, can_show, check_target, write_report
from octavo.config import Device, EngineConfig, ResolvedConfig, no_color
from octavo.errors import ConfigError
from octavo.loading.names import NAME
from octavo.policy.cache_spec import slot_bytes
from octavo.report.charts import Curve, Part, curves, parts_bar
from octavo.report.document import Html, Report, Section, paragraph, pictured, table
from octavo.server_config import check_setting
from octavo.sizing.auto import resolved, suited, with_room_for_states
from octavo.sizing.memory_plan import Memory, MemoryPlan, ModelNeeds, fullest, plan_stages, shown
from octavo.sizing.model_size import Codes
from octavo.worker.backends import Run, choose_backends
from octavo.worker.machine import num_threads, refuse_float16, resolve_dtype, this_machine

if TYPE_CHECKING:
    from octavo.loading.shape import ModelShape

SETTINGS = (
    "revision", "hf_overrides", "dtype", "quantization", "device", "kv_cache_dtype", "max_model_len", "block_size", "kv_cache_memory_bytes",
    "gpu_memory_utilization", "state_cache_share", "num_gpu_blocks_override", "tensor_parallel_size", "pipeline_parallel_size",
    "decode_context_parallel_size", "enable_expert_parallel", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "native",
    "cpu_isa",
)  # fmt: skip


EXAMPLES = """examples:
  octavo plan                                         the default model on this machine
  octavo plan Qwen/Qwen3-8B --device cuda --memory 24GiB
  octavo plan model.gguf --max-model-len 32k --max-num-seqs 8

Exit code 0: the model fits. 1: it does not fit, and the last line says what to change."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [MODEL]"
    parser.epilog = EXAMPLES
    text = f"a folder, a .gguf file, a config.json, owner/name[@revision][:QUANT] on the hub, or {NAME}, the default model"
    parser.add_argument("words", metavar="MODEL", nargs="?", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_report_flag(parser)
    group = parser.add_argument_group("what if")
    text = "plan for a device with this much memory, all of it free (24GiB, 512m); default: this machine"
    group.add_argument("-dp", "--data-parallel-size", type=int, default=1, metavar="N", help="plan for one of N engines of a server")
    group.add_argument("--memory", type=size, metavar="SIZE", help=text)
    add_engine_flags(parser, only=SETTINGS)


def run(args: argparse.Namespace) -> int:
    check_target("--report", args.report)
    from octavo.loading.shape import model_shape
    from octavo.worker.device import level_used

    requested = engine_config(args, args.words)
    check_setting("data_parallel_size", args.data_parallel_size)
    ranks = requested.tensor_parallel_size, requested.decode_context_parallel_size, requested.expert_ranks
    whole = model_shape(requested.model, requested.revision, requested.hf_overrides).of_rank(*ranks)
    config = suited(resolved(requested, _device(requested.device, args.memory)), whole.model)
    level = level_used(config)
    refuse_float16(config, config.device, level)
    dtype, threads = resolve_dtype(config.dtype, whole.config.dtype, config.device, level), num_threads() if level else 0
    choose_backends(Run(config, dtype, config.device), whole.model)
    shapes = whole.stages(config.pipeline_parallel_size)
    all_needs = [shape.needs(dtype, config.quantization, config.kv_cache_dtype, threads, config.device) for shape in shapes]
    memory = _memory(config, args.memory, args.data_parallel_size)
    config, why = with_room_for_states(config, requested, max(all_needs, key=lambda one: slot_bytes(one.specs)), memory)
    plans = plan_stages(all_needs, config, memory)
    stages = [_stage(layers, plan) for layers, plan in zip(whole.stage_layers(len(plans)), plans)]
    most = fullest(plans)
    shape, needs, plan = shapes[most], all_needs[most], plans[most]
    head = plan_head(shape, needs, config, level)
    if args.data_parallel_size > 1:
        head += f"\n  one of {args.data_parallel_size} engines"
    if why is not None:
        head += f"\n  {why}"
    if len(stages) > 1:
        head += "".join(f"\n  stage {number}: {stage}" for number, stage in enumerate(stages))
    if args.json:
        print(json.dumps(_record(shape, needs, config, plan, level) | {"stages": [asdict(stage) for stage in stages]}, indent=1))
    else:
        plain = not can_show("".join(block for block, _, _ in MARKS.values()))
        print(plan_text(head, shape, needs, config, plan, plain, colour=sys.stdout.isatty() and not no_color()))
    if args.report is not None:
        write_report(args.report, plan_report(args.typed, head, shape, needs, config, plan))
    return 0 if plan.refusal is None else 1


@dataclass(frozen=True, slots=True)
class StageUse:
    """What a rank of one stage of a pipeline needs."""

    first_layer: int
    num_layers: int
    weights_bytes: int
    kv_cache_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        layers = f"layers {self.first_layer} to {self.first_layer + self.num_layers - 1}"
        return f"{layers}, {shown(self.total_bytes)}: weights {shown(self.weights_bytes)}, KV cache {shown(self.kv_cache_bytes)}"


def _stage(layers: range, plan: MemoryPlan) -> StageUse:
    return StageUse(layers.start, len(layers), plan.use.weights, plan.use.kv_cache, plan.use.total)


def _device(requested: Device, size: int | None) -> Literal["cpu", "cuda"]:
    """Returns the device to plan for. With --memory, this machine need not have a GPU. torch is imported only if it may have one."""
    from octavo.worker.device import device_here, nvidia_signs

    if requested == "cuda" and size is not None:
        return "cuda"
    if requested == "cpu" or (requested == "auto" and not nvidia_signs()):
        return "cpu"
    try:
        return device_here(requested).device
    except ConfigError as error:
        raise ConfigError(f"{error}; add --memory 80g to plan for a GPU with that much memory") from error


def _memory(config: ResolvedConfig, size: int | None, engines: int) -> Memory:
    from octavo.worker.memory import memory

    if size is not None and config.device == "cuda":
        return Memory.of_gpu(size, size, config.gpu_memory_utilization)
    whole = memory(config) if size is None else Memory(size)
    return whole if config.device == "cuda" else whole.share(config.num_ranks * engines)


def _record(shape: "ModelShape", needs: ModelNeeds, config: ResolvedConfig, plan: MemoryPlan, level: str | None) -> dict[str, Any]:
    """Returns the whole table for --json, with sizes in bytes."""
    use, geometry = plan.use, plan.geometry
    return {
        "model": shape.name,
        "device": config.device,
        "tensor_parallel_size": shape.ranks,
        "pipeline_parallel_size": shape.stage.count,
        "decode_context_parallel_size": geometry.context_ranks,
        "cpu_isa": level,
        "dtype": needs.dtype,
        "parameters": needs.model.num_parameters,
        "active_parameters": needs.model.active_parameters,
        "quantization": config.quantization,
        "stored_bytes": shape.stored_bytes,
        "weights_bytes": use.weights,
        "matrices": [asdict(form) for form in matrix_forms(shape, needs, config)],
        "kv_cache_bytes": use.kv_cache,
        "activations_bytes": use.activations,
        "graphs_bytes": use.graphs,
        "rows_bytes": use.rows,
        "other_bytes": use.other,
        "total_bytes": use.total,
        "memory_bytes": plan.memory.total,
        "gpu_bytes": plan.memory.gpu,
        "unified_memory": plan.memory.unified,
        "other_processes_bytes": plan.memory.others,
        "kv_cache_dtype": needs.kv_cache_dtype,
        "kv_bytes_per_token": geometry.bytes_per_token,
        "state_bytes": geometry.state_bytes,
        "state_slots": max(geometry.num_states - 1, 0),
        "state_checkpoints": _kept_states(config, plan),
        "num_blocks": geometry.num_blocks,
        "block_size": geometry.block_size,
        "max_model_len": geometry.max_model_len,
        "model_max_len": shape.config.max_position,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "concurrency": round(plan.concurrency, 2),
        "fits": plan.refusal is None,
        "refusal": plan.refusal,
    }


# -- as text: a table, a bar of where the memory goes, and one sentence
#
#    ██▓▓▓▓▓▓▓▓▓▓▓▓▒▒░░··································╱╱      the whole bar is the memory that this process may use

WIDTH = 72
# part of the memory: a block character, a letter for terminals without it, a colour
MARKS = {
    "weights": ("█", "W", 34),
    "KV cache": ("▓", "K", 36),
    "activations": ("▒", "A", 33),
    "rows, other": ("░", "o", 35),
    "free": ("·", ".", 2),
    "other processes": ("╱", "x", 31),
}


def plan_head(shape: "ModelShape", needs: ModelNeeds, config: ResolvedConfig, level: str | None) -> str:
    """Returns a line about the model and what computes it. `level`: that of the native kernels, None if torch computes."""
    by = "on a GPU" if config.device == "cuda" else f"on the CPU by {f'native kernels ({level})' if level else 'torch'}"
    part = f" in each of {shape.ranks} ranks" if shape.ranks > 1 else ""
    if shape.stage.count > 1:
        part += f" of stage {shape.stage.index}, which needs most of {shape.stage.count}"
    return f"{shape.name}: {shape.config.architecture}, {needs.model.num_parameters:,} parameters{part}, {needs.dtype}, {by}"


def plan_text(
    head: str, shape: "ModelShape", needs: ModelNeeds, config: ResolvedConfig, plan: MemoryPlan, plain: bool, colour: bool
) -> str:
    lines = [head, ""]
    lines += [f"  {name:<17}{value:>12}   {note}".rstrip() for name, value, note in plan_rows(shape, needs, config, plan)]
    lines += ["", *_bar(plan, plain, colour), ""]
    return "\n".join([*lines, plan_sentence(plan)])


def plan_rows(shape: "ModelShape", needs: ModelNeeds, config: ResolvedConfig, plan: MemoryPlan) -> list[tuple[str, str, str]]:
    """Returns the rows of the table, each a name, a size and a note."""
    use, geometry, memory = plan.use, plan.geometry, plan.memory
    token = f"{geometry.bytes_per_token:,} bytes per token" + ("" if needs.kv_cache_dtype == needs.dtype else f" in {needs.kv_cache_dtype}")
    kept = f", {geometry.kept_tokens} of them on each rank" if geometry.context_ranks > 1 else ""
    blocks = f"{geometry.num_blocks:,} blocks of {geometry.block_size} tokens{kept}, {token}"
    on_gpu = memory.gpu is not None
    whole = ""
    if memory.gpu is not None:
        size = shown(memory.gpu)
        share = f"; GPU and CPU share {size} of memory" if memory.unified else f" of {size}"
        whole = f" (--gpu-memory-utilization {config.gpu_memory_utilization}{share})"
    own = [*(["CUDA and its libraries"] if on_gpu else []), *(["Python, libraries, tokenizer"] if memory.unified or not on_gpu else [])]
    held = f", {shown(memory.others)} of it held by other processes" if memory.others else ""
    active, rows, checkpoints = needs.model.active_parameters, config.max_num_seqs, _kept_states(config, plan)
    state, of_cache, of_rows = f"states of {shown(geometry.state_bytes)}", *(n * geometry.state_bytes for n in (checkpoints, 2 * rows))
    return [
        *([("active parameters", f" {active:,}", "of each token")] if active < needs.model.num_parameters else []),
        ("weights", shown(use.weights), stored(shape, needs, config)),
        *(("", shown(form.nbytes), f"of it {form}") for form in matrix_forms(shape, needs, config)),
        ("KV cache", shown(use.kv_cache), blocks if on_gpu else f"{blocks}; allocated as it is used"),
        *([("", shown(of_cache), f"of it {checkpoints:,} {state} for prompts to continue from")] if of_cache else []),
        ("activations", shown(use.activations), f"steps of {config.max_num_batched_tokens:,} tokens, {rows:,} sequences"),
        *([("graphs", shown(use.graphs), "CUDA graphs, estimated")] if use.graphs else []),
        ("rows", shown(use.rows), f"{rows:,} sequences of {geometry.max_model_len:,} tokens: ids and block tables"),
        *([("", shown(of_rows), f"of it {2 * rows:,} {state}, two of each sequence")] if of_rows else []),
        ("other", shown(use.other), "; ".join(own)),
        ("total", shown(use.total), f"of {shown(memory.total)}{whole}{held}"),
        ("context length", f"{geometry.max_model_len:,}", f"tokens (the model's own maximum is {shape.config.max_position:,})"),
        ("at that length", f"{plan.concurrency:,.1f}", "sequences at the same time"),
    ]


def _kept_states(config: ResolvedConfig, plan: MemoryPlan) -> int:
    """Returns how many state slots are for checkpoints: those beside the null slot and the two of each row."""
    return max(plan.geometry.num_states - 1 - 2 * config.max_num_seqs, 0)


def plan_sizes(plan: MemoryPlan) -> dict[str, int]:
    """Returns the parts of the bar, in bytes."""
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
    """Divides the cells of the bar in proportion to the sizes. Every part that is not empty gets at least one."""
    whole = sum(sizes.values())
    cells = {name: max(round(WIDTH * size / whole), 1) if size else 0 for name, size in sizes.items()}
    widest = max(cells, key=lambda name: cells[name])
    cells[widest] += WIDTH - sum(cells.values())
    return cells


def plan_sentence(plan: MemoryPlan) -> str:
    if plan.refusal is not None:
        return f"It does not fit: {plan.refusal}."
    return f"It fits: {shown(plan.memory.free - plan.use.total)} stay free when all of it is in use."


# -- the weights: how they are stored, and how each matrix is kept in memory
#
#    93.8 MiB   of it 4-bit weights in groups of 32: 30 qkv, 30 output, 30 gate_up, 30 down (from Q4_1)


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """All matrices that are kept in the same form."""

    kept: str  # such as "4-bit weights in groups of 32", or a dtype
    matrices: dict[str, int]  # name -> how many
    stored: list[str]  # the formats that they have in the file
    nbytes: int

    def __str__(self) -> str:
        listed = ", ".join(f"{count} {name}" for name, count in self.matrices.items())
        return f"{self.kept}: {listed}" + (f" (from {', '.join(self.stored)})" if self.stored else "")


def stored(shape: "ModelShape", needs: ModelNeeds, config: EngineConfig) -> str:
    """Returns a note on the size of the weights on disk, and on what loading makes of them."""
    if shape.stored_bytes is None:
        return "no weights on this machine"
    note = ""
    if config.quantization in ("int8", "int4"):
        note = f", {config.quantization} at load" + ("" if needs.keeps_codes else "; torch computes with floats, so no memory is saved")
    elif shape.packed:
        note = f", {'kept quantised' if needs.keeps_codes and config.quantization == 'auto' else 'converted to floats at load'}"
    return f"{shown(shape.stored_bytes)} on disk{note}"


def matrix_forms(shape: "ModelShape", needs: ModelNeeds, config: EngineConfig) -> list[MatrixForm]:
    """Returns the forms that matrices are kept in, or nothing if torch computes or no weights are quantised."""
    if not needs.keeps_codes or not (shape.packed or config.quantization in ("int8", "int4")):
        return []
    weights = {weight.name: weight for weight in shape.weights}
    found: dict[str, MatrixForm] = {}
    for one in shape.kept(needs.dtype, config.quantization, needs.device):
        parts = [weights[part] for part in one.matrix.parts if part in weights]
        kept = needs.dtype if one.codes is None else _form(one.codes, one.matrix.columns)
        if shape.expands(one, config.quantization):
            kept += " (their parts cannot be merged or split as quantised)"
        form = found.get(kept, MatrixForm(kept, {}, [], 0))
        matrices = Counter(form.matrices) + Counter([one.matrix.name])
        kinds = dict.fromkeys([*form.stored, *(part.kind for part in parts)])
        found[kept] = MatrixForm(kept, dict(matrices), list(kinds), form.nbytes + one.nbytes)
    return list(found.values())


def _form(codes: Codes, columns: int) -> str:
    if codes.fp8_span:
        return "8-bit floats with a scale for each row" if codes.fp8_span == columns else f"8-bit floats in blocks of {codes.fp8_span}"
    return f"{codes.bits}-bit weights in groups of {codes.group}"


# -- as a report


def plan_report(command: str, head: str, shape: "ModelShape", needs: ModelNeeds, config: ResolvedConfig, plan: MemoryPlan) -> Report:
    parts = [Part(name, size, shown(size)) for name, size in plan_sizes(plan).items()]
    caption = f"The whole bar is {shown(max(plan.memory.total, plan.use.total + plan.memory.others))}."
    rows = [("", "", ""), *plan_rows(shape, needs, config, plan)]
    sections = [
        Section("Where the memory goes", [pictured(parts_bar(parts), caption), table(rows, "memory", words=[2])]),
        Section("How many sequences fit", _fits(plan, config.max_num_seqs)),
    ]
    facts = {"command": command, "model": head, "machine": this_machine()}
    return Report("octavo plan", shape.name, plan_sentence(plan), plan.refusal is None, sections, facts)


def sequences_at(plan: MemoryPlan) -> list[tuple[int, int]]:
    """Returns lengths, each twice the last, from one block to the longest sequence; and how many sequences of each the pool holds."""
    geometry = plan.geometry
    lengths = [geometry.block_size]
    while 2 * lengths[-1] < geometry.max_model_len:
        lengths.append(2 * lengths[-1])
    lengths = [length for length in lengths if length < geometry.max_model_len] + [geometry.max_model_len]
    return [(length, (geometry.num_blocks - 1) // -(-length // geometry.block_size)) for length in lengths]


def _fits(plan: MemoryPlan, rows: int) -> list[Html]:
    found = sequences_at(plan)
    drawing = curves([Curve("sequences the pool holds", found)], "tokens of each, prompt and answer", "sequences", logarithmic=True)
    cells = ([f"{length:,}", f"{count:,}", f"{min(count, rows):,}"] for length, count in found)
    lines = [["tokens of each", "sequences", "at once"], *cells]
    text = f"Sequences that share a prefix share its blocks, so more may fit. At most {rows:,} run at the same time (--max-num-seqs)."
    return [paragraph(text), pictured(drawing), table(lines, "sequences that fit")]
