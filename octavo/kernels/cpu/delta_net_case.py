"""A random Gated DeltaNet for the native kernel: its weights, the products of some tokens, and states. For tests and for the check of a
level at start-up (`levels.py`)."""

import ctypes
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from octavo.kernels.cpu.attention_case import Floats, norm_struct
from octavo.kernels.cpu.library import DeltaNet, Layer, Matrix, Model, NativeLibrary, Step, address


@dataclass(frozen=True)
class Entry:
    """Tokens [begin, end) of a case as a row of a step. They continue the state in the slot `read`."""

    begin: int
    end: int
    read: int
    write: int  # -1: the state is not stored
    checkpoints: tuple[tuple[int, int], ...] = ()  # the end of the tokens that one covers, and its slot


@dataclass
class States:
    conv: Floats  # [slots, width - 1, channels]
    recurrent: Floats  # [slots, v_heads, k_dim, v_dim]

    def copy(self) -> "States":
        return States(self.conv.copy(), self.recurrent.copy())


@dataclass(frozen=True)
class DeltaNetCase:
    tokens: int = 40
    k_heads: int = 2
    v_heads: int = 4
    k_dim: int = 32
    v_dim: int = 48
    conv_width: int = 4
    eps: float = 1e-3  # larger than in models: a result near 0, whose rounding errors are large, would be scaled up by the norm
    seed: int = 0

    @property
    def channels(self) -> int:
        return 2 * self.k_heads * self.k_dim + self.v_size

    @property
    def v_size(self) -> int:
        return self.v_heads * self.v_dim

    @cached_property
    def conv(self) -> Floats:
        """[width, channels]"""
        return self._normal(1, self.conv_width, self.channels)

    @cached_property
    def decay(self) -> Floats:
        """From heads that hardly forget to heads that forget at once."""
        return -np.geomspace(0.01, 16, self.v_heads, dtype=np.float32)

    @cached_property
    def dt_bias(self) -> Floats:
        return self._normal(2, self.v_heads) - np.float32(1)

    @cached_property
    def norm(self) -> Floats:
        return self._normal(3, self.v_dim)

    @cached_property
    def qkvz(self) -> Floats:
        """The product of each token: [tokens, channels + v_size]"""
        return self._normal(4, self.tokens, self.channels + self.v_size)

    @cached_property
    def gates(self) -> Floats:
        """[tokens, 2 * v_heads]"""
        return self._normal(5, self.tokens, 2 * self.v_heads) * np.float32(3)

    def after(self, qkvz: Floats, gates: Floats) -> "DeltaNetCase":
        """The same weights after other products."""
        other = replace(self, tokens=len(qkvz))
        vars(other).update(qkvz=qkvz, gates=gates)
        return other

    def states(self, slots: int, *past: int) -> States:
        """Slots of NaN, but for the null slot and those that have random states, of sequences that have begun before."""
        conv = np.full((slots, self.conv_width - 1, self.channels), np.nan, np.float32)
        recurrent = np.full((slots, self.v_heads, self.k_dim, self.v_dim), np.nan, np.float32)
        conv[0] = recurrent[0] = 0
        for slot in past:
            conv[slot], recurrent[slot] = self._normal(6 + slot, *conv.shape[1:]), self._normal(60 + slot, *recurrent.shape[1:])
        return States(conv, recurrent)

    def run(self, library: NativeLibrary, states: States, *entries: Entry) -> Floats:
        """Computes a step of these rows. Returns the results of its tokens [tokens of the step, v_size], and writes states."""
        qkvz, gates = (np.concatenate([rows[entry.begin : entry.end] for entry in entries]) for rows in (self.qkvz, self.gates))
        out, step = np.full((len(qkvz), self.v_size), np.nan, np.float32), StepArrays(entries)
        net = self.struct(states)
        model = Model(num_layers=1, layers=ctypes.pointer(Layer(delta_net=ctypes.pointer(net))))
        arrays = [address(array) for array in (qkvz, gates, out)]
        library.call.octavo_delta_net(ctypes.byref(model), 0, ctypes.byref(step.struct), *arrays)
        return out

    def struct(self, states: States) -> DeltaNet:
        """Points to the arrays of the case and to the states. Of the matrices, only the number of rows is set."""
        return DeltaNet(
            qkvz=Matrix(n=self.channels + self.v_size), gates=Matrix(n=2 * self.v_heads), conv=address(self.conv),
            decay=address(self.decay), dt_bias=address(self.dt_bias), norm=norm_struct(self.norm, eps=self.eps),
            conv_state=address(states.conv), recurrent_state=address(states.recurrent), k_heads=self.k_heads, v_heads=self.v_heads,
            k_dim=self.k_dim, v_dim=self.v_dim, conv_width=self.conv_width,
        )  # fmt: skip

    def _normal(self, stream: int, *shape: int) -> Floats:
        return np.random.default_rng((self.seed, stream)).standard_normal(shape, np.float32)


class StepArrays:
    """The state slots and checkpoints of a step."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        starts = list(accumulate((entry.end - entry.begin for entry in entries), initial=0))
        ends = [(start + end - entry.begin, slot) for start, entry in zip(starts, entries) for end, slot in entry.checkpoints]
        self.query_start = np.array(starts, np.int32)
        self.state_read = np.array([entry.read for entry in entries], np.int32)
        self.state_write = np.array([entry.write for entry in entries], np.int32)
        self.first_checkpoint = np.array(list(accumulate((len(entry.checkpoints) for entry in entries), initial=0)), np.int32)
        self.checkpoints = np.array(ends, np.int32).reshape(-1, 2)

    @property
    def pointers(self) -> dict[str, int | None]:
        """Of the fields of a step, except `query_start`."""
        names = ("state_read", "state_write", "first_checkpoint", "checkpoints")
        return {name: address(getattr(self, name)) for name in names}

    @property
    def struct(self) -> Step:
        """Points to the arrays."""
        start = self.query_start
        return Step(num_tokens=int(start[-1]), num_rows=len(self.state_read), query_start=address(start), **self.pointers)
