"""Tests the checkers of duplicates (I68)."""

from __future__ import annotations

import msgspec

from conveyor.domain.model import Result, RunStatus, TaskStatus
from conveyor.simulation.checkers.list_fidelity import (
    a_duplicate_ends_as_its_original,
    a_duplicate_is_not_fetched,
    duplicates_are_those_of_their_list,
)
from tests.builders import a_job, a_run, a_task
from tests.simulation.checkers.state_changes import a_fetch, change_to

URL = "https://example.com/"
PAGE = Result("key", 1, "digest", "text/html", 200)
FIRST = a_task(0, url=URL, claim=1, attempts=1, status=TaskStatus.SUCCESSFUL, result=PAGE)
WAITING = a_task(1, url=URL + "#x", duplicate_of=FIRST.task_id)
ENDED = msgspec.structs.replace(FIRST, task_id=WAITING.task_id, index=1, duplicate_of=FIRST.task_id)


def test_a_fetch_of_a_duplicate_is_reported() -> None:
    change = change_to(FIRST, WAITING)

    assert list(a_duplicate_is_not_fetched(change, a_fetch(WAITING.task_id, 1)))
    assert list(a_duplicate_is_not_fetched(change, a_fetch(FIRST.task_id, 1))) == []


def test_a_duplicate_with_another_end_than_its_original_is_reported() -> None:
    pending = msgspec.structs.replace(FIRST, status=TaskStatus.PENDING, result=None)
    failed = a_task(1, status=TaskStatus.FAILED, duplicate_of=FIRST.task_id)
    before = (FIRST, WAITING)

    assert list(a_duplicate_ends_as_its_original(change_to(FIRST, ENDED, before=before))) == []
    assert list(a_duplicate_ends_as_its_original(change_to(FIRST, failed, before=before)))
    assert list(a_duplicate_ends_as_its_original(change_to(pending, ENDED, before=before)))


def test_a_line_is_marked_as_duplicate_exactly_if_its_job_removes_duplicates() -> None:
    alone = msgspec.structs.replace(ENDED, duplicate_of=None)

    def check(*tasks: object, dedup: bool) -> list[str]:
        rows = (a_job(dedup=dedup), a_run(status=RunStatus.COMPLETED), *tasks)
        return list(duplicates_are_those_of_their_list(change_to(*rows)))  # type: ignore[arg-type]

    assert check(FIRST, ENDED, dedup=True) == []
    assert check(FIRST, alone, dedup=False) == []
    assert check(FIRST, alone, dedup=True)
    assert check(FIRST, ENDED, dedup=False)
