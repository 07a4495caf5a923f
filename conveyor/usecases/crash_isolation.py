"""Isolation: a crash over one item ends the handling of that item and of nothing else.

An actor that handles many items (tasks, settles, notices, exports, runs) would otherwise be
restarted for each crash, which cancels every other item in its hands, and would meet the same item
again before those behind it. Outages are no crashes: they pass, and the item is as good as before.
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
    """The handler of one item crashed over it."""

    error: Exception


def is_outage(error: BaseException) -> bool:
    """Whether all that went wrong is that something around the worker is away for now."""
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
    """Runs the handler of one item. A crash is logged with its traceback and returned; an outage,
    a cancellation and what the caller `expects` are raised. `level` is lower for an item whose
    crash has been logged before; `logged` are errors that report a crash which was logged where it
    happened."""
    try:
        return await handle()
    except expects:
        raise
    except logged as error:
        return Crash(error)
    except Exception as error:
        if is_outage(error):
            raise
        if is_resource_shortage(error):
            log.warning("%s met a shortage: %r", what, error, extra=extra)
        else:
            log.log(level, "%s crashed its handler", what, extra=extra, exc_info=error)
        return Crash(error)
