"""From a plan to tensors and back: the request table, what is prepared of it, and the stores, against plain Python lists."""

import warnings
from array import array
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.kernels.cache_layout import Layout
from octavo.kernels.reference.rows import finish, prepare
from octavo.messages import NoiseKey, RowFork, RowWrite, StepPlan
from octavo.policy.cache_group import CacheGroup, WindowGroup
from octavo.policy.cache_spec import Buffer, LayerCacheSpec
from octavo.sampling_params import SamplingParams
from octavo.step.step_tensors import (
    HEAD,
    NOISE,
    NOISE_WORDS,
    OFFSET,
    TEMPERATURE,
    RowLayout,
    Shape,
    StepMemory,
    StepTensors,
    packed_entries,
    plan_sizes,
    send,
)
from octavo.worker.kv_store import ContiguousStore, PagedStore, poison
from octavo.worker.request_table import RequestTable

SPECS = [LayerCacheSpec(layer, {"k": Buffer((2, 4), "float32"), "v": Buffer((3,), "bfloat16")}) for layer in range(2)]
ROWS, MAX_LEN = 6, 96


def write(row: int, tokens: list[int], *tables: list[int], params: SamplingParams | None = None) -> RowWrite:
    """`tables`: one for each cache group."""
    noise, offset = NoiseKey((row, 1), 2, 3), 7 * row
    return RowWrite(row, row, array("i", tokens), 1, 0, [*tables], params or SamplingParams(), (), [], noise, b"", offset)


def new_table(block_size: int = 16, links: tuple[int, ...] = (1,)) -> RequestTable:
    return RequestTable(ROWS, RowLayout(-(-MAX_LEN // block_size), MAX_LEN + 1, links), torch.device("cpu"))


def prepared(plan: StepPlan, table: RequestTable, block_size: int) -> StepTensors:
    shape = Shape(*plan_sizes(plan))
    memory = StepMemory(table.layout, 4 * ROWS, 2 * ROWS * MAX_LEN, torch.device("cpu"))
    send(packed_entries(plan, shape, table.layout.groups), memory.entries)
    step = memory.step(shape.entries, shape.tokens, shape.outputs)
    step.tables.fill_(77)  # of another step
    prepare(table.words, table.layout, block_size, step)
    return step


@dataclass
class Mixed:
    """A plan of prefills, chunks and decodes, and each row's tokens and blocks as plain lists."""

    size: int
    links: tuple[int, ...]  # of each cache group
    plan: StepPlan
    tokens: dict[int, list[int]]
    tables: dict[int, list[list[int]]]  # a table for each group


@st.composite
def mixed_plans(draw: st.DrawFn) -> Mixed:
    size = draw(st.sampled_from([1, 2, 4, 16, 64, 256]))
    links = draw(st.sampled_from([(1,), (1, 2), (3, 1)]))
    blocks = iter(draw(st.permutations(range(1, ROWS * len(links) * -(-MAX_LEN // size) + 1))))
    plan = StepPlan(1)
    all_tokens, tables = {}, {}
    for row in draw(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS, unique=True)):
        length = draw(st.integers(1, MAX_LEN))
        start = draw(st.integers(0, length - 1))
        samples = draw(st.booleans())
        drafts = draw(st.integers(0, min(3, MAX_LEN - length))) if samples else 0
        count = (length - start if samples else draw(st.integers(1, length - start))) + drafts
        tokens = [1000 * row + place for place in range(length + drafts)]
        all_tables = [[next(blocks) for _ in range(-(-(start + count) // (size * many)))] for many in links]
        known = draw(st.integers(0, len(all_tables[0])))  # the rest comes as new blocks of this step
        plan.row_writes.append(write(row, tokens[:length], *(table[:known] for table in all_tables)))
        for group, table in enumerate(all_tables):
            plan.new_blocks += [(row, group, index, block) for index, block in enumerate(table) if index >= known]
        plan.row.append(row)
        plan.start.append(start)
        plan.num_query.append(count)
        plan.outputs.append(samples + drafts)
        if drafts:
            plan.drafts[len(plan.row) - 1] = tokens[length:]
        if len(links) > 1:  # the last group has some positions only
            plan.group_lengths.setdefault(1, []).append(draw(st.integers(0, start + count)))
        all_tokens[row], tables[row] = tokens, all_tables
    return Mixed(size, links, plan, all_tokens, tables)


@given(mixed_plans())
def test_a_mixed_plan_is_read_out_of_the_rows(case: Mixed) -> None:
    size, plan, tokens = case.size, case.plan, case.tokens
    table = new_table(size, case.links)
    table.apply(plan)
    step = prepared(plan, table, size)

    places = [
        (row, position)
        for row, start, count in zip(plan.row, plan.start, plan.num_query)
        for position in range(start, start + count)
    ]  # fmt: skip
    ends = [start + count for start, count in zip(plan.start, plan.num_query)]
    assert step.token_ids.tolist() == [tokens[row][position] for row, position in places]
    assert step.cache_index.tolist() == [index for _, index in places]
    assert step.positions.tolist() == [[index + 7 * row for row, index in places]]
    assert step.row.tolist() == plan.row
    assert step.query_start.tolist() == [sum(plan.num_query[:entry]) for entry in range(len(plan.row) + 1)]
    for group, links in enumerate(case.links):
        tables, span = {row: every[group] for row, every in case.tables.items()}, links * size
        lengths = plan.group_lengths.get(group, ends)
        assert step.context_len[group].tolist() == lengths
        assert step.slots[group].tolist() == [tables[row][position // span] * span + position % span for row, position in places]
        held = [-(-length // span) for length in lengths]
        filled = [tables[row][:count] + [0] * (max(held) - count) for row, count in zip(plan.row, held)]
        assert step.tables[group, :, : max(held)].tolist() == filled
    assert step.outputs.tolist() == plan.outputs and step.first_output.tolist() == list(plan.first_outputs())
    sampled = [(entry, end - back) for entry, end in enumerate(ends) for back in range(max(1, plan.outputs[entry]) - 1, -1, -1)]
    assert [places[at] for at in step.sample_index.tolist()] == [(plan.row[entry], position - 1) for entry, position in sampled]
    assert step.draw_positions.tolist() == [position for _, position in sampled]
    assert step.noise[:, 0].tolist() == [plan.row[entry] for entry, _ in sampled]


def test_the_table_of_a_short_row_is_filled_up_with_the_null_block() -> None:
    table = new_table()
    table.apply(StepPlan(1, row_writes=[write(1, [7] * 90, [1, 2, 3, 4, 5, 6]), write(4, [8], [9])]))
    step = prepared(StepPlan(2, row=[4, 1], start=[0, 89], num_query=[1, 1], outputs=[1, 1]), table, 16)
    assert step.tables[0, :, :6].tolist() == [[9, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]]


def test_as_many_tokens_as_entries_are_not_always_one_each() -> None:
    table = new_table()
    table.apply(StepPlan(1, row_writes=[write(1, [7, 8, 9], [1]), write(4, [5], [9])]))
    memory = StepMemory(table.layout, ROWS, ROWS * MAX_LEN, torch.device("cpu"))
    plan = StepPlan(2, row=[1, 4], start=[0, 0], num_query=[3, 1], outputs=[1, 1])
    words = packed_entries(plan, Shape(4, 16, 4), 1)  # padded to four entries, two of them without a token
    send(words, memory.entries)
    step = memory.step(4, 4, 4)
    prepare(table.words, table.layout, 16, step)
    assert step.token_ids.tolist() == [7, 8, 9, 5] and step.cache_index.tolist() == [0, 1, 2, 0]
    assert step.positions.tolist() == [[7, 8, 9, 28]]


def test_rows_exchange_places_in_one_plan_and_a_row_is_cut_and_ends_otherwise() -> None:
    """On both devices a fork copies a whole line, all reads before any write."""
    table = new_table()
    table.apply(StepPlan(1, row_writes=[write(0, [5, 6, 7], [3, 4]), write(2, [9, 8], [1]), write(3, [1, 1, 1, 1], [2])]))
    moved = [RowFork(2, 0, 0, NoiseKey((0, 1), 2, 3), moves=True), RowFork(0, 2, 2, NoiseKey((2, 1), 2, 3), moves=True)]
    table.apply(StepPlan(2, row_forks=moved, lengths=[(3, 3)], last_ids=[(3, 77), (2, 70)]))
    said = {row: table.token_ids[row, : table.num_tokens[row]].tolist() for row in (0, 2, 3)}
    assert said == {0: [9, 8], 2: [5, 6, 70], 3: [1, 1, 77]}
    assert table.words[[0, 2], HEAD].tolist() == [1, 3] and table.words[[0, 2], NOISE].tolist() == [2, 0]
    assert table.words[[0, 2], OFFSET].tolist() == [14, 0]


def test_a_forked_row_is_a_copy_with_noise_of_its_own() -> None:
    table = new_table()
    warm = write(0, [5, 6, 7], [3, 4], params=SamplingParams(temperature=0.5))
    table.apply(StepPlan(1, row_writes=[warm, write(2, list(range(90)), [8] * 6)]))
    table.apply(StepPlan(2, row_forks=[RowFork(2, 0, 99, NoiseKey((70, 71), 2**31, 73))], new_blocks=[(2, 0, 1, 5)]))
    assert table.token_ids[2, :3].tolist() == [5, 6, 7]
    assert table.num_tokens.tolist()[:3] == [3, 0, 3] and table.num_prompt.tolist()[:3] == [1, 0, 1]
    assert table.words[[0, 2], HEAD : HEAD + 2].tolist() == [[3, 4], [3, 5]]
    assert table.words[[0, 2], TEMPERATURE].view(torch.float32).tolist() == [0.5, 0.5]
    noise = table.words[:, NOISE : NOISE + NOISE_WORDS].numpy().view(np.uint32)
    assert noise[2].tolist() == [70, 71, 2**31, 73] and noise[0].tolist() == [0, 1, 2, 3]
    table.token_ids[2, 1] = 11
    assert table.token_ids[0, 1] == 6, "the copy is not a view"


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


# two groups of two layers and of one, which has half the bytes a token, and so twice the tokens in a block
WIDE = [LayerCacheSpec(layer, {"k": Buffer((2, 4), "float32"), "v": Buffer((2, 3), "bfloat16")}) for layer in range(2)]
NARROW = LayerCacheSpec(2, {"k": Buffer((1, 4), "float32"), "v": Buffer((2, 3), "int8")}, window=8)
GROUPS = (CacheGroup((0, 1)), WindowGroup((2,), 2, 8))


def test_the_null_state_is_zeros_and_plans_name_their_slots() -> None:
    specs = [replace(SPECS[0], state={"sum": Buffer((2,), "float32")}), SPECS[1]]
    for store in (PagedStore(specs, 4, 16, num_states=5), ContiguousStore(specs, ROWS, MAX_LEN, num_states=5)):
        (state,) = store.states[0].values()
        assert state.shape == (5, 2) and not state[0].any() and not store.states[1] and "sum" not in store.caches[0]
    layout = RowLayout(6, MAX_LEN + 1, (1, 1), has_states=True)
    memory = StepMemory(layout, ROWS, 3 * MAX_LEN, torch.device("cpu"))
    plan = StepPlan(1, row=[3, 0, 4], start=[7, 32, 0], num_query=[1, 64, 20], outputs=[1, 0, 1], states=[(9, 2), (4, 1), (0, 8)])
    plan.checkpoints = [(1, 48, 5), (1, 80, 6), (2, 16, 7)]
    shape = Shape(5, 85, 5, checkpoints=3)
    memory.send(plan, shape)
    step = memory.step(shape.entries, shape.tokens, shape.outputs, shape.checkpoints)
    assert step.states is not None
    assert step.states.read.tolist() == [9, 4, 0, 0, 0] and step.states.write.tolist() == [2, 1, 8, -1, -1]
    assert step.states.first_checkpoint.tolist() == [0, 0, 2, 3, 3, 3]
    assert step.states.checkpoints.tolist() == [[17, 5], [49, 6], [81, 7]]
    assert step.context_len[:, :3].tolist() == [[8, 96, 20]] * 2


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_layers_of_two_groups_share_their_memory_and_a_copy_moves_all_bytes_of_a_block_once(layout: Layout) -> None:
    store = PagedStore([*WIDE, NARROW], 6, 4, layout=layout, groups=GROUPS)
    assert [tuple(cache["k"].shape) for cache in store.caches] == [(6, 4, 2, 4), (6, 4, 2, 4), (6, 8, 1, 4)]
    full, padded, windowed = store.caches
    for name in ("k", "v"):
        assert full[name].data_ptr() == windowed[name].data_ptr() != padded[name].data_ptr()
        assert full[name][0].nbytes == windowed[name][0].nbytes
        for block in range(1, 6):
            windowed[name][block], padded[name][block] = block, 10 + block
    store.apply(StepPlan(1, copies=[(1, 2), (2, 3), (3, 1)]))
    for name in ("k", "v"):
        assert not full[name][0].any() and not padded[name][0].any(), "the null block is zero for all"
        for block, source in enumerate([3, 1, 2, 4, 5], 1):
            assert (windowed[name][block] == source).all() and (padded[name][block] == 10 + source).all()


def test_layers_that_cannot_share_a_block_are_named() -> None:
    other = replace(NARROW, buffers={**NARROW.buffers, "v": WIDE[0].buffers["v"]})
    with pytest.raises(ConfigError, match=r"layers 0 and 2 cannot share .* have \[128, 48\] bytes, and those of the other \[128, 96\]"):
        PagedStore([*WIDE, other], 6, 4, groups=GROUPS)


def test_contiguous_rows_exchange_places() -> None:
    store, key = filled(ContiguousStore(SPECS, 4, 32)), NoiseKey((0, 0), 0, 0)
    store.apply(StepPlan(1, row_forks=[RowFork(3, 1, 9, key), RowFork(1, 3, 9, key)]))
    assert contents(store) == [[0, 3, 2, 1]] * 4


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
def test_rows_that_are_not_finite_are_marked_by_their_entry(counts: list[int], data: st.DataObject) -> None:
    rows, table, total = list(range(len(counts))), new_table(), sum(counts)
    plan = StepPlan(1, rows, start=[0] * len(counts), num_query=counts, outputs=[1] * len(counts))
    table.apply(StepPlan(0, row_writes=[write(row, [1] * count, [1]) for row, count in enumerate(counts)]))
    step = prepared(plan, table, 16)
    hidden, ids = torch.zeros(len(counts), 2), torch.arange(len(counts)) + 50
    states = torch.full((total, 3), data.draw(st.sampled_from([0.0, 3e38])))  # all finite, even if their sum is not
    for number, token in enumerate(sorted(data.draw(st.sets(st.integers(0, total - 1))))):
        states[token, number % 3] = (torch.nan, torch.inf, -torch.inf)[number % 3]
    owners = [entry for entry, count in enumerate(counts) for _ in range(count)]
    bad = {owners[token] for token in range(total) if not states[token].isfinite().all()}
    bad_entries = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    hidden[sorted(bad_entries), 1] = torch.inf
    result = torch.full((len(counts),), 9, dtype=torch.int32)
    with warnings.catch_warnings(action="error"):  # sums may overflow, which is nobody's business
        finish(table.words, table.layout, step, ids, states, hidden, result)
    assert result.tolist() == [-1 if entry in bad | bad_entries else 50 + entry for entry in range(len(counts))]
    said = [table.token_ids[row, : table.num_tokens[row]].tolist() for row in plan.row]
    assert said == [[1] * n + [50 + row] for row, n in enumerate(counts)]
