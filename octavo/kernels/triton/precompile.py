"""Calls every kernel on small tensors of the model's shape, so that Triton compiles exactly what an engine needs.

Nothing is launched: `worker/compile_process.py` records the compilations, and then runs them. A kernel that is not called
here, or not in the way a step calls it, is compiled when the first step warms up: this costs time, but is correct.
Nothing may be compiled later.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from octavo.kernels.cache_layout import Layout, empty_cache
from octavo.kernels.fp8_matrix import Fp8Matrix, zero_fp8
from octavo.kernels.kernel_shapes import AttentionShape, KernelShapes
from octavo.kernels.logit_edits import HEAD
from octavo.kernels.ops import few_rows
from octavo.kernels.reference.sampling import Draws
from octavo.kernels.row_words import RowLayout
from octavo.kernels.step_tensors import StepMemory
from octavo.kernels.team_words import ENTRY, LINE, Teams, most_teams
from octavo.kernels.triton.attention.fused_decode import decode_attention_parts
from octavo.kernels.triton.attention.paged_attention import paged_attention, shares_of
from octavo.kernels.triton.fp8.precompile import fp8_calls
from octavo.kernels.triton.gemv.products import gate_up, linear, merge_linear, merge_parts, norm_linear, norm_router
from octavo.kernels.triton.gemv.tiles import FP8_GEMV_ROWS, GEMV_ROWS
from octavo.kernels.triton.moe.precompile import mixture_calls
from octavo.kernels.triton.packed.precompile import packed_calls
from octavo.kernels.triton.sampling.draw import draw
from octavo.kernels.triton.sampling.logit_edits import edit_logits
from octavo.kernels.triton.sampling.rank import rank
from octavo.kernels.triton.sampling.sample import sample
from octavo.kernels.triton.step.activation import gate_and_mul
from octavo.kernels.triton.step.copy_blocks import copy_blocks
from octavo.kernels.triton.step.logits import scale_logits
from octavo.kernels.triton.step.norm import add_rms_norm, norm_add, norm_add_norm
from octavo.kernels.triton.step.rows import accept, copy_words, finish, prepare
from octavo.kernels.triton.step.write_kv import write_kv

Call = Callable[[], object]


def kernel_keys() -> list[str]:
    """Computes the cache keys of all kernels and of the functions they call, in a fixed order, before any is compiled.

    The key of a kernel in Triton's cache depends on which others were computed before, if they share functions. Every process
    that compiles must call this first, or it does not find kernels that others compiled. Keys change with the source.

    It also disables the check at each launch that constants are unchanged: with dozens of them, that took half of the launch time.
    """
    modules = [vars(sys.modules[name]) for name in sorted(sys.modules) if name.startswith("octavo.kernels.triton.")]
    functions = [function for module in modules for _, function in sorted(module.items()) if isinstance(function, JITFunction)]
    keys = [function.cache_key for function in functions]  # all of them, before globals are cleared
    for function in functions:
        function.used_global_vals.clear()
    return keys


class KernelCalls:
    """Calls of every kernel, on tensors of the model's shape."""

    def __init__(
        self,
        shapes: KernelShapes,
        dtype: torch.dtype,
        block_size: int,
        max_len: int,
        device: torch.device,
        layout: Layout = "nhd",
    ) -> None:
        self.shapes, self.dtype, self.size, self.device, self.layout = shapes, dtype, block_size, device, layout
        self.max_len = max_len

    def calls(self) -> list[Call]:
        shapes = self.shapes
        kinds = {kind[2:]: kind for kind in shapes.attentions}.values()  # decode kernels do not depend on windows or rotation
        calls: list[Call] = [self.attend_to(1, 1, kind) for kind in kinds]
        calls += [self.attend_to(1, 32, kind) for kind in shapes.attentions]
        calls += [self.attend_to(1, 1, kind, in_teams=True) for kind in shapes.attentions if kind.window is None]
        few = (1, 2, GEMV_ROWS) if few_rows(shapes.head_dim) and shapes.qk_norm != "whole" else ()
        calls += [self.few_rows(rows, kind) for rows in few for kind in shapes.attentions]
        calls += [self.few_products(rows) for rows in few]
        return [
            *calls,
            *self.between_products(),
            lambda: sample(self.numbers(2, shapes.vocab), torch.ones(2, device=self.device), self.words(2, 4), self.words(2)),
            lambda: copy_blocks([self.cache()], [(0, 1)]),
            self.around_a_step,
            *self.behind_a_step(),
            *packed_calls(shapes.packed, self.dtype, self.device, shapes.gate),
            *fp8_calls(shapes.fp8, self.dtype, self.device),
            *mixture_calls(shapes, self.dtype, self.device),
        ]  # fmt: skip

    def between_products(self) -> list[Call]:
        shapes, x, scale = self.shapes, self.numbers(2, self.shapes.hidden), self.scales(self.shapes.hidden)
        eps, times = shapes.norm_eps, shapes.residual_scale
        calls: list[Call] = [lambda: add_rms_norm(x, x, scale, eps)]  # the final norm, if there is no other
        if times != 1 and shapes.norms == "before":
            calls.append(lambda: add_rms_norm(x, x, scale, eps, times))
        if shapes.norms != "before":
            calls.append(lambda: norm_add(x, x, scale, eps, times))
        if shapes.norms == "both":
            calls.append(lambda: norm_add_norm(x, x, scale, scale, eps, times))
        if shapes.experts is None:
            calls.append(lambda: gate_and_mul(self.numbers(2, 2 * shapes.inner), shapes.gate))
        if shapes.logit_scale != 1 or shapes.logit_cap is not None:
            calls.append(lambda: scale_logits(self.numbers(2, shapes.vocab), shapes.logit_scale, shapes.logit_cap))
        return calls

    def attend_to(self, rows: int, queries: int, kind: AttentionShape, in_teams: bool = False) -> Call:
        def call() -> None:
            shapes, tokens = self.shapes, rows * queries
            q, _, _ = self.written(tokens, kind)
            k, v = self.qkv(tokens).view(tokens, -1, shapes.head_dim)[:, shapes.num_heads :].chunk(2, dim=1)
            starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=self.device)
            context, cache = self.words(rows) + queries, self.cache()
            teams = Teams(self.words(rows, ENTRY), self.words(1 + most_teams(rows), LINE))
            paged_attention(
                q, cache, self.cache(), self.words(rows, 2), starts, context, shapes.attention_scale,
                torch.empty(q.shape, dtype=q.dtype, device=q.device), queries, kind.window, fresh=(k, v), soft_cap=kind.soft_cap,
                sinks=self.sinks(kind), shares=shares_of(starts, context, cache, None, teams=teams) if in_teams else None,
            )  # fmt: skip

        return call

    def few_rows(self, rows: int, kind: AttentionShape) -> Call:
        def call() -> None:
            shapes = self.shapes
            tables = self.words(rows, -(-self.max_len // self.size))
            parts = decode_attention_parts(
                self.qkv(rows), self.norms(), *self.turns(kind), self.places(rows), self.places(rows), tables, self.words(rows) + 1,
                self.cache(), self.cache(), shapes.attention_scale, kind.window, kind.soft_cap, self.sinks(kind),
            )  # fmt: skip
            if shapes.packed or shapes.fp8:
                merge_parts(*parts, self.dtype)
            merge_linear(*parts, self.numbers(shapes.hidden, shapes.num_heads * shapes.head_dim), None)

        return call

    def few_products(self, rows: int) -> Call:
        def call() -> None:
            shapes, hidden, inner, eps = self.shapes, self.shapes.hidden, self.shapes.inner, self.shapes.norm_eps
            x, scale = self.numbers(rows, hidden), self.scales(hidden)
            wide = (shapes.num_heads + 2 * shapes.num_kv_heads) * shapes.head_dim
            bias = self.numbers(wide) if shapes.qkv_bias else None
            before, after = scale if shapes.norms != "after" else None, scale if shapes.norms != "before" else None
            norm_linear(x, x, before, eps, self.matrix(wide, hidden, rows), bias, after, shapes.residual_scale)
            if shapes.experts is not None:
                count, bias = shapes.experts.count, self.numbers(shapes.experts.count) if shapes.experts.bias else None
                norm_router(x, x, scale, eps, self.numbers(count, hidden), bias, after, shapes.residual_scale)
                return
            gate_up(x, x, before, eps, self.matrix(2 * inner, hidden, rows), after, shapes.residual_scale, shapes.gate)
            linear(self.numbers(rows, inner), self.matrix(hidden, inner, rows), None)

        return call

    def around_a_step(self) -> None:
        layout = RowLayout(2, 4)
        words, step = self.words(2, layout.width), StepMemory(layout, 2, 2, self.device).step(2, 2, 2)
        prepare(words, layout, self.size, step)
        states, hidden = self.numbers(2, self.shapes.num_heads * self.shapes.head_dim), self.numbers(2, self.shapes.hidden)
        finish(words, layout, step, self.places(2), states, hidden, self.words(2))
        accept(words, layout, self.words(1, 4), self.words(2))
        copy_words(words.view(-1), words.view(-1), self.places(3).view(1, 3), 1)

    def behind_a_step(self) -> list[Call]:
        """The kernels that the device's sampler calls."""
        logits, scores = self.numbers(1, self.shapes.vocab), torch.zeros(1, self.shapes.vocab, device=self.device)
        line, ids = self.words(1, 10), self.words(1)
        floats = line.view(torch.float32)
        draws = Draws(floats[:, 2], line[:, 3], floats[:, 4], floats[:, 5], line[:, 6:], ids)
        return [
            lambda: draw(logits, draws),
            lambda: draw(scores, draws),
            lambda: rank(logits, ids, 1),
            lambda: edit_logits(logits, [0], [0], [0], [self.words(HEAD)], line, line[:, 0]),
        ]

    def written(self, tokens: int, kind: AttentionShape) -> tuple[Tensor, Tensor, Tensor]:
        cache = self.cache()
        q = write_kv(self.qkv(tokens), self.norms(), *self.turns(kind), self.places(tokens), self.places(tokens), cache, cache)
        return q, cache, cache

    def qkv(self, tokens: int) -> Tensor:
        shapes = self.shapes
        return self.numbers(tokens, (shapes.num_heads + 2 * shapes.num_kv_heads) * shapes.head_dim)

    def norms(self) -> tuple[Tensor, Tensor, float] | None:
        shapes = self.shapes
        heads, kv_heads = (shapes.num_heads, shapes.num_kv_heads) if shapes.qk_norm == "whole" else (1, 1)
        weights = self.scales(heads * shapes.head_dim), self.scales(kv_heads * shapes.head_dim)
        return (*weights, shapes.norm_eps) if shapes.qk_norm else None

    def turns(self, kind: AttentionShape) -> tuple[Tensor, Tensor]:
        table = torch.zeros(2, kind.rotated // 2, device=self.device)
        return table, table

    def sinks(self, kind: AttentionShape) -> Tensor | None:
        return self.numbers(self.shapes.num_heads) if kind.sinks else None

    def scales(self, size: int) -> Tensor:
        """Returns the weight of a norm."""
        return torch.zeros(size, dtype=torch.float32 if self.shapes.wide_norms else self.dtype, device=self.device)

    def cache(self) -> Tensor:
        shape = 2, self.size, self.shapes.num_kv_heads, self.shapes.head_dim
        return empty_cache(self.layout, shape, self.dtype, self.device).zero_()

    def matrix(self, out: int, size: int, rows: int) -> Tensor | Fp8Matrix:
        """Returns a matrix in the format that the kernels for so few rows receive."""
        span = next((one.span for one in self.shapes.fp8 if (one.out_features, one.in_features) == (out, size)), 0)
        return zero_fp8(out, size, span, self.device) if span and rows <= FP8_GEMV_ROWS else self.numbers(out, size)

    def numbers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def words(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def places(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)
