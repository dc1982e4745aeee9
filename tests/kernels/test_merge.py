"""Merged parts of a softmax are the whole, however they are merged, also where a part has seen no key."""

import math

import pytest
import torch

from octavo.kernels.reference.merge import exponentials, log2_weights, merge_two, part_weights, with_sinks


@pytest.mark.parametrize("unseen", [(), (0,), (1, 2), (0, 1, 2)])
def test_parts_add_up_to_the_whole(unseen: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, values = (torch.randn(shape, generator=generator) * 20 for shape in ((5, 3, 8), (5, 3, 8, 4)))  # [rows, parts, keys, ...]
    scores[:, list(unseen)] = -torch.inf
    sinks = torch.tensor([0.5, 2.0, -3.0, 30.0, -torch.inf])
    whole = torch.stack([one @ value for one, value in zip(torch.softmax(scores.flatten(1), 1).nan_to_num(), values.flatten(1, 2))])

    weights, total, lse = exponentials(scores.clone())
    mixed = (weights.unsqueeze(-1) * values).sum(2) / total.clamp(min=1)  # [rows, parts, 4]
    lse = lse[..., 0]
    assert torch.equal(lse == -torch.inf, (scores == -torch.inf).all(-1))
    torch.testing.assert_close((part_weights(lse).unsqueeze(-1) * mixed).sum(1), whole)
    torch.testing.assert_close((log2_weights(lse / math.log(2)).unsqueeze(-1) * mixed).sum(1), whole)
    so_far = mixed[:, 0], lse[:, 0]
    for part in (1, 2):
        so_far = merge_two(*so_far, mixed[:, part], lse[:, part])
    torch.testing.assert_close(so_far[0], whole)

    with_sink = torch.softmax(torch.cat([scores.flatten(1), sinks[:, None]], 1), 1)[:, :-1].nan_to_num()
    share = (so_far[1] - with_sinks(so_far[1], sinks)).exp().nan_to_num()
    torch.testing.assert_close(share, with_sink.sum(1))
    assert with_sinks(so_far[1], None) is so_far[1]
