"""The checkers of duplicates: I68."""

from __future__ import annotations

import msgspec

from conveyor.domain.model import Result, RunStatus, TaskStatus
from conveyor.simulation.checkers.list_fidelity import (
    a_duplicate_ends_as_its_original,
    a_duplicate_is_not_fetched,
    duplicates_are_those_of_their_list,
)
from tests.builders import a_job, a_run, a_task
from tests.simulation.checkers.state_changes import a_fetch, a_moment

URL = "https://example.com/"
PAGE = Result("key", 1, "digest", "text/html", 200)
FIRST = a_task(0, url=URL, claim=1, attempts=1, status=TaskStatus.SUCCESSFUL, result=PAGE)
WAITING = a_task(1, url=URL + "#x", duplicate_of=FIRST.task_id)
ENDED = msgspec.structs.replace(FIRST, task_id=WAITING.task_id, index=1, duplicate_of=FIRST.task_id)


def test_a_fetch_of_a_duplicate_is_reported() -> None:
    moment = a_moment(FIRST, WAITING)

    assert list(a_duplicate_is_not_fetched(moment, a_fetch(WAITING.task_id, 1)))
    assert list(a_duplicate_is_not_fetched(moment, a_fetch(FIRST.task_id, 1))) == []


def test_a_duplicate_with_another_end_than_its_original_is_reported() -> None:
    pending = msgspec.structs.replace(FIRST, status=TaskStatus.PENDING, result=None)
    failed = a_task(1, status=TaskStatus.FAILED, duplicate_of=FIRST.task_id)
    before = (FIRST, WAITING)

    assert list(a_duplicate_ends_as_its_original(a_moment(FIRST, ENDED, before=before))) == []
    assert list(a_duplicate_ends_as_its_original(a_moment(FIRST, failed, before=before)))
    assert list(a_duplicate_ends_as_its_original(a_moment(pending, ENDED, before=before)))


def test_a_line_with_the_wrong_original_is_reported() -> None:
    alone = msgspec.structs.replace(ENDED, duplicate_of=None)

    def found(*tasks: object, dedup: bool) -> list[str]:
        rows = (a_job(dedup=dedup), a_run(status=RunStatus.COMPLETED), *tasks)
        return list(duplicates_are_those_of_their_list(a_moment(*rows)))  # type: ignore[arg-type]

    assert found(FIRST, ENDED, dedup=True) == []
    assert found(FIRST, alone, dedup=False) == []
    assert found(FIRST, alone, dedup=True)
    assert found(FIRST, ENDED, dedup=False)
