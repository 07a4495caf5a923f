"""The laws of Store: changes, verdicts and effects (docs/engines.md)."""

from __future__ import annotations

import msgspec
import pytest

from conveyor.domain.changes import Applied, Change, Guard, Missing, OpenQueue, Row, Stale, Verdict
from conveyor.domain.model import FailureReason
from conveyor.ports.errors import QueueGone
from conveyor.ports.queue import Depth, Queue
from conveyor.ports.store import Store
from tests.builders import (
    OTHER_JOB,
    OTHER_RUN,
    RUN,
    T0,
    a_batch,
    a_change,
    a_crossing,
    a_deletion_intent,
    a_job,
    a_notice,
    a_record,
    a_ref,
    a_run,
    a_stats,
    a_task,
    add,
    an_input,
    delete,
    insert,
    keep,
    kept,
    key_of,
    some_keys,
    update,
)

BARE: list[Row] = [
    a_job(),
    a_run(),
    a_batch(),
    a_stats(),
    a_task(),
    a_record(),
    a_notice(),
    a_crossing(),
    a_deletion_intent(),
    some_keys(),
    an_input(),
]


def _name(row: object) -> str:
    return type(row).__name__


def _done(verdicts: list[Verdict]) -> list[bool]:
    return [isinstance(verdict, Applied) for verdict in verdicts]


async def test_an_update_sets_values_and_adds_deltas_and_leaves_the_rest(store: Store) -> None:
    await keep(store, a_stats(done=3, failed=2, credits=5), a_stats(1), a_task())
    await store.commit([a_change(add(a_stats(), done=2, failed=-1))])

    verdicts = await store.commit(
        [a_change(update(a_task(), url="https://example.com/new", claim=7, claim_until=T0 + 90))]
    )

    moved = a_task(url="https://example.com/new", claim=7, claim_until=T0 + 90)
    assert verdicts == [Applied((moved,))]
    assert await store.read(key_of(a_task())) == moved
    assert await store.read(key_of(a_stats())) == a_stats(done=5, failed=1, credits=5)
    assert await store.read(key_of(a_stats(1))) == a_stats(1)


@pytest.mark.parametrize(
    "guard",
    [
        Guard(),
        Guard(status_in=frozenset({"pending", "processing"})),
        Guard(equals=(("claim", 2), ("url", "https://example.com/0"), ("attempts", 0))),
        Guard(equals=(("started_at", None), ("reason", FailureReason.BLOCKED))),
        Guard(lapsed=("claim_until", T0 + 0.5)),
        Guard(at_least=("claim", 2)),
        Guard(at_least=("claim", -1), equals=(("claim", 2),)),
        Guard(
            status_in=frozenset({"pending"}), equals=(("claim", 2),), lapsed=("claim_until", T0 + 1)
        ),
    ],
)
async def test_a_change_is_applied_if_all_conditions_of_its_guard_hold(
    store: Store, guard: Guard
) -> None:
    task = a_task(claim=2, claim_until=T0, reason=FailureReason.BLOCKED)
    await keep(store, task)

    verdicts = await store.commit([a_change(update(task, guard, attempts=1))])

    assert verdicts == [Applied((msgspec.structs.replace(task, attempts=1),))]


FAILING = [
    Guard(status_in=frozenset({"processing", "failed"})),
    Guard(status_in=frozenset()),
    Guard(equals=(("claim", 3),)),
    Guard(equals=(("claim", 2), ("attempts", 1))),
    Guard(equals=(("started_at", T0),)),
    Guard(equals=(("reason", None),)),
    Guard(lapsed=("claim_until", T0)),
    Guard(at_least=("claim", 3)),
    Guard(at_least=("claim", 3), lapsed=("claim_until", T0 + 1)),
    Guard(lapsed=("claim_until", T0 - 1)),
    Guard(status_in=frozenset({"pending"}), equals=(("claim", 2),), lapsed=("claim_until", T0)),
]


@pytest.mark.parametrize("guard", FAILING)
async def test_a_failed_guard_is_stale_and_writes_nothing(store: Store, guard: Guard) -> None:
    task = a_task(claim=2, claim_until=T0, reason=FailureReason.BLOCKED)
    await keep(store, a_job(), task, a_stats())

    verdicts = await store.commit(
        [
            a_change(
                insert(a_run()),
                update(a_job(), name="changed"),
                update(task, guard, attempts=9),
                add(a_stats(), done=1),
            )
        ]
    )

    assert verdicts == [Stale(key_of(task), task)]
    assert await store.read(key_of(a_run())) is None
    assert await store.read(key_of(a_job())) == a_job()
    assert await store.read(key_of(task)) == task
    assert await store.read(key_of(a_stats())) == a_stats()


async def test_an_update_without_values_only_checks_its_guard(store: Store) -> None:
    await keep(store, a_job())
    is_open, is_closed = (
        Guard(status_in=frozenset({"open"})),
        Guard(status_in=frozenset({"closed"})),
    )

    verdicts = await store.commit(
        [
            a_change(update(a_job(), is_closed), insert(a_run(RUN))),
            a_change(update(a_job(), is_open), insert(a_run(OTHER_RUN))),
        ]
    )

    assert verdicts == [Stale(key_of(a_job()), a_job()), Applied((a_job(), a_run(OTHER_RUN)))]
    assert await store.read(key_of(a_job())) == a_job()
    assert await store.read(key_of(a_run(RUN))) is None


async def test_missing_outranks_stale(store: Store) -> None:
    await keep(store, a_job())
    never = Guard(status_in=frozenset())

    verdicts = await store.commit(
        [
            a_change(insert(a_job()), update(a_job(OTHER_JOB), name="x")),
            a_change(update(a_job(), never, name="x"), update(a_run(), total=1)),
            a_change(update(a_run(), total=1), update(a_job(), never, name="x")),
        ]
    )

    assert verdicts == [
        Missing(key_of(a_job(OTHER_JOB))),
        Missing(key_of(a_run())),
        Missing(key_of(a_run())),
    ]


async def test_the_first_of_several_failed_guards_is_the_verdict(store: Store) -> None:
    await keep(store, a_job(), a_run())
    never = Guard(status_in=frozenset())

    verdicts = await store.commit(
        [a_change(update(a_run(), never, total=1), update(a_job(), never, name="x"))]
    )

    assert verdicts == [Stale(key_of(a_run()), a_run())]


@pytest.mark.parametrize("row", BARE, ids=_name)
async def test_no_update_creates_a_row(store: Store, row: Row) -> None:
    verdicts = await store.commit([a_change(update(row)), a_change(add(row))])

    assert verdicts == [Missing(key_of(row))] * 2
    assert await kept(store, row) is None


@pytest.mark.parametrize("row", BARE, ids=_name)
async def test_an_insert_over_an_existing_row_is_stale(store: Store, row: Row) -> None:
    await keep(store, row)

    verdicts = await store.commit([a_change(insert(row))])

    assert verdicts == [Stale(key_of(row), row)]


async def test_an_insert_replaces_a_row_that_has_expired(store: Store) -> None:
    old, new = a_record(expires_at=T0, response_status=201), a_record(owner="next")
    await keep(store, old)

    verdicts = await store.commit([a_change(insert(new, over_expired_at=T0 + 0.001))])

    assert verdicts == [Applied((new,))]
    assert await store.read(key_of(old)) == new


@pytest.mark.parametrize("now", [None, T0 - 1, T0])
async def test_an_insert_does_not_replace_a_row_that_has_not_expired_yet(
    store: Store, now: float | None
) -> None:
    old, new = a_record(expires_at=T0), a_record(owner="next")
    await keep(store, old)

    verdicts = await store.commit([a_change(insert(new, over_expired_at=now))])

    assert verdicts == [Stale(key_of(old), old)]
    assert await store.read(key_of(old)) == old


async def test_a_delete_removes_a_row_that_passes_its_guard(store: Store) -> None:
    await keep(store, a_notice(1), a_notice(2))

    verdicts = await store.commit([a_change(delete(a_notice(1), Guard(equals=(("attempts", 0),))))])

    assert verdicts == [Applied((None,))]
    assert await store.read(key_of(a_notice(1))) is None
    assert await store.read(key_of(a_notice(2))) == a_notice(2)


async def test_a_delete_of_a_row_that_fails_its_guard_is_stale(store: Store) -> None:
    await keep(store, a_record(owner="me"))

    verdicts = await store.commit([a_change(delete(a_record(), Guard(equals=(("owner", "you"),))))])

    assert verdicts == [Stale(key_of(a_record()), a_record(owner="me"))]
    assert await store.read(key_of(a_record())) == a_record(owner="me")


async def test_a_delete_of_an_absent_row_is_applied(store: Store) -> None:
    verdicts = await store.commit(
        [a_change(delete(a_deletion_intent(), Guard(equals=(("passes_left", 2),))))]
    )

    assert verdicts == [Applied((None,))]


async def test_applied_carries_the_rows_as_written_in_the_order_of_the_writes(store: Store) -> None:
    await keep(store, a_stats(done=1), a_notice())

    verdicts = await store.commit(
        [
            a_change(
                insert(a_task()),
                delete(a_notice()),
                add(a_stats(), done=1),
                insert(a_job()),
            )
        ]
    )

    assert verdicts == [Applied((a_task(), None, a_stats(done=2), a_job()))]


async def test_changes_of_a_call_are_decided_in_order_and_each_sees_those_before_it(
    store: Store,
) -> None:
    await keep(store, a_task())
    first, second = Guard(equals=(("claim", 0),)), Guard(equals=(("claim", 1),))

    verdicts = await store.commit(
        [
            a_change(update(a_task(), first, claim=1)),
            a_change(update(a_task(), first, claim=99)),
            a_change(update(a_task(), second, claim=2)),
        ]
    )

    assert verdicts == [
        Applied((a_task(claim=1),)),
        Stale(key_of(a_task()), a_task(claim=1)),
        Applied((a_task(claim=2),)),
    ]
    assert await store.read(key_of(a_task())) == a_task(claim=2)


async def test_a_refused_change_does_not_affect_the_other_changes_of_the_call(store: Store) -> None:
    await keep(store, a_job())

    verdicts = await store.commit(
        [
            a_change(insert(a_run())),
            a_change(insert(a_job()), insert(a_task(1))),
            a_change(update(a_stats(), done=1), insert(a_task(2))),
            a_change(insert(a_task(3))),
        ]
    )

    assert _done(verdicts) == [True, False, False, True]
    assert await store.read(key_of(a_run())) == a_run()
    assert await store.read(key_of(a_task(1))) is None
    assert await store.read(key_of(a_task(2))) is None
    assert await store.read(key_of(a_task(3))) == a_task(3)


async def test_a_commit_without_changes_returns_no_verdicts(store: Store) -> None:
    assert await store.commit([]) == []


async def test_the_effects_of_an_applied_change_happen(store: Store, queue: Queue) -> None:
    await queue.open_run(RUN)

    await store.commit([a_change(insert(a_task()), refs=(a_ref(0), a_ref(1)))])

    messages = await queue.receive(RUN, count_max=10, visibility_s=60)
    assert [message.ref for message in messages] == [a_ref(0), a_ref(1)]


async def test_the_effects_of_a_refused_change_do_not_happen(store: Store, queue: Queue) -> None:
    await queue.open_run(RUN)
    await keep(store, a_job())

    await store.commit(
        [
            a_change(insert(a_job()), refs=(a_ref(0),)),
            a_change(update(a_run(), total=1), refs=(a_ref(1),)),
        ]
    )

    assert await queue.depth(RUN) == Depth(visible=0, hidden=0)


async def test_a_change_creates_the_queue_of_its_run(store: Store, queue: Queue) -> None:
    change = Change((insert(a_run()),), (OpenQueue(RUN),))

    verdicts = await store.commit([change])

    assert verdicts == [Applied((a_run(),))]
    assert await queue.receive(RUN, count_max=1, visibility_s=60) == []


async def test_a_refused_change_creates_no_queue(store: Store, queue: Queue) -> None:
    await keep(store, a_run())

    await store.commit([Change((insert(a_run()),), (OpenQueue(RUN),))])

    with pytest.raises(QueueGone):
        await queue.receive(RUN, count_max=1, visibility_s=60)


async def test_the_references_of_an_applied_change_create_a_missing_queue(
    store: Store, queue: Queue
) -> None:
    verdicts = await store.commit([a_change(insert(a_task()), refs=(a_ref(),))])

    assert verdicts == [Applied((a_task(),))]
    assert await queue.depth(RUN) == Depth(visible=1, hidden=0)
