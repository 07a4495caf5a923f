"""Guards, refusals and the registry of row kinds."""

from __future__ import annotations

from typing import get_args

import pytest

from conveyor.domain.changes import (
    KINDS_OF_RUN,
    ROW_KINDS,
    Guard,
    Missing,
    Row,
    SettleChange,
    Stale,
    Update,
    find_refusal,
    holds,
)
from conveyor.domain.damage import DamagedTask
from conveyor.domain.model import Run
from tests.builders import (
    T0,
    a_record,
    a_run,
    a_stats,
    a_task,
    add,
    delete,
    insert,
    key_of,
    update,
)

CLAIM_1 = Guard(equals=(("claim", 1),))


def test_the_registry_has_each_kind_of_row_once() -> None:
    assert sorted(kind.row_type.__name__ for kind in ROW_KINDS) == sorted(
        row_type.__name__ for row_type in get_args(Row)
    )
    for unique in ("name", "table", "key_type"):
        assert len({getattr(kind, unique) for kind in ROW_KINDS}) == len(ROW_KINDS)


def test_the_rows_of_a_run_are_deleted_before_the_run() -> None:
    assert KINDS_OF_RUN[-1].row_type is Run


@pytest.mark.parametrize(
    ("guard", "expected"),
    [
        (Guard(lapsed=("sweep_at", T0 + 1)), True),
        (Guard(lapsed=("sweep_at", T0)), False),
        (Guard(lapsed=("ended_at", T0)), False),
        (Guard(at_least=("sequence", 1)), True),
        (Guard(at_least=("sequence", 2)), False),
        (Guard(equals=(("ended_at", None),)), True),
        (Guard(status_in=frozenset()), False),
    ],
)
def test_a_guard_holds_only_if_all_of_its_conditions_do(guard: Guard, expected: bool) -> None:
    assert holds(guard, a_run(sweep_at=T0, ended_at=None)) is expected


def test_a_missing_row_outranks_a_stale_one() -> None:
    task, stats = a_task(), a_stats()
    writes = [update(task, CLAIM_1), add(stats, done=1)]

    assert find_refusal(writes, {key_of(task): task}) == Missing(key_of(stats))
    assert find_refusal(writes[:1], {key_of(task): task}) == Stale(key_of(task), task)


def test_an_insert_replaces_only_a_row_that_has_expired() -> None:
    record = a_record(expires_at=T0)
    rows = {key_of(record): record}

    assert find_refusal([insert(record)], rows) == Stale(key_of(record), record)
    assert find_refusal([insert(record, over_expired_at=T0)], rows) is not None
    assert find_refusal([insert(record, over_expired_at=T0 + 1)], rows) is None


def test_a_delete_of_an_absent_row_is_not_refused() -> None:
    task = a_task()

    assert find_refusal([delete(task, CLAIM_1)], {}) is None
    assert find_refusal([delete(task, CLAIM_1)], {key_of(task): task}) is not None


def test_an_update_of_a_damaged_task_is_stale_although_its_guard_holds() -> None:
    task = a_task(claim=1)
    damaged = DamagedTask(
        **{name: getattr(task, name) for name in task.__struct_fields__}, damaged=("url",)
    )

    assert find_refusal([update(task, CLAIM_1)], {key_of(task): damaged}) == Stale(
        key_of(task), damaged
    )


def test_the_count_of_a_settle_is_guarded_by_counter_states_only() -> None:
    flip, stats = update(a_task(), attempts=1), a_stats()

    with pytest.raises(AssertionError):
        SettleChange((flip, Update(key_of(stats), Guard(at_least=("done", 1)), {}, {"done": 1})))
    with pytest.raises(AssertionError):
        SettleChange((flip, update(stats, done=1)))
