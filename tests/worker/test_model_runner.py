"""From a plan to tensors and back: `gather`, the request table and the stores, against plain Python lists."""

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan
from octavo.policy.cache_spec import Buffer, LayerCacheSpec
from octavo.sampling_params import SamplingParams
from octavo.worker.kv_store import ContiguousStore, PagedStore, poison
from octavo.worker.model_runner import _rows_not_finite, gather
from octavo.worker.program import Forward
from octavo.worker.request_table import RequestTable

SPECS = [LayerCacheSpec(layer, {"k": Buffer((2, 4), "float32"), "v": Buffer((3,), "bfloat16")}) for layer in range(2)]
ROWS, MAX_LEN = 6, 96


def write(row: int, tokens: list[int], table: list[int], params: SamplingParams | None = None, end_ids: tuple[int, ...] = ()) -> RowWrite:
    return RowWrite(row, row, array("i", tokens), 1, 0, [table], params or SamplingParams(), end_ids, [], NoiseKey((row, 1), 2, 3), b"")


def new_table(block_size: int = 16) -> RequestTable:
    return RequestTable(ROWS, MAX_LEN, -(-MAX_LEN // block_size))


@st.composite
def mixed_plans(draw: st.DrawFn) -> tuple[int, StepPlan, dict[int, list[int]], dict[int, list[int]]]:
    """A block size, a plan of prefills, chunks and decodes, and each row's tokens and blocks as plain lists."""
    size = draw(st.sampled_from([1, 2, 4, 16, 64, 256]))
    blocks = iter(draw(st.permutations(range(1, ROWS * -(-MAX_LEN // size) + 1))))
    plan = StepPlan(1)
    all_tokens, tables = {}, {}
    for row in draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True)):
        length = draw(st.integers(1, MAX_LEN))
        start = draw(st.integers(0, length - 1))
        count = draw(st.integers(1, length - start))
        tokens = [1000 * row + place for place in range(length)]
        table = [next(blocks) for _ in range(-(-(start + count) // size))]
        known = draw(st.integers(0, len(table)))  # the rest comes as new blocks of this step
        plan.row_writes.append(write(row, tokens, table[:known]))
        plan.new_blocks += [(row, 0, index, block) for index, block in enumerate(table) if index >= known]
        plan.row.append(row)
        plan.start.append(start)
        plan.num_query.append(count)
        plan.samples.append(draw(st.booleans()))
        all_tokens[row], tables[row] = tokens, table
    return size, plan, all_tokens, tables


@given(mixed_plans())
def test_gather_reads_a_mixed_plan_out_of_the_rows(case: tuple[int, StepPlan, dict[int, list[int]], dict[int, list[int]]]) -> None:
    size, plan, tokens, tables = case
    table, store = new_table(size), ContiguousStore(SPECS, 1, 1)
    table.apply(plan)
    batch = gather(plan, table, store, size)

    places = [
        (row, position)
        for row, start, count in zip(plan.row, plan.start, plan.num_query)
        for position in range(start, start + count)
    ]  # fmt: skip
    ends = [start + count for start, count in zip(plan.start, plan.num_query)]
    assert batch.token_ids.tolist() == [tokens[row][position] for row, position in places]
    assert batch.positions.tolist() == [[position for _, position in places]]
    assert batch.rows.tolist() == plan.row
    assert batch.query_start.tolist() == [sum(plan.num_query[:entry]) for entry in range(len(plan.row) + 1)]
    assert batch.context_len.tolist() == ends
    assert batch.slots.tolist() == [tables[row][position // size] * size + position % size for row, position in places]
    width = max(-(-end // size) for end in ends)
    assert batch.tables.tolist() == [(tables[row] + [0] * width)[:width] for row in plan.row]
    sampled = [entry for entry, samples in enumerate(plan.samples) if samples]
    assert batch.sample_index.tolist() == [sum(plan.num_query[: entry + 1]) - 1 for entry in sampled]
    assert batch.sample_row.tolist() == [plan.row[entry] for entry in sampled]
    assert batch.caches is store.caches and batch.block_size == size


def test_a_forked_row_is_a_copy_with_noise_of_its_own() -> None:
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    params = SamplingParams(temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, logit_bias={3: 1.0}, **penalties)  # type: ignore[arg-type]
    table = new_table()
    table.apply(StepPlan(1, row_writes=[write(0, [5, 6, 7], [3, 4], params, end_ids=(9,)), write(2, list(range(90)), [8] * 6)]))
    noise = NoiseKey((70, 71), 2**31, 73)
    table.apply(StepPlan(2, row_forks=[RowFork(2, 0, 99, noise)], new_blocks=[(2, 0, 1, 5)]))
    assert table.token_ids[2, :3].tolist() == [5, 6, 7]
    assert table.num_tokens.tolist()[:3] == [3, 0, 3] and table.num_prompt.tolist()[:3] == [1, 0, 1]
    assert table.tables[2].tolist() == [3, 5, 0, 0, 0, 0] and table.tables[0].tolist() == [3, 4, 0, 0, 0, 0]
    assert table.values[2].tolist() == table.values[0].tolist() == [0.5, 0.25, 0.125]
    assert table.params[2] is params and table.end_ids[2] == (9,) and table.top_k[2] == 7
    assert table.edits[2] is table.edits[0], "however many samples, their lists of ids are there once"
    assert table.noise[2].tolist() == [70, 71, 2**31, 73] and table.noise[0].tolist() == [0, 1, 2, 3]
    table.append(torch.tensor([2]), torch.tensor([11]))
    assert table.token_ids[0, 3] == 0 and table.num_tokens[0] == 3, "the copy is not a view"


def test_a_new_tenant_of_a_row_finds_nothing_of_the_old_one() -> None:
    table = new_table()
    table.apply(StepPlan(1, row_writes=[write(1, list(range(50)), [7, 8, 9, 10], SamplingParams(top_k=5), end_ids=(3,))]))
    table.apply(StepPlan(2, row_writes=[write(1, [4], [6])]))
    assert table.num_tokens[1] == 1 and table.tables[1].tolist() == [6, 0, 0, 0, 0, 0]
    assert table.top_k[1] == 0 and table.end_ids[1] == ()
    table.apply(StepPlan(3, row_writes=[write(1, [4], [], SamplingParams(top_k=-1))]))
    assert table.top_k[1] == 0 and table.tables[1].tolist() == [0] * 6


def test_sampled_ids_join_their_rows_in_any_order() -> None:
    table = new_table()
    table.apply(StepPlan(1, row_writes=[write(0, [1, 2], [1]), write(1, [3], [2]), write(4, [4, 5, 6], [3])]))
    table.append(torch.tensor([4, 0]), torch.tensor([40, 41]))
    table.append(torch.tensor([1, 4]), torch.tensor([42, 43]))
    assert [table.token_ids[row, : table.num_tokens[row]].tolist() for row in (0, 1, 4)] == [[1, 2, 41], [3, 42], [4, 5, 6, 40, 43]]


# --- stores ----------------------------------------------------------------------------------------------------------


def filled(store: PagedStore | ContiguousStore) -> PagedStore | ContiguousStore:
    for layer, cache in enumerate(store.caches):
        for number, buffer in enumerate(cache.values()):
            shape = [-1] + [1] * (buffer.dim() - 1)
            buffer[:] = (torch.arange(len(buffer)) + 10 * (2 * layer + number)).view(shape)  # block b holds b, by layer and buffer
    return store


def contents(store: PagedStore | ContiguousStore) -> list[list[float]]:
    """What each block or row holds, layer by layer and buffer by buffer."""
    flat = [buffer.flatten(1).float() for cache in store.caches for buffer in cache.values()]
    assert all(bool((part == part[:, :1]).all()) for part in flat), "a block was copied in part"
    return [(part[:, 0] - 10 * number).tolist() for number, part in enumerate(flat)]


@pytest.mark.parametrize(
    ("copies", "after"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        ([(1, 4), (1, 5)], [0, 1, 2, 3, 1, 1]),
        ([(1, 2), (2, 3), (3, 1)], [0, 3, 1, 2, 4, 5]),  # a source that is also a target: all reads come first
    ],
)
def test_copies_move_whole_blocks_of_every_layer_and_read_before_they_write(copies: list[tuple[int, int]], after: list[int]) -> None:
    store = filled(PagedStore(SPECS, 6, 16))
    store.apply(StepPlan(1, copies=copies))
    assert contents(store) == [after] * 4


def test_a_fork_copies_a_contiguous_row() -> None:
    store = filled(ContiguousStore(SPECS, 4, 32))
    store.apply(StepPlan(1, row_forks=[RowFork(3, 1, 9, NoiseKey((0, 0), 0, 0))], copies=[(1, 2)]))
    assert contents(store) == [[0, 1, 2, 1]] * 4


def test_poison_fills_one_block_and_no_other() -> None:
    store = filled(PagedStore(SPECS, 4, 2))
    assert isinstance(store, PagedStore)
    poison(store.caches, 2)
    for cache in store.caches:
        for buffer in cache.values():
            assert buffer.flatten(1).isnan().all(1).tolist() == [False, False, True, False]
            assert buffer.flatten(1).isnan().any(1).tolist() == [False, False, True, False]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.data())
def test_rows_that_are_not_finite_are_named_by_their_entry(counts: list[int], data: st.DataObject) -> None:
    plan = StepPlan(1, list(range(len(counts))), start=[0] * len(counts), num_query=counts, samples=[True] * len(counts))
    table = new_table()
    table.apply(StepPlan(0, row_writes=[write(row, [1] * count, [1]) for row, count in enumerate(counts)]))
    batch = gather(plan, table, ContiguousStore(SPECS, 1, 1), 16)
    hidden = torch.zeros(sum(counts), 3)
    bad_tokens = data.draw(st.sets(st.integers(0, sum(counts) - 1)))
    for number, token in enumerate(sorted(bad_tokens)):
        hidden[token, number % 3] = (torch.nan, torch.inf, -torch.inf)[number % 3]
    owners = [entry for entry, count in enumerate(counts) for _ in range(count)]
    bad = sorted({owners[token] for token in bad_tokens})
    assert _rows_not_finite(Forward(hidden, torch.empty(0)), batch) == bad
    assert _rows_not_finite(Forward(hidden, torch.empty(0), sampled=torch.zeros(len(counts), 2)), batch) == bad
    bad_entries = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    sampled = torch.zeros(len(counts), 2)
    sampled[sorted(bad_entries), 1] = torch.inf
    assert _rows_not_finite(Forward(hidden, torch.empty(0), sampled=sampled), batch) == sorted({*bad, *bad_entries})
