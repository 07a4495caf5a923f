"""The laws of Store about settles: quiet updates, and counters that are added up."""

from __future__ import annotations

import msgspec

from conveyor.domain.changes import (
    ANY,
    Applied,
    Change,
    Guard,
    Missing,
    SettleChange,
    Stale,
    Update,
)
from conveyor.domain.model import CounterState
from conveyor.ports.store import Store
from tests.builders import a_stats, a_task, add, keep, kept, key_of


async def test_a_quiet_update_is_applied_and_returns_no_row(store: Store) -> None:
    task, stats = a_task(), a_stats()
    await keep(store, task, stats)
    quiet = Update(key_of(task), ANY, {"url": "https://example.com/new"}, is_quiet=True)

    (verdict,) = await store.commit([SettleChange((quiet, add(stats, done=1)))])

    assert isinstance(verdict, Applied)
    assert verdict.rows == (None, msgspec.structs.replace(stats, done=1))
    assert await kept(store, task) == msgspec.structs.replace(task, url="https://example.com/new")


async def test_a_quiet_update_is_refused_like_any_other(store: Store) -> None:
    task, absent = a_task(claim=2), a_task(7)
    await keep(store, task)
    guard = Guard(equals=(("claim", 1),))
    late = Update(key_of(task), guard, {"url": "https://example.com/new"}, is_quiet=True)
    nowhere = Update(key_of(absent), ANY, {"url": "https://example.com/new"}, is_quiet=True)

    verdicts = await store.commit([Change((late,)), Change((nowhere,))])

    assert verdicts == [Stale(key_of(task), task), Missing(key_of(absent))]
    assert await kept(store, task) == task


async def test_settles_of_one_call_are_counted_together(store: Store) -> None:
    tasks = [a_task(number, claim=1) for number in range(4)]
    await keep(store, *tasks, a_stats(done=10), a_stats(1))

    def settle(number: int, *, claim: int, shard: int = 0) -> Change:
        guard = Guard(equals=(("claim", claim),))
        flip = Update(key_of(tasks[number]), guard, {"attempts": 1}, is_quiet=True)
        gate = Guard(status_in=frozenset({a_stats().status}))
        return SettleChange((flip, Update(key_of(a_stats(shard)), gate, {}, {"done": 1})))

    verdicts = await store.commit(
        [
            settle(0, claim=1),
            settle(1, claim=9),
            settle(2, claim=1, shard=1),
            settle(3, claim=1),
            settle(0, claim=1),
        ]
    )

    counted, elsewhere = a_stats(done=13), a_stats(1, done=1)
    assert verdicts[0] == verdicts[3] == verdicts[4] == Applied((None, counted))
    assert verdicts[1] == Stale(key_of(tasks[1]), tasks[1])
    assert verdicts[2] == Applied((None, elsewhere))
    assert await kept(store, a_stats()) == counted
    assert await kept(store, tasks[1]) == tasks[1]


async def test_quiet_counts_are_added_and_not_returned(store: Store) -> None:
    tasks = [a_task(number, claim=1) for number in range(3)]
    await keep(store, *tasks, a_stats(), a_stats(1, done=10))

    def settle(number: int, *, claim: int) -> Change:
        guard = Guard(equals=(("claim", claim),))
        flip = Update(key_of(tasks[number]), guard, {"attempts": 1}, is_quiet=True)
        # The counters row belongs to another shard.
        count = Update(key_of(a_stats(1)), ANY, {}, {"done": 1}, is_quiet=True)
        return SettleChange((flip, count))

    verdicts = await store.commit([settle(0, claim=1), settle(1, claim=9), settle(2, claim=1)])

    assert verdicts[0] == verdicts[2] == Applied((None, None))
    assert verdicts[1] == Stale(key_of(tasks[1]), tasks[1])
    assert await kept(store, a_stats(1)) == a_stats(1, done=12)
    assert await kept(store, a_stats()) == a_stats()


async def test_closed_counters_make_every_settle_of_a_call_stale(store: Store) -> None:
    tasks = [a_task(0), a_task(1)]
    shut = a_stats(status=CounterState.CLOSED)
    await keep(store, *tasks, shut)
    gate = Guard(status_in=frozenset({CounterState.OPEN}))

    verdicts = await store.commit(
        [
            SettleChange(
                (
                    Update(key_of(task), ANY, {"attempts": 1}, is_quiet=True),
                    Update(key_of(shut), gate, {}, {"done": 1}),
                )
            )
            for task in tasks
        ]
    )

    assert verdicts == [Stale(key_of(shut), shut)] * 2
    assert await kept(store, shut) == shut
    assert [await kept(store, task) for task in tasks] == tasks


async def test_a_refused_settle_returns_the_row_as_it_was_at_its_turn(store: Store) -> None:
    task, stats = a_task(claim=2), a_stats()
    await keep(store, task, stats)

    def settle(claim: int) -> Change:
        guard = Guard(equals=(("claim", claim),))
        flip = Update(key_of(task), guard, {"attempts": 7}, is_quiet=True)
        return SettleChange((flip, add(stats, done=1)))

    early, done, late = await store.commit([settle(1), settle(2), settle(1)])

    after = msgspec.structs.replace(task, attempts=7)
    assert early == Stale(key_of(task), task)
    assert isinstance(done, Applied)
    assert late == Stale(key_of(task), after)
