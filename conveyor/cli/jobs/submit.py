"""`conveyor jobs submit` and `add`: send lists of URLs to a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Unpack

import click

from conveyor.cli.jobs.context import Session, counted, json_option
from conveyor.cli.jobs.events import submit_told, watch_run
from conveyor.cli.jobs.schedule import ScheduleOptions, schedule_from, schedule_options
from conveyor.cli.limit_options import LimitOptions, host_limits, limit_options
from conveyor.cli.url_list import SHOWN_MAX, read_lines
from conveyor.domain import limits
from conveyor.sdk import ApiError, SubmitJobRequest, TaskInput, WebhookInput


class _Options(ScheduleOptions, LimitOptions):
    name: str | None
    external_id: str | None
    is_open: bool
    is_dry: bool
    webhook: str | None
    sign: bool
    max_inflight: int | None
    attempts: int | None
    priority: int
    params: dict[str, str]


def _params_from(
    ctx: click.Context, option: click.Parameter, given: Sequence[str]
) -> dict[str, str]:
    params = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{text!r} is not KEY=VALUE.", ctx, option)
        params[name] = value
    return params


@click.command()
@click.argument("source", metavar="FILE", required=False)
@click.option("--name", help="What to call the job.")
@click.option("--external-id", help="Your own id for the job.")
@click.option("--open", "is_open", is_flag=True, help="More tasks will come, with `jobs add`.")
@click.option("--webhook", metavar="URL", help="Tell this address when the run has ended.")
@click.option("--sign", is_flag=True, help="Sign what it is told; see `conveyor webhooks rotate`.")
@click.option(
    "--max-inflight",
    type=click.IntRange(1, limits.MAX_INFLIGHT_MAX),
    help="Pages in flight at once.",
)
@click.option("--attempts", type=click.IntRange(1, limits.MAX_ATTEMPTS_MAX), help="Tries per page.")
@click.option(
    "--priority",
    type=click.IntRange(1, limits.PRIORITY_MAX),
    default=1,
    show_default=True,
    help="The job's weight among yours.",
)
@click.option(
    "--param",
    "params",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_params_from,
    help="A scraper parameter; may be given several times.",
)
@click.option("--dry-run", "is_dry", is_flag=True, help="Only tell what would happen.")
@schedule_options
@limit_options
@click.option("--watch", is_flag=True, help="Stay and watch the run to its end.")
@json_option
@click.pass_obj
def submit(
    session: Session, source: str | None, watch: bool, as_json: bool, **options: Unpack[_Options]
) -> None:
    """Submit the URLs in FILE as a job.

    FILE has one URL per line; - means standard input. With --open, FILE may be omitted and
    lists added later. With --at, --every or --cron, the first run starts at that time.
    """
    if source is None and not options["is_open"]:
        raise click.UsageError("Give a FILE with one URL a line, or - for standard input.")
    lines = _lines_of(source) if source is not None else []
    if options["is_dry"]:
        seen = session.client.preview(_request(lines, options))
        session.answer(seen, submit_told(seen), as_json=as_json)
        return
    with _naming_lines(lines):
        accepted = session.client.submit(_request(lines, options))
    job_id = accepted.job_id
    if watch and accepted.latest_run is not None:
        session.remark(f"Job {job_id}: {counted(accepted.accepted_tasks, 'task')}.")
        sys.exit(watch_run(session, accepted.latest_run, as_json=as_json))
    hint = f"`conveyor jobs watch {job_id}` shows how it goes."
    if options["is_open"]:
        hint = f"`conveyor jobs add {job_id} FILE` adds more."
    if accepted.latest_run is None:
        hint = f"`conveyor jobs schedule {job_id}` shows when it fires."
    shown = f"Job {job_id}: {counted(accepted.accepted_tasks, 'task')} accepted.\n{hint}"
    session.answer(accepted, shown, as_json=as_json)


@click.command()
@click.argument("job")
@click.argument("source", metavar="FILE")
@click.option("--last", is_flag=True, help="Close the job behind this list.")
@json_option
@click.pass_obj
def add(session: Session, job: str, source: str, last: bool, as_json: bool) -> None:
    """Add the URLs in FILE to an open job.

    FILE has one URL per line; - means standard input.
    """
    lines = _lines_of(source)
    with _naming_lines(lines):
        added = session.client.add_tasks(job, [url for _, url in lines], last=last)
    end = "The job is closed." if last else "The job is open for more."
    shown = f"{counted(added.accepted_tasks, 'task')} added. {end}"
    session.answer(added, shown, as_json=as_json)


def _request(lines: Sequence[tuple[int, str]], options: _Options) -> SubmitJobRequest:
    webhook, schedule = options["webhook"], schedule_from(options)
    return SubmitJobRequest(
        type="regular" if schedule is None else "scheduled",
        schedule=schedule,
        status="open" if options["is_open"] else "closed",
        tasks=[TaskInput(url=url) for _, url in lines],
        zenrows_params=options["params"] or None,
        external_id=options["external_id"],
        name=options["name"],
        webhook=WebhookInput(url=webhook, signature=options["sign"]) if webhook else None,
        max_inflight=options["max_inflight"],
        max_attempts=options["attempts"],
        priority=options["priority"],
        budget=options["budget"],
        host_limits=host_limits(options["per_host"], options["rate"]),
    )


def _lines_of(source: str) -> list[tuple[int, str]]:
    lines = read_lines(source)
    if not lines:
        raise click.ClickException(f"{source} holds no URL. Give one a line.")
    return lines


@contextmanager
def _naming_lines(lines: Sequence[tuple[int, str]]) -> Iterator[None]:
    """Replaces the task indexes in an error of the server by the line numbers of the file."""
    try:
        yield
    except ApiError as error:
        if not error.invalid_tasks:
            raise
        bad = error.invalid_tasks
        shown = [
            f"  line {lines[task.index][0]}: {task.reason}: {task.value or lines[task.index][1]}"
            for task in bad[:SHOWN_MAX]
            if task.index < len(lines)
        ]
        if len(bad) > SHOWN_MAX:
            shown.append("  ... and more")
        what = error.detail or error.title
        raise click.ClickException("\n".join([what, *shown])) from None
