"""Proxies of the gateway: which one a call goes through, and pages through real ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import trio

from conveyor.domain.submit.target import Target
from conveyor.gateway.proxies import (
    REFUSED_S,
    BadProxyFile,
    Proxy,
    ProxyLine,
    ProxyPool,
    Wishes,
    read_proxies,
)
from conveyor.http_client.pool import HttpPool
from tests.engines.http.test_proxy import TunnelProxy
from tests.gateway.conftest import needs_chromium, run_gateway
from tests.gateway.site import LocalSite


class FakeRoute:
    pool: HttpPool
    bad_until = 0.0

    async def dial(self, target: Target, partition: str) -> trio.SocketStream:
        raise NotImplementedError


def a_proxy(country: str | None = None, *, premium: bool = False) -> Proxy:
    return Proxy(country, premium, FakeRoute())


async def test_proxies_take_turns_for_each_host(autojump_clock: trio.testing.MockClock) -> None:
    proxies = [a_proxy(), a_proxy(), a_proxy(premium=True)]
    pool = ProxyPool(proxies)

    chosen = [pool.choose(host, Wishes()) for host in ("a", "a", "b", "a", "b")]

    assert [proxies.index(proxy) for proxy in chosen if proxy] == [0, 1, 0, 0, 1]


async def test_class_and_country_select(autojump_clock: trio.testing.MockClock) -> None:
    german, french = a_proxy("de", premium=True), a_proxy("fr", premium=True)
    pool = ProxyPool([a_proxy("us"), german, french])

    assert pool.choose("a", Wishes(is_premium=True, country="fr")) is french
    assert {pool.choose("a", Wishes(is_premium=True)) for _ in range(4)} == {german, french}
    assert not pool.has_any(Wishes(country="fr"))
    assert pool.choose("a", Wishes(country="de")) is None
    assert set(pool.honoured) == {
        "premium_proxy",
        *(f"proxy_country={country}" for country in ("us", "US", "de", "DE", "fr", "FR")),
    }


async def test_a_session_keeps_its_proxy(autojump_clock: trio.testing.MockClock) -> None:
    pool = ProxyPool([a_proxy() for _ in range(10)])

    first = {pool.choose(host, Wishes(session="7")) for host in ("a", "b", "a")}
    others = {pool.choose("a", Wishes(session=str(number))) for number in range(50)}

    assert len(first) == 1
    assert len(others) > 3


async def test_a_proxy_that_a_host_refused_is_left_out_for_that_host(
    autojump_clock: trio.testing.MockClock,
) -> None:
    refused, other = a_proxy(), a_proxy()
    pool = ProxyPool([refused, other])

    pool.record_refusal("a", refused)
    now = {pool.choose("a", Wishes()) for _ in range(4)}
    elsewhere = {pool.choose("b", Wishes()) for _ in range(4)}
    await trio.sleep(REFUSED_S)
    later = {pool.choose("a", Wishes()) for _ in range(4)}

    assert now == {other}
    assert elsewhere == later == {refused, other}


async def test_a_page_ends_what_a_host_had_against_a_proxy(
    autojump_clock: trio.testing.MockClock,
) -> None:
    proxies = [a_proxy(), a_proxy()]
    pool = ProxyPool(proxies)

    pool.record_refusal("a", proxies[0])
    pool.record_page("a", proxies[0])

    assert {pool.choose("a", Wishes()) for _ in range(4)} == set(proxies)


async def test_a_proxy_that_does_not_work_is_the_last_choice(
    autojump_clock: trio.testing.MockClock,
) -> None:
    broken, working = a_proxy(), a_proxy()
    broken.route.bad_until = trio.current_time() + 100  # type: ignore[misc]
    both, alone = ProxyPool([broken, working]), ProxyPool([broken])

    assert {both.choose("a", Wishes()) for _ in range(4)} == {working}
    assert alone.choose("a", Wishes()) is broken


def test_a_file_has_a_proxy_on_each_line(tmp_path: Path) -> None:
    path = tmp_path / "proxies.txt"
    path.write_text("# ours\nhttp://a:1\n\nsocks5://u:p@b:2 country=US class=premium # fast\n")

    assert read_proxies(path) == [
        ProxyLine("http://a:1"),
        ProxyLine("socks5://u:p@b:2", "us", True),
    ]


@pytest.mark.parametrize(
    "line", ["http://u:SECRET@a:1 country=usa", "http://u:SECRET@a:1 class=gold", "x SECRET", ""]
)
def test_a_bad_line_is_named_by_its_number_and_never_quoted(tmp_path: Path, line: str) -> None:
    path = tmp_path / "proxies.txt"
    path.write_text(line)

    with pytest.raises(BadProxyFile) as caught:
        read_proxies(path)

    assert "SECRET" not in str(caught.value)


@contextmanager
def running_proxy() -> Iterator[TunnelProxy]:
    """A proxy in a thread of its own, because the tests here are not asynchronous."""
    proxy = TunnelProxy()
    started, scopes = threading.Event(), []

    async def converse(stream: trio.SocketStream) -> None:
        # A browser closes connections that it has opened in advance.
        with suppress(OSError, IndexError, ValueError):
            try:
                await proxy.serve(stream)
            except* (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

    async def serve() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy.port = listener.socket.getsockname()[1]
        with trio.CancelScope() as scope:
            scopes.append((trio.lowlevel.current_trio_token(), scope))
            started.set()
            await trio.serve_listeners(converse, [listener])

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    started.wait()
    try:
        yield proxy
    finally:
        token, scope = scopes[0]
        token.run_sync_soon(scope.cancel)
        thread.join()


@pytest.mark.slow
@needs_chromium
def test_pages_go_through_the_proxies_that_their_parameters_select(
    site: LocalSite, tmp_path: Path
) -> None:
    # The proxies connect to this machine, whatever the name.
    host = f"shop.test:{site.url.rpartition(':')[2]}"
    url = f"http://{host}/"
    with running_proxy() as standard, running_proxy() as premium:
        path = tmp_path / "proxies.txt"
        path.write_text(
            f"http://127.0.0.1:1\nhttp://anna:SECRET@127.0.0.1:{standard.port}\n"
            f"socks5://127.0.0.1:{premium.port} country=de class=premium\n"
        )
        with run_gateway(CONVEYOR_GATEWAY_PROXIES=str(path)) as gateway:
            plain = gateway.get(url)
            by_standard, by_premium = list(standard.asked), list(premium.asked)
            rendered = gateway.render(url, premium_proxy="true", proxy_country="DE")
            wrong = [
                gateway.get(url, proxy_country="de"),
                gateway.get(url, premium_proxy="true", proxy_country="fr"),
            ]
            forbidden = gateway.render("http://169.254.169.254/", premium_proxy="true")

    assert plain.status_code == rendered.status_code == 200
    assert (by_standard, by_premium) == ([host], [])
    assert host in premium.asked
    assert [answer.json()["code"] for answer in wrong] == ["REQS004", "REQS004"]
    assert forbidden.json()["code"] == "REQS001"
    assert not any("169.254" in authority for authority in premium.asked)


@pytest.mark.slow
def test_without_proxies_their_parameters_are_refused(site: LocalSite) -> None:
    with run_gateway() as gateway:
        answers = [
            gateway.get(f"{site.url}/", premium_proxy="true"),
            gateway.get(f"{site.url}/", proxy_country="de"),
        ]

    assert [answer.json()["code"] for answer in answers] == ["REQS004", "REQS004"]
    assert site.requests == []
