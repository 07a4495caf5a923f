"""A group of commands that talk to a running server: who and where, and how errors read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

from conveyor.cli.jobs_session import Session, sentence
from conveyor.sdk import Client, SdkError

F = TypeVar("F", bound=Callable[..., object])

# The server gives up on a request by itself before this.
TIMEOUT_S = 75.0


class ServerGroup(click.Group):
    """What the SDK raises becomes a sentence, whichever command it came from."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except SdkError as error:
            raise click.ClickException(sentence(error, ctx.params["server"])) from None


def server_options(command: F) -> F:
    server = click.option(
        "--server",
        metavar="URL",
        envvar="CONVEYOR_URL",
        default="http://127.0.0.1:8080",
        show_default=True,
        show_envvar=True,
        help="Where the server is.",
    )
    api_key = click.option(
        "--api-key",
        metavar="KEY",
        envvar="CONVEYOR_API_KEY",
        default="dev",
        show_default=True,
        show_envvar=True,
        help="Who you are to it.",
    )
    return server(api_key(command))


def open_session(ctx: click.Context, server: str, api_key: str) -> None:
    """The session that the commands of the group are given."""
    try:
        client = Client(server, api_key, timeout_s=TIMEOUT_S)
    except ValueError as error:
        raise click.ClickException(f"{error}. See --server and --api-key.") from None
    ctx.obj = Session.with_server(ctx.with_resource(client))
