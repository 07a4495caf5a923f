"""Cookies within one chain of redirects (docs/engines.md, Gateways)."""

from __future__ import annotations

import pytest

from conveyor.http_client.cookies import COOKIE_BYTES_MAX, COOKIES_MAX, Cookies
from conveyor.http_client.exchange import Response
from conveyor.http_client.pool import HttpPool, fetch_following
from tests.http_client.conftest import get, target
from tests.http_client.server import Peer, raw_server, reply

SHOP = "https://shop.example.com/cart/items?page=2"


def cookies_of(*values: bytes, url: str = SHOP, date: bytes | None = None) -> Cookies:
    cookies = Cookies()
    dates = () if date is None else ((b"date", date),)
    headers = (*dates, *((b"set-cookie", value) for value in values))
    cookies.remember(target(url), Response(302, headers, b""))
    return cookies


def sent(cookies: Cookies, url: str = SHOP, stated: str | None = None) -> str | None:
    headers = (("Accept", "*/*"), *(() if stated is None else (("cookie", stated),)))
    added = cookies.add_to(headers, target(url))
    assert ("Accept", "*/*") in added
    values = [value for name, value in added if name.lower() == "cookie"]
    assert len(values) <= 1
    return values[0] if values else None


async def test_a_site_that_asks_for_its_cookie_gets_it(pool: HttpPool) -> None:
    async def gate(peer: Peer) -> None:
        while request := await peer.request():
            if b"Cookie: seen=1\r\n" in request:
                await peer.send(reply(b"page"))
            else:
                headers = {"Location": "/", "Set-Cookie": "seen=1; Path=/; HttpOnly"}
                await peer.send(reply(b"", "302 Found", headers))

    async with raw_server(gate) as server:
        request = get(server.url(), wants_body=lambda status: status == 200)
        first = await fetch_following(pool, request)
        second = await fetch_following(pool, request)

    assert first.response.body == second.response.body == b"page"
    # Nothing is kept after the fetch.
    assert [b"Cookie" in request for request in server.requests] == [False, True, False, True]


@pytest.mark.parametrize(
    ("header", "url", "expected"),
    [
        (b"a=1", "https://shop.example.com/cart/", "a=1"),
        (b"a=1", "https://shop.example.com/cart", "a=1"),
        (b"a=1", "https://shop.example.com/cartoon", None),
        (b"a=1", "https://shop.example.com/", None),
        (b"a=1; Path=/", "https://shop.example.com/", "a=1"),
        (b"a=1; Path=/", "http://shop.example.com/", "a=1"),
        (b"a=1; Path=/", "https://shop.example.com:8443/", "a=1"),
        (b"a=1; Path=relative", "https://shop.example.com/cart/x", "a=1"),
        (b"a=1; path=/cart/items", "https://shop.example.com/cart/items/3", "a=1"),
        (b"a=1; Path=/; Secure", "https://shop.example.com/", "a=1"),
        (b"a=1; Path=/; Secure", "http://shop.example.com/", None),
        (b"a=1; Path=/", "https://www.example.com/", None),
        (b"a=1; Path=/", "https://deep.shop.example.com/", None),
        (b"a=1; Path=/; Domain=.Example.com", "https://www.example.com/", "a=1"),
        (b"a=1; Path=/; Domain=example.com", "https://notexample.com/", None),
        (b"a=b=c; Path=/", "https://shop.example.com/", "a=b=c"),
        (b'a="x y"; Path=/', "https://shop.example.com/", 'a="x y"'),
        (b"a=; Path=/", "https://shop.example.com/", "a="),
        ("a=gr\u00fcn; Path=/".encode(), "https://shop.example.com/", "a=gr\u00fcn"),
    ],
)
def test_a_cookie_goes_where_it_belongs(header: bytes, url: str, expected: str | None) -> None:
    assert sent(cookies_of(header), url) == expected


@pytest.mark.parametrize(
    "header",
    [
        b"a=1; Domain=other.com",
        b"a=1; Domain=com",
        b"a=1; Domain=www.example.com",
        b"a=1; Domain=ample.com",
        b"a=1\r\nX-Injected: 1",
        b"a=1\x00",
        b"a=1; Path=/cart\n",
        b"a\t=1",
        b"a=\xff",
        b"novalue",
        b"=1",
        b"__Secure-a=1",
        b"__Host-a=1; Secure; Path=/cart",
        b"__Host-a=1; Secure; Path=/; Domain=example.com",
    ],
)
def test_a_cookie_that_a_site_may_not_set_is_ignored(header: bytes) -> None:
    cookies = cookies_of(header)

    for url in (SHOP, "https://other.com/", "https://example.com/", "https://a.com/"):
        assert sent(cookies, url) is None


def test_no_cookie_is_set_for_a_public_suffix_or_from_http_for_https() -> None:
    suffix = cookies_of(b"a=1; Domain=co.uk; Path=/", url="https://shop.co.uk/")
    assert sent(suffix, "https://bank.co.uk/") is None

    plain = "http://shop.example.com/"
    assert sent(cookies_of(b"a=1; Secure; Path=/", url=plain), "https://shop.example.com/") is None

    secure = cookies_of(b"a=1; Secure; Path=/")
    forged = Response(302, ((b"set-cookie", b"a=2; Path=/; Domain=example.com"),), b"")
    secure.remember(target(plain), forged)
    assert sent(secure, "https://shop.example.com/") == "a=1"


@pytest.mark.parametrize(
    "ending",
    [
        b"Max-Age=0",
        b"Max-Age=-1; Expires=Fri, 01 Jan 2100 00:00:00 GMT",
        b"Expires=Thu, 01-Jan-1970 00:00:01 GMT",
        b"Expires=Wed, 18 Nov 2026 00:00:00 GMT",
    ],
)
def test_a_cookie_that_ended_is_removed(ending: bytes) -> None:
    cookies = cookies_of(b"a=1", b"b=2", b"a=; " + ending, date=b"Thu, 19 Nov 2026 00:00:00 GMT")

    assert sent(cookies) == "b=2"
    assert sent(cookies, stated="a=0; c=3") == "c=3; b=2"
    assert (
        sent(cookies_of(b"a=; " + ending, date=b"Thu, 19 Nov 2026 00:00:00 GMT"), stated="a=0")
        is None
    )


@pytest.mark.parametrize(
    "lasting",
    [
        b"Max-Age=60",
        b"Max-Age=soon",
        b"Expires=never",
        b"Expires=Fri, 01 Jan 2100 00:00:00 GMT",
        b"Expires=Thu, 01 Jan 1970 00:00:00 GMT; Max-Age=60",
    ],
)
def test_a_cookie_that_has_not_ended_is_sent(lasting: bytes) -> None:
    assert sent(cookies_of(b"a=1; " + lasting)) == "a=1"


def test_cookies_of_the_chain_follow_those_of_the_caller_and_replace_them() -> None:
    cookies = cookies_of(b"a=1", b"b=2; Path=/", b"a=3", b"b=4; Path=/cart/items")

    assert sent(cookies, stated="x=9; a=0") == "x=9; b=4; a=3; b=2"
    assert sent(cookies, "https://www.example.com/", stated="x=9; a=0") == "x=9; a=0"


def test_cookies_are_bounded_in_number_and_size() -> None:
    many = cookies_of(*(b"n%d=1" % number for number in range(COOKIES_MAX + 5)))
    large = cookies_of(*(b"n%d=" % number + b"x" * 1000 for number in range(20)), b"last=1")

    assert (sent(many) or "").count("=") == COOKIES_MAX
    assert 7 * 1000 < len(sent(large) or "") < COOKIE_BYTES_MAX + 200
    assert (sent(large) or "").endswith("last=1")
