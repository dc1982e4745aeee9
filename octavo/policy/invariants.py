"""The invariants of the policy room, asserted: after every step in debug mode, after every rule in the state machines."""

from collections import Counter

from octavo.policy.request import Sequence, Status
from octavo.policy.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    kv, pool = scheduler.kv, scheduler.kv.pool
    pool.check()
    live = [seq for request in scheduler.requests.values() for seq in request.sequences]
    holders = Counter(block for seq in live for block in seq.table)
    assert all(pool.ref[block] == holders[block] for block in range(pool.num_blocks)), "refs and tables disagree"
    assert sorted(seq.seq_id for seq in live) == sorted(seq.seq_id for seq in scheduler.waiting + scheduler.running)
    never_admitted = [name for name, request in scheduler.requests.items() if request.life.first_scheduled is None]
    assert list(scheduler.admission.unscheduled) == never_admitted, "who waits for the first time is known by arrival"
    _check_rows(scheduler)
    for queue in (scheduler.waiting, scheduler.running):
        assert [seq.key for seq in queue] == sorted(seq.key for seq in queue), "out of policy order"
    for seq in live:
        _check_sequence(seq, scheduler)
    owners = {seq.seq_id for seq in scheduler.running}
    assert set(kv.pending.values()) <= owners, "a pending digest whose owner does not run"
    if not live:
        assert pool.num_free == pool.num_blocks - 1 and not kv.pending, "idle, but not as after start"


def _check_rows(scheduler: Scheduler) -> None:
    held = [row for seq in scheduler.running for row in (seq.row, *seq.reserved)]
    assert sorted(held + scheduler.free_rows) == list(range(scheduler.limits.max_num_seqs)), "rows leaked or doubled"


def _check_sequence(seq: Sequence, scheduler: Scheduler) -> None:
    kv = scheduler.kv
    size = kv.block_size
    if seq.status is Status.WAITING:
        assert not seq.table and seq.row == -1 and seq.num_planned == 0 and not seq.pending
        return
    assert seq.num_computed <= seq.num_planned <= seq.target <= seq.limit - 1
    assert len(seq.table) == -(-seq.num_planned // size), "table and progress disagree"
    assert len(seq.token_ids) == seq.num_tokens <= seq.limit
    assert 0 not in seq.table and len(set(seq.table)) == len(seq.table)
    if seq.num_computed >= seq.request.num_prompt:  # before that, samples may share what their parent has in flight
        in_flight = {seq.table[position // size] for position in range(seq.num_computed, seq.num_planned)}
        assert all(kv.pool.writable(block) for block in in_flight), "a shared or sealed block is being written"
    for index, block in enumerate(seq.table):
        if (index + 1) * size > seq.num_computed:
            assert kv.pool.digest_of[block] is None or (index + 1) * size <= seq.num_planned, "sealed before it was computed"
