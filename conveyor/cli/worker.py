"""`conveyor worker`: a process that does the work, of its own or for an owner
(docs/operations.md, Roles)."""

from __future__ import annotations

import sys

import click
import trio

from actors.runtime import Child
from conveyor.bootstrap import AWS, World, join_world, open_world
from conveyor.cli.dev import refuse_taken_port
from conveyor.cli.exits import set_deadline
from conveyor.cli.signals import STOP_S_MAX, cancel_on_signal, end_if_failed, run_command
from conveyor.config import Settings
from conveyor.monitoring import Monitor
from conveyor.telemetry import set_up_logging


@click.command()
@click.pass_obj
def worker(settings: Settings) -> None:
    """Work on an engine that is shared, until a signal comes; on a data directory, help the process
    that owns it, until that ends: `scrape` and `dev` start such helpers by themselves.
    """
    set_up_logging("text" if settings.log == "text" else "json")
    if settings.metrics_port is not None:
        refuse_taken_port(settings.host, settings.metrics_port, "CONVEYOR_METRICS_PORT")
    run_command(_work if settings.engine == AWS else _help, settings)


async def _work(settings: Settings) -> None:
    async with open_world(settings, role="worker") as world, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_on_signal, nursery.cancel_scope, STOP_S_MAX, world.drain)
        supervisor = world.worker(*_monitoring(world))
        nursery.start_soon(end_if_failed, supervisor)
        await supervisor.run()


def _monitoring(world: World) -> list[Child]:
    settings = world.settings
    if settings.metrics_port is None:
        return []
    monitor = Monitor(metrics=world.metrics, host=settings.host, port=settings.metrics_port)
    return [Child("monitor", run=monitor.run, reports_ready=True)]


async def _help(settings: Settings) -> None:
    async with join_world(settings) as world, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_on_signal, nursery.cancel_scope)
        nursery.start_soon(_cancel_at_end_of_input, nursery.cancel_scope)
        supervisor = world.helper()
        nursery.start_soon(end_if_failed, supervisor)
        await supervisor.run()


async def _cancel_at_end_of_input(scope: trio.CancelScope) -> None:
    """Whoever started us holds the other end: when it is gone, there is nobody to help."""
    async with trio.lowlevel.FdStream(sys.stdin.fileno()) as owner:
        while await owner.receive_some():
            pass
    set_deadline(STOP_S_MAX)
    scope.cancel(reason="the owner is gone")
