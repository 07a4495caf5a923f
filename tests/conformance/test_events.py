"""The laws of events: they are listed by sequence number, or found without one, and deleted when
they expire."""

from __future__ import annotations

from conveyor.domain.ids import CallerId
from conveyor.domain.queries import EventsOf, UnplacedEvents
from conveyor.ports.store import Store
from tests.builders import (
    CALLER,
    JOB,
    OTHER_JOB,
    OTHER_RUN,
    RUN,
    T0,
    a_feed,
    a_job,
    an_event,
    keep,
    kept,
)


async def test_events_are_listed_by_sequence_number_and_only_once_they_have_one(
    store: Store,
) -> None:
    placed = [an_event(9 - seq, seq=seq) for seq in (3, 1, 2)]
    await keep(store, *placed, an_event(20), an_event(21, seq=1, caller=CallerId("other")))

    events = await store.find(EventsOf(caller=CALLER, after=0, limit=10))
    behind = await store.find(EventsOf(caller=CALLER, after=1, limit=1))

    assert [event.seq for event in events] == [1, 2, 3]
    assert [event.seq for event in behind] == [2]


async def test_a_sequence_number_before_the_first_lists_all_numbered_events(store: Store) -> None:
    await keep(store, an_event(1, seq=1), an_event(2))

    events = await store.find(EventsOf(caller=CALLER, after=-5, limit=10))

    assert [event.seq for event in events] == [1]


async def test_events_without_a_sequence_number_are_found_oldest_first(store: Store) -> None:
    left = [an_event(number, occurred_at=T0 + 9 - number) for number in range(4)]
    await keep(store, *left, an_event(30, seq=1, occurred_at=T0))

    events = await store.find(UnplacedEvents(before=T0 + 9, limit=2))

    assert events == [left[3], left[2]]


async def test_delete_expired_removes_expired_events(store: Store) -> None:
    old, young = an_event(1, expires_at=T0 - 1), an_event(2, expires_at=T0 + 1)
    await keep(store, old, young, a_feed(2))

    assert await store.delete_expired(T0) == 1

    assert await kept(store, old) is None
    assert await kept(store, young) == young
    assert await kept(store, a_feed()) == a_feed(2)


async def test_deleting_a_run_or_job_deletes_its_events_and_no_others(store: Store) -> None:
    of_run = an_event(1, job_id=JOB, run_id=RUN)
    of_job = an_event(2, job_id=JOB)
    of_other_run = an_event(3, job_id=JOB, run_id=OTHER_RUN)
    of_other_job = an_event(4, job_id=OTHER_JOB)
    of_nobody = an_event(5, seq=1)
    everything = [of_run, of_job, of_other_run, of_other_job, of_nobody]
    await keep(store, a_job(), *everything)

    await store.delete_run_rows(JOB, RUN, limit=100)
    after_run = [row for row in everything if await kept(store, row)]
    await store.delete_run_rows(JOB, None, limit=100)
    after_job = [row for row in everything if await kept(store, row)]

    assert after_run == [of_job, of_other_run, of_other_job, of_nobody]
    assert after_job == [of_other_job, of_nobody]
