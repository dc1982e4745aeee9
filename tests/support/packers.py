"""AWQ, GPTQ and compressed-tensors written row by row and column by column, as their layouts are
published: obvious, and apart from what reads them.

Everything is seen from the weight: codes[row][column], zeros[row][group], scales[row][group], w = scale * (code - zero).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass
class Published:
    """A random quantised matrix; `group_of` says which group each column is in."""

    bits: int
    codes: np.ndarray  # [n, k]
    zeros: np.ndarray  # [n, groups]
    scales: np.ndarray  # [n, groups] float16
    group_of: list[int]

    def weight(self) -> Tensor:
        """[n, k], exact in float32."""
        steps = self.codes - self.zeros[:, self.group_of]
        return torch.from_numpy(self.scales.astype(np.float32)[:, self.group_of] * steps.astype(np.float32))

    def awq(self, name: str) -> dict[str, Tensor]:
        n, k = self.codes.shape
        groups = self.zeros.shape[1]
        qweight, qzeros = np.zeros((k, n // 8), np.uint32), np.zeros((groups, n // 8), np.uint32)
        for word in range(n // 8):
            for place, row in enumerate(AWQ_ORDER):
                qweight[:, word] |= self.codes[8 * word + row].astype(np.uint32) << 4 * place
                qzeros[:, word] |= self.zeros[8 * word + row].astype(np.uint32) << 4 * place
        return {f"{name}.qweight": _int32(qweight), f"{name}.qzeros": _int32(qzeros), f"{name}.scales": torch.tensor(self.scales.T)}

    def gptq(self, name: str, first_format: bool) -> dict[str, Tensor]:
        n, k = self.codes.shape
        groups, per_word = self.zeros.shape[1], 32 // self.bits
        qweight, qzeros = np.zeros((k // per_word, n), np.uint32), np.zeros((groups, n // per_word), np.uint32)
        for column in range(k):
            qweight[column // per_word] |= self.codes[:, column].astype(np.uint32) << self.bits * (column % per_word)
        for word in range(n // per_word):
            for group in range(groups):
                packed = sum(int(self.zeros[word * per_word + place, group]) << self.bits * place for place in range(per_word))
                ones = sum(1 << self.bits * place for place in range(per_word))
                qzeros[group, word] = (packed - ones) % 2**32 if first_format else packed
        return {
            f"{name}.qweight": _int32(qweight),
            f"{name}.qzeros": _int32(qzeros),
            f"{name}.scales": torch.tensor(self.scales.T),
            f"{name}.g_idx": torch.tensor(self.group_of, dtype=torch.int32),
        }

    def words(self, name: str, symmetric: bool, packed_zeros: bool = True) -> dict[str, Tensor]:
        """compressed-tensors' pack-quantized; older writers left zeros unpacked."""
        n, k = self.codes.shape
        groups, per_word = self.zeros.shape[1], 32 // self.bits
        weight, zeros = np.zeros((n, k // per_word), np.uint32), np.zeros((-(-n // per_word), groups), np.uint32)
        for column in range(k):
            weight[:, column // per_word] |= self.codes[:, column].astype(np.uint32) << self.bits * (column % per_word)
        for row in range(n):
            zeros[row // per_word] |= self.zeros[row].astype(np.uint32) << self.bits * (row % per_word)
        found = {
            f"{name}.weight_packed": _int32(weight),
            f"{name}.weight_scale": torch.tensor(self.scales),
            f"{name}.weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            signed = torch.from_numpy(self.zeros - 2 ** (self.bits - 1)).to(torch.int8)
            found[f"{name}.weight_zero_point"] = _int32(zeros) if packed_zeros else signed
        if self.group_of != sorted(self.group_of):
            found[f"{name}.weight_g_idx"] = torch.tensor(self.group_of, dtype=torch.int32)
        return found

    def bytes(self, name: str, symmetric: bool) -> dict[str, Tensor]:
        """compressed-tensors' int-quantized."""
        found = {
            f"{name}.weight": torch.from_numpy(self.codes - 128).to(torch.int8),
            f"{name}.weight_scale": torch.tensor(self.scales),
            f"{name}.input_scale": torch.ones(1),
        }
        zeros = {} if symmetric else {f"{name}.weight_zero_point": torch.from_numpy(self.zeros - 128).to(torch.int8)}
        return found | zeros


def published(n: int, k: int, group_size: int, bits: int, seed: int, *, symmetric: bool = False, act_order: bool = False) -> Published:
    """`group_size` -1: one group. Zeros and codes take all their values, scales those of a model and a few odd ones."""
    dice = np.random.default_rng(seed)
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    zeros = dice.integers(0, 2**bits, (n, groups)) if not symmetric else np.full((n, groups), 2 ** (bits - 1))
    scales = dice.uniform(0.0005, 0.05, (n, groups)).astype(np.float16)
    scales.flat[:: max(2, scales.size // 3)] = [0.0]
    group_of = [column // size for column in range(k)]
    if act_order:
        dice.shuffle(group_of)
    return Published(bits, dice.integers(0, 2**bits, (n, k)), zeros, scales, group_of)


def _int32(words: np.ndarray) -> Tensor:
    return torch.from_numpy(words.view(np.int32).copy())
