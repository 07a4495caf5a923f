"""A session of `conveyor jobs`: the client, its output streams, and the texts of errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import click
import msgspec
from rich.console import Console, RenderableType
from rich.text import Text

from conveyor.sdk import ApiError, Client, SdkError, Unreachable
from conveyor.sdk.errors import UNEXPECTED

F = TypeVar("F", bound=Callable[..., object])

# The ids are ULIDs.
JOB_ID_CHARS = 26
JOBS_SHOWN = 10
# A file or a pipe has no width. With this width, no line is shortened or wrapped there.
PIPE_COLUMNS = 10_000

json_option: Callable[[F], F] = click.option(
    "--json", "as_json", is_flag=True, help="Answer with JSON, for programs."
)


@dataclass(frozen=True, slots=True)
class Session:
    """Prints results to `out`, and progress and remarks to `err`."""

    client: Client
    out: Console
    err: Console

    @classmethod
    def with_server(cls, client: Client) -> Session:
        out = Console(highlight=False)
        if not out.is_terminal:
            out = Console(highlight=False, width=PIPE_COLUMNS)
        return cls(client, out, Console(stderr=True, highlight=False))

    def answer(self, value: msgspec.Struct, rendering: RenderableType, *, as_json: bool) -> None:
        """Prints one value: as JSON for programs, or as `shown` for people."""
        if as_json:
            self.write_json(value)
        else:
            self.out.print(Text(rendering) if isinstance(rendering, str) else rendering)

    def remark(self, text: str) -> None:
        self.err.print(Text(text), soft_wrap=True)

    def write_json(self, value: msgspec.Struct) -> None:
        click.echo(msgspec.json.encode(value).decode())


class _JobId(click.ParamType[str]):
    """The id of a job, or the beginning of it that no other job has."""

    name = "job"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if len(value) >= JOB_ID_CHARS or ctx is None or not value.isalnum():
            return value
        session = ctx.find_object(Session)
        if session is None:
            return value
        matching_ids = [
            job.job_id for job in session.client.list() if job.job_id.startswith(value.upper())
        ]
        if len(matching_ids) > 1:
            job_ids = "\n  ".join(matching_ids[:JOBS_SHOWN])
            self.fail(f"{len(matching_ids)} jobs begin with {value}:\n  {job_ids}", param, ctx)
        return matching_ids[0] if matching_ids else value


JOB = _JobId()


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


# What the server answers if the job does not exist or is another caller's.
NO_JOB = "There is no such job."


def sentence(error: SdkError, server: str) -> str:
    """Describes an error and what the user can do about it."""
    if isinstance(error, Unreachable):
        return (
            f"No server answers at {error.url} ({error.why}). Start one with `conveyor dev`, "
            "or say where it is with --server or CONVEYOR_URL."
        )
    if isinstance(error, ApiError):
        return _refusal(error, server)
    return str(error)


def _refusal(error: ApiError, server: str) -> str:
    what = error.detail or error.title
    if error.code == UNEXPECTED:
        return (
            f"What answers at {server} does not speak as Conveyor does ({error.status} "
            f"{error.title}). Say where Conveyor is with --server or CONVEYOR_URL."
        )
    match error.status:
        case 401:
            return f"{what} Give one that {server} knows with --api-key or CONVEYOR_API_KEY."
        case 404 if what == NO_JOB:
            return f"{what} `conveyor jobs list` shows the jobs of this API key."
        case status if status >= 500 and status != 501:
            return f"{server} cannot do it now: {what} Its log knows more of {error.request_id}."
    if not error.errors:
        return what
    fields = [f"{problem.pointer.lstrip('/')}: {problem.detail}" for problem in error.errors]
    return "\n  ".join(["The server refuses the request:", *fields])


# The group of commands that call a running server: its address, the API key, and its errors.


# Longer than the time limit of the server, so that its error arrives instead of a client timeout.
TIMEOUT_S = 75.0


class ServerGroup(click.Group):
    """Turns the errors of the SDK into sentences, for every command of the group."""

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
    """Opens the session that the commands of the group use."""
    try:
        client = Client(server, api_key, timeout_s=TIMEOUT_S)
    except ValueError as error:
        raise click.ClickException(f"{error}. See --server and --api-key.") from None
    ctx.obj = Session.with_server(ctx.with_resource(client))
