"""`conveyor jobs events` and `audit`, and the output of dry runs and of `watch`."""

from __future__ import annotations

import sys

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from conveyor.cli.jobs.context import JOB, Session, counted, json_option
from conveyor.cli.jobs.tables import moment, outcome_table, plain
from conveyor.cli.progress import Report, note_of, progress
from conveyor.domain.model import PauseState, RunStatus
from conveyor.schemas.responses import Estimate
from conveyor.sdk import (
    AuditResponse,
    EventResponse,
    RerunDryRunResponse,
    RunResponse,
    SubmitDryRunResponse,
)

EXIT_NOT_OK = 1
EXIT_INTERRUPTED = 130
BAD_BODIES_SHOWN_MAX = 10
_SHOWN = ("job_id", "run_id", "external_id", "tasks", "stop_reason", "failure_reason")


@click.command()
@click.option("--after", metavar="ID", help="Only what came behind this event; latest: from now.")
@click.option("--follow", is_flag=True, help="Stay, and show each as it comes.")
@json_option
@click.pass_obj
def events(session: Session, after: str | None, follow: bool, as_json: bool) -> None:
    """Show the events of your jobs, oldest first."""
    client = session.client
    stream = client.follow_events(after=after) if follow else client.events(after=after)
    is_empty = True
    try:
        for event in stream:
            is_empty = False
            session.answer(event, _event_line(event), as_json=as_json)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    if is_empty and not as_json:
        session.remark("Nothing has happened.")


def _event_line(event: EventResponse) -> Text:
    facts = [f"{name}={event.data[name]}" for name in _SHOWN if name in event.data]
    stats = event.data.get("stats")
    if isinstance(stats, dict):
        facts.append(f"{stats.get('successful')} successful, {stats.get('failed')} failed")
    line = plain(f"{event.id:>6}  {moment(event.occurred_at)}  ")
    return line.append_text(plain(f"{event.type:<14}", "bold")).append_text(
        plain("  " + "  ".join(facts))
    )


@click.command()
@click.argument("job", type=JOB)
@click.option("--run", metavar="RUN", help="Another run than the latest.")
@json_option
@click.pass_obj
def audit(session: Session, job: str, run: str | None, as_json: bool) -> None:
    """Recount a run from its rows and read some of its pages again.

    The exit code is 1 if the audit finds a difference.
    """
    seen = session.client.audit(job, run_id=run)
    session.answer(seen, _audit_table(seen), as_json=as_json)
    sys.exit(0 if seen.ok else EXIT_NOT_OK)


def _audit_table(seen: AuditResponse) -> RenderableType:
    table = Table(show_header=False, box=None, pad_edge=False)
    verdict = Text("everything adds up", "green") if seen.ok else Text("something is off", "red")
    table.add_row("run", seen.run_id)
    table.add_row("verdict", verdict)
    table.add_row("rows", f"{seen.counts['admitted']:,}")
    table.add_row("pages read", f"{seen.bodies_checked:,}")
    for difference in seen.differences:
        text = (
            f"{difference.what} is {difference.recorded:,}, but the rows say {difference.counted:,}"
        )
        table.add_row("counter", Text(text, "red"))
    for bad in seen.bad_bodies[:BAD_BODIES_SHOWN_MAX]:
        table.add_row("page", Text(f"{bad.task_id} is {bad.problem}", "red"))
    if seen.live:
        table.add_row("", "The run is live: counts have the play of what happened meanwhile.")
    return table


def submit_told(seen: SubmitDryRunResponse) -> str:
    """The text for the dry run of a submit."""
    verdict = f"{counted(seen.valid_tasks, 'task')} would be accepted. Nothing was created."
    if seen.invalid_tasks_count:
        counts = sorted(seen.invalid_reasons.items())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in counts)
        bad = counted(seen.invalid_tasks_count, "bad line")
        verdict = f"It would be refused: {bad} ({reasons})."
    return "\n".join([verdict, *_cost(seen.estimate)])


def rerun_told(seen: RerunDryRunResponse) -> str:
    """The text for the dry run of a rerun."""
    counts = (
        f"Over again: {counted(seen.retried_tasks, 'task')}. "
        f"Kept as they are: {seen.inherited_tasks:,}. Nothing was started."
    )
    return "\n".join([counts, *_cost(seen.estimate)])


def _cost(estimate: Estimate | None) -> list[str]:
    if estimate is None or not estimate.credits_max:
        return []
    least, most = estimate.credits_min, estimate.credits_max
    span = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return [f"If every page comes at once: {span} credits."]


# Watching a run of a server, with a live bar, until it has ended.


EXIT_SOME_FAILED = 1


def watch_run(session: Session, run: RunResponse, *, as_json: bool) -> int:
    """Watches a run until it ends and prints its result. Returns the exit code."""
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
        # Not by the console: if the interrupt came while the console was printing, it keeps what it
        # is given next.
        again = f"`conveyor jobs watch {run.job_id}` watches it again"
        click.echo(f"The job continues; {again}.", err=True)
        sys.exit(EXIT_INTERRUPTED)
    session.answer(run, outcome_table(run), as_json=as_json)
    if run.stats.failed:
        session.remark(f"Which: conveyor jobs results {run.job_id} --status failed")
        session.remark(f"Retry them: conveyor jobs rerun {run.job_id} --status failed --watch")
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
