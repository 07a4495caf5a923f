"""`conveyor webhooks`: manages signing keys and tests receivers (docs/api.md, Webhooks)."""

from __future__ import annotations

import sys

import click

from conveyor.cli.jobs.context import (
    ServerGroup,
    Session,
    json_option,
    open_session,
    server_options,
)
from conveyor.cli.jobs.tables import moment
from conveyor.sdk import HmacKeyMeta, WebhookInput


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
