"""Watching a run from outside, with a live bar, until it has ended."""

from __future__ import annotations

import sys

from conveyor.cli.jobs_session import Session
from conveyor.cli.jobs_tables import outcome_table
from conveyor.cli.progress import Report, note_of, progress
from conveyor.domain.model import PauseState, RunStatus
from conveyor.sdk import RunResponse

EXIT_SOME_FAILED = 1
EXIT_INTERRUPTED = 130


def watch_run(session: Session, run: RunResponse, *, as_json: bool) -> int:
    """Sees a run to its end and tells how it went; the exit code."""
    for remark in _remarks(run):
        session.remark(remark)
    try:
        with progress(session.err, "Scraping", run.stats.total) as show:
            run = session.client.wait(
                run.job_id,
                lambda seen: _report(show, seen),
                run_id=run.run_id,
            )
    except KeyboardInterrupt:
        session.remark(
            f"The job goes on without you; `conveyor jobs watch {run.job_id}` looks again."
        )
        sys.exit(EXIT_INTERRUPTED)
    session.answer(run, outcome_table(run), as_json=as_json)
    is_good = run.status is RunStatus.COMPLETED and not run.stats.failed
    return 0 if is_good else EXIT_SOME_FAILED


def _report(show: Report, run: RunResponse) -> None:
    held_up = run.waiting_on
    note = "" if held_up is None else note_of(held_up.reason, held_up.detail)
    show(run.stats.completed, run.stats.failed, run.stats.total, note)


def _remarks(run: RunResponse) -> list[str]:
    if run.terminal:
        return []
    remarks = []
    if not run.last_batch_received:
        remarks.append(
            f"The job is open: it ends after `conveyor jobs close {run.job_id}`, "
            "once its pages are done."
        )
    if run.pause_state is PauseState.PAUSED:
        remarks.append(f"The run is paused: `conveyor jobs resume {run.job_id}` lets it go on.")
    return remarks
