"""`conveyor jobs webhook`: shows and changes the webhook of a job, and its deliveries."""

from __future__ import annotations

from typing import TypedDict, Unpack

import click
from rich.table import Table

from conveyor.cli.jobs.context import JOB, Session, json_option
from conveyor.cli.jobs.tables import moment, plain
from conveyor.sdk import DeliveryResponse, WebhookInput, WebhookResponse


class _Options(TypedDict):
    url: str | None
    sign: bool
    remove: bool
    deliveries: bool
    redeliver: str | None


@click.command()
@click.argument("job", type=JOB)
@click.option("--set", "url", metavar="URL", help="Tell this address from now on.")
@click.option("--sign", is_flag=True, help="With --set: sign what it is told.")
@click.option("--remove", is_flag=True, help="Tell nobody; drop what was not delivered.")
@click.option("--deliveries", is_flag=True, help="Show the events and the tries at them.")
@click.option("--redeliver", metavar="EVENT", help="Deliver this event once more.")
@json_option
@click.pass_obj
def webhook(session: Session, job: str, as_json: bool, **options: Unpack[_Options]) -> None:
    """Show or change the webhook of a job."""
    if sum(map(bool, options.values())) - options["sign"] > 1:
        raise click.UsageError("Choose one of --set, --remove, --deliveries and --redeliver.")
    client = session.client
    if options["url"]:
        settings = WebhookInput(url=options["url"], signature=options["sign"])
        _answer(session, client.set_webhook(job, settings), as_json=as_json)
    elif options["remove"]:
        client.remove_webhook(job)
        session.remark(f"Job {job} tells nobody of its end.")
    elif options["deliveries"]:
        _answer_deliveries(session, list(client.deliveries(job)), as_json=as_json)
    elif options["redeliver"]:
        event = client.redeliver(job, options["redeliver"])
        session.answer(event, f"Event {event.event_id} is due again.", as_json=as_json)
    else:
        _answer(session, client.webhook(job), as_json=as_json)


def _answer(session: Session, webhook: WebhookResponse, *, as_json: bool) -> None:
    how = "signed" if webhook.signature else "not signed"
    session.answer(webhook, plain(f"{webhook.url} ({how})"), as_json=as_json)


def _answer_deliveries(session: Session, events: list[DeliveryResponse], *, as_json: bool) -> None:
    if as_json:
        for event in events:
            session.write_json(event)
    elif events:
        session.out.print(_table(events))
    else:
        session.remark("There is nothing to tell yet.")


def _table(events: list[DeliveryResponse]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("event", "type", "status", "tries", "next", "last error"):
        table.add_column(name, no_wrap=name == "event")
    for event in events:
        table.add_row(
            event.event_id,
            event.event_type,
            event.status,
            str(event.attempts),
            moment(event.next_try_at) if event.next_try_at else "",
            plain(event.last_error),
        )
    return table
