"""The HTTP server: Hypercorn's protocol on listeners of our own, as one actor among the others.

It is a sibling of the worker's actors under our own supervisor: a crash of any of them takes the
process through one door, and never leaves a server that answers for a dead worker.

Hypercorn's own `serve` lets one connection take the server down: a bad chunk that meets an answer
on its way out raises past every handler. Here a connection ends alone; that is the one `except
Exception` beside the last handler of app.py.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import trio
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState, LifespanState
from hypercorn.utils import wrap_app
from quart_trio import QuartTrio

log = logging.getLogger(__name__)

GRACE_S = 3.0
# Above the 60 s of common load balancers, so that they never reuse what we just closed.
KEEP_ALIVE_S = 75.0
BACKLOG = 1024
# What is not taken yet waits with its sender, who then knows how far a long list has come.
RECEIVE_BUFFER_BYTES = 256 * 1024


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
        config = _config()
        app = wrap_app(self.make_app(lambda: self.is_ready), config.wsgi_max_body_size, "asgi")
        state: LifespanState = {}
        lifespan = Lifespan(app, config, state)
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as application:
                application.start_soon(lifespan.handle_lifespan)
                await lifespan.wait_for_startup()
                await self._listen(partial(_converse, app, config, state), stop, task_status)
                await lifespan.wait_for_shutdown()
                application.cancel_scope.cancel()

    async def _listen(
        self,
        converse: Callable[[WorkerContext, trio.SocketStream], Awaitable[None]],
        stop: trio.Event,
        task_status: trio.TaskStatus[int],
    ) -> None:
        """Takes connections until told to stop, then lets those that are busy finish."""
        context = WorkerContext(None)
        listeners = await trio.open_tcp_listeners(self.port, host=self.host, backlog=BACKLOG)
        for listener in listeners:  # Connections take it over.
            size = (trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
            listener.socket.setsockopt(*size)
        task_status.started(listeners[0].socket.getsockname()[1])
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                handler = partial(converse, context)
                accepting.start_soon(
                    partial(trio.serve_listeners, handler, listeners, handler_nursery=connections)
                )
                await stop.wait()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
            connections.cancel_scope.deadline = trio.current_time() + GRACE_S


async def _converse(
    app: AppWrapper,
    config: Config,
    state: LifespanState,
    context: WorkerContext,
    stream: trio.SocketStream,
) -> None:
    """One connection, whatever comes over it. It ends alone."""
    try:
        await TCPServer(app, config, context, ConnectionState(state.copy()), cast("Any", stream))
    except Exception as error:  # noqa: BLE001
        log.warning("connection ended badly", extra={"cause": repr(error)})
        await trio.aclose_forcefully(stream)


def _config() -> Config:
    config = Config()
    config.graceful_timeout = GRACE_S
    config.keep_alive_timeout = KEEP_ALIVE_S
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.include_server_header = False
    return config
