"""Opens connections: resolves and checks the name, tries the addresses in order, starts TLS.

The connection goes to an address, never to a name: a name would be resolved a second time, without
the check. TLS verifies the certificate against the host name.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable

import trio

from conveyor.domain.submit.url import Target
from conveyor.http_client.connection_limits import OriginKey
from conveyor.http_client.errors import (
    ConnectFailed,
    ConnectTimedOut,
    TimedOut,
    TlsFailed,
    check_descriptors,
)
from conveyor.http_client.resolver import Resolver
from conveyor.http_client.stream import TcpStream, TlsStream, connect

Connect = Callable[[str, int], Awaitable[socket.socket]]

# Addresses to try for one connection. Each attempt can take the whole connect timeout, so a larger
# value lets a dead host use up the deadline of the fetch; with 1, one dead address loses the host.
ATTEMPTS_MAX = 4
# Bounds the memory. When it is full, the oldest session is dropped and costs a full handshake.
SESSIONS_MAX = 1024


def default_tls() -> ssl.SSLContext:
    """A context that verifies certificates and host names and offers HTTP/1.1 only."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Dialer:
    """Owns the TLS sessions to resume. It does not know the pool.

    A session is resumed only for the caller that it was made for. With a shared session, a site
    would learn that two callers share a machine, and could treat one as the other.
    """

    def __init__(
        self,
        resolver: Resolver,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
        connect: Connect = connect,
    ) -> None:
        self._resolver = resolver
        self._connect = connect
        self._tls = tls
        self._timeout_s = connect_timeout_s
        self._sessions: dict[OriginKey, ssl.SSLSession] = {}

    async def dial(
        self, target: Target, partition: str, timeout_s: float | None = None
    ) -> TcpStream | TlsStream:
        addresses = await self._resolver.resolve(target, partition)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        failure: ConnectFailed | TimedOut | None = None
        for address in addresses[:ATTEMPTS_MAX]:
            try:
                with trio.fail_after(timeout_s):
                    return await self._open(target, partition, address)
            except trio.TooSlowError:
                failure = ConnectTimedOut("the connection took too long")
            except ConnectFailed as error:
                failure = error
        assert failure is not None
        raise failure

    def remember(self, target: Target, partition: str, wire: TcpStream | TlsStream) -> None:
        """Stores the TLS session of a connection that has delivered a response.

        In TLS 1.3 the server sends the session ticket after the handshake, so it is not available
        earlier.
        """
        session = wire.session if isinstance(wire, TlsStream) else None
        if session is None:
            return
        key = (partition, target.origin)
        # Remove and insert again, so that the order of the dict is the order of use.
        self._sessions.pop(key, None)
        if len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[key] = session

    async def _open(self, target: Target, partition: str, address: str) -> TcpStream | TlsStream:
        wire = TcpStream(await self._connect(address, target.port))
        if not target.is_tls:
            return wire
        try:
            session = self._sessions.get((partition, target.origin))
            inside = TlsStream(wire, self._context(), target.host, session)
            await inside.start()
        except TlsFailed as error:
            wire.close()
            if error.is_untrusted:
                check_descriptors()  # OpenSSL also reports this when it cannot open a file.
            raise
        except BaseException:
            wire.close()
            raise
        return inside

    def _context(self) -> ssl.SSLContext:
        """Loads the certificates of the authorities for the first https target: it takes 35 ms.

        Without a free descriptor they cannot be read, and this process would trust no certificate
        until it ends. The check comes first for this reason.
        """
        if self._tls is None:
            check_descriptors()
            self._tls = default_tls()
        return self._tls
