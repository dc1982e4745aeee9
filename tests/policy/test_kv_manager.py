"""Block tables against the plainest memory there is: a slot remembers the whole token prefix that was written into it.

So a table is right if reading it gives, position by position, the prefixes of its own tokens, as far as its group's window sees.
"""

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from octavo.errors import ConfigError
from octavo.messages import AddRequest, StepPlan
from octavo.policy.block_pool import NULL_BLOCK, BlockKey, BlockPool, Event
from octavo.policy.cache_group import FULL, CacheGroup
from octavo.policy.cache_spec import Buffer, LayerCacheSpec, one_group, split_layers
from octavo.policy.kv_manager import KVManager
from octavo.policy.request import Request, Sequence
from octavo.sampling_params import SamplingParams
from tests.policy.machine_settings import SOAK, machine_settings
from tests.support.fake import GROUPS

Prefix = tuple[int, str, tuple[int, ...]]  # group, salt and tokens


class KVMachine(RuleBasedStateMachine):
    @initialize(
        size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(4, 20),
        caching=st.sampled_from([True, True, True, False]),
        groups=st.sampled_from(GROUPS),
    )
    def start(self, size: int, num_blocks: int, caching: bool, groups: tuple[CacheGroup, ...]) -> None:
        self.size = size
        self.pool = BlockPool(num_blocks, self._on_event)
        self.kv = KVManager(self.pool, size, caching, b"key", b"model", groups=groups)
        self.memory: list[list[Prefix | None]] = [[None] * max(self.kv.spans) for _ in range(num_blocks)]
        self.findable: dict[Prefix, int] = {}  # what the cache should find
        self.live: list[Sequence] = []
        self.salts: dict[int, str] = {}
        self.ids = 0

    def _on_event(self, event: Event, block: int, key: BlockKey | None) -> None:
        if event == "seal":
            assert key is not None
            content = self.memory[block][self.kv.spans[key[0]] - 1]
            assert content is not None and content[0] == key[0], "sealed before it was written, or in another group"
            self.findable[content] = block
        elif event == "evict":
            self.findable = {prefix: at for prefix, at in self.findable.items() if at != block}

    def _prefix(self, seq: Sequence, group: int, length: int) -> Prefix:
        return group, self.salts[seq.seq_id], tuple(seq.token_ids[:length])

    def _sequence(self, tokens: "array[int]", salt: str) -> Sequence:
        params = SamplingParams()
        message = AddRequest(str(self.ids), list(tokens), params, cache_salt=salt)
        request = Request(message, self.ids, self.kv.digests.root(message), frozenset(), 0, 0.0)
        seq = Sequence(self.ids, request, 0, tokens, len(tokens) + 100, False, len(self.kv.groups))
        self.salts[seq.seq_id] = salt
        self.ids += 1
        return seq

    def _table(self, seq: Sequence, group: int, length: int) -> list[int] | None:
        """The table of a hit of this length, or None where the group cannot start from there."""
        span, window = self.kv.spans[group], getattr(self.kv.groups[group], "window", None)
        if length % span:
            return None
        table = []
        for end in range(span, length + 1, span):
            seen = window is None or end > length - window + 1  # by the query that comes next
            table.append(self.findable.get(self._prefix(seq, group, end)) if seen else NULL_BLOCK)
        return None if None in table else [block or NULL_BLOCK for block in table]

    @rule(
        shared=st.sampled_from([0, 3, 8, 8, 9, 10]),
        tail=st.lists(st.integers(0, 1), max_size=6),
        salt=st.sampled_from(["", "", "", "b"]),
        seal=st.booleans(),
    )
    def admit(self, shared: int, tail: list[int], salt: str, seal: bool) -> None:
        seq = self._sequence(array("i", [7] * shared + tail or [7]), salt)
        hit = self.kv.prefixes.match(seq)
        assert hit is not None
        if self.kv.caching:
            hashed: list[bytes] = []
            self.kv.digests.extend(hashed, seq.request.root, seq.token_ids, self.size, len(seq.digests), {})
            assert seq.digests == hashed, "copied from a sequence that begins otherwise"
        for length in range((seq.num_tokens - 1) // self.size * self.size, -1, -self.size):
            tables = [self._table(seq, group, length) for group in range(len(self.kv.groups))]
            if None not in tables:
                break
        assert (hit.num_tokens, hit.tables) == (length, tables), "the longest prefix that every group can start from"
        if self.kv.blocks_needed(seq, hit) > self.pool.num_free:
            return
        self.kv.admit(seq, hit)
        self.live.append(seq)
        self._allocate(seq, seq.num_tokens - hit.num_tokens, must_fit=True)
        if seal:
            self._seal(seq)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99), new=st.lists(st.integers(0, 1), min_size=1, max_size=5), rejected=st.sampled_from([0, 0, 1, 7]))
    def grow(self, pick: int, new: list[int], rejected: int) -> None:
        """`rejected`: drafts that are computed after the new tokens, and whose slots count for nothing"""
        seq = self.live[pick % len(self.live)]
        seq.in_flight += 1
        seq.append(new)  # which were sampled by one plan
        self._allocate(seq, seq.num_tokens - seq.num_planned, must_fit=False, rejected=rejected)

    def _allocate(self, seq: Sequence, count: int, must_fit: bool, rejected: int = 0) -> None:
        plan = StepPlan(0)
        before = (self.pool.ref.copy(), list(self.pool.free), dict(self.pool.index), [table.copy() for table in seq.tables])
        roomy = seq.num_planned + count + rejected <= seq.room
        if not self.kv.allocate(seq, count + rejected, plan):
            assert before == (self.pool.ref, list(self.pool.free), self.pool.index, seq.tables), "a failed allocate changed something"
            assert not must_fit and not roomy and not plan.new_blocks and not plan.copies
            seq.token_ids = seq.token_ids[: max(seq.num_planned, seq.num_computed + 1)]
            seq.num_tokens = len(seq.token_ids)
            seq.digests = seq.digests[: seq.num_tokens // self.size]
            return
        assert not roomy or all(block == NULL_BLOCK for *_, block in plan.new_blocks), "there was room, and yet blocks were taken"
        for source, target in plan.copies:
            self.memory[target] = list(self.memory[source])
        for position in range(seq.num_planned, seq.num_planned + count + rejected):
            for group, span in enumerate(self.kv.spans):
                block = seq.tables[group][position // span]
                assert self.pool.writable(block), "written while shared or sealed"
                self.memory[block][position % span] = self._prefix(seq, group, position + 1) if position < seq.num_tokens else None
        seq.num_planned += count

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def seal(self, pick: int) -> None:
        self._seal(self.live[pick % len(self.live)])

    def _seal(self, seq: Sequence) -> None:
        before = seq.num_sealed
        seq.num_computed = min(seq.num_planned, seq.num_tokens - 1)  # whatever computed the last one brought another
        self.kv.seal(seq)
        for group, span in enumerate(self.kv.spans):
            ends = range(before * self.size // span * span + span, seq.num_computed + 1, span)
            assert not self.kv.caching or all(self._prefix(seq, group, end) in self.findable for end in ends)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def fork(self, pick: int) -> None:
        parent = self.live[pick % len(self.live)]
        child = self._sequence(array("i", parent.token_ids), self.salts[parent.seq_id])
        self.kv.fork(parent, child)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99), back=st.integers(0, 12))
    def truncate(self, pick: int, back: int) -> None:
        seq = self.live[pick % len(self.live)]
        self.kv.truncate(seq, min(seq.num_tokens, max(self.kv.shortest(seq), seq.num_tokens - back)))

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        seq = self.live.pop(pick % len(self.live))
        self.kv.release(seq)
        assert not any(seq.tables) and not seq.pending

    @rule(sure=st.sampled_from([False] * 7 + [True]))
    def forget(self, sure: bool) -> None:
        if sure:
            self.pool.forget()

    @invariant()
    def every_table_reads_back_its_own_tokens(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.pool.check()
        tables = [table for seq in self.live for table in seq.tables]
        for block in range(1, self.pool.num_blocks):
            assert self.pool.ref[block] == sum(table.count(block) for table in tables)
        for seq in self.live:
            for group, (table, span) in enumerate(zip(seq.tables, self.kv.spans)):
                assert len(table) >= -(-seq.num_planned // span)
                window = getattr(self.kv.groups[group], "window", None)
                first = 0 if window is None else max(0, seq.num_computed - window + 1)
                read = [slot for block in table for slot in self.memory[block][:span]][first : seq.num_planned]
                assert read == [self._prefix(seq, group, length) for length in range(first + 1, seq.num_planned + 1)]
        assert set(self.kv.pending.values()) <= set(self.live)
        if not self.live:
            assert not self.kv.pending and self.pool.num_free == self.pool.num_blocks - 1


def test_tables_read_back_their_own_tokens_under_any_calls() -> None:
    run_state_machine_as_test(KVMachine, settings=machine_settings(100, 100))


@pytest.mark.soak
def test_tables_read_back_their_own_tokens_under_any_calls_for_long() -> None:
    run_state_machine_as_test(KVMachine, settings=machine_settings(500, 100, SOAK))


def test_blocks_of_rejected_drafts_do_not_pay_for_a_copy() -> None:
    machine = KVMachine()
    machine.start(4, 6, False, (FULL,))
    machine.admit(0, [1, 1, 1, 0, 1, 0], "", False)
    (seq,) = machine.live
    machine._allocate(seq, 0, must_fit=True, rejected=12)
    assert len(seq.tables[0]) == 5 and machine.pool.num_free == 0
    machine.fork(0)
    seq.in_flight = 1
    seq.append([0])
    before = [list(table) for table in seq.tables]
    assert not machine.kv.allocate(seq, 1, StepPlan(0)), "its block is shared, and none is left for a copy"
    assert seq.tables == before


# promise: another-tenants-salt
def test_digests_depend_on_key_identity_salt_offset_parent_tokens_and_extras() -> None:
    def digests(
        key: bytes, identity: bytes, salt: str, tokens: list[int], extras: dict[int, bytes] | None = None, offset: int = 0
    ) -> list[bytes]:
        kv = KVManager(BlockPool(2), 2, True, key, identity)
        message = AddRequest("r", tokens, SamplingParams(), cache_salt=salt, position_offset=offset)
        request = Request(message, 0, kv.digests.root(message), frozenset(), 0, 0.0)
        seq = Sequence(0, request, 0, array("i", tokens), 99, False)
        request.extras = extras or {}
        kv.prefixes.match(seq)
        return seq.digests

    usual = digests(b"k", b"m", "", [1, 2, 3, 4, 5])
    assert usual == digests(b"k", b"m", "", [1, 2, 3, 4, 6]) and len(usual) == 2 and all(len(digest) == 32 for digest in usual)
    others = [
        digests(b"x", b"m", "", [1, 2, 3, 4, 5]),
        digests(b"k", b"x", "", [1, 2, 3, 4, 5]),
        digests(b"k", b"m", "x", [1, 2, 3, 4, 5]),
        digests(b"k", b"m", "", [9, 2, 3, 4, 5]),
        digests(b"k", b"m", "", [1, 2, 3, 4, 5], {0: b"image"}),
        digests(b"k", b"m", "", [1, 2, 3, 4, 5], offset=1),
    ]
    assert all(not set(usual) & set(other) for other in others)
    later = digests(b"k", b"m", "", [1, 2, 3, 4, 5], {1: b"image"})
    assert later[0] == usual[0] and later[1] != usual[1], "what a link covers beside its tokens counts from there on"


def _specs(kinds: str) -> list[LayerCacheSpec]:
    """A letter for each layer: f is full, w has a window, s has a window and keeps half the bytes."""
    buffers = {"f": Buffer((2, 8), "float32"), "w": Buffer((2, 8), "float32"), "s": Buffer((1, 8), "float32")}
    return [LayerCacheSpec(at, {"kv": buffers[kind]}, None if kind == "f" else 4) for at, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ("fff", [((0, 1, 2), None, 1)]),
        ("fwwfww", [((0, 3), None, 1), ((1, 4), 4, 1), ((2, 5), 4, 1)]),
        ("wwwwf", [((4,), None, 1), ((0,), 4, 1), ((1,), 4, 1), ((2,), 4, 1), ((3,), 4, 1)]),
        ("ffffwwwww", [((0, 1, 2, 3), None, 1), ((4, 6, 8), 4, 1), ((5, 7), 4, 1)]),
        ("fffffwwwwww", [((0, 1, 2, 3, 4), None, 1), ((5, 6, 7, 8, 9, 10), 4, 1)]),  # nearly as many: one layer's bytes of padding
        ("fsfs", [((0, 2), None, 1), ((1, 3), 4, 2)]),
        ("fwwwwwwwwww", [((0,), None, 1), *(((at, at + 5), 4, 1) for at in range(1, 6))]),  # no more groups, each with its table
        ("wfffffffff", [(tuple(range(10)), None, 1)]),  # the padding of one layer's group would cost more than its window frees
    ],
)
def test_layers_are_split_into_groups_whose_blocks_have_equal_bytes(kinds: str, groups: list[tuple[object, ...]]) -> None:
    specs = _specs(kinds)
    split = split_layers(specs)
    assert [(group.layers, getattr(group, "window", None), group.links) for group in split] == groups
    assert sorted(layer for group in split for layer in group.layers) == list(range(len(kinds)))
    assert len({specs[group.layers[0]].bytes_per_token * group.links for group in split}) == 1
    assert one_group(specs) == (CacheGroup(tuple(range(len(kinds)))),)


def test_layers_whose_bytes_do_not_divide_are_refused() -> None:
    specs = [LayerCacheSpec(0, {"kv": Buffer((3,), "float32")}), LayerCacheSpec(1, {"kv": Buffer((2,), "float32")}, 4)]
    with pytest.raises(ConfigError, match="layer 1 keeps 8 bytes per token, not a divisor of 12 of another layer"):
        split_layers(specs)
