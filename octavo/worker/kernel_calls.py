"""Calls every kernel on small tensors of the model's shape, so that Triton compiles exactly what an engine needs.

Nothing is launched: `worker/compile_process.py` records the compilations, and then runs them. A kernel that is not called
here, or not in the way a step calls it, is compiled when the first step warms up: this costs time, but is correct.
Nothing may be compiled later.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from octavo.attention.delta_net import DeltaNetSpec
from octavo.attention.spec import LATENT_NORM_EPS, AttentionSpec
from octavo.kernels.cache_layout import Layout, empty_cache
from octavo.kernels.fp8_matrix import Fp8Matrix, zero_fp8
from octavo.kernels.gates import Gate
from octavo.kernels.ops import few_rows
from octavo.kernels.reference.sampling import Draws
from octavo.kernels.triton.attention.fused_decode import decode_attention_parts
from octavo.kernels.triton.attention.paged_attention import paged_attention, shares_of
from octavo.kernels.triton.delta_net.launch import SHORT, TILED_ROWS, delta_net
from octavo.kernels.triton.fp8 import fp8_calls
from octavo.kernels.triton.gemv.products import linear, merge_linear, merge_parts, norm_gate_up, norm_linear, norm_router
from octavo.kernels.triton.gemv.tiles import FP8_GEMV_ROWS, GEMV_ROWS
from octavo.kernels.triton.latent.inputs import write_latent
from octavo.kernels.triton.latent.launch import latent_attention
from octavo.kernels.triton.moe.products import mixture_calls
from octavo.kernels.triton.packed.products import packed_calls
from octavo.kernels.triton.sampling.draw import draw
from octavo.kernels.triton.sampling.logit_edits import edit_logits
from octavo.kernels.triton.sampling.rank import rank
from octavo.kernels.triton.sampling.sample import sample
from octavo.kernels.triton.step.cache import copy_blocks, write_kv
from octavo.kernels.triton.step.elementwise import add_weighted, gate_and_mul, gelu, scale_logits
from octavo.kernels.triton.step.norm import add_layer_norm, add_rms_norm, gated_norm, layer_norm, norm_add, norm_add_norm, rms_norm
from octavo.kernels.triton.step.rows import accept, copy_words, finish, prepare
from octavo.step.logit_edits import HEAD
from octavo.step.step_tensors import RowLayout, StepMemory, StepStates
from octavo.step.team_words import ENTRY, LINE, Teams, most_teams
from octavo.worker.kernel_shapes import KernelShapes

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
        self.model, self.layer, self.spec = shapes.model, shapes.layer, shapes.attentions[0]
        activation = self.layer.mlp.activation
        self.gate: Gate | None = None if activation == "gelu" else activation

    def calls(self) -> list[Call]:
        shapes, model = self.shapes, self.model
        attentions = [spec for spec in shapes.attentions if spec.latent is None]
        alone = {replace(spec, window=None, rope=None, rotary_dim=None): spec for spec in attentions}  # decode depends on neither
        calls: list[Call] = [self.attend_to(1, 1, spec) for spec in alone.values()]
        calls += [self.attend_to(1, 32, spec) for spec in attentions]
        calls += [self.attend_to(1, 1, spec, in_teams=True) for spec in attentions if spec.window is None]
        few = (1, 2, GEMV_ROWS) if self.has_small_batches() else ()
        calls += [self.few_rows(rows, spec) for rows in few for spec in attentions if not spec.output_gate]
        calls += [self.few_products(rows) for rows in few]
        calls += [self.few_around(rows, spec) for rows in few for spec in shapes.recurrences]
        steps = (*((rows, 1) for rows in TILED_ROWS), (2, 2 * SHORT))
        calls += [self.recur(rows, tokens, spec) for spec in shapes.recurrences for rows, tokens in steps]
        latents = [spec for spec in shapes.attentions if spec.latent is not None]
        calls += [self.attend_to_latents(queries, spec) for queries in (1, 32) for spec in latents]
        if shapes.experts is not None and self.gate is not None:
            inner = next(mlp.inner for mlp in shapes.mlps if mlp.experts is not None)
            calls += mixture_calls(shapes.experts, model.hidden_size, inner, self.gate, self.dtype, self.device)
        return [
            *calls,
            *self.norms_between_products(),
            *self.between_products(),
            lambda: sample(self.numbers(2, model.vocab_size), torch.ones(2, device=self.device), self.words(2, 4), self.words(2)),
            lambda: copy_blocks([self.cache()], [(0, 1)]),
            self.around_a_step,
            *self.behind_a_step(),
            *packed_calls(shapes.packed, self.dtype, self.device, self.gate or "swiglu"),
            *fp8_calls(shapes.fp8, self.dtype, self.device),
        ]  # fmt: skip

    def has_small_batches(self) -> bool:
        """As `SmallBatch` in `models/dense.py`."""
        plain = self.layer.norm.kind == "rms" and not self.layer.parallel and self.gate is not None
        attention = self.spec.qk_norm != "whole" and not self.spec.alibi and self.spec.latent is None
        return plain and few_rows(self.spec.head_dim) > 0 and attention

    def norms_between_products(self) -> list[Call]:
        hidden, norm, times = self.model.hidden_size, self.layer.norm, self.layer.residual_scale
        x, scale, eps = self.numbers(2, hidden), self.scales(hidden), norm.eps
        if norm.kind == "layer":
            bias = self.scales(hidden) if norm.bias else None
            calls: list[Call] = [lambda: add_layer_norm(x, x, scale, bias, eps)]
            return [*calls, lambda: layer_norm(x, scale, bias, eps)] if self.model.normed_embedding else calls
        calls = [lambda: add_rms_norm(x, x, scale, eps)]  # the final norm, if there is no other
        if times != 1 and self.layer.norms == "before":
            calls.append(lambda: add_rms_norm(x, x, scale, eps, times))
        if self.layer.norms != "before":
            calls.append(lambda: norm_add(x, x, scale, eps, times))
        if self.layer.norms == "both":
            calls.append(lambda: norm_add_norm(x, x, scale, scale, eps, times))
        return calls

    def between_products(self) -> list[Call]:
        model, widths = self.model, [mlp.inner if mlp.experts is None else mlp.experts.shared_inner for mlp in self.shapes.mlps]
        calls = [self.activated(width) for width in widths if width]
        if any(mlp.experts is not None and mlp.experts.shared_inner and mlp.experts.shared_gated for mlp in self.shapes.mlps):
            calls.append(lambda: add_weighted(self.hidden(2), self.hidden(2), self.hidden(2), self.hidden(1)))
        if model.logit_scale != 1 or model.logit_cap is not None:
            calls.append(lambda: scale_logits(self.numbers(2, model.vocab_size), model.logit_scale, model.logit_cap))
        return calls

    def activated(self, width: int) -> Call:
        gate = self.gate
        return (lambda: gelu(self.numbers(2, width))) if gate is None else lambda: gate_and_mul(self.numbers(2, 2 * width), gate)

    def attend_to(self, rows: int, queries: int, spec: AttentionSpec, in_teams: bool = False) -> Call:
        def call() -> None:
            tokens = rows * queries
            q, _, _ = self.written(tokens, spec)
            k, v = self.qkv(tokens).view(tokens, -1, spec.head_dim)[:, spec.num_heads :].chunk(2, dim=1)
            starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=self.device)
            context, cache = self.words(rows) + queries, self.cache()
            teams = Teams(self.words(rows, ENTRY), self.words(1 + most_teams(rows), LINE))
            paged_attention(
                q, cache, self.cache(), self.words(rows, 2), starts, context, spec.scale,
                torch.empty(q.shape, dtype=q.dtype, device=q.device), queries, spec.window, fresh=(k, v), soft_cap=spec.soft_cap,
                sinks=self.sinks(spec), slopes=self.slopes(spec),
                shares=shares_of(starts, context, cache, None, teams=teams) if in_teams else None,
            )  # fmt: skip

        return call

    def attend_to_latents(self, queries: int, spec: AttentionSpec) -> Call:
        def call() -> None:
            assert spec.latent is not None
            q, kv = self.numbers(queries, sum(spec.projections.values())).split([*spec.projections.values()], dim=1)
            if spec.latent.q_rank is not None:
                rms_norm(q, self.numbers(spec.latent.q_rank), LATENT_NORM_EPS)
                q = self.numbers(queries, spec.projected_q)
            k_up, norm = (
                self.numbers(spec.num_heads * spec.latent.plain_dim, spec.value_dim),
                (self.numbers(spec.value_dim), LATENT_NORM_EPS),
            )
            cache, places = self.cache(), (self.words(queries), self.places(queries))
            q = write_latent(q, kv, k_up, norm, *self.turns(spec), *places, cache)
            starts = torch.arange(0, queries + 1, queries, dtype=torch.int32, device=self.device)
            out = self.numbers(queries, spec.num_heads, spec.value_dim)
            latent_attention(q, cache, self.words(1, 2), starts, self.words(1) + queries, spec.scale, out, queries)

        return call

    def recur(self, rows: int, queries: int, spec: DeltaNetSpec) -> Call:
        def call() -> None:
            tokens = rows * queries
            qkv, z = self.numbers(tokens, spec.channels + spec.v_size).split([spec.channels, spec.v_size], dim=1)
            weights = self.numbers(spec.channels, spec.conv_width), self.wide(spec.v_heads), self.wide(spec.v_heads)
            state = self.wide(2, spec.conv_width - 1, spec.channels), self.wide(2, spec.v_heads, spec.k_dim, spec.v_dim)
            read, write, start, first = (self.words(rows + 1) for _ in range(4))
            slots = StepStates(read[:rows], write[:rows], start[:rows], first, self.words(tokens, 2))
            out = delta_net(qkv, self.numbers(tokens, 2 * spec.v_heads), *weights, *state, self.words(rows + 1), slots)
            gated_norm(out, z.view(out.shape), self.numbers(spec.v_dim), spec.norm_eps)

        return call

    def few_rows(self, rows: int, spec: AttentionSpec) -> Call:
        def call() -> None:
            shapes = self.shapes
            tables = self.words(rows, -(-self.max_len // self.size))
            parts = decode_attention_parts(
                self.qkv(rows), self.norms(), *self.turns(spec), self.words(rows), self.places(rows), tables, self.words(rows) + 1,
                self.cache(), self.cache(), spec.scale, spec.window, spec.soft_cap, self.sinks(spec),
            )  # fmt: skip
            if shapes.packed or shapes.fp8:
                merge_parts(*parts, self.dtype)
            merge_linear(*parts, self.numbers(self.model.hidden_size, spec.q_size), None)

        return call

    def few_products(self, rows: int) -> Call:
        def call() -> None:
            shapes, layer, hidden, inner = self.shapes, self.layer, self.model.hidden_size, self.layer.mlp.inner
            x, scale, eps, times = self.numbers(rows, hidden), self.scales(hidden), layer.norm.eps, layer.residual_scale
            wide = sum(self.spec.projections.values())
            bias = self.numbers(wide) if shapes.qkv_bias else None
            before, after = scale if layer.norms != "after" else None, scale if layer.norms != "before" else None
            norm_linear(x, x, before, eps, self.matrix(wide, hidden, rows), bias, after, times)
            if self.spec.output_gate:
                linear(self.numbers(rows, self.spec.q_size), self.matrix(hidden, self.spec.q_size, rows))
            if shapes.experts is not None:
                count, bias = shapes.experts.count, self.numbers(shapes.experts.count) if shapes.experts.bias else None
                norm_router(x, x, scale, eps, self.numbers(count, hidden), bias, after, times)
                return
            assert self.gate is not None
            norm_gate_up(x, x, before, eps, self.matrix(2 * inner, hidden, rows), after, times, self.gate)
            linear(self.numbers(rows, inner), self.matrix(hidden, inner, rows), None)

        return call

    def few_around(self, rows: int, spec: DeltaNetSpec) -> Call:
        """The products around a recurrence."""

        def call() -> None:
            x, scale, hidden = self.hidden(rows), self.scales(self.model.hidden_size), self.model.hidden_size
            norm_router(x, x, scale, self.layer.norm.eps, self.numbers(spec.channels + spec.v_size, hidden))
            linear(x, self.numbers(2 * spec.v_heads, hidden))
            linear(self.numbers(rows, spec.v_size), self.matrix(hidden, spec.v_size, rows))

        return call

    def around_a_step(self) -> None:
        layout = RowLayout(2, 4)
        words, step = self.words(2, layout.width), StepMemory(layout, 2, 2, self.device).step(2, 2, 2)
        prepare(words, layout, self.size, step)
        last = self.layer.mixer  # of the last layer's kind, which is the first here
        states, hidden = self.numbers(2, last.v_size if isinstance(last, DeltaNetSpec) else self.spec.result_size), self.hidden(2)
        finish(words, layout, step, self.places(2), states, hidden, self.words(2))
        accept(words, layout, self.words(1, 4), self.words(2))
        copy_words(words.view(-1), words.view(-1), self.places(3).view(1, 3), 1)

    def behind_a_step(self) -> list[Call]:
        """The kernels that the device's sampler calls."""
        logits, scores = self.numbers(1, self.model.vocab_size), torch.zeros(1, self.model.vocab_size, device=self.device)
        line, ids = self.words(1, 10), self.words(1)
        floats = line.view(torch.float32)
        draws = Draws(floats[:, 2], line[:, 3], floats[:, 4], floats[:, 5], line[:, 6:], ids)
        return [
            lambda: draw(logits, draws),
            lambda: draw(scores, draws),
            lambda: rank(logits, ids, 1),
            lambda: edit_logits(logits, [0], [0], [0], [self.words(HEAD)], line, line[:, 0]),
        ]

    def written(self, tokens: int, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
        cache = self.cache()
        q = write_kv(self.qkv(tokens), self.norms(), *self.turns(spec), self.words(tokens), self.places(tokens), cache, cache)
        return q, cache, cache

    def hidden(self, rows: int) -> Tensor:
        return self.numbers(rows, self.model.hidden_size)

    def qkv(self, tokens: int) -> Tensor:
        """Returns q, k and v, with the gate beside them if there is one."""
        return self.numbers(tokens, sum(self.spec.projections.values()))[:, : self.spec.q_size + 2 * self.spec.kv_size]

    def norms(self) -> tuple[Tensor, Tensor, float] | None:
        q_size, k_size = self.spec.normed
        return (self.scales(q_size), self.scales(k_size), self.layer.norm.eps) if self.spec.qk_norm else None

    def turns(self, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        table = torch.zeros(2, spec.turned // 2, device=self.device)
        return table, table

    def sinks(self, spec: AttentionSpec) -> Tensor | None:
        return self.numbers(spec.num_heads) if spec.sinks else None

    def slopes(self, spec: AttentionSpec) -> Tensor | None:
        return torch.zeros(spec.num_heads, device=self.device) if spec.alibi else None

    def scales(self, size: int) -> Tensor:
        """Returns the weight of a norm."""
        return torch.zeros(size, dtype=torch.float32 if self.shapes.wide_norms else self.dtype, device=self.device)

    def cache(self) -> Tensor:
        shape = 2, self.size, self.spec.num_kv_heads, self.spec.head_dim
        return empty_cache(self.layout, shape, self.dtype, self.device).zero_()

    def matrix(self, out: int, size: int, rows: int) -> Tensor | Fp8Matrix:
        """Returns a matrix in the format that the kernels for so few rows receive."""
        span = next((one.span for one in self.shapes.fp8 if (one.out_features, one.in_features) == (out, size)), 0)
        return zero_fp8(out, size, span, self.device) if span and rows <= FP8_GEMV_ROWS else self.numbers(out, size)

    def numbers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def wide(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device)

    def words(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def places(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)
