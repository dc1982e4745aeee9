"""Turns go round the clients, and none is lost, whoever leaves."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.grammar.checker import Turns


def test_turns_go_round_and_too_many_of_one_client_are_refused() -> None:
    async def work() -> None:
        turns, order = Turns(3), list[str]()

        async def ask(client: str, name: str) -> None:
            if await turns.take(client):
                order.append(name)
                await asyncio.sleep(0)
                turns.release()
            else:
                order.append(f"not {name}")

        names = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("a", "a5"), ("b", "b1"), ("b", "b2"), ("c", "c1")]
        await asyncio.gather(*(ask(client, name) for client, name in names))
        assert order == ["a1", "not a5", "b1", "c1", "a2", "b2", "a3", "a4"], "whoever had a turn goes behind all others"
        assert await turns.take("d")

    asyncio.run(asyncio.wait_for(work(), 60))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.booleans()), min_size=1, max_size=12))
def test_whoever_leaves_takes_no_turn_along(asked: list[tuple[str, int, bool]]) -> None:
    """(client, when it is cancelled, whether it is)"""

    async def work() -> None:
        turns, inside, served = Turns(20), 0, 0

        async def ask(client: str) -> None:
            nonlocal inside, served
            await turns.take(client)
            inside += 1
            assert inside == 1, "one at a time"
            try:
                await asyncio.sleep(0)
                served += 1
            finally:
                inside -= 1
                turns.release()

        tasks = [asyncio.create_task(ask(client)) for client, _, _ in asked]
        for moment in range(7):
            await asyncio.sleep(0)
            for task, (_, when, leaves) in zip(tasks, asked, strict=True):
                if leaves and when == moment:
                    task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert served >= sum(not leaves for _, _, leaves in asked)
        assert await turns.take("last") and not turns._waiting

    asyncio.run(asyncio.wait_for(work(), 60))
