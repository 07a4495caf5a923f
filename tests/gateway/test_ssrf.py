"""No page of a browser reaches an address that a plain fetch could not reach
(docs/gateway.md, SSRF).

A public site, which the test plays, has pages that try each way into the network that a page has,
at each form of a private address. Traps listen on every address of this machine, for TCP and UDP.
The control lets the same pages reach loopback, so that a way that no longer works is noticed.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import trio

from conveyor.domain.submit.target import TargetPolicy
from conveyor.gateway.browser.pool import BrowserPool
from conveyor.gateway.errors import CallFailed, Fault
from conveyor.gateway.guarding_proxy import GuardingProxy
from conveyor.http_client import resolver
from conveyor.http_client.stream import connect
from tests.gateway.browsers import a_rendering, running_pool
from tests.gateway.conftest import needs_chromium
from tests.gateway.ssrf_ways import (
    FEW_WAYS,
    HEADER_WAYS,
    HEADERS,
    HOSTS,
    NAVIGATIONS,
    NEVER,
    NOT_TAKEN,
    WAYS,
)

pytestmark = [pytest.mark.slow, needs_chromium]

PUBLIC = "93.184.216.34"
ADDRESSES = {
    "loopback.example": ["127.0.0.1"],
    "mixed.example": [PUBLIC, "127.0.0.1"],
    "six.example": ["::1"],
    "metadata.google.internal": ["169.254.169.254"],
}


@dataclass
class Traps:
    """Listens on every address of the machine. `paths` has what reached it over TCP."""

    port: int = 0
    paths: list[str] = field(default_factory=list)
    datagram_count: int = 0

    async def serve(self, stream: trio.SocketStream) -> None:
        with trio.move_on_after(1):
            head = await stream.receive_some(4096)
            self.paths.append(head.decode("latin-1").partition(" HTTP")[0])
            await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async def count_datagrams(self, opened: trio.socket.SocketType) -> None:
        while True:
            await opened.recv(2048)
            self.datagram_count += 1


@asynccontextmanager
async def set_traps() -> AsyncGenerator[Traps, None]:
    traps = Traps()
    listeners = await trio.open_tcp_listeners(0, host="0.0.0.0")
    traps.port = listeners[0].socket.getsockname()[1]
    if socket.has_dualstack_ipv6():
        listeners += await trio.open_tcp_listeners(traps.port, host="::1")
    datagrams = trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    await datagrams.bind(("0.0.0.0", traps.port))
    with datagrams:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, traps.serve, listeners)
            nursery.start_soon(traps.count_datagrams, datagrams)
            yield traps
            nursery.cancel_scope.cancel()


@dataclass
class World:
    """The public site, and all addresses to which the proxy connected."""

    traps: Traps
    pages: dict[str, bytes] = field(default_factory=dict)
    headers: tuple[str, ...] = ()
    connected: list[str] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    site_port: int = 0

    async def lookup(self, host: str) -> Sequence[str]:
        count = self.asked[host] = self.asked.get(host, 0) + 1
        if host == "rebinding.example":
            return [PUBLIC] if count == 1 else ["127.0.0.1"]
        if host.rstrip(".").endswith("localhost"):
            return ["127.0.0.1"]
        return ADDRESSES.get(host, [PUBLIC])

    async def connect(self, address: str, port: int) -> socket.socket:
        self.connected.append(address)
        if address == PUBLIC:
            return await connect("127.0.0.1", self.site_port)
        return await connect(address, port)

    async def serve(self, stream: trio.SocketStream) -> None:
        request = (await stream.receive_some(65536)).decode("latin-1").split(" ")[1]
        if request.startswith("/to?"):
            head, body = f"302 Found\r\nLocation: {request[4:]}", b""
        else:
            lines = ["200 OK", "Content-Type: text/html; charset=utf-8", *self.headers]
            head, body = "\r\n".join(lines), self.pages.get(request, b"")
        answer = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        await stream.send_all(answer + body)

    def policy(self, *, allow_private: bool) -> TargetPolicy:
        # Without the port, it would be refused for its port alone.
        return TargetPolicy(allow_private=allow_private, extra_ports=frozenset({self.traps.port}))


@asynccontextmanager
async def a_world(*, allow_private: bool) -> AsyncGenerator[tuple[World, BrowserPool], None]:
    async with set_traps() as traps, trio.open_nursery() as nursery:
        world = World(traps)
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        world.site_port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, world.serve, [listener])
        proxy = GuardingProxy(
            world.policy(allow_private=allow_private), lookup=world.lookup, connect=world.connect
        )
        async with running_pool(proxy) as pool:
            yield world, pool
        nursery.cancel_scope.cancel()


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((PUBLIC, 80))
        return str(probe.getsockname()[0])


def _page_for(host: str, port: int, ways: Sequence[str] = tuple(WAYS)) -> bytes:
    base = f"http://{host}:{port}"
    markup = [WAYS[name].format(u=f"{base}/{name}") for name in ways]
    return "".join([*markup, NEVER.format(u=f"{base}/never", p=port)]).encode()


def _batched(hosts: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(hosts), size):
        yield hosts[start : start + size]


def _headers_for(host: str, port: int) -> tuple[str, ...]:
    return tuple(line.format(u=f"http://{host}:{port}", p=port) for line in HEADERS)


async def test_every_way_reaches_loopback_where_it_is_allowed() -> None:
    """The control: the pages of the next tests do what they say."""
    async with a_world(allow_private=True) as (world, pool), trio.open_nursery() as nursery:
        world.headers = _headers_for("127.0.0.1", world.traps.port)
        world.pages["/"] = _page_for("127.0.0.1", world.traps.port)
        nursery.start_soon(pool.render, a_rendering("http://site.example/", {"wait": "30000"}))
        with trio.move_on_after(25):
            while _not_taken(world.traps.paths) - NOT_TAKEN:
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()

    assert _not_taken(world.traps.paths) <= NOT_TAKEN
    assert not [path for path in world.traps.paths if "/never" in path]
    assert world.traps.datagram_count == 0


def _not_taken(paths: Sequence[str]) -> set[str]:
    taken = {path.rpartition("/")[2].partition("?")[0] for path in paths}
    return (WAYS.keys() | HEADER_WAYS) - taken


async def test_no_way_reaches_a_private_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # Later connections resolve their names again, so that the second answer is used.
    monkeypatch.setattr(resolver, "CACHE_TTL_S", 0.05)
    with_all_ways = ("127.0.0.1", "rebinding.example", _own_address())
    async with a_world(allow_private=False) as (world, pool):
        for host in with_all_ways:
            world.headers = _headers_for(host, world.traps.port)
            world.pages[f"/{host}"] = _page_for(host, world.traps.port)
            pdf = {} if host == "127.0.0.1" else {"response_type": "pdf"}
            await pool.render(a_rendering(f"http://site.example/{host}", {"wait": "1500", **pdf}))
        world.headers = ()
        for number, hosts in enumerate(_batched(HOSTS, 9)):
            pages = [_page_for(host, world.traps.port, FEW_WAYS) for host in hosts]
            world.pages[f"/forms-{number}"] = b"".join(pages)
            url = f"http://site.example/forms-{number}"
            await pool.render(a_rendering(url, {"wait": "1000"}))

    assert len(with_all_ways) * len(WAYS) + len(HOSTS) * len(FEW_WAYS) >= 400
    assert world.traps.paths == []
    assert world.traps.datagram_count == 0
    assert set(world.connected) == {PUBLIC}
    assert world.asked["rebinding.example"] > 1


async def test_no_navigation_reaches_a_private_address() -> None:
    async with a_world(allow_private=False) as (world, pool):
        base = f"http://127.0.0.1:{world.traps.port}"
        for name, markup in NAVIGATIONS.items():
            world.pages[f"/{name}"] = markup.format(u=f"{base}/{name}").encode()
            await _render_or_fail(pool, f"http://site.example/{name}")
        world.pages["/refresh"], world.headers = b"<p>x", (f"Refresh: 0;url={base}/refresh",)
        await _render_or_fail(pool, "http://site.example/refresh")
        urls = (f"{base}/", f"http://site.example/to?{base}/", "http://loopback.example/")
        faults = [await _render_or_fail(pool, url) for url in urls]

    assert faults == [Fault.FORBIDDEN_TARGET] * 3
    assert world.traps.paths == []
    assert set(world.connected) == {PUBLIC}


async def _render_or_fail(pool: BrowserPool, url: str) -> Fault | None:
    try:
        await pool.render(a_rendering(url))
    except CallFailed as failed:
        return failed.fault
    return None
