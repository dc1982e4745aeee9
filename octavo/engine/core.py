"""`EngineCore`: the step loop. Pipeline depth is a number, not a second code path.

    depth 1    schedule k   forward k   fill masks k   sample k   result k   update k
    depth 2    schedule k   forward k   result k-1   update k-1   fill masks k   sample k
    2 stages   schedule k   forward k   fill masks k   sample k   result k-1   update k-1

At depth 2 the result of a step is processed only after the next step was launched, so the host plans while the device computes.
Grammar masks are filled when every token before them is known, while the forward runs. With pipeline parallelism, as many plans
are in flight as there are stages, and no sequence is in two of them.
"""

from collections import deque

from octavo.engine.trace import Trace
from octavo.errors import RankLost, VerifyError
from octavo.grammar.grammars import Grammars
from octavo.log import logger
from octavo.messages import AddRequest, Delta, StepPlan, StepResult
from octavo.policy import invariants
from octavo.policy.scheduler import Scheduler
from octavo.worker.executor import Executor, Promise
from octavo.worker.roster import Roster


class EngineCore:
    def __init__(self, scheduler: Scheduler, executor: Executor, depth: int, check: bool = False, grammars: Grammars | None = None) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.traces: list[Trace] = []  # they follow the steps, for a file or for the view
        self.roster = Roster()
        self.weights = b""  # identifies the weights; empty: there are none
        self.grammars = grammars or Grammars(None, 0, ())
        self._stages = scheduler.stages
        self._depth = depth if self._stages == 1 else 1
        self._check = check
        self._launched: deque[tuple[StepPlan, Promise]] = deque()
        self._updates: list[Delta] = []  # not returned yet

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.requests or self._launched or self._updates)

    def add(self, request: AddRequest) -> None:
        has_grammar = request.params.structured_outputs is not None
        if has_grammar:
            self.grammars.check()
        self.scheduler.add(request)
        if has_grammar or request.request_id in self.grammars.request_ids:  # of an earlier request with the same id
            self.grammars.add(self.scheduler.requests[request.request_id])

    def abort(self, request_id: str, index: int | None = None) -> list[Delta]:
        ended = self.scheduler.abort(request_id, index)
        if not self.scheduler.requests:
            for trace in self.traces:
                trace.rest(self.scheduler)
        return ended

    def unpin(self, pin_id: str) -> None:
        """Ends a pinned prefix. Requests that still compute it end with the updates of the next step."""
        for request_id in self.scheduler.pins.release(pin_id):
            self._updates += self.abort(request_id)

    def step(self) -> list[Delta]:
        """Runs one step and returns its updates. If a step raises, its updates are returned by the next step."""
        if self.grammars.request_ids:
            self._updates += self.grammars.collect(self.scheduler)
            if not self._launched and self.grammars.must_wait(self.scheduler):
                self.grammars.nap()
                return self._given_out()
        for trace in self.traces:
            trace.begin()
        plan = self.scheduler.schedule()
        self.scheduler.stats.count_step(sum(plan.num_query))
        self._mark("schedule")
        try:
            if plan.is_empty:
                self._settle(max(0, len(self._launched) - 1))
                self._take(self.scheduler.update(plan, StepResult(plan.step, [])))
            else:
                self.executor.forward(plan)
                self._mark("forward")
                self._settle(self._stages - 1)
                masks, ends = self.grammars.fill(self.scheduler, plan) if plan.mask_rows else (None, [])
                self._updates += ends
                self._launched.append((plan, self.executor.sample(masks)))
                self._mark("sample")
        except RankLost as error:
            self._lose(plan, error)
            raise
        except BaseException as error:  # also Ctrl-C: the plan was not carried out, so its requests end here
            self._settle(0)
            if isinstance(error, VerifyError) or not isinstance(error, Exception):
                self._take(self.scheduler.fail(plan, f"the step was cut short: {error!r}"))
                raise
            self._fail(plan, error)
        if self._depth == 1:
            self._settle(self._stages - 1)
        for trace in self.traces:
            trace.end(plan, self.scheduler)
        if self._check:
            invariants.check(self.scheduler)
        return self._given_out()

    def _mark(self, name: str) -> None:
        for trace in self.traces:
            trace.mark(name)

    def _given_out(self) -> list[Delta]:
        deltas, self._updates = self._updates, []
        return deltas

    def close(self) -> None:
        try:
            self.executor.stop()  # first, because ranks report their last steps when they end
        finally:
            for trace in self.traces:
                trace.close()

    def _settle(self, kept: int) -> None:
        """Processes the results of launched steps, oldest first, until only the given number is left."""
        while len(self._launched) > kept:
            plan, promise = self._launched.popleft()
            try:
                result = promise.result()
                self._mark("wait")
                assert result.step == plan.step, f"result of step {result.step} where that of {plan.step} was due"
            except RankLost as error:
                self._lose(plan, error)
                raise
            except Exception as error:  # it failed after the launch
                self._fail(plan, error)
            else:
                self._take(self.scheduler.update(plan, result))
                self._mark("update")

    def _lose(self, plan: StepPlan, error: RankLost) -> None:
        """Handles the loss of the model: neither this plan nor the plans in flight will have a result."""
        lost = [plan, *(launched for launched, _ in self._launched)]
        self._launched.clear()
        for each in lost:
            self._take(self.scheduler.fail(each, f"the step was cut short: {error!r}"))

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        logger.error("step %d failed, its %d sequences end with an error: %s", plan.step, len(plan.row), error, exc_info=error)
        self._take(self.scheduler.fail(plan, f"the engine failed in this step: {error}"))

    def _take(self, deltas: list[Delta]) -> None:
        self._updates += self.grammars.advance(self.scheduler, deltas) if self.grammars.request_ids else deltas
