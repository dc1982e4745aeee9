"""What Gated DeltaNet gives, by its formulas in float64: token by token, as in transformers' `torch_recurrent_gated_delta_rule`."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.cpu.delta_net_case import DeltaNetCase, Entry, States
from octavo.kernels.cpu.library import F32, DeltaNet, NativeLibrary
from octavo.kernels.cpu.packing import Floats
from tests.support.native_weights import Weights, make_weights

LENGTH_EPS = 1e-6  # of the norms of q and k


@dataclass
class DeltaNetWeights:
    """Of a layer: the case has those of the kernel."""

    case: DeltaNetCase
    qkvz: Weights
    gates: Weights

    @staticmethod
    def make(
        library: NativeLibrary | None, random: np.random.Generator, case: DeltaNetCase, hidden: int, kind: int, group: int
    ) -> "DeltaNetWeights":
        qkvz = make_weights(library, random, case.channels + case.v_size, hidden, kind, group)
        return DeltaNetWeights(case, qkvz, make_weights(library, random, 2 * case.v_heads, hidden, F32, 0))

    def struct(self, states: States) -> DeltaNet:
        struct = self.case.struct(states)
        assert self.qkvz.packed is not None and self.gates.packed is not None
        struct.qkvz, struct.gates = self.qkvz.packed.struct, self.gates.packed.struct
        return struct


def entries_of(rows: tuple[tuple[int, int], ...]) -> tuple[Entry, ...]:
    """A step of rows of (past, new) tokens. Each has a slot to read, unless it begins, one to write, and one for a checkpoint."""
    entries, begin = [], 0
    for row, (past, new) in enumerate(rows):
        checkpoints = ((begin + new // 2, 3 * row + 3),) if new > 1 else ()
        entries.append(Entry(begin, begin + new, 3 * row + 1 if past else 0, 3 * row + 2, checkpoints))
        begin += new
    return tuple(entries)


def delta_net_twin(case: DeltaNetCase, states: States, *entries: Entry) -> Floats:
    """The results of a step [tokens of the step, v_size]; writes the states."""
    before, out = states.copy(), []
    for entry in entries:
        results, ends = _row(case, before.conv[entry.read], before.recurrent[entry.read], entry.begin, entry.end)
        out.append(results)
        for end, slot in (*entry.checkpoints, (entry.end, entry.write)):
            if slot >= 0:
                states.conv[slot], states.recurrent[slot] = ends[end - entry.begin - 1]
    return np.concatenate(out)


def _row(case: DeltaNetCase, conv: Floats, recurrent: Floats, begin: int, end: int) -> tuple[Floats, list[tuple[Floats, Floats]]]:
    """The results of tokens [begin, end) after this state, and the state after each of them."""
    k_size, group, before = case.k_heads * case.k_dim, case.v_heads // case.k_heads, case.conv_width - 1
    products, gates = _double(case.qkvz[begin:end]), _double(case.gates[begin:end])
    inputs, z = products.split([case.channels, case.v_size], 1)
    inputs = torch.cat((_double(conv), inputs))
    mixed = F.conv1d(inputs.T[None], _double(case.conv).T[:, None].contiguous(), groups=case.channels)[0].T
    q, k, v = F.silu(mixed).split([k_size, k_size, case.v_size], 1)
    q, k = (_normed(part.unflatten(1, (case.k_heads, -1))).repeat_interleave(group, 1) for part in (q, k))
    q, v = q / case.k_dim**0.5, v.unflatten(1, (case.v_heads, -1))
    b, a = gates.split(case.v_heads, 1)
    beta, decay = b.sigmoid(), (_double(case.decay) * F.softplus(a + _double(case.dt_bias))).exp()
    state, results, states = _double(recurrent), [], []
    for token in range(end - begin):
        state = state * decay[token][:, None, None]
        held = torch.einsum("hkv,hk->hv", state, k[token])
        change = (v[token] - held) * beta[token][:, None]
        state = state + k[token][:, :, None] * change[:, None]
        results.append(torch.einsum("hkv,hk->hv", state, q[token]))
        states.append((inputs[token + 1 :][:before].float().numpy(), state.float().numpy()))
    result = torch.stack(results)
    result = result * (result.square().mean(-1, keepdim=True) + case.eps).rsqrt() * _double(case.norm)
    return (result.flatten(1) * F.silu(z)).float().numpy(), states


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()


def _double(numbers: Floats) -> Tensor:
    return torch.from_numpy(numbers).double()
