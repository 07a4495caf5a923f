"""Fetches through HTTP, HTTPS and SOCKS5 proxies, which take turns (docs/scrape.md, Proxies).

Every connection is a tunnel, for http targets too, so a proxy never sees a request of an https
target. The proxy resolves the names: the pool gets a stand-in address for each name, and the
connector turns it back. A proxy that cannot be used is excluded for a time.
"""

from __future__ import annotations

import base64
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_address
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import msgspec
import trio

from conveyor.domain.budget import Price
from conveyor.domain.submit.target import Target, TargetPolicy
from conveyor.engines.http.direct import DirectGateway
from conveyor.http_client.connection_limits import PoolLimits
from conveyor.http_client.errors import ConnectFailed
from conveyor.http_client.pool import HttpPool
from conveyor.http_client.resolver import Resolver
from conveyor.http_client.stream import default_tls
from conveyor.ports.executor import Executor
from conveyor.ports.gateway import NotScraped, Outcome, PageProcessor, ScrapeRequest

SCHEMES = ("http", "https", "socks5")
# A proxy that failed is tried again after this time, doubled with each failure.
EXCLUDED_S = 15.0
EXCLUDED_S_MAX = 600.0
CONNECT_S = 10.0
_PORTS = {"http": 8080, "https": 443, "socks5": 1080}
_REPLY_BYTES_MAX = 16 * 1024
# Unique local IPv6 addresses that no host has.
_STANDIN = "fd63:6f6e:7665:796f::"


class BadProxy(ValueError):
    """The text is not the URL of a proxy."""


class Proxy(msgspec.Struct, frozen=True):
    scheme: str
    host: str
    port: int
    user: str | None = None
    password: str = ""

    @property
    def name(self) -> str:
        """Without the credentials."""
        return f"{self.scheme}://{self.host}:{self.port}"


def parse_proxy(text: str) -> Proxy:
    """Reads a URL such as `socks5://user:password@host:1080`. Raises BadProxy."""
    text = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(text)
        scheme = {"socks5h": "socks5"}.get(parts.scheme, parts.scheme)
        if scheme not in SCHEMES or not parts.hostname or parts.path.strip("/"):
            raise ValueError
        user = None if parts.username is None else unquote(parts.username)
        port = parts.port or _PORTS[scheme]
    except ValueError:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise BadProxy(f"a proxy is {known}HOST:PORT, with USER:PASSWORD@ before HOST") from None
    return Proxy(scheme, parts.hostname, port, user, unquote(parts.password or ""))


class _ProxyPolicy(TargetPolicy, frozen=True):
    """Stand-in addresses are never connected to, so the policy has nothing to say about them."""

    def forbids_address(self, address: str) -> str | None:
        return None if address.startswith(_STANDIN) else super().forbids_address(address)


class ProxyConnector:
    """Opens tunnels through one proxy, and knows whether the proxy works."""

    def __init__(self, proxy: Proxy, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is for an https:// proxy."""
        self.proxy = proxy
        self._tls = (tls or default_tls()) if proxy.scheme == "https" else None
        self.failures = 0
        self.bad_until = 0.0
        self._names: dict[str, str] = {}
        self._standins: dict[str, str] = {}

    async def lookup(self, host: str) -> Sequence[str]:
        standin = self._standins.get(host)
        if standin is None:
            standin = self._standins[host] = f"{_STANDIN}{len(self._standins) + 1:x}"
            self._names[standin] = host
        return [standin]

    async def connect(self, address: str, port: int) -> socket.socket:
        try:
            with trio.fail_after(CONNECT_S):
                stream = await self._open()
        except (OSError, trio.TooSlowError, ssl.SSLError, trio.BrokenResourceError) as error:
            raise self._record_failure("cannot be reached") from error
        try:
            with trio.fail_after(CONNECT_S):
                await self._tunnel(stream, self._names.get(address, address), port)
        except (trio.TooSlowError, trio.BrokenResourceError) as error:
            await trio.aclose_forcefully(stream)
            raise self._record_failure("does not answer") from error
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        self.failures = 0
        self.bad_until = 0.0
        return await self._plain_socket(stream)

    def _record_failure(self, what: str) -> ConnectFailed:
        seconds = min(EXCLUDED_S * 2.0 ** min(self.failures, 16), EXCLUDED_S_MAX)
        self.failures += 1
        self.bad_until = trio.current_time() + seconds
        return ConnectFailed(f"the proxy {self.proxy.name} {what}")

    async def _open(self) -> trio.abc.Stream:
        stream = await trio.open_tcp_stream(self.proxy.host, self.proxy.port)
        if self._tls is None:
            return stream
        tls = trio.SSLStream(
            stream, self._tls, server_hostname=self.proxy.host, https_compatible=True
        )
        try:
            await tls.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return tls

    async def _tunnel(self, stream: trio.abc.Stream, host: str, port: int) -> None:
        if self.proxy.scheme == "socks5":
            await self._socks5(stream, host, port)
        else:
            await self._http_connect(stream, host, port)

    async def _http_connect(self, stream: trio.abc.Stream, host: str, port: int) -> None:
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        head = f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n"
        if self.proxy.user is not None:
            pair = f"{self.proxy.user}:{self.proxy.password}".encode()
            head += f"Proxy-Authorization: Basic {base64.b64encode(pair).decode()}\r\n"
        await stream.send_all(f"{head}\r\n".encode())
        reply = b""
        # Byte by byte: what follows the head belongs to the tunnel.
        while not reply.endswith(b"\r\n\r\n"):
            piece = await stream.receive_some(1)
            if not piece or len(reply) > _REPLY_BYTES_MAX:
                raise self._record_failure("closed the connection")
            reply += piece
        status = reply.split(b" ", 2)[1][:3] if b" " in reply else b""
        if status == b"407":
            raise self._record_failure("refuses the credentials")
        if not status.startswith(b"2"):
            # The proxy works, and could not reach the target.
            raise ConnectFailed("the proxy could not connect to the target")

    async def _socks5(self, stream: trio.abc.Stream, host: str, port: int) -> None:
        has_user = self.proxy.user is not None
        await stream.send_all(b"\x05\x01" + (b"\x02" if has_user else b"\x00"))
        version, method = await self._exactly(stream, 2)
        if version != 5 or method not in {0, 2}:
            raise self._record_failure(
                "refuses the credentials" if version == 5 else "is no SOCKS5 proxy"
            )
        if method == 2:
            user, password = (self.proxy.user or "").encode(), self.proxy.password.encode()
            login = bytes([1, len(user)]) + user + bytes([len(password)]) + password
            await stream.send_all(login)
            if (await self._exactly(stream, 2))[1] != 0:
                raise self._record_failure("refuses the credentials")
        await stream.send_all(b"\x05\x01\x00" + _socks_address(host) + port.to_bytes(2))
        _, reply, _, kind = await self._exactly(stream, 4)
        length = {1: 4, 4: 16}.get(kind) or (await self._exactly(stream, 1))[0]
        await self._exactly(stream, length + 2)
        if reply != 0:
            raise ConnectFailed("the proxy could not connect to the target")

    async def _exactly(self, stream: trio.abc.Stream, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = await stream.receive_some(count - len(data))
            if not piece:
                raise self._record_failure("closed the connection")
            data += piece
        return data

    async def _plain_socket(self, stream: trio.abc.Stream) -> socket.socket:
        """The pool needs a socket. For TLS to the proxy, one end of a pair takes its place, and two
        tasks copy the bytes."""
        if isinstance(stream, trio.SocketStream):
            return socket.socket(fileno=stream.socket.detach())
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        relay = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        trio.lowlevel.spawn_system_task(_relay, relay, stream)
        return theirs


def _socks_address(host: str) -> bytes:
    try:
        address = ip_address(host)
    except ValueError:
        name = host.encode()
        return bytes([3, len(name)]) + name
    return bytes([1 if address.version == 4 else 4]) + address.packed


async def _relay(near: trio.abc.Stream, far: trio.abc.Stream) -> None:
    async def copy(source: trio.abc.Stream, to: trio.abc.Stream, scope: trio.CancelScope) -> None:
        try:
            while data := await source.receive_some(64 * 1024):
                await to.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # One side has closed the tunnel.
        scope.cancel()

    # Both are closed even if this task is cancelled, as it is at the end of the event loop.
    async with near, far, trio.open_nursery() as nursery:
        nursery.start_soon(copy, near, far, nursery.cancel_scope)
        nursery.start_soon(copy, far, near, nursery.cancel_scope)


class ProxiedGateway(msgspec.Struct, frozen=True):
    """A gateway and the proxy that all its connections pass."""

    gateway: DirectGateway
    connector: ProxyConnector


class Connections(msgspec.Struct, frozen=True):
    """What the connections through all proxies have in common."""

    policy: TargetPolicy
    limits: PoolLimits
    tls: ssl.SSLContext | None
    executor: Executor


class ProxyRoute:
    """The way through one proxy: a pool for plain fetches, and connections for a browser. Both are
    checked like direct ones, except that the proxy resolves the names."""

    def __init__(self, connector: ProxyConnector, pool: HttpPool, policy: TargetPolicy) -> None:
        self.connector = connector
        self.pool = pool
        self._resolver = Resolver(policy, connector.lookup)

    @property
    def bad_until(self) -> float:
        return self.connector.bad_until

    async def dial(self, target: Target, partition: str) -> trio.SocketStream:
        """Raises FetchFailed."""
        address = (await self._resolver.resolve(target, partition))[0]
        connected = await self.connector.connect(address, target.port)
        return trio.SocketStream(trio.socket.from_stdlib_socket(connected))


@contextmanager
def open_route(proxy: Proxy, connections: Connections) -> Iterator[ProxyRoute]:
    connector = ProxyConnector(proxy, connections.tls)
    base = connections.policy
    policy = _ProxyPolicy(base.allow_private, base.extra_ports, base.denied_hosts)
    pool = HttpPool(
        policy,
        connections.limits,
        lookup=connector.lookup,
        tls=connections.tls,
        connect=connector.connect,
        executor=connections.executor,
    )
    try:
        yield ProxyRoute(connector, pool, policy)
    finally:
        pool.close()


@contextmanager
def proxied_gateway(
    proxy: Proxy,
    connections: Connections,
    *,
    now: Callable[[], float],
    processor: PageProcessor | None = None,
) -> Iterator[ProxiedGateway]:
    with open_route(proxy, connections) as route:
        gateway = DirectGateway(route.pool, now=now, processor=processor)
        yield ProxiedGateway(gateway, route.connector)


class RotatingGateway:
    """Sends each request through the next proxy that works.

    A request that fails because of its proxy is sent through another one. If none works, the
    request fails with `proxy_failed`.
    """

    _TRANSPORT: ClassVar[frozenset[str]] = frozenset({"connect_failed", "timeout"})

    def __init__(self, proxied: Sequence[ProxiedGateway]) -> None:
        self._proxied = list(proxied)
        self._next = 0

    def price(self, params: Mapping[str, str]) -> Price:
        return Price()

    async def scrape(self, request: ScrapeRequest) -> Outcome:
        outcome: Outcome | None = None
        for _ in self._proxied:
            chosen = self._choose()
            outcome = await chosen.gateway.scrape(request)
            if not self._is_proxys_fault(outcome, chosen):
                return outcome
        assert isinstance(outcome, NotScraped)
        problem = msgspec.structs.replace(outcome.problem, code="proxy_failed")
        return msgspec.structs.replace(outcome, problem=problem)

    def _choose(self) -> ProxiedGateway:
        now = trio.current_time()
        for _ in self._proxied:
            chosen = self._proxied[self._next % len(self._proxied)]
            self._next += 1
            if chosen.connector.bad_until <= now:
                return chosen
        return min(self._proxied, key=lambda proxied: proxied.connector.bad_until)

    def _is_proxys_fault(self, outcome: Outcome, chosen: ProxiedGateway) -> bool:
        return (
            isinstance(outcome, NotScraped)
            and outcome.problem.code in self._TRANSPORT
            and chosen.connector.bad_until > trio.current_time()
        )
