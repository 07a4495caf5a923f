"""The terminal output of jobs, runs and results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from conveyor.cli.progress import span
from conveyor.domain.model import JobStatus, PauseState, RunStatus
from conveyor.domain.schedule import ScheduleStatus
from conveyor.sdk import JobResponse, JobSchedule, ResultStatus, RunResponse, TaskResult

_RUN_STYLES = {
    RunStatus.RUNNING: "cyan",
    RunStatus.PENDING: "yellow",
    RunStatus.COMPLETED: "green",
    RunStatus.STOPPED: "yellow",
    RunStatus.FAILED: "red",
    RunStatus.DELETED: "dim",
}
# Between two columns, and what a column that is cut keeps at least.
_GAP = 2
_CUT_CHARS = 8
Row = Mapping[str, str | Text]
_TASK_STYLES = {ResultStatus.SUCCESSFUL: "green", ResultStatus.FAILED: "red"}


def plain(text: str | None, style: str = "") -> Text:
    """Shows foreign text without markup, and without control characters, which could move the
    cursor.
    """
    printable = "".join(
        sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in text or ""
    )
    return Text(printable, style=style)


def moment(instant: str) -> str:
    """Converts an instant of the API to local time."""
    return datetime.fromisoformat(instant).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def jobs_table(jobs: Iterable[JobResponse], width: int) -> Table:
    rows: list[Row] = [
        {
            "job": job.job_id,
            "name": plain(job.name or job.external_id),
            "list": Text(job.status, style="yellow" if job.status is JobStatus.OPEN else ""),
            "run": run_status(job.latest_run) if job.latest_run else Text("none", style="dim"),
            "done": _progress_text(job.latest_run) if job.latest_run else "",
            "failed": _count(job.latest_run.stats.failed, "red") if job.latest_run else "",
            "created": moment(job.created_at),
        }
        for job in jobs
    ]
    return _make_fitting_table(rows, width, cut="name", dropped_first=("list", "created", "failed"))


def job_page(job: JobResponse, runs: Iterable[RunResponse], width: int) -> RenderableType:
    facts = Table(show_header=False, box=None, pad_edge=False)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("job", job.job_id)
    named = {"name": job.name, "external id": job.external_id}
    for name, text in named.items():
        if text is not None:
            facts.add_row(name, plain(text))
    facts.add_row("list", Text(job.status))
    facts.add_row("created", moment(job.created_at))
    facts.add_row(
        "limits",
        f"{job.max_inflight:,} in flight, {job.max_attempts} tries, priority {job.priority}",
    )
    if job.budget is not None:
        facts.add_row("budget", _budget(job))
    for name, value in job.zenrows_params.items():
        facts.add_row("param", plain(f"{name}={value}"))
    if job.webhook is not None:
        facts.add_row("webhook", plain(job.webhook.url))
    if job.schedule is not None:
        _add_schedule(facts, job, job.schedule)
    if job.latest_run is not None:
        _add_outcome(facts, job.latest_run)
    return Group(facts, "", runs_table(runs, width))


def _add_schedule(facts: Table, job: JobResponse, schedule: JobSchedule) -> None:
    facts.add_row("schedule", plain(msgspec.json.encode(schedule).decode()))
    is_paused = job.schedule_state is ScheduleStatus.PAUSED
    next_run = moment(job.next_scheduled_run) if job.next_scheduled_run else "never"
    facts.add_row("next run", Text("paused", style="yellow") if is_paused else next_run)
    for skip in job.skipped_fires:
        facts.add_row("skipped", f"{moment(skip.first_at)} ({skip.reason})")


def _budget(job: JobResponse) -> str:
    assert job.budget is not None
    cap = f"{job.budget.credits:,} credits" if job.budget.credits else str(job.budget.cost)
    run = job.latest_run
    if run is None or run.budget is None:
        return cap
    left = f"{run.budget.left:,.6f}".rstrip("0").rstrip(".")
    return f"{cap}, {left} left"


def _add_outcome(facts: Table, run: RunResponse) -> None:
    facts.add_row("pages", _progress_text(run))
    if run.waiting_on is not None:
        facts.add_row("waits for", f"{run.waiting_on.reason}: {run.waiting_on.detail}")
    if run.eta_seconds is not None:
        facts.add_row("left", span(run.eta_seconds))
    if run.stats.failed:
        facts.add_row("failed", Text(reasons(run), style="red"))
    if run.failure_detail is not None:
        facts.add_row("failure", plain(run.failure_detail, "red"))


def runs_table(runs: Iterable[RunResponse], width: int) -> Table:
    rows: list[Row] = [
        {
            "run": run.run_id,
            "#": f"#{run.run_sequence}",
            "status": run_status(run),
            "done": _progress_text(run),
            "successful": _count(run.stats.successful, "green"),
            "failed": _count(run.stats.failed, "red"),
            "started": moment(run.created_at),
        }
        for run in runs
    ]
    dropped_first = ("started", "successful", "#")
    return _make_fitting_table(rows, width, cut=None, dropped_first=dropped_first)


def results_table(results: Iterable[TaskResult], width: int) -> Table:
    table = _table("index", "status", "url", "error")
    table.columns[0].justify = "right"
    # Only these two are cut.
    room = width - len("index") - len("processing") - 3 * _GAP
    url, error = table.columns[2:]
    url.overflow = error.overflow = "ellipsis"
    url.max_width = max(room * 3 // 5, _CUT_CHARS)
    error.max_width = max(room - url.max_width, _CUT_CHARS)
    for result in results:
        table.add_row(
            str(result.index),
            Text(result.status, style=_TASK_STYLES.get(result.status, "")),
            plain(result.url),
            plain(_error_of(result), "red"),
        )
    return table


def _error_of(result: TaskResult) -> str:
    error = result.error
    return f"{error.code}: {error.detail or error.title}" if error else ""


def outcome_table(run: RunResponse) -> Table:
    """The result of a run, in the form of `conveyor scrape`."""
    stats = run.stats
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("run", run_status(run), run.run_id)
    table.add_row("pages", _progress_text(run), "")
    table.add_row("successful", _count(stats.successful, "green"), "")
    table.add_row("failed", _count(stats.failed, "red"), reasons(run))
    if run.failure_detail is not None:
        table.add_row("failure", "", plain(run.failure_detail, "red"))
    return table


def run_status(run: RunResponse) -> Text:
    if run.pause_state is PauseState.PAUSED:
        return Text("paused", style="yellow")
    return Text(run.status, style=_RUN_STYLES[run.status])


def reasons(run: RunResponse) -> str:
    counts = sorted(run.stats.failure_reasons.items())
    return ", ".join(f"{count:,} {reason}" for reason, count in counts)


def _progress_text(run: RunResponse) -> str:
    stats = run.stats
    if stats.completed == stats.total:
        return f"{stats.total:,}"
    return f"{stats.completed:,} of {stats.total:,}"


def _count(count: int, style: str) -> Text:
    return Text(f"{count:,}", style=style if count else "dim")


def _make_fitting_table(
    rows: Sequence[Row], width: int, *, cut: str | None, dropped_first: Sequence[str]
) -> Table:
    """Makes a table without the columns that do not fit, because half a word says nothing. Only
    the column `cut` is cut: other commands need the whole ids."""
    if not rows:
        return _table()
    sizes = {title: max(len(title), *(len(row[title]) for row in rows)) for title in rows[0]}
    if cut is not None:
        sizes[cut] = _CUT_CHARS
    for title in dropped_first:
        if sum(sizes.values()) + _GAP * (len(sizes) - 1) > width:
            del sizes[title]
    table = _table(*sizes)
    for column, title in zip(table.columns, sizes, strict=True):
        if title == cut:
            others = sum(sizes.values()) - sizes[title] + _GAP * (len(sizes) - 1)
            column.max_width = max(width - others, _CUT_CHARS)
    for row in rows:
        table.add_row(*(row[title] for title in sizes))
    return table


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True)
    return table
