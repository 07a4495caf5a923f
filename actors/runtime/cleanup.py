"""Bounded clean-up: awaiting in a `finally` without being cancelled and without hanging."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import trio

log = logging.getLogger(__name__)


@contextmanager
def bounded_cleanup(grace_s: float, *, what: str = "clean-up") -> Iterator[trio.CancelScope]:
    """Shield the body from cancellation for at most `grace_s`; an overrun is cut off and logged.

    Keep `grace_s` below the child's `stop_grace_s`, or the supervisor calls the child overdue.
    """
    with trio.move_on_after(grace_s, shield=True) as scope:
        yield scope
    if scope.cancelled_caught:
        log.warning("%s cut off after %s s", what, grace_s, extra={"cleanup": what})
