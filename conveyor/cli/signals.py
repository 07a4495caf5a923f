"""Signals: Ctrl-C and SIGTERM end a command in order."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable

import trio

# A task on Fargate is killed 120 s after it was asked to stop, at most.
STOP_S_MAX = 110

Drain = Callable[[], Awaitable[None]]


async def cancel_on_signal(
    scope: trio.CancelScope, within_s: int = 0, drain: Drain = trio.lowlevel.checkpoint
) -> None:
    """The first signal cancels, after `drain`; another one, from somebody in a hurry, has its
    usual effect.

    With `within_s` the process ends by then, in order or not: everything holds on a kill as well.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        await anext(signals)
    signal.alarm(within_s)
    await drain()
    scope.cancel(reason="signal")
