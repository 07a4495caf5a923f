"""Connections: accepts them, limits their number, and serves the requests of each one in turn
(docs/api.md, Conventions).

A connection has a deadline in every state:

    state                          ends after
    before the first byte          FIRST_BYTE_S
    between two requests           KEEP_ALIVE_S
    head not complete              HEAD_S, with 408
    body not complete              the deadline of the application (api/server/request.py)
    response not received          WRITE_S and a minimum rate (exchange.py)
    refused, or body unread        DRAIN_S

The listener can end a connection that waits for a request at any time: when the server stops, or to
make room for another connection.

Each connection uses a file descriptor. Fetches and the storage need descriptors too, so incoming
connections get only a part of the descriptors of the process. When that part is used up, the
listener closes a connection that waits for its next request. If every connection is busy, it
answers the new one with 503. In both cases it continues to accept: a full backlog would also block
the health check.

One address may have half of all connections, so that one client cannot use all of them. Loopback
addresses and trusted proxies, which carry many clients, are exempt from this limit.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice

import trio

from conveyor.domain.errors import Refused
from conveyor.http_server.exchange import (
    END,
    READ_BYTES,
    USUAL_HEADS,
    Event,
    Exchange,
    Head,
    HeadLimits,
    check_unfinished,
    make_scope,
    parse_head,
)

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
        head_limits: HeadLimits = USUAL_HEADS,
        on_wait: Callable[[Connection], None] = lambda _: None,
        on_work: Callable[[Connection], None] = lambda _: None,
    ) -> None:
        self._stream = stream
        self._app = app
        self._is_stopping = is_stopping
        self._head_limits = head_limits
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
            failed = InternalError("The server failed before it sent a response.")
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
                check_unfinished(self._buffer, self._head_limits)
                data = await self._stream.receive_some(READ_BYTES)
                if not data:
                    return None
                self._buffer += data
            self._on_work(self)
            head = parse_head(bytes(self._buffer[:end]), self._head_limits)
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


log = logging.getLogger(__name__)

# The pause after a failed accept. Without it the loop would use a whole CPU until a descriptor is
# free; a longer pause would delay clients noticeably.
_ACCEPT_PAUSE_S = 0.1
# At most one warning in this time: a shortage can fail thousands of accepts.
_WARNING_PERIOD_S = 60.0
# Refusals in progress at the same time. Further connections are closed without a response, because
# each refusal holds a descriptor until the client has read it.
_REFUSALS_MAX = 32
# The number of longest-waiting connections among which one to close is chosen. A larger value makes
# each accept of a full server slower.
_CANDIDATES = 64


class TooManyConnections(Refused):
    status = 503
    code = "too_many_connections"
    title = "Too many connections"


class Listener:
    """Accepts connections. `run_connection` runs one to its end and raises none of its errors."""

    def __init__(
        self,
        app: Application,
        *,
        connections_max: int,
        run_connection: Callable[[Callable[[], Awaitable[None]]], Awaitable[None]],
        is_proxy: Callable[[str], bool] = lambda _: False,
        head_limits: HeadLimits = USUAL_HEADS,
    ) -> None:
        assert connections_max > 0
        self._app = app
        self._connections_max = connections_max
        self._address_max = max(1, connections_max // 2)
        self._run_connection = run_connection
        self._is_proxy = is_proxy
        self._head_limits = head_limits
        self._open: set[Connection] = set()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._by_address: Counter[str] = Counter()
        self._refusal_count = 0
        self._is_stopping = False
        self._warned_at = -_WARNING_PERIOD_S

    async def serve(
        self, listeners: Sequence[trio.SocketListener], stop: trio.Event, *, grace_s: float
    ) -> None:
        """Accepts until `stop`. Requests in progress then have `grace_s` seconds to end."""
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                for listener in listeners:
                    accepting.start_soon(self._accept, listener, connections)
                await stop.wait()
                accepting.cancel_scope.cancel()
            # Set the flag before the waiting connections are dismissed: a connection that starts
            # to wait from now on dismisses itself (`_note_waiting`).
            self._is_stopping = True
            for listener in listeners:
                await trio.aclose_forcefully(listener)
            for connection in list(self._waiting):
                connection.dismiss()
            connections.cancel_scope.deadline = trio.current_time() + grace_s

    async def _accept(self, listener: trio.SocketListener, connections: trio.Nursery) -> None:
        while True:
            try:
                socket, _ = await listener.socket.accept()
                connection = self._connect(trio.SocketStream(socket))
            except OSError as error:
                # Other errors, such as ENOTCONN: the client left before it was accepted.
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                    self._warn(error)
                    await trio.sleep(_ACCEPT_PAUSE_S)
                else:
                    await trio.lowlevel.checkpoint()
                continue
            self._admit(connection, connections)

    def _connect(self, stream: trio.SocketStream) -> Connection:
        try:
            return Connection(
                stream,
                self._app,
                is_stopping=lambda: self._is_stopping,
                head_limits=self._head_limits,
                on_wait=self._note_waiting,
                on_work=self._note_working,
            )
        except OSError:
            stream.socket.close()
            raise

    def _admit(self, connection: Connection, connections: trio.Nursery) -> None:
        refusal = self._find_refusal(connection)
        if refusal is None:
            self._open.add(connection)
            self._by_address[_network_of(connection.client_address)] += 1
            connections.start_soon(self._converse, connection)
        else:
            connections.start_soon(self._refuse, connection, refusal)

    def _find_refusal(self, connection: Connection) -> Refused | None:
        """Returns why this connection is refused, or None. It may close another one for it."""
        address = connection.client_address
        if (
            self._by_address[_network_of(address)] >= self._address_max
            and not ipaddress.ip_address(address.partition("%")[0]).is_loopback
            and not self._is_proxy(address)
        ):
            return TooManyConnections("This address has too many connections.", retry_after_s=5)
        if len(self._open) >= self._connections_max and not self._make_room():
            return TooManyConnections("Every connection is in use.", retry_after_s=5)
        return None

    def _make_room(self) -> bool:
        """Closes one of the longest-waiting connections, of the address that has the most."""
        candidates = list(islice(self._waiting, _CANDIDATES))
        if not candidates:
            return False
        chosen = max(candidates, key=self._count_of_same_address)
        # Forget it now: its task ends later, but its place must count as free at once.
        self._forget(chosen)
        chosen.dismiss()
        return True

    def _count_of_same_address(self, connection: Connection) -> int:
        return self._by_address[_network_of(connection.client_address)]

    async def _converse(self, connection: Connection) -> None:
        try:
            await self._run_connection(connection.run)
        finally:
            self._forget(connection)

    async def _refuse(self, connection: Connection, refusal: Refused) -> None:
        has_response = self._refusal_count < _REFUSALS_MAX
        self._refusal_count += 1
        try:
            work = partial(connection.refuse, refusal) if has_response else connection.abort
            await self._run_connection(work)
        finally:
            self._refusal_count -= 1

    def _note_waiting(self, connection: Connection) -> None:
        if connection in self._open:
            self._waiting[connection] = None
        if self._is_stopping:
            connection.dismiss()

    def _note_working(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def _forget(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        if connection in self._open:
            self._open.remove(connection)
            network = _network_of(connection.client_address)
            self._by_address[network] -= 1
            if not self._by_address[network]:
                del self._by_address[network]

    def _warn(self, error: OSError) -> None:
        now = trio.current_time()
        if now - self._warned_at >= _WARNING_PERIOD_S:
            self._warned_at = now
            fields = {"cause": error.strerror, "connections": len(self._open)}
            log.warning("no connection can be accepted", extra=fields)


def _network_of(address: str) -> str:
    """An IPv6 client has a /64 network of addresses, which counts as one address."""
    if ":" not in address:
        return address
    host = address.partition("%")[0]
    return str(ipaddress.ip_network(f"{host}/64", strict=False).network_address)
