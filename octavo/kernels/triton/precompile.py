"""Calls of every kernel, on a few numbers of the model's shape: what they make Triton compile is what an engine needs.

Nothing is launched: `worker/compile_process.py` writes down what would be compiled, and compiles it. A kernel that is not called
here, or in another way than a step calls it, is compiled when the first step warms up: that costs time, not correctness.
Nothing may be compiled later.
"""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from octavo.kernels.asks import HEAD
from octavo.kernels.cache_layout import Layout, empty_cache
from octavo.kernels.ops import few_rows
from octavo.kernels.reference.sampling import Draws
from octavo.kernels.row_words import RowLayout
from octavo.kernels.step_tensors import StepMemory
from octavo.kernels.triton.attention.fused_decode import decode_attention_parts
from octavo.kernels.triton.attention.paged_attention import paged_attention
from octavo.kernels.triton.gemv.products import gate_up, linear, merge_linear, merge_parts, norm_linear
from octavo.kernels.triton.gemv.tiles import GEMV_ROWS
from octavo.kernels.triton.packed.precompile import PackedShape, packed_calls
from octavo.kernels.triton.sampling.draw import draw
from octavo.kernels.triton.sampling.logit_edits import adjust
from octavo.kernels.triton.sampling.rank import rank
from octavo.kernels.triton.sampling.sample import sample
from octavo.kernels.triton.step.activation import silu_and_mul
from octavo.kernels.triton.step.copy_blocks import copy_blocks
from octavo.kernels.triton.step.norm import add_rms_norm
from octavo.kernels.triton.step.rows import copy_words, finish, prepare
from octavo.kernels.triton.step.write_kv import write_kv
from octavo.model_config import ModelConfig

Call = Callable[[], object]


def kernel_keys() -> list[str]:
    """Has Triton name every kernel and what it calls, in one order, before it compiles any; the names change with the source.

    The name it gives a kernel in its cache depends on which others it has named before, where they share functions. Whoever
    compiles has to call this first, or does not find what others compiled.

    From then on no launch looks whether constants are still what they were: with dozens of them that was half of its time.
    """
    modules = [vars(sys.modules[name]) for name in sorted(sys.modules) if name.startswith("octavo.kernels.triton.")]
    functions = [function for module in modules for _, function in sorted(module.items()) if isinstance(function, JITFunction)]
    keys = [function.cache_key for function in functions]  # all of them, before the names of any are forgotten
    for function in functions:
        function.used_global_vals.clear()
    return keys


class KernelCalls:
    """Calls of every kernel, on tensors of the model's shape."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        block_size: int,
        max_len: int,
        device: torch.device,
        layout: Layout = "nhd",
        packed: Sequence[PackedShape] = (),
    ) -> None:
        """`packed`: the matrices that are kept as codes."""
        self.config, self.dtype, self.size, self.device, self.layout = config, dtype, block_size, device, layout
        self.max_len, self.packed = max_len, packed

    def calls(self) -> list[Call]:
        config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
        x, scale = self.numbers(2, hidden), self.numbers(hidden)
        windows = {window is not None: window for window in config.windows}.values()
        calls: list[Call] = [self.attend_to(1, 1, None), *(self.attend_to(1, 32, window) for window in windows)]
        few = (1, 2, GEMV_ROWS) if few_rows(config.head_dim) else ()
        calls += [self.few_rows(rows, window) for rows in few for window in windows]
        calls += [self.few_products(rows) for rows in few]
        return [
            *calls,
            lambda: add_rms_norm(x, x, scale, config.norm_eps),
            lambda: silu_and_mul(self.numbers(2, 2 * inner)),
            lambda: sample(self.numbers(2, config.vocab_size), torch.ones(2, device=self.device), self.words(2, 4), self.words(2)),
            lambda: copy_blocks([self.cache()], [(0, 1)]),
            self.around_a_step,
            *self.behind_a_step(),
            *packed_calls(self.packed, self.dtype, self.device),
        ]  # fmt: skip

    def attend_to(self, rows: int, queries: int, window: int | None) -> Call:
        def call() -> None:
            config, tokens = self.config, rows * queries
            q, _, _ = self.written(tokens)
            k, v = self.qkv(tokens).view(tokens, -1, config.head_dim)[:, config.num_heads :].chunk(2, dim=1)
            starts = torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=self.device)
            paged_attention(
                q, self.cache(), self.cache(), self.words(rows, 2), starts, self.words(rows) + queries, config.head_dim**-0.5,
                torch.empty(q.shape, dtype=q.dtype, device=q.device), queries, window, fresh=(k, v),
            )  # fmt: skip

        return call

    def few_rows(self, rows: int, window: int | None) -> Call:
        def call() -> None:
            config = self.config
            tables = self.words(rows, -(-self.max_len // self.size))
            parts = decode_attention_parts(
                self.qkv(rows), self.norms(), *self.turns(), self.places(rows), self.places(rows), tables, self.words(rows) + 1,
                self.cache(), self.cache(), config.head_dim**-0.5, window,
            )  # fmt: skip
            if self.packed:
                merge_parts(*parts, self.dtype)
            merge_linear(*parts, self.numbers(config.hidden_size, config.num_heads * config.head_dim), None)

        return call

    def few_products(self, rows: int) -> Call:
        def call() -> None:
            config, hidden, inner = self.config, self.config.hidden_size, self.config.intermediate_size
            x, scale = self.numbers(rows, hidden), self.numbers(hidden)
            wide = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
            bias = self.numbers(wide) if config.qkv_bias else None
            norm_linear(x, x, scale, config.norm_eps, self.numbers(wide, hidden), bias)
            gate_up(x, x, scale, config.norm_eps, self.numbers(2 * inner, hidden))
            linear(self.numbers(rows, inner), self.numbers(hidden, inner), None)

        return call

    def around_a_step(self) -> None:
        layout = RowLayout(2, 4)
        words, step = self.words(2, layout.width), StepMemory(layout, 2, 2, self.device).step(2, 2)
        prepare(words, layout, self.size, step)
        states, hidden = self.numbers(2, self.config.num_heads * self.config.head_dim), self.numbers(2, self.config.hidden_size)
        finish(words, layout, step, self.places(2), states, hidden, self.words(2))
        copy_words(words.view(-1), words.view(-1), self.places(3).view(1, 3), 1)

    def behind_a_step(self) -> list[Call]:
        """What the sampler of the device calls."""
        logits, scores = self.numbers(1, self.config.vocab_size), torch.zeros(1, self.config.vocab_size, device=self.device)
        line, ids = self.words(1, 10), self.words(1)
        floats = line.view(torch.float32)
        draws = Draws(floats[:, 2], line[:, 3], floats[:, 4], floats[:, 5], line[:, 6:], ids)
        return [
            lambda: draw(logits, draws),
            lambda: draw(scores, draws),
            lambda: rank(logits, ids, 1),
            lambda: adjust(logits, [0], [0], [self.words(HEAD)], line, line[:, 0], line[:, 0]),
        ]

    def written(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        cache = self.cache()
        q = write_kv(self.qkv(tokens), self.norms(), *self.turns(), self.places(tokens), self.places(tokens), cache, cache)
        return q, cache, cache

    def qkv(self, tokens: int) -> Tensor:
        config = self.config
        return self.numbers(tokens, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)

    def norms(self) -> tuple[Tensor, Tensor, float] | None:
        config = self.config
        return (self.numbers(config.head_dim), self.numbers(config.head_dim), config.norm_eps) if config.qk_norm else None

    def turns(self) -> tuple[Tensor, Tensor]:
        table = torch.zeros(2, self.config.head_dim // 2, device=self.device)
        return table, table

    def cache(self) -> Tensor:
        shape = 2, self.size, self.config.num_kv_heads, self.config.head_dim
        return empty_cache(self.layout, shape, self.dtype, self.device).zero_()

    def numbers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def words(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def places(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64, device=self.device)
