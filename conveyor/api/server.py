"""The HTTP server as one actor among the others: listens, and ends in a bounded time
(docs/api.md, Conventions).

It is a sibling of the worker's actors under our own supervisor: a crash of any of them takes the
process through one door, and never leaves a server that answers for a dead worker.

A connection ends alone, whatever comes over it; that is the one `except Exception` beside the last
handler of app.py.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import trio
from quart_trio import QuartTrio

from conveyor.http1.connection import Application, Receive, Send
from conveyor.http1.exchange import Event
from conveyor.http1.listener import Listener

log = logging.getLogger(__name__)

GRACE_S = 3.0
BACKLOG = 1024
# What is not taken yet waits with its sender, who then knows how far a long list has come.
RECEIVE_BUFFER_BYTES = 256 * 1024
# A connection costs about 20 KB; more than this many would not be served in time anyway.
CONNECTIONS_MAX = 10_000


@dataclass(slots=True, kw_only=True)
class HttpServer:
    """Serves until cancelled; then lets the requests in hand finish, for a while."""

    make_app: Callable[[Callable[[], bool]], QuartTrio]
    host: str
    port: int
    on_listening: Callable[[str], None]
    is_proxy: Callable[[str], bool] = lambda _: False
    connections_max: int | None = None
    is_ready: bool = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        stop = trio.Event()
        async with trio.open_nursery() as nursery:
            try:
                port = await nursery.start(self._serve, stop)
                self.is_ready = True
                host = f"[{self.host}]" if ":" in self.host else self.host
                self.on_listening(f"http://{host}:{port}")
                task_status.started()
                await trio.sleep_forever()
            finally:
                self.is_ready = False
                stop.set()

    async def _serve(self, stop: trio.Event, *, task_status: trio.TaskStatus[int]) -> None:
        """Shielded: it ends by `stop`, and takes no longer than the grace."""
        app = self.make_app(lambda: self.is_ready)
        with trio.CancelScope(shield=True):
            await app.startup()
            listeners = await trio.open_tcp_listeners(self.port, host=self.host, backlog=BACKLOG)
            for each in listeners:  # Connections take it over.
                size = (trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
                each.socket.setsockopt(*size)
            listener = Listener(
                _logged(cast("Application", app)),
                connections_max=self.connections_max or count_connections_max(),
                run_connection=_end_alone,
                is_proxy=self.is_proxy,
            )
            task_status.started(listeners[0].socket.getsockname()[1])
            await listener.serve(listeners, stop, grace_s=GRACE_S)


def count_connections_max() -> int:
    """Half of the descriptors that this process may open: the rest are for fetching and storing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if soft < 0 else max(8, min(CONNECTIONS_MAX, soft // 2))


def _logged(app: Application) -> Application:
    """An error that the application lets out ends its request; the connection answers 500."""

    async def application(scope: Event, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            log.exception("request failed outside its handler", exc_info=error)

    return application


async def _end_alone(work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception as error:  # noqa: BLE001
        log.warning("connection ended badly", extra={"cause": repr(error)})
