"""Parts of attention, each over the keys of one rank, and their sum: what attention over all keys gives."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.attention.context_parallel import own_slots
from octavo.kernels.reference import partial_attention as module
from octavo.kernels.reference.merge import part_weights
from octavo.kernels.reference.partial_attention import kept_positions, partial_attention
from tests.support.shared_context import Rows, SharedContext

ROWS = st.lists(st.integers(0, 40).flatmap(lambda context: st.tuples(st.integers(0, context), st.just(context))), min_size=1, max_size=4)


# promise: decode-context-parallel-size
@given(
    rows=ROWS,
    size=st.sampled_from([1, 2, 4, 16]),
    ranks=st.integers(1, 5),
    window=st.none() | st.integers(1, 20),
    kv_heads=st.sampled_from([1, 2, 3]),
    at_once=st.sampled_from([1, 50, 1 << 20]),
    seed=st.integers(0, 99),
)
def test_parts_of_ranks_add_up_to_attention_over_all_keys(
    rows: Rows, size: int, ranks: int, window: int | None, kv_heads: int, at_once: int, seed: int
) -> None:
    """Short contexts leave ranks without keys; queries before a rank's first key see none of it."""
    case = SharedContext(rows, size, ranks, 2 * kv_heads, kv_heads, dim=4, seed=seed)
    scores, module.SCORES = module.SCORES, at_once
    try:
        found = [partial_attention(case.q, *part, *case.rows, case.scale, rank, ranks, window) for rank, part in enumerate(case.parts)]
    finally:
        module.SCORES = scores
    weights = part_weights(torch.stack([lse for _, lse in found], -1))  # [T, heads, ranks]
    merged = sum(part * weights[..., rank, None] for rank, (part, _) in enumerate(found))
    torch.testing.assert_close(merged, case.exact(window), atol=1e-5, rtol=1e-5)
    for part, lse in found:
        assert part.isfinite().all() and not lse.isnan().any()
        assert (part[lse.isneginf()] == 0).all()


def test_where_nobody_saw_a_key_nobody_counts_and_what_is_no_number_shows() -> None:
    nothing = part_weights(torch.full((2, 3), -torch.inf))
    assert torch.equal(nothing, torch.zeros(2, 3))
    assert torch.equal(part_weights(torch.tensor([-torch.inf, -1e8, -torch.inf])), torch.tensor([0.0, 1.0, 0.0]))
    assert part_weights(torch.tensor([0.0, torch.nan])).isnan().any()


@given(size=st.sampled_from([1, 2, 16]), ranks=st.integers(1, 4), tokens=st.integers(1, 100))
def test_every_token_has_one_place_on_one_rank(size: int, ranks: int, tokens: int) -> None:
    span = size * ranks
    table = torch.randperm(-(-tokens // span)) + 1
    position = torch.arange(tokens)
    slots = table[position // span] * span + position % span
    places = [own_slots(slots, size, rank, ranks) for rank in range(ranks)]
    for rank, own in enumerate(places):
        kept = kept_positions(tokens, size, rank, ranks)
        others = torch.ones(tokens, dtype=torch.bool).index_fill_(0, kept, False)
        assert (own[others] == 0).all() and (own[kept] >= size).all()  # the null block
        index = torch.arange(len(kept))
        assert torch.equal(own[kept], table[index // size] * size + index % size)  # one after the other
    assert sum(int((own > 0).sum()) for own in places) == tokens
