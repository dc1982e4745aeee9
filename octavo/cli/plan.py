"""`octavo plan`: how much memory a model needs, from its config and headers. No weights are read.

The engine starts by the same plan (`policy/memory_plan.py`). Flags ask "what if": another memory size, context length,
batch, dtype or quantization.
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

from octavo.cli.args import add_engine_flags, engine_config
from octavo.cli.config_file import size
from octavo.cli.plan_text import MARKS, plan_head, plan_text
from octavo.cli.plan_weights import matrix_forms
from octavo.cli.targets import add_report_flag, check_target, write_report
from octavo.cli.terminal import can_show
from octavo.config import Device, ResolvedConfig, no_color
from octavo.errors import ConfigError
from octavo.loading.names import NAME
from octavo.policy.auto import check_cache_dtype, resolved, suited
from octavo.policy.memory_plan import Memory, MemoryPlan, ModelNeeds, plan_memory

if TYPE_CHECKING:
    from octavo.loading.shape import ModelShape

SETTINGS = (
    "revision", "dtype", "quantization", "device", "kv_cache_dtype", "max_model_len", "block_size", "kv_cache_memory_bytes",
    "gpu_memory_utilization", "num_gpu_blocks_override", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "native", "cpu_isa",
)  # fmt: skip


EXAMPLES = """examples:
  octavo plan                                         the default model on this machine
  octavo plan Qwen/Qwen3-8B --device cuda --memory 24GiB
  octavo plan model.gguf --max-model-len 32k --max-num-seqs 8

Exit code 0: it fits. 1: it does not, and the last line says what to change."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] [MODEL]"
    parser.epilog = EXAMPLES
    text = f"a folder, a .gguf file, a config.json, owner/name[@revision][:QUANT] on the hub, or {NAME}, the default model"
    parser.add_argument("words", metavar="MODEL", nargs="?", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_report_flag(parser)
    group = parser.add_argument_group("what if")
    text = "plan for a device with this much memory, all of it free (24GiB, 512m); default: this machine"
    group.add_argument("--memory", type=size, metavar="SIZE", help=text)
    add_engine_flags(parser, only=SETTINGS)


def run(args: argparse.Namespace) -> int:
    check_target("--report", args.report)
    from octavo.cli.plan_report import plan_report
    from octavo.loading.shape import model_shape
    from octavo.worker.device import level_used
    from octavo.worker.machine import num_threads, refuse_float16, resolve_dtype

    asked = engine_config(args, args.words)
    shape = model_shape(asked.model, asked.revision)
    config = suited(resolved(asked, _device(asked.device, args.memory)), shape.model)
    level = level_used(config)
    refuse_float16(config, config.device, level)
    dtype, threads = resolve_dtype(config.dtype, shape.config.dtype, config.device, level), num_threads() if level else 0
    check_cache_dtype(config, config.device, dtype)
    needs = shape.needs(dtype, config.quantization, config.kv_cache_dtype, threads, config.device)
    plan, head = plan_memory(needs, config, _memory(config, args.memory)), plan_head(shape, needs, config, level)
    if args.json:
        print(json.dumps(_record(shape, needs, config, plan, level), indent=1))
    else:
        plain = not can_show("".join(block for block, _, _ in MARKS.values()))
        print(plan_text(head, shape, needs, config, plan, plain, colour=sys.stdout.isatty() and not no_color()))
    if args.report is not None:
        write_report(args.report, plan_report(args.typed, head, shape, needs, config, plan))
    return 0 if plan.refusal is None else 1


def _device(asked: Device, size: int | None) -> Literal["cpu", "cuda"]:
    """With --memory, a GPU need not be here. torch is imported only where there may be one."""
    from octavo.worker.device import device_here, nvidia_signs

    if asked == "cuda" and size is not None:
        return "cuda"
    if asked == "cpu" or (asked == "auto" and not nvidia_signs()):
        return "cpu"
    try:
        return device_here(asked).device
    except ConfigError as error:
        raise ConfigError(f"{error}; add --memory 80g to plan for a GPU with that much memory") from error


def _memory(config: ResolvedConfig, size: int | None) -> Memory:
    from octavo.worker.memory import memory

    if size is None:
        return memory(config)
    return Memory.of_gpu(size, size, config.gpu_memory_utilization) if config.device == "cuda" else Memory(size)


def _record(shape: "ModelShape", needs: ModelNeeds, config: ResolvedConfig, plan: MemoryPlan, level: str | None) -> dict[str, Any]:
    """All of the table, with sizes in bytes."""
    use, geometry = plan.use, plan.geometry
    return {
        "model": shape.name,
        "device": config.device,
        "cpu_isa": level,
        "dtype": needs.dtype,
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
