"""The HTTP server: Hypercorn as one actor among the others, with an orderly end (SPEC 1.2).

It is a sibling of the worker's actors under our own supervisor: a crash of any of them takes the
process through one door, and never leaves a server that answers for a dead worker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from quart_trio import QuartTrio

GRACE_S = 3.0
# Above the 60 s of common load balancers, so that they never reuse what we just closed.
KEEP_ALIVE_S = 75.0
BACKLOG = 1024


@dataclass(slots=True, kw_only=True)
class HttpServer:
    """Serves until cancelled; then lets the requests in hand finish, for a while."""

    make_app: Callable[[Callable[[], bool]], QuartTrio]
    host: str
    port: int
    on_listening: Callable[[str], None]
    is_ready: bool = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            try:
                urls = await nursery.start(self._serve, stop)
                self.is_ready = True
                self.on_listening(urls[0])
                task_status.started()
                await trio.sleep_forever()
            finally:
                self.is_ready = False
                stop.set()

    async def _serve(self, stop: trio.Event, *, task_status: trio.TaskStatus[list[str]]) -> None:
        """Shielded: it ends by `stop`, and Hypercorn itself bounds how long that takes."""
        app = self.make_app(lambda: self.is_ready)
        with trio.CancelScope(shield=True):
            await serve(
                app,
                self._config(),
                shutdown_trigger=stop.wait,
                task_status=task_status,
                mode="asgi",
            )

    def _config(self) -> Config:
        config = Config()
        config.bind = [f"{self.host}:{self.port}"]
        config.graceful_timeout = GRACE_S
        config.keep_alive_timeout = KEEP_ALIVE_S
        config.backlog = BACKLOG
        config.accesslog = None
        config.errorlog = logging.getLogger("hypercorn.error")
        config.include_server_header = False
        return config
