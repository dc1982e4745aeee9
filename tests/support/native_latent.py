"""A small problem of latent attention, and what the torch references give for it."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from octavo.kernels.cpu.attention_case import AttentionCase, Cache
from octavo.kernels.cpu.library import BF16, F16, F32
from octavo.kernels.cpu.packing import Floats
from octavo.kernels.reference.attention import attend, causal_mask
from octavo.kernels.reference.latent import absorb, expand

EPS = 1e-6  # of norms
# How far off a result may be. Once in a while a number of a key is rounded to the neighbour of the reference's: by 2^-8 or 2^-11 of it.
NEAR = {F32: 1e-5, BF16: 4e-3, F16: 5e-4}


@dataclass(frozen=True)
class LatentCase:
    rows: tuple[tuple[int, int], ...]
    cache_kind: int
    heads: int = 6
    group: int = 3  # heads of a task
    rank: int = 41
    rotary: int = 6
    plain: int = 11
    values: int = 19
    q_rank: int = 0  # 0: q is projected directly

    @cached_property
    def tokens(self) -> AttentionCase:
        return AttentionCase(self.rows, self.heads, 1, self.rank + self.rotary, cache_kind=self.cache_kind, rotary_dim=self.rotary)

    @cached_property
    def weights(self) -> dict[str, Floats]:
        random, heads = np.random.default_rng(5), self.heads
        q = heads * (self.plain + self.rotary)
        shapes = {
            "k_up": (heads * self.plain, self.rank), "v_up": (heads * self.values, self.rank), "k_norm": (self.rank,),
            "down": (len(self.tokens.positions), (self.q_rank or q) + self.rank + self.rotary),
        } | ({"q_up": (q, self.q_rank), "q_norm": (self.q_rank,)} if self.q_rank else {})  # fmt: skip
        drawn = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        return {name: one / np.float32(one.shape[1] ** 0.5) if name.endswith("_up") else one for name, one in drawn.items()}

    def references(self) -> tuple[Floats, Floats]:
        """Returns the latents of all heads, and their values."""
        parts = {name: torch.from_numpy(one) for name, one in self.weights.items()}
        q, kv = parts["down"].split([parts["down"].shape[1] - self.rank - self.rotary, self.rank + self.rotary], dim=1)
        if self.q_rank:
            q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS) * parts["q_norm"] @ parts["q_up"].T
        turn = (torch.from_numpy(table(self.tokens.angles)[self.tokens.positions]) for table in (np.cos, np.sin))
        made = absorb(q.contiguous(), kv, parts["k_up"], (parts["k_norm"], EPS), *turn).unflatten(1, (self.heads + 1, -1))
        keys = self.tokens.past()[0].numbers().reshape(-1, 1, self.rank + self.rotary)
        keys[self.tokens.new_slots] = Cache.holding(made[:, self.heads :].numpy(), self.cache_kind).numbers()
        latents = torch.cat([self._attended(row, made[:, : self.heads], torch.from_numpy(keys)) for row in range(len(self.rows))])
        return latents.flatten(1).numpy(), expand(latents, parts["v_up"]).numpy()

    @property
    def stacks(self) -> dict[str, Floats]:
        """The matrices of heads as the native library has them: [heads, rows, columns]"""
        k_up, v_up = (self.weights[name].reshape(self.heads, -1, self.rank) for name in ("k_up", "v_up"))
        return {"k_up": k_up.swapaxes(1, 2), "v_up": v_up}

    @property
    def scale(self) -> float:
        return float((self.plain + self.rotary) ** -0.5)

    def _attended(self, row: int, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        past, new = self.rows[row]
        own = keys[self.tokens.slots(np.full(past + new, row), np.arange(past + new))].unsqueeze(0)
        mask = causal_mask(torch.tensor([past + new]), new, past + new, None, torch.float32)
        queries = q[torch.from_numpy(self.tokens.token_rows == row)].unsqueeze(0)
        return attend(queries, own, own[..., : self.rank], mask, False, self.scale)[0]
