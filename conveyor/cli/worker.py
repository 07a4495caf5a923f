"""`conveyor worker`: one more process that fetches, for whoever owns the data (SPEC 1.2)."""

from __future__ import annotations

import sys

import click
import trio

from conveyor.bootstrap import join_world
from conveyor.cli.signals import cancel_on_signal
from conveyor.config import Settings
from conveyor.telemetry import set_up_logging


@click.command()
@click.pass_obj
def worker(settings: Settings) -> None:
    """Help the process that owns the data directory, until it ends.

    `scrape` and `dev` start these by themselves (--processes).
    """
    set_up_logging("text" if settings.log == "text" else "json")
    trio.run(_run, settings)


async def _run(settings: Settings) -> None:
    async with join_world(settings) as world, trio.open_nursery() as nursery:
        nursery.start_soon(cancel_on_signal, nursery.cancel_scope)
        nursery.start_soon(_cancel_at_end_of_input, nursery.cancel_scope)
        await world.helper().run()


async def _cancel_at_end_of_input(scope: trio.CancelScope) -> None:
    """Whoever started us holds the other end: when it is gone, there is nobody to help."""
    async with trio.lowlevel.FdStream(sys.stdin.fileno()) as owner:
        while await owner.receive_some():
            pass
    scope.cancel(reason="the owner is gone")
