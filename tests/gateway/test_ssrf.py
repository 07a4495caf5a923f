"""No page of a browser reaches an address that a plain fetch could not reach
(docs/gateway.md, SSRF).

A public site, which the test plays, has pages that try each way into the network that a page has,
at each form of a private address. Traps listen on every address of this machine, for TCP and UDP.
The control lets the same pages reach loopback, so that a way that no longer works is noticed.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Sequence
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

pytestmark = [pytest.mark.slow, needs_chromium]

PUBLIC = "93.184.216.34"
# The ways into the network that need no navigation; {u} is the trap and a path that names the way.
WAYS = {
    "img": '<img src="{u}">',
    "picture": '<picture><source srcset="{u}"><img></picture>',
    "script": '<script src="{u}"></script>',
    "module": '<script type="module">import("{u}").catch(() => 0)</script>',
    "stylesheet": '<link rel="stylesheet" href="{u}">',
    "css_import": '<style>@import url("{u}");</style>',
    "css_image": '<div style="background:url({u})">x</div>',
    "font": "<style>@font-face{{font-family:f;src:url({u})}}i{{font-family:f}}</style><i>x</i>",
    "iframe": '<iframe src="{u}"></iframe>',
    "srcdoc": '<iframe srcdoc="<img src={u}>"></iframe>',
    "object": '<object data="{u}"></object>',
    "embed": '<embed src="{u}">',
    "video": '<video src="{u}" autoplay></video>',
    "audio": '<audio src="{u}" autoplay></audio>',
    "preload": '<link rel="preload" as="image" href="{u}">',
    "svg": '<svg><image href="{u}"/></svg>',
    "icon": '<link rel="icon" href="{u}">',
    "fetch": '<script>fetch("{u}").catch(() => 0)</script>',
    "post": '<script>fetch("{u}", {{method: "POST", mode: "no-cors", body: "x"}}).catch(() => 0)'
    "</script>",
    "xhr": '<script>x = new XMLHttpRequest(); x.open("GET", "{u}"); x.send()</script>',
    "beacon": '<script>navigator.sendBeacon("{u}", "x")</script>',
    "events": '<script>new EventSource("{u}")</script>',
    "websocket": '<script>new WebSocket("{u}".replace("http", "ws"))</script>',
    "worker": "<script>new Worker(URL.createObjectURL(new Blob("
    "['fetch(\"{u}\").catch(() => 0)'])))</script>",
    "shared_worker": "<script>new SharedWorker(URL.createObjectURL(new Blob("
    "['fetch(\"{u}\").catch(() => 0)'])))</script>",
    "redirect": '<img src="/to?{u}">',
    "fetch_redirect": '<script>fetch("/to?{u}", {{mode: "no-cors"}}).catch(() => 0)</script>',
    "frame_redirect": '<iframe src="/to?{u}"></iframe>',
    "form_in_frame": '<iframe name="f"></iframe><form target="f" action="{u}" id="g"></form>'
    "<script>g.submit()</script>",
}
# These must reach nothing under any policy: they would not pass the proxy.
NEVER = """<script>
navigator.serviceWorker?.register('/worker.js').catch(() => 0);
try {{
    peer = new RTCPeerConnection({{iceServers: [{{urls: 'stun:127.0.0.1:{p}'}},
        {{urls: 'turn:127.0.0.1:{p}?transport=tcp', username: 'a', credential: 'b'}}]}});
    peer.createDataChannel('x');
    peer.createOffer().then(offer => peer.setLocalDescription(offer));
}} catch {{}}
try {{ new WebTransport('https://127.0.0.1:{p}/').ready.catch(() => 0); }} catch {{}}
window.open('http://127.0.0.1:{p}/never_popup');
</script>
<link rel="dns-prefetch" href="http://127.0.0.1:{p}/"><link rel="preconnect" href="{u}">
<iframe src="file:///etc/passwd"></iframe><iframe src="chrome://version"></iframe>
<img src="file:///etc/passwd"><iframe src="view-source:{u}"></iframe>"""
# Each form of an address that leads to this machine, to its network or to a metadata service.
HOSTS = (
    "127.0.0.1",
    "localhost",
    "[::1]",
    "0.0.0.0",
    "[::ffff:127.0.0.1]",
    "2130706433",
    "169.254.169.254",
    "[fd00:ec2::254]",
    "metadata.google.internal",
    "10.0.0.1",
    "loopback.example",
    "mixed.example",
)
# For each of those forms: the address decides, and not the way.
FEW_WAYS = ("img", "fetch", "iframe", "websocket", "redirect", "worker")
NAVIGATIONS = {
    "meta": '<meta http-equiv="refresh" content="0;url={u}">',
    "location": '<script>location.href = "{u}"</script>',
    "form": '<form method="post" action="{u}" id="g"></form><script>g.submit()</script>',
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
    connected: list[str] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)
    site_port: int = 0

    async def lookup(self, host: str) -> Sequence[str]:
        count = self.asked[host] = self.asked.get(host, 0) + 1
        if host == "loopback.example":
            return ["127.0.0.1"]
        if host == "mixed.example":
            return [PUBLIC, "127.0.0.1"]
        if host == "rebinding.example":
            return [PUBLIC] if count == 1 else ["127.0.0.1"]
        return [PUBLIC]

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
            head, body = "200 OK\r\nContent-Type: text/html", self.pages.get(request, b"")
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


async def test_every_way_reaches_loopback_where_it_is_allowed() -> None:
    """The control: the pages of the next test do what they say."""
    async with a_world(allow_private=True) as (world, pool):
        world.pages["/"] = _page_for("127.0.0.1", world.traps.port)

        await pool.render(a_rendering("http://site.example/", {"wait": "1500"}))

    reached = {path.rpartition("/")[2].rstrip("?") for path in world.traps.paths}
    # A headless browser shows no icon.
    assert WAYS.keys() - reached <= {"icon"}
    assert "never_popup" not in reached
    assert world.traps.datagram_count == 0


async def test_no_way_reaches_a_private_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # Later connections resolve their names again, so that the second answer is used.
    monkeypatch.setattr(resolver, "CACHE_TTL_S", 0.05)
    with_all_ways = ("127.0.0.1", "rebinding.example", _own_address())
    async with a_world(allow_private=False) as (world, pool):
        for host in with_all_ways:
            world.pages[f"/{host}"] = _page_for(host, world.traps.port)
            pdf = {} if host == "127.0.0.1" else {"response_type": "pdf"}
            await pool.render(a_rendering(f"http://site.example/{host}", {"wait": "500", **pdf}))
        forms = [_page_for(host, world.traps.port, FEW_WAYS) for host in HOSTS]
        world.pages["/forms"] = b"".join(forms)
        await pool.render(a_rendering("http://site.example/forms", {"wait": "500"}))

    assert len(with_all_ways) * len(WAYS) + len(HOSTS) * len(FEW_WAYS) >= 60
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
