"""A connection: serves the requests of one client in turn, with a deadline in every state
(docs/api.md, Conventions).

    state                          ends after
    before the first byte          FIRST_BYTE_S
    between two requests           KEEP_ALIVE_S
    head not complete              HEAD_S, with 408
    body not complete              the deadline of the application (api/server/request_body.py)
    response not received          WRITE_S and a minimum rate (exchange.py)
    refused, or body unread        DRAIN_S

The listener can end a connection that waits for a request at any time: when the server stops, or to
make room for another connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from conveyor.domain.errors import Refused
from conveyor.http_server.exchange import READ_BYTES, Event, Exchange, make_scope
from conveyor.http_server.head import END, Head, check_unfinished, parse_head

# Longer than the 60 s of common load balancers. With a smaller value, a load balancer could send a
# request on a connection that this server has just closed.
KEEP_ALIVE_S = 75.0
# Clients that connect in advance use the connection soon, or open another. A larger value lets a
# client without requests hold descriptors for longer.
FIRST_BYTE_S = 20.0
# A head is a few packets. A larger value lets a client that sends one byte at a time hold a
# connection for longer.
HEAD_S = 10.0
# The time for which the server reads and discards after its last response. If it closed the socket
# with unread data, the kernel would send a reset, and a client that sends before it reads would
# lose the response.
DRAIN_S = 5.0
# Bounds the discarded bytes within DRAIN_S.
LINGER_BYTES_MAX = 256 * 1024 * 1024

# The key of the ASGI scope under which the application finds the refusal of an unreadable request.
REFUSAL = "conveyor.refusal"

# Stands for the request that could not be read, so that the application can write the refusal.
_NOTHING = Head("GET", b"/", b"", 1, (), 0, expects_continue=False, wants_close=True)

Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Event, Receive, Send], Awaitable[None]]


class HeadTooSlow(Refused):
    status = 408
    code = "request_timeout"
    title = "Request timeout"


class InternalError(Refused):
    """The application ended without a response."""

    status = 500
    code = "internal"
    title = "Internal error"


class Connection:
    """One connection. It calls `on_wait` when it starts to wait for a request and `on_work` when it
    has one: the listener may end it only in between.
    """

    def __init__(
        self,
        stream: trio.SocketStream,
        app: Application,
        *,
        is_stopping: Callable[[], bool],
        on_wait: Callable[[Connection], None] = lambda _: None,
        on_work: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        self._stream = stream
        self._app = app
        self._is_stopping = is_stopping
        self._on_wait = on_wait
        self._on_work = on_work
        self._buffer = bytearray()
        self._waiting = trio.CancelScope()
        self._is_dismissed = False
        self._client = _address_of(stream.socket.getpeername())
        self._server = _address_of(stream.socket.getsockname())

    @property
    def client_address(self) -> str:
        return self._client[0]

    def dismiss(self) -> None:
        """Ends a connection that waits for a request."""
        self._is_dismissed = True
        self._waiting.cancel()

    async def run(self) -> None:
        try:
            deadline_s = FIRST_BYTE_S
            while await self._serve_next(deadline_s):
                deadline_s = KEEP_ALIVE_S
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # The client closed the connection. No response can reach it.
        finally:
            await trio.aclose_forcefully(self._stream)

    async def refuse(self, refusal: Refused) -> None:
        """Sends a refusal without reading a request, then closes the connection."""
        try:
            await self._refuse(refusal)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            await trio.aclose_forcefully(self._stream)

    async def abort(self) -> None:
        await trio.aclose_forcefully(self._stream)

    async def _serve_next(self, deadline_s: float) -> bool:
        """Serves one request. Returns whether the connection can serve another one."""
        try:
            head = await self._read_head(deadline_s)
        except Refused as refusal:
            await self._refuse(refusal)
            return False
        if head is None:
            return False
        exchange = Exchange(self._stream, head, self._buffer, is_stopping=self._is_stopping)
        with exchange.scope:
            scope = exchange.make_scope(self._client, self._server)
            await self._app(scope, exchange.receive, exchange.send)
        if exchange.is_client_gone or (exchange.has_begun and not exchange.is_complete):
            return False
        if not exchange.has_begun:
            failed = InternalError("Something went wrong on our side.")
            await self._refuse(exchange.refusal or failed)
            return False
        if not exchange.keeps_alive:
            await self._linger()
        return exchange.keeps_alive

    async def _read_head(self, deadline_s: float) -> Head | None:
        """Returns the head of the next request, or None if client or server ends the connection."""
        # Make the scope first: `on_wait` can call `dismiss`, which cancels it.
        self._waiting = trio.CancelScope(deadline=trio.current_time() + deadline_s)
        self._on_wait(self)
        if self._is_stopping() or self._is_dismissed:
            return None
        with self._waiting:
            if not self._buffer:
                self._buffer += await self._stream.receive_some(READ_BYTES)
                if not self._buffer:
                    return None
            self._waiting.deadline = trio.current_time() + HEAD_S
            # Check before each read, so that a malformed head is refused without a wait for its
            # end.
            while (end := self._buffer.find(END)) < 0:
                check_unfinished(self._buffer)
                data = await self._stream.receive_some(READ_BYTES)
                if not data:
                    return None
                self._buffer += data
            self._on_work(self)
            head = parse_head(bytes(self._buffer[:end]))
            del self._buffer[: end + len(END)]
            return head
        # The scope was cancelled. Without a byte, the client has no request to be answered.
        if self._buffer and not self._is_dismissed:
            raise HeadTooSlow("The head of the request did not arrive in time.")
        return None

    async def _refuse(self, refusal: Refused) -> None:
        self._on_work(self)
        exchange = Exchange(self._stream, _NOTHING, self._buffer, is_stopping=lambda: True)
        with exchange.scope:
            scope = make_scope(_NOTHING, self._client, self._server)
            scope[REFUSAL] = refusal
            await self._app(scope, exchange.receive, exchange.send)
        if exchange.is_complete:
            await self._linger()

    async def _linger(self) -> None:
        """Closes the sending side and discards the bytes that the client still sends."""
        left = LINGER_BYTES_MAX
        self._waiting = trio.CancelScope(deadline=trio.current_time() + DRAIN_S)
        self._on_wait(self)
        with self._waiting:
            await self._stream.send_eof()
            while left > 0 and (data := await self._stream.receive_some(READ_BYTES)):
                left -= len(data)


def _address_of(name: tuple[str, int] | tuple[str, int, int, int]) -> tuple[str, int]:
    host, port = name[:2]
    # A dual-stack socket shows an IPv4 client as ::ffff:a.b.c.d. Quotas must count it as a.b.c.d.
    return host.removeprefix("::ffff:"), port
