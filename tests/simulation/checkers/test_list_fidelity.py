"""Tests the checkers of lines (I2, I10, I12)."""

from __future__ import annotations

from typing import Any

from conveyor.domain.ids import BatchId
from conveyor.domain.model import RunStatus, Task, TaskStatus
from conveyor.simulation.checkers.list_fidelity import (
    a_bad_line_is_a_failed_task,
    every_line_is_its_task,
)
from conveyor.simulation.client_history import History
from conveyor.simulation.invariant_monitor import StateChange
from tests.builders import JOB, a_job, a_run, a_task
from tests.simulation.checkers.state_changes import a_call, a_submit, change_to

URLS = ("https://site1.example/a", "https://site1.example/b")
FTP = "ftp://site1.example/"
LATER = BatchId("later")


def tasks(*urls: str, **fields: Any) -> list[Task]:
    done = {"status": TaskStatus.SUCCESSFUL, "claim": 1, **fields}
    return [a_task(index, url=url, **done) for index, url in enumerate(urls)]


def completed(*rows: Task, history: History) -> StateChange:
    return change_to(a_job(), a_run(status=RunStatus.COMPLETED), *rows, history=history)


def test_a_list_with_a_task_for_each_line_is_accepted() -> None:
    history = History(calls=[a_submit(*URLS)])

    assert list(every_line_is_its_task(completed(*tasks(*URLS), history=history))) == []


def test_two_swapped_lines_are_reported() -> None:
    history = History(calls=[a_submit(*URLS)])

    assert list(every_line_is_its_task(completed(*tasks(*URLS[::-1]), history=history)))


def test_a_task_with_another_url_than_its_line_is_reported() -> None:
    history = History(calls=[a_submit(*URLS)])
    rows = tasks(URLS[0], "https://site1.example/other")

    assert list(every_line_is_its_task(completed(*rows, history=history)))


def test_a_missing_added_list_is_reported() -> None:
    added = a_call("POST", f"/v1/jobs/{JOB}/tasks", body={"tasks": [{"url": URLS[1]}]}, key="k")
    history = History(calls=[a_submit(URLS[0]), added])

    violations = list(every_line_is_its_task(completed(*tasks(URLS[0]), history=history)))

    assert ["lacks a list of 1 lines" in violation for violation in violations] == [True]


def test_a_list_whose_answer_was_lost_may_have_tasks() -> None:
    lost = a_call("POST", f"/v1/jobs/{JOB}/tasks", body={"tasks": [{"url": URLS[1]}]}, status=None)
    history = History(calls=[a_submit(URLS[0]), lost])
    later = a_task(0, url=URLS[1], batch_id=LATER, task_id="later", status=TaskStatus.SUCCESSFUL)

    assert list(every_line_is_its_task(completed(*tasks(URLS[0]), later, history=history))) == []


def test_an_uploaded_list_mixed_from_two_uploads_is_reported() -> None:
    submit = a_submit(body={"file_input_id": "INPUT"})
    texts = [("s3/INPUT", "\n".join(urls).encode()) for urls in (URLS, URLS[::-1])]
    history = History(calls=[submit], uploads=texts)

    mixed = completed(*tasks(URLS[0], URLS[0]), history=history)
    whole = completed(*tasks(*URLS[::-1]), history=history)

    assert list(every_line_is_its_task(mixed))
    assert list(every_line_is_its_task(whole)) == []


def test_an_invalid_line_that_failed_without_a_fetch_is_accepted() -> None:
    history = History(calls=[a_submit(URLS[0], FTP)])
    bad = a_task(1, url="ftp:", status=TaskStatus.FAILED)

    assert list(a_bad_line_is_a_failed_task(completed(*tasks(URLS[0]), bad, history=history))) == []


def test_an_invalid_line_that_was_fetched_is_reported() -> None:
    history = History(calls=[a_submit(URLS[0], FTP)])

    assert list(a_bad_line_is_a_failed_task(completed(*tasks(URLS[0], FTP), history=history)))


def test_a_valid_line_that_was_refused_is_reported() -> None:
    history = History(calls=[a_submit(*URLS)])
    refused = a_task(1, url=URLS[1], status=TaskStatus.FAILED)

    assert list(a_bad_line_is_a_failed_task(completed(*tasks(URLS[0]), refused, history=history)))
