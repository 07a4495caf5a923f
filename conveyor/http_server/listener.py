"""The listener: accepts connections and limits how many there are (docs/api.md, Conventions).

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
from conveyor.http_server.connection import Application, Connection

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
    ) -> None:
        assert connections_max > 0
        self._app = app
        self._connections_max = connections_max
        self._address_max = max(1, connections_max // 2)
        self._run_connection = run_connection
        self._is_proxy = is_proxy
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
            connections.start_soon(self._turn_away, connection, refusal)

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

    async def _turn_away(self, connection: Connection, refusal: Refused) -> None:
        is_told = self._refusal_count < _REFUSALS_MAX
        self._refusal_count += 1
        try:
            work = partial(connection.refuse, refusal) if is_told else connection.abort
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
