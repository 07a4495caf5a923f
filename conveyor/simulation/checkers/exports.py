"""Exports: whole, of a run that has ended, and there as long as they say (I40)."""

from __future__ import annotations

from collections.abc import Iterator

from conveyor.domain.changes import ExportKey
from conveyor.domain.export import Export, ExportStatus
from conveyor.domain.lifecycle import RUN_LIVE, TASK_TERMINAL
from conveyor.simulation.watcher import Moment


def an_export_shows_all_that_ended(moment: Moment) -> Iterator[str]:
    """I40: a file that can be seen is whole, and has each ended task of an ended run."""
    for change in moment.changed(ExportKey):
        export: Export | None = change.new
        was_done = change.old is not None and change.old.status is ExportStatus.COMPLETED
        if export is None or export.status is not ExportStatus.COMPLETED or was_done:
            continue
        run = moment.after.run_by_id.get(export.run_id)
        if run is None or moment.is_deleted(run):
            continue
        if run.status in RUN_LIVE:
            yield f"export {export.export_id} shows run {run.run_id}, which is {run.status}"
        tasks = moment.after.tasks_by_run.get(run.run_id, [])
        ended = sum(task.status in TASK_TERMINAL for task in tasks)
        if export.manifest is None or export.manifest.entries != ended:
            yield f"export {export.export_id}: {ended} tasks have ended, {export.done} are in it"
        yield from _missing(moment, export)


def exports_are_there_while_they_live(moment: Moment) -> Iterator[str]:
    """I40: what was published stays until it expires."""
    for export in moment.after.exports.values():
        is_due = export.status is ExportStatus.COMPLETED and export.expires_at > moment.after.now
        run = moment.after.run_by_id.get(export.run_id)
        if is_due and run is not None and not moment.is_deleted(run):
            yield from _missing(moment, export)


def _missing(moment: Moment, export: Export) -> Iterator[str]:
    body = moment.body(export.key) if export.key else None
    if body is None or len(body) != export.size_bytes:
        yield f"the file of export {export.export_id} is not there as it was published"
