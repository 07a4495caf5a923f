"""`conveyor dev`: the whole service in one process on one data directory (SPEC 1.2)."""

from __future__ import annotations

import signal
import socket
import sys

import click
import trio

from actors.runtime import Child, Supervisor
from conveyor.api.server import GRACE_S, HttpServer
from conveyor.bootstrap import open_world
from conveyor.cli.local import inspection_child
from conveyor.config import Settings
from conveyor.telemetry import set_up_logging


@click.command()
@click.pass_obj
def dev(settings: Settings) -> None:
    """Run the service on this machine: API and worker in one process."""
    style = settings.log or ("text" if sys.stderr.isatty() else "json")
    set_up_logging("text" if style == "text" else "json")
    refuse_taken_port(settings)
    trio.run(_run, settings)


async def _run(settings: Settings) -> None:
    async with open_world(settings, role="dev") as world:
        server = HttpServer(
            make_app=lambda ready: world.app(ready=ready),
            host=settings.host,
            port=settings.port,
            on_listening=_announce,
        )
        supervisor: Supervisor = world.worker(
            inspection_child(world, "dev", lambda: supervisor),
            Child("http_server", run=server.run, reports_ready=True, stop_grace_s=GRACE_S + 2.0),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on_signal, nursery.cancel_scope)
            await supervisor.run()


async def _cancel_on_signal(scope: trio.CancelScope) -> None:
    """A signal stops in order; another one, from somebody in a hurry, has its usual effect."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        await anext(signals)
        click.echo("Stopping: work in flight is handed back.", err=True)
        scope.cancel(reason="signal")


def _announce(url: str) -> None:
    click.echo(f"Conveyor is listening on {url}", err=True)


def refuse_taken_port(settings: Settings) -> None:
    """Says so before anything is opened, rather than as a crash later."""
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except (OSError, UnicodeError) as error:
            raise click.ClickException(
                f"Cannot listen on {settings.host}:{settings.port}: {error}. "
                "Choose another with CONVEYOR_HOST or CONVEYOR_PORT."
            ) from None
