"""Compiles kernels in other processes while this one imports torch, starts CUDA and reads weights.

    this process     starts it | torch, CUDA | sends `Wanted`    | weights | warm-up: waits for each kernel it calls, if necessary
    the compilers    torch, triton ..........| one kernel per process at a time, into Triton's cache on disk ....

One process is started, which forks the others (`compile_process.py`): this process, which runs CUDA, is never forked. None of them
starts CUDA or outlives this one. Kernels that they do not finish are compiled here on their first call, which only costs time.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from octavo.attention.spec import AttentionSpec
from octavo.child import command
from octavo.kernels.kernel_shapes import AttentionShape, ExpertShape, Fp8Shape, KernelShapes, PackedShape
from octavo.log import Stopwatch, logger
from octavo.policy.description import Experts, LayerShape, ModelDescription
from octavo.policy.model_size import Codes, Kept

DRIVER = "driver"  # the part of Triton that launches kernels
EXPERTS = "experts_"  # prefix of the names of expert matrices
SEEN, DONE, FAILED = "all", "done", "failed"  # first word of a line from the compile process


@dataclass(frozen=True, slots=True)
class Wanted:
    """Everything that determines which kernels are compiled."""

    shapes: KernelShapes
    dtype: str
    block_size: int
    max_len: int
    layout: Literal["nhd", "hnd"]  # of the KV cache
    capability: int  # 90 for 9.0
    processes: int


def kernel_shapes(model: ModelDescription, kept: list[Kept]) -> KernelShapes | None:
    """Returns the kernels to compile for this model, or None if its layers use kernels of another kind. `kept`: its matrices"""
    mixers = [layer.mixer for layer in model.kinds if isinstance(layer.mixer, AttentionSpec)]
    layer, alike = model.layers[0], {replace(mixer, window=None, rope=None) for mixer in mixers}
    if len(mixers) != len(model.kinds) or len(alike) != 1 or any(_differs(other, layer) for other in model.kinds):
        return None
    if layer.mlp.activation == "gelu":
        return None
    codes = [(one.matrix, one.codes) for one in kept if one.codes and not one.matrix.name.startswith(EXPERTS)]
    packed = {
        PackedShape(one.rows, one.columns, form.bits, form.group, one.bias, one.gated, *_table(form))
        for one, form in codes
        if not form.fp8_span
    }
    fp8 = {Fp8Shape(one.rows, one.columns, form.fp8_span, one.bias) for one, form in codes if form.fp8_span}
    spec = mixers[0]
    return KernelShapes(
        vocab=model.vocab_size,
        hidden=model.hidden_size,
        inner=layer.mlp.inner,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        attention_scale=spec.scale,
        norm_eps=layer.norm.eps,
        qkv_bias=any(matrix.bias for matrix in model.matrices if matrix.name == "qkv"),
        qk_norm=spec.qk_norm,
        attentions=tuple({(one.window is None, one.rotated): one for one in map(_attention, mixers)}.values()),
        packed=tuple(sorted(packed)),
        fp8=tuple(sorted(fp8)),
        gate=layer.mlp.activation,
        norms=layer.norms,
        wide_norms=any(vector.wide for vector in model.vectors),
        residual_scale=layer.residual_scale,
        logit_scale=model.logit_scale,
        logit_cap=model.logit_cap,
        experts=None if layer.mlp.experts is None else _experts(layer.mlp.experts, model, kept),
    )


def _differs(layer: LayerShape, first: LayerShape) -> bool:
    """Whether a layer calls kernels of another kind, or other ones than the first layer."""
    own, other = (replace(one, mixer=first.mixer) for one in (layer, first))
    return own != other or layer.parallel or layer.norm.kind != "rms"


def _attention(spec: AttentionSpec) -> AttentionShape:
    rotated = spec.head_dim if spec.rotary_dim is None else spec.rotary_dim
    return AttentionShape(spec.window, 0 if spec.rope is None else rotated, spec.soft_cap, spec.sinks)


def _experts(experts: Experts, model: ModelDescription, kept: list[Kept]) -> ExpertShape:
    form = next((one.codes for one in kept if one.codes and one.matrix.name.startswith(EXPERTS)), None)
    bias = any(matrix.bias for matrix in model.matrices if matrix.name.startswith(EXPERTS))
    codes = (0, 0) if form is None else (form.bits, form.group, *_table(form))
    return ExpertShape(experts.held, experts.chosen, experts.scores, experts.normed, bias, *codes)


def _table(form: Codes) -> tuple[bool, bool]:
    """Returns whether there is a table, and whether it is that of MXFP4."""
    return bool(form.table), form.table == "FP4"


def variant(function: Any, key: str) -> str:
    """Returns a kernel's name for both sides. `function`, `key`: from Triton's hook; a key contains types, constants and options."""
    return f"{function.module}.{function.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


class Compilers:
    """The compile processes. If there are none, kernels are compiled in this process."""

    def __init__(self, process: "subprocess.Popen[str] | None" = None) -> None:
        self.seconds_waited = 0.0
        self._process = process
        self._asked = ""
        self._known: set[str] | None = None  # None: the list has not arrived yet
        self._coming: set[str] = set()

    @classmethod
    def start(cls) -> "Compilers":
        """Starts them in a separate process group, so that Ctrl-C does not reach them and all can be killed at once."""
        words = command("octavo.worker.compile_process", "main", os.getpid())
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        try:
            return cls(subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, process_group=0))
        except OSError as error:
            logger.debug("No process to compile kernels in: %r", error)
            return cls()

    def compile(self, wanted: Wanted) -> None:
        """Starts the compilation, and returns at once."""
        self._asked = json.dumps(asdict(wanted))
        if self._process is None or self._process.stdin is None:
            return
        try:
            os.write(self._process.stdin.fileno(), self._asked.encode() + b"\n")
        except OSError as error:  # the process has died
            logger.debug("Kernels are not compiled ahead: %r", error)

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """A context in which the first call of a kernel waits until it is compiled. Every kernel must be called before the context ends."""
        from triton import knobs

        mark = self._mark()
        if mark.exists():
            self.close()
        if self._process is not None:
            self._wait_for(DRIVER)
        before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = self._before_compiling
        try:
            yield
        finally:
            knobs.runtime.jit_cache_hook = before
        with suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()

    def close(self) -> None:
        """Kills the processes, in any state."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with self._process:  # closes the pipes, and waits
            self._process = None

    def __enter__(self) -> "Compilers":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _mark(self) -> Path:
        """Returns a marker file in Triton's cache. If it exists, all wanted kernels were compiled before, and nothing is waited for."""
        from triton import knobs
        from triton._C.libtriton import get_cache_invalidating_env_vars
        from triton.runtime.cache import triton_key

        from octavo.kernels.triton.precompile import kernel_keys

        decides = [self._asked, sys.version, triton_key(), str(sorted(get_cache_invalidating_env_vars().items())), *kernel_keys()]
        return Path(knobs.cache.dir) / f"octavo-{hashlib.sha256(' '.join(decides).encode()).hexdigest()}"

    def _before_compiling(self, *, key: str, fn: Any, **_: Any) -> None:
        if self._process is not None:
            self._wait_for(variant(fn, key))

    def _wait_for(self, name: str) -> None:
        """Waits until a kernel is in the cache, or will certainly not be compiled."""
        watch = Stopwatch()
        while (self._known is None or name in self._coming) and self._hear():
            pass
        self.seconds_waited += watch.total()
        if name not in (self._known or ()):
            logger.debug("Not compiled ahead: %s", name)

    def _hear(self) -> bool:
        """Reads one line. Returns False if no more will follow."""
        assert self._process is not None and self._process.stdout is not None
        word, _, rest = self._process.stdout.readline().rstrip("\n").partition(" ")
        if word == SEEN:
            self._known = set(rest.split())
            self._coming = set(self._known)
        elif word in (DONE, FAILED):
            name, _, why = rest.partition(" ")
            self._coming.discard(name)
            if word == FAILED:
                logger.debug("Compiling ahead failed: %s: %s", name, why)
        else:  # the process has ended
            self._known, self._coming = self._known or set(), set()
        return bool(word)
