"""ThreadExecutor: a thread for heavy computing, and never more than a few of them."""

from __future__ import annotations

from collections.abc import Callable

import trio

from conveyor.ports.errors import is_resource_shortage
from conveyor.ports.executor import T

_THREADS_MAX = 2


class ThreadExecutor:
    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(_THREADS_MAX)

    async def run(self, work: Callable[[], T]) -> T:
        try:
            return await trio.to_thread.run_sync(work, limiter=self._limiter)
        except RuntimeError as error:
            if not is_resource_shortage(error):
                raise
            return work()  # The system gives no thread: rather slowly than not at all.
