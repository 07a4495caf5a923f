"""Ownership: every subject has owners, few of them move, and old reports exclude no worker."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain import limits
from conveyor.domain.ownership import LiveWorkers, is_owner, owners_of, owners_wanted

names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
fleets = st.frozensets(names, min_size=1, max_size=12)


@given(fleets, names, st.integers(1, 15))
def test_the_first_workers_in_rank_order_own_a_subject(
    workers: frozenset[str], subject: str, count: int
) -> None:
    live = LiveWorkers(workers, seen_at=0.0)

    owners = {w for w in workers if is_owner(w, subject, live, count=count, now=1.0)}

    assert owners == set(owners_of(subject, workers, count=count))
    assert len(owners) == min(count, len(workers))


@given(fleets, names, names, st.integers(1, 5))
def test_a_worker_that_joins_or_leaves_changes_only_its_own_subjects(
    workers: frozenset[str], subject: str, newcomer: str, count: int
) -> None:
    before = set(owners_of(subject, workers - {newcomer}, count=count))
    after = set(owners_of(subject, workers | {newcomer}, count=count))

    assert after == before or (newcomer in after and len(before - after) <= 1)


@given(fleets, names)
def test_a_worker_that_is_not_reported_yet_counts_itself(
    workers: frozenset[str], subject: str
) -> None:
    own = "not reported"
    live = LiveWorkers(workers, seen_at=0.0)

    is_first = owners_of(subject, workers | {own}) == [own]

    assert is_owner(own, subject, live, now=1.0) is is_first


@pytest.mark.parametrize("now", [limits.PRESENCE_TTL_S, 1e9, -1.0])
@given(fleets, names, names)
def test_every_worker_is_an_owner_while_reports_are_outdated_or_missing(
    now: float, workers: frozenset[str], worker: str, subject: str
) -> None:
    assert is_owner(worker, subject, LiveWorkers(workers, seen_at=0.0), now=now)
    assert is_owner(worker, subject, None, now=now)


@pytest.mark.parametrize(
    ("tasks", "cap", "slots", "wanted"),
    [
        (0, 100, 200, 1),
        (10, 100, 40, 1),
        (11, 100, 40, 2),
        (1_000_000, 1, 40, 1),
        (1_000_000, 100, 200, 2),
        (1_000_000, 2_000, 40, 200),
        (3, 100, 1, 3),
    ],
)
def test_a_run_gets_as_many_owners_as_its_tasks_can_use(
    tasks: int, cap: int, slots: int, wanted: int
) -> None:
    assert owners_wanted(tasks=tasks, cap=cap, slots=slots) == wanted


def test_runs_are_spread_over_the_workers() -> None:
    workers = [f"worker-{number}" for number in range(10)]

    runs = Counter(owners_of(f"run-{number}", workers)[0] for number in range(1_000))

    assert len(runs) == 10
    assert max(runs.values()) < 150
