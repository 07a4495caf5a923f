"""Tests the checkers of export files, in every format (I40, I44)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from conveyor.domain.changes import Row
from conveyor.domain.export.entry import Entry
from conveyor.domain.export_record import ExportFormat, ExportStatus
from conveyor.domain.model import RunStatus
from conveyor.simulation.checkers.export import (
    a_download_is_of_its_run,
    an_export_has_each_task_once,
)
from conveyor.simulation.checkers.secrets import no_secret_is_exported
from conveyor.simulation.invariant_monitor import StateChange
from conveyor.simulation.secret_markers import secret_of
from tests.builders import JOB, RUN, a_job, a_run, an_export
from tests.domain.export.test_formats import a_miss, a_page, an_expired, made
from tests.simulation.checkers.state_changes import a_call, change_to

every_format = pytest.mark.parametrize("kind", ExportFormat, ids=str)


def in_order(*entries: Entry) -> list[Entry]:
    return sorted(entries, key=lambda entry: entry.task.task_id)


PAGE, MISS, OTHER = a_page(0, b"a page"), a_miss(1), a_page(2, b"\xff\x00")
ALL = in_order(PAGE, MISS, OTHER)


def a_file(kind: ExportFormat, entries: Sequence[Entry]) -> bytes:
    file, _ = made(an_export(format=kind), entries)
    return file


def published(kind: ExportFormat, file: bytes) -> StateChange:
    """Builds the state change that publishes the file of a run with all these tasks."""
    run = a_run(status=RunStatus.COMPLETED)
    rows: list[Row] = [a_job(), run, *(entry.task for entry in ALL)]
    export = an_export(format=kind, status=ExportStatus.COMPLETED, key="file")
    return change_to(*rows, export, before=[*rows, an_export(format=kind)], bodies={"file": file})


@every_format
def test_a_file_with_each_task_once_is_accepted(kind: ExportFormat) -> None:
    expired = in_order(an_expired(0), MISS, OTHER)

    for entries in (ALL, expired):
        assert list(an_export_has_each_task_once(published(kind, a_file(kind, entries)))) == []


@every_format
def test_a_file_with_a_missing_repeated_or_foreign_task_is_reported(
    kind: ExportFormat,
) -> None:
    stranger = a_page(0, b"a page", url="https://example.com/of-another")

    for entries in (ALL[1:], [*ALL, ALL[-1]], in_order(stranger, MISS, OTHER)):
        assert list(an_export_has_each_task_once(published(kind, a_file(kind, entries))))


@every_format
def test_a_file_with_another_body_is_reported(kind: ExportFormat) -> None:
    swapped = in_order(a_page(0, b"another page"), MISS, OTHER)

    assert list(an_export_has_each_task_once(published(kind, a_file(kind, swapped))))


@pytest.mark.parametrize("kind", [kind for kind in ExportFormat if kind is not ExportFormat.CSV])
def test_a_truncated_file_is_reported(kind: ExportFormat) -> None:
    whole = a_file(kind, ALL)

    assert list(an_export_has_each_task_once(published(kind, whole[: len(whole) // 2])))


@every_format
def test_a_download_with_other_tasks_than_those_of_its_run_is_reported(kind: ExportFormat) -> None:
    path = f"/v1/jobs/{JOB}/runs/{RUN}/exports/{an_export().export_id}/content"
    good, bad = (a_call(path=path, answer=a_file(kind, tasks)) for tasks in (ALL, ALL[1:]))
    change = published(kind, a_file(kind, ALL))

    assert list(a_download_is_of_its_run(change, good)) == []
    assert list(a_download_is_of_its_run(change, bad))


@every_format
def test_a_secret_in_a_file_is_reported(kind: ExportFormat) -> None:
    secret = secret_of("tenant0", "header")
    leaks = [a_page(0, b"a page", url=f"https://example.com/{secret}")]
    if kind is not ExportFormat.CSV:  # CSV files contain no bodies.
        leaks.append(a_page(0, f"a page with {secret}".encode() * 99))

    for leak in leaks:
        assert list(no_secret_is_exported(published(kind, a_file(kind, [leak]))))
    assert list(no_secret_is_exported(published(kind, a_file(kind, ALL)))) == []
