"""Signals: Ctrl-C and SIGTERM end a command in order."""

from __future__ import annotations

import signal

import trio


async def cancel_on_signal(scope: trio.CancelScope) -> None:
    """The first signal cancels; another one, from somebody in a hurry, has its usual effect."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        await anext(signals)
    scope.cancel(reason="signal")
