"""The laws of Store under concurrent calls (docs/engines.md)."""

from __future__ import annotations

import trio

from conveyor.domain.changes import Applied, Guard
from conveyor.ports.store import Store
from tests.builders import a_change, a_job, a_run, a_stats, a_task, add, keep, key_of, update


async def test_exactly_one_of_many_concurrent_guarded_writes_is_applied(store: Store) -> None:
    await keep(store, a_task(), a_stats())
    unclaimed = Guard(equals=(("claim", 0),))
    winners: list[int] = []

    async def compete(number: int) -> None:
        claim = a_change(update(a_task(), unclaimed, claim=number), add(a_stats(), done=1))
        [verdict] = await store.commit([claim])
        if isinstance(verdict, Applied):
            winners.append(number)

    async with trio.open_nursery() as nursery:
        for number in range(1, 21):
            nursery.start_soon(compete, number)

    assert len(winners) == 1
    assert await store.read(key_of(a_task())) == a_task(claim=winners[0])
    assert await store.read(key_of(a_stats())) == a_stats(done=1)


async def test_all_concurrent_deltas_are_counted(store: Store) -> None:
    await keep(store, a_stats())

    async def count() -> None:
        for _ in range(5):
            await store.commit(
                [a_change(add(a_stats(), done=1)), a_change(add(a_stats(), credits=2))]
            )

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(count)

    assert await store.read(key_of(a_stats())) == a_stats(done=50, credits=100)


async def test_a_reader_never_sees_half_of_a_change(store: Store) -> None:
    await keep(store, a_job(), a_run(sequence=0))
    seen: list[tuple[int, int]] = []

    async def write(cancel_scope: trio.CancelScope) -> None:
        for number in range(1, 21):
            both = a_change(update(a_job(), runs_count=number), update(a_run(), sequence=number))
            await store.commit([both])
        cancel_scope.cancel()

    async def check_rows() -> None:
        while True:
            job = await store.read(key_of(a_job()))
            run = await store.read(key_of(a_run()))
            assert job is not None
            assert run is not None
            seen.append((job.runs_count, run.sequence))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(check_rows)
        nursery.start_soon(write, nursery.cancel_scope)

    # The run is read after the job, so it may be newer, but it can never be older.
    assert all(earlier <= later for earlier, later in seen)
