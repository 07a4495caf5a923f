"""The HTTP server as an actor: listens, and stops in a bounded time
(docs/api.md, Conventions).

The server and the actors of the worker have the same supervisor. If one of them crashes, the
supervisor handles it in one way, and no server continues to answer for a dead worker.

An error of a connection ends only that connection. For this reason this module has an
`except Exception`, besides the last handler of app.py.
"""

from __future__ import annotations

import logging
import re
import resource
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import trio

from conveyor.api.server import problem
from conveyor.domain.errors import InvalidArgument, Refused
from conveyor.http_server.connection import REFUSAL, Application, Listener, Receive, Send
from conveyor.http_server.exchange import USUAL_HEADS, Event, HeadLimits
from conveyor.telemetry import Metrics
from conveyor.usecases.context import Context

log = logging.getLogger(__name__)

# The time for requests in progress at shutdown. A larger value delays a restart. The gateway, whose
# calls take longer, has its own (cli/roles.py).
GRACE_S = 3.0
# Connections that the kernel accepts while the process is busy.
BACKLOG = 1024
# A small buffer keeps unread bytes at the sender, so that the sender's progress of a long list is
# close to the progress of the server.
RECEIVE_BUFFER_BYTES = 256 * 1024
# A connection costs about 20 KB. The process could not serve more than this many in time anyway.
CONNECTIONS_MAX = 10_000


class StartableApplication(Protocol):
    """An ASGI application, such as one of Quart, that prepares itself before the first request."""

    async def startup(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class HttpServer:
    """Serves until it is cancelled. Requests in progress then have `grace_s` to finish."""

    make_app: Callable[[Callable[[], bool]], StartableApplication]
    host: str
    port: int
    on_listening: Callable[[str], None]
    is_proxy: Callable[[str], bool] = lambda _: False
    connections_max: int | None = None
    head_limits: HeadLimits = USUAL_HEADS
    #: Sockets that listen already, instead of `host` and `port`.
    listeners: Sequence[trio.SocketListener] = ()
    grace_s: float = GRACE_S
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
        """Serves until `stop`. It is shielded, because cancellation must not cut off requests; the
        grace period bounds it.
        """
        app = self.make_app(lambda: self.is_ready)
        with trio.CancelScope(shield=True):
            await app.startup()
            listeners = self.listeners or await trio.open_tcp_listeners(
                self.port, host=self.host, backlog=BACKLOG
            )
            for tcp_listener in listeners:  # Accepted sockets inherit the option.
                size = (trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
                tcp_listener.socket.setsockopt(*size)
            listener = Listener(
                _logging_errors(cast("Application", app)),
                connections_max=self.connections_max or count_connections_max(),
                run_connection=_run_logged,
                is_proxy=self.is_proxy,
                head_limits=self.head_limits,
            )
            task_status.started(listeners[0].socket.getsockname()[1])
            await listener.serve(listeners, stop, grace_s=self.grace_s)


def count_connections_max() -> int:
    """Half of the descriptors of this process: fetches and the storage need the others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS_MAX if soft < 0 else max(8, min(CONNECTIONS_MAX, soft // 2))


def _logging_errors(app: Application) -> Application:
    """Logs an error that the application raises. The connection then answers 500."""

    async def application(scope: Event, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as error:
            log.exception("request failed outside its handler", exc_info=error)

    return application


async def _run_logged(work: Callable[[], Awaitable[None]]) -> None:
    try:
        await work()
    except Exception as error:  # noqa: BLE001
        log.warning("HTTP connection failed", extra={"cause": repr(error)})


# The guard in front of Quart answers requests that Quart must not get (docs/api.md, Conventions).
#
# Quart reads the Host header before any handler of the API runs, and an error there would close the
# connection without a response. The server also sends unreadable requests here, so that every
# refusal has the same form, log line and metric.


# A host name of labels with an optional final dot, or an IPv6 address in brackets; optional port.
# The empty value is valid HTTP.
_LABEL = rb"[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(
    rb"(?:" + _LABEL + rb"(?:\." + _LABEL + rb")*\.?|\[[0-9A-Fa-f:.]{2,45}\])?(?::[0-9]{1,5})?\Z"
)


def asgi_guard(inner: Application, env: Context, metrics: Metrics) -> Application:
    async def application(scope: Event, receive: Receive, send: Send) -> None:
        refusal = _find_refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await inner(scope, receive, send)
            return
        request_id = env.new_id()
        answered = problem.answer_for(refusal, request_id=request_id)
        status = str(answered.status)
        metrics.http_requests.labels("OTHER", "none", status).inc()
        fields = {"code": refusal.code, "status": answered.status, "request_id": request_id}
        log.info("request refused", extra=fields)
        await _send(send, answered, request_id=request_id)

    return application


def _find_refusal(scope: Event) -> Refused | None:
    refusal: Refused | None = scope.get(REFUSAL)
    if refusal is not None:
        return refusal
    hosts = [value for name, value in scope["headers"] if name.lower() == b"host"]
    is_addressed = bool(scope["path"]) and len(hosts) <= 1 and all(map(_HOST.match, hosts))
    return None if is_addressed else InvalidArgument("The Host header does not name a host.")


async def _send(send: Send, answered: problem.Answered, *, request_id: str) -> None:
    headers = {
        "Content-Type": problem.MEDIA_TYPE,
        "Content-Length": str(len(answered.content)),
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "X-Request-ID": request_id,
        **answered.headers,
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answered.status, "headers": encoded})
    await send({"type": "http.response.body", "body": answered.content, "more_body": False})
