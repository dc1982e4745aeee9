"""Asserts the invariants of the policy: after every step in debug mode, and after every rule in the state machines."""

from collections import Counter

from octavo.policy.block_pool import NULL_BLOCK
from octavo.policy.cache_group import UNBOUNDED
from octavo.policy.kv_manager import KVManager
from octavo.policy.request import Sequence, Status
from octavo.policy.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    kv, pool = scheduler.kv, scheduler.kv.pool
    pool.check()
    live = [seq for request in scheduler.requests.values() for seq in request.sequences]
    scheduler.pins.check()
    tables = Counter(block for seq in live for table in seq.tables for block in table if block != NULL_BLOCK)
    holders = tables + scheduler.pins.num_holders
    assert all(pool.ref[block] == holders[block] for block in range(pool.num_blocks)), "refs, tables and pins disagree"
    assert sorted(seq.seq_id for seq in live) == sorted(seq.seq_id for seq in scheduler.waiting + scheduler.running)
    queued = [request for request in scheduler.requests.values() if request.arrival >= 0]  # the others began on another engine
    never_admitted = [request.request_id for request in queued if request.life.first_scheduled is None]
    assert list(scheduler.admission.unscheduled) == never_admitted, "who waits for the first time is known by arrival"
    _check_rows(scheduler)
    for queue in (scheduler.waiting, scheduler.running):
        assert [seq.key for seq in queue] == sorted(seq.key for seq in queue), "out of policy order"
    for seq in scheduler.waiting:
        _check_refusal(seq, scheduler)
    scheduler.beams.check()
    if kv.states is not None:
        kv.states.check(scheduler.running)
    for seq in live:
        _check_sequence(seq, scheduler)
    owners = {seq.seq_id for seq in scheduler.running}
    assert {owner.seq_id for owner in kv.pending.values()} <= owners, "a pending digest whose owner does not run"
    if not live:
        assert pool.num_free == pool.num_blocks - 1 - len(pool.pinned) and not kv.pending, "idle, but not as after start"


def _check_rows(scheduler: Scheduler) -> None:
    held = [row for seq in scheduler.running for row in (seq.row, *seq.reserved)]
    assert sorted(held + scheduler.rows.free) == list(range(scheduler.limits.max_num_seqs)), "rows leaked or doubled"


def _check_refusal(seq: Sequence, scheduler: Scheduler) -> None:
    admission, kv = scheduler.admission, scheduler.kv
    if not seq.in_flight and admission.is_refused_still(seq):
        kv.prefixes.links_left = UNBOUNDED
        hit = kv.prefixes.match(seq)
        assert hit is not None
        needed = kv.blocks_needed(seq, hit) + seq.blocks_for_others + admission.margin(seq)
        assert needed > kv.pool.num_free, "it would fit, and is not matched again"


def _check_sequence(seq: Sequence, scheduler: Scheduler) -> None:
    kv = scheduler.kv
    if seq.status is Status.WAITING:
        assert not any(seq.tables) and seq.row == -1 and seq.num_planned == 0 and not seq.pending and not seq.states
        return
    assert seq.num_computed <= seq.num_planned <= seq.limit - 1 and seq.target <= seq.limit - 1 and seq.num_computed < seq.num_tokens
    drafts = scheduler.drafts.source is not None
    assert seq.num_planned <= seq.target or (drafts and seq.in_flight == 1), "more is planned than its ids and those in flight"
    assert (scheduler.stages == 1 and not drafts) or seq.in_flight <= 1, "in two plans"
    assert seq.num_sealed <= seq.num_computed // kv.block_size, "sealed before it was computed"
    assert len(seq.token_ids) == seq.num_tokens <= seq.limit
    assert len(seq.tables) == len(kv.groups) and seq.room <= min(len(table) * span for table, span in zip(seq.tables, kv.spans))
    for number in range(len(kv.groups)):
        _check_table(seq, number, kv, drafts)


def _check_table(seq: Sequence, number: int, kv: KVManager, drafts: bool) -> None:
    table, span, pool = seq.tables[number], kv.spans[number], kv.pool
    needed = -(-seq.num_planned // span)
    assert len(table) == needed or (drafts and len(table) > needed), "table and progress disagree"
    first = kv.groups[number].first_read(seq.num_computed) // span
    held = table[first:]
    assert NULL_BLOCK not in held, "a block was given back that a window can still see"
    assert len(set(held)) == len(held)
    behind = [block != NULL_BLOCK for block in table[:first]]
    assert behind == sorted(behind), "a block in front of one that was given back is still held"
    for block in table[seq.num_planned // span : seq.room // span]:
        assert pool.writable(block), "there is room in a block that is shared or sealed"
