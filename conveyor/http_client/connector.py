"""Opens connections: resolve and check, then try the addresses in order, then TLS by name."""

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

ATTEMPTS_MAX = 4
SESSIONS_MAX = 1024


def default_tls() -> ssl.SSLContext:
    """Verified names and certificates, HTTP/1.1 only."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Dialer:
    """Owns the TLS sessions to resume; knows nothing of pools.

    A session is resumed for the caller that it was made for, and for no other: a site would learn
    that the two share a machine, and might answer the one as it knows the other.
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
        """Keep the session of a connection that answered: TLS 1.3 hands it out that late."""
        session = wire.session if isinstance(wire, TlsStream) else None
        if session is None:
            return
        key = (partition, target.origin)
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
                check_descriptors()  # Certificates that cannot be read are not trusted either.
            raise
        except BaseException:
            wire.close()
            raise
        return inside

    def _context(self) -> ssl.SSLContext:
        """Loading the authorities' certificates takes 35 ms: it is done for the first https
        target. Without a free descriptor they could not be read, and no certificate would be
        trusted for as long as the process lives."""
        if self._tls is None:
            check_descriptors()
            self._tls = default_tls()
        return self._tls
