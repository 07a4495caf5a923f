"""Pages through local HTTP and SOCKS5 proxies, and proxies that do not work."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from conveyor.bootstrap.scrape import open_scrape_gateway
from conveyor.cli.demo import running_site
from conveyor.cli.scrape.fetcher import robots_request
from conveyor.cli.scrape.options import ScrapeOptions
from conveyor.config import Settings
from conveyor.engines.http.proxy import BadProxy, Proxy, parse_proxy
from conveyor.ports.gateway import NotScraped, Outcome, Scraped
from tests.http_client.test_stream import Certificate

DEAD = "http://127.0.0.1:1"


class TunnelProxy:
    """Opens a tunnel to the requested port on this machine, whatever the name."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.port = 0

    async def serve(self, stream: trio.abc.Stream) -> None:
        first = await stream.receive_some(1)
        far = await (self._socks5(stream) if first == b"\x05" else self._connect(stream))
        async with stream, far, trio.open_nursery() as nursery:
            nursery.start_soon(_copy, stream, far, nursery.cancel_scope)
            nursery.start_soon(_copy, far, stream, nursery.cancel_scope)

    async def _connect(self, stream: trio.abc.Stream) -> trio.SocketStream:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await stream.receive_some(1024)
        authority = head.split(b" ")[1].decode()
        self.asked.append(authority)
        far = await trio.open_tcp_stream("127.0.0.1", int(authority.rpartition(":")[2]))
        await stream.send_all(b"HTTP/1.1 200 OK\r\n\r\n")
        return far

    async def _socks5(self, stream: trio.abc.Stream) -> trio.SocketStream:
        await stream.receive_some(16)
        await stream.send_all(b"\x05\x00")
        request = await stream.receive_some(300)
        name = request[5 : 5 + request[4]].decode()
        port = int.from_bytes(request[5 + request[4] :])
        self.asked.append(f"{name}:{port}")
        far = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(b"\x05\x00\x00\x01" + bytes(6))
        return far


async def _copy(source: trio.abc.Stream, to: trio.abc.Stream, scope: trio.CancelScope) -> None:
    try:
        while data := await source.receive_some():
            await to.send_all(data)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    scope.cancel()


async def _serve_tls(proxy: TunnelProxy, tls: ssl.SSLContext, stream: trio.SocketStream) -> None:
    secured = trio.SSLStream(stream, tls, server_side=True, https_compatible=True)
    # A client that does not trust the certificate closes the connection.
    with suppress(trio.BrokenResourceError):
        await proxy.serve(secured)


@asynccontextmanager
async def running_proxy(
    tls: ssl.SSLContext | None = None,
) -> AsyncGenerator[TunnelProxy, None]:
    proxy = TunnelProxy()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    proxy.port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        serve = proxy.serve if tls is None else partial(_serve_tls, proxy, tls)
        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield proxy
        nursery.cancel_scope.cancel()


async def fetch(
    url: str, *proxies: str, times: int = 1, is_insecure: bool = False
) -> list[Outcome]:
    settings = Settings(allow_private_targets=True)
    request = robots_request(url, ScrapeOptions())
    with open_scrape_gateway(
        settings,
        now=lambda: 0.0,
        slots=2,
        timeout_s=10.0,
        proxies=proxies,
        is_insecure=is_insecure,
    ) as gateway:
        return [await gateway.scrape(request) for _ in range(times)]


@pytest.mark.parametrize("scheme", ["http", "socks5"])
async def test_the_proxy_gets_the_host_name_and_returns_the_page(scheme: str) -> None:
    async with running_site() as site, running_proxy() as proxy:
        url = f"http://nowhere.example:{site.port}/page/1"

        (page,) = await fetch(url, f"{scheme}://127.0.0.1:{proxy.port}")

    assert isinstance(page, Scraped)
    assert b"Page 1" in page.body
    assert proxy.asked == [f"nowhere.example:{site.port}"]


@pytest.mark.parametrize("is_insecure", [False, True])
async def test_an_https_proxy_needs_a_trusted_certificate_unless_checks_are_off(
    tmp_path: Path, is_insecure: bool
) -> None:
    certificate = Certificate(tmp_path)
    async with running_site() as site, running_proxy(certificate.server) as proxy:
        url = f"http://nowhere.example:{site.port}/page/1"
        (page,) = await fetch(url, f"https://127.0.0.1:{proxy.port}", is_insecure=is_insecure)

    if is_insecure:
        assert isinstance(page, Scraped)
        assert b"Page 1" in page.body
    else:
        assert isinstance(page, NotScraped)
        assert page.problem.code == "proxy_failed"
    assert len(proxy.asked) == is_insecure


async def test_an_https_proxy_with_a_trusted_certificate_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = Certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "site.pem"))
    async with running_site() as site, running_proxy(certificate.server) as proxy:
        url = f"http://nowhere.example:{site.port}/page/1"
        (page,) = await fetch(url, f"https://127.0.0.1:{proxy.port}")

    assert isinstance(page, Scraped)
    assert proxy.asked == [f"nowhere.example:{site.port}"]


async def test_an_unreachable_proxy_is_skipped_and_fails_no_page() -> None:
    async with running_site() as site, running_proxy() as proxy:
        url = f"http://nowhere.example:{site.port}/page/1"

        pages = await fetch(url, DEAD, f"http://127.0.0.1:{proxy.port}", times=3)

    assert [type(page) for page in pages] == [Scraped] * 3


async def test_a_page_without_a_working_proxy_fails_with_that_reason() -> None:
    (failure,) = await fetch("http://nowhere.example/", DEAD)

    assert isinstance(failure, NotScraped)
    assert (failure.problem.code, failure.retryable) == ("proxy_failed", True)
    assert failure.problem.detail == "the proxy http://127.0.0.1:1 cannot be reached"


def test_proxies_are_named_by_url() -> None:
    proxy = parse_proxy("socks5://me:p%40ss@proxy.example")

    assert proxy == Proxy("socks5", "proxy.example", 1080, "me", "p@ss")
    assert proxy.name == "socks5://proxy.example:1080"
    for text in ("ftp://a.example:1", "http://", "http://a.example/path"):
        with pytest.raises(BadProxy):
            parse_proxy(text)
