"""`conveyor jobs`: submit and manage jobs on a running server (docs/operations.md, Roles)."""

from __future__ import annotations

import sys
from itertools import islice

import click

from conveyor.cli.jobs.context import (
    JOB,
    ServerGroup,
    Session,
    counted,
    json_option,
    open_session,
    server_options,
)
from conveyor.cli.jobs.events import audit, events, rerun_told, watch_run
from conveyor.cli.jobs.export import export, verify
from conveyor.cli.jobs.results import download, results
from conveyor.cli.jobs.schedule import schedule
from conveyor.cli.jobs.submit import add, submit
from conveyor.cli.jobs.tables import job_page, jobs_table, runs_table
from conveyor.cli.jobs.webhook import webhook
from conveyor.cli.limit_options import budget_from
from conveyor.domain.lifecycle import JOB_VISIBLE
from conveyor.sdk import BudgetInput, RunResponse
from conveyor.sdk.errors import run_of

RUNS_SHOWN_MAX = 10

_STATUSES = sorted(status.value for status in JOB_VISIBLE)


@click.group(cls=ServerGroup)
@server_options
@click.pass_context
def jobs(ctx: click.Context, server: str, api_key: str) -> None:
    """Submit and manage jobs on a running server."""
    open_session(ctx, server, api_key)


@jobs.command("list")
@click.option("--status", type=click.Choice(_STATUSES), help="Only such jobs.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True)
@json_option
@click.pass_obj
def list_jobs(session: Session, status: str | None, limit: int, as_json: bool) -> None:
    """List your jobs, newest first.

    With --json, print one line of JSON for each job.
    """
    jobs = session.client.list(status=status)
    first_jobs = list(islice(jobs, limit))
    if as_json:
        for job in first_jobs:
            session.write_json(job)
        return
    if not first_jobs:
        session.remark("There are no jobs. `conveyor jobs submit FILE` makes one.")
        return
    session.out.print(jobs_table(first_jobs, session.out.width))
    if next(jobs, None) is not None:
        session.remark("There are more: --limit shows more of them.")


@jobs.command()
@click.argument("job", type=JOB)
@json_option
@click.pass_obj
def show(session: Session, job: str, as_json: bool) -> None:
    """Show a job and its runs."""
    record = session.client.get(job)
    runs = [] if as_json else list(islice(session.client.runs(job), RUNS_SHOWN_MAX))
    session.answer(record, job_page(record, runs, session.out.width), as_json=as_json)


@jobs.command()
@click.argument("job", type=JOB)
@json_option
@click.pass_obj
def watch(session: Session, job: str, as_json: bool) -> None:
    """Watch the latest run until it has ended.

    The exit code is 1 if some of it failed.
    """
    sys.exit(watch_run(session, run_of(session.client.get(job)), as_json=as_json))


@jobs.command()
@click.argument("job", type=JOB)
@json_option
@click.pass_obj
def stop(session: Session, job: str, as_json: bool) -> None:
    """Stop the latest run for good. Its results are kept."""
    run = session.client.stop(job)
    _answer_run(session, run, as_json=as_json)
    if run.receipt is not None and run.receipt.abandoned:
        session.remark(
            f"A gateway may still be busy with {counted(run.receipt.abandoned, 'page')}."
        )
    if run.receipt is not None and not run.receipt.complete:
        session.remark("Pages may still be in flight elsewhere; workers end them within 12 s.")


@jobs.command()
@click.argument("job", type=JOB)
@json_option
@click.pass_obj
def pause(session: Session, job: str, as_json: bool) -> None:
    """Pause the latest run."""
    _answer_run(session, session.client.pause(job), as_json=as_json)


@jobs.command()
@click.argument("job", type=JOB)
@json_option
@click.pass_obj
def resume(session: Session, job: str, as_json: bool) -> None:
    """Resume a paused run."""
    _answer_run(session, session.client.resume(job), as_json=as_json)


@jobs.command()
@click.argument("job", type=JOB)
@click.option(
    "--status",
    metavar="STATUS,...",
    help="Only tasks like these (failed, pending, ...); the others are inherited.",
)
@click.option("--reason", metavar="REASON,...", help="Of those, only tasks that failed so.")
@click.option("--host", metavar="HOST,...", help="Of those, only pages of these hosts.")
@click.option("--dry-run", is_flag=True, help="Only show what would happen.")
@click.option("--watch", is_flag=True, help="Stay and watch the run to its end.")
@json_option
@click.pass_obj
def rerun(
    session: Session, /, job: str, dry_run: bool, watch: bool, as_json: bool, **filters: str | None
) -> None:
    """Run a job again: all of it, or the tasks that the options select."""
    statuses, reasons, hosts = (
        None if (text := filters[name]) is None else text.split(",")
        for name in ("status", "reason", "host")
    )
    if dry_run:
        seen = session.client.preview_rerun(job, statuses=statuses, reasons=reasons, hosts=hosts)
        session.answer(seen, rerun_told(seen), as_json=as_json)
        return
    started = session.client.rerun(job, statuses=statuses, reasons=reasons, hosts=hosts)
    counts = (
        f"Over again: {counted(started.retried_tasks, 'task')}. "
        f"Kept as they are: {started.inherited_tasks:,}."
    )
    if watch:
        session.remark(counts)
        sys.exit(watch_run(session, started.latest_run, as_json=as_json))
    message = f"Run {started.latest_run.run_id}: {counts}"
    session.answer(started, message, as_json=as_json)


@jobs.command()
@click.argument("job", type=JOB)
@json_option
@click.pass_obj
def close(session: Session, job: str, as_json: bool) -> None:
    """Close an open job, so that it accepts no more tasks."""
    closed = session.client.close(job)
    session.answer(closed, f"Job {closed.job_id} is closed.", as_json=as_json)


@jobs.command()
@click.argument("job", type=JOB)
@click.argument("budget", type=budget_from, metavar="UNIT=AMOUNT")
@json_option
@click.pass_obj
def budget(session: Session, job: str, budget: BudgetInput, as_json: bool) -> None:
    """Change the budget of a job: credits=2000, or cost=25.00.

    A run that waits for its budget continues.
    """
    changed = session.client.set_budget(job, budget)
    session.answer(changed, f"Job {changed.job_id} has this budget now.", as_json=as_json)


@jobs.command()
@click.argument("job", type=JOB)
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def delete(session: Session, job: str, yes: bool) -> None:
    """Delete a job with all its runs and results."""
    if not yes and not _is_sure(session, job):
        session.remark("Nothing was deleted.")
        sys.exit(1)
    session.client.delete(job)
    session.remark(f"Job {job} is deleted.")


def _is_sure(session: Session, job: str) -> bool:
    record = session.client.get(job)
    pages = record.latest_run.stats.successful if record.latest_run is not None else 0
    name = f" ({record.name!r})" if record.name else ""
    question = f"Delete job {record.job_id}{name} with its {counted(pages, 'page')}?"
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        if sys.stdin.isatty():
            raise
        raise click.ClickException(
            "There is no terminal to ask for confirmation: give --yes."
        ) from None


def _answer_run(session: Session, run: RunResponse, *, as_json: bool) -> None:
    session.answer(run, runs_table([run], session.out.width), as_json=as_json)


for command in (
    submit,
    add,
    schedule,
    results,
    download,
    export,
    verify,
    events,
    audit,
    webhook,
):
    jobs.add_command(command)
