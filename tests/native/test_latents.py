"""Latent attention on every level: what the torch references give, and the same bits for a token alone, from caches of every kind.

Slots that no row has written are NaN, and so is what lies behind the latent of a key in them: reading one by mistake shows.
"""

import ctypes
from typing import Any

import numpy as np
import pytest

from octavo.kernels.cpu.attention_case import norm_struct
from octavo.kernels.cpu.library import BF16, F16, F32, PANEL, Latent, Layer, Model, NativeLibrary, Norm, Step, address
from octavo.kernels.cpu.packing import Floats, PackedMatrix, pack_float
from tests.support.native import error, levels_here, running
from tests.support.native_attention import MIXED
from tests.support.native_latent import NEAR, LatentCase
from tests.support.soaked import pairs

CACHES = {"float32": F32, "bfloat16": BF16, "float16": F16}
LONG = ((0, 5), (600, 1), (255, 3), (511, 2))  # several pieces of 256 keys


class Run:
    """The case in the native library: its structs, and what they point to."""

    def __init__(self, case: LatentCase, library: NativeLibrary) -> None:
        self.case, self.library, tokens = case, library, case.tokens
        self.cache, self.turn = tokens.past()[0], (np.cos(tokens.angles), np.sin(tokens.angles))
        layer: Layer = tokens.layer(*self.turn, self.cache, self.cache)
        layer.v_cache, layer.kv_heads, layer.attention_scale = None, case.heads // case.group, case.scale
        layer.k_norm = norm_struct(case.weights["k_norm"])
        layer.q_norm = norm_struct(case.weights["q_norm"]) if case.q_rank else Norm()
        self.packed = self._packed()
        latent = Latent(plain_dim=case.plain, value_dim=case.values, **{name: one.struct for name, one in self.packed.items()})
        latent.down.n = case.weights["down"].shape[1]  # its product is given
        layer.latent = ctypes.pointer(latent)
        self.model = Model(num_layers=1, cache_kind=case.cache_kind, layers=ctypes.pointer(layer))

    def _packed(self) -> dict[str, PackedMatrix]:
        found = {name: self._stacked(by_head) for name, by_head in self.case.stacks.items()}
        return found | ({"q_up": pack_float(self.library, self.case.weights["q_up"])} if self.case.q_rank else {})

    def _stacked(self, by_head: Floats) -> PackedMatrix:
        heads, rows, columns = by_head.shape
        whole = np.zeros((heads, -(-rows // PANEL) * PANEL, columns), np.float32)
        whole[:, :rows] = by_head
        return pack_float(self.library, whole.reshape(-1, columns))

    def absorbed(self) -> Floats:
        case, down = self.case, self.case.weights["down"]
        qk = np.full((len(down), (case.heads + 1) * (case.rank + case.rotary)), np.nan, np.float32)
        self.library.call.octavo_absorb(ctypes.byref(self.model), 0, address(down), address(qk), len(down))
        self.library.call.octavo_write(ctypes.byref(self.model), 0, ctypes.byref(case.tokens.step()), address(qk))
        return qk

    def attended(self, qk: Floats, step: Step) -> Floats:
        out = np.full((len(qk), self.case.heads * self.case.rank), np.nan, np.float32)
        self.library.call.octavo_attend(ctypes.byref(self.model), 0, ctypes.byref(step), address(qk), address(out))
        return out

    def expanded(self, latents: Floats) -> Floats:
        out = np.full((len(latents), self.case.heads * self.case.values), np.nan, np.float32)
        self.library.call.octavo_expand(ctypes.byref(self.model), 0, address(latents), address(out), len(latents))
        return out

    def alone(self, token: int, qk: Floats) -> Floats:
        """The attention of a token in a step of its own, over the same cache."""
        tokens = self.case.tokens
        start, index = np.array([0, 1], np.int32), tokens.cache_index[token : token + 1].copy()
        length, table = index + np.int32(1), tokens.tables[tokens.token_rows[token]].copy()
        pointers: dict[str, Any] = {"cache_index": index, "query_start": start, "context_len": length, "tables": table}
        step = Step(num_tokens=1, num_rows=1, table_width=len(table), **{name: address(one) for name, one in pointers.items()})
        return self.attended(qk[token : token + 1].copy(), step)[0]


@pytest.mark.parametrize(("level", "cache"), pairs(levels_here(), list(CACHES)))
@pytest.mark.parametrize("q_rank", [0, 21])
def test_latents_give_what_the_references_give(level: str, cache: str, q_rank: int) -> None:
    """With several threads, and with few and many tokens of a row."""
    for rows in (MIXED, LONG):
        case = LatentCase(rows, CACHES[cache], q_rank=q_rank)
        latents, values = case.references()
        with running(level, threads=2) as library:
            run = Run(case, library)
            found = run.attended(run.absorbed(), case.tokens.step())
            near = NEAR[CACHES[cache]]
            assert error(found, latents) < near and error(run.expanded(found), values) < near


@pytest.mark.parametrize(("level", "cache"), pairs(levels_here(), list(CACHES), shift=1))
def test_a_token_alone_has_the_same_bits(level: str, cache: str) -> None:
    for rows in (MIXED, LONG):
        case = LatentCase(rows, CACHES[cache])
        with running(level) as library:
            run = Run(case, library)
            qk = run.absorbed()
            together = run.attended(qk, case.tokens.step())
            values = run.expanded(together)
            for token in range(0, len(qk), 5):
                one = run.alone(token, qk)
                assert np.array_equal(one, together[token]) and np.array_equal(run.expanded(one[None])[0], values[token])


@pytest.mark.parametrize("group", [1, 2, 6])
def test_groups_of_heads_change_no_bit(group: int) -> None:
    found = []
    for size in (3, group):
        case = LatentCase(LONG, F32, group=size)
        with running(levels_here()[-1]) as library:
            run = Run(case, library)
            found.append(run.attended(run.absorbed(), case.tokens.step()))
    assert np.array_equal(*found)
