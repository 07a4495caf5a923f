"""`conveyor dev`: the whole service in one process on one data directory
(docs/operations.md, Roles)."""

from __future__ import annotations

import socket
import sys

import click
import trio

from actors.runtime import Child, Supervisor
from conveyor.api.server import GRACE_S, HttpServer
from conveyor.bootstrap import AWS, open_world
from conveyor.cli.local import inspection_child, shared_among
from conveyor.cli.signals import cancel_on_signal, end_if_failed, run_command
from conveyor.config import Settings
from conveyor.telemetry import set_up_logging


@click.command()
@click.option(
    "--processes",
    type=click.IntRange(1, 16),
    default=1,
    show_default=True,
    help="Processes that fetch, this one included.",
)
@click.pass_obj
def dev(settings: Settings, processes: int) -> None:
    """Run the service on this machine: API and worker in one."""
    style = settings.log or ("text" if sys.stderr.isatty() else "json")
    set_up_logging("text" if style == "text" else "json")
    refuse_taken_port(settings.host, settings.port)
    if settings.engine == AWS and processes > 1:
        raise click.ClickException("On the AWS engine more processes are more `conveyor worker`s.")
    run_command(_run, shared_among(settings, processes), processes)


async def _run(settings: Settings, processes: int) -> None:
    async with open_world(settings, role="dev") as world:
        server = HttpServer(
            make_app=lambda ready: world.app(ready=ready),
            host=settings.host,
            port=settings.port,
            on_listening=announce,
            is_proxy=world.origins().is_proxy,
        )
        # Only who owns a data directory has a place to be looked at.
        is_owner = settings.engine != AWS
        supervisor: Supervisor = world.service(
            *([inspection_child(world, "dev", lambda: supervisor)] if is_owner else []),
            *world.helper_processes(processes - 1),
            Child("http_server", run=server.run, reports_ready=True, stop_grace_s=GRACE_S + 2.0),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_on_signal, nursery.cancel_scope)
            nursery.start_soon(end_if_failed, supervisor)
            await supervisor.run()


async def _end_on_signal(scope: trio.CancelScope) -> None:
    await cancel_on_signal(scope)
    click.echo("Stopping: work in flight is handed back.", err=True)


def announce(url: str) -> None:
    click.echo(f"Conveyor is listening on {url}", err=True)


def refuse_taken_port(host: str, port: int, setting: str = "CONVEYOR_PORT") -> None:
    """Says so before anything is opened, rather than as a crash later."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            raise click.ClickException(
                f"Cannot listen on {host}:{port}: {error}. "
                f"Choose another with CONVEYOR_HOST or {setting}."
            ) from None
