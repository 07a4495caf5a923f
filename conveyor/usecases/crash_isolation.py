"""Crash isolation: a crash while one item is handled ends the handling of that item only
(SPEC.md 4.12).

Without it, each crash would restart an actor that handles many items (tasks, settles, notices,
exports, runs). That cancels all its other items, and the actor would meet the same item again
before those behind it. Outages are not crashes: they pass, and the item is unharmed.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from conveyor.ports.errors import QueueGone, Unavailable, is_resource_shortage

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Crash:
    """The handler of one item crashed with this error."""

    error: Exception


def is_outage(error: BaseException) -> bool:
    """Returns whether every error in it is an outage of a service that the worker needs."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_outage, error.exceptions))
    return isinstance(error, Unavailable | QueueGone)


async def isolate(
    handle: Callable[[], Awaitable[T]],
    what: str,
    *,
    expects: tuple[type[Exception], ...] = (),
    extra: Mapping[str, object] | None = None,
    level: int = logging.ERROR,
    logged: tuple[type[Exception], ...] = (),
) -> T | Crash:
    """Runs the handler of one item. A crash is logged with its traceback and returned. An
    outage, a cancellation and the errors in `expects` are raised. `level` is lower for an item
    whose crash was logged before. `logged` are errors that report a crash which was logged where
    it happened."""
    try:
        return await handle()
    # First: the clauses below would catch an expected error too.
    except expects:
        raise
    except logged as error:
        return Crash(error)
    except Exception as error:
        if is_outage(error):
            raise
        # A shortage is not a bug: no traceback, but the item is still not handled.
        if is_resource_shortage(error):
            log.warning("%s met a shortage: %r", what, error, extra=extra)
        else:
            log.log(level, "%s crashed its handler", what, extra=extra, exc_info=error)
        return Crash(error)
