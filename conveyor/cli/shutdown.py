"""Shutdown: signals and failures end a command in order, and always by a deadline."""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar, TypeVarTuple, Unpack

import trio

from actors.runtime import Supervisor
from conveyor.cli.entry import FAILED_STOP_S, set_deadline

# Fargate kills a task at most 120 s after it asked the task to stop. The process must end earlier
# by itself, or its claims stay until they expire.
STOP_S_MAX = 110

Drain = Callable[[], Awaitable[None]]
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = logging.getLogger(__name__)


def run_command(main: Callable[[Unpack[Ts]], Awaitable[T]], *arguments: *Ts) -> T:
    """Runs `main` on Trio. If Trio itself fails, the process ends by a deadline."""

    async def run() -> T:
        trio.lowlevel.spawn_system_task(_end_with_event_loop)
        return await main(*arguments)

    return trio.run(run)


async def _end_with_event_loop() -> None:
    """Sets a deadline if Trio crashes.

    A MemoryError can occur inside Trio. Trio then cancels `main`, and no thread can report its
    result any more. Closing an engine would wait for its threads for ever and hold the data
    directory.
    """
    try:
        await trio.sleep_forever()
    except trio.Cancelled as cancelled:
        # At a regular end the source is "shutdown".
        if cancelled.source == "nursery":
            set_deadline(FAILED_STOP_S)
            cause = {"cause": cancelled.reason}
            log.critical("the event loop failed: the process ends", extra=cause)
        raise


async def cancel_on_signal(
    scope: trio.CancelScope, within_s: int = STOP_S_MAX, drain: Drain = trio.lowlevel.checkpoint
) -> None:
    """The first signal runs `drain`, then cancels `scope`. A second one ends the process at once.

    The process ends within `within_s`, in order or not: all guarantees also hold after a kill. 0 is
    for commands that continue after the signal.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        await anext(signals)
    if within_s:
        set_deadline(within_s)
    await drain()
    scope.cancel(reason="signal")


async def end_if_failed(supervisor: Supervisor) -> None:
    """Sets a deadline when the supervisor gives up.

    If the actors or the engine do not stop in this time, the process exits. A process that neither
    serves nor exits would hold its data directory for ever.
    """
    await supervisor.stopping.wait()
    set_deadline(FAILED_STOP_S)
