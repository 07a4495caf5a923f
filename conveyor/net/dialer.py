"""Opens connections: resolve and check, then try the addresses in order, then TLS by name."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Awaitable, Callable

import trio

from conveyor.domain.urls import Target
from conveyor.net.errors import ConnectFailed, TimedOut
from conveyor.net.resolver import Resolver
from conveyor.net.tls import TlsWire
from conveyor.net.wire import Wire, connect

Connect = Callable[[str, int], Awaitable[socket.socket]]

ATTEMPTS_MAX = 4
SESSIONS_MAX = 1024


def default_tls() -> ssl.SSLContext:
    """Verified names and certificates, HTTP/1.1 only."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


class Dialer:
    """Owns the TLS sessions to resume; knows nothing of pools."""

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
        self._sessions: dict[tuple[str, str, int], ssl.SSLSession] = {}

    async def dial(self, target: Target, timeout_s: float | None = None) -> Wire | TlsWire:
        addresses = await self._resolver.resolve(target)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        failure: ConnectFailed | TimedOut | None = None
        for address in addresses[:ATTEMPTS_MAX]:
            try:
                with trio.fail_after(timeout_s):
                    return await self._open(target, address)
            except trio.TooSlowError:
                failure = TimedOut("the connection took too long")
            except ConnectFailed as error:
                failure = error
        assert failure is not None
        raise failure

    def remember(self, target: Target, wire: Wire | TlsWire) -> None:
        """Keep the session of a connection that answered: TLS 1.3 hands it out that late."""
        session = wire.session if isinstance(wire, TlsWire) else None
        if session is None:
            return
        self._sessions.pop(target.origin, None)
        if len(self._sessions) >= SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[target.origin] = session

    async def _open(self, target: Target, address: str) -> Wire | TlsWire:
        wire = Wire(await self._connect(address, target.port))
        if not target.is_tls:
            return wire
        try:
            # Loading the authorities' certificates takes 35 ms: only who goes there pays for it.
            self._tls = self._tls or default_tls()
            session = self._sessions.get(target.origin)
            inside = TlsWire(wire, self._tls, target.host, session)
            await inside.start()
        except BaseException:
            wire.close()
            raise
        return inside
