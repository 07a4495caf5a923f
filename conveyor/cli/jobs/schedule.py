"""`conveyor jobs schedule`, and the options that set a schedule
(docs/api.md, Schedules)."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from typing import Literal, TypedDict, TypeVar, Unpack

import click

from conveyor.cli.jobs.context import JOB, Session, json_option
from conveyor.cli.jobs.tables import job_page
from conveyor.sdk import JobSchedule, RateInput

F = TypeVar("F", bound=Callable[..., object])

_EVERY = re.compile(r"([1-9][0-9]{0,4})([mhd])\Z")
_UNITS: dict[str, Literal["minute", "hour", "day"]] = {"m": "minute", "h": "hour", "d": "day"}


class ScheduleOptions(TypedDict):
    at: str | None
    every: RateInput | None
    cron: str | None
    timezone: str
    overlap: Literal["skip", "queue"]


def _every_from(ctx: click.Context, option: click.Parameter, text: str | None) -> RateInput | None:
    if text is None:
        return None
    match = _EVERY.match(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a time like 15m, 2h or 1d.", ctx, option)
    return RateInput(every=int(match[1]), unit=_UNITS[match[2]])


_OPTIONS = (
    click.option("--at", metavar="TIME", help="Fire once, like 2030-01-31T09:30."),
    click.option("--every", metavar="TIME", callback=_every_from, help="Fire every 15m, 2h or 1d."),
    click.option("--cron", metavar="EXPR", help="Fire by five fields, like '30 9 * * mon-fri'."),
    click.option(
        "--timezone",
        metavar="ZONE",
        default="UTC",
        show_default=True,
        help="The time zone of --at and --cron, such as Europe/Berlin.",
    ),
    click.option(
        "--overlap",
        type=click.Choice(["skip", "queue"]),
        default="skip",
        show_default=True,
        help="While a run is live, a fire gives way or waits.",
    ),
)


def schedule_options(command: F) -> F:
    return reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), command)


def schedule_from(options: ScheduleOptions) -> JobSchedule | None:
    """Returns the schedule that the options describe, or None."""
    kinds = [options[name] for name in ("at", "every", "cron")]
    if all(kind is None for kind in kinds):
        return None
    if sum(kind is not None for kind in kinds) > 1:
        raise click.UsageError("Give one of --at, --every and --cron.")
    return JobSchedule(
        at=options["at"],
        rate=options["every"],
        cron=options["cron"],
        timezone=None if options["every"] else options["timezone"],
        overlap=options["overlap"],
    )


@click.command()
@click.argument("job", type=JOB)
@schedule_options
@click.option("--pause", "state", flag_value="paused", help="Fire no more for now.")
@click.option("--resume", "state", flag_value="active", help="Fire again.")
@json_option
@click.pass_obj
def schedule(
    session: Session,
    job: str,
    state: Literal["active", "paused"] | None,
    as_json: bool,
    **options: Unpack[ScheduleOptions],
) -> None:
    """Show the schedule of a job, or change it.

    `conveyor jobs rerun` starts a scheduled job by hand.
    """
    schedule_input = schedule_from(options)
    if schedule_input is not None:
        session.client.set_schedule(job, schedule_input)
    if state is not None:
        session.client.set_schedule_state(job, state)
    record = session.client.get(job)
    session.answer(record, job_page(record, [], session.out.width), as_json=as_json)
    if record.schedule is None:
        session.remark(
            "The job has no schedule: that is for jobs submitted with --at, --every or --cron."
        )
