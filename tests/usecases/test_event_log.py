"""The event log: every event gets one sequence number, whatever fails meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from conveyor.domain import limits
from conveyor.domain.model import Event
from conveyor.domain.queries import UnplacedEvents
from conveyor.ports.errors import Unavailable
from conveyor.usecases import event_log
from conveyor.usecases.context import Context
from conveyor.usecases.event_log import EventWakeups
from conveyor.usecases.run import reconcile, runs
from tests.builders import CALLER, ManualClock, a_change, a_feed, an_event, insert, keep
from tests.usecases.faults import Fault, When, with_fault
from tests.usecases.world import a_world, submit, work


async def feed_of(env: Context) -> list[Event]:
    return await event_log.page(env.store, CALLER, after=0, limit=10_000)


async def numbers_of(env: Context) -> list[int]:
    return [event.seq for event in await feed_of(env)]


async def test_an_event_is_committed_together_with_its_change_or_not_at_all(env: Context) -> None:
    accepted = await submit(env, 1)
    await work(env, accepted.run)
    before = await numbers_of(env)

    await runs.complete_if_done(env, accepted.job.job_id, accepted.run.run_id)

    assert await numbers_of(env) == before == [1, 2, 3]


async def test_concurrent_writers_get_different_numbers_without_gaps(env: Context) -> None:
    other = replace(env, news=EventWakeups(), process_id="process-2")

    async with trio.open_nursery() as nursery:
        for writer in (env, other) * 10:
            nursery.start_soon(submit, writer, 1)

    assert await numbers_of(env) == list(range(1, 41))
    assert len({event.event_id for event in await feed_of(env)}) == 40


async def test_concurrent_numbering_of_the_same_events_numbers_them_once(env: Context) -> None:
    events = [an_event(number) for number in range(5)]
    await keep(env.store, *events)
    change = a_change(*(insert(event) for event in events))

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(event_log.number_committed, env.store, EventWakeups(), change)

    assert await numbers_of(env) == [1, 2, 3, 4, 5]


async def test_an_event_without_a_number_is_numbered_by_the_sweeper(
    env: Context, clock: ManualClock
) -> None:
    await keep(env.store, an_event(1), an_event(2))
    clock.advance(10)
    await submit(env, 1)

    assert await reconcile.place_events(env) == 2
    assert await reconcile.place_events(env) == 0

    assert await numbers_of(env) == [1, 2, 3, 4]
    assert {event.event_id for event in (await feed_of(env))[2:]} == {"event-1", "event-2"}


@pytest.mark.parametrize("when", list(When))
@pytest.mark.parametrize("number", range(1, 7))
async def test_an_outage_at_any_call_of_a_stop_loses_and_duplicates_no_event(
    number: int, when: When
) -> None:
    world = a_world()
    env = world.env
    job_id = (await submit(env, 1)).job.job_id
    faulty = with_fault(env, Fault(number, when, "commit"))
    for attempt in (faulty, env):
        try:
            await runs.stop(attempt, CALLER, job_id)
            break
        except Unavailable:
            continue
    world.clock.advance(10)
    await reconcile.place_events(env)

    kinds = [event.event_type.value for event in await feed_of(env)]
    assert kinds == ["job.created", "run.created", "run.stopped"]
    assert await env.store.find(UnplacedEvents(before=env.now() + 9, limit=9)) == []


async def test_only_the_newest_events_are_kept(
    env: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "EVENTS_KEPT_MAX", 10)
    await keep(env.store, a_feed(499), *(an_event(seq, seq=seq) for seq in range(450, 500)))

    await submit(env, 1)

    assert await numbers_of(env) == list(range(492, 502))


async def test_a_reader_whose_ticket_was_issued_before_an_event_is_woken(env: Context) -> None:
    ticket = env.news.ticket(CALLER)

    await submit(env, 1)

    assert ticket.is_set()
    assert not env.news.ticket(CALLER).is_set()
