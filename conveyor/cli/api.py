"""`conveyor api`: the API without a worker, on an engine that others share
(docs/operations.md, Roles)."""

from __future__ import annotations

import click
import trio

from actors.runtime import Child, Strategy, Supervisor
from conveyor.api.server import GRACE_S, HttpServer
from conveyor.bootstrap import AWS, open_world
from conveyor.cli.dev import announce, refuse_taken_port
from conveyor.cli.signals import cancel_on_signal, end_if_failed, run_command
from conveyor.config import Settings
from conveyor.telemetry import set_up_logging


@click.command()
@click.pass_obj
def api(settings: Settings) -> None:
    """Run the API; `conveyor worker` does the work."""
    if settings.engine != AWS:
        raise click.ClickException(
            "An embedded engine has one owner: run `conveyor dev`, or set CONVEYOR_ENGINE=aws."
        )
    set_up_logging("text" if settings.log == "text" else "json")
    refuse_taken_port(settings.host, settings.port)
    run_command(_run, settings)


async def _run(settings: Settings) -> None:
    async with open_world(settings, role="api") as world, trio.open_nursery() as nursery:
        server = HttpServer(
            make_app=lambda ready: world.app(ready=ready),
            host=settings.host,
            port=settings.port,
            on_listening=announce,
            is_proxy=world.origins().is_proxy,
        )
        child = Child("http_server", run=server.run, reports_ready=True, stop_grace_s=GRACE_S + 2.0)
        nursery.start_soon(cancel_on_signal, nursery.cancel_scope)
        supervisor = Supervisor("api", strategy=Strategy.ONE_FOR_ONE, children=[child])
        nursery.start_soon(end_if_failed, supervisor)
        await supervisor.run()
