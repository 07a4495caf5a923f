"""`conveyor jobs submit` and `add`: send lists of URLs to a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, Unpack

import click
import msgspec

from conveyor.cli.jobs.context import JOB, Session, counted, json_option
from conveyor.cli.jobs.events import submit_told, watch_run
from conveyor.cli.jobs.schedule import ScheduleOptions, schedule_from, schedule_options
from conveyor.cli.limit_options import LimitOptions, host_limits, limit_options
from conveyor.cli.scrape.command import (
    SHOWN_MAX,
    headers_from,
    input_options,
    input_options_from,
    request_options,
)
from conveyor.cli.scrape.inputs import read_pages
from conveyor.cli.scrape.pages import Page
from conveyor.domain import limits
from conveyor.domain.submit.scraper_params import REMOTE_SUPPORT
from conveyor.sdk import ApiError, SubmitJobRequest, TaskInput, WebhookInput


class _Input(TypedDict):
    """How the list is read."""

    input_format: str | None
    url_column: str | None
    id_column: str | None
    delimiter: str | None
    skip_invalid: bool


class _Options(ScheduleOptions, LimitOptions, _Input):
    header: dict[str, str]
    user_agent: str | None
    cookie: tuple[str, ...]
    method: str | None
    data: str | None
    param: dict[str, str]
    accept_status: list[int]
    name: str | None
    external_id: str | None
    is_open: bool
    is_dry: bool
    webhook: str | None
    sign: bool
    max_inflight: int | None
    attempts: int | None
    priority: int
    dedup: bool


@click.command()
@click.argument("sources", metavar="[FILE|URL]...", nargs=-1)
@input_options
@request_options
@click.option("--name", help="What to call the job.")
@click.option("--external-id", help="Your own id for the job.")
@click.option("--open", "is_open", is_flag=True, help="More tasks will come, with `jobs add`.")
@click.option(
    "--webhook", metavar="URL", help="Send an event to this address when the run has ended."
)
@click.option("--sign", is_flag=True, help="Sign the events; see `conveyor webhooks rotate`.")
@click.option(
    "--max-inflight",
    type=click.IntRange(1, limits.MAX_INFLIGHT_MAX),
    help="Pages in flight at once.",
)
@click.option(
    "--attempts", type=click.IntRange(1, limits.MAX_ATTEMPTS_MAX), help="Attempts per page."
)
@click.option(
    "--priority",
    type=click.IntRange(1, limits.PRIORITY_MAX),
    default=1,
    show_default=True,
    help="The job's weight among yours.",
)
@click.option("--dedup", is_flag=True, help="Fetch lines that ask for the same page only once.")
@click.option("--dry-run", "is_dry", is_flag=True, help="Only show what would happen.")
@schedule_options
@limit_options
@click.option("--watch", is_flag=True, help="Stay and watch the run to its end.")
@json_option
@click.pass_obj
def submit(
    session: Session,
    sources: tuple[str, ...],
    watch: bool,
    as_json: bool,
    **options: Unpack[_Options],
) -> None:
    """Submit URLs, or the URLs in FILE, as a job.

    FILE is text with one URL per line, CSV or NDJSON; - means standard input. With --open, FILE
    may be omitted and lists added later. With --at, --every or --cron, the first run starts at
    that time.
    """
    if not sources and not options["is_open"]:
        raise click.UsageError("Give a FILE with one URL a line, - for standard input, or URLs.")
    lines = _lines_of(sources, options) if sources else []
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
    text = f"Job {job_id}: {counted(accepted.accepted_tasks, 'task')} accepted.\n{hint}"
    session.answer(accepted, text, as_json=as_json)


@click.command()
@click.argument("job", type=JOB)
@click.argument("source", metavar="FILE|URL")
@input_options
@click.option("--last", is_flag=True, help="Close the job behind this list.")
@json_option
@click.pass_obj
def add(
    session: Session, job: str, source: str, last: bool, as_json: bool, **options: Unpack[_Input]
) -> None:
    """Add a URL, or the URLs in FILE, to an open job.

    FILE is text with one URL per line, CSV or NDJSON; - means standard input.
    """
    lines = _lines_of([source], options)
    with _naming_lines(lines):
        added = session.client.add_tasks(job, list(map(_task_from, lines)), last=last)
    end = "The job is closed." if last else "The job is open for more."
    text = f"{counted(added.accepted_tasks, 'task')} added. {end}"
    session.answer(added, text, as_json=as_json)


def _request(lines: Sequence[Page], options: _Options) -> SubmitJobRequest:
    webhook, schedule = options["webhook"], schedule_from(options)
    params: dict[str, Any] = dict(options["param"])
    if options["accept_status"]:
        params["allowed_status_codes"] = ",".join(map(str, options["accept_status"]))
    if headers := headers_from(options):
        params["custom_headers"] = headers
    return SubmitJobRequest(
        type="regular" if schedule is None else "scheduled",
        schedule=schedule,
        status="open" if options["is_open"] else "closed",
        tasks=list(map(_task_from, lines)),
        zenrows_params=params or None,
        external_id=options["external_id"],
        name=options["name"],
        webhook=WebhookInput(url=webhook, signature=options["sign"]) if webhook else None,
        max_inflight=options["max_inflight"],
        max_attempts=options["attempts"],
        priority=options["priority"],
        dedup=options["dedup"],
        budget=options["budget"],
        host_limits=host_limits(options["per_host"], options["rate"]),
    )


def _task_from(page: Page) -> TaskInput:
    params: dict[str, Any] = dict(page.params or {})
    if page.headers:
        params["custom_headers"] = page.headers
    task = TaskInput(
        url=page.url,
        external_id=page.id,
        method=None if page.method == "GET" else page.method,
        zenrows_params=params or None,
    )
    if page.body is None:
        return task
    is_json = page.content_type == "application/json"
    body = page.body if is_json else msgspec.json.encode(page.body.decode(errors="replace"))
    return msgspec.structs.replace(task, body=msgspec.Raw(body))


def _lines_of(sources: Sequence[str], options: _Input) -> list[Page]:
    """Returns the pages. The server judges the URLs; what is no line at all is refused here."""
    pages = read_pages(sources, input_options_from(options), None, REMOTE_SUPPORT).pages
    if not pages:
        raise click.ClickException(f"{sources[0]} holds no URL. Give one a line.")
    bad = [page for page in pages if page.flaw is not None and not page.url]
    if bad and not options["skip_invalid"]:
        lines = [f"  line {page.line}: {page.flaw}" for page in bad[:SHOWN_MAX]]
        count = f"{len(bad):,} of {len(pages):,} lines cannot be read:"
        raise click.ClickException("\n".join([count, *lines]))
    if options["skip_invalid"]:
        pages = [page for page in pages if page.flaw is None]
    return pages


@contextmanager
def _naming_lines(lines: Sequence[Page]) -> Iterator[None]:
    """Replaces the task indexes in an error of the server by the line numbers of the file."""
    try:
        yield
    except ApiError as error:
        if not error.invalid_tasks:
            raise
        bad = error.invalid_tasks
        flaws = [
            f"  line {lines[task.index].line}: {task.reason}: {task.value or lines[task.index].url}"
            for task in bad[:SHOWN_MAX]
            if task.index < len(lines)
        ]
        if len(bad) > SHOWN_MAX:
            flaws.append("  ... and more")
        what = error.detail or error.title
        raise click.ClickException("\n".join([what, *flaws])) from None
