"""Episodes of everything at once on FakeKV, drawn from a seed: quicker than a state machine, so that a million steps are minutes.

An episode has its own pool, depth and policy. Requests with shared prefixes, salts, several samples, priorities, minimum and
maximum lengths and stop ids keep coming; samples are aborted at any point of a step, rows come out not finite, forwards
fail, the cache is reset. When all is over every text must be exact, every sample must have ended once, and nothing may be held.
"""

import random
from collections import Counter

from octavo.messages import StepPlan
from octavo.sampling_params import SamplingParams
from tests.support.fake import GROUPS, VOCAB, FakeEngine, Hook


class Episode:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        size, num_blocks, self.rows = rng.choice((1, 2, 4, 16)), rng.randrange(8, 40), rng.randrange(2, 12)
        self.engine = FakeEngine(
            block_size=size,
            num_blocks=num_blocks,
            rows=self.rows,
            budget=self.rows + rng.choice((0, 3, 12, 60)),
            most_len=120,
            depth=rng.choice((1, 2)),
            caching=rng.random() < 0.9,
            by_priority=rng.random() < 0.5,
            preempt_every=rng.choice((0, 0, 5, 13)),
            end_ids=rng.choice(((), (3,), (1, 2, 3, 4))),
            groups=rng.choice(GROUPS),
            drafts=rng.choice((0, 0, 1, 4)),
        )
        self.shared = [[rng.randrange(VOCAB) for _ in range(100)] for _ in range(3)]
        self.disturbed: set[str] = set()
        self.happened = Counter[str]()

    def run(self, requests: int) -> Counter[str]:
        """What happened, if all went well."""
        engine, rng = self.engine, self.rng
        while len(engine.asked) < requests:
            if len(engine.scheduler.waiting) < 8 and rng.random() < 0.4:
                self._add()
            if rng.random() < 0.05:
                rng.choice((self._abort, self._poison, self._fail, self._reset))()
            if rng.random() < 0.1:
                self._change()
            self._step()
        engine.scheduler.preempt_every = 0
        while engine.core.has_work:
            self._step()
            assert engine.scheduler.step < 1000 * requests, f"nothing ends: {engine.scheduler.snapshot()}"
        engine.assert_idle()
        assert set(engine.ends) == set(engine.tokens), "somebody never ended"
        engine.assert_exact(self.disturbed)
        return self.happened + self._counted()

    def _add(self) -> None:
        engine, rng = self.engine, self.rng
        tail = [rng.randrange(VOCAB) for _ in range(rng.randrange(6))]
        prompt = (rng.choice(self.shared)[: rng.randrange(1, 90)] + tail)[: engine.max_len - 1]
        most = rng.choice((None, rng.randrange(1, 60)))
        most = None if most is None else min(most, engine.max_len - len(prompt))
        least = rng.choice((0, 0, rng.randrange(1 + min(most or 20, 20))))
        params = SamplingParams(
            n=min(rng.choice((1, 1, 1, 2, 4)), self.rows),
            max_tokens=most,
            min_tokens=least,
            seed=rng.choice((None, 0, 1)),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=rng.choice(((), (), (9,))),
        )
        engine.add(f"r{len(engine.asked)}", prompt, params, rng.choice((0, 0, -1, 1)), rng.choice(("", "", "", "tenant")))

    def _step(self) -> None:
        before = len(self.engine.executor.plans)
        self.engine.step()
        for plan in self.engine.executor.plans[before:]:
            self.happened["sequence-steps"] += len(plan.row)
            self.happened["forks"] += len(plan.row_forks)
            self.happened["copies"] += len(plan.copies)
        self.engine.executor.plans.clear()

    # --- disturbances ------------------------------------------------------------------------------------------------

    def _abort(self) -> None:
        """A request or one sample of it, now or at a point inside the next step; perhaps one that has ended."""
        if not self.engine.asked:
            return
        name = self.rng.choice(list(self.engine.scheduler.requests) or list(self.engine.asked))
        index = self.rng.choice((None, 0, 1))
        self.disturbed.add(name)
        self.happened["aborts"] += 1

        def abort() -> None:
            self.engine.abort(name, index)

        hooks = self.rng.choice((self.engine.executor.before_forward, self.engine.executor.after_forward, None))
        if hooks is None:
            abort()
        else:
            hooks.append(abort)

    def _poison(self) -> None:
        self.engine.faults.poison = {self.rng.randrange(self.rows)}
        self.engine.executor.before_forward.append(self._disturbs("rows not finite", self.engine.faults.poison))

    def _fail(self) -> None:
        self.engine.faults.raise_at = self.rng.randrange(-1, 3)
        self.engine.executor.before_forward.append(self._disturbs("failed forwards", None))

    def _disturbs(self, what: str, entries: set[int] | None) -> Hook:
        """Notes, once the plan is made, whose requests the fault may end: those of `entries`, or all it touches."""

        def note() -> None:
            plans = self.engine.executor.plans[-1:]
            hurt = {seq_id for plan in plans for seq_id in self._touched(plan, entries)}
            self.happened[what] += bool(hurt)
            for name, request in self.engine.scheduler.requests.items():
                if any(seq.seq_id in hurt for seq in request.sequences):
                    self.disturbed.add(name)

        return note

    def _change(self) -> None:
        """A sample that has begun to answer is forked, truncated, or given another last id; or two exchange rows."""
        engine, rng = self.engine, self.rng
        running = engine.scheduler.running
        begun = [seq for seq in running + engine.scheduler.waiting if seq.num_tokens > seq.request.num_prompt]
        what = rng.choice(("fork", "truncate", "replace", "exchange"))
        if what == "exchange" and len(running) > 1:
            engine.scheduler.rows.exchange(*rng.sample(running, 2))
        if not begun or what == "exchange":
            return
        seq = rng.choice(begun)
        self.happened[what] += 1
        if what == "fork" and len(engine.tokens) < 4 * len(engine.asked):  # else there is no end of them
            engine.fork(seq)
        elif what == "truncate":
            engine.truncate(seq, max(seq.request.num_prompt, engine.kv.shortest(seq), seq.num_tokens - rng.randrange(9)))
        elif what == "replace" and not seq.in_flight and seq.num_planned < seq.num_tokens:
            engine.replace_last(seq, rng.choice([token for token in range(VOCAB) if token not in seq.request.end_ids]))

    def _reset(self) -> None:
        self.engine.pool.forget()
        self.happened["resets"] += 1

    def _counted(self) -> Counter[str]:
        engine = self.engine
        return Counter(
            {
                "episodes": 1,
                "requests": len(engine.asked),
                "tokens": sum(map(len, engine.tokens.values())),
                "preemptions": engine.scheduler.stats.preemptions,
                "evictions": engine.pool.counts.evicted,
                "tokens found in the cache": engine.scheduler.stats.prefix_hits,
            }
        )

    def _touched(self, plan: StepPlan, entries: set[int] | None) -> set[int]:
        return self.engine.touched(plan) if entries is None else {seq_id for entry, seq_id in enumerate(plan.seq_id) if entry in entries}
