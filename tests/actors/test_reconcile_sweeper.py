"""The sweeper's rounds: workers that share an engine take turns."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import trio
from trio.testing import MockClock

from actors.messages import StreamerMessage
from actors.reconcile_sweeper import ReconcileSweeper
from actors.runtime import Mailbox
from conveyor.domain.lifecycle import RUN_LIVE
from conveyor.domain.queries import RunsIn
from conveyor.ports.store import Store
from tests.actors.world import make_world


@dataclass(frozen=True, slots=True)
class CountingStore:
    """A store that counts who looks through all live runs, and how often."""

    inner: Store
    name: str
    looks: Counter[str] = field(default_factory=Counter)

    async def find(self, query: Any) -> Any:
        if isinstance(query, RunsIn) and query.statuses == RUN_LIVE:
            self.looks[self.name] += 1
        return await self.inner.find(query)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_five_workers_look_through_the_live_runs_about_as_often_as_one(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    looks: Counter[str] = Counter()
    mailbox: Mailbox[StreamerMessage] = Mailbox(capacity=10)

    async with trio.open_nursery() as nursery:
        for number in range(5):
            store = CountingStore(world.env.store, f"worker {number}", looks)
            env = replace(world.env, store=store)
            sweeper = ReconcileSweeper(env=env, streamer=mailbox.address, period_s=30.0)
            nursery.start_soon(sweeper.run)
            await trio.sleep(3.7)
        await trio.sleep(600)
        nursery.cancel_scope.cancel()

    assert 20 <= looks.total() <= 45


async def test_a_sweeper_that_dies_is_replaced_by_another_within_two_rounds(
    autojump_clock: MockClock,
) -> None:
    world = make_world()
    looks: Counter[str] = Counter()
    mailbox: Mailbox[StreamerMessage] = Mailbox(capacity=10)

    def a_sweeper(name: str) -> ReconcileSweeper:
        env = replace(world.env, store=CountingStore(world.env.store, name, looks))
        return ReconcileSweeper(env=env, streamer=mailbox.address, period_s=30.0)

    with trio.move_on_after(1):
        await a_sweeper("first").run()
    with trio.move_on_after(60):
        await a_sweeper("second").run()

    assert looks["first"] == 1
    assert looks["second"] >= 1
