"""`conveyor webhooks`: manages signing keys and tests receivers. `conveyor jobs webhook`: shows and
changes the webhook of a job, and its deliveries (docs/api.md, Webhooks)."""

from __future__ import annotations

import sys
from typing import TypedDict, Unpack

import click
from rich.table import Table

from conveyor.cli.jobs.context import (
    JOB,
    ServerGroup,
    Session,
    json_option,
    open_session,
    server_options,
)
from conveyor.cli.jobs.tables import moment, plain
from conveyor.sdk import DeliveryResponse, HmacKeyMeta, WebhookInput, WebhookResponse


@click.group(cls=ServerGroup)
@server_options
@click.pass_context
def webhooks(ctx: click.Context, server: str, api_key: str) -> None:
    """Manage signing keys and test receivers."""
    open_session(ctx, server, api_key)


@webhooks.command()
@json_option
@click.pass_obj
def keys(session: Session, as_json: bool) -> None:
    """Show the signing keys, without their secrets."""
    key_list = session.client.hmac_keys()
    if key_list.active is None and not as_json:
        session.remark("There is no signing key. `conveyor webhooks rotate` makes one.")
        return
    text = "\n".join([_line("active", key_list.active), _line("candidate", key_list.candidate)])
    session.answer(key_list, text, as_json=as_json)


@webhooks.command()
@json_option
@click.pass_obj
def rotate(session: Session, as_json: bool) -> None:
    """Create the first signing key, or a candidate for the next one.

    The secret is shown only once.
    """
    key = session.client.rotate_hmac_key()
    text = f"key     {key.kid}\nsecret  {key.secret}"
    session.answer(key, text, as_json=as_json)
    session.remark("Keep the secret: it is not shown again.")


@webhooks.command()
@json_option
@click.pass_obj
def finalize(session: Session, as_json: bool) -> None:
    """Make the candidate the active key."""
    done = session.client.finalize_hmac_key()
    session.answer(done, f"Key {done.active_kid} is active.", as_json=as_json)


@webhooks.command()
@click.pass_obj
def cancel(session: Session) -> None:
    """Drop the candidate."""
    session.client.cancel_hmac_rotation()
    session.remark("There is no candidate now.")


@webhooks.command()
@click.argument("url")
@click.option("--sign", is_flag=True, help="Sign the event with the active key.")
@json_option
@click.pass_obj
def test(session: Session, url: str, sign: bool, as_json: bool) -> None:
    """Send a test event to URL.

    The exit code is 1 if the receiver did not accept it.
    """
    tested = session.client.test_webhook(WebhookInput(url=url, signature=sign))
    what = "delivered" if tested.delivered else f"not delivered: {tested.error}"
    session.answer(tested, f"Event {tested.event_id} {what}.", as_json=as_json)
    sys.exit(0 if tested.delivered else 1)


def _line(name: str, key: HmacKeyMeta | None) -> str:
    return f"{name:<10}" + (f"{key.kid}  {moment(key.created_at)}" if key else "none")


class _Options(TypedDict):
    url: str | None
    sign: bool
    remove: bool
    deliveries: bool
    redeliver: str | None


@click.command()
@click.argument("job", type=JOB)
@click.option("--set", "url", metavar="URL", help="Send events to this address from now on.")
@click.option("--sign", is_flag=True, help="With --set: sign the events.")
@click.option(
    "--remove", is_flag=True, help="Send no more events, and drop those that are not delivered yet."
)
@click.option("--deliveries", is_flag=True, help="Show the events and their delivery attempts.")
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
        session.remark(f"Job {job} has no webhook any more.")
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
        session.remark("There are no events yet.")


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
