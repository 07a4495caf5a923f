"""Checks exports: they are complete, of an ended run, and available until they expire (I40)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain.changes import ExportKey
from conveyor.domain.export_record import Export, ExportStatus
from conveyor.domain.lifecycle import RUN_LIVE, TASK_TERMINAL
from conveyor.domain.model import Run, Task
from conveyor.simulation.client_history import Call
from conveyor.simulation.environment.export_reader import READ_ERRORS, ExportedTask, read_tasks
from conveyor.simulation.invariant_monitor import StateChange

OK = 200
EXPIRED = "expired"


def an_export_shows_all_that_ended(state: StateChange) -> Iterator[str]:
    """I40: a published export is complete, and has one entry for each ended task of an ended
    run."""
    for export, run in published(state):
        if run.status in RUN_LIVE:
            yield f"export {export.export_id} shows run {run.run_id}, which is {run.status}"
        tasks = state.after.tasks_by_run.get(run.run_id, [])
        ended = sum(task.status in TASK_TERMINAL for task in tasks)
        if export.manifest is None or export.manifest.entries != ended:
            yield f"export {export.export_id}: {ended} ended tasks, {export.done} exported"
        yield from _missing(state, export)


def an_export_has_each_task_once(state: StateChange) -> Iterator[str]:
    """I40: a reader of the file finds each ended task once, with its status and its own body, and
    no other task."""
    for export, run in published(state):
        file = state.body(export.key) if export.key else None
        if file is not None:  # `an_export_shows_all_that_ended` reports a missing file.
            yield from _find_differences(state, export, run, file)


def a_download_is_of_its_run(state: StateChange, call: Call) -> Iterator[str]:
    """I40, I44: a downloaded export has each ended task of its run once, and no task of another
    run."""
    export_id = _downloaded(call)
    for export in state.after.exports.values() if export_id else ():
        run = state.after.run_by_id.get(export.run_id)
        if export.export_id == export_id and run is not None and not state.is_deleted(run):
            yield from _find_differences(state, export, run, call.answer)


def _downloaded(call: Call) -> str | None:
    *_, exports, export_id, what = ["", "", *call.route.split("/")]
    is_file = call.method == "GET" and call.status == OK and what == "content"
    return export_id if is_file and exports == "exports" else None


def _find_differences(state: StateChange, export: Export, run: Run, file: bytes) -> Iterator[str]:
    tasks = state.after.tasks_by_run.get(run.run_id, [])
    ended = {str(task.task_id): task for task in tasks if task.status in TASK_TERMINAL}
    try:
        entries = read_tasks(export.format, file)
    except READ_ERRORS as error:
        yield f"export {export.export_id} cannot be read: {error!r}"
        return
    if [entry.task_id for entry in entries] != sorted(ended):
        yield f"export {export.export_id} shows {len(entries)} tasks, {len(ended)} have ended"
        return
    for entry in entries:
        if not _matches(entry, ended[entry.task_id]):
            yield f"export {export.export_id}: task {entry.task_id} differs from its row"


def _matches(entry: ExportedTask, task: Task) -> bool:
    if entry.url != task.url:
        return False
    if entry.status == EXPIRED:
        return entry.sha256 is None
    sha256 = task.result.sha256 if task.result is not None else None
    return entry.status == task.status and entry.sha256 == sha256


def published(state: StateChange) -> Iterator[tuple[Export, Run]]:
    """The exports that were published by this change and whose runs exist."""
    for change in state.changed(ExportKey):
        export: Export | None = change.new
        was_done = change.old is not None and change.old.status is ExportStatus.COMPLETED
        if export is None or export.status is not ExportStatus.COMPLETED or was_done:
            continue
        run = state.after.run_by_id.get(export.run_id)
        if run is not None and not state.is_deleted(run):
            yield export, run


def exports_stay_until_they_expire(state: StateChange) -> Iterator[str]:
    """I40: a published file is available until the export expires."""
    for export in state.after.exports.values():
        is_due = export.status is ExportStatus.COMPLETED and export.expires_at > state.after.now
        run = state.after.run_by_id.get(export.run_id)
        if is_due and run is not None and not state.is_deleted(run):
            yield from _missing(state, export)


def _missing(state: StateChange, export: Export) -> Iterator[str]:
    body = state.body(export.key) if export.key else None
    if body is None or len(body) != export.size_bytes:
        yield f"the file of export {export.export_id} is missing or has another size"
