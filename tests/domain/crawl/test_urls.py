"""The normal form of URLs, and the site of a crawl."""

from __future__ import annotations

import pytest

from conveyor.domain.crawl.urls import LinkFilter, normalize, origin_of, resolve, site_of
from conveyor.domain.submit.target import Target, parse_url


@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("HTTP://Example.COM:80", "http://example.com/"),
        ("https://example.com.:443/a#part", "https://example.com/a"),
        ("http://example.com:8080/", "http://example.com:8080/"),
        ("http://example.com/a/./b/../c", "http://example.com/a/c"),
        ("http://example.com/%7euser/%c3%a9%2F", "http://example.com/~user/%C3%A9%2F"),
        ("http://example.com/é", "http://example.com/%C3%A9"),
        ("http://example.com/?", "http://example.com/"),
        ("http://example.com/?b=2&a=1&&", "http://example.com/?a=1&b=2"),
        ("http://example.com/?utm_source=x&q=1&fbclid=y", "http://example.com/?q=1"),
        ("http://example.com/?PHPSESSID=1", "http://example.com/"),
        ("http://example.com/a;jsessionid=1F?x=1", "http://example.com/a?x=1"),
        ("http://example.com/sid/?side=1", "http://example.com/sid/?side=1"),
        ("ftp://example.com/", None),
        ("http://user@example.com/", None),
        ("http://example.com/" + "a" * 2048, None),
    ],
)
def test_spellings_of_one_page_have_one_normal_form(url: str, form: str | None) -> None:
    assert normalize(url) == form
    assert form is None or normalize(form) == form


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("example.com", "example.com"),
        ("www.shop.example.com", "example.com"),
        ("www.example.co.uk", "example.co.uk"),
        ("example.co.uk", "example.co.uk"),
        ("a.b.example.de", "example.de"),
        ("localhost", "localhost"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
    ],
)
def test_the_site_of_a_host_is_its_registrable_domain(host: str, site: str) -> None:
    assert site_of(host) == site


def test_a_filter_follows_pages_of_the_site_and_keeps_those_that_match() -> None:
    link_filter = LinkFilter("example.com", include=("/product/",), exclude=("/cart",))
    urls = [
        "https://www.example.com/product/1",
        "https://www.example.com/list",
        "https://example.com/product/cart",
        "https://example.com/product/1.JPG",
        "https://elsewhere.example/product/1",
    ]

    assert [url for url in urls if link_filter.follows(url)] == urls[:2]
    assert [url for url in urls if link_filter.keeps(url)] == [urls[0], urls[3], urls[4]]


def test_a_link_is_resolved_on_its_page_or_left_out() -> None:
    base = parse_url("http://example.com/a/b?q")
    assert isinstance(base, Target)
    links = ["c", "../d", "//other.example/x", "?r", " /e f ", "mailto:x@y", "http://", "#top"]

    targets = [resolve(base, link) for link in links]

    assert [None if target is None else target.url for target in targets] == [
        "http://example.com/a/c",
        "http://example.com/d",
        "http://other.example/x",
        "http://example.com/a/b?r",
        "http://example.com/e%20f",
        None,
        None,
        "http://example.com/a/b?q",
    ]


def test_the_origin_has_the_port() -> None:
    assert origin_of("http://example.com:8080/a/b") == "http://example.com:8080"
