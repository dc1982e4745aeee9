"""Linear layers over a quantisation scheme.

    Linear             y = x W^T + b
    MergedLinear       several projections of one x as one product; each is a named slice of the rows of W
    RowParallelLinear  its input may be split over ranks, whose results are summed

    qkv.weight   [ q: heads * head_dim rows | k: kv_heads * head_dim | v: kv_heads * head_dim ]
"""

from itertools import accumulate

import torch
from torch import Tensor, nn

from octavo.layers.comm import Comm
from octavo.quant.base import QuantScheme


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool, scheme: QuantScheme, dtype: torch.dtype) -> None:
        super().__init__()
        self.scheme, self.in_features = scheme, in_features
        scheme.params(self, in_features, out_features, bias, dtype)

    def finalize(self) -> None:
        self.scheme.finalize(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.scheme.apply(self, x)


class MergedLinear(Linear):
    def __init__(self, in_features: int, sizes: dict[str, int], bias: bool, scheme: QuantScheme, dtype: torch.dtype) -> None:
        super().__init__(in_features, sum(sizes.values()), bias, scheme, dtype)
        ends = accumulate(sizes.values())
        self.parts = {name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)}


class RowParallelLinear(Linear):
    def __init__(self, in_features: int, out_features: int, bias: bool, scheme: QuantScheme, dtype: torch.dtype, comm: Comm) -> None:
        super().__init__(in_features, out_features, bias, scheme, dtype)
        self.comm = comm

    def forward(self, x: Tensor) -> Tensor:
        return self.comm.all_reduce(self.scheme.apply(self, x))
