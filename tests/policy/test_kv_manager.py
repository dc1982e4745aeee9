"""Block tables against the plainest memory there is: a slot remembers the whole token prefix that was written into it.

So a table is right if reading it gives, position by position, the prefixes of its own tokens.
"""

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from octavo.messages import StepPlan
from octavo.policy.block_pool import BlockPool, Event
from octavo.policy.kv_manager import KVManager
from octavo.policy.request import Request, Sequence
from octavo.sampling_params import SamplingParams
from tests.policy.machine_settings import SOAK, machine_settings

Prefix = tuple[str, tuple[int, ...]]  # salt and tokens


class KVMachine(RuleBasedStateMachine):
    @initialize(size=st.sampled_from([1, 2, 4]), num_blocks=st.integers(4, 14), caching=st.sampled_from([True, True, True, False]))
    def start(self, size: int, num_blocks: int, caching: bool) -> None:
        self.size = size
        self.pool = BlockPool(num_blocks, self._on_event)
        self.kv = KVManager(self.pool, size, caching, b"key", b"model")
        self.memory: list[list[Prefix | None]] = [[None] * size for _ in range(num_blocks)]
        self.findable: dict[Prefix, int] = {}  # what the cache should find
        self.live: list[Sequence] = []
        self.salts: dict[int, str] = {}
        self.ids = 0

    def _on_event(self, event: Event, block: int, digest: bytes | None) -> None:
        if event == "seal":
            content = self.memory[block][-1]
            assert content is not None, "sealed before it was written"
            self.findable[content] = block
        elif event == "evict":
            self.findable = {prefix: at for prefix, at in self.findable.items() if at != block}

    def _prefix(self, seq: Sequence, length: int) -> Prefix:
        return self.salts[seq.seq_id], tuple(seq.token_ids[:length])

    def _sequence(self, tokens: "array[int]", salt: str) -> Sequence:
        params = SamplingParams()
        request = Request(str(self.ids), params, len(tokens), self.ids, 0, self.kv.root(salt), frozenset(), 0, 0.0)
        seq = Sequence(self.ids, request, 0, tokens, len(tokens) + 100, False)
        self.salts[seq.seq_id] = salt
        self.ids += 1
        return seq

    @rule(
        shared=st.sampled_from([0, 3, 8, 8, 9, 10]),
        tail=st.lists(st.integers(0, 1), max_size=6),
        salt=st.sampled_from(["", "", "", "b"]),
        seal=st.booleans(),
    )
    def admit(self, shared: int, tail: list[int], salt: str, seal: bool) -> None:
        seq = self._sequence(array("i", [7] * shared + tail or [7]), salt)
        hit = self.kv.match(seq)
        wanted = 0
        while (wanted + 1) * self.size < seq.num_tokens and self._prefix(seq, (wanted + 1) * self.size) in self.findable:
            wanted += 1
        assert hit.table == [self.findable[self._prefix(seq, (at + 1) * self.size)] for at in range(wanted)]
        assert hit.num_tokens == wanted * self.size < seq.num_tokens
        if self.kv.blocks_needed(seq, hit) > self.pool.num_free:
            return
        self.kv.admit(seq, hit)
        self.live.append(seq)
        self._allocate(seq, seq.num_tokens - hit.num_tokens, must_fit=True)
        if seal:
            self._seal(seq)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99), new=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def grow(self, pick: int, new: list[int]) -> None:
        seq = self.live[pick % len(self.live)]
        seq.in_flight += len(new)
        seq.append(new)
        self._allocate(seq, seq.num_tokens - seq.num_planned, must_fit=False)

    def _allocate(self, seq: Sequence, count: int, must_fit: bool) -> None:
        plan = StepPlan(0)
        before = (self.pool.ref.copy(), list(self.pool.free), dict(self.pool.index), seq.table.copy())
        roomy = self.kv.has_room(seq, count)
        if not self.kv.allocate(seq, count, plan):
            assert before == (self.pool.ref, list(self.pool.free), self.pool.index, seq.table), "a failed allocate changed something"
            assert not must_fit and not roomy and not plan.new_blocks and not plan.copies
            seq.token_ids = seq.token_ids[: seq.num_planned] or seq.token_ids
            seq.num_tokens = len(seq.token_ids)
            seq.digests = seq.digests[: seq.num_tokens // self.size]
            return
        assert not roomy or not plan.new_blocks, "has_room, and yet blocks were taken"
        for source, target in plan.copies:
            self.memory[target] = list(self.memory[source])
        for position in range(seq.num_planned, seq.num_planned + count):
            block = seq.table[position // self.size]
            assert self.pool.writable(block), "written while shared or sealed"
            self.memory[block][position % self.size] = self._prefix(seq, position + 1)
        seq.num_planned += count

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def seal(self, pick: int) -> None:
        self._seal(self.live[pick % len(self.live)])

    def _seal(self, seq: Sequence) -> None:
        before, seq.num_computed = seq.num_sealed, seq.num_planned
        self.kv.seal(seq)
        newly = range(before, seq.num_computed // self.size)
        assert not self.kv.caching or all(self._prefix(seq, (at + 1) * self.size) in self.findable for at in newly)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def fork(self, pick: int) -> None:
        parent = self.live[pick % len(self.live)]
        child = self._sequence(array("i", parent.token_ids), self.salts[parent.seq_id])
        self.kv.fork(parent, child)
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(pick=st.integers(0, 99))
    def release(self, pick: int) -> None:
        seq = self.live.pop(pick % len(self.live))
        self.kv.release(seq)
        assert not seq.table and not seq.pending

    @rule(sure=st.sampled_from([False] * 7 + [True]))
    def forget(self, sure: bool) -> None:
        if sure:
            self.pool.forget()

    @invariant()
    def every_table_reads_back_its_own_tokens(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.pool.check()
        for block in range(1, self.pool.num_blocks):
            assert self.pool.ref[block] == sum(seq.table.count(block) for seq in self.live)
        for seq in self.live:
            assert len(seq.table) == -(-seq.num_planned // self.size)
            read = [slot for block in seq.table for slot in self.memory[block]][: seq.num_planned]
            assert read == [self._prefix(seq, length) for length in range(1, seq.num_planned + 1)]
        assert set(self.kv.pending.values()) <= {seq.seq_id for seq in self.live}
        if not self.live:
            assert not self.kv.pending and self.pool.num_free == self.pool.num_blocks - 1


def test_tables_read_back_their_own_tokens_under_any_calls() -> None:
    run_state_machine_as_test(KVMachine, settings=machine_settings(200, 100))


@pytest.mark.soak
def test_tables_read_back_their_own_tokens_under_any_calls_for_long() -> None:
    run_state_machine_as_test(KVMachine, settings=machine_settings(500, 100, SOAK))


# promise: another-tenants-salt
def test_digests_depend_on_key_identity_salt_parent_and_tokens() -> None:
    def digests(key: bytes, identity: bytes, salt: str, tokens: list[int]) -> list[bytes]:
        kv = KVManager(BlockPool(2), 2, True, key, identity)
        request = Request("r", SamplingParams(), len(tokens), 0, 0, kv.root(salt), frozenset(), 0, 0.0)
        seq = Sequence(0, request, 0, array("i", tokens), 99, False)
        kv.match(seq)
        return seq.digests

    usual = digests(b"k", b"m", "", [1, 2, 3, 4, 5])
    assert usual == digests(b"k", b"m", "", [1, 2, 3, 4, 6]) and len(usual) == 2 and all(len(digest) == 32 for digest in usual)
    others = [
        digests(b"x", b"m", "", [1, 2, 3, 4, 5]),
        digests(b"k", b"x", "", [1, 2, 3, 4, 5]),
        digests(b"k", b"m", "x", [1, 2, 3, 4, 5]),
        digests(b"k", b"m", "", [9, 2, 3, 4, 5]),
    ]
    assert all(not set(usual) & set(other) for other in others)
